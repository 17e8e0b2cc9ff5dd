"""Passes over examples without gradient, shared out among the processes, and the sums of terms they bring together."""

from __future__ import annotations

import dataclasses
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
from burnish.types import Example, MicroBatch, Term, Terms

T = TypeVar("T")


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
        sums: Terms = {}
        with self._evaluating():
            for _, _, terms in self._passes(lambda batch: self.network(method, batch), examples, budget):
                add(sums, terms)
        means = self.means(sums)
        return {"loss": sum(weight * means[name] for name, weight in method.weights.items())} | means

    def means(self, sums: Terms) -> dict[str, float]:
        """Means of terms over all processes."""
        return {name: total / count if count else 0.0 for name, (total, count) in self.totals(sums).items()}

    def totals(self, sums: Terms) -> dict[str, tuple[float, float]]:
        """Sums and counts of terms over all processes."""
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
                return function(batch)

        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        return self.layout.passes(run, examples, budget, rank=rank, world_size=world_size)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = self.network.training
        self.network.eval()
        with torch.no_grad():
            yield
        self.network.train(training)


def add(sums: Terms, terms: Terms) -> None:
    """Add terms to sums, without their gradients."""
    for name, term in terms.items():
        total, count = term.total.detach(), term.count.detach()
        sums[name] = Term(sums[name].total + total, sums[name].count + count) if name in sums else Term(total, count)
