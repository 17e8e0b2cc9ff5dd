"""Asks people to rank completions on a page, and waits for them."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from burnish import files, progress
from burnish.errors import UserError, WaitingForPeople
from burnish.label.export import rank_groups
from burnish.label.export import rows as rows_of
from burnish.label.reading import distinct, task_of
from burnish.label.server import Page, serve
from burnish.label.store import Store
from burnish.label.tasks import Answer, Highlight, Task, pairwise
from burnish.math.agreement import interval_of_alpha, krippendorff_alpha
from burnish.math.disagreement import disagreement
from burnish.methods import ROW_METHODS
from burnish.methods.settings import RankConfig
from burnish.protocols import Made, RowMethod, RowRun
from burnish.rewards.functions import NamedReward
from burnish.rl.collect import scored
from burnish.types import Changed, Preference, Ranking, Row, Trajectory

EQUAL = "skipped: equal to an earlier row"
ANSWERS = "answers.json"
"""The answers that the stage goes on with, in its folder. What people say later does not change its rows."""
DISAGREEMENT = "disagreement.json"
"""How far the stage's rewards disagree about each task, in its folder, so that a waiting stage scores only once."""
LOOK_SECONDS = 0.3
SHOWN = 4
"""Number of rows of a chunk that a person can read in the report."""


class Rank(RowMethod):
    """Writes ``ranked.jsonl`` and ``pairs.jsonl``, what people say of the completions of each prompt.

    The page opens in a terminal, and the stage waits until enough prompts have enough answers. Without a terminal, the
    stage stops with exit code 3, people rank with ``burnish label``, and the same command resumes.

    If the stage has rewards, people get those prompts first about whose completions the rewards disagree most.

    The answers are in a database in the run's folder, which ``--fresh`` does not remove: equal completions are never
    ranked twice.
    """

    spec = ROW_METHODS["rank"]

    def __init__(self, **settings: Any) -> None:
        self.settings = RankConfig(**settings)
        self._answers: dict[str, list[Answer]] | None = None
        self._sources: dict[str, str] = {}  # of each task, the first row that gives it

    def check(self, rows: list[Row], keys: Collection[str], reward_model: bool | None) -> None:
        """Check that there is something to rank."""
        if not self._tasks(rows, [{}] * len(rows), []):
            raise UserError(f"{rows[0].source if rows else 'data.rows'}: nothing to rank: no prompt has two answers")

    def start(self, rows: list[Row], records: list[Mapping[str, Any]], run: RowRun) -> None:
        """Wait until people have ranked enough, and keep their answers in the stage's folder.

        Raises:
            WaitingForPeople: there is no terminal to wait in.
        """
        kept, tasks = run.folder / ANSWERS, self._tasks(rows, records, [])
        self._sources = {task.id: task.source for task in tasks}
        if kept.is_file():
            return
        if run.rewards:
            found = _disagreement(tasks, run)
            tasks.sort(key=lambda task: -found[task.id])
        enough = len(tasks) if self.settings.enough is None else min(self.settings.enough, len(tasks))
        database = (
            run.run_folder / f"{run.folder.relative_to(run.run_folder).as_posix().replace('/', '-')}.labels.sqlite"
        )
        with Store(database, run.seed) as store:
            store.show_only(tasks)
            done = store.counts(self.settings.raters)[1]
        if done < enough:
            self._wait(database, done, enough, run)
        with Store(database, run.seed) as store:
            shown = {task.id for task in tasks}
            answers = [asdict(answer) for answer in store.answers() if answer.task in shown]
        files.write_text(kept, json.dumps(answers, ensure_ascii=False))

    def _wait(self, database: Path, done: int, enough: int, run: RowRun) -> None:
        raters, what = self.settings.raters, "pairs" if self.settings.pairwise else "prompts"
        several = "" if raters == 1 else f" by {raters} people each"
        waits = self.settings.wait
        if waits == "never" or (waits == "auto" and not (sys.stdin.isatty() and sys.stdout.isatty())):
            raise WaitingForPeople(
                f"{run.folder}: {done:,} of {enough:,} {what} are ranked{several}. Open the page with\n"
                f"  burnish label {database} --raters {raters}\n"
                "which prints its address. Then run the same command again."
            )
        page: Page = serve(
            None, database, raters=raters, host=self.settings.host, port=self.settings.port, seed=run.seed
        )
        with page:
            run.message(f"rank {enough:,} {what}{several} at {page.address}")
            run.message("Ctrl+C stops; every answer is kept, and the same command resumes")
            while done < enough:
                progress.report(f"{what} ranked", done, enough)
                time.sleep(LOOK_SECONDS)
                done = page.store.counts(raters)[1]
            progress.report(f"{what} ranked", enough, enough)
            run.message(f"{done:,} {what} are ranked")

    def make(self, rows: list[Row], records: list[Mapping[str, Any]], first: int, run: RowRun) -> Made:
        """Write what people said of a chunk of rows."""
        left_out: list[Changed] = []
        tasks = self._tasks(rows, records, left_out)
        answers, apart = self._kept(run.folder / ANSWERS), _stored(run.folder / DISAGREEMENT)
        became: dict[str, list[str]] = {row.source: [] for row in rows}  # of each row, what became of its tasks
        for one in left_out:
            became[one.source].append(EQUAL if one.reason.startswith("equal to") else f"skipped: {one.reason}")
        ranked, pairs, said = [], [], []
        measured: dict[str, list[float]] = defaultdict(list)
        for task in tasks:
            if self._sources[task.id] != task.source:
                became[task.source].append(EQUAL)
                continue
            given = answers.get(task.id, [])
            said += [asdict(answer) for answer in given]
            ranking = [answer for answer in given if answer.ranks is not None]
            measured["ranked"].append(float(bool(ranking)))
            if apart:
                measured["disagreement"].append(apart[task.id])
            if not ranking:
                became[task.source].append("skipped: by people" if given else "skipped: not ranked")
                continue
            became[task.source].append("made")
            measured["raters"].append(float(len(ranking)))
            measured["rater_seconds"] += [answer.seconds for answer in ranking if answer.seconds is not None]
            ranked += rows_of("ranking", [task], ranking)
            pairs += rows_of("preference", [task], ranking)
        made = {"ranked.jsonl": ranked, "pairs.jsonl": pairs, "answers.jsonl": said}
        counts = Counter("made" if "made" in each else next(iter(each), EQUAL) for each in became.values())
        counts[EQUAL] += len(rows) - len(became)
        return Made(made, +counts, measured, [])

    def _tasks(self, rows: list[Row], records: list[Mapping[str, Any]], left_out: list[Changed]) -> list[Task]:
        tasks = distinct(
            [
                task_of(row, record)
                for row, record in zip(rows, records, strict=True)
                if isinstance(row, Ranking | Preference)
            ],
            left_out,
        )
        return pairwise(tasks) if self.settings.pairwise else tasks

    def _kept(self, path: Path) -> dict[str, list[Answer]]:
        if self._answers is None:
            self._answers = defaultdict(list)
            for plain in json.loads(path.read_text("utf-8")):
                self._answers[plain["task"]].append(_answer(plain))
        return self._answers

    def results(self, folder: Path, seed: int) -> Mapping[str, Mapping[str, float]]:
        """Krippendorff's alpha of the ranks, if several people ranked the same prompts."""
        lines = (folder / "answers.jsonl").read_text("utf-8").splitlines()
        groups = rank_groups(_answer(json.loads(line)) for line in lines)
        alpha, interval = krippendorff_alpha(groups), interval_of_alpha(groups, seed=seed)
        if math.isnan(alpha):
            return {}
        results = {"rater_agreement": alpha}
        if interval is not None:
            results |= {"rater_agreement_low": interval[0], "rater_agreement_high": interval[1]}
        return {"after": results}


