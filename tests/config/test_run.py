"""Stages exchange files. Finished stages do not run again, interrupted ones resume, and another recipe is refused."""

import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft import PeftModel
from rich.console import Console
from transformers import TrainerCallback

from burnish.config import Recipe, load
from burnish.config import run as pipeline
from burnish.config.resolve import model_reference
from burnish.errors import UserError
from burnish.models.batching import collate
from burnish.models.forward import scores
from burnish.models.loading import load_policy, load_reward_model
from burnish.report.display import Display
from burnish.report.metrics import is_timing, read_metrics
from burnish.training.trainer import Trainer
from burnish.types import Example, Sequence

WHOLE = """
name: small
stages:
  - name: prepare
    run: burnish.recipes.tiny:prepare
    with: {rows: 24, pairs: 12, prompts: 8, held_out: 6}
  - name: sft
    method: {name: sft}
    model: {stage: prepare}
    data: {train: {stage: prepare, file: sft.jsonl}, eval: {stage: prepare, file: sft-eval.jsonl}}
    trainer: {per_device_train_batch_size: 8, learning_rate: 1.0e-3, save_steps: 1}
  - name: reward
    method: {name: reward}
    model: {stage: sft}
    data: {train: {stage: prepare, file: pairs.jsonl}, eval: {stage: prepare, file: pairs-eval.jsonl}}
    trainer: {per_device_train_batch_size: 6, learning_rate: 1.0e-3, save_steps: 1}
  - name: ppo
    method: {name: ppo, epochs: 2, mini_batches: 2}
    model: {stage: sft}
    reward: [{model: {stage: reward}}, {function: "burnish.recipes.tiny:exact", weight: 0}]
    data: {train: {stage: prepare, file: prompts.jsonl}, eval: {stage: prepare, file: prompts-eval.jsonl}}
    generation: {max_new_tokens: 4}
    trainer: {per_device_train_batch_size: 4, learning_rate: 1.0e-3, save_steps: 3}
"""
ADAPTER = "adapter={r: 4}"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Iterator[Path]:
    """The folder of the recipe, with its cache."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "small.yaml").write_text(WHOLE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BURNISH_CACHE", str(folder / "cache"))
        yield folder


def recipe(home: Path, folder: Path, *overrides: str) -> Recipe:
    return load(home / "small.yaml", [f"out={folder}", *overrides])


def run(home: Path, folder: Path, *overrides: str, fresh: bool = False) -> str:
    """Run the recipe and return its output."""
    shown = io.StringIO()
    with Display(Console(file=shown, width=200)) as screen:
        assert pipeline.run(recipe(home, folder, *overrides), fresh=fresh, display=screen) == folder
    return shown.getvalue()


@pytest.fixture(scope="module")
def done(home, tmp_path_factory) -> Path:
    """A finished run of the whole recipe, which tests must not change."""
    folder = tmp_path_factory.mktemp("runs") / "done"
    run(home, folder)
    return folder


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text("utf-8"))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def results(folder: Path) -> dict[str, Any]:
    """Weights, model cards, samples, and metrics without their timings."""
    contents: dict[str, Any] = {}
    globs = ("*/model/**/*.safetensors", "*/model/README.md", "*/samples.jsonl")
    for path in (path for glob in globs for path in folder.glob(glob)):
        contents[str(path.relative_to(folder))] = path.read_bytes()
    for path in folder.glob("*/metrics.jsonl"):
        contents[path.parent.name] = [
            {key: value for key, value in line.items() if not is_timing(key)} for line in read_metrics(path.parent)
        ]
    return contents


# --- what a run leaves ---------------------------------------------------------------------------------------------


def test_every_stage_writes_its_files(done):
    assert {p.name for p in done.iterdir()} == {"manifest.json", "report.html", "prepare", "sft", "reward", "ppo"}
    for stage, checkpoint in [("sft", 3), ("reward", 2), ("ppo", 8)]:
        names = {p.name for p in (done / stage).iterdir()}
        assert {"metrics.jsonl", "model", f"checkpoint-{checkpoint}"} <= names
        assert not [name for name in names if name.startswith(".")]
        assert "model/README.md" in next(s for s in manifest(done)["stages"] if s["name"] == stage)["files"]
    assert (done / "ppo" / "model" / "critic" / "model.safetensors").is_file()


def test_the_manifest_records_the_run(done, home):
    said = manifest(done)
    assert said["name"] == "small" and said["state"] == "done"
    assert said["recipe"] == recipe(home, done).resolved()
    assert said["versions"]["torch"] == torch.__version__.partition("+")[0] or said["versions"]["torch"]
    assert [(s["name"], s["method"], s["state"]) for s in said["stages"]] == [
        ("prepare", None, "done"),
        ("sft", "sft", "done"),
        ("reward", "reward", "done"),
        ("ppo", "ppo", "done"),
    ]
    prepare, sft, reward, ppo = said["stages"]
    for name in ("data/sft.jsonl", "model/model.safetensors"):
        assert prepare["files"][name] == sha256(done / "prepare" / name)
    for stage in (sft, reward, ppo):
        file = "model/model.safetensors"
        assert stage["files"][file] == sha256(done / stage["name"] / file)
        assert all(sha256(done / path) == digest for path, digest in stage["data"].items())
        assert len(stage["data"]) == 2 and stage["seconds"] > 0
    assert sft["rows"]["train"] == {"rows": 24, "skipped": [], "dropped": [], "shortened": []}
    assert sft["model"]["class"] == "LlamaForCausalLM" and sft["model"]["source"] == str(done / "prepare" / "model")
    lines = [line for line in read_metrics(done / "sft") if "eval_loss" in line]
    assert sft["results"] == {"before": lines[0], "after": lines[-1]}
    assert (lines[0]["step"], lines[-1]["step"]) == (0, 3)
    assert "eval_accuracy" in reward["results"]["after"] and "eval_score" in ppo["results"]["after"]


def test_models_load_with_plain_transformers(done):
    tokens = torch.tensor([[1, 5, 9, 14, 6, 7, 15]])
    batch = collate([Example((Sequence(tuple(tokens[0].tolist()), (False,) * 7, "x"),))], 0)
    text = [{"role": "user", "content": "12+30"}]
    with torch.no_grad():
        for stage in ("sft", "ppo"):
            folder = str(done / stage / "model")
            plain: Any = hf.AutoModelForCausalLM.from_pretrained(folder).eval()
            ours: Any = load_policy(folder).eval()
            assert torch.equal(plain(tokens).logits, ours(tokens).logits)
            ids = hf.AutoTokenizer.from_pretrained(folder).apply_chat_template(text, add_generation_prompt=True)
            assert len(ids["input_ids"]) == 7
        folder = str(done / "reward" / "model")
        plain = hf.AutoModelForSequenceClassification.from_pretrained(folder).eval()
        torch.testing.assert_close(plain(tokens).logits[:, 0], scores(load_reward_model(folder, labels=None), batch))
        critic = hf.AutoModelForTokenClassification.from_pretrained(done / "ppo" / "model" / "critic")
        assert critic(tokens).logits.shape == (1, 7, 1)


def test_a_stage_starts_from_the_model_of_the_previous_one(done):
    before, after = (read_metrics(done / "sft")[i]["eval_loss"] for i in (0, -1))
    first = next(line for line in read_metrics(done / "reward") if "loss" in line)
    assert after < before
    assert first["step"] == 1
    assert json.loads((done / "ppo" / "samples.jsonl").read_text().splitlines()[0])["rewards"].keys() == {
        "reward",
        "exact",
    }


def test_the_same_recipe_gives_the_same_bytes(done, home, tmp_path):
    folder = done.with_name("again")
    run(home, folder)
    first, second = results(done), results(folder)
    assert list(first) and sorted(first) == sorted(second)
    named = str(done).encode(), str(folder).encode()
    for name, value in first.items():
        other = second[name]
        assert (value.replace(*named) if isinstance(value, bytes) else value) == other, name


# --- going on ------------------------------------------------------------------------------------------------------


def test_finished_stages_do_not_run_again(done, home):
    before = {path: path.stat().st_mtime_ns for path in done.glob("*/model/*")}
    shown = run(home, done)
    assert shown.count("already done") == 4
    assert {path: path.stat().st_mtime_ns for path in done.glob("*/model/*")} == before


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("seed=1", "seed was 0 and is 1"),
        ("stages.sft.trainer.learning_rate=2.0e-3", r"stages\.1\.trainer\.learning_rate was 0\.001 and is 0\.002"),
        ("stages.ppo.method.kl_coef=0.1", r"stages\.3\.method\.kl_coef was 0\.05 and is 0\.1"),
        ("stages.sft.data.max_length=9", r"stages\.1\.data\.max_length was None and is 9"),
    ],
)
def test_another_recipe_is_refused_with_the_key_that_differs(override, key, done, home):
    before = (done / "manifest.json").read_bytes()
    with pytest.raises(UserError, match=f"holds a run of another recipe: {key}; start over with --fresh"):
        run(home, done, override)
    assert (done / "manifest.json").read_bytes() == before


class Stopped(BaseException):
    """Stands for an interrupt."""


@pytest.mark.parametrize(("stage", "step"), [("reward", 1), ("ppo", 5)])
def test_an_interrupted_run_resumes_with_the_same_bytes(stage, step, done, home, monkeypatch):
    folder = done.with_name(f"stopped in {stage}")

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if Path(args.output_dir).name == stage and state.global_step == step:
                raise Stopped

    made = Trainer.__init__

    def init(self, *arguments, **others):
        made(self, *arguments, **others)
        self.add_callback(Stop())

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Trainer, "__init__", init)
        run(home, folder)
    states = {entry["name"]: entry["state"] for entry in manifest(folder)["stages"]}
    assert manifest(folder)["state"] == "running" and states[stage] == "running" and states["prepare"] == "done"
    if stage == "ppo":
        prompts = folder / "prepare" / "data" / "prompts.jsonl"
        whole = prompts.read_bytes()
        prompts.write_bytes(whole + whole.splitlines(keepends=True)[0])
        with pytest.raises(UserError, match=r"prompts.jsonl has changed since stage prepare wrote it"):
            run(home, folder)
        prompts.write_bytes(whole)
    torch.manual_seed(123)
    shown = run(home, folder)
    assert ("resumes after step" in shown) == (stage != "reward")  # stopped before its first checkpoint
    assert manifest(folder)["state"] == "done"
    expected, got = results(done), results(folder)
    named = str(done).encode(), str(folder).encode()
    for name, value in expected.items():
        assert (value.replace(*named) if isinstance(value, bytes) else value) == got[name], name


def test_a_stage_that_runs_a_function_is_complete_or_absent(home, tmp_path, monkeypatch):
    broken = ("stages.prepare.with.rows=24", "stages.prepare.with.held_out=9000")
    folder = tmp_path / "run"
    with pytest.raises(UserError, match="held_out"):
        run(home, folder, *broken)
    assert not (folder / "prepare").exists()
    assert manifest(folder)["stages"][0]["state"] == "running"


# --- starting over -------------------------------------------------------------------------------------------------


FIRST = "stages=[{name: prepare, run: 'burnish.recipes.tiny:prepare', with: {rows: 3, pairs: 1, prompts: 1}}]"


def test_fresh_starts_over_and_removes_only_the_run(home, tmp_path):
    folder = tmp_path / "run"
    run(home, folder, FIRST)
    (folder / "prepare" / "left").write_text("from before")
    (folder / "notes.txt").write_text("mine")
    (folder / ".notes.old").mkdir()
    shown = run(home, folder, FIRST, "seed=1", fresh=True)
    assert "already done" not in shown and manifest(folder)["recipe"]["seed"] == 1
    assert not (folder / "prepare" / "left").exists()
    assert (folder / "notes.txt").read_text() == "mine" and (folder / ".notes.old").is_dir()


def test_fresh_removes_nothing_if_the_recipe_cannot_start(home, tmp_path):
    folder = tmp_path / "run"
    run(home, folder, FIRST)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a"}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl:1"):
        run(
            home,
            folder,
            f"stages=[{{name: sft, method: {{name: sft}}, model: {folder}/prepare/model, data: {{train: {bad}}}}}]",
            fresh=True,
        )
    assert (folder / "prepare" / "model").is_dir() and (folder / "manifest.json").is_file()


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_with_other_content_is_refused(fresh, home, tmp_path):
    (tmp_path / "prepare").mkdir()
    (tmp_path / "prepare" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds prepare, but no manifest\.json"):
        run(home, tmp_path, FIRST, fresh=fresh)
    assert (tmp_path / "prepare" / "thesis.txt").read_text() == "mine"


# --- adapters ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
def test_adapters_are_merged_into_models_that_anything_loads(done, home, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for stage in ("prepare", "sft", "reward"):
        shutil.copytree(done / stage, folder / stage)
    said = manifest(done)
    said["recipe"] = recipe(home, folder, f"stages.ppo.{ADAPTER}").resolved()
    said["stages"][3] = {"name": "ppo", "method": "ppo", "state": "pending", "seconds": 0.0}
    (folder / "manifest.json").write_text(json.dumps(said))
    run(home, folder, f"stages.ppo.{ADAPTER}")
    stage = folder / "ppo"
    tokens = torch.tensor([[1, 5, 9, 14, 6]])
    with torch.no_grad():
        base: Any = hf.AutoModelForCausalLM.from_pretrained(folder / "sft" / "model").eval()
        start = base(tokens).logits
        merged: Any = hf.AutoModelForCausalLM.from_pretrained(stage / "model").eval()
        adapted: Any = PeftModel.from_pretrained(base, str(stage / "adapter")).eval()
        torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, atol=1e-5, rtol=1e-5)
        assert (merged(tokens).logits - start).abs().max() > 1e-4
    classes: dict[str, Any] = {"": hf.AutoModelForCausalLM, "critic": hf.AutoModelForTokenClassification}
    for part, auto in classes.items():
        model, info = auto.from_pretrained(stage / "model" / part, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        other: Any = hf.AutoModel.from_pretrained(folder / ("reward" if part else "sft") / "model")
        assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, other.layers[0].mlp.up_proj.weight)
        assert torch.equal(model.model.embed_tokens.weight, other.embed_tokens.weight)  # which has no adapter
    assert manifest(folder)["stages"][3]["model"]["trainable share"] < 0.5


# --- sources -------------------------------------------------------------------------------------------------------


def test_sources_are_folders_or_hub_ids(tmp_path, monkeypatch):
    from burnish.config import PackageModel, StageData, StageModel, sources

    assert model_reference(StageModel(stage="sft"), tmp_path) == str(tmp_path / "sft" / "model")
    assert sources.data_reference(StageData(stage="a", file="b.jsonl"), tmp_path) == str(
        tmp_path / "a" / "data" / "b.jsonl"
    )
    assert model_reference("org/name", tmp_path) == "org/name"
    absent = PackageModel(package="no_such_weights", hub="org/name")
    assert model_reference(absent, tmp_path) == "org/name"
    with pytest.raises(UserError, match="'no_such_weights' is not installed"):
        model_reference(PackageModel(package="no_such_weights"), tmp_path)
    (tmp_path / "some_weights").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert model_reference(PackageModel(package="some_weights", hub="org/name"), tmp_path) == str(
        tmp_path / "some_weights"
    )


def test_a_mistake_in_a_later_stage_is_found_before_the_first(home, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(UserError, match=r"stages\.ppo\.trainer: .*"):
        run(home, folder, "stages.ppo.trainer.load_best_model_at_end=true")
    assert not folder.exists()
