"""A stage that waits for people: without a terminal it stops, and resumes when enough is ranked."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from burnish.commands import label as labeling
from burnish.config import load
from burnish.config.run import run
from burnish.errors import UserError, WaitingForPeople
from burnish.label.store import Store
from burnish.label.tasks import Answer

RECIPE = """\
name: ranking
stages:
  - name: rank
    method: {{name: rank{settings}}}
    data: {{rows: {rows}}}
"""


def recipe(folder: Path, settings: str = "", count: int = 3) -> list[str]:
    """A recipe that asks people about a few colors."""
    rows = folder / "colors.jsonl"
    lines = [
        {"prompt": f"Name color {i}.", "completions": ["Blue.", "Seven.", "Red."], "scores": [0, 0, 0]}
        for i in range(count)
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(settings=settings, rows=rows), "utf-8")
    return [str(path), f"out={folder / 'run'}"]


def started(command: list[str]) -> Path:
    return run(load(command[0], command[1:]))


def answer(folder: Path, ranks: tuple[int, ...], count: int, rater: str = "Ann") -> None:
    """Answer the first tasks that are shown."""
    with Store(folder / "run/rank.labels.sqlite") as store:
        for task in store.tasks(shown_only=True)[:count]:
            store.record(Answer(task.id, rater, ranks))


def made(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "run/rank/data" / name).read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_it_stops_without_a_terminal_and_resumes_with_the_answers(tmp_path):
    command = recipe(tmp_path)
    with pytest.raises(
        WaitingForPeople, match=r"0 of 3 prompts are ranked[\s\S]*burnish label \S+rank.labels.sqlite --raters 1"
    ):
        started(command)
    answer(tmp_path, (2, 3, 1), 2)
    with pytest.raises(WaitingForPeople, match="2 of 3 prompts"):
        started(command)
    answer(tmp_path, (2, 3, 1), 3)
    started(command)
    ranked, pairs = made(tmp_path, "ranked.jsonl"), made(tmp_path, "pairs.jsonl")
    assert [row["scores"] for row in ranked] == [[0.5, 0.0, 1.0]] * 3  # shares of the others that each one beats
    assert [(row["chosen"], row["rejected"]) for row in pairs[:3]] == [
        ("Blue.", "Seven."),
        ("Red.", "Blue."),
        ("Red.", "Seven."),
    ]
    assert all(row["p_chosen"] == 1.0 for row in pairs)


def test_what_is_said_later_changes_nothing_and_a_fresh_run_asks_nothing_again(tmp_path):
    command = recipe(tmp_path)
    with pytest.raises(WaitingForPeople):
        started(command)
    answer(tmp_path, (1, 2, 3), 3)
    started(command)
    before = (tmp_path / "run/rank/data/ranked.jsonl").read_bytes()
    answer(tmp_path, (3, 2, 1), 3)
    started(command)
    assert (tmp_path / "run/rank/data/ranked.jsonl").read_bytes() == before
    run(load(command[0], command[1:]), fresh=True)  # the database is kept, with the newest answers
    assert [row["scores"] for row in made(tmp_path, "ranked.jsonl")] == [[0.0, 0.5, 1.0]] * 3


def test_enough_and_several_raters(tmp_path):
    command = recipe(tmp_path, ", enough: 2, raters: 2")
    with pytest.raises(WaitingForPeople, match=r"0 of 2 prompts are ranked by 2 people each[\s\S]*--raters 2"):
        started(command)
    answer(tmp_path, (1, 2, 3), 2)
    with pytest.raises(WaitingForPeople, match="0 of 2 prompts"):
        started(command)
    answer(tmp_path, (2, 1, 3), 2, "Bob")
    manifest = json.loads((started(command) / "manifest.json").read_text("utf-8"))
    (stage,) = manifest["stages"]
    assert stage["rows"]["rows"]["counts"] == {"made": 2, "skipped: not ranked": 1}
    # Ann and Bob disagree on the first two completions only
    assert [row["p_chosen"] for row in made(tmp_path, "pairs.jsonl")[:3]] == [0.5, 1.0, 1.0]
    assert 0 < stage["results"]["after"]["eval_rater_agreement"] < 1


def test_skipped_prompts_are_counted(tmp_path):
    command = recipe(tmp_path, count=2)
    with pytest.raises(WaitingForPeople):
        started(command)
    answer(tmp_path, (1, 2, 2), 2)
    with Store(tmp_path / "run/rank.labels.sqlite") as store:
        store.record(Answer(store.tasks()[0].id, "Ann", None))
    manifest = json.loads((started(command) / "manifest.json").read_text("utf-8"))
    assert manifest["stages"][0]["rows"]["rows"]["counts"] == {"skipped: by people": 1, "made": 1}
    assert made(tmp_path, "ranked.jsonl")[0]["scores"] == [1.0, 0.25, 0.25]


def test_equal_rows_far_apart_are_one_task(tmp_path):
    command = recipe(tmp_path, count=70)
    rows = tmp_path / "colors.jsonl"
    lines = rows.read_text("utf-8").splitlines(keepends=True)
    rows.write_text("".join([*lines[:69], lines[0]]), "utf-8")  # in another chunk than the first row
    with pytest.raises(WaitingForPeople, match="0 of 69 prompts"):
        started(command)
    answer(tmp_path, (1, 2, 3), 69)
    manifest = json.loads((started(command) / "manifest.json").read_text("utf-8"))
    assert manifest["stages"][0]["rows"]["rows"]["counts"] == {"made": 69, "skipped: equal to an earlier row": 1}
    assert len(made(tmp_path, "ranked.jsonl")) == 69


def test_pairs_of_a_row_count_as_one_row(tmp_path):
    command = recipe(tmp_path, ", pairwise: true, enough: 4", count=2)
    rows = tmp_path / "colors.jsonl"
    rows.write_text("".join(rows.read_text("utf-8").splitlines(keepends=True)[i] for i in (0, 0, 1)), "utf-8")
    with pytest.raises(WaitingForPeople, match="0 of 4 pairs"):
        started(command)
    answer(tmp_path, (1, 2), 2)
    with Store(tmp_path / "run/rank.labels.sqlite") as store:
        for task in store.tasks(shown_only=True)[2:]:
            store.record(Answer(task.id, "Ann", None))
    manifest = json.loads((started(command) / "manifest.json").read_text("utf-8"))
    counts = {"made": 1, "skipped: equal to an earlier row": 1, "skipped: by people": 1}
    assert manifest["stages"][0]["rows"]["rows"]["counts"] == counts
    assert len(made(tmp_path, "pairs.jsonl")) == 2


def test_the_command_line_exits_with_3(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "burnish", "run", *recipe(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 3
    assert "burnish label" in done.stderr and "Traceback" not in done.stderr


def test_it_waits_with_the_page_open(tmp_path, monkeypatch):
    """While the page is open, answers arrive from another thread."""
    pages: list[str] = []
    from burnish.methods import rank

    serve = rank.serve

    def noted(*args: Any, **kwargs: Any) -> Any:
        page = serve(*args, **kwargs)
        pages.append(page.address)
        with urllib.request.urlopen(page.address, timeout=10) as response:
            assert response.status == 200
        threading.Timer(0.5, answer, (tmp_path, (1, 2, 3), 3)).start()
        return page

    monkeypatch.setattr(rank, "serve", noted)
    started(recipe(tmp_path, ", wait: always"))
    assert len(pages) == 1 and len(made(tmp_path, "ranked.jsonl")) == 3


def test_label_shows_the_tasks_of_a_stage_that_waits(tmp_path):
    with pytest.raises(WaitingForPeople):
        started(recipe(tmp_path))
    database = tmp_path / "run/rank.labels.sqlite"
    labeling.check_stored(database, {"--model": None, "--pairwise": False})
    with pytest.raises(UserError, match=r"--pairwise would have no effect"):
        labeling.check_stored(database, {"--model": None, "--pairwise": True})
    with pytest.raises(UserError, match="no such file"):
        labeling.check_stored(tmp_path / "other.sqlite", {})
    answer(tmp_path, (1, 2, 3), 3)
    labeling.export(database, "ranking", tmp_path / "out.jsonl", print)
    assert len((tmp_path / "out.jsonl").read_text("utf-8").splitlines()) == 3


REWARDS = """\
def ann(trajectories):
    return [3.0 * (t.text == "Blue.") for t in trajectories]

