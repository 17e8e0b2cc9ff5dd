"""A stage that makes rows. It reads its input in chunks and resumes after the last complete chunk."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from burnish import files, progress
from burnish.config.inputs import Checksums, inputs_of, of_rows, refuse_changes
from burnish.config.resolve import environments_of, model_reference, named_reward, stored_judge
from burnish.config.schema import Recipe, Stage, method_class
from burnish.config.sources import in_training, read
from burnish.data.readers import Rows
from burnish.errors import UserError
from burnish.generate.protocol import Generator
from burnish.generate.sampling import Sampling
from burnish.generate.settings import NO_VALUES, WITHOUT_VALUES, factory
from burnish.judges.settings import JudgeSettings
from burnish.judges.store import StoredJudge
from burnish.math.statistics import interval_of_mean
from burnish.methods import METHODS, ROW_METHODS
from burnish.models.loaded import Loaded, is_reward_model, load, load_tokenizer
from burnish.models.settings import ModelSource, StageModel
from burnish.protocols import Made, RowMethod
from burnish.render.truncate import Truncation
from burnish.report.display import Display
from burnish.report.metrics import Recorder
from burnish.rewards.functions import NamedReward, close
from burnish.rl.environment import Environments
from burnish.types import Row

CHUNK = 64
"""Number of input rows in a chunk, after which a stage can resume. Results depend on it."""
UNFINISHED = "unfinished"
"""The folder of the rows while the stage is incomplete."""
PROGRESS = "progress.json"


class RowStage:
    """A stage that makes rows. Its output is in ``data/`` once it is complete."""

    def __init__(self, recipe: Recipe, stage: Stage) -> None:
        assert stage.method is not None and stage.data is not None
        self.recipe, self.stage, self.data = recipe, stage, stage.data
        self.folder = recipe.folder / stage.name
        self.spec = ROW_METHODS[stage.method.name]

    def check_inputs(self, before: Mapping[str, Any], checksums: Checksums) -> dict[str, dict[str, str]]:
        """Compute the checksums of rows, models and code for the manifest.

        Raises:
            UserError: if an input has changed since the stage started.
        """
        current = inputs_of(self.recipe, self.stage, checksums)
        if (self.folder / PROGRESS).is_file():
            for kind, now in current.items():
                refuse_changes(self.stage, before.get(kind) or {}, now)
        return current

    def method(self) -> RowMethod:
        """Create the method from its settings."""
        assert self.stage.method is not None
        return method_class(self.stage.method.name)(**self.recipe.method_settings(self.stage.method))

    def read(self) -> Rows:
        """Read the input, with its records, and check that it suits the method.

        Raises:
            UserError: if it cannot be read, or does not suit the method.
        """
        folder, seed, spec = self.recipe.folder, self.recipe.seed_of(self.stage), self.spec
        scores = self.stage.reward or self.stage.environment.classes
        kinds = spec.kinds_with_rewards if scores and spec.kinds_with_rewards else spec.kinds
        source = read(self.data, "rows", folder, kinds, seed, records=True, any_column=spec.any_column)
        try:
            self.method().check(source.rows, self.stage.model_fields_set, self._has_reward_model())
        except UserError as error:
            raise UserError(f"stages.{self.stage.name}: {error}") from error
        return source

    def _has_reward_model(self) -> bool | None:
        """Whether the stage's model is a reward model; None if there is no model, or none yet."""
        source, folder = self.stage.model, self.recipe.folder
        if source is None:
            return None
        if isinstance(source, StageModel) and not Path(model_reference(source, folder)).is_dir():
            maker = next(stage for stage in self.recipe.stages if stage.name == source.stage)
            spec = METHODS.get(maker.method.name) if maker.method else None
            return None if spec is None else spec.task == "SEQ_CLS"
        return is_reward_model(model_reference(source, folder), trust_remote_code=self.stage.trust_remote_code)

    def run(self, screen: Display, entry: Mapping[str, Any], checksums: Checksums) -> dict[str, Any]:
        """Make rows to the end and return the results for the manifest."""
        recorder = Recorder(self.folder)
        state = _State.of(self.folder)
        with contextlib.closing(_Run(self.recipe, self.stage, screen)) as run:
            source = self.read()
            refuse_changes(self.stage, entry["data"], of_rows(self.data, ["rows"], self.recipe.folder, checksums))
            total = len(source.rows)
            screen.message(f"rows: {total:,}" + (f", resuming at row {state.done + 1:,}" if state.done else ""))
            overlap = in_training(source.rows, self.recipe, self.stage) if self.spec.held_out else None
            if overlap is not None:
                screen.message(overlap)
            method = self.method()
            recorder.truncate(state.logs)
            if (self.folder / UNFINISHED).is_dir() or not (self.folder / "data").is_dir():
                _prepare(self.folder / UNFINISHED, self.spec.outputs, state.sizes)
                start = state.done
                if start < total:
                    method.start(source.rows, list(source.records), run)
                for first in range(start, total, CHUNK):
                    chunk = slice(first, first + CHUNK)
                    rows, records = source.rows[chunk], list(source.records[chunk])
                    made = method.make(rows, records, first, run)
                    with _naming_columns(rows, records):
                        lines = {name: "".join(map(_line, of)) for name, of in made.files.items()}
                    state.sizes |= _append(self.folder / UNFINISHED, lines)
                    recorder.samples({"step": first, **sample} for sample in made.samples)
                    if first == start:
                        screen.samples([{**sample, "step": None} for sample in made.samples])
                    state.add(made, len(rows))
                    state.logs = recorder.offsets()
                    state.save(self.folder)
                    progress.report(f"{self.spec.name} rows", state.done, total)
                files.seal(self.folder / UNFINISHED)
                (self.folder / UNFINISHED).rename(self.folder / "data")
                files.sync(self.folder)
        own = method.results(self.folder / "data", self.recipe.seed_of(self.stage))
        results = {"after": {**state.results(), **own.get("after", {})}} | (
            {"before": own["before"]} if "before" in own else {}
        )
        recorder.truncate(state.logs)
        recorder.metrics(total, {f"eval_{name}": value for name, value in results["after"].items()})
        recorder.offsets()
        shown = ", ".join(f"{count:,} {what}" for what, count in state.counts.items())
        screen.message(f"{total:,} rows read: {shown or 'none'}")
        written = files.listed(self.folder / "data")
        return {
            "rows": {
                "rows": {"rows": total, "skipped": [f"{s.source}: {s.reason}" for s in source.skipped], "dropped": [],
                         "shortened": [], "left_out": dict(source.left_out), "counts": dict(state.counts)}
            },
            "results": {
                side: {"step": total if side == "after" else 0} | {f"eval_{name}": value for name, value in of.items()}
                for side, of in results.items()
            },
            **({"overlap": overlap} if overlap is not None else {}),
            "files": {f"data/{name}": digest for name, digest in written.items()},
        }  # fmt: skip


