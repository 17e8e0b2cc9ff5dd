"""Solves questions by search over reasoning steps, and compares methods in a table."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pydantic
from rich.table import Table

from burnish.commands.generate import read_parts, renamed, unfinished
from burnish.config.yaml import OVERRIDE, Document, complain, read
from burnish.data import readers
from burnish.errors import UserError, did_you_mean
from burnish.files import storing, write_text
from burnish.generate.sampling import Sampling
from burnish.mistakes import mistakes
from burnish.models.loaded import Loaded
from burnish.report.page import table_of
from burnish.search.answers import Answers
from burnish.search.inference import METHODS, READ, InferenceSettings, Solved, Strategy, check, compare, solve_chunks
from burnish.search.settings import AnswerSettings, CodeSettings, StepSettings
from burnish.search.tree import from_json, to_json
from burnish.types import Config, Prompt

ESCAPES = {r"\n": "\n", r"\t": "\t"}
"""How line breaks and tabs are typed in a terminal."""
OWN = (
    "prompt", "solution", "answer", "correct", "finish", "value", "method",
    "steps", "tokens", "passes", "calls", "seconds", "source", "trace", "known",
)  # fmt: skip
"""The keys of a line of output. A column with one of these names becomes ``NAME_original``."""
COSTS = ("steps", "passes", "tokens", "seconds")


# --- options ------------------------------------------------------------------------------------------------------


def questions(source: Path, column: str | None = None) -> list[Prompt]:
    """Read questions from a file of rows. ``column`` is the one with the question, if it is not named as usual.

    Raises:
        UserError: as in ``readers.load``.
    """
    try:
        loaded = readers.load(source, (Prompt,), keys={} if column is None else {"prompt": column}).rows
    except UserError as error:
        raise UserError(re.sub(r"set data\.keys: \{prompt: (\w+)\}", r"add --question \1", str(error))) from error
    return [row for row in loaded if isinstance(row, Prompt)]


def strategies(methods: Sequence[str], options: Mapping[str, Any]) -> list[Strategy]:
    """The strategies of a command line such as ``--method greedy --method sbs:beams=1 --children 5``.

    Args:
        methods: names, each of which may be followed by settings of its own.
        options: settings of all methods that read them. None means not set.

    Raises:
        UserError: there is no such method or setting, no method reads an option, or two methods are the same.
    """
    found: list[Strategy] = []
    given = {name: value for name, value in options.items() if value is not None}
    for text in methods:
        name, _, own = text.partition(":")
        if name not in METHODS:
            raise UserError(
                f"--method {name}: there is no such method{did_you_mean(name, METHODS)}: expected one of "
                f"{', '.join(METHODS)}"
            )
        settings = {key: value for key, value in given.items() if key in READ[name]}
        for part in filter(None, own.split(",")):
            key, equals, value = part.partition("=")
            if not equals:
                raise UserError(f"--method {text}: expected NAME:KEY=VALUE,KEY=VALUE, such as sbs:beams=1,children=5")
            settings[key.strip()] = read(value, f"--method {text}", lines=False).value
        strategy = _checked(Strategy, {"method": name, **settings}, f"--method {text}")
        if strategy in found:
            raise UserError(f"--method {strategy.label} is given twice: remove one")
        found.append(strategy)
    read_by_some = {key for strategy in found for key in READ[strategy.method]}
    if ignored := [name for name in given if name not in read_by_some]:
        users = [method for method in METHODS if ignored[0] in READ[method]]
        raise UserError(f"--{ignored[0]} applies only to --method {', '.join(users)}")
    return found


def settings_of(found: Sequence[Strategy], options: Mapping[str, Any]) -> InferenceSettings:
    """What all strategies share, from the other options. None means not set.

    Raises:
        UserError: an option would be ignored, or a value is out of range.
    """
    given = {name: value for name, value in options.items() if value is not None}
    drawn = [name for name in ("temperature", "top_k", "top_p") if name in given]
    if drawn and all(strategy.method == "greedy" for strategy in found):
        raise UserError(f"--{drawn[0].replace('_', '-')} would have no effect: greedy does not sample")
    if given.get("temperature") == 0 and len(drawn) > 1:
        raise UserError(
            f"--{drawn[1].replace('_', '-')} would have no effect with --temperature 0, which does not sample"
        )
    code = given.pop("code", None)
    for name in ("delimiter", "final"):
        if name in given:
            given[name] = _unescaped(given[name])
    if code is not None:
        given["code"] = _checked(CodeSettings, read(code, "--code", lines=False).value, "--code")

    def part(kind: type[Config], **defaults: Any) -> Any:
        mine = {name: given.pop(name) for name in list(given) if name in kind.model_fields}
        return _checked(kind, defaults | mine)

    # seed, tokens and so on are fields of InferenceSettings itself
    settings: InferenceSettings = _checked(
        InferenceSettings,
        {
            "step": part(StepSettings),
            "answer": part(AnswerSettings),
            "sampling": part(Sampling, max_new_tokens=256),
            **given,
        },
    )
    Answers(settings.answer)  # loads functions of the user, so that a missing one is reported early
    return settings


def _unescaped(text: str) -> str:
    for typed, meant in ESCAPES.items():
        text = text.replace(typed, meant)
    return text


def _checked(kind: type[Any], options: Any, place: str = OVERRIDE) -> Any:
    try:
        return kind.model_validate(options)
    except pydantic.ValidationError as error:
        complain(Document(options, {(): place}), mistakes(error, kind, options))
        raise


# --- solving ------------------------------------------------------------------------------------------------------


def run(
    loaded: Loaded,
    prompt_rows: list[Prompt],
    found: Sequence[Strategy],
    settings: InferenceSettings,
    output: Path | None = None,
) -> dict[str, list[Solved]]:
    """Solve the questions with each strategy, and write one line for each solution.

    Unfinished output is kept in a partial file, and repeating a stopped call resumes from it.

    Raises:
        UserError: the model does not suit a strategy; this is checked before the first question is solved.
    """
    for strategy in found:
        check(loaded, strategy, settings)
    if output is None:
        return {one.label: [s for chunk in solve_chunks(prompt_rows, loaded, one, settings) for s in chunk]
                for one in found}  # fmt: skip
    output.parent.mkdir(parents=True, exist_ok=True)
    plan = [[one.model_dump() for one in found], settings.model_dump(), _code_of(settings)]
    aside = unfinished(output, loaded, prompt_rows, *plan)
    parts = read_parts(aside)
    lines = [line for _, some in parts for line in some]
    solved: dict[str, list[Solved]] = {one.label: [] for one in found}
    for line in lines:
        solved[line["method"]].append(_restored(line))
    with storing(output), aside.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(part, ensure_ascii=False) + "\n" for part in parts)
        file.flush()
        for one in found:
            start = len(solved[one.label])
            for chunk in solve_chunks(prompt_rows, loaded, one, settings, start):
                first = len(solved[one.label])
                some = [_line(prompt_rows[first + i], one, each) for i, each in enumerate(chunk)]
                file.write(json.dumps([len(chunk), some], ensure_ascii=False) + "\n")
                file.flush()
                lines += some
                solved[one.label] += chunk
    write_text(output, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    aside.unlink()
    return solved


def _code_of(settings: InferenceSettings) -> list[str]:
    """The text of the files with the user's functions."""
    names = (settings.answer.find, settings.answer.check)
    places = [name.rpartition(":")[0] for name in names if ":" in name]
    files = [place if place.endswith(".py") else import_module(place).__file__ for place in places]
    return [Path(file).read_text("utf-8", "replace") for file in files if file is not None]


