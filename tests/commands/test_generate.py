"""Completions of files: columns, seeds, scores, resuming, and conflicting options."""

from __future__ import annotations

import datetime
import io
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from typer.testing import CliRunner

from burnish import cli
from burnish.commands import generate as inference
from burnish.commands.generate import renamed
from burnish.errors import UserError
from burnish.math.tensors import token_logprobs
from burnish.models import loading
from burnish.models.adapters import add_adapter
from burnish.models.settings import AdapterConfig

BEAMS = ["--beams", "4", "--sample", "--top-k", "10", "--temperature", "0.6", "--return", "2"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n}+{n}", "answer": 2 * n, "completion": "old"} for n in range(5)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def generate(*arguments: Any) -> Any:
    return CliRunner().invoke(cli.app, ["generate", *map(str, arguments), "--max-new-tokens", "6"])


def written(*arguments: Any, output: str = "out.jsonl") -> list[dict[str, Any]]:
    result = generate(*arguments, "--output", output)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in Path(output).read_text("utf-8").splitlines()]


def test_other_columns_are_kept(here: Path, tiny_folder: Path) -> None:
    rows = written(tiny_folder, "--input", "prompts.jsonl", "--temperature", "0")
    assert [row["answer"] for row in rows] == [0, 2, 4, 6, 8]
    assert {row["completion_original"] for row in rows} == {"old"}
    assert [row["source"] for row in rows] == [f"prompts.jsonl:{n}" for n in range(1, 6)]
    assert list(rows[0]) == ["prompt", "answer", "completion_original", "completion", "finish_reason", "source"]


def test_columns_that_json_cannot_hold_are_refused_before_the_model_is_loaded(here: Path) -> None:
    (here / "nan.jsonl").write_text('{"prompt": "a", "score_of": 1}\n{"prompt": "b", "score_of": NaN}\n')
    table = pyarrow.table({"prompt": ["a"], "day": [datetime.date(2024, 1, 1)]})
    pyarrow.parquet.write_table(table, here / "days.parquet")
    for source, said in (("nan.jsonl", r"nan\.jsonl:2: score_of: .* float nan"), ("days.parquet", "1: day: .* date")):
        result = generate("no-model", "--input", source, "--output", "out.jsonl")
        assert result.exit_code == 2 and re.search(f"{said}.*write it as text", result.output), result.output
    assert "\\ud800" in generate("no-model", "a\ud800").output  # an argument that is not Unicode


@pytest.mark.parametrize("options", [["--samples", "2"], BEAMS])
def test_completions_of_a_prompt_do_not_depend_on_other_prompts(
    here: Path, tiny_folder: Path, options: list[str]
) -> None:
    lines = (here / "prompts.jsonl").read_text().splitlines(keepends=True)
    (here / "some.jsonl").write_text("".join([lines[3], lines[0], lines[3]]))
    whole = written(tiny_folder, "--input", "prompts.jsonl", *options)
    some = written(tiny_folder, "--input", "some.jsonl", *options)

    def of(rows: list[dict[str, Any]], source: str) -> list[str]:
        return [row["completion"] for row in rows if row["source"].endswith(source)]

    assert of(some, ":1") == of(whole, ":4")
    assert of(some, ":2") == of(whole, ":1")
    assert of(some, ":3") != of(some, ":1"), "a prompt that comes again gets new draws"
    assert written(tiny_folder, "--input", "prompts.jsonl", *options, "--seed", "1") != whole


@pytest.mark.parametrize("options", [["--temperature", "0"], ["--temperature", "0.7"], BEAMS])
def test_scores_are_those_of_the_model(here: Path, tiny_folder: Path, options: list[str]) -> None:
    loaded = inference.load(str(tiny_folder))
    decoding = inference.decoding_settings({"max_new_tokens": 6, "temperature": 0.0}) if options[1] == "0" else None
    rows = written(tiny_folder, "--input", "prompts.jsonl", "--scores", *options)
    assert all(row["logprob"] < 0 for row in rows)
    if decoding is None:
        return
    for row in rows:
        prompt = loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, return_dict=False
        )
        ids = torch.tensor([prompt])
        new = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        with torch.no_grad():
            expected = token_logprobs(loaded.model(new).logits, new)[0, len(prompt) :]
        assert row["logprob"] == pytest.approx(expected.sum().item(), abs=1e-4)
        assert row["logprob_mean"] == pytest.approx(expected.mean().item(), abs=1e-4)


