"""The engine: it owns the trained modules, their precision, passes and weights, and the processes that share them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from peft import PeftModel
from torch import Tensor, nn

from burnish import progress
from burnish.errors import UserError
from burnish.math.statistics import RowSums
from burnish.models import collectives, sharding
from burnish.models.forward import evaluating, unwrap
from burnish.models.heads import Network
from burnish.models.layout import Layout, silent
from burnish.models.quantize import is_quantized
from burnish.protocols import Method
from burnish.training.terms import Metrics, Rows, add, add_rows, merged_rows
from burnish.types import Example, MicroBatch

T = TypeVar("T")


class Engine:
    """Runs the network: it implements ``protocols.Engine`` for the trainer.

    All processes must make the same calls, and each gets the results of all.

    Args:
        network: the modules to train.
        accelerator: knows the processes, their devices and the precision.
        token_budget: maximum number of tokens of a micro-batch, or None for no limit.
        sharded: shard the parameters over the processes, instead of keeping all of them in every process.
        layout: settings of ``models.layout.Layout``.
    """

    def __init__(
        self,
        network: Network,
        accelerator: Accelerator,
        token_budget: int | None,
        sharded: bool = False,
        **layout: Any,
    ) -> None:
        self.network = network
        self.sharded = sharded
        self.accelerator = accelerator
        self.token_budget = token_budget
        frozen = [model.to(accelerator.device) for model in network.frozen]
        # which layout is fastest depends on the precision of the passes
        with accelerator.autocast():
            self.layout = Layout([*network.models, *frozen], accelerator.device, **layout)
        self._prepared: nn.Module | None = None
        self.between: Callable[[], None] = lambda: None
        self._generation_model = network.policy
        self._sampling_dtype = sampling_dtype(network.policy, self.precision)
        self._empty_critic: nn.Module | None = None
        if sharded:
            for model in network.models:
                sharding.check_model(model)
            if isinstance(network.critic, PeftModel):
                self._empty_critic = sharding.without_weights(network.critic)
        if sharded or self._sampling_dtype is not None:
            # sharded modules cannot be copied, so this copy without weights is made while they are not
            self._generation_model = sharding.without_weights(network.policy)

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self.accelerator.process_index

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self.accelerator.num_processes

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.accelerator.device

    @property
    def precision(self) -> str:
        """Precision of the passes: ``no`` (that of the weights), ``bf16`` or ``fp16``."""
        return str(self.accelerator.mixed_precision)

    @property
    def in_half(self) -> bool:
        """Whether passes or weights have half of float32's bits, so that log-probabilities depend on the layout."""
        return self.precision != "no" or unwrap(self.network.policy).dtype in (torch.bfloat16, torch.float16)

    # --- wrapping --------------------------------------------------------------------------------------------------

    def wrap(self, module: nn.Module) -> nn.Module:
        """Prepare the module, which is the network or contains it, for several processes, and return what to call.

        All processes start with the weights of the first. Call it before the optimizer is created, since sharding
        replaces the parameters. Further calls change nothing. In one process, transformers prepares the module.
        """
        if self.world_size == 1:
            return module
        if self._prepared is not None:
            return self._prepared
        if self.sharded:
            with self.accelerator.autocast():
                self.layout.can_share()  # tries it, which is impossible with sharded weights
            dtype = torch.bfloat16 if self.precision == "bf16" else None
            sharding.shard(module, self.network.models, self.network.heads, self.device, dtype)
            for model in self.network.frozen:
                if (mesh := sharding.mesh_of(module)) is not None:
                    sharding.shard_frozen(model, mesh, dtype)
        else:
            sharding.broadcast(module)
        # Adds autocast, and keeps accelerate from wrapping the module in DistributedDataParallel later: its
        # collectives in the last backward pass would leave the others waiting if memory runs out in one process.
        self._prepared = self.accelerator.prepare_model(module, evaluation_mode=True)
        return self._prepared

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a process's part of the loss. Those of sharded parameters are summed at once."""
        # FSDP averages gradients over processes, but the terms are already divided by global counts
        self.accelerator.backward(loss * self.world_size if self.sharded else loss)

    def sum_gradients(self) -> None:
        """Sum the gradients over processes, unless ``backward`` has done so."""
        if self.world_size > 1 and not self.sharded:
            sharding.sum_gradients(self.network)

    def attempt(
        self,
        function: Callable[[MicroBatch], object],
        batch: MicroBatch,
        examples: list[Example],
        problem: str | None = None,
    ) -> str | None:
        """Call a function that makes one pass. Returns None, or the problem if memory ran out in this process only.

        After an earlier ``problem``, the pass only keeps step with the other processes, with a short example. In one
        process, running out of memory is an error.
        """
        if self.world_size == 1:
            function(batch)
            return None

        def short() -> MicroBatch:
            return self.layout.collate([silent(examples)])

        return collectives.attempt(function, batch if problem is None else short(), short) or problem

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients down to this norm, over all parameters and shards. Returns the norm before."""
        norm: Any = self.accelerator.clip_grad_norm_(self.network.parameters(), max_norm)
        return sharding.whole(norm)

    # --- passes ----------------------------------------------------------------------------------------------------

    def run(self, function: Callable[[MicroBatch], Mapping[str, Tensor]], examples: list[Example]) -> list[Example]:
        """Apply a function to the micro-batches of examples without gradient, and add its arrays to the examples.

        The function returns named (B, T) tensors. Tokens of a shared prompt, which it does not see, get 0.
        """
        mine: dict[int, list[dict[str, np.ndarray]]] = {}
        with evaluating(self.network):
            for group, batch, results in self._passes(
                "computing log-probabilities",
                lambda batch: _numbers(function(batch)),
                examples,
            ):
                before = batch.positions.flatten()[batch.starts]
                places = iter(torch.stack([before, batch.starts, batch.ends], dim=1).tolist())
                for i in group:
                    mine[i] = [
                        {
                            name: np.concatenate([np.zeros(skipped), flat[start : end + 1]])
                            for name, flat in results.items()
                        }
                        for _, (skipped, start, end) in zip(examples[i].sequences, places, strict=False)
                    ]
        arrays = {i: of_example for part in self.gather(mine) for i, of_example in part.items()}
        return [
            dataclasses.replace(
                example,
                sequences=tuple(s.with_arrays(**new) for s, new in zip(example.sequences, arrays[i], strict=True)),
            )
            for i, example in enumerate(examples)
        ]

    def evaluate(self, method: Method, examples: list[Example]) -> tuple[dict[str, float], dict[str, RowSums]]:
        """The means of a method's terms over examples, and the loss as their weighted sum; both also for each row.

        A term whose loss function does not give its parts has no sums over rows.
        """
        if not examples:
            raise UserError("there is nothing to evaluate on: no row of the evaluation data is short enough")
        sums: Metrics = {}
        mine: Rows = {}
        with evaluating(self.network):
            for _, batch, terms in self._passes("evaluating", lambda batch: method.loss(self.network, batch), examples):
                add(sums, terms, batch)
                add_rows(mine, terms, batch)
        means = self.means(sums)
        measured = {name: RowSums(of_rows) for name, of_rows in merged_rows(self.gather(mine)).items()}
        parts = [measured[name] * weight for name, weight in method.weights.items() if name in measured]
        if len(parts) == len(method.weights):
            measured["loss"] = sum(parts[1:], parts[0])
        return {"loss": sum(weight * means[name] for name, weight in method.weights.items())} | means, measured

    def _passes(
        self, what: str, function: Callable[[MicroBatch], T], examples: list[Example]
    ) -> Iterator[tuple[list[int], MicroBatch, T]]:
        """Apply a function to the micro-batches of this process. Yields indices, micro-batches and results."""

        def run(batch: MicroBatch) -> T:
            with self.accelerator.autocast():
                return self.network(function, batch)

        processes = {"rank": self.rank, "world_size": self.world_size}
        budget = min(self.gather(self.layout.limit(self.token_budget)))
        if self.sharded:
            results = self.layout.passes_together(run, examples, budget, gather=self.gather, **processes)
        else:
            results = self.layout.passes(run, examples, budget, **processes)
        done, total = 0, len(examples)
        for result in results:
            yield result
            done += len(result[0]) * self.world_size
            progress.report(what, min(done, total - 1), total)
            self.between()
        progress.report(what, total, total)

    # --- micro-batches of a step -----------------------------------------------------------------------------------

    def cut(self, examples: list[Example]) -> list[MicroBatch]:
        """The micro-batches of this process in an optimizer step. Every process has equally many."""
        return self.layout.cut(examples, self.token_budget, self.rank, self.world_size)

    def halve_budget(self, examples: list[Example]) -> bool:
        """Halve the token budget if a smaller one is possible. All processes call it, and get the same budget."""
        longest = max(len(e.sequences) * max(len(s.tokens) for s in e.sequences) for e in examples)
        largest = max(self.gather(max(batch.tokens.numel() for batch in self.cut(examples))))
        # pad_to widens a micro-batch but does not count in the budget
        largest = min(largest, self.token_budget or largest)
        if largest <= longest:
            return False
        self.token_budget = max(largest // 2, longest)
        if self.rank == 0:
            warnings.warn(f"out of memory: the step is repeated with token_budget={self.token_budget}", stacklevel=2)
        return True

    # --- processes -------------------------------------------------------------------------------------------------

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank."""
        if self.world_size == 1:
            return [value]
        parts: list[Any] = [None] * self.world_size
        dist.all_gather_object(parts, value)
        return parts

    def all(self, flag: Tensor) -> bool:
        """Whether the flag is true in every process."""
        return bool(self.accelerator.reduce(flag.float(), "mean") == 1)

    def means(self, sums: Metrics) -> dict[str, float]:
        """Means over all processes."""
        return {name: total / count if count else 0.0 for name, (total, count) in self.totals(sums).items()}

    def totals(self, sums: Metrics) -> dict[str, tuple[float, float]]:
        """Sums and counts over all processes."""
        parts = [x.to(self.device, torch.float64) for one in sums.values() for x in (one.total, one.count)]
        numbers = torch.stack(parts).tolist() if parts else []  # read together, since a GPU has to be waited for
        mine = dict(zip(sums, zip(numbers[::2], numbers[1::2], strict=True), strict=True))
        totals: dict[str, tuple[float, float]] = {}
        for part in self.gather(mine):
            for name, (total, count) in part.items():
                old = totals.get(name, (0.0, 0.0))
                totals[name] = (old[0] + total, old[1] + count)
        return totals

    # --- weights ---------------------------------------------------------------------------------------------------

    @property
    def generation_model(self) -> nn.Module:
        """The model that generators sample from: the policy, or a copy that is not sharded, in ``sampling_dtype``.

        The first access makes the copy, in all processes, with the current weights. Generators load later ones from
        ``weights()``.
        """
        model = self._generation_model
        if any(parameter.is_meta for parameter in model.parameters()):
            weights = zip(model.parameters(), self.network.policy.parameters(), strict=True)
            copies = {
                id(empty): sharding.whole(weight.detach()).to(self._sampling_dtype or weight.dtype, copy=True)
                for empty, weight in weights
            }
            self._generation_model = sharding.with_parameters(model, lambda empty: copies[id(empty)])
        return self._generation_model

    def whole_critic(self) -> PeftModel | None:
        """A separate critic with an adapter; if it is sharded, an unsharded copy on the CPU of the first process.

        None if there is no such critic, or it is sharded and this is another process.
        """
        critic = self.network.critic
        if not isinstance(critic, PeftModel) or self._empty_critic is None:
            return critic if isinstance(critic, PeftModel) else None
        state = sharding.whole_state_dict(critic)
        if self.rank > 0:
            return None
        copy = sharding.with_parameters(self._empty_critic, lambda p: torch.empty_like(p, device="cpu"))
        copy.load_state_dict(state)
        assert isinstance(copy, PeftModel)
        return copy

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's trained weights by name, one at a time, as full tensors in every process."""
        for name, weight in self.network.policy.named_parameters():
            if weight.requires_grad:
                yield name, sharding.whole(weight)

    def state_dict(self) -> dict[str, Tensor] | None:
        """If the network is sharded, its state dict for ``save``: full tensors, in the first process only.

        It has no frozen layers if the policy has an adapter, since these are not saved.
        """
        if not self.sharded:
            return None
        kept: set[int] = set()
        if isinstance(self.network.policy, PeftModel):
            models = [unwrap(model) for model in self.network.models]
            parts = (part for m in models for part in (m.get_input_embeddings(), m.get_output_embeddings()) if part)
            kept = {id(parameter) for part in parts for parameter in part.parameters()}  # peft saves them if resized
            kept |= {id(parameter) for parameter in self.network.parameters() if parameter.requires_grad}
        unused = {n for n, p in self.network.named_parameters(remove_duplicate=False) if kept and id(p) not in kept}
        return sharding.whole_state_dict(self.network, unused)

    def save(self, folder: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save the network as folders that transformers loads. If it is sharded, pass the ``state_dict()``."""
        self.network.save_pretrained(folder, state_dict)

    def load(self, folder: str | Path) -> None:
        """Load what ``save`` wrote. Missing and unexpected weights are errors."""
        self.network.load_weights(folder)


def sampling_dtype(policy: nn.Module, precision: str) -> torch.dtype | None:
    """The dtype in which generators sample, if it is not that of the policy's weights, so that they need a copy.

    It is bfloat16 for float32 weights whose passes are in bfloat16. Decoding reads all weights for each token, and
    autocast would convert them each time.
    """
    model = unwrap(policy)
    copied = precision == "bf16" and model.dtype == torch.float32 and not is_quantized(model)
    return torch.bfloat16 if copied else None


def _numbers(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Named tensors as flat arrays of float64, in one copy from the device."""
    if not tensors:
        return {}
    flat = torch.stack([x.flatten().double() for x in tensors.values()]).cpu().numpy()
    return dict(zip(tensors, flat, strict=True))
