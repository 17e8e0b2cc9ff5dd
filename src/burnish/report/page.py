"""A run as one self-contained HTML page: results, curves, samples before and after, data, manifest."""

from __future__ import annotations

import io
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from burnish.errors import UserError, did_you_mean
from burnish.files import write_text
from burnish.report.curves import Estimate, estimates, panels
from burnish.report.metrics import (
    FINISH_REASONS,
    OF_EPISODES,
    SAMPLES_FILE,
    Metric,
    counted,
    describe,
    duration,
    from_json,
    headline,
    number,
    order,
    read_lines,
    read_metrics,
)
from burnish.report.rounds import Rounds, grouped, written_rows
from burnish.report.transcript import transcript
from burnish.report.trees import searched

SHOWN_SAMPLES = 6
MOST_SAMPLES = 48
MOST_ROUNDS = 10
"""Rounds of a loop whose stages are shown in full: the first one and the last ones."""
ROW_METHODS = {
    "sample": "samples and scores completions",
    "rank": "asks people to rank completions",
    "judge": "labels pairs and scores samples by a judge",
    "revise": "critiques and revises answers by principles",
    "score": "scores rows",
    "search": "Monte Carlo tree search over reasoning steps",
    "filter": "keeps the rows that pass a function",
    "eval": "evaluation",
}
METHODS = ROW_METHODS | {
    "pretrain": "continued pre-training",
    "sft": "supervised fine-tuning",
    "reward": "reward model",
    "dpo": "direct preference optimization",
    "distill": "distillation from a teacher",
    "reinforce": "REINFORCE",
    "step_value": "step-level value model",
    "ppo": "proximal policy optimization",
    "rloo": "REINFORCE with a leave-one-out baseline (RLOO)",
    "grpo": "group relative policy optimization (GRPO)",
}
TWO_MODELS = ("Other model", "Model")
"""What an evaluation of two models compares, instead of before and after."""
STATES = {"pending": "not started", "skipped": "not run"}
"""Descriptions of states. The others need none."""


def write(run_folder: Path) -> Path:
    """Write ``report.html`` of a run, finished or not, and return its path.

    Raises:
        UserError: if the folder has no manifest.json.
    """
    from jinja2 import Environment, StrictUndefined

    folder = Path(run_folder)
    manifest = _manifest(folder)
    template = (files("burnish.report") / "templates" / "report.html.j2").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(template).render(_page(manifest, folder))
    path = folder / "report.html"
    write_text(path, page)
    return path