def _disagreement(tasks: list[Task], run: RowRun) -> dict[str, float]:
    """How far the stage's rewards disagree about each task, in nats. Computed once."""
    path = run.folder / DISAGREEMENT
    if not path.is_file():
        run.message(f"{len(run.rewards)} rewards score the completions of {len(tasks):,} prompts")
        scores = _scores(tasks, [reward for reward in run.rewards if reward.weight], run.seed)
        found = {task.id: _of_pairs(scores[task.id]) for task in tasks}
        files.write_text(path, json.dumps(found))
    return _stored(path)


def _stored(path: Path) -> dict[str, float]:
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def _scores(tasks: list[Task], rewards: list[NamedReward], seed: int) -> dict[str, npt.NDArray[np.float64]]:
    """The weighted scores of each task by each reward, of shape (rewards, completions)."""
    given = [_trajectory(task, i) for task in tasks for i in range(len(task.completions))]
    trajectories = scored(given, rewards, seed=(seed, 0))
    scores = np.array([[t.rewards[one.name] * one.weight for t in trajectories] for one in rewards])
    ends = np.cumsum([len(task.completions) for task in tasks])
    return {task.id: scores[:, end - len(task.completions) : end] for task, end in zip(tasks, ends, strict=True)}


def _trajectory(task: Task, index: int) -> Trajectory:
    messages = task.completions[index]
    if len(messages) != 1:
        raise UserError(f"{task.source}: a completion has {len(messages)} messages: rewards score only texts")
    given = Trajectory.from_text(messages[0]["content"], task.prompt, columns=task.meta, source=task.source)
    return replace(given, tools=task.tools)


def _of_pairs(scores: npt.NDArray[np.float64]) -> float:
    """The mean disagreement over the pairs of completions, whose scores (rewards, completions) are logits."""
    gaps = np.stack([scores[:, i] - scores[:, j] for i, j in combinations(range(scores.shape[1]), 2)], axis=1)
    return float(disagreement((1 + np.tanh(gaps / 2)) / 2).mean())


def _answer(plain: Mapping[str, Any]) -> Answer:
    """The inverse of ``dataclasses.asdict``."""
    ranks = None if plain["ranks"] is None else tuple(plain["ranks"])
    highlights = tuple(Highlight(**highlight) for highlight in plain["highlights"])
    return Answer(**{**plain, "ranks": ranks, "highlights": highlights})
