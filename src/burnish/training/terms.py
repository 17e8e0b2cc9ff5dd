"""The terms of a loss, added up over micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping

from burnish.types import Metric, MicroBatch, Term, Terms, Unit

Metrics = dict[str, Metric]


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
