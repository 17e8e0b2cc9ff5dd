"""Passes over examples without gradient, shared out among the processes, and the sums of terms they bring together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from burnish.errors import UserError
from burnish.models.heads import Network
from burnish.models.layout import Layout
from burnish.protocols import Method
from burnish.types import Example, Metric, MicroBatch, Term, Terms, Unit

T = TypeVar("T")
Metrics = dict[str, Metric]


@dataclasses.dataclass(frozen=True)
class Passes:
    """Passes of a network over examples; every process calls them alike, and every process gets all the results."""

    network: Network
    layout: Layout
    accelerator: Accelerator

    def annotate(
        self, function: Callable[[MicroBatch], Mapping[str, Tensor]], examples: list[Example], budget: int | None
    ) -> list[Example]:
        """Examples with the (B, T) arrays of a function; 0 for the tokens of a shared prompt."""
        mine: dict[int, list[dict[str, np.ndarray]]] = {}
        with self._evaluating():
            for group, batch, results in self._passes(
                lambda batch: {name: x.flatten().double().cpu().numpy() for name, x in function(batch).items()},
                examples,
                budget,
            ):
                before = batch.positions.flatten()[batch.starts].tolist()
                places = zip(before, batch.starts.tolist(), batch.ends.tolist(), strict=True)
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

    def evaluate(self, method: Method, examples: list[Example], budget: int | None) -> dict[str, float]:
        """Means of a method's terms over examples, and the loss that they make."""
        if not examples:
            raise UserError("there is nothing to evaluate on: no row of the evaluation data is short enough")
        sums: Metrics = {}
        with self._evaluating():
            for _, batch, terms in self._passes(lambda batch: method.loss(self.network, batch), examples, budget):
                add(sums, terms, batch)
        means = self.means(sums)
        return {"loss": sum(weight * means[name] for name, weight in method.weights.items())} | means

    def means(self, sums: Metrics) -> dict[str, float]:
        """Means over all processes."""
        return {name: total / count if count else 0.0 for name, (total, count) in self.totals(sums).items()}

    def totals(self, sums: Metrics) -> dict[str, tuple[float, float]]:
        """Sums and counts over all processes."""
        totals: dict[str, tuple[float, float]] = {}
        for part in self.gather({name: (float(t.total), float(t.count)) for name, t in sums.items()}):
            for name, (total, count) in part.items():
                old = totals.get(name, (0.0, 0.0))
                totals[name] = (old[0] + total, old[1] + count)
        return totals

    def gather(self, value: Any) -> list[Any]:
        """A value of every process."""
        if self.accelerator.num_processes == 1:
            return [value]
        parts: list[Any] = [None] * self.accelerator.num_processes
        dist.all_gather_object(parts, value)
        return parts

    def _passes(
        self, function: Callable[[MicroBatch], T], examples: list[Example], budget: int | None
    ) -> Iterator[tuple[list[int], MicroBatch, T]]:
        """The micro-batches of this process, with what a function gives for each."""

        def run(batch: MicroBatch) -> T:
            with self.accelerator.autocast():
                return self.network(function, batch)

        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        return self.layout.passes(run, examples, budget, rank=rank, world_size=world_size)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = self.network.training
        self.network.eval()
        with torch.no_grad():
            yield
        self.network.train(training)


def learned(terms: Terms, weights: Mapping[str, float], counts: Mapping[Unit, float]) -> Terms:
    """Terms and metrics without the gradients that no loss uses: of metrics, and of terms with nothing to divide by.

    DistributedDataParallel takes every parameter that a result depends on for a used one, and gives it zeros where
    the loss leaves it out. Adam would count these as a step, and decay the weights.
    """
    if missing := weights.keys() - terms.keys():
        raise ValueError(f"a method weighs {sorted(missing)[0]!r}, which its loss does not give")
    kept: Terms = {}
    for name, part in terms.items():
        if isinstance(part, Term) and name in weights and counts[part.unit] > 0:
            kept[name] = part._replace(count=None if part.count is None else part.count.detach())
        elif isinstance(part, Term):
            kept[name] = Term(part.total.detach(), part.unit, None if part.count is None else part.count.detach())
        else:
            kept[name] = Metric(part.total.detach(), part.count.detach())
    return kept


def add(sums: Metrics, terms: Terms, batch: MicroBatch) -> None:
    """Add the terms and metrics of a micro-batch to sums, without their gradients."""
    parts: Metrics = {}
    for name, part in terms.items():
        if isinstance(part, Term):
            _check_count(name, part, batch)
            parts[name] = Metric(part.total.detach(), part.total.new_tensor(batch.counts[part.unit]))
        else:
            parts[name] = Metric(part.total.detach(), part.count.detach())
    merge(sums, parts)


def merge(sums: Metrics, more: Metrics) -> None:
    """Add metrics to sums."""
    for name, (total, count) in more.items():
        sums[name] = (
            Metric(sums[name].total + total, sums[name].count + count) if name in sums else Metric(total, count)
        )


def _check_count(name: str, term: Term, batch: MicroBatch) -> None:
    """Check that a term is divided by what it was summed over. On a GPU that would wait for the device."""
    if term.count is not None and term.count.device.type == "cpu":
        counted, expected = float(term.count), batch.counts[term.unit]
        assert math.isclose(counted, expected, rel_tol=1e-5), f"{name}: counted {counted}, divided by {expected}"