def _line(row: Prompt, strategy: Strategy, solved: Solved) -> dict[str, Any]:
    """A line of output."""
    columns = renamed(row.columns, OWN)
    mine = {field.name: getattr(solved, field.name) for field in dataclasses.fields(solved)}
    text, tree = mine.pop("text"), mine.pop("tree")
    return {
        "prompt": row.messages[0]["content"] if len(row.messages) == 1 else list(row.messages),
        **columns,
        "solution": text,
        **{name: mine[name] for name in ("answer", "correct", "finish", "value")},
        "method": strategy.label,
        **{name: value for name, value in mine.items() if name not in ("answer", "correct", "finish", "value")},
        "trace": to_json(tree),
    }


def _restored(line: Mapping[str, Any]) -> Solved:
    """The solution of a line of output."""
    names = [field.name for field in dataclasses.fields(Solved) if field.name not in ("text", "tree")]
    return Solved(**{name: line[name] for name in names}, text=line["solution"], tree=from_json(line["trace"]))


# --- display ------------------------------------------------------------------------------------------------------


def results(loaded: Loaded, solved: Mapping[str, Sequence[Solved]], seed: int) -> dict[str, Any]:
    """The comparison as plain values for JSON."""
    methods = compare(solved, seed=seed)
    first = next(iter(methods.values()))
    return {"model": loaded.reference, "rows": first["rows"], "known": first["known"], "methods": methods}


def table(result: Mapping[str, Any]) -> Table:
    """A table with one line for each method."""
    methods = result["methods"]
    accuracy, several = result["known"] > 0, len(methods) > 1
    title = ["method", *(["accuracy, %"] if accuracy else []), *(["difference, %"] if accuracy and several else [])]
    rows = [[*title, "steps", "model calls", "tokens", "seconds"]]
    for label, line in methods.items():
        cells = [label]
        if accuracy:
            cells.append(_interval(line["accuracy"]))
        if accuracy and several:
            cells.append(_interval(line["difference"], signed=True) if "difference" in line else "")
        rows.append([*cells, *(f"{line[name]:.3g}" if line[name] < 100 else f"{line[name]:,.0f}" for name in COSTS)])
    return table_of(rows, box=None, pad_edge=False)


def notes(result: Mapping[str, Any]) -> list[str]:
    """What a reader of the table needs to know about the rows, and solutions that did not end with an answer."""
    rows, known = result["rows"], result["known"]
    lines = [f"{rows:,} questions" + (f", {known:,} with a known answer" if known else ", none with a known answer")]
    if known:
        lines[0] += "; brackets show 95 % confidence intervals"
    for label, line in result["methods"].items():
        if others := {name: count for name, count in line["finish"].items() if name != "answer"}:
            shown = ", ".join(f"{name} {count:,}" for name, count in others.items())
            lines.append(f"{label}: {sum(others.values()):,} without an answer: {shown}")
        if line["undecided"]:
            lines.append(
                f"{label}: {line['undecided']:,} answers cannot be compared with the known ones and count as incorrect"
            )
    return lines


def _interval(estimate: Mapping[str, float], signed: bool = False) -> str:
    """``81.2 [79.4, 82.9]``, in percent."""
    sign = "+" if signed else ""
    text = f"{estimate['value'] * 100:{sign}.1f}"
    if "low" not in estimate:
        return text
    return f"{text} [{estimate['low'] * 100:{sign}.1f}, {estimate['high'] * 100:{sign}.1f}]"
