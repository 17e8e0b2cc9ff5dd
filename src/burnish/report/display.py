"""Shows the progress of a run: a live view in a terminal, and plain lines elsewhere."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

from burnish.report.metrics import Recorder, counted, describe, duration, headline, is_timing, number
from burnish.report.transcript import shortened

SHOWN_SAMPLES = 4
HISTORY = 32
WINDOW = 10  # logged steps that the result of a stage averages over, at its start and at its end
HEARTBEAT = 30.0
BARS = "▁▂▃▄▅▆▇█"


# --- one stage ----------------------------------------------------------------------------------------------------


class StageView(Progress):
    """The live view of a stage: rich's progress bar, and below it metrics with their trend, and some samples.

    ``values`` holds the latest value of each metric, ``first`` its first ones, and ``history`` its last ones, for the
    trend; ``pace`` holds (tokens, seconds) of the last steps; ``iterations`` holds the step and time at which the first
    and the last iteration ended. These are replaced and never changed in place, because rich draws the view from
    another thread.
    """

    def __init__(
        self, title: str = "[train]", *, console: Console, clock: Callable[[], float], live: bool = False
    ) -> None:
        self.values: Mapping[str, float] = {}
        self.first: Mapping[str, tuple[float, ...]] = {}
        self.history: Mapping[str, tuple[float, ...]] = {}
        self.pace: tuple[tuple[float, float], ...] = ()
        self.samples: tuple[Mapping[str, Any], ...] = ()
        self.title = title
        self.first_step = 0
        self.passing = ""
        self.steps_per_iteration = 1
        self.iterations: tuple[tuple[int, float], ...] = ()
        columns = TextColumn("{task.description}", style="bold", markup=False), BarColumn(16), _Status(self)
        super().__init__(
            *columns, console=console, get_time=clock, disable=not live, transient=True, refresh_per_second=4
        )
        self.add_task(title, start=False, total=None)

    @property
    def task(self) -> Task:
        """The one task of rich's progress bar: the stage's optimizer steps."""
        return self.tasks[0]

    def begin(self, step: int, last_step: int, steps_per_iteration: int = 1) -> None:
        """Start the clock. Training starts, or resumes after ``step``.

        An iteration is the optimizer steps that learn from one batch of rollouts; elsewhere it is one step.
        """
        self.first_step, self.steps_per_iteration, self.iterations = step, steps_per_iteration, ()
        self.reset(self.task.id, total=last_step, completed=step)
        self.values, self.first, self.history, self.pace, self.samples = {}, {}, {}, (), ()

    def at(self, step: int) -> None:
        """Optimizer step ``step`` is done."""
        if step > self.task.completed and step % self.steps_per_iteration == 0:
            now = (step, self.task.elapsed or 0.0)
            self.iterations = (*self.iterations[:1], now)
        self.update(self.task.id, completed=step)

    def add(self, values: Mapping[str, float]) -> None:
        """Add metrics of an optimizer step. Metrics that this step lacks, such as the score, keep their value."""
        shown = {key: value for key, value in values.items() if describe(key).headline}
        grown = {key: (*self.history.get(key, ()), value)[-HISTORY:] for key, value in shown.items()}
        self.history = {**self.history, **grown}
        if "tokens" in values and "seconds" in values:
            self.pace = (*self.pace, (values["tokens"], values["seconds"]))[-HISTORY:]
        self.first = {**self.first, **{key: (*self.first.get(key, ()), values[key])[:WINDOW] for key in shown}}
        self.values = {**self.values, **values}

    def seconds_left(self) -> float | None:
        """Estimated time for the remaining steps, at the mean pace since the end of the first iteration.

        The first iteration is not counted, because it is slower than the others. None until the second one is done.
        """
        if self.task.total is None or len(self.iterations) < 2:
            return None
        (first, began), (last, ended) = self.iterations
        return (ended - began) / (last - first) * (self.task.total - self.task.completed)

    def tokens_per_second(self) -> float | None:
        """Tokens per second over the last steps; None if steps do not report them."""
        tokens, seconds = (sum(column) for column in zip(*self.pace, strict=True)) if self.pace else (0.0, 0.0)
        return tokens / seconds if tokens and seconds else None

    def status(self) -> str:
        """The progress of the stage: ``step 40/313 (13%), 4 min 10 s left, 1,240 tokens/s``.

        With several steps per iteration, it counts iterations: ``iteration 10/78, step 40/312 (13%), ...``.
        """
        step, last_step, each = int(self.task.completed), int(self.task.total or 0), self.steps_per_iteration
        if not last_step:
            return self.passing or "starting"
        parts = [f"step {step:,}/{last_step:,} ({step / last_step:.0%})"]
        if each > 1:
            parts.insert(0, f"iteration {-(-step // each):,}/{-(-last_step // each):,}")
        left, speed = self.seconds_left(), self.tokens_per_second()
        if left is not None and step < last_step:
            parts.append(f"{duration(left)} left")
        if speed is not None:
            parts.append(f"{number(round(speed))} tokens/s")
        return ", ".join(parts + ([self.passing] if self.passing else []))

    def progress_line(self) -> str:
        """One plain line: ``[1/3 sft] step 40/313 (13%), 4 min 10 s left, 1,240 tokens/s, loss 2.314``."""
        return ", ".join(part for part in [f"{self.title} {self.status()}", numbers(self.values)] if part)

    def result_line(self) -> str:
        """The result of a stage: ``[1/3 sft] 313 steps in 4 min 10 s: loss 3.210 -> 1.440 (means of 10 steps)``.

        A single batch says little, so the first and the last logged steps are averaged.
        """
        done = int(self.task.completed) - self.first_step
        keys = [key for key in headline(self.values) if key in self.first and key != "learning_rate"]
        window = {key: max(1, min(WINDOW, len(self.history[key]) // 2)) for key in keys}
        changes = []
        for key in keys:
            first, last = fmean(self.first[key][: window[key]]), fmean(self.history[key][-window[key] :])
            share = describe(key).share
            changes.append(f"{_name(key)} {number(first, share)} -> {number(last, share)}")
        if keys and (most := max(window.values())) > 1:
            up_to = "up to " if min(window.values()) < most else ""  # not every step has every metric
            changes[-1] += f" (means of {up_to}{most} logged steps)"
        size = counted(done, "step")
        if (each := self.steps_per_iteration) > 1:
            size = f"{counted(-(-done // each), 'iteration')} ({size})"
        line = f"{self.title} {size} in {duration(self.task.elapsed or 0.0)}"
        return f"{line}: {', '.join(changes)}" if changes else line

    def sample_line(self, row: Mapping[str, Any]) -> str:
        """One plain line for a sample: ``[3/3 ppo] step 40, held out | score 1.250 | prompt | completion``.

        A sample of a stage that makes rows has no step: its step is None. The messages of an episode follow in lines of
        their own (``message_lines``).
        """
        score = f"score {number(float(row['score']))}" if row.get("score") is not None else "no score"
        prompt = visible(row.get("prompt", ""), 60, keep="end")
        step = row.get("step", int(self.task.completed))
        held_out = ", held out" if row.get("kind") == "eval" else ""
        place = f"step {step}{held_out}" if step is not None else "sample"
        return f"{self.title} {place} | {score} | {prompt} | {_completion(row)}"

    def message_lines(self, row: Mapping[str, Any]) -> list[str]:
        """Plain lines for the messages of an episode, ``    tool guess: Higher.``; none for other samples."""
        return [f"    {visible(text, 140)}" for text in shortened(row.get("messages", ()), 12)]

    def get_renderables(self) -> Iterable[RenderableType]:
        """The progress bar, headline metrics and the last samples."""
        yield self.make_tasks_table(self.tasks)
        if self.values:
            yield self._metrics_table()
        if self.samples:
            yield _samples_table(self.samples)

    def _metrics_table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column(justify="right", style="bold")
        table.add_column(style="cyan")
        for key in headline(self.values):
            value = number(self.values[key], describe(key).share)
            table.add_row(Text("  " + _name(key)), value, _trend(self.history.get(key, ())))
        return table


class _Status(ProgressColumn):
    """The status of the stage, to the right of its progress bar."""

    def __init__(self, view: StageView) -> None:
        super().__init__()
        self.view = view

    def render(self, task: Task) -> Text:
        return Text(self.view.status())


def visible(text: str, limit: int, *, keep: str = "start") -> str:
    r"""A model's text in one line that cannot act on the terminal: a line break becomes ``\n`` with a backslash.

    Text beyond ``limit`` characters is cut, at the end or (``keep="end"``) at the start.
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    if len(shown) <= limit:
        return shown
    return "..." + shown[len(shown) - limit + 3 :] if keep == "end" else shown[: limit - 3] + "..."