@pytest.mark.parametrize("options", [["--samples", "30"], BEAMS])
def test_interrupted_output_resumes_with_the_same_bytes(
    here: Path, tiny_folder: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tiny_folder, "--input", "prompts.jsonl", *options, output="whole.jsonl")
    make, calls = inference._generate, []

    def stop_at_the_third(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return make(*arguments)

    monkeypatch.setattr(inference, "_generate", stop_at_the_third)
    stopped = generate(tiny_folder, "--input", "prompts.jsonl", *options, "--output", "out.jsonl")
    assert stopped.exit_code == 130 and "run the same command again to resume" in stopped.stderr
    assert not Path("out.jsonl").exists()
    (aside,) = here.glob(".out.jsonl.*.partial")
    with aside.open("ab") as file:
        # a kill in the middle of a line, or a write that was lost with the power
        file.write(b'[1, [{"prompt": "2+' if options is BEAMS else bytes(100) + b"\n")
    done = len(calls) - 1
    written(tiny_folder, "--input", "prompts.jsonl", *options)
    assert Path("out.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
    per_call = 1 if options is BEAMS else 2
    assert len(calls) - 3 == -(-(5 - done * per_call) // per_call), "what was done is not done again"
    assert not list(here.glob(".out*"))


@pytest.mark.parametrize("damaged", [b"[1, [{", b"\0" * 40, b"\xff", b"[]", b"3", b'[1, "x"]', b"[" * 100_000], ids=str)
def test_only_the_last_line_of_interrupted_output_may_be_damaged(damaged: bytes, tmp_path: Path) -> None:
    """A damaged line that ended in a newline was a traceback."""
    path = tmp_path / ".out.jsonl.partial"
    part = (1, [{"prompt": "a", "logprob": -0.1}])
    whole = json.dumps(part).encode() + b"\n"
    for end in (b"", b"\n"):
        path.write_bytes(whole + whole + damaged + end)
        assert inference.read_parts(path) == [part, part]
    path.write_bytes(whole + damaged + b"\n" + whole)
    with pytest.raises(UserError, match=r"partial:2: this line of unfinished output is damaged: remove the file"):
        inference.read_parts(path)


def test_a_system_message_comes_before_the_prompt(here: Path, tiny_folder: Path) -> None:
    (row,) = inference.prompts(["hi"], system="be brief")
    assert [message["role"] for message in row.messages] == ["system", "user"]
    (here / "own.jsonl").write_text(
        '{"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}\n'
    )
    (own,) = inference.prompts([], "own.jsonl", system="be brief")
    assert [message["content"] for message in own.messages] == ["a", "b"]


def test_lengths_are_drawn_from_a_range(here: Path, tiny_folder: Path) -> None:
    decoding = inference.decoding_settings({"length_range": [2, 4], "samples": 40})
    loaded = inference.load(str(tiny_folder))
    ((_, rows),) = inference.completions(loaded, inference.prompts(["1+1"]), decoding)
    assert {len(row["completion"]) <= 3 for row in rows} == {True}
    assert {row["finish_reason"] for row in rows} <= {"stop", "length"}


def test_beams_on_the_command_line(here: Path, tiny_folder: Path) -> None:
    result = generate(tiny_folder, "1+1", "2+2", *BEAMS, "--scores")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("> ") == 4 and result.stdout.count("[log p -") == 4


def test_adapters_and_stages_generate(here: Path, tiny_folder: Path, tiny_tokenizer: Any) -> None:
    base: Any = loading.load_policy(str(tiny_folder))
    adapted = add_adapter(base, AdapterConfig.model_validate({"r": 4}), "CAUSAL_LM")
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained("stage/model")
    tiny_tokenizer.save_pretrained("stage/model")
    plain = written(tiny_folder, "1+1", "--beams", "3")
    assert written("stage", "1+1", "--beams", "3") != plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--beams", "4", "--top-k", "10"], "--top-k requires sampling, but --beams alone does not sample"),
        (["--beams", "4", "--samples", "2"], "--samples requires sampling"),
        (["--temperature", "0", "--top-k", "5"], "--top-k would have no effect with --temperature 0"),
        (["--temperature", "0", "--samples", "2"], "--samples would have no effect with --temperature 0"),
        (["--sample", "--temperature", "0"], "always takes the likeliest"),
        (["--return", "2"], "--return requires beam search: add --beams 4"),
        (["--length-penalty", "0"], "--length-penalty requires beam search"),
        (["--beams", "2", "--return", "3"], "at most 2 completions"),
        (["--beams", "2", "--sample", "--temperature", "0"], "temperature: expected more than 0"),
        (["--length-range", "2", "4"], "leave max_new_tokens out"),
        (["--length-range", "1", str(10**30)], "length_range.1: expected less than 9.22337e+18"),
        (["--beams", "2", "--length-range", "2", "4"], "--length-range does not apply to --beams"),
    ],
)
def test_conflicting_options_are_refused(here: Path, tiny_folder: Path, options: list[str], message: str) -> None:
    result = generate(tiny_folder, "1+1", *options)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--input", "prompts.jsonl", "--output", "./prompts.jsonl"], "--output would overwrite the input"),
        (["1+1", "--output", "folder"], "is a directory"),
        (["1+1", "--output", "pipe"], "--output pipe: this is not a regular file, and it would be replaced by one"),
        (["--input", "loop", "--output", "loop"], "--output would overwrite the input"),
        (["--input", "loop", "--output", "out.jsonl"], "loop is a link to loop, which does not exist"),
        (["1+1", "--output", "prompts.jsonl/out.jsonl"], "--output prompts.jsonl/out.jsonl: cannot create its folder"),
        (["--input", "long.jsonl"], "long.jsonl:3: a prompt of 319 tokens leaves no room"),
    ],
)
def test_bad_file_names_are_reported_before_anything_is_generated(
    here: Path, tiny_folder: Path, options: list[str], message: str
) -> None:
    before = (here / "prompts.jsonl").read_bytes()
    (here / "folder").mkdir()
    (here / "loop").symlink_to("loop")
    os.mkfifo(here / "pipe")
    (here / "long.jsonl").write_text("".join(json.dumps({"prompt": "1" * n}) + "\n" for n in (1, 1, 299)))
    result = generate(tiny_folder, *options)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split()) and "> " not in result.stdout
    assert (here / "prompts.jsonl").read_bytes() == before
    assert (here / "pipe").is_fifo()