def _prepare(folder: Path, names: Iterable[str], sizes: Mapping[str, int]) -> None:
    """Create the files of a stage, or truncate them to the last complete chunk."""
    folder.mkdir(exist_ok=True)
    for name in names:
        path, size = folder / name, sizes.get(name, 0)
        with files.storing(path), path.open("ab") as file:
            if file.tell() < size:
                raise UserError(
                    f"{path}: {file.tell()} bytes, but {size} were written: restore the file, or start over "
                    "with --fresh"
                )
            file.truncate(size)
    files.sync(folder)


def _append(folder: Path, lines: Mapping[str, str]) -> dict[str, int]:
    """Append lines to files, flushed to disk, and return the sizes of these files."""
    sizes = {}
    for name, text in lines.items():
        with files.storing(folder / name), (folder / name).open("ab") as file:
            file.write(text.encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
            sizes[name] = file.tell()
    return sizes


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


@contextlib.contextmanager
def _naming_columns(rows: list[Row], records: list[Mapping[str, Any]]) -> Iterator[None]:
    """Name the column of a row that cannot be written as JSON, such as a date of a parquet file, or NaN."""
    try:
        yield
    except (TypeError, ValueError) as error:
        for row, record in zip(rows, records, strict=True):
            for name, value in record.items():
                try:
                    _line({name: value})
                except (TypeError, ValueError):
                    raise UserError(
                        f"{row.source}: {name}: {type(value).__name__} {value!r:.60} cannot be written as JSON: remove "
                        "the column, or convert it to text"
                    ) from error
        raise


class _State:
    """What is done: the number of input rows, the sizes of the outputs, counts, and sums of the measures."""

    def __init__(self) -> None:
        self.done = 0
        self.sizes: dict[str, int] = {}
        self.logs: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        self.sums: dict[str, list[float]] = {}  # of each measure: n, sum, sum of squares, least and greatest value

    @classmethod
    def of(cls, folder: Path) -> _State:
        """The state of an interrupted stage, or of a new one.

        Raises:
            UserError: the file is damaged.
        """
        state, path = cls(), folder / PROGRESS
        if path.is_file():
            try:
                plain = json.loads(path.read_text("utf-8"))
                state.done, state.sizes, state.logs = plain["done"], plain["sizes"], plain["logs"]
                state.counts, state.sums = Counter(plain["counts"]), plain["sums"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{path}: damaged: restore it, or start over with --fresh") from error
        return state

    def save(self, folder: Path) -> None:
        """Write the state atomically."""
        plain = {"done": self.done, "sizes": self.sizes, "logs": self.logs, "counts": self.counts, "sums": self.sums}
        files.write_text(folder / PROGRESS, json.dumps(plain))

    def add(self, made: Made, rows: int) -> None:
        """Add a chunk of this many input rows."""
        self.done += rows
        self.counts.update(made.counts)
        for name, values in made.measured.items():
            if values:
                n, total, squares, least, greatest = self.sums.get(name, (0, 0.0, 0.0, values[0], values[0]))
                self.sums[name] = [
                    n + len(values),
                    total + math.fsum(values),
                    squares + math.fsum(x * x for x in values),
                    min(least, *values),
                    max(greatest, *values),
                ]

    def results(self) -> dict[str, float]:
        """The mean of each measure over input rows, with its 95 % interval (`interval_of_mean`)."""
        results = {}
        for name, (n, total, squares, least, greatest) in self.sums.items():
            results[name] = mean = total / n
            if n > 1:
                variance, shares = max(0.0, squares / n - mean**2), least >= 0 and greatest <= 1
                results[f"{name}_low"], results[f"{name}_high"] = interval_of_mean(mean, variance, n, shares=shares)
        return results


class _Run:
    """The run, as a method that makes rows sees it. Models are loaded when they are first used."""

    def __init__(self, recipe: Recipe, stage: Stage, screen: Display) -> None:
        assert stage.method is not None
        self.folder, self.run_folder, self.message = recipe.folder / stage.name, recipe.folder, screen.message
        self.recipe, self.stage, self.spec = recipe, stage, ROW_METHODS[stage.method.name]
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._models: dict[str, Loaded] = {}
        self._generators: dict[str, Generator] = {}
        self._judges: dict[str, StoredJudge] = {}

    @property
    def seed(self) -> int:
        """The seed of all random choices."""
        return self.recipe.seed_of(self.stage)

    @property
    def sampling(self) -> Sampling:
        """The settings of ``generation:``."""
        return self.stage.generation

    @property
    def truncation(self) -> Truncation:
        """How to handle rows that are too long."""
        assert self.stage.data is not None
        return self.stage.data.length

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, with the chat template. The weights are not loaded."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._reference(None), self.stage.template, self.stage.trust_remote_code)

    @property
    def model(self) -> Any:
        """The stage's model, on its device."""
        return self.load().model

    @property
    def generator(self) -> Generator:
        """The stage's generator, with the weights of the model."""
        return self.generator_of(self.load())

    def load(self, source: ModelSource | None = None) -> Loaded:
        """The stage's model, or another one that the settings of its method name. Each model is loaded once."""
        stage, reference, trust = self.stage, self._reference(source), self.stage.trust_remote_code
        if reference not in self._models:
            scores = is_reward_model(reference, trust_remote_code=trust)
            self._models[reference] = load(
                reference, stage.template, stage.precision, trust_remote_code=trust, reward_model=scores
            )
        return self._models[reference]

    def _reference(self, source: ModelSource | None) -> str:
        wanted = source if source is not None else self.stage.model
        assert wanted is not None
        return model_reference(wanted, self.recipe.folder)

    def generator_of(self, loaded: Loaded) -> Generator:
        """A generator as the stage sets it, with the weights of a model. Each model has one.

        Raises:
            UserError: it is a reward model.
        """
        if loaded.is_reward_model:
            raise UserError(f"{loaded.reference} is a reward model, which cannot complete prompts")
        if loaded.reference not in self._generators:
            critic = loaded.value_head if self.spec.values else None
            if critic is not None and (name := self.stage.generator.name) in WITHOUT_VALUES:
                raise UserError(f"{loaded.reference} has a value head, and {NO_VALUES.format(name=name)}")
            make = factory(self.stage.generator, critic, frozen=True)
            self._generators[loaded.reference] = make(loaded.model, loaded.tokenizer)
        return self._generators[loaded.reference]

    def judge(self, settings: JudgeSettings) -> StoredJudge:
        """A judge whose verdicts are stored in the run's folder. There is one for each settings."""
        key, folder, stage = settings.model_dump_json(), self.recipe.folder, self.stage
        if key not in self._judges:
            self._judges[key] = stored_judge(
                settings, folder, folder, stage.name, stage.precision, trust_remote_code=stage.trust_remote_code
            )
        return self._judges[key]

    @property
    def rewards(self) -> list[NamedReward]:
        """The stage's rewards."""
        return self._rewards

    @cached_property
    def _rewards(self) -> list[NamedReward]:
        folder = self.recipe.folder
        rewards = [named_reward(source, self.recipe, folder, self.device) for source in self.stage.reward]
        return rewards if self.environments is None else self.environments.rewards(rewards)

    @property
    def environments(self) -> Environments | None:
        """The stage's environments and tools, if it has any."""
        return self._environments

    @cached_property
    def _environments(self) -> Environments | None:
        return environments_of(self.stage, self.recipe.locate)

    def close(self) -> None:
        """Close the generators and the judges."""
        for part in (*self._generators.values(), *self._judges.values()):
            part.close()
        if "_rewards" in self.__dict__:
            close(self._rewards)
