import json
import os
import re
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from builders import byte_tokenizer
from burnish import cli, machine
from burnish.errors import UserError

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
RECIPE = """\
name: tiny
stages:
  - name: sft
    method: {name: sft}
    model: MODEL
    data: {train: chat.jsonl}
  - name: make
    run: burnish.recipes.tiny:prepare
  - name: after
    method: {name: sft}
    model: {stage: sft}
    data: {train: {stage: make, file: more.jsonl}}
"""


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    special = ("<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>")
    fast = byte_tokenizer(TEMPLATE, special=special, eos_token="<|end|>", pad_token="<|pad|>")
    folder = tmp_path_factory.mktemp("model")
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        eos_token_id=0,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny.yaml").write_text(RECIPE.replace("MODEL", str(model)))
    rows = [{"prompt": "ab", "completion": "cd"}, {"prompt": "a", "completion": "bcdefgh\n"}]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def call(*arguments):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], terminal_width=200)


def printed(code, folder=None):
    """What a new Python process prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout.strip()


def test_help_needs_no_torch():
    code = "import sys, burnish.cli; print({'torch', 'transformers', 'datasets', 'yaml'} & set(sys.modules))"
    assert printed(code) == "set()"


def test_run_imports_only_what_it_needs():
    """Imports are most of the time before the first step of a small run."""
    code = (
        "import gc, sys; from burnish import cli\n"
        "with cli._without_collection():\n"
        "    import burnish.config.run, burnish.report.page\n"
        "assert gc.isenabled() and gc.get_freeze_count()\n"
        "print({name.partition('.')[0] for name in sys.modules} & "
        "{'bitsandbytes', 'fastapi', 'matplotlib', 'ray', 'scipy', 'sklearn', 'starlette', 'torchvision', 'uvicorn'})"
    )
    assert printed(code) == "set()"


def test_the_process_for_templates_starts_before_the_imports(tmp_path):
    code = (
        "import sys; from burnish import cli; from burnish.render import worker\n"
        "def start():\n"
        "    print({'torch', 'transformers'} & set(sys.modules))\n"
        "    sys.exit()\n"
        "worker.start = start\n"
        "cli.app(['run', 'tiny'])\n"
    )
    assert printed(code, tmp_path) == "set()"


def test_help_is_fast():
    def seconds():
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        return spent.ru_utime + spent.ru_stime

    before = seconds()
    subprocess.run([sys.executable, "-m", "burnish", "--help"], capture_output=True, check=True)
    assert seconds() - before < 1.5  # seconds of a processor: about 0.3 on a quiet one, where torch alone takes 1


def test_help_names_every_command():
    shown = call("--help").output
    for name in ("run", "inspect", "generate", "report", "recipes", "schema", "doctor"):
        assert re.search(rf"\b{name}\b", shown)


def test_wrong_usage_exits_with_2():
    assert call("rnu").exit_code == 2
    assert call("inspect", "x.yaml", "--row", "-1").exit_code == 2
    assert call("generate", "somewhere").exit_code == 2


@pytest.fixture
def pipeline(monkeypatch):
    fake = SimpleNamespace(calls=[])
    monkeypatch.setitem(sys.modules, "burnish.config.run", fake)
    monkeypatch.setattr("burnish.config.run", fake, raising=False)
    return fake


def test_run_passes_the_recipe_to_the_pipeline(here, pipeline):
    def run(recipe, *, fresh, start, processes):
        pipeline.calls.append((recipe.name, recipe.seed, fresh, start))
        recipe.folder.mkdir(parents=True, exist_ok=True)
        stage = {"name": "reward", "results": {"before": {"eval_accuracy": 0.5}, "after": {"eval_accuracy": 0.82}}}
        (recipe.folder / "manifest.json").write_text(json.dumps({"stages": [stage]}))
        return recipe.folder

    pipeline.run = run
    assert call("run", "tiny.yaml", "seed=3", "--fresh").exit_code == 0
    result = call("run", "tiny.yaml", "--from", "after")
    assert pipeline.calls == [("tiny", 3, True, None), ("tiny", 0, False, "after")]
    assert "runs/tiny" in result.stdout
    assert "50.0 %" in result.stdout and "82.0 %" in result.stdout


@pytest.mark.parametrize("command", [["eval", "base", "data.eval=chat.jsonl"], ["recipes"]])
def test_commands_other_than_run_refuse_several_processes(command, here, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = call(*command)
    assert result.exit_code == 2
    assert "WORLD_SIZE=2: torchrun or accelerate launch started 2 processes" in result.stderr
    assert f"start burnish {command[0]} without a launcher" in result.stderr
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert call("recipes").exit_code == 0


def test_run_starts_the_processes_that_the_recipe_sets(here, monkeypatch):
    from burnish.config import launch

    started = []
    monkeypatch.setattr(launch, "launch", lambda settings, *rest: started.append((settings.timeout, *rest)) or 3)
    result = call("run", "tiny.yaml", "parallel={processes: 2, timeout: 60}", "--from", "after")
    assert result.exit_code == 3  # that of the processes
    arguments = ["run", "--from", "after", "--", "tiny.yaml", "parallel={processes: 2, timeout: 60}"]
    assert started == [(60.0, 2, arguments)]


def test_one_process_uses_one_of_several_gpus_and_says_so(here, pipeline, monkeypatch):
    seen = []

    def run(recipe, **_):
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        raise UserError("enough")

    pipeline.run = run
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    result = call("run", "tiny.yaml")
    assert seen == ["3"]
    assert "2 GPUs are visible, and this run uses one of them (3)" in result.stderr
    assert "parallel.processes=2" in result.stderr


def test_run_trains_a_model_that_generates(here):
    done = call("run", "tiny.yaml", "stages.after.data.train=chat.jsonl", "stages.after.trainer.max_steps=1")
    assert done.exit_code == 0, done.output
    assert (here / "runs/tiny/report.html").is_file()
    assert call("report", "runs/tiny").exit_code == 0
    assert call("generate", "runs/tiny/after", "ab", "--max-new-tokens", "2").exit_code == 0
    other = call("run", "tiny.yaml", "stages.after.data.train=chat.jsonl", "seed=1")
    assert other.exit_code == 2
    assert "--fresh" in other.stderr


@pytest.mark.parametrize(("raised", "code", "text"), [
    (UserError("no [bold] model: x"), 2, "error: no [bold] model: x\n"),
    (KeyboardInterrupt(), 130, "stopped; run the same command again to resume\n"),
])  # fmt: skip
def test_mistakes_and_interrupts_have_one_message_and_an_exit_code(here, pipeline, raised, code, text):
    def run(recipe, *, fresh, start, processes):
        raise raised

    pipeline.run = run
    result = call("run", "tiny.yaml")
    assert (result.exit_code, result.stderr) == (code, text)


def test_an_error_in_burnish_shows_its_traceback_and_exits_with_1(here, pipeline):
    def run(recipe, *, fresh, start, processes):
        raise ZeroDivisionError("ours")

    pipeline.run = run
    result = call("run", "tiny.yaml")
    assert result.exit_code == 1
    assert isinstance(result.exception, ZeroDivisionError)


REWARDS = """\
import math