# --- results ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A metric before and after a stage; either may be missing.

    ``paired`` is the 95 % interval of after - before, computed row by row. It is None if the metric has no rows.
    """

    key: str
    before: Estimate | None
    after: Estimate | None
    paired: tuple[float, float] | None = None

    @property
    def metric(self) -> Metric:
        """The metric's name and meaning."""
        return describe(self.key)

    @property
    def clear(self) -> bool | None:
        """Whether the paired interval excludes 0, or else whether the intervals do not overlap; None without them."""
        if self.paired is not None:
            return not self.paired[0] <= 0 <= self.paired[1]
        first, last = self.before and self.before.interval, self.after and self.after.interval
        return first[0] > last[1] or last[0] > first[1] if first and last else None

    @property
    def direction(self) -> str:
        """``better``, ``worse``, ``higher``, ``lower``, ``same``, or empty if there is nothing to compare."""
        if self.before is None or self.after is None:
            return ""
        difference = self.after.value - self.before.value
        if difference == 0 or not math.isfinite(difference):
            return "same" if difference == 0 else ""
        direction = "higher" if difference > 0 else "lower"
        if self.metric.better is None:
            return direction
        return "better" if direction == self.metric.better else "worse"

    @property
    def tone(self) -> str:
        """``better`` or ``worse`` if the change is clear or has no interval, else empty."""
        return self.direction if self.direction in ("better", "worse") and self.clear is not False else ""

    @property
    def difference(self) -> str:
        """The change with its sign: ``+0.4200``, ``+12.0 points`` for a share."""
        if not self.direction or self.before is None or self.after is None:
            return ""
        return self._signed(self.after.value - self.before.value) + (" points" if self.metric.share else "")

    @property
    def difference_interval(self) -> str:
        """The paired interval in words: ``−1.2 to +4.1``."""
        return " to ".join("0" if end == 0 else self._signed(end) for end in self.paired or ())

    def _signed(self, difference: float) -> str:
        if self.metric.share:
            return f"{difference * 100:+.1f}".replace("-", "\N{MINUS SIGN}")
        sign = "+" if difference > 0 else "\N{MINUS SIGN}" if difference < 0 else "\N{PLUS-MINUS SIGN}"
        return sign + number(abs(difference))

    @property
    def verdict(self) -> str:
        """The comparison in words."""
        if not self.direction:
            return ""
        if self.direction == "same":
            return "Unchanged"
        if self.clear is None:
            return self.direction.capitalize()
        return f"Clearly {self.direction}" if self.clear else "No clear change"

    @property
    def whiskers(self) -> list[dict[str, Any]]:
        """Both estimates as percentages of a common axis, for the drawing; empty if an interval is missing."""
        places = [(e.value, *e.interval) for e in (self.before, self.after) if e is not None and e.interval]
        ends = [end for place in places for end in place]
        if len(places) < 2 or not all(map(math.isfinite, ends)) or min(ends) == max(ends):
            return []
        low, span = min(ends), max(ends) - min(ends)
        scaled = [[round(4 + 92 * (end - low) / span, 2) for end in place] for place in places]
        return [
            {"name": name, "value": value, "low": start, "high": end}
            for name, (value, start, end) in zip(("before", "after"), scaled, strict=True)
        ]


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Every metric of two evaluations, in reading order.

    The interval of X is read from X_low and X_high, and that of its change from X_change_low and X_change_high.
    """
    first, last = estimates(before), estimates(after)
    for key in last:
        start = describe(key).start
        if start is not None and key not in first:
            first[key] = Estimate(start, (start, start))
    keys = sorted({**first, **last}, key=order)
    return [Change(key, first.get(key), last.get(key), _paired(key, after)) for key in keys]


def _paired(key: str, after: Mapping[str, Any]) -> tuple[float, float] | None:
    for name in (key, f"eval_{key}"):
        if f"{name}_change_low" in after:
            return float(after[f"{name}_change_low"]), float(after[f"{name}_change_high"])
    return None


def headline_changes(compared: list[Change]) -> list[Change]:
    """Those of headline metrics."""
    sides = {change.key: change.after or change.before for change in compared}
    keys = headline({key: side.value for key, side in sides.items() if side is not None})
    return [change for change in compared if change.key in keys]


def results(manifest: Mapping[str, Any]) -> Table:
    """Each stage's headline metrics before and after it, as a table for the terminal.

    A stage of a loop is compared with itself: its results in the first round with those in the last one.
    """
    rows = [("stage", "metric", "before", "after", "")]
    caption = None
    for item in grouped(manifest):
        if isinstance(item, Rounds):
            of_loop = over_rounds(item)
            named = [(compared.name, compared.changes) for compared in of_loop]
            if any(compared.rounds[0] < compared.rounds[1] for compared in of_loop):
                caption = "For stages of a loop: the first round before, the last one after."
        else:
            named = [(item["name"], _compared(item))]
        for name, compared in named:
            for i, change in enumerate(headline_changes(compared)):
                before, after = (with_interval(side, change.metric.share) for side in (change.before, change.after))
                rows.append((name if i == 0 else "", change.metric.label, before, after, change.verdict.lower()))
    return table_of(
        rows, box=SIMPLE_HEAD, title="Results", title_justify="left", caption=caption, caption_justify="left"
    )


@dataclass(frozen=True)
class OverRounds:
    """The results of a loop's stage in the first round that has results, and in the last one."""

    stage: str
    rounds: tuple[int, int]
    changes: list[Change]

    @property
    def name(self) -> str:
        """The stage with its rounds: ``loop/1-3/held-out``, or ``loop/1/held-out`` if there is only one."""
        first, last = self.rounds
        loop, _, inner = self.stage.partition("/")
        return f"{loop}/{first}-{last}/{inner}" if last > first else f"{loop}/{first}/{inner}"


def over_rounds(loop: Rounds) -> list[OverRounds]:
    """How the results of each stage of a loop change over rounds.

    If a stage has results in one round only, these are its changes in that round.
    """
    compared = []
    for stage in loop.stages:
        if not (found := loop.results(stage)):
            continue
        first, last = min(found), max(found)
        if first == last:
            listed = _compared(loop.entries[first][stage])
        else:
            keys = sorted({**found[first], **found[last]}, key=order)
            listed = [Change(key, found[first].get(key), found[last].get(key)) for key in keys]
        compared.append(OverRounds(f"{loop.name}/{stage}", (first, last), listed))
    return compared


def _compared(entry: Mapping[str, Any]) -> list[Change]:
    evaluations = entry.get("results") or {}
    return changes(evaluations.get("before") or {}, evaluations.get("after") or {})


