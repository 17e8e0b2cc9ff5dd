"""Runs the stages of a recipe in order; they meet in files, and an unfinished run goes on where it was."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import shutil
import time
from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainingArguments, set_seed
from transformers.utils import logging as hf_logging

from burnish import files, user_functions
from burnish.config import (
    Data,
    PackageModel,
    Recipe,
    RewardSource,
    Stage,
    StageData,
    StageModel,
    method_class,
    method_spec,
    sources,
)
from burnish.config.evaluation import Evaluation
from burnish.config.inputs import Checksums, check_still_current, of_code, of_model, of_rows, verify
from burnish.config.loading import differences
from burnish.config.lock import locked
from burnish.config.schema import NAME
from burnish.data import readers as rows
from burnish.data.streaming import RowStream, StreamLoader
from burnish.errors import UserError
from burnish.generate.settings import factory
from burnish.models import loading, merge, quantize
from burnish.models.adapters import add_adapter
from burnish.render.encode import sort_changes
from burnish.render.templates import set_template
from burnish.report import page as report
from burnish.report.display import Display, RunCallback
from burnish.report.metrics import Recorder, read_metrics
from burnish.rewards.functions import NamedReward
from burnish.rewards.model import ModelReward
from burnish.rewards.steps import StepReward
from burnish.training.trainer import Trainer
from burnish.types import Config, Prompt, Reward
from burnish.user_code import user_code

MANIFEST = "manifest.json"
REMOVING = ".manifest.json.removing"
FORMAT = 1  # of a run's folder
VERSIONS = ("burnish", "torch", "transformers", "accelerate", "peft", "datasets", "tokenizers", "safetensors")


def run(recipe: Recipe, *, fresh: bool = False, display: Display | None = None) -> Path:
    """Run a recipe to its end and write its report; returns the run's folder.

    Stages that are done are not done again; the one that was interrupted goes on from its last complete checkpoint.

    Raises:
        UserError: the folder holds a run of another recipe, or a stage cannot start.
    """
    folder = recipe.folder
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    logging.getLogger("burnish").setLevel(logging.ERROR)  # rows cut or dropped are told once, with their stage
    _check(recipe)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: no folder can be made for the run: {error.strerror}") from error
    with locked(folder):
        if fresh or (folder / REMOVING).is_file():
            _clear(folder)
        manifest = _open(recipe)
        with display or Display() as screen:
            if other := _other_versions(manifest):
                screen.message(f"this run began with {other}: results may differ in their last digits")
            _run_stages(recipe, manifest, screen)
            manifest["state"] = "done"
            _write(folder, manifest)
            report.write(folder)
    return folder


def _run_stages(recipe: Recipe, manifest: dict[str, Any], screen: Display) -> None:
    """Run every stage that is not done, in order."""
    folder, checksums = recipe.folder, Checksums(manifest["checksums"])
    entries = {entry["name"]: entry for entry in manifest["stages"]}
    for number, stage in enumerate(recipe.stages, start=1):
        screen.stage(stage.name, number, len(recipe.stages))
        entry = entries[stage.name]
        if entry["state"] == "done":
            if (folder / stage.name).is_dir():
                check_still_current(recipe, stage, entries)
                screen.message("done before")
                continue
            screen.message(f"{folder / stage.name} is gone: the stage runs again")
            entry.clear()
            entry |= _pending(stage)
            manifest["state"] = "running"
        began = time.monotonic()
        verify(recipe, stage, entries, checksums)
        training = None if stage.run else _Training(recipe, stage)
        entry |= {"state": "running"} | (training.check_inputs(entry, checksums) if training else {})
        _write(folder, manifest)
        found = training.run(screen, entry, checksums) if training else _run_function(recipe, stage)
        for name, checksum in found["files"].items():
            checksums.note(folder / stage.name / name, checksum)
        entry |= found | {"state": "done", "seconds": round(entry["seconds"] + time.monotonic() - began, 1)}
        _write(folder, manifest)


def _check(recipe: Recipe) -> None:
    """Find what would stop a later stage before the first one starts: settings, rows that are there, the machine."""
    for stage in recipe.stages:
        if stage.method is None:
            continue
        training = _Training(recipe, stage)
        training.arguments()
        if stage.adapter is not None and (kind := stage.adapter.quantize) is not None:
            quantize.require(kind, f"stages.{stage.name}.adapter.quantize")
        training.method([NamedReward(str(i), reward.weight, len) for i, reward in enumerate(stage.reward)])  # type: ignore
        splits: dict[str, rows.Rows | RowStream] = {}
        for split in training.splits:
            if not any(isinstance(part.source, StageData) for part in training.data.parts(split)):
                found = splits[split] = training.rows(split)
                if isinstance(found, RowStream):
                    found.take(1)
        if len(splits) == len(training.splits):
            check_rewards(stage, splits)


def check_rewards(stage: Stage, splits: Mapping[str, rows.Rows | RowStream]) -> None:
    """Raise a UserError where rewards are named and no row is a prompt, whose completions they would score."""
    found = [part.rows for part in splits.values() if isinstance(part, rows.Rows)]
    if stage.reward and not any(isinstance(row, Prompt) for part in found for row in part):
        raise UserError(
            f"stages.{stage.name}.reward: it scores completions of prompts, and no row of data.train and data.eval is "
            "a prompt: scored rows carry their own rewards: take this key away"
        )


def _clear(folder: Path) -> None:
    """Remove the stages, the report and the manifest of a run, and nothing else that the folder may hold.

    The manifest takes another name first, so that no stage counts as done while others are removed; where the process
    is killed on the way, the next run removes the rest.

    Raises:
        UserError: the manifest is not one, or a stage's folder is a link to somewhere else. Nothing was removed.
    """
    for manifest in (folder / REMOVING, folder / MANIFEST):
        if not manifest.is_file():
            continue
        places = [folder / entry["name"] for entry in _read(manifest)["stages"]]
        if linked := [place for place in places if place.is_symlink()]:
            raise UserError(
                f"{linked[0]} is a link to {os.readlink(linked[0])}, and --fresh removes only what lies in {folder}: "
                "remove the link yourself"
            )
        manifest.replace(folder / REMOVING)
        files.sync(folder)
        for path in (part for place in places for part in (place, files.staging(place), files.removing(place))):
            if path.is_dir():
                shutil.rmtree(path)
        (folder / "report.html").unlink(missing_ok=True)
        (folder / REMOVING).unlink()


# --- the manifest --------------------------------------------------------------------------------------------------


def _open(recipe: Recipe) -> dict[str, Any]:
    """The manifest of the run as it stands, or a new one."""
    path = recipe.folder / MANIFEST
    resolved = recipe.resolved()
    if path.is_file():
        manifest = _read(path)
        if manifest.get("format") != FORMAT:
            raise UserError(
                f"{recipe.folder} holds a run of another version of Burnish: start over with --fresh, or name another "
                "folder with out=FOLDER"
            )
        # a run that was moved is the same run
        different = next(differences(manifest["recipe"] | {"out": recipe.out}, resolved, ""), None)
        if different is not None:
            raise UserError(
                f"{recipe.folder} holds a run of another recipe: {different}; start over with --fresh, or name another "
                "folder with out=FOLDER"
            )
        if [entry["name"] for entry in manifest["stages"]] != [stage.name for stage in recipe.stages]:
            raise UserError(f"{path}: its stages are not those of its recipe: start over with --fresh")
        return manifest
    if taken := [stage.name for stage in recipe.stages if (recipe.folder / stage.name).exists()]:
        raise UserError(
            f"{recipe.folder} holds {taken[0]}, but no manifest.json that says what made it: remove it, or name "
            "another folder with out=FOLDER"
        )
    return {
        "format": FORMAT,
        "name": recipe.name,
        "state": "running",
        "recipe": resolved,
        "versions": _versions(),
        "machine": {
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        },
        "stages": [_pending(stage) for stage in recipe.stages],
        "checksums": {},
    }


def _pending(stage: Stage) -> dict[str, Any]:
    """A stage's entry in the manifest before it begins."""
    return {
        "name": stage.name,
        "method": stage.method.name if stage.method else None,
        "state": "pending",
        "seconds": 0.0,
    }