def broken(text: str, width: int) -> str:
    """A line broken between words, where a terminal would break within them. Words that are too long stay whole.

    A percent sign stays with its number.
    """
    text = text.replace(" %", "\xa0%")  # textwrap does not break at this space
    lines = textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\xa0%", " %")


def numbers(values: Mapping[str, float]) -> str:
    """Headline metrics in one line: ``loss 2.314, perplexity 10.12 [9.870, 10.38]``."""
    parts = []
    for key in headline(values):
        share = describe(key).share
        low, high = values.get(f"{key}_low"), values.get(f"{key}_high")
        if low is None or high is None or low == high:  # without an interval, or known by definition
            interval = ""
        else:
            interval = f" [{number(low, share)}, {number(high, share)}]"
        parts.append(f"{_name(key)} {number(values[key], share)}{interval}")
    return ", ".join(parts)


def _name(key: str) -> str:
    return describe(key).short or key.removeprefix("eval_").replace("_", " ")


def _completion(row: Mapping[str, Any]) -> str:
    """A completion in one line, or how an episode went: ``3 turns, finished: done``."""
    if "messages" not in row:
        return visible(row["completion"], 120)
    turns = sum(message["role"] == "assistant" for message in row["messages"])
    return f"{counted(turns, 'turn')}, finished: {row['finish_reason']}"


