"""Shows what a recipe needs before it runs: the memory of each process, and what to change if it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from burnish.commands.outline import is_shown
from burnish.config import Recipe, load
from burnish.config.loading import document
from burnish.errors import UserError
from burnish.plan.advice import changes
from burnish.plan.models import NotMadeYet
from burnish.plan.stage import CUDA_RESERVED, Machine, StagePlan, plan_stage, this_machine
from burnish.report.rounds import round_of

GIB = 2**30


def machine_of(recipe: Recipe, gpus: int | None, memory: float | None) -> Machine:
    """The devices that the user named, or those of this machine.

    Raises:
        UserError: if GPUs are named without their memory, and this machine has none.
    """
    here = this_machine(recipe, resident_bytes())
    if gpus is None:
        return here if memory is None else Machine(here.processes, int(memory * GIB), here.gpu, here.reserved)
    if memory is None and not here.gpu:
        raise UserError("--gpus needs --memory, the GiB of each GPU: --gpus 8 --memory 80")
    return Machine(gpus, here.memory if memory is None else int(memory * GIB), True, CUDA_RESERVED)


def resident_bytes() -> int:
    """The memory in bytes that this process takes with what it has imported."""
    statm = Path("/proc/self/statm")
    if not statm.is_file():
        return 0
    import os

    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def show(reference: str, overrides: Sequence[str], gpus: int | None, memory: float | None, console: Console) -> None:
    """Print a table for each stage that trains or samples.

    Raises:
        UserError: if the recipe is wrong, or a model or rows cannot be read.
    """
    recipe = load(reference, overrides)
    machine = machine_of(recipe, gpus, memory)
    console.print(_machine(machine))
    several = "stages" in document(reference)[0].value
    for stage in recipe.stages:
        if stage.run or not is_shown(recipe, stage):
            continue
        assert stage.method is not None
        console.rule(f"{stage.name}: {stage.method.name}", align="left")
        try:
            plan = plan_stage(recipe, stage, machine)
        except NotMadeYet as made:
            console.print(f"unknown until burnish run has made the model of stage {made.stage}", markup=False)
            continue
        if not plan.needs.trained and not plan.needs.whole:
            console.print("uses no model")
            continue
        console.print(table(plan, machine))
        for note in notes(plan, machine):
            console.print(note, markup=False)
        if plan.memory.peak > machine.memory:
            loader: Callable[[list[str]], Recipe] = lambda more: load(reference, [*overrides, *more])  # noqa: E731
            console.print(advice(loader, _prefix(stage.name, several), plan, machine))


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


def notes(plan: StagePlan, machine: Machine) -> Iterator[str]:
    """What the numbers stand for."""
    if plan.batch is not None:
        count = f"{plan.batch.count} x " if plan.batch.count > 1 else ""
        yield f"micro-batches of a process in a step: {count}up to {plan.batch.tokens:,} tokens"
    if plan.lengths is not None and not plan.lengths.known:
        yield f"the rows do not exist yet: each is assumed to have {plan.lengths.longest:,} tokens (data.max_length)"


def advice(load: Callable[[list[str]], Recipe], prefix: str, plan: StagePlan, machine: Machine) -> Table:
    """Changes that make the stage fit, each on top of those before it."""
    found = Table("change, on top of those before", "total", "", box=None, pad_edge=False)
    for change in changes(load, prefix, plan, machine):
        found.add_row(change.text, gib(change.peak), "fits" if change.fits else "")
    if not found.row_count:
        found.add_row("none of the known changes helps", "", "")
    return found
