"""The report of a small made-up run with three stages and known numbers."""

from __future__ import annotations

import io
import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from burnish.errors import UserError
from burnish.methods import METHODS, ROW_METHODS
from burnish.report import curves
from burnish.report import page as report
from burnish.report.metrics import Recorder
from burnish.report.rounds import Rounds

VOID = {"meta", "br", "link", "img", "input", "hr"}
PROMPTS = ["Review: I went in expecting little, and", "Review: The first half hour", "Review: <b>Honestly</b> & truly,"]


def curve(recorder: Recorder, steps: int, terms: dict[str, tuple[float, float]], evals: dict[str, tuple[float, float]]):
    """Lines whose values go from the first number of each pair to the second, with noise."""
    noise = random.Random(0)
    for step in range(steps + 1):
        done = 1 - math.exp(-3 * step / steps)
        if step:
            line = {k: a + (b - a) * done + noise.gauss(0, 0.06 * abs(b - a) + 1e-3) for k, (a, b) in terms.items()}
            line |= {"learning_rate": 1e-4 * (1 - step / steps), "tokens": 4096, "seconds": 0.8, "epoch": step / steps}
            recorder.metrics(step, line)
        if evals and step % (steps // 4) == 0:
            values = {f"eval_{k}": a + (b - a) * done for k, (a, b) in evals.items()}
            for key in [key for key in values if key in ("eval_score", "eval_accuracy", "eval_win_rate")]:
                values |= {f"{key}_low": values[key] - 0.06, f"{key}_high": values[key] + 0.06}
            recorder.metrics(step, values)


def make_run(folder: Path) -> Path:
    """A finished run of sft, reward and ppo."""
    curve(
        Recorder(folder / "sft"),
        120,
        {"loss": (3.9, 2.6), "grad_norm": (4, 1)},
        {"loss": (3.8, 2.7), "perplexity": (44.7, 14.9)},
    )
    curve(
        Recorder(folder / "reward"),
        60,
        {"loss": (0.7, 0.4), "accuracy": (0.5, 0.84), "margin": (0, 1.2)},
        {"loss": (0.69, 0.45), "accuracy": (0.5, 0.79), "score_std": (0.1, 1.3)},
    )
    recorder = Recorder(folder / "ppo")
    terms = {
        "loss": (0.3, 0.1),
        "score": (-0.2, 1.6),
        "kl": (0, 6.5),
        "kl_coef": (0.2, 0.16),
        "entropy": (3.1, 2.4),
        "value": (1.4, 0.3),
        "explained_variance": (0.0, 0.7),
        "length": (24, 31),
        "clipfrac": (0.0, 0.12),
    }
    curve(recorder, 600, terms, {"score": (-0.2, 1.5), "win_rate": (0.5, 0.86), "kl": (0.0, 6.1), "length": (24, 24.5)})
    recorder.metrics(601, {"loss": math.nan, "score": 1.6})
    words = ["a", "film", "that", "never", "finds", "its", "feet", "but", "the", "cast", "is", "warm", "and", "earned"]
    for step, shift in ((0, -0.4), (300, 0.8), (600, 1.5)):
        noise = random.Random(step)
        rows = [
            {
                "step": step,
                "kind": "eval",
                "prompt": PROMPTS[i % 3],
                "completion": " ".join(noise.choices(words, k=24)),
                "score": round(shift + noise.gauss(0, 0.5), 4),
                "rewards": {"sentiment": shift, "brevity": 0.1},
                "finish_reason": "stop" if i % 4 else "length",
                "source": f"prompts.jsonl:{i + 1}",
            }
            for i in range(9)
        ]
        recorder.samples(rows)
    stages = [
        {
            "name": "sft",
            "method": "sft",
            "state": "done",
            "seconds": 96.0,
            "data": {"data/train.jsonl": "ab12" * 16},
            "rows": {
                "train": {
                    "rows": 1997,
                    "skipped": ["train.jsonl:17: no assistant turn"],
                    "dropped": ["train.jsonl:5: 2,200 tokens"],
                    "shortened": ["train.jsonl:4: 1,300 tokens", "train.jsonl:9: 1,101 tokens"],
                    "by_turn": 1200,
                }
            },
            "results": {"before": {"loss": 3.8, "perplexity": 44.7}, "after": {"loss": 2.72, "perplexity": 15.18}},
        },
        {
            "name": "reward",
            "method": "reward",
            "state": "done",
            "seconds": 48.5,
            "data": {},
            "results": {
                "before": {
                    "accuracy": 0.5,
                    "accuracy_low": 0.44,
                    "accuracy_high": 0.56,
                    "loss": 0.69,
                    "score_std": 0.1,
                },
                "after": {
                    "accuracy": 0.79,
                    "accuracy_low": 0.74,
                    "accuracy_high": 0.83,
                    "loss": 0.45,
                    "score_std": 1.3,
                },
            },
        },
        {
            "name": "ppo",
            "method": "ppo",
            "state": "done",
            "seconds": 700.0,
            "data": {},
            "results": {
                "before": {
                    "score": -0.2,
                    "score_low": -0.3,
                    "score_high": -0.1,
                    "kl": 0.0,
                    "length": 24.0,
                    "length_low": 22.0,
                    "length_high": 26.0,
                },
                "after": {
                    "score": 1.5,
                    "score_low": 1.41,
                    "score_high": 1.59,
                    "kl": 6.1,
                    "length": 24.5,
                    "length_low": 22.4,
                    "length_high": 26.6,
                    "win_rate": 0.86,
                    "win_rate_low": 0.8,
                    "win_rate_high": 0.91,
                },
            },
        },
    ]
    manifest = {
        "name": "films",
        "state": "done",
        "versions": {"burnish": "0.1.0", "torch": "2.13.0"},
        "machine": {"processor": "x86_64", "threads": 2, "device": "no GPU"},
        "recipe": {"name": "films", "seed": 0, "stages": [{"name": "sft", "method": {"name": "sft"}}]},
        "stages": stages,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps the text outside of styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.ids: list[str] = []
        self.outside: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.ids += [named["id"] or ""] if "id" in named else []
        links = [named.get(key) or "" for key in ("src", "href", "xlink:href")]
        self.outside += [link for link in links if link and not link.startswith("#")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)

    def __str__(self) -> str:
        return " ".join(" ".join(self.text).split())


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Page]:
    path = report.write(make_run(tmp_path_factory.mktemp("runs") / "films"))
    assert path.name == "report.html"
    html = path.read_text("utf-8")
    return html, Page(html)


def small_run(folder: Path, manifest: dict) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    page = Page(report.write(folder).read_text("utf-8"))
    assert page.open == []
    return str(page)


def test_the_page_is_complete_and_self_contained(page: tuple[str, Page]) -> None:
    html, parsed = page
    assert parsed.open == []
    assert parsed.outside == []
    assert "<script" not in html and "@import" not in html and "url(http" not in html and "@font-face" not in html
    assert len(parsed.ids) == len(set(parsed.ids))


def test_both_themes_have_the_colors_of_the_curves(page: tuple[str, Page]) -> None:
    html, _ = page
    assert "prefers-color-scheme: dark" in html
    assert not any(sentinel in html for sentinel in curves.INK)
    for colour in curves.INK.values():
        assert html.count(f"{colour.removeprefix('var(').rstrip(')')}: #") == 2


def test_text_in_curves_is_selectable(page: tuple[str, Page]) -> None:
    html, _ = page
    figures = re.findall(r"<figure>.*?</figure>", html, re.DOTALL)
    assert all("<text" in curve and "viewBox" in curve for curve in figures)
    # sft 5, reward 6, ppo 12, of which score and win rate stand in the first places
    assert len(figures) == 23


def test_results_are_compared_in_words(page: tuple[str, Page]) -> None:
    text = str(page[1])
    assert "Perplexity exp(loss per token); 1 is best 44.70 15.18 \N{MINUS SIGN}29.52 Better" in text
    assert "50.0 % 44.0 % to 56.0 % 79.0 % 74.0 % to 83.0 % +29.0 points Clearly better" in text
    assert "24.00 22.00 to 26.00 24.50 22.40 to 26.60 +0.5000 No clear change" in text
    assert "or of the other model 50.0 % 86.0 % 80.0 % to 91.0 %" in text


def test_values_that_are_not_finite_are_reported(page: tuple[str, Page]) -> None:
    assert "Not finite, so not drawn: loss at step 601." in str(page[1])


def test_samples_are_escaped_and_come_from_the_first_and_last_evaluation(page: tuple[str, Page]) -> None:
    html, parsed = page
    assert "&lt;b&gt;Honestly&lt;/b&gt; &amp; truly," in html and "<b>Honestly" not in html
    assert "The first 6 of 9, in the order of the file (not selected)." in str(parsed)
    assert html.count("<span>Optimizer step 0</span>") == html.count("<span>Optimizer step 600</span>") == 9
    assert "<span>Optimizer step 300</span>" not in html


def test_names_are_not_markup() -> None:
    evaluation = {"reward_[/bold]": 0.5, "reward_:smile: [red]<b>": 0.25}
    manifest = {"stages": [{"name": "ppo", "results": {"before": evaluation, "after": evaluation}}]}
    console = Console(file=io.StringIO(), width=120)
    console.print(report.results(manifest))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[/bold]" in shown and ":smile: [red]<b>" in shown


def test_data_and_manifest_are_shown(page: tuple[str, Page]) -> None:
    text = str(page[1])
    assert "train 1,997 1 1 2" in text
    assert "train.jsonl:17: no assistant turn" in text
    assert "1,200 with a sequence for each turn, because the chat template rewrites earlier turns" in text
    assert "torch 2.13.0" in text and "seed: 0" in text and "ab12" * 16 in text
    assert "sft → reward → ppo · 14 min 04 s · x86_64 · 2 threads · no GPU" in text


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run" / "a")
    for step in (1, 2, 3):
        recorder.metrics(step, {"loss": 1.0 / step, "own_metric": 2.0})
    pages = []
    for _ in range(2):
        small_run(tmp_path / "run", {"name": "x", "stages": [{"name": "a", "method": "sft", "state": "running"}]})
        pages.append((tmp_path / "run" / "report.html").read_bytes())
    assert pages[0] == pages[1]


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    text = small_run(tmp_path / "new", {"name": "new", "state": "running", "stages": [
        {"name": "sft", "method": "sft", "state": "running", "seconds": 0.0},
        {"name": "reward", "method": "reward", "state": "pending", "seconds": 0.0}]})  # fmt: skip
    assert "This run is not finished" in text and "not started" in text
    assert "Results" not in text and "Curves" not in text and "Samples" not in text
    assert small_run(tmp_path / "empty", {}).startswith("empty · Burnish")


def test_a_running_stage_shows_its_evaluations_so_far(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run" / "ppo")
    manifest = {"name": "run", "state": "running", "stages": [{"name": "ppo", "method": "ppo", "state": "running"}]}
    recorder.metrics(0, {"eval_score": 1.0, "eval_score_low": -math.inf, "eval_score_high": math.inf})
    assert "Results so far" in small_run(tmp_path / "run", manifest)
    with (recorder.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "eval_score": 3.0}\n{"step": 9, "lo')
    text = small_run(tmp_path / "run", manifest)
    assert "1.000 3.000 +2.000 Better" in text
    assert "overlap" not in text


def test_a_stage_that_ran_a_function_shows_its_files(tmp_path: Path) -> None:
    stage = {"name": "make", "method": None, "state": "done", "seconds": 3.0, "files": {"data/a.jsonl": "ff" * 32}}
    text = small_run(tmp_path / "run", {"name": "run", "state": "done", "stages": [stage]})
    assert "data/a.jsonl sha256 ffffffffffff" in text


def test_for_a_folder_without_a_manifest_the_nearest_run_is_suggested(tmp_path: Path) -> None:
    small_run(tmp_path / "my-run", {"name": "my-run"})
    with pytest.raises(UserError, match=r"manifest\.json: no such file \(did you mean '.*my-run'\?\)"):
        report.write(tmp_path / "my-rum")
    with pytest.raises(UserError, match="expected a run's folder"):
        report.write(tmp_path / "my-run" / "nothing")


# --- the parts ----------------------------------------------------------------------------------------------------


def change(key: str, before: tuple, after: tuple) -> report.Change:
    return report.Change(key, curves.Estimate(*before), curves.Estimate(*after))


@pytest.mark.parametrize(
    ("key", "before", "after", "verdict", "tone"),
    [
        ("loss", (2.0,), (1.0,), "Better", "better"),
        ("loss", (1.0,), (2.0,), "Worse", "worse"),
        ("loss", (1.0,), (1.0,), "Unchanged", ""),
        ("length", (9.0,), (5.0,), "Lower", ""),
        ("score", (1.0, (0.9, 1.1)), (2.0, (1.9, 2.1)), "Clearly better", "better"),
        ("score", (1.0, (0.9, 1.1)), (1.2, (1.1, 1.3)), "No clear change", ""),
        ("score", (2.0, (1.9, 2.1)), (1.0, (0.9, 1.1)), "Clearly worse", "worse"),
        ("score", (1.0, (0.0, 3.0)), (2.0, (1.9, 2.1)), "No clear change", ""),
    ],
)
def test_verdicts(key: str, before: tuple, after: tuple, verdict: str, tone: str) -> None:
    compared = change(key, before, after)
    assert (compared.verdict, compared.tone) == (verdict, tone)


def test_a_paired_interval_decides_whether_a_change_is_clear() -> None:
    before = {"accuracy": 0.492, "accuracy_low": 0.4, "accuracy_high": 0.58}
    after = {"accuracy": 0.55, "accuracy_low": 0.46, "accuracy_high": 0.64}
    paired = {"eval_accuracy_change_low": 0.021, "eval_accuracy_change_high": 0.095}
    (overlapping,), (clear,) = report.changes(before, after), report.changes(before, after | paired)
    assert (overlapping.verdict, overlapping.tone, overlapping.difference_interval) == ("No clear change", "", "")
    assert (clear.verdict, clear.tone, clear.difference_interval) == ("Clearly better", "better", "+2.1 to +9.5")
    assert (clear.before, clear.after) == (overlapping.before, overlapping.after)
    loss = {"loss_change_low": -0.25, "loss_change_high": 0.001}
    (change,) = report.changes({"loss": 2.0}, {"loss": 1.9} | loss)
    assert (change.verdict, change.tone) == ("No clear change", "")
    assert change.difference_interval == "\N{MINUS SIGN}0.2500 to +0.0010"
    (change,) = report.changes({"loss": 2.0}, {"loss": 1.9, "loss_change_low": -0.25, "loss_change_high": 0.0})
    assert change.difference_interval == "\N{MINUS SIGN}0.2500 to 0"


def test_the_results_fit_a_narrow_terminal_without_cutting_a_word() -> None:
    after = {"score": 0.1235, "score_low": -0.0676, "score_high": 0.3146, "perplexity": 3.046, "length": 3.641}
    after |= {
        "explained_variance": -1.3,
        "reward_exact": 0.1235,
        "win_rate": 0.6,
        "win_rate_low": 0.5,
        "win_rate_high": 0.7,
    }
    entry = {"name": "reinforce", "results": {"before": {**after, "score": 0.0218}, "after": after}}
    console = Console(file=io.StringIO(), width=60)
    console.print(report.results({"stages": [entry]}))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 60
    text = " ".join(lines)
    assert "…" not in text and "[-0.0676," in text and "Perplexity" in text and "Completion" in text
    assert "exact" not in text  # it is the score
    assert "50.0 % [" not in text  # known by definition


def test_whiskers_share_one_scale() -> None:
    first, last = change("score", (1.0, (0.0, 2.0)), (5.0, (4.0, 10.0))).whiskers
    # 0 to 10 is drawn from 4 % to 96 %
    assert first == {"name": "before", "value": 13.2, "low": 4.0, "high": 22.4}
    assert last == {"name": "after", "value": 50.0, "low": 40.8, "high": 96.0}
    assert change("score", (1.0,), (5.0, (4.0, 10.0))).whiskers == []


def test_metrics_that_are_not_results_are_left_out() -> None:
    compared = report.changes(
        {"step": 0, "epoch": 0, "eval_loss": 2.0, "eval_seconds": 3.0},
        {"loss": 1.0, "score": 3, "score_low": 2, "tokens_per_second": 9},
    )
    assert [c.key for c in compared] == ["score", "loss"]
    assert compared[0].before is None and compared[0].after == curves.Estimate(3.0) and compared[0].verdict == ""


def test_samples_are_matched_by_source_and_place() -> None:
    def row(step: int, source: str, text: str, kind: str = "eval") -> dict:
        return {"step": step, "kind": kind, "prompt": source, "completion": text, "score": "NaN", "source": source}

    rows = [row(0, "p:1", "a"), row(0, "p:1", "b"), row(0, "p:2", "c"), row(4, "p:1", "x"), row(2, "t:1", "t", "train"),
            row(8, "p:1", "A"), row(8, "p:1", "B"), row(8, "p:3", "D")]  # fmt: skip
    samples, steps = report.before_and_after(rows)
    texts = [tuple(side and side["completion"] for side in (p["before"], p["after"])) for p in samples]
    assert texts == [("a", "A"), ("b", "B"), ("c", None), (None, "D")]
    assert steps == [0, 8]
    assert math.isnan(samples[0]["before"]["score"])


def test_without_evaluations_the_last_samples_of_training_are_shown() -> None:
    rows = [{"step": step, "kind": "train", "prompt": "p", "completion": str(step)} for step in (1, 5)]
    samples, steps = report.before_and_after(rows)
    assert [(p["before"], p["after"]["completion"]) for p in samples] == [(None, "5")]
    assert steps == [5]
    assert report.before_and_after([]) == ([], [])


def test_every_method_and_finish_reason_has_a_description() -> None:
    assert set(report.METHODS) == {*METHODS, *ROW_METHODS}
    assert set(report.FINISH_REASONS) == {"length", "context", "turns", "done", "error"}
    rows = [{"step": 1, "kind": "eval", "prompt": reason, "completion": "", "finish_reason": reason}
            for reason in ("stop", "context")]  # fmt: skip
    samples, _ = report.before_and_after(rows)
    assert [sample["after"]["ending"] for sample in samples] == ["", "cut off: the context window was full"]


# --- loops and stages that make rows ------------------------------------------------------------------------------


def evaluation(**values: float) -> dict[str, float]:
    """An evaluation with intervals of 0.05 on both sides."""
    ends = {f"eval_{k}_{end}": v + d for k, v in values.items() for end, d in (("low", -0.05), ("high", 0.05))}
    return {f"eval_{key}": value for key, value in values.items()} | ends


def sampled(name: str, **values: float) -> dict[str, Any]:
    files = {"data/ranked.jsonl": "cd" * 32, "data/samples.jsonl": "ef" * 32}
    counts = {"made": 62, "skipped: every completion is empty": 2}
    rows = {"rows": 64, "skipped": [], "dropped": [], "shortened": [], "left_out": {"duplicate": 5}, "counts": counts}
    return {"name": name, "method": "sample", "state": "done", "seconds": 2.0, "files": files, "thinned": True,
            "rows": {"rows": rows}, "results": {"after": evaluation(**values)}}  # fmt: skip


def make_loop(folder: Path, ran: int = 3, rounds: int = 3) -> dict[str, Any]:
    """A loop in which the proxy that is selected by rises, and the gold reward falls. Round 3 selects nothing."""
    stages: list[dict[str, Any]] = [{"name": "prepare", "method": None, "state": "done", "seconds": 1.0, "files": {}}]
    for k in range(1, rounds + 1):
        names = [f"loop/{k}/{stage}" for stage in ("grow", "improve", "held-out")]
        if k > ran:
            stages += [{"name": name, "method": "sft", "state": "skipped", "seconds": 0.0} for name in names]
            continue
        left_out = {"not above 0.7": 40 if k < 3 else 64, "duplicate": 3}
        train = {"rows": 24 if k < 3 else 0, "skipped": [], "dropped": [], "shortened": [], "left_out": left_out}
        stages += [
            sampled(names[0], score=0.2 * k, reward_proxy=0.2 * k, reward_gold=0.5 - 0.1 * k),
            {"name": names[1], "method": "sft", "state": "done", "seconds": 3.0, "files": {}, "model": {"class": "L"},
             "thinned": k < ran, "rows": {"train": train}, "results": {}},
            sampled(names[2], score=0.1 + 0.2 * k, reward_proxy=0.1 + 0.2 * k, reward_gold=0.4),
        ]  # fmt: skip
        data = folder / names[0] / "data"
        data.mkdir(parents=True)
        (data / "samples.jsonl").write_text('{"prompt": "1+1"}\n' * 248)
        Recorder(folder / names[0]).samples(
            {
                "step": 64 * i,
                "kind": "train",
                "prompt": "1+1",
                "completion": f"<{k}.{i}>",
                "score": 1.0,
                "source": "p:1",
            }
            for i in range(3)
        )
    rewards = [{"weight": 1.0, "name": "proxy"}, {"weight": 0.0, "name": "gold"}]
    recipe = {"stages": [{"name": stage["name"], "reward": rewards if stage["method"] == "sample" else []}
                         for stage in stages]}  # fmt: skip
    until = {"stage": "held-out", "metric": "score", "above": 0.45, "below": None}
    loops = {"loop": {"rounds": rounds, "until": until, "keep": "last"}}
    return {"name": "rest", "state": "done", "recipe": recipe, "loops": loops, "stages": stages}


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The page of a loop: its HTML and its text."""
    folder = tmp_path_factory.mktemp("loops") / "rest"
    text = small_run(folder, make_loop(folder))
    return (folder / "report.html").read_text("utf-8"), text


def test_a_loop_is_one_section_with_a_card_for_each_measured_stage(loop: tuple[str, str]) -> None:
    html, text = loop
    assert "prepare → loop (3 rounds: grow → improve → held-out)" in text
    assert html.count('<a class="card"') == 3 and html.count("<section") == 3
    assert "loop/grow · Score 0.2000 → 0.6000 round 1 to 3: clearly better" in text
    assert "2. loop 3 rounds" in text


def test_metrics_are_shown_by_round(loop: tuple[str, str]) -> None:
    html, text = loop
    assert 'aria-label="Score by round, grow from 0.2000 to 0.6000; held-out from 0.3000 to 0.7000"' in html
    assert "Stage Metric Round 1 Round 2 Round 3 grow Rows in samples.jsonl 248 248 248" in text
    assert "Score 0.2000 0.1500 to 0.2500 0.4000 0.3500 to 0.4500 0.6000 0.5500 to 0.6500" in text
    assert "Rows used for training 24 24 0 nothing selected" in text


def test_rewards_that_are_not_trained_on_are_shown_beside_the_score(loop: tuple[str, str]) -> None:
    html, _ = loop
    summary = "score from 0.2000 to 0.6000; gold (weight 0) from 0.4000 to 0.2000"
    assert f'aria-label="Rewards in grow by round, {summary}"' in html
    assert html.index("Rewards in grow by round") < html.index("Score by round")


def test_rounds_are_closed_except_the_last_one(loop: tuple[str, str]) -> None:
    html, _ = loop
    assert html.count('<details class="round"') == 3 and html.count('<details class="round" open>') == 1
    assert html.index('<details class="round" open>') < html.index("loop/3/grow</h3>")
    assert html.index('<details class="round" open>') > html.index("loop/2/held-out</h3>")


def test_a_stage_that_makes_rows_accounts_for_them(loop: tuple[str, str]) -> None:
    html, text = loop
    part = text[text.index("loop/3/grow samples") : text.index("loop/3/improve")]
    assert "read 64 made 62 skipped: every completion is empty 2 left out by data.select: duplicate 5" in part
    assert "data/samples.jsonl · 248 rows sha256 efefefefefef" in part
    assert "Metric Value Score mean reward" in part and "Before" not in part and "Curves" not in part
    assert "not selected); all are in loop/3/grow/data. p:1 1+1 score 1.00 <3.0> score 1.00 <3.1>" in part
    assert "Optimizer step" not in html and "no comparison" not in html


def test_a_training_stage_says_what_selection_left_out(loop: tuple[str, str]) -> None:
    _, text = loop
    assert "train 24 0 0 0 40 left out by data.select: not above 0.7 3 left out by data.select: duplicate" in text
    assert text.count("data.select left no row to train on, so the model stays as it is.") == 1
    assert text.count("model removed after the next round (keep: last)") == 2  # a stage without a model has none


def test_a_loop_that_ended_early_says_why(tmp_path: Path) -> None:
    text = small_run(tmp_path / "rest", make_loop(tmp_path / "rest", ran=2, rounds=5))
    assert "2. loop ended after round 2 of 5: held-out score 0.5000 > 0.45" in text
    assert "loop (2 of 5 rounds: grow" in text and "skipped" not in text.replace("skipped: every", "").lower()[:400]
    assert "loop/3" not in text[: text.index("Manifest")]


def test_the_reason_names_a_reward_by_its_short_name() -> None:
    results = {"after": {"step": 8, "eval_reward_exact": 0.5, "eval_score": 2.0}}
    entries = {1: {"check": {"state": "done", "results": results}}, 2: {"check": {"state": "skipped"}}}
    settings = {"until": {"stage": "check", "metric": "exact", "above": 0.4, "below": None}}
    assert Rounds("loop", entries, settings, {}).state == "ended after round 1 of 2: check reward: exact 0.5000 > 0.4"


def test_a_loop_that_has_begun(tmp_path: Path) -> None:
    manifest = make_loop(tmp_path / "rest", ran=1)
    for entry in manifest["stages"][3:]:
        entry["state"] = "pending"
    text = small_run(tmp_path / "rest", manifest)
    assert "round 1 of 3" in text and "by round" in text
    assert "round 1: 95 % interval 0.1500 to 0.2500" in text
    for entry in manifest["stages"][1:]:
        entry |= {"state": "pending", "results": {}}
    assert "3 rounds, not started" in small_run(tmp_path / "rest", manifest)


def test_of_many_rounds_the_first_and_the_last_are_shown_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "MOST_ROUNDS", 2)
    text = small_run(tmp_path / "rest", make_loop(tmp_path / "rest"))
    assert "1 round between the first and the last ones is not shown in full" in text
    assert "loop/1/grow samples" in text and "loop/2/grow samples" not in text and "loop/3/grow samples" in text


def test_a_stage_that_measures_once_shows_its_interval(tmp_path: Path) -> None:
    stage = sampled("sample", score=0.25)
    text = small_run(tmp_path / "run", {"name": "run", "state": "done", "stages": [stage]})
    assert "sample · Score 0.2500 95 % interval 0.2000 to 0.3000" in text


def test_the_terminal_shows_a_stage_of_a_loop_once(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=140)
    console.print(report.results(make_loop(tmp_path)))
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert "loop/1-3/grow Score 0.2000 [0.1500, 0.2500] 0.6000 [0.5500, 0.6500] clearly better" in lines
    assert "Reward: gold 0.4000 [0.3500, 0.4500] 0.2000 [0.1500, 0.2500] clearly worse" in lines
    assert [line.split()[0] for line in lines if line.startswith("loop/")] == ["loop/1-3/grow", "loop/1-3/held-out"]
    assert any(line.startswith("For stages of a loop") for line in lines)
    console = Console(file=io.StringIO(), width=140)
    console.print(report.results(make_loop(tmp_path / "one", ran=1)))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "loop/1/grow" in shown and "For stages of a loop" not in shown


def test_an_evaluation_of_two_models_names_them(tmp_path: Path) -> None:
    after = evaluation(score=0.6) | {"eval_score_change_low": 0.1, "eval_score_change_high": 0.3}
    results = {"before": {"step": 0} | evaluation(score=0.4), "after": {"step": 9} | after}
    stage = sampled("held-out", score=0.6) | {"method": "eval", "results": results, "overlap": "2 rows were trained on"}
    Recorder(tmp_path / "run" / "held-out").samples(
        {"step": step, "kind": "eval", "prompt": "1+1", "completion": text, "score": score, "source": "p:1"}
        for step, text, score in ((0, "<3>", 0.0), (1, "<2>", 1.0))
    )
    text = small_run(tmp_path / "run", {"name": "run", "state": "done", "stages": [stage]})
    assert "Metric Other model Model Change Score" in text and "+0.2000 +0.1000 to +0.3000 Clearly better" in text
    assert "p:1 1+1 Other model score 0 <3> Model score 1.00 <2>" in text
    assert "2 rows were trained on" in text
    alone = stage | {"results": {"after": {"step": 9} | evaluation(score=0.6)}}
    (tmp_path / "run" / "held-out" / "samples.jsonl").unlink()
    assert "Other model" not in small_run(tmp_path / "run", {"name": "run", "state": "done", "stages": [alone]})