def _samples_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    title, step = "held-out samples" if rows[0].get("kind") == "eval" else "samples", rows[0].get("step", 0)
    title += f" at step {step}" if step is not None else ""
    table = Table(title=title, title_justify="left", title_style="dim", box=SIMPLE_HEAD, expand=True)
    table.add_column("prompt", ratio=2)
    table.add_column("completion", ratio=3)
    table.add_column("score", justify="right", no_wrap=True)
    for row in rows:
        score = "" if row.get("score") is None else number(float(row["score"]))
        prompt, completion = visible(row.get("prompt", ""), 120, keep="end"), visible(row["completion"], 200)
        if "messages" in row:
            completion = "\n".join([visible(text, 100) for text in shortened(row["messages"], 5)] + [_completion(row)])
        table.add_row(Text(prompt, style="dim"), Text(completion), score)
    return table


def _trend(values: Sequence[float]) -> str:
    finite = [value for value in values if abs(value) < float("inf")]
    if len(finite) < 2:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] if span else BARS[0] for value in finite)


# --- where it is shown --------------------------------------------------------------------------------------------


class _Pass(NamedTuple):
    """A pass over rows: when it began, with how many rows done, and what is shown of it."""

    began: float
    done: int
    shown: str = ""


class Display:
    """Displays a run: live if the console is a terminal, otherwise as a plain line every ``interval`` seconds.

    ``with Display() as display`` restores the terminal, also when training fails. ``live`` overrides what is detected
    about the console; ``clock`` counts seconds.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        live: bool | None = None,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console(markup=False, emoji=False)
        # Environment variables can make rich treat a file as a terminal, but a file must not get control characters.
        self._is_live = self.console.is_interactive and self.console.file.isatty() if live is None else live
        self._interval = interval
        self._clock = clock
        self._last_line = float("-inf")
        self._passes: dict[str, _Pass] = {}
        self.view = self._view("[train]")

    def __enter__(self) -> Display:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.view.stop()
        if self._is_live and kind is KeyboardInterrupt and self.view.task.total:
            self._print(self.view.progress_line())  # the live view, which showed it, is gone

    def stage(self, name: str, part: int = 1, parts: int = 1) -> None:
        """Start to show stage ``name``, which is number ``part`` of ``parts``."""
        self.view.stop()
        self._passes = {}
        self.view = self._view(f"[{part}/{parts} {name}]" if parts > 1 else f"[{name}]")

    def _view(self, title: str) -> StageView:
        return StageView(title, console=self.console, clock=self._clock, live=self._is_live)

    def begin(self, step: int, last_step: int, steps_per_iteration: int = 1) -> None:
        """Training starts, or resumes after ``step``. It will end with ``last_step``."""
        self.view.begin(step, last_step, steps_per_iteration)
        self._last_line = self._clock() - self._interval
        if step:
            self._print(f"{self.view.title} resumes after step {step:,}")
        self.view.start()

    def step(self, step: int) -> None:
        """An optimizer step is done."""
        self.view.at(step)
        if self._clock() - self._last_line > max(HEARTBEAT, self._interval):
            self._print_progress()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show metrics of a step, or of an evaluation if their names begin with ``eval_``."""
        if any(key.startswith("eval_") for key in values):
            self._print(f"{self.view.title} step {step:,} evaluation: {numbers(values)}", style="cyan")
            return
        self.view.at(step)
        self.view.add(values)
        due = self._clock() - self._last_line >= self._interval and step % self.view.steps_per_iteration == 0
        if step == self.view.task.total or due:
            self._print_progress()

    def progress(self, what: str, done: int, total: int) -> None:
        """Show the progress of a pass over rows (``progress.report``), if it takes longer than a few seconds.

        A pass can consist of others: completions are sampled for each chunk of a stage's rows. The outer one is shown
        first.
        """
        now = self._clock()
        first = self._passes.setdefault(what, _Pass(now, done))
        spent = now - first.began
        if done >= total:
            del self._passes[what]
        elif spent >= self._interval:
            more = done - first.done
            left = f", {duration(spent / more * (total - done))} left" if more else ""
            self._passes[what] = first._replace(shown=f"{what} {done:,}/{total:,}{left}")
        self.view.passing = ", ".join(one.shown for one in self._passes.values() if one.shown)
        if not self.view.passing:
            return
        if self._is_live:
            self.view.start()
        elif now - self._last_line >= self._interval:
            self._last_line = now
            self._print(f"{self.view.title} {self.view.passing}")

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show the first few of these rows of samples.jsonl."""
        self.view.samples = tuple(rows[:SHOWN_SAMPLES])
        if not self._is_live:
            for row in self.view.samples:
                for line in (self.view.sample_line(row), *self.view.message_lines(row)):
                    self._print(line)

    def message(self, text: str) -> None:
        """Print a line that stays on the screen."""
        self._print(f"{self.view.title} {text}")

    def end(self) -> None:
        """End the live view, and print the stage's result."""
        self.view.stop()
        self._print(self.view.result_line(), style="green")

    def _print_progress(self) -> None:
        self._last_line = self._clock()
        if not self._is_live:
            self._print(self.view.progress_line())

    def _print(self, text: str, style: str = "") -> None:
        text = text.encode(self.console.encoding, "backslashreplace").decode(self.console.encoding)
        if self._is_live:
            text = broken(text, self.console.width)
        self.console.print(Text(text, style=style if self._is_live else ""), soft_wrap=True)


class RunCallback(TrainerCallback):
    """Sends what the trainer reports to the files and the screen, from the main process only.

    transformers' names for times (``eval_runtime``) are written as ``eval_seconds``, so that they are recognized as
    timings. Its summary at the end of training does not belong to a step and is left out.
    """

    def __init__(self, recorder: Recorder, display: Display, steps_per_iteration: int = 1) -> None:
        self.recorder = recorder
        self.display = display
        self.steps_per_iteration = steps_per_iteration

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Training starts or resumes."""
        if state.is_world_process_zero:
            self.display.begin(state.global_step, state.max_steps, self.steps_per_iteration)

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
