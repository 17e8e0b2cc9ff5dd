"""Episodes in the terminal and in the report: every turn is readable, and nothing in it acts on either."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from burnish.report import page as report
from burnish.report.display import Display
from burnish.report.metrics import FINISH_REASONS, TOOL_ERRORS, Recorder, describe, headline
from burnish.report.transcript import shortened, transcript
from burnish.rl.environment import ERRORS
from burnish.rl.metrics import FINISH

ATTACK = "</pre><script>alert(1)</script>\x1b[2J<img src=x onerror=alert(2)>{{ 7*7 }}"
MESSAGES: list[dict[str, Any]] = [
    {
        "role": "assistant",
        "content": "Half.",
        "reasoning_content": "It is at most 100.",
        "tool_calls": [
            {"type": "function", "id": "1", "function": {"name": "guess", "arguments": {"number": 50, "why": "é"}}}
        ],
        "errors": ["raised"],
        "reward": 0.5,
    },
    {"role": "tool", "name": "guess", "content": "Error: ValueError: no"},
    {"role": "assistant", "content": "I give", "finish_reason": "length"},
]


def episode(step: int, messages: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
    spans = [{"text": "What? ", "learned": False}, {"text": "Half.", "learned": True}]
    row = {"step": step, "kind": "eval", "prompt": "Guess.", "completion": "Half.", "score": 1.0, "rewards": {}}
    return row | {"finish_reason": "turns", "source": "p.jsonl:1", "messages": messages, "sequences": [spans]} | others


def page_of(folder: Path, rows: list[dict[str, Any]], lines: list[dict[str, Any]] = [], **entry: Any) -> str:  # noqa: B006
    recorder = Recorder(folder / "play")
    recorder.samples(rows)
    for line in lines:
        recorder.metrics(line["step"], line)
    manifest = {"name": "run", "state": "done", "stages": [{"name": "play", "method": "ppo", "state": "done", **entry}]}
    (folder / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    return report.write(folder).read_text("utf-8")


def words(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html.partition("<body>")[2]))


def test_a_transcript_by_hand() -> None:
    assert [line.text for line in transcript(MESSAGES)] == [
        'assistant: Half. guess(number=50, why="é") (reward 0.5000, tool error: raised)',
        "tool guess: Error: ValueError: no",
        "assistant: I give (cut off at the length limit)",
    ]
    many = [{"role": "user", "content": str(i)} for i in range(20)]
    assert shortened(many, 8) == [
        *(f"user: {i}" for i in range(5)),
        "... 13 more messages ...",
        "user: 18",
        "user: 19",
    ]
    assert shortened(many[:8], 8) == [f"user: {i}" for i in range(8)]


def test_the_terminal_shows_every_turn_in_a_line_of_its_own() -> None:
    attacked = [*MESSAGES, {"role": "tool", "name": "\x1b[31m", "content": "two\nlines" + ATTACK}]
    for live in (False, True):
        console = Console(file=io.StringIO(), width=120, force_terminal=live, color_system=None)
        display = Display(console, live=live)
        display.samples([episode(3, attacked)])
        console.print(*display.view.get_renderables())
        text = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
        for part in ("guess(number=50", "Error: ValueError: no", "I give", "2 turns, finished: turns", "two\\nlines"):
            assert part in text
        assert "\x1b[2J" not in text and "\x1b[31m" not in text
    lines = Display(Console(file=io.StringIO())).view.message_lines(episode(3, MESSAGES))
    assert lines[1] == "    tool guess: Error: ValueError: no"


def test_the_report_shows_turns_calls_results_rewards_and_learned_tokens(tmp_path: Path) -> None:
    html = page_of(tmp_path, [episode(0, MESSAGES), episode(8, MESSAGES[2:], score=2.0)])
    text = words(html)
    call = "guess(number=50, why=&#34;é&#34;)"
    assert f"assistant It is at most 100. Half. {call} reward 0.5000 tool error: raised tool guess Error: Val" in text
    assert "assistant I give cut off at the length limit" in text
    assert "ended at the limit of turns" in text
    assert '<pre class="tokens">What? <mark>Half.</mark></pre>' in html


def test_nothing_in_an_episode_becomes_markup(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": ATTACK, "arguments": {ATTACK: ATTACK}}}
    own = {"content": ATTACK, "reasoning_content": ATTACK, "tool_calls": [call], "errors": [ATTACK]}
    messages = [
        {"role": "assistant", **own, "finish_reason": ATTACK},
        {"role": "tool", "name": ATTACK, "content": ATTACK},
    ]
    spans = [[{"text": ATTACK, "learned": learned} for learned in (False, True)]] * 2
    html = page_of(tmp_path, [episode(0, messages, sequences=spans, prompt=ATTACK, finish_reason=ATTACK)])
    assert "<script" not in html and "<img" not in html and html.count("alert(1)") >= 12


def test_finish_reasons_and_tool_errors_are_a_table_with_the_first_and_the_last_evaluation(tmp_path: Path) -> None:
    first = {"eval_finished_turns": 0.75, "eval_finished_stop": 0.25, "eval_tool_error_raised": 1.5}
    last = {"eval_finished_turns": 0.25, "eval_finished_stop": 0.75, "eval_tool_error_raised": 0.0}
    zero = {"eval_tool_error_unknown": 0.0, "eval_finished_error": 0.0}
    success = {"eval_reward_environment": 0.5, "eval_reward_environment_low": 0.4, "eval_reward_environment_high": 0.6}
    turns = {"eval_score": 1.0, "eval_turns": 3.0, "eval_tool_calls": 2.0, "eval_tool_errors": 1.5}
    lines = [{"step": step, **of, **zero, **success, **turns} for step, of in ((0, first), (8, last))]
    text = words(page_of(tmp_path, [], lines))
    _, _, table = text.partition("How episodes end, and tool errors")
    table = table.partition("Curves")[0]
    assert "Reward: environment mean of the environment's own reward" in table.replace("&#39;", "'")
    assert "0.5000 0.4000 to 0.6000" in table
    assert "Finished: turns ended at the limit of turns 75.0 % 25.0 % \N{MINUS SIGN}50.0 points" in table
    assert "Tool error: raised per episode: the tool raised an exception 1.500 0" in table
    assert "unknown" not in table and "Finished: error" not in text
    curves = text.partition("Curves")[2]
    assert all(f"{name} " in curves for name in ("Turns", "Tool calls", "Tool errors")) and "Finished" not in curves
    training = [{key.removeprefix("eval_"): value for key, value in line.items()} for line in lines]
    text = words(page_of(tmp_path / "training", [], training))
    assert (
        "First iteration Last iteration" in text and "Finished: turns ended at the limit of turns 75.0 % 25.0 %" in text
    )


def test_every_metric_of_episodes_has_a_name_and_a_meaning() -> None:
    assert set(TOOL_ERRORS) == set(ERRORS) and {*FINISH_REASONS, "stop"} == set(FINISH)
    names = ["turns", "tool_calls", "tool_errors", "sequences", "environment_tokens", "computed_tokens"]
    for name in names + [f"tool_error_{kind}" for kind in ERRORS] + [f"finished_{reason}" for reason in FINISH]:
        assert describe(name).meaning, name
    assert headline({"score": 1.0, "turns": 1.0, "tool_calls": 0.0, "tool_errors": 0.0}) == ["score", "turns"]
