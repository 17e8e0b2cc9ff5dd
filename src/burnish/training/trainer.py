"""The one trainer: asks a method for steps and terms, divides each term by its global count, and steps.

It is the single subclass of ``transformers.Trainer``. Arguments, callbacks, trackers, schedules, clipping and
``resume_from_checkpoint`` work as they do there; what differs is what one step is. An item of the data loader is one
optimizer step, a list of examples that is cut into micro-batches here, so accumulation is never a setting.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from burnish import files
from burnish.data import streaming
from burnish.data.readers import Rows, load
from burnish.errors import UserError
from burnish.models.dropout import key_dropout
from burnish.models.finite import non_finite
from burnish.models.heads import Network
from burnish.models.layout import default_budget, is_out_of_memory
from burnish.models.noise import EmbeddingNoise, check_noise
from burnish.protocols import Method, StepLoader
from burnish.render.truncate import Truncation
from burnish.report.metrics import Recorder
from burnish.training.arguments import OnNonFinite, warn_ignored
from burnish.training.engine import Engine
from burnish.training.terms import Metrics, add, learned, merge
from burnish.types import Encoded, Example, Metric, MicroBatch, Row, Term, Terms, total_counts

LOADER_STATE = "burnish.pt"
MOST_IN_A_ROW = 10  # a run stops at so many skipped steps one after another


class Trainer(transformers.Trainer):
    """Trains a model by a method.

    Args:
        model: a transformers model, or a peft model around one.
        args: ``TrainingArguments``. Rows of an optimizer step are ``per_device_train_batch_size`` x
            ``gradient_accumulation_steps`` x processes.
        method: what to learn: ``SFT()``, ``RewardModel()``, ``PPO(...)`` or any ``burnish.protocols.Method``.
        train_dataset: rows: dicts, ``datasets.Dataset``, or what ``burnish.data.readers.load`` returned; or a
            ``burnish.data.streaming.RowStream``, which needs ``args.max_steps``.
        eval_dataset: rows of the same kind that training does not see.
        processing_class: the tokenizer, with the chat template.
        length: the longest sequence, and what to do with longer ones (an error unless said otherwise).
        token_budget: the most tokens, with padding, of one micro-batch; None is 512 on a CPU, where more is not
            faster, and else the whole step. On out-of-memory it is halved and the step is done again.
        padding_side: right or left; pad_to: the least width of a micro-batch (for kernels that want round numbers);
            packed: several sequences in one row that do not see each other; None packs where that is fastest, which
            is where attention needs no mask for it. shared_prompts: answers to one prompt stand behind it, and it
            runs once, where the model allows it and ``args.neftune_noise_alpha`` is not set.
        on_non_finite: ``error`` stops at the first loss or gradient that is NaN or infinite; ``skip`` skips the step,
            warns, and counts it as ``non_finite_steps``, but stops after 10 such steps in a row.
        sharded: shard the weights, their gradients and the state of the optimizer over the processes (FSDP2), in place
            of a replica in each. It needs several processes and a model without adapter; see docs/runs.md.
        recorder: where samples go; None keeps none.
        others: as in ``transformers.Trainer`` (callbacks, optimizers, ...).
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
        length: Truncation | None = None,
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
        if args.n_gpu > 1:
            raise UserError(
                f"{args.n_gpu} GPUs in one process: start one process for each (torchrun --nproc-per-node {args.n_gpu} "
                "...), or choose one GPU with CUDA_VISIBLE_DEVICES=0"
            )
        if on_non_finite not in get_args(OnNonFinite):
            raise UserError(f"on_non_finite: expected error or skip, got {on_non_finite!r}")
        if on_non_finite == "skip" and args.fp16:
            raise UserError("on_non_finite: skip: with fp16 the loss scaler skips steps itself: take this setting away")
        warn_ignored(args)
        self.method = method
        self.length = length or Truncation()
        self.on_non_finite = on_non_finite
        self.recorder = recorder
        self.show_samples = show_samples
        self.rows_per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        args = dataclasses.replace(
            args, gradient_accumulation_steps=1, ignore_data_skip=True, remove_unused_columns=False
        )
        self.stream = train_dataset if isinstance(train_dataset, streaming.RowStream) else None
        if self.stream is not None:
            streaming.check(method, args.max_steps)
        self.rows = [] if self.stream is not None else self._rows(train_dataset)
        self.eval_rows = [] if eval_dataset is None else self._rows(eval_dataset)
        check_noise(args.neftune_noise_alpha, self.rows)
        self.tokenizer: Any = processing_class
        network = method.prepare(model, processing_class)
        self.noise = EmbeddingNoise(network.policy, args.neftune_noise_alpha)
        super().__init__(
            model=network,
            args=args,
            train_dataset=self.rows if self.stream is None else self.stream,  # type: ignore[arg-type]
            eval_dataset=self.eval_rows or None,  # type: ignore[arg-type]
            processing_class=processing_class,
            **others,
        )
        self.neftune_noise_alpha = None  # not by transformers: self.noise
        self.network: Network = network
        self.dropout = key_dropout(network.models)
        shared_prompts = shared_prompts and not args.neftune_noise_alpha
        pad_id = self.tokenizer.pad_token_id or 0
        self.engine = Engine(
            network,
            self.accelerator,
            token_budget or default_budget(args.device),
            sharded,
            pad_id=pad_id,
            side=padding_side,
            pad_to=pad_to,
            packed=packed,
            shared_prompts=shared_prompts,
        )
        self.run = TrainerRun(self)
        self.loader: StepLoader | None = None
        self.last_sums: Metrics = {}
        self.non_finite_steps = self._non_finite_in_a_row = 0
        self._skipped = False
        self._sources: list[str] = []
        self._clock = time.perf_counter()
        self._begin_log()

    def _begin_log(self) -> None:
        """Forget what was summed up since the last line of the log."""
        self.pending: dict[str, list[float]] = {}
        self._sums: Metrics = {}
        self._tokens = self._steps_since_log = self._losses_since_log = 0

    def _rows(self, rows: Any) -> list[Row]:
        rows = rows.rows if isinstance(rows, Rows) else list(rows)
        return rows if rows and isinstance(rows[0], Row) else load(rows, self.method.spec.kinds).rows

    # --- steps -----------------------------------------------------------------------------------------------------

    def _encoded(self, rows: list[Row]) -> Encoded:
        return self.method.examples(rows, self.tokenizer, self.length)

    @cached_property
    def train_examples(self) -> Encoded:
        """The examples of the training data, and what was cut or dropped; encoded once, when they are first asked for.

        Of a stream there are none: it is encoded as it is read.
        """
        return self._encoded(self.rows)

    @cached_property
    def eval_examples(self) -> Encoded:
        """The examples of the evaluation data, and what was cut or dropped."""
        return self.method.eval_examples(self.eval_rows, self.tokenizer, self.length)

    @property
    def folder(self) -> Path:
        """Where checkpoints go."""
        return Path(self.args.output_dir or "trainer_output")

    def get_train_dataloader(self) -> Any:
        """The method's loader, made once: it keeps its own place in the data."""
        if self.loader is None and self.stream is not None:
            self.loader = streaming.StreamLoader(
                self.stream, self._encoded, self.rows_per_step, self.args.seed, self.args.max_steps
            )
        elif self.loader is None:
            self.loader = self.method.loader(self.train_examples.examples, self.engine, self.run)
        return self.loader

    def num_examples(self, dataloader: Any) -> int:
        """Rows of the training data; of a stream those of the run's steps."""
        return len(self.rows) if self.stream is None else self.rows_per_step * self.args.max_steps

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, None]:
        """The next optimizer step, or nothing at the end of the epoch or of a finished run."""
        if self.state.global_step >= self.state.max_steps:
            return [], None
        return [[step] for step in [next(epoch_iterator, None)] if step is not None], None

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Gradient of one optimizer step; on out-of-memory again, with half the token budget."""
        examples: list[Example] = inputs[0]
        self._tokens += sum(len(s.tokens) for e in examples for s in e.sequences)
        self._skipped = not examples
        self._sources = [example.source for example in examples]
        self._steps_since_log += 1
        self._losses_since_log += 1
        if not examples:
            return torch.zeros((), device=self.args.device)
        random_state = torch.get_rng_state()
        while True:
            try:
                return self._forward_backward(model, examples)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or not self.engine.halve_budget(examples):
                    raise
            model.zero_grad()
            torch.set_rng_state(random_state)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _forward_backward(self, model: torch.nn.Module, examples: list[Example]) -> Tensor:
        model.train()
        counts, weights = total_counts(examples), self.method.weights
        batches = self.engine.cut(examples) if any(counts.values()) else []
        sums: Metrics = {}
        losses = []

        def terms_of(batch: MicroBatch) -> Terms:
            return learned(self.method.loss(self.network, batch), weights, counts)

        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            at = (batch, self.args.seed, self.state.global_step)
            syncing = contextlib.nullcontext() if last else self.accelerator.no_sync(model)
            with self.dropout.of(*at), self.noise.of(*at), syncing:
                terms: Terms = model(terms_of, batch)
                parts = [
                    weights[name] * term.total / counts[term.unit]
                    for name, term in terms.items()
                    if isinstance(term, Term) and term.total.requires_grad
                ]
                if parts:
                    loss = torch.stack(parts).sum()
                    # wrappers average the gradients of processes, but terms are sums already divided once
                    self.accelerator.backward(loss * self.engine.world_size)
                    losses.append(loss.detach())
                else:
                    losses.append(torch.zeros((), device=self.args.device))
            add(sums, terms, batch)
        loss_sum = torch.stack(losses).sum() if losses else torch.zeros((), device=self.args.device)
        if not self.engine.all(loss_sum.isfinite()):
            bad = [s for x, b in zip(losses, batches, strict=True) if not x.isfinite() for s in b.sources]
            parts = self.engine.gather((loss_sum.item(), bad))
            self._sources = [source for _, sources in parts for source in sources] or self._sources
            self._skip(f"the loss is {sum(loss for loss, _ in parts):g}")
            model.zero_grad()
            self.last_sums, self._losses_since_log = {}, self._losses_since_log - 1
            return torch.zeros((), device=self.args.device)
        self.last_sums = sums
        merge(self._sums, sums)
        assert self.loader is not None
        self.loader.check()
        # averaged over processes when it is logged
        return loss_sum * self.engine.world_size

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        return self.engine.clip(self.args.max_grad_norm)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """The norm before clipping; a step whose gradient is not finite is not taken."""
        norm: Any = self.engine.clip(math.inf) if grad_norm is None else grad_norm
        # with loss scaling (fp16) infinite gradients are part of the method: its scaler leaves such steps out
        if self.accelerator.scaler is None and not math.isfinite(norm):
            self._skip(f"the norm of the gradient is {float(norm):g}")
            model.zero_grad()
        elif not self._skipped:
            self._non_finite_in_a_row = 0
        return norm

    def _skip(self, what: str) -> None:
        """Count a step that is not taken, or stop the run where skipping is not asked for.

        Raises:
            UserError: what is wrong, in which rows, and what to do about it.
        """
        self._skipped = True
        self.non_finite_steps += 1
        self._non_finite_in_a_row += 1
        step, rows = self.state.global_step + 1, list(dict.fromkeys(self._sources))
        named = ", ".join(rows[:3]) + (f" and {len(rows) - 3} more rows" if len(rows) > 3 else "")
        if self.on_non_finite == "skip" and self._non_finite_in_a_row < MOST_IN_A_ROW:
            warnings.warn(f"skipped step {step}: {what}, in {named}", stacklevel=2)
            return
        again = f", the {self._non_finite_in_a_row}th step in a row" if self.on_non_finite == "skip" else ""
        skip = "" if self.on_non_finite == "skip" else "; trainer.on_non_finite: skip skips single steps like this one"
        raise UserError(
            f"step {step}: {what}, in {named}{again}. {self._advice()}, or these rows hold extreme numbers{skip}"
        )

    def _advice(self) -> str:
        """What usually makes numbers infinite, and where the last good weights are."""
        saved, _ = files.latest(self.folder)
        kept = f"the last good checkpoint is {saved}" if saved else "there is no checkpoint before it"
        return (
            f"This step was not saved: {kept}. Usually the learning rate is too high (it is "
            f"{self.args.learning_rate:g}) or lacks warmup_steps"
        )

    def _check_weights(self) -> None:
        """Raise a UserError where a trained weight is not finite, before it is saved in the place of a good one."""
        names = self.engine.gather(non_finite(self.network, trained=True))
        if (name := next((name for name in names if name is not None), None)) is not None:
            raise UserError(
                f"step {self.state.global_step}: the weight {name.removeprefix('policy.')} holds NaN or infinity after "
                f"the step. {self._advice()}"
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers.

        Raises:
            UserError: a loss, a gradient, or a weight is not finite.
        """
        self._begin_log()
        found = super().train(*args, **kwargs)
        self._check_weights()
        if self.args.should_save:
            self._rotate()  # a run that was killed before it did so has nothing more to save
        return found

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; the best checkpoint is found again in a run that was moved."""
        found = super()._init_training_state(*args, **kwargs)
        best = self.folder / f"checkpoint-{self.state.best_global_step}"
        if self.state.best_global_step and best.is_dir():
            self.state.best_model_checkpoint = str(best)
        return found

    # --- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(  # type: ignore[override]
        self,
        eval_dataset: Iterable[Any] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """The method's metrics on rows that training does not see, logged with the prefix ``eval_``."""
        rows = self.eval_rows if eval_dataset is None else self._rows(eval_dataset)
        if not rows:
            raise UserError("there is nothing to evaluate on: name data.eval in the recipe, or pass eval_dataset")
        if eval_dataset is None:
            encoded = self.eval_examples
        else:
            encoded = self.method.eval_examples(rows, self.tokenizer, self.length)
        measured = self.method.evaluate(encoded.examples, self.engine, self.run)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in measured.items()}
        if not math.isfinite(loss := metrics.get(f"{metric_key_prefix}_loss", 0.0)):
            advice = self._advice() if self.state.global_step else "Check the model and these rows"
            raise UserError(f"step {self.state.global_step}: the loss on held-out rows is {loss:g}. {advice}")
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self._clock = time.perf_counter()
        return metrics

    # --- optimizer and logs ----------------------------------------------------------------------------------------

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        # before the optimizer is created
        self.engine.wrap(self.network)
        return super()._prepare_for_training(*args, **kwargs)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """As in transformers, with a learning rate of its own for each part of the network that the method names."""
        optimizer = super().create_optimizer(model) if model is not None else super().create_optimizer()
        for part, rate in self.method.learning_rates.items():
            mine = {id(p) for p in getattr(self.network, part).parameters()}
            for group in list(optimizer.param_groups):
                chosen = [p for p in group["params"] if id(p) in mine]
                if chosen:
                    group["params"] = [p for p in group["params"] if id(p) not in mine]
                    optimizer.add_param_group({**group, "params": chosen, "lr": rate})
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the means of the method's terms since the last log, tokens and seconds beside the loss."""
        steps = len(self.loader) if self.loader is not None else 0
        if steps:
            # the loop of transformers counts from where it was resumed
            self.state.epoch = self.state.global_step / steps
        if "loss" in logs:
            now = time.perf_counter()
            seconds, self._clock = now - self._clock, now
            logs |= self.engine.means(self._sums) | {name: fmean(values) for name, values in self.pending.items()}
            logs |= {"tokens": self._tokens, "seconds": seconds, "tokens_per_second": self._tokens / seconds}
            if self.non_finite_steps:
                # transformers divides by all steps, and skipped ones have no loss
                counted = self._losses_since_log
                logs["loss"] = logs["loss"] * self._steps_since_log / counted if counted else math.nan
                logs["non_finite_steps"] = self.non_finite_steps
            self._begin_log()
        super().log(logs, start_time)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # sums that are not logged yet are not in a checkpoint, so each one begins after a line of the log
        self.control.should_log |= self.control.should_save
        super()._maybe_log_save_evaluate(*args, **kwargs)

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        return str(getattr(self, "_staging", None) or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any = None) -> None:
        """Write a checkpoint aside, with the loader's place and the sizes of the logs, seal it, then rename it.

        Every process writes its random state into the same folder before the first one seals it.
        """
        self._check_weights()
        folder = self.folder / f"checkpoint-{self.state.global_step}"
        same = contextlib.nullcontext(files.staging(folder))
        with files.writing(folder) if self.args.should_save else same as staging:
            self.accelerator.wait_for_everyone()
            # the parent writes into a folder named checkpoint-N below what _get_output_dir returns
            self._staging = staging / "parts"
            last = self.engine.totals(self.last_sums)
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.state.best_global_step == self.state.global_step:
                self.state.best_model_checkpoint = str(folder)
            if self.args.should_save:
                for path in (self._staging / folder.name).iterdir():
                    path.rename(staging / path.name)
                (self._staging / folder.name).rmdir()
                self._staging.rmdir()
                torch.save(self._own_state(last), staging / LOADER_STATE)
                self.state.save_to_json(str(staging / TRAINER_STATE_NAME))
            self._staging = None
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self._rotate()

    def _rotate(self) -> None:
        """Remove the checkpoints beyond ``save_total_limit``."""
        best = self.state.best_model_checkpoint
        files.rotate(self.folder, self.args.save_total_limit, Path(best) if best else None, self.state.global_step)

    def _own_state(self, last: dict[str, tuple[float, float]]) -> dict[str, Any]:
        assert self.loader is not None
        return {
            "loader": self.loader.state_dict(),
            "rows_per_step": self.rows_per_step,
            "token_budget": self.engine.token_budget,
            "last": last,
            "non_finite": (self.non_finite_steps, self._non_finite_in_a_row),
            "logs": self.recorder.offsets() if self.recorder is not None else {},
        }

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in transformers; all processes call it. The first one writes."""
        if not self.engine.sharded:
            super().save_model(output_dir, _internal_call)
            return
        state_dict = self.engine.state_dict()
        if self.args.should_save:
            self._save(output_dir, state_dict)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the network as its parts save themselves, and the tokenizer."""
        folder = Path(output_dir) if output_dir else self.folder
        folder.mkdir(parents=True, exist_ok=True)
        self.engine.save(folder, state_dict)
        self.tokenizer.save_pretrained(folder)

    def _load_best_model(self) -> None:
        self.engine.load(str(self.state.best_model_checkpoint))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load weights, the loader's place and the token budget; cut the logs back to where the checkpoint was."""
        folder = Path(resume_from_checkpoint)
        if (wrong := files.damage(folder)) is not None:
            raise UserError(f"{folder}: the checkpoint is damaged: {wrong}")
        state = torch.load(folder / LOADER_STATE, weights_only=True)
        if state["rows_per_step"] != self.rows_per_step:
            self.rows_per_step = state["rows_per_step"]
            warnings.warn(f"the run goes on with its {self.rows_per_step} rows a step", stacklevel=2)
        self.engine.token_budget = state["token_budget"]
        self.non_finite_steps, self._non_finite_in_a_row = state["non_finite"]
        # the sums are those of all processes: one of them takes them
        last = state["last"].items() if self.engine.rank == 0 else ()
        self.last_sums = {
            name: Metric(*(torch.tensor(float(x), dtype=torch.float64) for x in pair)) for name, pair in last
        }
        self.engine.load(folder)
        self.get_train_dataloader().load_state_dict(state["loader"])
        if self.recorder is not None and state["logs"]:
            self.recorder.truncate(state["logs"])


class TrainerRun:
    """The ``protocols.Run`` of a trainer."""

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
        """Rows of an optimizer step, of all processes."""
        return self.trainer.rows_per_step

    def last(self) -> dict[str, float]:
        """Means of the terms of the last optimizer step, over all processes."""
        return self.trainer.engine.means(self.trainer.last_sums)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the next line of the log, which has their means."""
        for name, value in metrics.items():
            self.trainer.pending.setdefault(name, []).append(value)

    def samples(self, rows: list[dict[str, Any]]) -> None:
        """Write rows to samples.jsonl and show them, in the first process."""
        trainer = self.trainer
        if trainer.is_world_process_zero():
            rows = [{"step": trainer.state.global_step, **row} for row in rows]
            if trainer.recorder is not None:
                trainer.recorder.samples(rows)
            if trainer.show_samples is not None:
                trainer.show_samples(rows)
