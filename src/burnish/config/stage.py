"""A training stage: its inputs, its trainer, and the model it writes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainingArguments, set_seed
from transformers.trainer_utils import enable_full_determinism

from burnish import files
from burnish.config import (
    Data,
    Recipe,
    Stage,
    method_class,
    method_spec,
    sources,
)
from burnish.config.card import write_card
from burnish.config.inputs import Checksums, inputs_of, of_rows, refuse_changes
from burnish.config.processes import Processes
from burnish.config.resolve import environments_of, model_reference, named_reward
from burnish.config.termination import SaveAndStop, Termination
from burnish.data import readers as rows
from burnish.data.streaming import RowStream, StreamLoader
from burnish.errors import Terminated, UserError
from burnish.generate.settings import factory
from burnish.models import loading, merge, unsloth
from burnish.models.adapters import add_adapter
from burnish.models.loaded import Loaded, load
from burnish.models.precision import DTYPES, resolve
from burnish.models.settings import ModelSource, Precision
from burnish.render.encode import account
from burnish.render.templates import prepare_template, set_template
from burnish.report.display import Display, RunCallback
from burnish.report.metrics import Recorder, number, read_metrics
from burnish.rewards.functions import NamedReward, close
from burnish.training import checkpoint
from burnish.training.trainer import Trainer
from burnish.types import Encoded, Prompt


class TrainingStage:
    """A training stage. It loads its inputs, trains or resumes, evaluates, and saves a model folder.

    Args:
        recipe: the recipe.
        stage: the stage.
        processes: the processes that train. The first one calls ``run`` and the others ``follow``.
        termination: SIGTERM, which ends training with a checkpoint.
        announce: makes the other processes follow. It is called with the checkpoint to resume from and the precision,
            once the first process has read all inputs: what it downloads, converts or merges, the others find.
    """

    precision: Precision
    """``float32``, ``bf16`` or ``fp16``. ``run`` and ``follow`` set it."""

    def __init__(
        self,
        recipe: Recipe,
        stage: Stage,
        processes: Processes | None = None,
        termination: Termination | None = None,
        announce: Callable[[Path | None, Precision], None] = lambda checkpoint, precision: None,
    ) -> None:
        assert stage.method is not None and stage.model is not None and stage.data is not None
        self.recipe, self.stage = recipe, stage
        self.processes, self.termination = processes or Processes(), termination or Termination()
        self.announce = announce
        self.seed = recipe.seed_of(stage)
        self.data: Data = stage.data
        self.splits = self.data.splits
        self.folder = recipe.folder / stage.name
        self.spec = method_spec(stage.method.name)
        self.source = model_reference(stage.model, recipe.folder)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    @cached_property
    def _checkpoints(self) -> tuple[Path | None, list[str]]:
        return checkpoint.latest(self.folder)

    @property
    def start(self) -> Path | None:
        """The checkpoint that the stage resumes from, or None."""
        return self._checkpoints[0]

    @property
    def damaged(self) -> list[str]:
        """Later checkpoints that are damaged, each with the reason."""
        return self._checkpoints[1]

    def precision_from(self, start: Path | None) -> Precision:
        """What the stage's ``precision`` means here. A stage that resumes keeps what it began with."""
        if start is None:
            width = loading.width(self.source, trust_remote_code=self.stage.trust_remote_code)
            return resolve(self.stage.precision, width)
        begun: Any = checkpoint.precision_of(start)
        return "float32" if begun == "no" else begun

    @property
    def advice(self) -> str | None:
        """What would be faster on this machine, if anything."""
        if self.device == "cpu" or Prompt not in self.spec.kinds or self.stage.generator.name != "local":
            return None
        return (
            f"stages.{self.stage.name}.generator: on a GPU, consider {{name: continuous}}, because local launches one "
            "kernel per operation and token"
        )

    def run(self, screen: Display, entry: Mapping[str, Any], checksums: Checksums) -> dict[str, Any]:
        """Train to the end and return the results for the manifest.

        ``entry`` is the stage's entry in the manifest, with the checksums of its inputs.
        """
        recorder = Recorder(self.folder)
        start = self.start
        for wrong in self.damaged:
            screen.message(f"damaged: {wrong}: {f'{start} is used instead' if start else 'the stage starts over'}")
        files.remove_leftovers(self.folder)
        if start is None:
            recorder.truncate({})
        with contextlib.ExitStack() as stack:
            self.precision = self.precision_from(start)
            inputs = self._inputs(stack, screen)
            self._check_data(entry, checksums)
            if warning := sources.overlap(self.data, self.recipe.folder):
                screen.message(warning)
            if advice := self.advice:
                screen.message(advice)
            self.announce(start, self.precision)
            trainer = self._trainer(inputs, recorder, screen)
            counts = self._train(trainer, start, inputs.splits, screen)
            recorder.offsets()  # flush to disk what was logged after the last checkpoint
            evaluations = self._evaluations()
            outcome: dict[str, Any] = {
                "model": inputs.summary | {"source": self.source},
                "rows": counts,
                "results": {"before": evaluations[0], "after": evaluations[-1]} if evaluations else {},
            }
            self._save(trainer, {**entry, **outcome})
        written = files.listed(self.folder / "model")
        return outcome | {"files": {f"model/{name}": digest for name, digest in written.items()}}

    def follow(self, screen: Display, checkpoint: str | None, precision: Precision) -> None:
        """Do what ``run`` does in the first process, without writing anything."""
        start = Path(checkpoint) if checkpoint else None
        self.precision = precision
        with contextlib.ExitStack() as stack:
            inputs = self._inputs(stack, screen)
            trainer = self._trainer(inputs, None, screen)
            self._train(trainer, start, inputs.splits, screen)
            trainer.engine.state_dict()  # the part of each process in what the first one saves
            trainer.engine.whole_critic()

    def _inputs(self, stack: contextlib.ExitStack, screen: Display) -> _Inputs:
        """Load the model, the rows and the rewards, and create the method. ``stack`` closes them."""
        if self.stage.trainer.full_determinism:  # also sets what a GPU reads at its first computation
            enable_full_determinism(self.seed)
        else:
            set_seed(self.seed)
        model, tokenizer = self._load(screen)
        summary = loading.summary(model, tokenizer) | {"precision": self.precision}
        screen.message(_model_line(self.source, summary))
        splits = {split: self.rows(split) for split in self.splits}
        if _nothing_left(splits["train"]):
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in splits["train"].left_out.items())
            why = f"data.select leaves no row to train on ({reasons})" if reasons else "data.train is empty"
            screen.message(f"{why}: the model stays as it is")
        else:
            check_rewards(self.stage, splits)
        rewards = self._rewards()
        stack.callback(close, rewards)
        method = stack.enter_context(contextlib.closing(self.method(rewards)))
        return _Inputs(model, tokenizer, summary, splits, method)

    def _train(
        self, trainer: Trainer, start: Path | None, splits: dict[str, rows.Rows | RowStream], screen: Display
    ) -> dict[str, Any]:
        """Train, and evaluate before and after. Returns the counts of rows for the manifest.

        Without rows to train on, the model is only evaluated.

        Raises:
            Terminated: a process got SIGTERM.
        """
        if _nothing_left(splits["train"]):
            return self._evaluated(trainer, splits)
        counts = {
            s: _counts(read, trainer.train_examples if s == "train" else trainer.eval_examples)
            for s, read in splits.items()
            if isinstance(read, rows.Rows)
        }
        for split in splits:
            screen.message(f"{split}: {_summary(counts[split]) if split in counts else 'read as a stream'}")
        if start is None and "eval" in splits:
            trainer.evaluate()
        stop = SaveAndStop(self.termination, trainer.engine)
        trainer.add_callback(stop)
        with self.termination.deferred():
            trainer.train(resume_from_checkpoint=str(start) if start else None)
        if stop.step is not None or self.termination.requested:  # perhaps after the last step
            raise Terminated(stop.step if stop.saved else None)
        evaluations = trainer.engine.gather(self._evaluations())[0]  # the first process writes them
        if "eval" in splits and (len(evaluations) < 2 or trainer.state.global_step != evaluations[-1]["step"]):
            trainer.evaluate()
        if isinstance(trainer.loader, StreamLoader):
            counts = {"train": trainer.loader.counts()} | counts
            screen.message(f"train: {_summary(counts['train'])}")
        return counts

    def _evaluated(self, trainer: Trainer, splits: Mapping[str, rows.Rows | RowStream]) -> dict[str, Any]:
        """Evaluate the model without training it. Returns the counts of rows for the manifest."""
        if "eval" in splits:
            trainer.evaluate()
        of = {"train": Encoded([], [])} | ({"eval": trainer.eval_examples} if "eval" in splits else {})
        return {split: _counts(read, of[split]) for split, read in splits.items() if isinstance(read, rows.Rows)}

    def check_inputs(self, before: Mapping[str, Any], checksums: Checksums) -> dict[str, dict[str, str]]:
        """Compute the checksums of rows, models and code for the manifest.

        Raises:
            UserError: if an input has changed since the stage started.
        """
        current = inputs_of(self.recipe, self.stage, checksums)
        if self.start is not None:
            for kind, now in current.items():
                refuse_changes(self.stage, before.get(kind) or {}, now)
        return current

    def _check_data(self, entry: Mapping[str, Any], checksums: Checksums) -> None:
        """Raise a UserError if rows changed while they were read."""
        refuse_changes(self.stage, entry["data"], of_rows(self.data, self.splits, self.recipe.folder, checksums))

    def _evaluations(self) -> list[dict[str, Any]]:
        return [line for line in read_metrics(self.folder) if any(key.startswith("eval_") for key in line)]

    def arguments(self, precision: Precision) -> TrainingArguments:
        """The recipe's trainer settings as TrainingArguments, for passes in this precision."""
        given = self.stage.trainer.arguments()
        if self.stage.loader == "unsloth":  # its own activation checkpointing is on already
            given = {key: value for key, value in given.items() if not key.startswith("activation_checkpointing")}
        try:
            return TrainingArguments(
                output_dir=str(self.folder),
                seed=self.seed,
                use_cpu=self.device == "cpu",
                disable_tqdm=True,
                log_level_replica="error",  # by default, other processes than the first show warnings
                ddp_backend="gloo" if self.device == "cpu" and self.processes.size > 1 else None,
                ddp_timeout=int(self.recipe.parallel.timeout),
                bf16=precision == "bf16",
                fp16=precision == "fp16",
                **given,
            )
        except (ValueError, RuntimeError, ImportError) as error:
            raise UserError(f"stages.{self.stage.name}.trainer: {error}") from error

    def method(self, rewards: list[NamedReward]) -> Any:
        """Create the method from its settings. A method that samples also gets rewards and sampling settings."""
        assert self.stage.method is not None
        settings = self.recipe.method_settings(self.stage.method)
        if Prompt in self.spec.kinds:
            generator = factory(self.stage.generator)
            settings |= {"reward": rewards, "sampling": self.stage.generation, "generator": generator}
        if self.spec.environments:
            settings["environments"] = environments_of(self.stage, self.recipe.locate)
        if self.spec.models:
            settings |= {"load": self._load_other}
        return method_class(self.stage.method.name)(**settings)

    def _load_other(self, source: ModelSource) -> Loaded:
        """Load a model that a setting of the method names."""
        stage = self.stage
        trust = stage.trust_remote_code
        return load(model_reference(source, self.recipe.folder), None, self.precision, trust_remote_code=trust)

    def _load(self, screen: Display) -> tuple[Any, PreTrainedTokenizerBase]:
        """Load the model and its tokenizer, set the stage's template, and add a new adapter if the stage has one."""
        stage = self.stage
        if stage.trust_remote_code:
            screen.message(f"trust_remote_code: running code from {self.source}")
        tokenizer = loading.load_tokenizer(self.source, trust_remote_code=stage.trust_remote_code)
        self._template(tokenizer, screen)
        prepare_template(tokenizer)
        source, trust, adapted = self.source, stage.trust_remote_code, loading.is_adapter(self.source)
        if stage.adapter is not None and adapted:
            source = merge.start_from(source, self.folder / "base", say=screen.message, trust_remote_code=trust)
        frozen_base = stage.adapter is not None or loading.stays_adapter(source, self.spec.task)
        dtype = torch.float32 if not frozen_base else DTYPES[self.precision]
        if stage.loader == "unsloth":
            model: Any = self._load_with_unsloth(source, dtype)
            loading.unwrap(model).config.pad_token_id = tokenizer.pad_token_id
            return model, tokenizer
        of_task = loading.load_reward_model if self.spec.task == "SEQ_CLS" else loading.load_policy
        quantized = stage.adapter.quantize if stage.adapter else None
        model = of_task(source, dtype=dtype, trust_remote_code=trust, quantized=quantized)
        if stage.adapter is not None:
            model = add_adapter(model, stage.adapter, self.spec.task, loading.describe(source))
        elif adapted:
            what = "training continues it on top of" if isinstance(model, PeftModel) else "it is merged into"
            screen.message(f"{source} is an adapter: {what} its base {loading.base_of(loading.resolve(source))}")
        loading.unwrap(model).config.pad_token_id = tokenizer.pad_token_id
        return model, tokenizer

    def _load_with_unsloth(self, source: str, dtype: torch.dtype) -> Any:
        """Load the model through Unsloth, with the stage's adapter.

        Raises:
            UserError: if Unsloth cannot be used here or does not support the stage.
        """
        stage, where = self.stage, f"stages.{self.stage.name}.loader: unsloth"
        unsloth.require(where)
        if self.spec.task != "CAUSAL_LM":
            raise UserError(f"{where}: it loads language models, but this method trains a reward model: remove loader")
        if Prompt in self.spec.kinds and stage.generator.name != "vllm":
            raise UserError(
                f"{where}: generator {stage.generator.name} cannot sample from a model of Unsloth: set generator: "
                "{name: vllm, url: ...}, or remove loader"
            )
        if self.processes.size > 1:
            raise UserError(f"{where}: it trains in one process: remove parallel or loader")
        return unsloth.load_policy(
            source,
            dtype=dtype,
            adapter=stage.adapter,
            base=loading.describe(source) if stage.adapter else None,
            activation_checkpointing=stage.trainer.activation_checkpointing,
            seed=self.seed,
            trust_remote_code=stage.trust_remote_code,
        )

    def _template(self, tokenizer: PreTrainedTokenizerBase, screen: Display) -> None:
        """Set the recipe's plain template, and report if it replaces another one."""
        if self.stage.template is None:
            return
        stored = tokenizer.chat_template
        set_template(tokenizer, self.stage.template)
        if stored is not None and stored != tokenizer.chat_template:
            screen.message(f"template {self.stage.template} replaces the one stored with {self.source}")

    def rows(self, split: str) -> rows.Rows | RowStream:
        """Read the rows of a split, or open them as a stream."""
        folder, kinds = self.recipe.folder, self.spec.kinds
        if split == "train" and self.data.stream:
            return sources.stream(self.data, folder, kinds)
        return sources.read(self.data, split, folder, kinds, self.seed)

    def _rewards(self) -> list[NamedReward]:
        return [named_reward(source, self.recipe, self.recipe.folder, self.device) for source in self.stage.reward]

    def _trainer(self, inputs: _Inputs, recorder: Recorder | None, screen: Display) -> Trainer:
        """The trainer. Without a recorder, nothing is shown or recorded."""
        method, splits = inputs.method, inputs.splits
        shown = [] if recorder is None else [RunCallback(recorder, screen, method.steps_per_iteration)]
        trainer = Trainer(
            model=inputs.model,
            args=self.arguments(self.precision),
            method=method,
            train_dataset=splits["train"],
            eval_dataset=splits.get("eval"),  # type: ignore[arg-type]
            processing_class=inputs.tokenizer,
            truncation=self.data.length,
            token_budget=self.stage.token_budget,
            packed=False if self.stage.loader == "unsloth" else self.stage.packed,
            shared_prompts=self.stage.loader != "unsloth",  # in training, its models ignore the mask that this needs
            on_non_finite=self.stage.trainer.on_non_finite,
            sharded=self.processes.sharded,
            recorder=recorder,
            show_samples=screen.samples,
            callbacks=shown,
        )
        trainer.rows_per_step = self.stage.trainer.per_device_train_batch_size  # for any number of processes
        trainer.remove_callback(PrinterCallback)
        if (limit := trainer.truncation.max_length) != self.data.max_length:
            screen.message(f"data.max_length is not set: it is {limit:,}, the most that the model reads")
        return trainer

    def _save(self, trainer: Trainer, entry: Mapping[str, Any]) -> None:
        """Write a model folder that transformers alone can load. An adapter is merged and also saved separately.

        The config of a reward model stores the mean and standard deviation of its held-out scores. ``entry`` is the
        stage's entry in the manifest, from which the model cards are made.
        """
        state_dict, adapted_critic = trainer.engine.state_dict(), trainer.engine.whole_critic()
        evaluated = entry["results"].get("after", {})
        network = trainer.accelerator.unwrap_model(trainer.model)
        if "eval_score_mean" in evaluated:
            config = loading.unwrap(network.policy).config
            config.score_mean, config.score_std = evaluated["eval_score_mean"], evaluated["eval_score_std"]
        if isinstance(network.policy, PeftModel):
            with files.writing(self.folder / "adapter") as staging:
                network.save_policy(staging, state_dict)
                trainer.tokenizer.save_pretrained(staging)
                write_card(staging, self.recipe, self.stage, entry)
            network.policy = merge.policy_of(network.policy, self.folder / "adapter", self.stage.trust_remote_code)
            if state_dict is not None:
                of_critic = {name: x for name, x in state_dict.items() if name.startswith("critic.")}
                state_dict = {f"policy.{name}": x for name, x in network.policy.state_dict().items()} | of_critic
        if adapted_critic is not None:
            network.critic = adapted_critic.merge_and_unload()
            if state_dict is not None:
                of_critic = {f"critic.{name}": x for name, x in network.critic.state_dict().items()}
                state_dict = {name: x for name, x in state_dict.items() if name.startswith("policy.")} | of_critic
        with files.writing(self.folder / "model") as staging:
            if state_dict is None:
                trainer.save_model(str(staging))
            else:
                trainer.engine.save(staging, state_dict)
                trainer.tokenizer.save_pretrained(staging)
            write_card(staging, self.recipe, self.stage, entry)


