"""The display of a run in a terminal and in a file, and the callback that feeds it."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from burnish.report.display import Display, RunCallback, StageView, numbers, visible
from burnish.report.metrics import Recorder, read_metrics

SAMPLE = {"step": 4, "prompt": "Say\x1b[31m [bold]hi", "completion": "one\ntwo\x07", "score": 1.25, "source": "a:1"}


class Clock:
    """A clock that the test advances."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def console(*, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100)


def shown(display: Display) -> list[str]:
    assert isinstance(display.console.file, io.StringIO)
    return display.console.file.getvalue().splitlines()


def run(display: Display, clock: Clock, steps: int) -> None:
    display.begin(0, steps)
    for step in range(1, steps + 1):
        clock.now += 1.0
        display.step(step)
        display.log(step, {"loss": 4.0 / step, "learning_rate": 1e-4, "tokens": 500, "seconds": 0.5})
    display.end()


def stage_view(title: str = "[train]", clock: Clock | None = None) -> StageView:
    return StageView(title, console=console(), clock=clock or Clock())


def test_time_left_is_the_pace_since_the_first_iteration_of_a_start_or_a_resume() -> None:
    clock = Clock()
    view = stage_view(clock=clock)
    view.begin(10, 52, steps_per_iteration=4)
    for step, now in ((11, 70.0), (12, 71.0), (13, 90.0), (14, 91.0), (15, 92.0)):
        clock.now = now
        view.at(step)
        assert view.seconds_left() is None  # the iteration that ended with step 12 is not counted
    clock.now = 93.0
    view.at(16)
    assert view.seconds_left() == 5.5 * 36  # 4 steps took 22 seconds, 36 remain
    assert view.status() == "iteration 4/13, step 16/52 (31%), 3 min 18 s left"


def test_speed_is_a_ratio_of_sums() -> None:
    view = stage_view()
    assert view.tokens_per_second() is None
    for tokens, seconds in ((100, 1.0), (500, 2.0)):
        view.add({"tokens": tokens, "seconds": seconds})
    assert view.tokens_per_second() == 200.0  # not the mean of 100 and 250


def test_a_metric_missing_from_a_step_keeps_its_value() -> None:
    view = stage_view()
    view.add({"score": 1.0, "loss": 3.0})
    view.add({"loss": 2.0})
    assert (view.values, view.first) == ({"score": 1.0, "loss": 2.0}, {"score": (1.0,), "loss": (3.0, 2.0)})
    assert view.history == {"score": (1.0,), "loss": (3.0, 2.0)}


def test_a_progress_line_has_all_parts_in_order() -> None:
    clock = Clock()
    view = stage_view("[2/3 reward]", clock)
    view.begin(0, 160)
    view.at(1)
    clock.now = 48.75
    view.at(40)
    view.add({"tokens": 2480, "seconds": 2.0, "loss": 0.5, "accuracy": 0.75})
    assert view.progress_line() == (
        "[2/3 reward] step 40/160 (25%), 2 min 30 s left, 1,240 tokens/s, accuracy 75.0 %, loss 0.5000"
    )


def test_an_interval_follows_its_value() -> None:
    values = {"eval_score": 1.5, "eval_score_low": 1.25, "eval_score_high": 1.75, "eval_kl": 2}
    assert numbers(values) == "score 1.500 [1.250, 1.750], kl 2"
    assert numbers(values | {"eval_kl_low": 2, "eval_kl_high": 2}) == numbers(values)  # known by definition


def test_the_only_reward_is_the_score_and_shown_once() -> None:
    assert numbers({"score": 1.5, "reward_exact": 1.5, "value": 0.25}) == "score 1.500, value loss 0.2500"
    assert numbers({"score": 1.5, "reward_a": 1.0, "reward_b": 0.5}) == "score 1.500, reward a 1.000, reward b 0.5000"


