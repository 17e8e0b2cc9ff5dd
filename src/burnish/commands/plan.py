"""Shows what a recipe needs before it runs: memory, what to change if it does not fit, and time with more workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from burnish.commands.outline import is_shown
from burnish.config import Recipe, load
from burnish.config.loading import document
from burnish.errors import UserError, did_you_mean
from burnish.plan.advice import changes
from burnish.plan.models import NotMadeYet
from burnish.plan.profile import read_profile
from burnish.plan.simulation import scaled, simulate
from burnish.plan.stage import CUDA_RESERVED, Machine, StagePlan, plan_stage, this_machine
from burnish.report.rounds import round_of

GIB = 2**30


class Options(NamedTuple):
    """The options of ``burnish plan``: ``Options(gpus=64, memory=80, workers="8,16", profile=Path("runs/ppo"))``."""

    gpus: int | None = None
    memory: float | None = None
    row_tokens: int | None = None
    stage: str | None = None
    profile: Path | None = None
    workers: str | None = None
    staleness: str | None = None


def machine_of(recipe: Recipe, options: Options) -> Machine:
    """The devices that the user named, or those of this machine.

    Raises:
        UserError: if GPUs are named without their memory, and this machine has none.
    """
    here = this_machine(recipe)
    size = here.memory if options.memory is None else int(options.memory * GIB)
    if options.gpus is None:
        return replace(here, memory=size)
    if options.memory is None and not here.gpu:
        raise UserError("--gpus needs --memory, the GiB of each GPU: --gpus 8 --memory 80")
    return Machine(options.gpus, size, True, CUDA_RESERVED)


def show(reference: str, overrides: Sequence[str], options: Options, console: Console) -> None:
    """Print a table of memory for each stage that trains or samples, and one of time if there is a profile.

    Raises:
        UserError: if the recipe is wrong, or a model, rows or the profile cannot be read.
    """
    recipe = load(reference, overrides)
    machine = machine_of(recipe, options)
    simulated = None if options.profile is None else simulation(recipe, options)
    names = [stage.name for stage in recipe.stages]
    if options.stage is not None and options.stage not in names:
        raise UserError(f"--stage {options.stage}: no such stage{did_you_mean(options.stage, names)}")
    console.print(_machine(machine))
    several = "stages" in document(reference)[0].value
    for stage in recipe.stages:
        if stage.run or not (is_shown(recipe, stage) if options.stage is None else stage.name == options.stage):
            continue
        assert stage.method is not None
        console.rule(f"{stage.name}: {stage.method.name}", align="left")
        try:
            plan = plan_stage(recipe, stage, machine, options.row_tokens)
        except NotMadeYet as made:
            console.print(str(made), markup=False)
            continue
        if not plan.needs.trained and not plan.needs.whole:
            console.print("uses no model")
            continue
        console.print(table(plan, machine))
        for note in notes(plan):
            console.print(note, markup=False)
        if plan.memory.peak > machine.memory:
            console.print(advice(partial(_changed, reference, overrides), _prefix(stage.name, several), plan, machine))
    if simulated is not None:
        console.rule("time", align="left")
        console.print(simulated)


def _changed(reference: str, overrides: Sequence[str], more: Sequence[str]) -> Recipe:
    return load(reference, [*overrides, *more])


def _prefix(stage: str, several: bool) -> str:
    """What comes before a key of a stage in an override."""
    if not several:
        return ""
    place = round_of(stage)
    return f"stages.{stage}." if place is None else f"stages.{place[0]}.stages.{place[2]}."


def _machine(machine: Machine) -> str:
    each = "GPU" if machine.gpu else "process on a CPU"
    return f"{machine.processes} x {each} with {gib(machine.memory)}"


def gib(size: float) -> str:
    """A size in GiB: ``gib(2**30)`` is ``1.00 GiB``."""
    return f"{size / GIB:,.2f} GiB" if size < 100 * GIB else f"{size / GIB:,.0f} GiB"


def table(plan: StagePlan, machine: Machine) -> Table:
    """The parts of a process's memory, a column for each phase, with their sums."""
    phases = plan.memory.phases
    shown = Table("each process", *phases, box=None, pad_edge=False)
    for phase in shown.columns[1:]:
        phase.justify = "right"
    names = list(dict.fromkeys(name for parts in phases.values() for name in parts))
    names.sort(key=lambda name: name == "reserved")
    for name in names:
        shown.add_row(name, *(gib(parts[name]) if name in parts else "" for parts in phases.values()))
    totals = plan.memory.totals.values()
    shown.add_row("total", *(gib(total) for total in totals), style="bold")
    shown.add_row("", *("fits" if total <= machine.memory else "does not fit" for total in totals))
    return shown