class _Inputs(NamedTuple):
    """What a stage trains, and on what."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    summary: dict[str, Any]
    splits: dict[str, rows.Rows | RowStream]
    method: Any


def _nothing_left(train: rows.Rows | RowStream) -> TypeGuard[rows.Rows]:
    """Whether there is no row to train on."""
    return isinstance(train, rows.Rows) and not train.rows


def _model_line(source: str, summary: Mapping[str, Any]) -> str:
    """One line that sums up a model: ``sft/model: LlamaForCausalLM, 181,568 parameters, all trained, ...``."""
    total, trained = summary["parameters"], summary["trainable"]
    share = "all" if trained == total else f"{trained:,} ({number(trained / total, share=True)})"
    passes = "" if summary["precision"] == "float32" else f", passes in {summary['precision']}"
    pad, eos, bos = ("none" if token is None else token for token in summary["pad/eos/bos"])
    return (
        f"{source}: {summary['class']}, {total:,} parameters, {share} trained, {summary['dtype']}{passes}, "
        f"ids of pad {pad}, eos {eos}, bos {bos}"
    )


def _counts(read: rows.Rows, encoded: Encoded) -> dict[str, Any]:
    """The number of rows that a split uses, and which rows were skipped, dropped, shortened or mixed.

    ``by_turn`` is the number of rows that have a sequence for each learned turn.
    """
    count: dict[str, Any] = account(read.rows, encoded.changed)._asdict()
    if by_turn := len(count.pop("by_turn")):
        count["by_turn"] = by_turn
    count["skipped"] = [f"{s.source}: {s.reason}" for s in read.skipped] + count["skipped"]
    if read.left_out:
        count["left_out"] = dict(read.left_out)
    return count | ({"mixed": [m._asdict() for m in read.mixed]} if read.mixed else {})


def _summary(count: Mapping[str, Any]) -> str:
    """One line that sums up the rows: ``512 rows (3 skipped: chat.jsonl:7: unknown role ...)``."""
    notes = [
        f"{m['drawn']:,} from {m['source']}" + (f", which has {m['rows']:,}" if m["drawn"] != m["rows"] else "")
        for m in count.get("mixed", ())
    ]
    for kind in ("skipped", "dropped", "shortened"):
        if named := count[kind]:
            many = count.get(f"{kind} in all", len(named))
            notes.append(f"{many:,} {kind}: {named[0]}" + (" ..." if many > 1 else ""))
    if left_out := count.get("left_out"):
        notes.append(f"left out by data.select: {', '.join(f'{many:,} {why}' for why, many in left_out.items())}")
    if by_turn := count.get("by_turn"):
        notes.append(f"{by_turn:,} with a sequence for each turn, because the chat template rewrites earlier turns")
    return f"{count['rows']:,} rows" + (f" ({'; '.join(notes)})" if notes else "")


def check_rewards(stage: Stage, splits: Mapping[str, rows.Rows | RowStream]) -> None:
    """Raise a UserError if a stage has rewards but no prompts whose completions they could score."""
    rows_of_splits = [part.rows for part in splits.values() if isinstance(part, rows.Rows)]
    if stage.reward and not any(isinstance(row, Prompt) for part in rows_of_splits for row in part):
        raise UserError(
            f"stages.{stage.name}.reward: rewards score completions of prompts, but no row of data.train or data.eval "
            "is a prompt; scored rows have their own rewards: remove this key"
        )