def test_a_long_line_is_broken_between_words_on_a_terminal_and_nowhere_else() -> None:
    line = f"{'a' * 68}: accuracy 51.6 % [39.6 %, 63.4 %], loss 0.6903, margin 0.0140 {'b' * 120} 4"
    terminal, file = (Display(console(terminal=live), live=live) for live in (True, False))
    for display in (terminal, file):
        display.message(line)
    assert shown(terminal) == [
        f"[train] {'a' * 68}: accuracy 51.6 %",
        "  [39.6 %, 63.4 %], loss 0.6903, margin 0.0140",
        f"  {'b' * 120}",
        "  4",
    ]
    assert shown(file) == [f"[train] {line}"]


def test_a_result_line_compares_means_of_the_first_and_the_last_steps() -> None:
    clock = Clock()
    view = stage_view("[sft]", clock)
    view.begin(0, 1)
    view.add({"loss": 3.0})
    clock.now = 61.0
    view.at(1)
    view.add({"loss": 1.5, "learning_rate": 0.0})
    assert view.result_line() == "[sft] 1 step in 1 min 01 s: loss 3.000 -> 1.500"
    for loss in (5.0, 6.0, 7.0):
        view.add({"loss": loss})
    # of five values 3, 1.5, 5, 6 and 7, the first two and the last two
    assert view.result_line().endswith(": loss 2.250 -> 6.500 (means of 2 logged steps)")
    view.add({"accuracy": 0.5})
    assert view.result_line().endswith(
        ": accuracy 50.0 % -> 50.0 %, loss 2.250 -> 6.500 (means of up to 2 logged steps)"
    )


def test_a_result_line_counts_iterations() -> None:
    view = stage_view("[ppo]", Clock())
    view.begin(4, 12, steps_per_iteration=4)
    view.at(12)
    assert view.result_line() == "[ppo] 2 iterations (8 steps) in 0 s"


def test_text_of_a_model_cannot_control_the_terminal() -> None:
    assert visible("a\nb\x1b[2J\u202e世界", 99) == "a\\nb\\x1b[2J\\u202e世界"
    assert visible("0123456789", 8) == "01234..."
    assert visible("0123456789", 8, keep="end") == "...56789"


def test_plain_lines_are_printed_every_few_seconds_and_at_both_ends() -> None:
    clock = Clock()
    display = Display(console(), interval=4.0, clock=clock)
    run(display, clock, 10)
    lines = shown(display)
    assert [line.split(",")[0] for line in lines[:-1]] == [
        f"[train] step {step}/10 ({step * 10}%)" for step in (1, 5, 9, 10)
    ]
    assert lines[0].endswith("(10%), 1,000 tokens/s, loss 4.000, learning rate 1.0e-04")
    assert lines[1].endswith("5 s left, 1,000 tokens/s, loss 0.8000, learning rate 1.0e-04")
    # the means of 4, 2, 4/3, 1, 4/5 and of 4/6, 4/7, 4/8, 4/9, 4/10
    assert lines[-1] == "[train] 10 steps in 10 s: loss 1.827 -> 0.5165 (means of 5 logged steps)"


def test_a_long_step_shows_that_the_run_is_alive() -> None:
    clock = Clock()
    display = Display(console(), clock=clock)
    display.begin(0, 9)
    for step in (1, 2, 3):
        clock.now += 20.0
        display.step(step)
    assert shown(display) == ["[train] step 2/9 (22%), 2 min 20 s left"]


def test_an_iteration_has_one_line() -> None:
    clock = Clock()
    display = Display(console(), interval=0.0, clock=clock)
    display.begin(0, 6, steps_per_iteration=3)
    for step in range(1, 7):
        display.step(step)
        display.log(step, {"score": float(step)})
    assert [line.split(", score")[0] for line in shown(display)] == [
        "[train] iteration 1/2, step 3/6 (50%)",
        "[train] iteration 2/2, step 6/6 (100%)",
    ]


def test_a_long_pass_is_reported_every_few_seconds_and_a_short_one_is_not() -> None:
    clock = Clock()
    display = Display(console(), interval=5.0, clock=clock)
    for done, now in ((0, 0.0), (10, 4.0), (20, 8.0), (30, 12.0), (40, 16.0), (80, 20.0)):
        clock.now = now
        display.progress("sampling", done, 80)
    for done in (1, 2):
        clock.now += 2.0
        display.progress("evaluating", done, 2)
    # 20 of 80 took 8 seconds, and 40 took 16
    assert shown(display) == ["[train] sampling 20/80, 24 s left", "[train] sampling 40/80, 16 s left"]


