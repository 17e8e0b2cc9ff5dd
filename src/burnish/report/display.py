"""What a person sees while a run trains: a live view in a terminal, plain lines anywhere else."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

from burnish.report.metrics import Recorder, describe, duration, headline, is_timing, number

SHOWN_SAMPLES = 4
HISTORY = 32
HEARTBEAT = 30.0
BARS = "▁▂▃▄▅▆▇█"


# --- what is shown, as values and pure functions of them ----------------------------------------------------------


@dataclass(frozen=True)
class View:
    """All that the display knows: ``View(stage="sft", part=1, parts=3, step=40, last_step=313)``.

    ``values`` holds the last value of each metric, ``first`` its first one, ``history`` its last ones, for the trend;
    ``speed`` holds (tokens, seconds) of the last steps. ``started`` is the clock when step ``first_step`` was done.
    The view is replaced, never changed, so that the refreshing thread sees a whole one.
    """

    stage: str = "train"
    part: int = 1
    parts: int = 1
    step: int = 0
    first_step: int = 0
    last_step: int = 0
    started: float = 0.0
    values: Mapping[str, float] = field(default_factory=dict)
    first: Mapping[str, float] = field(default_factory=dict)
    history: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    speed: tuple[tuple[float, float], ...] = ()
    evaluation: tuple[int, Mapping[str, float]] | None = None
    samples: tuple[Mapping[str, Any], ...] = ()

    @property
    def title(self) -> str:
        """The stage and its place among the stages: ``[2/3 reward]``, or ``[train]`` where there is only one."""
        return f"[{self.part}/{self.parts} {self.stage}]" if self.parts > 1 else f"[{self.stage}]"


def seconds_left(view: View, now: float) -> float | None:
    """Time for the steps that remain, at the mean pace so far; None before the first step is done."""
    done = view.step - view.first_step
    return (now - view.started) / done * (view.last_step - view.step) if done > 0 else None


def tokens_per_second(view: View) -> float | None:
    """Tokens over seconds, both summed over the last steps; None where steps do not say them."""
    tokens, seconds = (sum(column) for column in zip(*view.speed, strict=True)) if view.speed else (0.0, 0.0)
    return tokens / seconds if tokens and seconds else None


def logged(view: View, values: Mapping[str, float]) -> View:
    """The view after a step's metrics; a metric that this step lacks (a PPO score between rollouts) stays."""
    history = dict(view.history)
    for key in values:
        if describe(key).headline:
            history[key] = (*history.get(key, ()), values[key])[-HISTORY:]
    speed = view.speed
    if "tokens" in values and "seconds" in values:
        speed = (*speed, (values["tokens"], values["seconds"]))[-HISTORY:]
    latest, first = {**view.values, **values}, {**values, **view.first}
    return replace(view, values=latest, first=first, history=history, speed=speed)


