"""The command search: its table, its output and how it resumes, and mistakes on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from burnish import cli
from burnish.commands import search as searching
from burnish.commands.search import settings_of, strategies
from burnish.errors import UserError
from burnish.search.inference import Strategy
from stepwise import save, stepwise
from tiny_runs import json_rows

FAST = ["--max-new-tokens", "12", "--find", "last_line", "--check", "exact"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save(stepwise(), folder / "values")
    save(stepwise(values=False), folder / "plain")
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n}+{n}=", "answer": 2 * n % 10, "level": n} for n in range(10)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return tmp_path


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(cli.app, ["search", *map(str, arguments)])


# --- results ------------------------------------------------------------------------------------------------------


def test_methods_are_compared_in_a_table(here: Path, models: Path) -> None:
    result = call(
        models / "values", "q.jsonl", "--method", "greedy", "--method", "sbs:beams=1", "--method", "sbs", *FAST
    )
    assert result.exit_code == 0, result.output
    first, *rest = result.output.splitlines()
    assert first == "10 questions, 10 with a known answer; brackets show 95 % confidence intervals"
    head, *lines = rest[-4:]
    assert head.split() == [
        "method",
        "accuracy,",
        "%",
        "difference,",
        "%",
        "steps",
        "model",
        "calls",
        "tokens",
        "seconds",
    ]
    assert [line.partition(")")[0] for line in lines[1:]] == ["sbs(1, 5", "sbs(3, 5"] and lines[0].startswith("greedy")
    assert "[" in lines[0] and "without an answer: depth" in result.output


def test_json_has_the_same_numbers_as_the_output_file(here: Path, models: Path) -> None:
    arguments = [models / "values", "q.jsonl", "--method", "greedy", "--method", "majority", "--samples", 3, *FAST]
    result = call(*arguments, "--output", "out.jsonl", "--json", "--limit", 9)
    assert result.exit_code == 0, result.output
    methods, rows = json.loads(result.output)["methods"], json_rows(Path("out.jsonl"))
    assert list(methods) == ["greedy", "majority(3)"] and len(rows) == 18
    for label, line in methods.items():
        mine = [row for row in rows if row["method"] == label]
        assert [row["prompt"] for row in mine] == [f"{n}+{n}=" for n in range(9)]
        assert line["accuracy"]["value"] == pytest.approx(sum(row["correct"] for row in mine) / 9)
        for name in ("tokens", "passes", "steps"):
            assert line[name] == pytest.approx(sum(row[name] for row in mine) / 9)
    first = rows[0]
    assert (first["level"], first["answer_original"], first["source"]) == (0, 0, "q.jsonl:1")
    assert first["trace"]["question"] == "q.jsonl:1" and first["trace"]["tokens"] == first["tokens"]
    assert list(first)[:3] == ["prompt", "answer_original", "level"]


def test_questions_without_a_known_answer_are_solved_and_written(here: Path, models: Path) -> None:
    (here / "new.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}\n', "utf-8")
    result = call(models / "values", "new.jsonl", "--method", "sbs", "--output", "out.jsonl", *FAST)
    assert result.exit_code == 0 and "2 questions, none with a known answer\n" in result.output
    assert "accuracy" not in result.output
    rows = json_rows(here / "out.jsonl")
    assert [row["correct"] for row in rows] == [None, None] and all(row["solution"] for row in rows)


@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_a_stopped_search_resumes_with_the_same_solutions(
    here: Path, models: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [
        *(models / "values", "q.jsonl", "--method", "greedy", "--method", "sbs"),
        *("--together", 4, "--output", "out.jsonl", "--json", *FAST),
    ]
    solve, chunks = searching.solve_chunks, []

    def stopping(*args: Any) -> Any:
        for chunk in solve(*args):
            if len(chunks) == after:
                raise KeyboardInterrupt
            chunks.append(chunk)
            yield chunk

    with monkeypatch.context() as patch:
        patch.setattr(searching, "solve_chunks", stopping)
        stopped = call(*arguments)
        assert stopped.exit_code == 130 and "run the same command again to resume" in stopped.output
    assert not Path("out.jsonl").exists()
    with monkeypatch.context() as patch:
        made: list[Any] = []

        def resuming(*args: Any) -> Any:
            # What was solved before is in the file again before anything else is solved.
            (partial,) = [path for path in here.iterdir() if "out.jsonl" in path.name]
            assert len(partial.read_text("utf-8").splitlines()) == after + len(made)
            for chunk in solve(*args):
                made.append(chunk)
                yield chunk

        patch.setattr(searching, "solve_chunks", resuming)
        resumed = call(*arguments)
    assert len(made) == 6 - after  # 3 chunks of 4, 4 and 2 questions for each method
    rows = json_rows(Path("out.jsonl"))
    assert call(*arguments).exit_code == 0
    for row, whole in zip(rows, json_rows(Path("out.jsonl")), strict=True):
        assert row | {"seconds": 0} == whole | {"seconds": 0}
    assert json.loads(resumed.output)["methods"]["sbs(3, 5)"]["rows"] == 10
    assert list(here.glob(".out.jsonl*")) == []


def test_commands_and_python_of_the_page_run(here: Path, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "inference.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^burnish search (.*)$", page, re.MULTILINE)
    (here / "runs" / "step_value").mkdir(parents=True)
    (here / "runs" / "step_value" / "values").symlink_to(models / "values")
    (here / "q.jsonl").rename("questions.jsonl")
    (here / "new.jsonl").write_text('{"prompt": "1+1="}\n', "utf-8")
    assert len(commands) == 3
    for command in commands:
        result = call(*command.split(), *FAST)
        assert result.exit_code == 0, result.output
    assert len(json_rows(here / "solutions.jsonl")) == 1
    exec(code, {})
    *solved, difference = capsys.readouterr().out.splitlines()
    assert len(solved) > 10 and difference.startswith("{'value': ")


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "majorty"], "--method majorty: there is no such method (did you mean 'majority'?): expected one"),
        (["--method", "sbs:beam=2"], "--method sbs:beam=2: beam: unknown key (did you mean 'beams'?)"),
        (["--method", "sbs:beams"], "expected NAME:KEY=VALUE,KEY=VALUE, such as sbs:beams=1,children=5"),
        (["--method", "sbs:beams=0"], "--method sbs:beams=0: beams: expected 1 or more"),
        (["--method", "sbs:samples=3"], "samples: sbs does not read it: it applies to majority, best-of-n"),
        (["--method", "sbs", "--method", "sbs:beams=3"], "--method sbs(3, 5) is given twice: remove one"),
        (["--method", "greedy", "--samples", "3"], "--samples applies only to --method majority, best-of-n"),
        (["--method", "greedy", "--temperature", "1"], "--temperature would have no effect: greedy does not sample"),
        (["--method", "majority", "--temperature", "0"], "all 5 samples are the same at temperature 0"),
        (["--method", "sbs", "--delimiter", ";"], r"its value head judges steps that end with '\n'"),
        (["--method", "sbs", "--code", "{begin: x}"], "--code: begin: unknown key"),
        (["--method", "sbs", "--find", "last"], "find: expected math, last_line or file.py:name, got 'last'"),
        (["--method", "sbs", "--check", "gone.py:f"], "gone.py: no such file"),
        (["--method", "sbs", "--output", "q.jsonl"], "--output would overwrite the questions"),
        ([], "Missing option '--method'"),
    ],
)
def test_mistakes_are_explained(here: Path, models: Path, arguments: list[str], message: str) -> None:
    result = call(models / "values", "q.jsonl", *arguments)
    shown = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2 and message in shown, result.output


def test_every_method_is_checked_before_the_first_question_is_solved(here: Path, models: Path) -> None:
    result = call(models / "plain", "q.jsonl", "--method", "greedy", "--method", "sbs", "--output", "out.jsonl", *FAST)
    assert result.exit_code == 2 and "sbs(3, 5) compares values, and this model has no value head" in result.output
    assert not list(here.glob(".out.jsonl*"))
    assert call(models / "plain", "q.jsonl", "--method", "majority", *FAST).exit_code == 0


def test_rows_and_models_are_checked(here: Path, models: Path) -> None:
    (here / "texts.jsonl").write_text('{"text": "1+1=2"}\n', "utf-8")
    result = call(models / "values", "texts.jsonl", "--method", "greedy")
    assert result.exit_code == 2 and "texts.jsonl:1" in result.output and "prompt" in result.output
    (here / "gsm.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n', "utf-8")
    result = call(models / "values", "gsm.jsonl", "--method", "greedy")
    assert result.exit_code == 2 and "to read it, add --question question" in result.output
    assert call(models / "values", "gsm.jsonl", "--method", "greedy", "--question", "question", *FAST).exit_code == 0
    assert call(models / "values", "none.jsonl", "--method", "greedy").exit_code == 2
    assert call("no-model", "q.jsonl", "--method", "greedy").exit_code == 2


# --- options ------------------------------------------------------------------------------------------------------


def test_settings_of_a_method_come_before_those_of_all() -> None:
    found = strategies(["sbs:beams=1", "mcts", "majority"], {"beams": 2, "children": 4, "samples": None})
    assert found == [
        Strategy(method="sbs", beams=1, children=4),
        Strategy(method="mcts", children=4),
        Strategy(method="majority"),
    ]
    with pytest.raises(UserError, match="--beams applies only to --method sbs, dvts"):
        strategies(["mcts"], {"beams": 2})


def test_options_reach_the_settings() -> None:
    found = strategies(["majority"], {})
    options = {"temperature": 0.5, "delimiter": r"\n\n", "code": "{characters: 9}", "column": "a", "tokens": 7}
    settings = settings_of(found, options | {"final": None})
    assert settings.sampling.temperature == 0.5 and settings.sampling.max_new_tokens == 256
    assert settings.step.delimiter == "\n\n" and settings.step.code is not None and settings.step.code.characters == 9
    assert settings.answer.column == "a" and settings.tokens == 7
    assert "delimiter" not in settings_of(found, {}).step.model_fields_set
