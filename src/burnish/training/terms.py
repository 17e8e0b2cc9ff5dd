"""Adds up the terms of a loss over micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from burnish.errors import UserError
from burnish.types import Metric, MicroBatch, Term, Terms, Unit

Metrics = dict[str, Metric]
Rows = dict[str, dict[str, tuple[float, float]]]
"""Total and count of each row: by term, then by the row's source."""


def detach_unused(terms: Terms, weights: Mapping[str, float], counts: Mapping[Unit, float]) -> Terms:
    """Detach everything that the loss does not use: metrics, terms without a weight, and terms whose count is 0.

    So nothing outside the loss, such as the hooks of FSDP, takes part in the backward pass, and a parameter that the
    loss does not use has no gradient. A gradient of zero would be a step of Adam, and decay the weight.

    Raises:
        UserError: if a term of the loss has no gradient, so that nothing would be learned from it.
    """
    if missing := weights.keys() - terms.keys():
        raise ValueError(f"the method has a weight for {sorted(missing)[0]!r}, but its loss returns no such term")
    result: Terms = {}
    for name, part in terms.items():
        if isinstance(part, Term) and name in weights and counts[part.unit] > 0:
            if not part.total.requires_grad:
                raise UserError(
                    f"the term {name!r} of the loss has no gradient, so nothing would be learned from it: do not "
                    "detach the log-probabilities or the losses, and check that the model has trainable parameters"
                )
            result[name] = part._replace(count=None if part.count is None else part.count.detach(), parts=None)
        elif isinstance(part, Term):
            result[name] = Term(part.total.detach(), part.unit, None if part.count is None else part.count.detach())
        else:
            result[name] = Metric(part.total.detach(), part.count.detach())
    return result


def add(sums: Metrics, terms: Terms, batch: MicroBatch) -> None:
    """Add the terms and metrics of a micro-batch to ``sums``, detached."""
    parts: Metrics = {}
    for name, part in terms.items():
        if isinstance(part, Term):
            _check_count(name, part, batch)
            parts[name] = Metric(part.total.detach(), part.total.new_full((), batch.counts[part.unit]))
        else:
            parts[name] = Metric(part.total.detach(), part.count.detach())
    merge(sums, parts)


def add_rows(rows: Rows, terms: Terms, batch: MicroBatch) -> None:
    """Add the total and the count of each row of a micro-batch to ``rows``."""
    for name, part in terms.items():
        if part.parts is None:
            continue
        summands = torch.stack([x.detach().flatten().cpu().double() for x in part.parts], dim=1)
        if part.parts[0].dim() == 2:  # of tokens
            until = torch.cat([summands.new_zeros(1, 2), summands.cumsum(0)])
            summands, sources = until[batch.ends.cpu() + 1] - until[batch.starts.cpu()], batch.sources
        elif len(batch.pairs):
            sources = tuple(batch.sources[better] for better in batch.pairs[:, 0].tolist())
        else:
            sources = batch.sources
        of_rows = rows.setdefault(name, {})
        for source, (total, count) in zip(sources, summands.tolist(), strict=True):
            _add_to(of_rows, source, total, count)


def merged_rows(parts: list[Rows]) -> Rows:
    """The sums of several processes. The examples of a row may be in several of them."""
    rows: Rows = {}
    for part in parts:
        for name, of_rows in part.items():
            for source, (total, count) in of_rows.items():
                _add_to(rows.setdefault(name, {}), source, total, count)
    return rows


def _add_to(of_rows: dict[str, tuple[float, float]], source: str, total: float, count: float) -> None:
    before = of_rows.get(source, (0.0, 0.0))
    of_rows[source] = (before[0] + total, before[1] + count)


def merge(sums: Metrics, more: Metrics) -> None:
    """Add metrics to ``sums``."""
    for name, part in more.items():
        if name in sums:
            sums[name] = Metric(sums[name].total + part.total, sums[name].count + part.count)
        else:
            sums[name] = Metric(part.total, part.count)


def _check_count(name: str, term: Term, batch: MicroBatch) -> None:
    """Check that a term is divided by the number of its summands; only on a CPU, since it would make a GPU wait."""
    if term.count is not None and term.count.device.type == "cpu":
        counted, expected = float(term.count), batch.counts[term.unit]
        assert math.isclose(counted, expected, rel_tol=1e-5), f"{name}: counted {counted}, divided by {expected}"
