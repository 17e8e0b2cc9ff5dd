"""The rounds of a loop in the report: their state, their rows, and each metric by round."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.report.curves import Estimate, Line, estimates, round_panel
from burnish.report.metrics import Metric, counted, describe, headline, number, order

Entry = Mapping[str, Any]
"""A stage of the manifest."""


@dataclass(frozen=True)
class Rounds:
    """A loop of a run: ``Rounds("loop", {1: {"grow": {...}, "improve": {...}}}, {"until": None}, {"grow": [1.0]})``."""

    name: str
    entries: dict[int, dict[str, Entry]]
    """The stages of each round, by the name that they have in the loop."""
    settings: Mapping[str, Any]
    """The loop's own settings, such as ``until``."""
    weights: dict[str, list[float]]
    """The weights of each stage's rewards."""

    @property
    def stages(self) -> list[str]:
        """The names of the stages in the loop."""
        return list(self.entries[1])

    @property
    def ran(self) -> list[int]:
        """The rounds that have begun."""
        return [
            number
            for number, entries in self.entries.items()
            if any(entry.get("state") in ("running", "done") for entry in entries.values())
        ]

    @property
    def flow(self) -> str:
        """The loop in one line: ``loop (3 rounds: grow → improve)``."""
        rounds = counted(len(self.entries), "round")
        if self.ended:
            rounds = f"{len(self.ran)} of {rounds}"
        return f"{self.name} ({rounds}: {' → '.join(self.stages)})"

    @property
    def ended(self) -> bool:
        """Whether a result has ended the loop early."""
        return any(entry.get("state") == "skipped" for entry in self.entries[len(self.entries)].values())

    @property
    def state(self) -> str:
        """The state of the loop: ``ended after round 2 of 5: held-out score 0.9300 > 0.9``."""
        planned, last = len(self.entries), max(self.ran, default=0)
        if self.ended:
            return f"ended after round {last} of {planned}{self._reason(last)}"
        states = [entry.get("state") for entries in self.entries.values() for entry in entries.values()]
        if set(states) == {"done"}:
            return counted(planned, "round")
        return f"round {last} of {planned}" if last else f"{counted(planned, 'round')}, not started"

    def _reason(self, last: int) -> str:
        until = self.settings.get("until")
        if until is None:
            return ""
        values = self.results(until["stage"]).get(last, {})
        key = next((key for key in (until["metric"], f"reward_{until['metric']}") if key in values), None)
        if key is None:
            return ""
        metric, value = describe(key), values[key]
        sign, bound = (">", until["above"]) if until.get("above") is not None else ("<", until["below"])
        # The bound as the recipe has it, so that it can be found there.
        return f": {until['stage']} {metric.label.lower()} {number(value.value, metric.share)} {sign} {bound}"

    def results(self, stage: str) -> dict[int, dict[str, Estimate]]:
        """The last evaluation of a stage in each round that has one."""
        found = {number: _after(entries[stage]) for number, entries in self.entries.items()}
        return {number: values for number, values in found.items() if values}

    def metrics(self, stage: str) -> tuple[list[str], list[str]]:
        """The headline metrics of a stage in any round, and all others, in reading order."""
        rounds = [{key: e.value for key, e in values.items()} for values in self.results(stage).values()]
        known = sorted({key: None for values in rounds for key in values}, key=order)
        first = {key for values in rounds for key in headline(values)} or set(known)
        return [key for key in known if key in first], [key for key in known if key not in first]

    def panels(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Curves over rounds of headline metrics and of all others; none before the second round.

        Stages with the same metric share its panel, so that rewards in training and on held-out rows can be compared.
        """
        if len(self.ran) < 2:
            return [], []
        shown: dict[str, list[str]] = {}
        rest: dict[str, list[str]] = {}
        for stage in self.stages:
            first, others = self.metrics(stage)
            for key in first:
                shown.setdefault(key, []).append(stage)
            for key in others:
                rest.setdefault(key, []).append(stage)
        drawn = [self._panels(shown), self._panels(rest)]
        return [*self._rewards(), *drawn[0]], drawn[1]

    def _panels(self, stages: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
        """A panel for each metric, with a line for each of its stages."""
        panels = []
        for key in sorted(stages, key=order):
            lines = [self._line(stage, key, stage) for stage in stages[key]]
            if any(math.isfinite(e.value) for line in lines for _, e in line.points):
                panels.append(round_panel(f"{self.name}/{key}", describe(key), lines, len(self.ran)))
        return panels

    def _rewards(self) -> Iterator[dict[str, Any]]:
        """For every stage with rewards that the score does not use: the score beside them."""
        for stage, weights in self.weights.items():
            values = next(iter(self.results(stage).values()), {})
            # In the order of the recipe. Measures of a reward such as pass@k are no headline metrics.
            rewards = [key for key in values if key.startswith("reward_") and describe(key).headline]
            if len(rewards) != len(weights) or not 0 < weights.count(0) < len(weights):
                continue
            lines = [self._line(stage, "score", "score")]
            lines += [
                self._line(stage, key, f"{key.removeprefix('reward_')} (weight 0)")
                for key, weight in zip(rewards, weights, strict=True)
                if weight == 0
            ]
            meaning = "the score, which selection and training use, and rewards of weight 0, which are only measured"
            yield round_panel(
                f"{self.name}/{stage}/rewards", Metric(f"Rewards in {stage}", meaning), lines, len(self.ran)
            )

    def _line(self, stage: str, key: str, name: str) -> Line:
        return Line(name, [(number, values[key]) for number, values in self.results(stage).items() if key in values])

    def table(self, folder: Path) -> list[dict[str, Any]]:
        """The rows and the headline metrics of every stage, with a cell for each round that has begun."""
        rows: list[dict[str, Any]] = []
        for stage in self.stages:
            counts = [_rows(self.entries[number][stage], folder) for number in self.ran]
            for label in dict.fromkeys(label for known in counts for label in known):
                rows.append({"stage": stage, "label": label, "counts": [known.get(label) for known in counts]})
            results = self.results(stage)
            for key in self.metrics(stage)[0]:
                cells = [results.get(number, {}).get(key) for number in self.ran]
                rows.append({"stage": stage, "metric": describe(key), "cells": cells})
        return rows


def grouped(manifest: Mapping[str, Any]) -> list[Entry | Rounds]:
    """The stages of a manifest in order, with those of a loop as one item."""
    weights = {
        stage["name"]: [reward["weight"] for reward in stage.get("reward") or ()]
        for stage in (manifest.get("recipe") or {}).get("stages", ())
    }
    items: dict[str, Entry | Rounds] = {}
    for entry in manifest.get("stages", []):
        if (place := round_of(entry["name"])) is None:
            items[entry["name"]] = entry
            continue
        loop, number, stage = place
        item = items.setdefault(loop, Rounds(loop, {}, (manifest.get("loops") or {}).get(loop, {}), {}))
        assert isinstance(item, Rounds)
        item.entries.setdefault(number, {})[stage] = entry
        item.weights[stage] = weights.get(entry["name"], [])
    return list(items.values())


def round_of(name: str) -> tuple[str, int, str] | None:
    """The loop, the round and the name of a stage in a loop: ``("loop", 2, "values")``; None for other stages."""
    loop, slash, rest = name.partition("/")
    number, _, inner = rest.partition("/")
    return (loop, int(number), inner) if slash and re.fullmatch("[0-9]{1,9}", number) else None


def _after(entry: Entry) -> dict[str, Estimate]:
    return estimates((entry.get("results") or {}).get("after") or {})


def written_rows(entry: Entry, folder: Path) -> dict[str, int]:
    """The number of rows of each file that a stage that makes rows has written: ``{"samples.jsonl": 1024}``.

    ``folder`` is that of the stage. A file that is not there is left out.
    """
    if "rows" not in (entry.get("rows") or {}):
        return {}
    counts = {}
    for name in entry.get("files") or ():
        if name.endswith(".jsonl") and (folder / name).is_file():
            with (folder / name).open("rb") as file:
                counts[name.removeprefix("data/")] = sum(1 for _ in file)
    return counts


def _rows(entry: Entry, folder: Path) -> dict[str, int]:
    """The numbers of rows that a stage read or wrote. ``folder`` is that of the run."""
    rows = entry.get("rows") or {}
    trained = {"Rows used for training": rows["train"]["rows"]} if "train" in rows else {}
    return trained | {f"Rows in {name}": count for name, count in written_rows(entry, folder / entry["name"]).items()}