def table_of(rows: Sequence[Sequence[str]], **settings: Any) -> Table:
    """A table with the first row as its head. In a narrow terminal, cells are broken between words, but no word is cut.

    ``settings`` are those of rich's Table.
    """
    table = Table(**settings)
    for column in zip(*rows, strict=True):
        table.add_column(Text(column[0]), min_width=max(len(word) for cell in column for word in [*cell.split(), ""]))
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return table


def with_interval(estimate: Estimate | None, share: bool) -> str:
    """``43.8 % [39.5 %, 48.2 %]``. A value that is known by definition has no interval."""
    if estimate is None:
        return ""
    low, high = estimate.interval or (estimate.value, estimate.value)
    return number(estimate.value, share) + (f" [{number(low, share)}, {number(high, share)}]" if low != high else "")


# --- samples ------------------------------------------------------------------------------------------------------


def before_and_after(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
    """Samples of the first and the last evaluation side by side, and the optimizer steps of the two evaluations.

    They are matched by source, several samples of a source in their order. Each result is ``{"prompt", "source",
    "before", "after"}``, where before and after are rows or None. After a single evaluation, before is None. Without
    evaluations, the last samples of training are used.
    """
    kind = "eval" if any(row.get("kind") == "eval" for row in rows) else "train"
    rows = [row for row in rows if row.get("kind", kind) == kind]
    steps = sorted({row["step"] for row in rows})[0 if kind == "eval" else -1 :]
    if not steps:
        return [], []
    after = _numbered([row for row in rows if row["step"] == steps[-1]])
    before = _numbered([row for row in rows if row["step"] == steps[0]]) if len(steps) > 1 else {}
    joined = []
    for key in {**before, **after}:
        either = after.get(key) or before[key]
        row = {"prompt": either.get("prompt", ""), "source": either.get("source", "")}
        joined.append({**row, "before": before.get(key), "after": after.get(key)})
    return joined, sorted({steps[0], steps[-1]})


def _numbered(rows: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    seen: dict[str, int] = defaultdict(int)
    numbered = {}
    for row in rows:
        source = row.get("source", row.get("prompt", ""))
        numbered[source, seen[source]] = _shown(row)
        seen[source] += 1
    return numbered


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    score = float(row["score"]) if row.get("score") is not None else None
    rewards = [f"{name} {_typeset(float(value), digits=2)}" for name, value in row.get("rewards", {}).items()]
    return {
        **row,
        "score": score,
        "rewards": rewards if len(rewards) > 1 or score is None else [],
        "ending": _ending(row),
        "transcript": transcript(row.get("messages", ())),
        "sequences": row.get("sequences", ()),
    }


def _alone(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Samples of a stage that makes rows, which have none before them. Each prompt stands beside its first sample."""
    joined, last = [], None
    for row in rows:
        prompt = {"prompt": row.get("prompt", ""), "source": row.get("source", "")}
        joined.append({**(prompt if prompt != last else {}), "before": None, "after": _shown(row)})
        last = prompt
    return joined


def _ending(row: Mapping[str, Any]) -> str:
    reason = str(row.get("finish_reason") or "stop")
    return "" if reason == "stop" else FINISH_REASONS.get(reason, reason)


# --- the page -----------------------------------------------------------------------------------------------------


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    if path.is_file():
        return json.loads(path.read_text("utf-8"))
    runs = [str(p.parent) for p in sorted(folder.parent.glob("*/manifest.json"))]
    hint = did_you_mean(str(folder), runs) or "; expected a run's folder, such as runs/my-run"
    raise UserError(f"{path}: no such file{hint}")


def as_yaml(value: Any) -> str:
    """Block style, keys in their order; nothing for an empty value."""
    if not value:
        return ""
    from ruamel.yaml import YAML

    writer: Any = YAML(typ="safe", pure=True)
    writer.default_flow_style, writer.sort_base_mapping_type_on_output, writer.width = False, False, 100
    writer.dump(value, text := io.StringIO())
    return text.getvalue()


def _page(manifest: dict[str, Any], folder: Path) -> dict[str, Any]:
    items = grouped(manifest)
    sections = [
        _loop(item, folder) if isinstance(item, Rounds) else _stage(item, folder / item["name"]) for item in items
    ]
    seconds = sum(entry.get("seconds") or 0 for entry in manifest.get("stages", []))
    machine = manifest.get("machine", {})
    hashes = {
        entry["name"]: {kind: entry[kind] for kind in ("model", "data", "inputs", "files") if entry.get(kind)}
        for entry in manifest.get("stages", [])
    }

    return {
        "name": manifest.get("name", folder.name),
        "searched": any(stage["trees"] for stage in _stages(sections)),
        "state": manifest.get("state", "unknown"),
        "time": duration(seconds) if seconds else "",
        "machine": " · ".join(
            value if isinstance(value, str) else counted(value, key.removesuffix("s")) for key, value in machine.items()
        ),
        "flow": " → ".join(item.flow if isinstance(item, Rounds) else item["name"] for item in items),
        "sections": sections,
        "recipe": as_yaml(from_json(manifest.get("recipe"))),
        "versions": manifest.get("versions", {}),
        "hashes": as_yaml({name: kinds for name, kinds in hashes.items() if kinds}),
        "number": _typeset,
        "shown_samples": SHOWN_SAMPLES,
        "most_samples": MOST_SAMPLES,
    }


def _stages(sections: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The stages of all sections, those of loops included."""
    return [
        stage
        for part in sections
        for stage in ([one for each in part["rounds"] for one in each["stages"]] if "rounds" in part else [part])
    ]


def _typeset(value: float, share: bool = False, digits: int = 4) -> str:
    return number(value, share, digits).replace("-", "\N{MINUS SIGN}")


def _loop(loop: Rounds, folder: Path) -> dict[str, Any]:
    """A section with the metrics of a loop by round, and the stages of its rounds."""
    curves, other_curves = loop.panels()
    full = loop.ran if len(loop.ran) <= MOST_ROUNDS else [loop.ran[0], *loop.ran[1 - MOST_ROUNDS :]]
    rounds = []
    for round_number in full:
        entries = loop.entries[round_number].values()
        stages = [_stage(entry, folder / entry["name"]) for entry in entries]
        seconds = sum(entry.get("seconds") or 0 for entry in entries)
        rounds.append({"number": round_number, "stages": stages, "time": duration(seconds)})
    cards = []
    for compared in over_rounds(loop):
        first, last = compared.rounds
        change = _most_telling(compared.changes)
        span = f"round {first} to {last}" if last > first else f"round {first}"
        said = _in_words(change) if change is not None else ""
        cards.append({"name": compared.stage, "change": change, "note": ": ".join(filter(None, (span, said.lower())))})
    # These are shown beside each other, and not in the rounds.
    calibrations = [
        {"name": f"Round {one['number']}", "panel": stage["calibration"]}
        for one in rounds
        for stage in one["stages"]
        if stage["calibration"]
    ]
    for one in rounds:
        one["stages"] = [stage | {"calibration": None} for stage in one["stages"]]
    return {
        "name": loop.name,
        "state": loop.state,
        "calibrations": calibrations,
        "flow": " → ".join(loop.stages),
        "ran": loop.ran,
        "rounds": rounds,
        "left_out": len(loop.ran) - len(full),
        "table": loop.table(folder),
        "curves": curves,
        "other_curves": other_curves,
        "cards": cards or [{"name": loop.name, "change": None, "big": loop.state, "note": " → ".join(loop.stages)}],
    }


def _stage(entry: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    lines = read_metrics(folder)
    evaluations = [line for line in lines if any(key.startswith("eval_") for key in line)]
    training = [line for line in lines if line not in evaluations]
    results = entry.get("results") or {}
    before = results.get("before") or (evaluations[0] if evaluations else {})
    after = results.get("after") or (evaluations[-1] if evaluations else {})
    compared = changes({} if before.get("step", -1) == after.get("step", -2) else before, after)
    compared, episodes = _without_episodes(compared)
    if not episodes and (measured := [line for line in training if any(_of_episodes(key) for key in line)]):
        _, episodes = _without_episodes(changes(measured[0] if len(measured) > 1 else {}, measured[-1]))
    matter = headline_changes(compared) or compared
    method = entry.get("method") or ""
    makes_rows = method in ROW_METHODS
    samples = read_lines(folder / SAMPLES_FILE)
    if makes_rows and method != "eval":
        joined, heads = _alone(samples), [""]
    else:
        joined, steps = before_and_after(samples)
        heads = [f"Optimizer step {step:,}" for step in steps]
    if method == "eval":
        heads = list(TWO_MODELS) if len(heads) > 1 else [""]
    removed = ["model removed after the next round (keep: last)"] if entry.get("thinned") and entry.get("model") else []
    stage = {
        "name": entry["name"],
        "state": entry.get("state", "unknown"),
        "facts": ([METHODS.get(method, method)] if method else []) + _facts(entry, training) + removed,
        "so_far": not results and bool(evaluations),
        "makes_rows": makes_rows,
        "unchanged": _why_unchanged(entry),
        "changes": matter,
        "other_changes": [change for change in compared if change not in matter],
        "episodes": episodes,
        "solutions_end": method == "search",
        "episodes_of": ("First iteration", "Last iteration") if not evaluations and training else None,
        **panels(entry["name"], [] if makes_rows else list(map(_drawn, lines))),
        "samples": joined[:MOST_SAMPLES],
        "sample_count": len(joined),
        "sample_heads": heads,
        "sides": TWO_MODELS if method == "eval" else ("Before", "After"),
        "overlap": entry.get("overlap", ""),
        "rows": _rows(entry.get("rows") or {}),
        "written": written_rows(entry, folder),
        **(searched(entry["name"], folder) if method == "search" else {"trees": [], "calibration": None}),
        "data": entry.get("data") or ({} if method else entry.get("files") or {}),
        "files": entry.get("files") or {},
    }
    return stage | {"cards": [_card(stage, _most_telling(compared))]}


def _of_episodes(key: str) -> bool:
    return key.removeprefix("eval_").startswith(OF_EPISODES)


def _drawn(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl without finish reasons and kinds of tool errors, which are in a table."""
    return {key: value for key, value in line.items() if not _of_episodes(key)}


def _without_episodes(compared: list[Change]) -> tuple[list[Change], list[Change]]:
    """The other metrics; and those of episodes: the environment's reward, finish reasons and kinds of tool errors.

    What is 0 before and after is left out.
    """
    episodes = [
        change
        for change in compared
        if _of_episodes(change.key) and any(side is not None and side.value for side in (change.before, change.after))
    ]
    own = [change for change in compared if change.key == "reward_environment"]
    others = [change for change in compared if not _of_episodes(change.key)]
    return others, own + episodes if episodes else []


def _why_unchanged(entry: Mapping[str, Any]) -> str | None:
    """Why a stage has trained on no row; None if it has trained, or does not train."""
    train = (entry.get("rows") or {}).get("train")
    if train is None or train["rows"]:
        return None
    return "data.select left no row to train on" if train.get("left_out") else "data.train was empty"


def _card(stage: Mapping[str, Any], change: Change | None) -> dict[str, Any]:
    """The card of a stage: one metric, or else its state."""
    if change is None:
        state = "the model stays as it is" if stage["unchanged"] else STATES.get(stage["state"], stage["state"])
        unwritten = "" if stage["state"] == "done" else "nothing written yet"
        note = "nothing selected" if stage["unchanged"] else " · ".join(stage["facts"]) or unwritten
        return {"name": stage["name"], "change": None, "big": state, "note": note}
    said = _in_words(change) if change.verdict or not stage["so_far"] else "so far"
    return {"name": stage["name"], "change": change, "note": said}


def _in_words(change: Change) -> str:
    """The verdict of a change, or the interval of the only value: ``95 % interval 0.1349 to 0.1854``."""
    only = change.after or change.before
    if change.verdict or only is None or only.interval is None:
        return change.verdict
    low, high = (_typeset(end, change.metric.share) for end in only.interval)
    return f"95 % interval {low} to {high}"


def _most_telling(compared: list[Change]) -> Change | None:
    """The first metric that was measured twice, or else the first one."""
    return next((change for change in compared if change.direction), compared[0] if compared else None)


def _facts(entry: Mapping[str, Any], training: list[dict[str, Any]]) -> list[str]:
    """The size of a stage: optimizer steps, time, tokens, and tokens per second of training."""
    paced = [line for line in training if "tokens" in line and line.get("seconds")]
    spent = sum(line["seconds"] for line in paced)
    tokens = sum(line["tokens"] for line in paced)
    facts = [counted(training[-1]["step"], "optimizer step")] if training else []
    facts += [duration(entry.get("seconds") or spent)] if entry.get("seconds") or spent else []
    return facts + ([f"{number(round(tokens))} tokens", f"{number(round(tokens / spent))} tokens/s"] if tokens else [])


def _rows(splits: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The number of rows that each split uses, and which are not: lists of ``"train.jsonl:17: no answer"``."""
    none: dict[str, Any] = {"rows": 0, "skipped": [], "dropped": [], "shortened": [], "by_turn": 0}
    none |= {"left_out": {}, "counts": {}}
    return [{"split": split, **none, **counts} for split, counts in splits.items()]
