"""The trainer: asks a method for steps and terms, divides each term by its global count, and steps the optimizer.

It is the only subclass of ``transformers.Trainer``. Arguments, callbacks, trackers, schedules, clipping and
``resume_from_checkpoint`` work as they do there. The difference is the training step: one item of the data loader is
one optimizer step, a list of examples, and this trainer cuts it into micro-batches. Gradient accumulation needs no
setting.
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
import transformers
from accelerate.utils import DynamoBackend
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer import SCHEDULER_NAME

from burnish.data import streaming
from burnish.data.readers import Rows, load
from burnish.errors import UserError, did_you_mean, is_out_of_memory
from burnish.math.statistics import RowSums, paired_changes
from burnish.models.compiled import compile_layers
from burnish.models.dropout import key_dropout
from burnish.models.forward import unwrap
from burnish.models.heads import Network
from burnish.models.layout import default_budget, does_not_fit
from burnish.models.limits import limits_of
from burnish.models.noise import EmbeddingNoise, check_noise
from burnish.protocols import Method, StepLoader
from burnish.render.truncate import Truncation
from burnish.report.metrics import Recorder, describe
from burnish.training import checkpoint, optimizer_state
from burnish.training.arguments import check_arguments, check_generation_config, check_sharded, warn_ignored
from burnish.training.engine import Engine
from burnish.training.non_finite import NonFiniteSteps
from burnish.training.terms import Metrics, add, detach_unused, merge
from burnish.types import Encoded, Example, Metric, MicroBatch, Row, Term, Terms, total_counts


class Trainer(transformers.Trainer):
    """Trains a model with a method.

    Args:
        model: a transformers model, or a peft model around one.
        args: ``TrainingArguments``. An optimizer step has ``per_device_train_batch_size`` x
            ``gradient_accumulation_steps`` x number of processes rows.
        method: the training algorithm: ``SFT()``, ``RewardModel()``, ``PPO(...)`` or any ``burnish.protocols.Method``.
        train_dataset: the rows: dicts, a ``datasets.Dataset``, or what ``burnish.data.readers.load`` returns; or a
            ``burnish.data.streaming.RowStream``, which needs ``args.max_steps``.
        eval_dataset: held-out rows of the same kinds, except a stream.
        processing_class: the tokenizer, with its chat template.
        truncation: the maximum length of a sequence, and what happens to longer rows. By default nothing is truncated.
        token_budget: maximum number of tokens in a micro-batch, including padding. The default is 512 on a CPU, where
            larger micro-batches are no faster. On a GPU, training steps have no limit, and that of passes without
            gradient depends on the free memory. If the device runs out of memory, the budget is halved and the step is
            repeated.
        padding_side: ``right`` or ``left``.
        pad_to: minimum width of a micro-batch, for kernels that are fastest at a fixed width.
        packed: put several sequences into one row, where they do not attend to each other. The default packs if the
            model's attention needs no mask for it.
        shared_prompts: compute a prompt once for all its answers, if the model supports it. This is off if
            ``args.neftune_noise_alpha`` is set.
        on_non_finite: ``error`` stops at the first loss or gradient that is NaN or infinite. ``skip`` skips the step,
            warns and counts it as ``non_finite_steps``, but stops after 10 skipped steps in a row.
        sharded: shard the weights, the gradients and the optimizer's state over the processes (FSDP2), instead of
            keeping all of them in every process. ``docs/runs.md`` lists what it needs.
        recorder: writes samples to the run's folder; None writes none.
        show_samples: called with samples as they are made, for example to print them.
        others: further arguments of ``transformers.Trainer`` (``callbacks``, ``optimizers``, ...).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: TrainingArguments,
        method: Method,
        train_dataset: Iterable[Any] | Rows | streaming.RowStream,
        eval_dataset: Iterable[Any] | Rows | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        *,
        truncation: Truncation | None = None,
        token_budget: int | None = None,
        padding_side: str = "right",
        pad_to: int = 0,
        packed: bool | None = None,
        shared_prompts: bool = True,
        on_non_finite: Literal["error", "skip"] = "error",
        sharded: bool = False,
        recorder: Recorder | None = None,
        show_samples: Callable[[list[dict[str, Any]]], None] | None = None,
        **others: Any,
    ) -> None:
        if processing_class is None:
            raise UserError("Trainer needs processing_class, the model's tokenizer")
        check_arguments(args, on_non_finite)
        if sharded:
            check_sharded(args)
        warn_ignored(args)
        self.method = method
        self.tokenizer: Any = processing_class
        self.truncation = truncation or Truncation()
        self.recorder = recorder
        self.show_samples = show_samples
        self.rows_per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._set_rows(train_dataset, eval_dataset, args.max_steps)
        check_noise(args.neftune_noise_alpha, self.rows)
        self.network: Network = method.prepare(model, processing_class)
        policy = unwrap(self.network.policy)
        check_generation_config(policy)
        self.limits = limits_of(policy.config, self.tokenizer)
        self.truncation = self.limits.default(self.truncation, self.rows, method.spec.too_long)
        self.noise = EmbeddingNoise(self.network.policy, args.neftune_noise_alpha)
        super().__init__(
            model=self.network,
            args=dataclasses.replace(
                args,
                gradient_accumulation_steps=1,
                ignore_data_skip=True,
                logging_nan_inf_filter=False,  # on_non_finite decides; the filter would read every loss once more
                remove_unused_columns=False,
                max_steps=_max_steps(args, method),
            ),
            train_dataset=self.rows if self.stream is None else self.stream,  # type: ignore[arg-type]
            eval_dataset=self.eval_rows or None,  # type: ignore[arg-type]
            processing_class=processing_class,
            **others,
        )
        self.neftune_noise_alpha = None  # self.noise adds it, transformers must not
        self.dropout = key_dropout(self.network.models)
        self.engine = Engine(
            self.network,
            self.accelerator,
            token_budget or default_budget(args.device),
            sharded,
            pad_id=self.tokenizer.pad_token_id or 0,
            side=padding_side,
            pad_to=pad_to,
            packed=packed,
            shared_prompts=shared_prompts and not args.neftune_noise_alpha,
        )
        if args.torch_compile:
            for trained in self.network.models:
                compile_layers(trained, args.torch_compile_backend, args.torch_compile_mode)
        dynamo: Any = self.accelerator.state.dynamo_plugin
        dynamo.backend = DynamoBackend.NO  # accelerate would compile the method and the loss
        self.run = TrainerRun(self)
        self.loader: StepLoader | None = None
        self.last_sums: Metrics = {}
        self.start: dict[str, RowSums] = {}
        self.measured: dict[str, RowSums] = {}
        self.non_finite = NonFiniteSteps(on_non_finite, self.folder, args.learning_rate)
        self._skipped = False
        self._sources: list[str] = []
        self._unsealed: Path | None = None
        self._clock = time.perf_counter()
        self._begin_log()

    def _set_rows(
        self, train: Iterable[Any] | Rows | streaming.RowStream, evaluation: Iterable[Any] | Rows | None, max_steps: int
    ) -> None:
        """Parse the rows, or check that the method can train on a stream."""
        self.stream = train if isinstance(train, streaming.RowStream) else None
        if self.stream is not None:
            streaming.check(self.method, max_steps)
        self.rows = [] if self.stream is not None else self._rows(train)
        self.eval_rows = [] if evaluation is None else self._rows(evaluation)

    def _begin_log(self) -> None:
        """Reset the sums that the next line of the log reports."""
        self.pending: dict[str, list[float]] = {}
        self._sums: Metrics = {}
        self._tokens = self._steps_since_log = self._losses_since_log = 0

    def _rows(self, rows: Any) -> list[Row]:
        if isinstance(rows, Rows):
            return rows.rows
        rows = list(rows)
        return rows if rows and isinstance(rows[0], Row) else load(rows, self.method.spec.kinds).rows

    # --- steps -----------------------------------------------------------------------------------------------------

    def _encoded(self, rows: list[Row]) -> Encoded:
        encoded = self.method.examples(rows, self.tokenizer, self.truncation)
        self.limits.check(encoded.examples)
        return encoded

    def _encoded_for_evaluation(self, rows: list[Row]) -> Encoded:
        truncation = self.limits.default(self.truncation, rows, self.method.spec.too_long)
        encoded = self.method.eval_examples(rows, self.tokenizer, truncation)
        self.limits.check(encoded.examples)
        return encoded

    @cached_property
    def train_examples(self) -> Encoded:
        """The examples of the training data, and the rows that were truncated or dropped. They are encoded once.

        A stream has none: it is encoded as it is read.
        """
        return self._encoded(self.rows)

    @cached_property
    def eval_examples(self) -> Encoded:
        """The examples of the evaluation data, and the rows that were truncated or dropped."""
        return self._encoded_for_evaluation(self.eval_rows)

    @property
    def folder(self) -> Path:
        """The folder of the checkpoints."""
        return Path(self.args.output_dir or "trainer_output")

    def get_train_dataloader(self) -> Any:
        """The method's loader. There is only one, since it keeps track of its place in the data."""
        if self.loader is None and self.stream is not None:
            self.loader = streaming.StreamLoader(
                self.stream, self._encoded, self.rows_per_step, self.args.seed, self.args.max_steps
            )
        elif self.loader is None:
            self.loader = self.method.loader(self.train_examples.examples, self.engine, self.run)
        self._clock = time.perf_counter()  # encoding the rows is not part of the first step
        return self.loader

    def num_examples(self, dataloader: Any) -> int:
        """The number of rows of the training data, or, for a stream, those of all steps."""
        return len(self.rows) if self.stream is None else self.rows_per_step * self.args.max_steps

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, None]:
        """The next optimizer step, or an empty list at the end of an epoch or of the run."""
        if self.state.global_step >= self.state.max_steps:
            return [], None
        return [[step] for step in [next(epoch_iterator, None)] if step is not None], None

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Compute the gradient of one optimizer step. On out-of-memory, repeat it with half the token budget."""
        examples: list[Example] = inputs[0]
        self._tokens += sum(len(s.tokens) for e in examples for s in e.sequences)
        self._skipped = not examples
        self._sources = [example.source for example in examples]
        self._steps_since_log += 1
        if not examples:
            return torch.zeros((), device=self.args.device)
        self._losses_since_log += 1
        random_state = torch.get_rng_state()
        while True:
            try:
                return self._forward_backward(model, examples)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if not self.engine.halve_budget(examples):
                    raise does_not_fit(error, examples) from error
            model.zero_grad()
            torch.set_rng_state(random_state)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _forward_backward(self, model: torch.nn.Module, examples: list[Example]) -> Tensor:
        model.train()
        counts, weights = total_counts(examples), self.method.weights
        batches = self.engine.cut(examples) if any(counts.values()) else []
        sums: Metrics = {}
        losses: list[Tensor] = []
        problem: str | None = None

        def terms_of(batch: MicroBatch) -> Terms:
            return detach_unused(self.method.loss(self.network, batch), weights, counts)

        def run(batch: MicroBatch) -> None:
            at = (batch, self.args.seed, self.state.global_step)
            with self.dropout.of(*at), self.noise.of(*at):
                terms: Terms = model(terms_of, batch)
                parts = [
                    weights[name] * term.total / counts[term.unit]
                    for name, term in terms.items()
                    if isinstance(term, Term) and name in weights and counts[term.unit] > 0
                ]
                if parts:
                    loss = torch.stack(parts).sum()
                    self.engine.backward(loss)
                    losses.append(loss.detach())
                else:
                    losses.append(torch.zeros((), device=self.args.device))
            add(sums, terms, batch)

        for batch in batches:
            self.engine.between()
            # after a problem the step will be repeated, but the other processes still wait in each micro-batch
            problem = self.engine.attempt(run, batch, examples, problem)
        loss_sum = torch.stack(losses).sum() if losses else torch.zeros((), device=self.args.device)
        if not self.engine.all(loss_sum.isfinite() if problem is None else torch.zeros_like(loss_sum)):
            bad = [s for x, b in zip(losses, batches, strict=False) if not x.isfinite() for s in b.sources]
            parts = self.engine.gather((loss_sum.item(), bad, problem))
            if problems := [problem for _, _, problem in parts if problem is not None]:
                raise torch.OutOfMemoryError(problems[0])
            self._sources = [source for _, sources, _ in parts for source in sources] or self._sources
            self._skip(model, f"the loss is {sum(loss for loss, _, _ in parts):g}")
            self.last_sums, self._losses_since_log = {}, self._losses_since_log - 1
            return torch.zeros((), device=self.args.device)
        self.engine.sum_gradients()
        self.last_sums = sums
        merge(self._sums, sums)
        assert self.loader is not None
        self.loader.check()
        # logging averages it over processes
        return loss_sum * self.engine.world_size

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        return self.engine.clip(self.args.max_grad_norm)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """The norm before clipping. A step whose gradient is not finite is skipped."""
        norm = float(self.engine.clip(math.inf) if grad_norm is None else grad_norm)
        # infinite gradients are normal with loss scaling (fp16): the scaler skips these steps
        if self.accelerator.scaler is None and not math.isfinite(norm):
            self._skip(model, f"the norm of the gradient is {norm:g}")
        elif not self._skipped:
            self.non_finite.in_a_row = 0
        return norm

    def _skip(self, model: torch.nn.Module, problem: str) -> None:
        """Skip this step, or raise the UserError that stops the run."""
        self._skipped = True
        self.non_finite.add(self.state.global_step + 1, problem, self._sources)
        model.zero_grad()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers.

        Raises:
            UserError: a loss, a gradient, or a weight is not finite.
        """
        self._begin_log()
        output = super().train(*args, **kwargs)
        self.non_finite.check_weights(self.engine, self.state.global_step)
        self._rotate()  # an earlier process may have been killed between its last checkpoint and this
        return output

    # --- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(  # type: ignore[override]
        self,
        eval_dataset: Iterable[Any] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Compute and log the method's metrics on held-out rows, with the prefix ``eval_``.

        From the second evaluation of ``eval_dataset`` on, a headline metric X also has X_change_low and X_change_high,
        the 95 % interval of its change since the first one, paired by row.
        """
        rows = self.eval_rows if eval_dataset is None else self._rows(eval_dataset)
        if not rows:
            raise UserError("there is nothing to evaluate on: name data.eval in the recipe, or pass eval_dataset")
        encoded = self.eval_examples if eval_dataset is None else self._encoded_for_evaluation(rows)
        self._wrap()
        self.measured = {}
        measured = self.method.evaluate(encoded.examples, self.engine, self.run)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in measured.items()}
        if not math.isfinite(loss := metrics.get(f"{metric_key_prefix}_loss", 0.0)):
            advice = self.non_finite.advice() if self.state.global_step else "Check the model and these rows"
            raise UserError(f"step {self.state.global_step}: the loss on held-out rows is {loss:g}. {advice}")
        self._check_best_metric(metrics, metric_key_prefix)
        if eval_dataset is None:
            metrics |= {f"{metric_key_prefix}_{name}": value for name, value in self._changes().items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self._clock = time.perf_counter()
        return metrics

    def _changes(self) -> dict[str, float]:
        """Intervals of the changes since the first evaluation, which a checkpoint keeps; empty in the first one."""
        if not self.start:
            self.start = self.measured
            return {}
        intervals = paired_changes(self.start, self.measured)
        return {
            f"{name}_change_{end}": value
            for name, bounds in intervals.items()
            for end, value in zip(("low", "high"), bounds, strict=True)
        }

    def _check_best_metric(self, metrics: Mapping[str, float], prefix: str) -> None:
        """Raise a UserError if the metric that decides which checkpoint is best is not measured."""
        best = self.args.metric_for_best_model
        known = [name.removeprefix(f"{prefix}_") for name in metrics]
        if prefix == "eval" and best is not None and (name := best.removeprefix("eval_")) not in known:
            raise UserError(
                f"metric_for_best_model: {name!r} is not measured on the held-out rows{did_you_mean(name, known)}; "
                f"measured are {', '.join(known)}"
            )

    # --- optimizer and logs ----------------------------------------------------------------------------------------

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        # transformers creates the optimizer first, but its parameters must be the sharded ones
        self._wrap()
        return super()._prepare_for_training(*args, **kwargs)

    def _wrap(self) -> None:
        """Prepare the network for several processes."""
        prepared = self.engine.wrap(self.network)
        if self.engine.world_size > 1:
            self.model_wrapped = prepared

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """As in transformers, with a separate learning rate for each part of the network that the method names."""
        optimizer = super().create_optimizer(model) if model is not None else super().create_optimizer()
        for part, rate in self.method.learning_rates.items():
            of_part = {id(p) for p in getattr(self.network, part).parameters()}
            for group in list(optimizer.param_groups):
                moved = [p for p in group["params"] if id(p) in of_part]
                if moved:
                    group["params"] = [p for p in group["params"] if id(p) not in of_part]
                    optimizer.add_param_group({**group, "params": moved, "lr": rate})
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the loss with the means of the method's terms since the last line, the tokens and the seconds."""
        steps = len(self.loader) if self.loader is not None else 0
        if steps:
            # transformers' own count starts where the run was resumed
            self.state.epoch = self.state.global_step / steps
        if "loss" in logs:
            now = time.perf_counter()
            seconds, self._clock = now - self._clock, now
            logs |= self.engine.means(self._sums) | {name: fmean(values) for name, values in self.pending.items()}
            logs |= {"tokens": self._tokens, "seconds": seconds, "tokens_per_second": self._tokens / seconds}
            if self._losses_since_log < self._steps_since_log:
                # transformers divides by all steps, but steps that were skipped or left out have no loss
                loss, counted = logs.pop("loss") * self._steps_since_log, self._losses_since_log
                if counted:
                    logs["loss"] = loss / counted
                elif self._tokens:
                    logs["loss"] = math.nan  # all of them were skipped because they are not finite
            if self.non_finite.total:
                logs["non_finite_steps"] = self.non_finite.total
            self._begin_log()
        super().log(logs, start_time)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # a checkpoint does not store sums that are not logged yet, so log before each one
        self.control.should_log |= self.control.should_save
        super()._maybe_log_save_evaluate(*args, **kwargs)

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        # while a checkpoint is written, transformers writes into a folder that is not complete yet
        return str(self._unsealed or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any = None) -> None:
        """Write a checkpoint with the weights, the optimizer, the loader's place and the sizes of the logs."""
        self.non_finite.check_weights(self.engine, self.state.global_step)
        with checkpoint.writing(
            self.folder, self.state, self._resume_state(), self.accelerator, self.args.should_save
        ) as self._unsealed:
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._unsealed = None
        self._rotate()

    def _rotate(self) -> None:
        """Remove the checkpoints beyond ``save_total_limit``."""
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            limit, step = self.args.save_total_limit, self.state.global_step
            checkpoint.rotate(self.folder, limit, Path(best) if best else None, step)

    def _resume_state(self) -> checkpoint.ResumeState:
        assert self.loader is not None
        return checkpoint.ResumeState(
            loader=self.loader.state_dict(),
            rows_per_step=self.rows_per_step,
            token_budget=self.engine.token_budget,
            pass_budget=self.engine.layout.pass_budget,
            precision=self.engine.precision,
            last=self.engine.totals(self.last_sums),
            non_finite=(self.non_finite.total, self.non_finite.in_a_row),
            logs=self.recorder.offsets() if self.recorder is not None else {},
            start={name: vars(one) for name, one in self.start.items()},
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in transformers. All processes call it; the first one writes the files."""
        if not self.engine.sharded:
            super().save_model(output_dir, _internal_call)
            return
        state_dict = self.engine.state_dict()
        if self.args.should_save:
            self._save(output_dir, state_dict)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the weights as a folder that transformers loads, and the tokenizer."""
        folder = Path(output_dir) if output_dir else self.folder
        folder.mkdir(parents=True, exist_ok=True)
        self.engine.save(folder, state_dict)
        self.tokenizer.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save both so that any number of processes can load them, if the optimizer's state has a plain form."""
        optimizer: Any = self.optimizer
        if not optimizer_state.can_name(optimizer):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        folder = Path(output_dir)
        optimizer_state.save(
            self.network, optimizer, folder / optimizer_state.FOLDER, self.engine.rank, self.engine.sharded
        )
        if self.args.should_save:
            scheduler: Any = self.lr_scheduler
            torch.save(scheduler.state_dict(), folder / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both from a checkpoint of any number of processes, sharded or not."""
        folder = Path(checkpoint or "")
        if checkpoint is None or not (folder / optimizer_state.FOLDER).is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        optimizer: Any = self.optimizer
        scheduler: Any = self.lr_scheduler
        optimizer_state.load(self.network, optimizer, folder / optimizer_state.FOLDER, self.engine.sharded)
        scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))

    def _load_best_model(self) -> None:
        self.engine.load(str(self.state.best_model_checkpoint))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights and the loader's place, and truncate the logs to what they were at the checkpoint."""
        folder = Path(resume_from_checkpoint)
        state = checkpoint.load(folder)
        if state.rows_per_step != self.rows_per_step:
            self.rows_per_step = state.rows_per_step
            warnings.warn(f"the run keeps its {self.rows_per_step} rows per optimizer step", stacklevel=2)
        self.engine.token_budget, self.engine.layout.pass_budget = state.token_budget, state.pass_budget
        self.non_finite.total, self.non_finite.in_a_row = state.non_finite
        self.start = {name: RowSums(**fields) for name, fields in state.start.items()}
        # these are sums over all processes, so only one process may count them
        last = state.last.items() if self.engine.rank == 0 else ()
        self.last_sums = {
            name: Metric(torch.tensor(total, dtype=torch.float64), torch.tensor(count, dtype=torch.float64))
            for name, (total, count) in last
        }
        self.engine.load(folder)
        self.get_train_dataloader().load_state_dict(state.loader)
        if self.recorder is not None and state.logs:
            self.recorder.truncate(state.logs)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but it also finds the best checkpoint of a run whose folder was moved."""
        progress = super()._init_training_state(*args, **kwargs)
        checkpoint.find_best(self.folder, self.state)
        return progress


class TrainerRun:
    """The run as its method sees it: the ``protocols.Run`` of a trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self.trainer.tokenizer

    @property
    def seed(self) -> int:
        """The seed of the training arguments."""
        return self.trainer.args.seed

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step, over all processes."""
        return self.trainer.rows_per_step

    @property
    def steps(self) -> int:
        """The number of optimizer steps after which training ends; 0 before it begins."""
        return self.trainer.state.max_steps

    def last(self) -> dict[str, float]:
        """Means of the terms and metrics of the last optimizer step, over all processes."""
        return self.trainer.engine.means(self.trainer.last_sums)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the next line of the log, which reports their means."""
        for name, value in metrics.items():
            self.trainer.pending.setdefault(name, []).append(value)

    def samples(self, rows: list[dict[str, Any]]) -> None:
        """Write rows to samples.jsonl and show them, on the first process only."""
        trainer = self.trainer
        if trainer.is_world_process_zero():
            rows = [{"step": trainer.state.global_step, **row} for row in rows]
            if trainer.recorder is not None:
                trainer.recorder.samples(rows)
            if trainer.show_samples is not None:
                trainer.show_samples(rows)

    def measured(self, metrics: Mapping[str, RowSums]) -> None:
        """Keep the headline metrics of an evaluation as sums over each row, to compare them with the first one."""
        self.trainer.measured = {name: one for name, one in metrics.items() if describe(name).headline}


def _max_steps(args: TrainingArguments, method: Method) -> int:
    """The number of optimizer steps, if the method limits its iterations; else that of the arguments."""
    if method.iterations is None:
        return args.max_steps
    if args.max_steps > 0:
        raise UserError(f"max_steps {args.max_steps} and iterations {method.iterations}: set only one of them")
    return method.iterations * method.steps_per_iteration