def bob(trajectories):
    return [3.0 * (t.text == "Blue.") * (-1 if t.columns["argue"] else 1) for t in trajectories]
"""


def ordered(folder: Path, rewards: list[str]) -> list[str]:
    """A recipe whose rewards disagree about every third row."""
    rows, path = folder / "colors.jsonl", folder / "recipe.yaml"
    lines = [
        {"prompt": f"Name color {i}.", "completions": ["Blue.", "Red."], "scores": [0, 0], "argue": i % 3 == 2}
        for i in range(6)
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    (folder / "mine.py").write_text(REWARDS, "utf-8")
    path.write_text(RECIPE.format(settings=", enough: 2", rows=rows), "utf-8")
    functions = ", ".join(f"{{function: 'mine.py:{name}'}}" for name in rewards)
    return [str(path), f"out={folder / 'run'}", f"stages.rank.reward=[{functions}]"]


def test_people_get_those_prompts_first_about_which_rewards_disagree(tmp_path):
    command = ordered(tmp_path, ["ann", "bob"])
    with pytest.raises(WaitingForPeople):
        started(command)
    with Store(tmp_path / "run/rank.labels.sqlite") as store:
        prompts = [task.prompt[0]["content"] for task in store.tasks(shown_only=True)]
    assert prompts == [f"Name color {i}." for i in (2, 5, 0, 1, 3, 4)]
    answer(tmp_path, (1, 2), 2)
    (stage,) = json.loads((started(command) / "manifest.json").read_text("utf-8"))["stages"]
    assert [row["prompt"] for row in made(tmp_path, "ranked.jsonl")] == ["Name color 2.", "Name color 5."]
    # both say .9526 (the sigmoid of 3) of four prompts; of two, .9526 and .0474, which is log 2 - H(.9526) = .5020
    assert stage["results"]["after"]["eval_disagreement"] == pytest.approx(0.5020 / 3, abs=1e-4)


def test_one_reward_cannot_disagree(tmp_path):
    with pytest.raises(UserError, match="about which rewards disagree: expected two rewards or more, got 1"):
        started(ordered(tmp_path, ["ann"]))