def notes(plan: StagePlan) -> Iterator[str]:
    """What the numbers stand for."""
    if plan.batch is not None:
        count = f"{plan.batch.count} x " if plan.batch.count > 1 else ""
        yield f"micro-batches of a process in a step: {count}up to {plan.batch.tokens:,} tokens"
    if plan.lengths is not None and not plan.lengths.known:
        yield (
            f"the rows do not exist yet: each is assumed to have {plan.lengths.longest:,} tokens; --row-tokens sets "
            "another number"
        )


def advice(load: Callable[[list[str]], Recipe], prefix: str, plan: StagePlan, machine: Machine) -> Table:
    """Changes that make the stage fit, each on top of those before it."""
    found = Table("change, on top of those before", "total", "", box=None, pad_edge=False)
    for change in changes(load, prefix, plan, machine):
        found.add_row(change.text, gib(change.peak), "fits" if change.fits else "")
    if not found.row_count:
        found.add_row("none of the known changes helps", "", "")
    return found


def simulation(recipe: Recipe, options: Options) -> Table:
    """The time of an iteration with these numbers of workers and values of staleness.

    Raises:
        UserError: if the profile cannot be read, or no GPU is left for training.
    """
    assert options.profile is not None
    stage, profile = read_profile(options.profile, options.stage)
    workers = counts("--rollout-workers", options.workers or str(profile.workers), 1)
    many = counts("--staleness", options.staleness or "0,1,2", 0)
    if options.gpus is not None and options.gpus <= max(workers):
        raise UserError(f"--rollout-workers {max(workers)}: no GPU of {options.gpus} is left for training")
    measured = simulate(*_repeated(profile.sampling, profile.updating), 0).seconds_per_iteration
    title = f"{stage} of {options.profile}: {measured:.3g} s per iteration"
    columns = ("workers", "training processes", "staleness", "s per iteration", "speedup", "trainer waits")
    shown = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)
    for column in shown.columns:
        column.justify = "right"
    for count in workers:
        trainers = recipe.parallel.processes if options.gpus is None else options.gpus - count
        durations = _repeated(*scaled(profile, count, trainers))
        for staleness in many:
            found = simulate(*durations, staleness)
            seconds = found.seconds_per_iteration
            cells = (f"{count}", f"{trainers}", f"{staleness}", f"{seconds:.3g}", f"{measured / seconds:.2f}")
            shown.add_row(*cells, f"{found.waiting:.0%}")
    return shown


SIMULATED = 100
"""At least so many iterations are simulated."""


def _repeated(sampling: Sequence[float], updating: Sequence[float]) -> tuple[list[float], list[float]]:
    times = -(-SIMULATED // len(sampling))
    return [*sampling] * times, [*updating] * times


def counts(option: str, text: str, least: int) -> list[int]:
    """Numbers that are separated by commas: ``counts("--staleness", "0,1", 0)`` is ``[0, 1]``.

    Raises:
        UserError: if one of them is no number, or less than ``least``.
    """
    numbers = [int(part) if part.strip().isascii() and part.strip().isdigit() else -1 for part in text.split(",")]
    if min(numbers) < least:
        raise UserError(f"{option} {text}: expected numbers of at least {least}, separated by commas, such as 1,2,4")
    return numbers