def _versions() -> dict[str, str]:
    return {name: version(name) for name in VERSIONS} | {"python": platform.python_version()}


def _other_versions(manifest: Mapping[str, Any]) -> str:
    """Packages of another version than when the run began: ``torch 2.12.0 and resumes with 2.13.0``."""
    now = _versions()
    changed = [name for name, old in manifest["versions"].items() if now.get(name) != old]
    return ", ".join(f"{name} {manifest['versions'][name]} and resumes with {now.get(name)}" for name in changed)


def _read(path: Path) -> dict[str, Any]:
    """A manifest whose stages have names that a recipe may give."""
    try:
        found = json.loads(path.read_text("utf-8"))
        names = [entry["name"] for entry in found["stages"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: not a valid manifest ({error!r}): restore it, or remove the folder") from error
    if wrong := [name for name in names if not (isinstance(name, str) and re.fullmatch(NAME, name))]:
        raise UserError(f"{path}: {wrong[0]!r} cannot be the name of a stage: restore the file, or remove the folder")
    return found


def _write(folder: Path, manifest: Mapping[str, Any]) -> None:
    files.write_text(folder / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False))


# --- where things are ----------------------------------------------------------------------------------------------


def model_reference(source: str | Config, folder: Path) -> str:
    """A model source as a folder or a hub id; a package that is not installed gives its hub id."""
    if isinstance(source, StageModel):
        return str(folder / source.stage / "model")
    if isinstance(source, PackageModel):
        place = loading.package_folder(source.package)
        if place is None and source.hub is None:
            raise UserError(f"the package {source.package!r} is not installed, and no hub: names its model elsewhere")
        return str(place) if place is not None else str(source.hub)
    return str(source)


def named_reward(source: RewardSource, recipe: Recipe | Evaluation, folder: Path, device: str) -> NamedReward:
    """What scores completions, loaded, under its name and weight; ``folder`` is the run's, where stages are."""
    if source.function is not None:
        name = source.name or source.function.rpartition(":")[2]
        return NamedReward(name, source.weight, user_functions.load(recipe.locate(source.function)), source.function)
    assert source.model is not None
    reference = model_reference(source.model, folder)
    tokenizer = loading.load_tokenizer(reference)
    if source.template is not None:
        set_template(tokenizer, source.template)
    if source.steps is not None:
        network = loading.load_value_model(reference).to(device)
        scorer: Reward = StepReward(network, tokenizer, steps=source.steps)
    else:
        model = loading.load_reward_model(reference, labels=None).to(device)
        scorer = ModelReward(model, tokenizer, label=source.label, normalize=source.normalize)
    name = source.model.stage if isinstance(source.model, StageModel) else "model"
    return NamedReward(source.name or name, source.weight, scorer)


# --- a stage that runs a function ----------------------------------------------------------------------------------


def _run_function(recipe: Recipe, stage: Stage) -> dict[str, Any]:
    """Run a stage's function into its folder, which is complete or absent."""
    assert stage.run is not None
    function = user_functions.load(recipe.locate(stage.run))
    folder = recipe.folder / stage.name
    with files.writing(folder) as staging, user_code(f"stages.{stage.name}.run: {stage.run}", seed=recipe.seed):
        function(staging, seed=recipe.seed, **stage.arguments)
    return {"files": files.listed(folder)}


# --- a stage that trains -------------------------------------------------------------------------------------------


class _Training:
    """One stage that trains: loads what it reads, trains or goes on, evaluates, and saves a model folder."""

    def __init__(self, recipe: Recipe, stage: Stage) -> None:
        assert stage.method is not None and stage.model is not None and stage.data is not None
        self.recipe, self.stage = recipe, stage
        self.data: Data = stage.data
        self.splits = [split for split in ("train", "eval") if getattr(self.data, split) is not None]
        self.folder = recipe.folder / stage.name
        self.spec = method_spec(stage.method.name)
        self.source = model_reference(stage.model, recipe.folder)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    @cached_property
    def _found(self) -> tuple[Path | None, list[str]]:
        return files.latest(self.folder)

    @property
    def start(self) -> Path | None:
        """The checkpoint that the stage resumes from."""
        return self._found[0]

    @property
    def damaged(self) -> list[str]:
        """Later checkpoints, and what is wrong with them."""
        return self._found[1]

    def run(self, screen: Display, entry: Mapping[str, Any], checksums: Checksums) -> dict[str, Any]:
        """Train to the end; what it came to, for the manifest.

        ``entry`` is the stage's entry in the manifest, with the checksums of what it reads.
        """
        recorder = Recorder(self.folder)
        start = self.start
        for wrong in self.damaged:
            screen.message(f"damaged: {wrong}: {f'{start} is used instead' if start else 'the stage starts over'}")
        files.remove_leftovers(self.folder)
        if start is None:
            recorder.truncate({})
        set_seed(self.recipe.seed)
        model, tokenizer = self._load(screen)
        summary = loading.summary(model, tokenizer)
        screen.message(
            f"{self.source}: {summary['class']}, {summary['parameters']:,} parameters, {summary['trainable']:,} "
            f"trained ({summary['trainable share']:.1%}), {summary['dtype']}, pad/eos/bos {summary['pad/eos/bos']}"
        )
        splits = {split: self.rows(split) for split in self.splits}
        self._check_data(entry, checksums)
        check_rewards(self.stage, splits)
        if warning := sources.overlap(self.data, self.recipe.folder):
            screen.message(warning)
        if self.device != "cpu" and Prompt in self.spec.kinds and self.stage.generator.name == "local":
            screen.message(
                f"stages.{self.stage.name}.generator: on a GPU {{name: continuous}} samples faster than local, which "
                "starts a kernel for every operation of every token"
            )
        trainer = self._trainer(model, tokenizer, splits, recorder, screen)
        counts = {s: self._counts(found, trainer) for s, found in splits.items() if isinstance(found, rows.Rows)}
        said = (f"{split}: {_said(counts[split]) if split in counts else 'read as a stream'}" for split in splits)
        screen.message(", ".join(said))
        if start is None and "eval" in splits:
            trainer.evaluate()
        trainer.train(resume_from_checkpoint=str(start) if start else None)
        done = self._evaluations()
        if "eval" in splits and (len(done) < 2 or trainer.state.global_step != done[-1]["step"]):
            trainer.evaluate()
        if isinstance(trainer.loader, StreamLoader):
            counts = {"train": trainer.loader.counts()} | counts
            screen.message(f"train: {_said(counts['train'])}")
        evaluations = self._evaluations()
        self._save(trainer, evaluations[-1] if evaluations else {})
        recorder.offsets()  # what was logged since the last checkpoint is on disk before the stage counts as done
        return {
            "model": summary | {"source": self.source},
            "rows": counts,
            "results": {"before": evaluations[0], "after": evaluations[-1]} if evaluations else {},
            "files": {f"model/{name}": digest for name, digest in files.listed(self.folder / "model").items()},
        }

    def check_inputs(self, before: Mapping[str, Any], checksums: Checksums) -> dict[str, dict[str, str]]:
        """Checksums of rows, models and code, for the manifest.

        Raises:
            UserError: the stage has begun with others.
        """
        folder = self.recipe.folder
        models = [self.source, *(model_reference(r.model, folder) for r in self.stage.reward if r.model)]
        inputs = of_code(self.recipe, self.stage, checksums)
        for reference in models:
            inputs |= of_model(reference, folder, checksums)
        found = {"data": of_rows(self.data, self.splits, folder, checksums), "inputs": inputs}
        if self.start is not None:
            for kind, now in found.items():
                self._refuse_changes(before.get(kind) or {}, now)
        return found

    def _check_data(self, entry: Mapping[str, Any], checksums: Checksums) -> None:
        """Whether the rows that were just read are those whose checksums were taken before."""
        self._refuse_changes(entry["data"], of_rows(self.data, self.splits, self.recipe.folder, checksums))

    def _refuse_changes(self, before: Mapping[str, str], now: Mapping[str, str]) -> None:
        changed = [name for name in [*now, *before] if now.get(name) != before.get(name)]
        if changed:
            raise UserError(
                f"{changed[0]} has changed since {self.stage.name} started: restore it, or start over with --fresh"
            )

    def _evaluations(self) -> list[dict[str, Any]]:
        return [line for line in read_metrics(self.folder) if any(key.startswith("eval_") for key in line)]

    def arguments(self) -> TrainingArguments:
        """The trainer's arguments, as the recipe gives them."""
        try:
            return TrainingArguments(
                output_dir=str(self.folder),
                seed=self.recipe.seed,
                use_cpu=self.device == "cpu",
                logging_nan_inf_filter=False,
                disable_tqdm=True,
                **self.stage.trainer.arguments(),
            )
        except (ValueError, RuntimeError, ImportError) as error:
            raise UserError(f"stages.{self.stage.name}.trainer: {error}") from error

    def method(self, rewards: list[NamedReward]) -> Any:
        """The method with its settings; one that samples gets its rewards and how it samples."""
        assert self.stage.method is not None
        settings = self.recipe.method_settings(self.stage.method)
        if Prompt in self.spec.kinds:
            generator = factory(self.stage.generator)
            settings |= {"reward": rewards, "sampling": self.stage.generation, "generator": generator}
        return method_class(self.stage.method.name)(**settings)

    def _load(self, screen: Display) -> tuple[Any, PreTrainedTokenizerBase]:
        """The model and its tokenizer with the template of this stage, and a fresh adapter where it has one."""
        stage = self.stage
        if stage.trust_remote_code:
            screen.message(f"trust_remote_code: code from {self.source} is run")
        tokenizer = loading.load_tokenizer(self.source, trust_remote_code=stage.trust_remote_code)
        self._template(tokenizer, screen)
        source, trust, adapted = self.source, stage.trust_remote_code, loading.is_adapter(self.source)
        if stage.adapter is not None and adapted:
            source = merge.start_from(source, self.folder / "base", say=screen.message, trust_remote_code=trust)
        dtype = loading.choose_dtype(stage.dtype, adapter=stage.adapter is not None or adapted)
        load = loading.load_reward_model if self.spec.task == "SEQ_CLS" else loading.load_policy
        quantized = stage.adapter.quantize if stage.adapter else None
        model: Any = load(source, dtype=dtype, trust_remote_code=trust, quantized=quantized)
        if stage.adapter is not None:
            model = add_adapter(model, stage.adapter, self.spec.task, loading.describe(source))
        elif adapted:
            what = "training goes on with it, on" if isinstance(model, PeftModel) else "it is merged into"
            screen.message(f"{source} is an adapter: {what} its base {loading.base_of(loading.resolve(source))}")
        elif dtype in (torch.bfloat16, torch.float16):
            screen.message(f"dtype {stage.dtype}: weights are trained in it, without float32 master weights")
        loading.unwrap(model).config.pad_token_id = tokenizer.pad_token_id
        return model, tokenizer

    def _template(self, tokenizer: PreTrainedTokenizerBase, screen: Display) -> None:
        """Give the tokenizer the recipe's plain template, and say where it differs from the stored one."""
        if self.stage.template is None:
            return
        stored = tokenizer.chat_template
        set_template(tokenizer, self.stage.template)
        if stored is not None and stored != tokenizer.chat_template:
            screen.message(f"template {self.stage.template} takes the place of the one stored with {self.source}")

    def rows(self, split: str) -> rows.Rows | RowStream:
        """The rows of a split, or the stream of them."""
        folder, kinds = self.recipe.folder, self.spec.kinds
        if split == "train" and self.data.stream:
            return sources.stream(self.data, folder, kinds)
        return sources.read(self.data, split, folder, kinds, self.recipe.seed)

    def _trainer(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        splits: dict[str, rows.Rows | RowStream],
        recorder: Recorder,
        screen: Display,
    ) -> Trainer:
        trainer = Trainer(
            model=model,
            args=self.arguments(),
            method=self.method(
                [named_reward(s, self.recipe, self.recipe.folder, self.device) for s in self.stage.reward]
            ),
            train_dataset=splits["train"],
            eval_dataset=splits.get("eval"),  # type: ignore[arg-type]
            processing_class=tokenizer,
            length=self.data.length,
            token_budget=self.stage.token_budget,
            packed=self.stage.packed,
            on_non_finite=self.stage.trainer.on_non_finite,
            recorder=recorder,
            show_samples=screen.samples,
            callbacks=[RunCallback(recorder, screen)],
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def _save(self, trainer: Trainer, evaluated: Mapping[str, Any]) -> None:
        """Write the model folder, an adapter merged into its base and beside it, so that anything can load it.

        The mean and spread of a reward model's held-out scores go into its config.
        """
        network = trainer.accelerator.unwrap_model(trainer.model)
        if "eval_score_mean" in evaluated:
            config = loading.unwrap(network.policy).config
            config.score_mean, config.score_std = evaluated["eval_score_mean"], evaluated["eval_score_std"]
        if isinstance(network.policy, PeftModel):
            with files.writing(self.folder / "adapter") as staging:
                network.save_policy(staging)
                trainer.tokenizer.save_pretrained(staging)
            network.policy = merge.policy_of(network.policy, self.folder / "adapter", self.stage.trust_remote_code)
        if isinstance(network.critic, PeftModel):
            network.critic = network.critic.merge_and_unload()
        with files.writing(self.folder / "model") as staging:
            trainer.save_model(str(staging))

    def _counts(self, found: rows.Rows, trainer: Trainer) -> dict[str, Any]:
        skipped, cut = sort_changes(trainer.method.examples(found.rows, trainer.tokenizer, trainer.length).changed)
        count = {"rows": len(found.rows), "skipped": [f"{s.source}: {s.reason}" for s in found.skipped] + skipped}
        return count | {"cut": cut} | ({"mixed": [m._asdict() for m in found.mixed]} if found.mixed else {})


def _said(count: Mapping[str, Any]) -> str:
    """``512 rows (3 skipped: chat.jsonl:7: unknown role ...)``: nothing is left out or cut in silence."""
    notes = [f"{m['drawn']:,} of the {m['rows']:,} of {m['source']}" for m in count.get("mixed", ())]
    for kind in ("skipped", "cut"):
        if named := count[kind]:
            many = count.get(f"{kind} in all", len(named))
            notes.append(f"{many:,} {kind}: {named[0]}" + (" ..." if many > 1 else ""))
    return f"{count['rows']:,} rows" + (f" ({'; '.join(notes)})" if notes else "")