def brevity(answers):
    return list(map(worth, answers))


def worth(answer):
    return math.log(0 * len(answer.tokens))


def leave(answers):
    raise SystemExit(0)


def stop(answers):
    raise KeyboardInterrupt


def rows(folder, seed):
    return {}["rows"]
"""


def test_an_error_in_the_users_code_shows_only_the_users_frames_and_exits_with_1(here, model):
    (here / "my_rewards.py").write_text(REWARDS)
    (here / "broken.py").write_text("raise OSError('no network')\ndef brevity(answers):\n    pass\n")
    (here / "prompts.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "c"}\n')
    (here / "run.yaml").write_text("name: run\nstages: [{name: make, run: 'my_rewards.py:rows'}]\n")

    def evaluated(function):
        return call("eval", model, "data.eval=prompts.jsonl", f"reward=[{{function: '{function}'}}]")

    failed = evaluated("my_rewards.py:brevity")
    assert (failed.exit_code, failed.stdout) == (1, "")
    assert [line for line in failed.stderr.splitlines() if line.strip(" ^~")] == [
        "Traceback (most recent call last):",
        f'  File "{here}/my_rewards.py", line 5, in brevity',
        "    return list(map(worth, answers))",
        f'  File "{here}/my_rewards.py", line 9, in worth',
        "    return math.log(0 * len(answer.tokens))",
        "ValueError: math domain error",
        "error: reward brevity (my_rewards.py:brevity) raised ValueError on a batch of 2 trajectories "
        "(prompts.jsonl:1 ... prompts.jsonl:2): math domain error",
    ]
    for failed, message in [
        (evaluated("my_rewards.py:leave"), "reward leave (my_rewards.py:leave) raised SystemExit on a batch of 2"),
        (evaluated("broken.py:brevity"), "broken.py raised OSError when it was imported: no network"),
        (call("run", "run.yaml"), "stages.make.run: my_rewards.py:rows raised KeyError: 'rows'"),
    ]:
        assert failed.exit_code == 1 and isinstance(failed.exception, SystemExit)
        *shown, last = failed.stderr.splitlines()
        assert last.startswith("error: ") and message in last
        files = {line.split('"')[1] for line in shown if line.startswith("  File")}
        assert len(files) == 1 and str(here) in files.pop()
    stopped = evaluated("my_rewards.py:stop")
    assert (stopped.exit_code, stopped.stderr) == (130, "stopped; run the same command again to resume\n")


def test_the_environment_is_set_unless_the_user_did(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    call("recipes")
    assert cli.os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert cli.os.environ["GOMP_SPINCOUNT"] == "10000"
    assert cli.os.environ["TOKENIZERS_PARALLELISM"] == "false"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    call("recipes")
    assert cli.os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    assert "GOMP_SPINCOUNT" not in cli.os.environ


def test_recipes_lists_names_and_descriptions(tmp_path, monkeypatch):
    (tmp_path / "quick.yaml").write_text("# All of it in a minute.\nname: quick\n")
    monkeypatch.setattr("burnish.config.loading.RECIPES", tmp_path)
    assert re.search(r"quick +All of it in a minute\.", call("recipes").stdout)


def test_schema_is_json():
    assert "$defs" in json.loads(call("schema").stdout)


def test_doctor_describes_the_machine():
    shown = call("doctor").stdout
    for name in (
        "python",
        "torch",
        "cores",
        "threads",
        "memory",
        "GPU",
        "bfloat16",
        "GFLOP/s",
        "bitsandbytes",
        "sandbox: ",
    ):
        assert name in shown


@pytest.mark.parametrize(("rate", "advised"), [(1.0, True), (0.7, True), (4.0, False)])
def test_doctor_judges_bfloat16_by_its_measured_speed(rate, advised, monkeypatch):
    monkeypatch.setattr("burnish.machine.matmul_rate", lambda dtype: 1e11 * (rate if dtype == torch.bfloat16 else 1))
    facts = machine.examine()
    assert facts["bfloat16"] == f"{rate:.2f} times as fast as float32"
    assert any("keep float32" in line for line in machine.advice(facts)) == advised
    faster = machine.advice(facts | {"GPU": "none"})
    assert any("precision: bf16 makes training and sampling faster" in line for line in faster) != advised
    assert not any("faster: matrix" in line for line in machine.advice(facts | {"GPU": "1 x H100, 80 GiB"}))


def test_report_needs_the_folder_of_a_run(tmp_path):
    result = call("report", tmp_path)
    assert result.exit_code == 2
    assert "manifest.json is missing" in result.stderr


def test_inspect_marks_learned_tokens(here):
    result = call("inspect", "tiny.yaml")
    assert result.exit_code == 0, result.output
    assert "<|user|>ab<|end|><|assistant|>[[cd<|end|>]]" in result.stdout
    # Row 1: user, a, end, assistant, 8 characters, end; row 0: user, a, b, end, assistant, c, d, end.
    assert re.search(r"rows +2 *\n", result.stdout)
    assert re.search(r"tokens +21 *\n", result.stdout)
    assert re.search(r"learned +12 tokens \(57\.1%\)", result.stdout)
    assert re.search(r"99 100 +8, 8, 13, 13, 13 *\n", result.stdout)
    assert "waits for runs/tiny/make/data/more.jsonl" in result.stdout
    assert re.search(r"total +0\.5\d GiB\n +fits", result.stdout)


def test_inspect_shows_comparisons(here):
    (here / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "cd"}\n')
    shown = call(
        "inspect", "tiny.yaml", "stages.after.method={name: reward}", "stages.after.data.train=pairs.jsonl"
    ).stdout
    assert re.search(r"learned +1 comparisons", shown)
    assert "row 0 (pairs.jsonl:1, chosen): 6 tokens\n<|user|>a<|end|><|assistant|>b<|end|>\n" in shown
    assert "row 0 (pairs.jsonl:1, rejected): 7 tokens\n<|user|>a<|end|><|assistant|>cd<|end|>\n" in shown


def test_inspect_shows_one_row(here):
    shown = call("inspect", "tiny.yaml", "--row", "1").stdout
    assert "row 1 (chat.jsonl:2): 13 tokens, 9 learned" in shown
    assert "row 0" not in shown
    assert "there are only 2 rows" in call("inspect", "tiny.yaml", "--row", "2").stderr


def test_inspect_counts_and_lists_truncated_and_skipped_rows(here):
    with (here / "chat.jsonl").open("a") as file:
        file.write('{"messages": []}\n')
    shown = call(
        "inspect",
        "tiny.yaml",
        "stages.sft.data.max_length=10",
        "stages.sft.data.too_long=truncate_right",
        "stages.sft.data.on_bad_row=skip",
    ).stdout
    assert re.search(r"shortened +1 *\n", shown)
    assert re.search(r"skipped +1 x ", shown)
    assert "shortened: chat.jsonl:2" in shown
    assert "skipped: chat.jsonl:3" in shown


def test_inspect_looks_through_a_stage_that_has_not_run(here):
    shown = call("inspect", "tiny.yaml", "stages.after.data.train=chat.jsonl").stdout
    assert shown.count("<|user|>ab<|end|><|assistant|>[[cd<|end|>]]") == 2


def test_generate_prints_and_writes(here, model):
    printed = call("generate", model, "ab", "--temperature", "0", "--max-new-tokens", "4")
    assert printed.exit_code == 0, printed.output
    (here / "prompts.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "c"}\n')
    written = call(
        "generate",
        model,
        "--input",
        "prompts.jsonl",
        "--output",
        "out/done.jsonl",
        "--samples",
        "2",
        "--max-new-tokens",
        "4",
        "--seed",
        "7",
    )
    assert written.exit_code == 0, written.output
    rows = [json.loads(line) for line in (here / "out/done.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["source"]) for row in rows] == [
        ("ab", "prompts.jsonl:1"),
        ("ab", "prompts.jsonl:1"),
        ("c", "prompts.jsonl:2"),
        ("c", "prompts.jsonl:2"),
    ]
    again = call(
        "generate",
        model,
        "--input",
        "prompts.jsonl",
        "--output",
        "again.jsonl",
        "--samples",
        "2",
        "--max-new-tokens",
        "4",
        "--seed",
        "7",
    )
    assert again.exit_code == 0
    assert (here / "again.jsonl").read_text() == (here / "out/done.jsonl").read_text()


def test_generate_checks_its_options(here, model):
    result = call("generate", model, "ab", "--top-p", "0")
    assert result.exit_code == 2
    assert result.stderr == "error: command line: top_p: expected more than 0, got 0.0\n"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (MemoryError(), "out of memory: no more memory: close other programs, or use a smaller model"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "can't allocate memory: 9 bytes: close"),
        (PermissionError(13, "Permission denied", "a.jsonl"), "error: a.jsonl: permission denied"),
        (OSError(28, "No space left on device", "a.jsonl"), "a.jsonl: cannot be written: the disk is full"),
    ],
)
def test_a_machine_that_is_at_its_limits_is_explained(
    fault: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise fault

    monkeypatch.setattr("burnish.config.shipped", fail)
    result = CliRunner().invoke(cli.app, ["recipes"])
    assert result.exit_code == 2 and said in result.stderr


def test_a_fault_of_burnish_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for fault in (RuntimeError("bug"), FileNotFoundError(2, "No such file or directory", "a"), OSError("bug")):

        def fail(fault: Exception = fault) -> None:
            raise fault

        monkeypatch.setattr("burnish.config.shipped", fail)
        result = CliRunner().invoke(cli.app, ["recipes"])
        assert result.exit_code == 1 and result.exception is fault