def visible(text: str, limit: int, *, keep: str = "start") -> str:
    r"""Text of a model in one line that cannot act on the terminal: ``"a\nb"`` becomes ``a\nb`` with a backslash.

    What is over the ``limit`` is cut, at the end or (``keep="end"``) at the start.
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    if len(shown) <= limit:
        return shown
    return "..." + shown[len(shown) - limit + 3 :] if keep == "end" else shown[: limit - 3] + "..."


def numbers(values: Mapping[str, float]) -> str:
    """The metrics that matter, in a line: ``loss 2.314, perplexity 10.12 [9.870, 10.38]``."""
    parts = []
    for key in headline(values):
        share = describe(key).share
        low, high = values.get(f"{key}_low"), values.get(f"{key}_high")
        interval = "" if low is None or high is None else f" [{number(low, share)}, {number(high, share)}]"
        parts.append(f"{_name(key)} {number(values[key], share)}{interval}")
    return ", ".join(parts)


def progress_line(view: View, now: float) -> str:
    """One plain line: ``[1/3 sft] step 40/313 (13%), 4 min 10 s left, 1,240 tokens/s, loss 2.314``."""
    return ", ".join(part for part in [f"{view.title} {_progress(view, now)}", numbers(view.values)] if part)


def result_line(view: View, now: float) -> str:
    """What a stage came to: ``[1/3 sft] 313 steps in 4 min 10 s: loss 3.210 -> 1.440``."""
    done = view.step - view.first_step
    changes = [
        f"{_name(key)} {number(view.first[key], describe(key).share)} -> {number(value, describe(key).share)}"
        for key, value in ((key, view.values[key]) for key in headline(view.values))
        if key in view.first and key != "learning_rate"
    ]
    line = f"{view.title} {done:,} {'step' if done == 1 else 'steps'} in {duration(now - view.started)}"
    return f"{line}: {', '.join(changes)}" if changes else line


def sample_line(view: View, row: Mapping[str, Any]) -> str:
    """One plain line for a sample: ``[3/3 ppo] step 40 | score 1.250 | prompt | completion``."""
    score = f"score {number(float(row['score']))}" if row.get("score") is not None else "no score"
    prompt = visible(row.get("prompt", ""), 60, keep="end")
    return f"{view.title} step {row.get('step', view.step)} | {score} | {prompt} | {visible(row['completion'], 120)}"


def render(view: View, now: float) -> RenderableType:
    """The live view: the stage, a bar with the time left, the metrics that matter with their trend, some samples."""
    head = Table.grid(padding=(0, 1))
    head.add_row(
        Text(view.title, style="bold"),
        ProgressBar(total=max(view.last_step, 1), completed=view.step, width=16),
        Text(_progress(view, now)),
    )
    parts: list[RenderableType] = [head]
    if view.values:
        parts.append(_metrics_table(view))
    if view.evaluation:
        step, values = view.evaluation
        parts.append(Text(f"  evaluation at step {step:,}: {numbers(values)}", style="cyan"))
    if view.samples:
        parts.append(_samples_table(view.samples))
    return Group(*parts)


def _progress(view: View, now: float) -> str:
    share = f" ({view.step / view.last_step:.0%})" if view.last_step else ""
    parts = [f"step {view.step:,}/{view.last_step:,}{share}" if view.last_step else f"step {view.step:,}"]
    left = seconds_left(view, now)
    if left is not None and view.step < view.last_step:
        parts.append(f"{duration(left)} left")
    speed = tokens_per_second(view)
    if speed is not None:
        parts.append(f"{number(round(speed))} tokens/s")
    return ", ".join(parts)


def _name(key: str) -> str:
    return key.removeprefix("eval_").replace("_", " ")


def _metrics_table(view: View) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right", style="bold")
    table.add_column(style="cyan")
    for key in headline(view.values):
        value = number(view.values[key], describe(key).share)
        table.add_row("  " + _name(key), value, _trend(view.history.get(key, ())))
    return table


def _samples_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    title = f"samples at step {rows[0].get('step', 0)}"
    table = Table(title=title, title_justify="left", title_style="dim", box=SIMPLE_HEAD, expand=True)
    table.add_column("prompt", ratio=2)
    table.add_column("completion", ratio=3)
    table.add_column("score", justify="right", no_wrap=True)
    for row in rows:
        score = "" if row.get("score") is None else number(float(row["score"]))
        prompt, completion = visible(row.get("prompt", ""), 120, keep="end"), visible(row["completion"], 200)
        table.add_row(Text(prompt, style="dim"), Text(completion), score)
    return table


def _trend(values: Sequence[float]) -> str:
    finite = [value for value in values if abs(value) < float("inf")]
    if len(finite) < 2:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] if span else BARS[0] for value in finite)


# --- where it is shown --------------------------------------------------------------------------------------------


class Display:
    """Shows a run to a person: live where the console is a terminal, else a plain line every ``interval`` seconds.

    ``with Display() as display`` leaves the terminal as it was, also when training fails. ``live`` overrides what is
    found out about the console; ``clock`` counts seconds.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        live: bool | None = None,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console()
        # Environment variables can make rich call a file a terminal; control characters never go into a file.
        self._is_live = self.console.is_interactive and self.console.file.isatty() if live is None else live
        self._interval = interval
        self._clock = clock
        self._view = View()
        self._live: Live | None = None
        self._last_line = float("-inf")

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def __rich__(self) -> RenderableType:
        """The view as of now; rich asks for it at every refresh."""
        return render(self._view, self._clock())

    def stage(self, name: str, part: int = 1, parts: int = 1) -> None:
        """What is shown from here on belongs to stage ``name``, number ``part`` of ``parts``."""
        self._view = View(stage=name, part=part, parts=parts)

    def begin(self, step: int, last_step: int) -> None:
        """Training starts, or goes on, after ``step``; it will end with ``last_step``."""
        self._view = replace(
            self._view,
            step=step,
            first_step=step,
            last_step=last_step,
            started=self._clock(),
            values={},
            first={},
            history={},
            speed=(),
            samples=(),
        )
        self._last_line = self._clock() - self._interval
        if step:
            self._print(f"{self._view.title} goes on after step {step:,}")
        if self._is_live and self._live is None:
            self._live = Live(self, console=self.console, transient=True, refresh_per_second=4)
            self._live.start()

    def step(self, step: int) -> None:
        """An optimizer step is done."""
        self._view = replace(self._view, step=step)
        if self._clock() - self._last_line > max(HEARTBEAT, self._interval):
            self._line()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics of a step, or of an evaluation when their names begin with ``eval_``."""
        if any(key.startswith("eval_") for key in values):
            self._view = replace(self._view, evaluation=(step, dict(values)))
            self._print(f"{self._view.title} step {step:,} evaluation: {numbers(values)}", style="cyan")
            return
        self._view = logged(replace(self._view, step=step), values)
        if step == self._view.last_step or self._clock() - self._last_line >= self._interval:
            self._line()

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Some prompts with their completions and scores, as they go into samples.jsonl; the first few are shown."""
        self._view = replace(self._view, samples=tuple(rows[:SHOWN_SAMPLES]))
        if not self._is_live:
            for row in self._view.samples:
                self._print(sample_line(self._view, row))

    def message(self, text: str) -> None:
        """A line that stays on the screen."""
        self._print(f"{self._view.title} {text}")

    def end(self) -> None:
        """Training is over: the live view goes, what the stage came to stays."""
        self._stop()
        self._print(result_line(self._view, self._clock()), style="green")

    def _line(self) -> None:
        self._last_line = self._clock()
        if not self._is_live:
            self._print(progress_line(self._view, self._last_line))

    def _print(self, text: str, style: str = "") -> None:
        text = text.encode(self.console.encoding, "backslashreplace").decode(self.console.encoding)
        self.console.print(Text(text, style=style if self._is_live else ""), soft_wrap=True)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class RunCallback(TrainerCallback):
    """Sends what the trainer reports to the files and to the screen, from the main process alone.

    The names that transformers gives to times (``eval_runtime``) are written as ``eval_seconds``, so that they are
    known as timings; its summary at the end of training is not a step and is left out.
    """

    def __init__(self, recorder: Recorder, display: Display) -> None:
        self.recorder = recorder
        self.display = display

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Training starts or goes on."""
        if state.is_world_process_zero:
            self.display.begin(state.global_step, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An optimizer step is done."""
        if state.is_world_process_zero:
            self.display.step(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Metrics of a step or of an evaluation; evaluations arrive here too, so `on_evaluate` is not needed."""
        summary = logs is not None and "train_runtime" in logs and "loss" not in logs
        if not logs or summary or not state.is_world_process_zero:
            return
        values = {re.sub("_runtime$", "_seconds", key): value for key, value in logs.items()}
        values = {key: round(value, 3) if is_timing(key) else value for key, value in values.items()}
        self.recorder.metrics(state.global_step, values)
        self.display.log(state.global_step, values)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Training is over."""
        if state.is_world_process_zero:
            self.display.end()