def test_an_empty_prompt_is_not_answered_with_a_setting_of_recipes(here: Path, tiny_folder: Path) -> None:
    result = generate(tiny_folder, "1+1", "")
    assert result.exit_code == 2
    assert result.stderr == "error: row 2: prompt: empty text\n"


def test_commands_of_the_page_run(here: Path, tiny_folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "inference.md").read_text("utf-8")
    (recipe,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    Path("compare.yaml").write_text(re.sub(r"runs/tiny/\w+", str(tiny_folder), recipe))
    Path("rewards.py").write_text("def brief(answers):\n    return [-float(len(a.tokens)) for a in answers]\n")
    Path("chat.jsonl").write_text('{"prompt": "1+1", "completion": "2"}\n')
    Path("pairs.jsonl").write_text('{"prompt": "1+1", "chosen": "2", "rejected": "3"}\n')
    commands = "".join(re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)).splitlines()
    commands = [command for command in commands if not command.startswith("burnish search ")]  # see test_search.py
    assert len(commands) == 10
    for command in commands:
        words = shlex.split(re.sub(r"runs/tiny/\w+", str(tiny_folder), command))[1:]
        short = ["--max-new-tokens", "4"] if words[0] == "generate" else []
        done = CliRunner().invoke(cli.app, [*words, *short])
        assert done.exit_code == 0, f"{command}\n{done.output}"


def test_more_tokens_than_the_context_window_take_no_memory(here: Path, tiny_folder: Path) -> None:
    arguments = ["generate", str(tiny_folder), "a", "b", "--temperature", "0"]
    context = json.loads((tiny_folder / "config.json").read_text())["max_position_embeddings"]
    results = {n: CliRunner().invoke(cli.app, [*arguments, "--max-new-tokens", str(n)]) for n in (context, 10**12)}
    assert results[10**12].stdout == results[context].stdout
    assert results[context].stderr == ""
    assert f"context window of {context} tokens, prompt included, ends completions" in results[10**12].stderr


def test_bytes_on_the_command_line_that_are_not_text_are_refused(here: Path, tiny_folder: Path) -> None:
    for arguments, what in (
        (["\udcff"], "prompt 1"),
        (["a", "\ud83d"], "prompt 2"),
        (["a", "--system", "\udcff"], "--system"),
        (["a", "--stop", "x", "--stop", "\udcff"], "--stop"),
    ):
        result = generate(tiny_folder, *arguments)
        assert result.exit_code == 2 and f"error: {what}: not valid UTF-8 at character 1, '\\ud" in result.stderr
        assert result.stderr.count("\n") == 1


class Terminal(io.StringIO):
    """Stands for a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_no_control_characters_and_a_file_gets_all(
    here: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"prompt": "a\x1b[2J", "completion": "b\x1b[0m", "finish_reason": "stop", "source": "x"}
    monkeypatch.setattr(inference, "completions", lambda *_: iter([(1, [line])]))
    for terminal in (True, False):
        shown = Terminal() if terminal else io.StringIO()
        monkeypatch.setattr(sys, "stdout", shown)
        cli.app(["generate", str(tiny_folder), "a", "b"], standalone_mode=False)
        assert shown.getvalue() == ("> a\\x1b[2J\nb\\x1b[0m\n" if terminal else "> a\x1b[2J\nb\x1b[0m\n")


def test_columns_with_names_of_ours_are_all_kept():
    columns = {"source": "book", "level": 3, "source_original": "web"}
    kept = {"source_original_original": "book", "level": 3, "source_original": "web"}
    assert renamed(columns, ("prompt", "source")) == kept