def rows_with_samples(display: Display, clock: Clock, chunks: range) -> None:
    """Report chunks of 64 of 100,000 rows, for each of which completions are sampled for 4 seconds."""
    for chunk in chunks:
        for done in (1, 128, 256):
            display.progress("sampling", done, 256)
            clock.now += 2.0 if done < 256 else 0.0
        display.progress("sample rows", 64 * (chunk + 1), 100_000)


def test_a_pass_over_many_rows_shows_what_is_left_although_each_chunk_has_passes_of_its_own() -> None:
    clock = Clock()
    display = Display(console(), interval=5.0, clock=clock)
    rows_with_samples(display, clock, range(4))
    lines = shown(display)
    assert lines == [
        "[train] sample rows 192/100,000, 1 h 43 min left",  # 64 rows take 4 seconds
    ]
    clock.now += 60.0  # one of the completions is long
    display.progress("sampling", 1, 256)
    clock.now += 10.0
    display.progress("sampling", 2, 256)
    assert shown(display)[-1] == "[train] sample rows 256/100,000, 1 h 43 min left, sampling 2/256, 42 min 20 s left"


def test_the_time_left_of_a_stage_that_resumes_is_that_of_the_rows_since_then() -> None:
    clock = Clock()
    display = Display(console(), interval=5.0, clock=clock)
    rows_with_samples(display, clock, range(1000, 1004))
    assert shown(display) == ["[train] sample rows 64,192/100,000, 37 min 18 s left"]


def test_a_stage_that_only_reports_progress_leaves_no_live_view() -> None:
    clock = Clock()
    with Display(console(terminal=True), live=True, interval=5.0, clock=clock) as display:
        display.stage("loop/1/grow", 1, 2)
        rows_with_samples(display, clock, range(4))
        assert display.view.live.is_started and "sample rows 256/100,000" in display.view.status()
        display.stage("loop/1/improve", 2, 2)
        assert not display.view.live.is_started and display.view.status() == "starting"
        assert not display.console._live_stack


def test_plain_output_has_no_control_characters_whatever_is_shown() -> None:
    display = Display(console(), clock=Clock())
    display.stage("ppo", 3, 3)
    display.log(0, {"eval_score": 0.5, "eval_kl": math.nan})
    display.samples([SAMPLE, {**SAMPLE, "score": None, "kind": "eval"}] * 5)
    display.message("the token budget is halved [to 512]")
    lines = shown(display)
    assert lines[0] == "[3/3 ppo] step 0 evaluation: score 0.5000, kl nan"
    assert lines[1] == "[3/3 ppo] step 4 | score 1.250 | Say\\x1b[31m [bold]hi | one\\ntwo\\x07"
    assert lines[2].startswith("[3/3 ppo] step 4, held out | no score |")
    assert lines[5] == "[3/3 ppo] the token budget is halved [to 512]"
    assert len(lines) == 6
    assert all(c.isprintable() for line in lines for c in line)


def test_a_resumed_run_is_reported() -> None:
    display = Display(console(), clock=Clock())
    display.begin(40, 100)
    assert shown(display) == ["[train] resumes after step 40"]


def test_the_live_view_shows_bar_metrics_and_samples_and_leaves_the_result() -> None:
    clock = Clock()
    display = Display(console(terminal=True), live=True, clock=clock)
    with display:
        display.begin(0, 20)
        display.log(0, {"eval_perplexity": 12.5})
        display.samples([SAMPLE])
        for step in range(1, 11):
            clock.now = step / 2
            display.log(step, {"loss": 1.0 + step})
        plain = console()
        plain.print(*display.view.get_renderables(), sep="")
        view = shown(Display(plain))
        display.end()
    text = "\n".join(view)
    assert "step 10/20 (50%), 5 s left" in text
    assert "━" in view[0]
    assert any(line.split() == ["loss", "11.00", "▁▂▃▃▄▅▆▆▇█"] for line in view)
    assert "perplexity" not in text
    assert sum("[train] step 0 evaluation: perplexity 12.50" in line for line in shown(display)) == 1
    assert "one\\ntwo\\x07" in text and "[bold]hi" in text and "1.250" in text
    assert "[train] 10 steps in 5 s: loss 4.000 -> 9.000 (means of 5 logged steps)" in shown(display)[-1]


def test_an_error_leaves_the_cursor_visible() -> None:
    display = Display(console(terminal=True), live=True)
    with pytest.raises(KeyError), display:
        display.begin(0, 5)
        raise KeyError
    text = "".join(shown(display))
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_an_interruption_leaves_the_step_that_was_reached() -> None:
    display = Display(console(terminal=True), live=True, clock=Clock())
    with pytest.raises(KeyboardInterrupt), display:
        display.begin(0, 5)
        display.log(2, {"loss": 1.5})
        raise KeyboardInterrupt
    assert "[train] step 2/5 (40%), loss 1.500" in shown(display)[-1]


def test_the_live_view_is_only_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    display = Display(Console(file=io.StringIO()), clock=Clock())
    display.begin(0, 5)
    display.log(5, {"loss": 1.0})
    assert shown(display) == ["[train] step 5/5 (100%), loss 1.000"]


# --- with transformers' trainer -----------------------------------------------------------------------------------


class Line(torch.nn.Module):
    """y = w x, with the loss that a Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.w * x - labels).square().mean(), "logits": self.w * x}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[dict], list[str]]]:
    """What a run of three steps wrote and showed; it is evaluated after the second, and at the end."""
    folder = tmp_path_factory.mktemp("run")
    args = TrainingArguments(
        str(folder), max_steps=3, logging_steps=1, eval_strategy="steps", eval_steps=2, report_to="none",
        save_strategy="no", disable_tqdm=True, use_cpu=True, per_device_train_batch_size=2,
        dataloader_pin_memory=False,
    )  # fmt: skip
    rows = [{"x": torch.tensor(1.0), "labels": torch.tensor(3.0)}] * 8
    display = Display(console(), interval=0.0)
    callbacks = [RunCallback(Recorder(folder), display)]
    Trainer(Line(), args, train_dataset=rows, eval_dataset=rows, callbacks=callbacks).train()  # type: ignore[arg-type]
    yield read_metrics(folder), shown(display)


def test_every_step_and_evaluation_is_one_line(lines: tuple[list[dict], list[str]]) -> None:
    written, _ = lines
    assert [(line["step"], "eval_loss" in line) for line in written] == [
        (1, False), (2, False), (2, True), (3, False), (3, True)
    ]  # fmt: skip
    assert written[0]["loss"] == 4.0  # (1 - 3)^2
    assert {"grad_norm", "learning_rate", "epoch"} < written[0].keys()
    assert "eval_seconds" in written[2]
    assert not any("runtime" in key for line in written for key in line)


def test_a_run_is_shown_from_its_first_step_to_its_result(lines: tuple[list[dict], list[str]]) -> None:
    _, text = lines
    assert text[0].startswith("[train] step 1/3 (33%)")
    assert sum("evaluation: loss" in line for line in text) == 2
    assert text[-1].startswith("[train] 3 steps in")


def test_only_the_main_process_writes_and_timings_are_rounded(tmp_path: Path) -> None:
    display = Display(console(), interval=0.0)
    callback = RunCallback(Recorder(tmp_path), display)
    args, control = None, TrainerControl()
    logs = {"loss": 1.0, "seconds": 0.123456, "train_runtime": 5.4321}
    callback.on_log(args, TrainerState(is_world_process_zero=False), control, logs=logs)
    assert read_metrics(tmp_path) == [] and shown(display) == []
    callback.on_log(args, TrainerState(global_step=7), control, logs=logs)
    callback.on_log(args, TrainerState(global_step=7), control, logs={"train_runtime": 9.0, "train_loss": 1.0})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text) == {"step": 7, "loss": 1.0, "seconds": 0.123, "train_seconds": 5.432}
