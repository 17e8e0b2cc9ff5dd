"""What to change in a recipe whose stage does not fit, in the order of what costs least."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from burnish.config import Recipe, Stage
from burnish.config.schema import any_spec
from burnish.errors import UserError
from burnish.methods.settings import Critic, PolicyGradientConfig
from burnish.plan.stage import Machine, StagePlan, plan_stage
from burnish.training.arguments import SHARDED_OPTIMIZERS

WORTH = 0.98
"""A change that leaves more than this share of the memory is not proposed."""
MOST_PROCESSES = 1024

Load = Callable[[list[str]], Recipe]
"""Loads the recipe with more overrides."""


@dataclass(frozen=True)
class Change:
    """A change to a recipe or its machine: ``Change("stages.ppo.token_budget=4096", 61 * 2**30, fits=True)``."""

    text: str
    """What to add to the command."""
    peak: int
    """Bytes of a process with this change and those before it."""
    fits: bool


@dataclass(frozen=True)
class _State:
    """A recipe with the changes so far, on its machine."""

    overrides: list[str]
    stage: Stage
    machine: Machine
    sharded: bool
    plan: StagePlan


def changes(load: Load, prefix: str, plan: StagePlan, machine: Machine) -> list[Change]:
    """Changes that together make a stage fit, or at least smaller. Each one comes on top of those before it.

    Args:
        load: loads the recipe with more overrides.
        prefix: what comes before a key of the stage in an override, such as ``stages.ppo.``.
        plan: the plan of the stage without changes.
        machine: the devices.
    """

    def state(overrides: list[str], machine: Machine, plan: StagePlan | None = None) -> _State:
        recipe = load(overrides)
        stage = next(stage for stage in recipe.stages if stage.name == name)
        found = plan_stage(recipe, stage, machine, lengths=lengths) if plan is None else plan
        return _State(overrides, stage, machine, recipe.parallel.shard == "fsdp2", found)

    name, lengths = plan.stage, plan.lengths
    now, found = state([], machine, plan), []
    for proposal in PROPOSALS:
        best: tuple[str, _State] | None = None
        for text in proposal(now):
            try:
                if text.startswith(GPUS):
                    after = state(now.overrides, replace(machine, processes=int(text.removeprefix(GPUS))))
                else:
                    text = text if text.startswith("parallel.") else prefix + text
                    after = state([*now.overrides, text], now.machine)
            except UserError:  # the recipe has settings that forbid it
                continue
            best = text, after
            if after.plan.memory.peak <= machine.memory:
                break
        if best is not None and best[1].plan.memory.peak <= WORTH * now.plan.memory.peak:
            now = best[1]
            found.append(Change(best[0], now.plan.memory.peak, now.plan.memory.peak <= machine.memory))
            if found[-1].fits:
                break
    return found


# --- proposals ----------------------------------------------------------------------------------------------------
# Each gives overrides for a stage, the most harmless one first.

GPUS = "--gpus "


def _bf16(now: _State) -> Iterator[str]:
    if now.machine.gpu and now.stage.precision == "float32":
        yield "precision=bf16"


def _smaller_micro_batches(now: _State) -> Iterator[str]:
    if now.plan.batch is None or now.plan.lengths is None:
        return
    smallest = max(now.plan.lengths.widths)
    tokens = now.plan.batch.tokens
    while tokens > smallest:
        tokens = max(tokens // 2, smallest)
        yield f"token_budget={tokens}"


def _checkpointing(now: _State) -> Iterator[str]:
    if _trains(now) and not now.stage.trainer.activation_checkpointing:
        yield "trainer.activation_checkpointing=true"


def _fewer_slots(now: _State) -> Iterator[str]:
    totals = now.plan.memory.totals
    if now.plan.needs.sampling is not None and totals["sampling"] == now.plan.memory.peak:
        for slots in (128, 64, 32, 16, 8):
            if now.stage.generator.slots is None or slots < now.stage.generator.slots:
                yield f"generator.slots={slots}"


def _sharding(now: _State) -> Iterator[str]:
    quantized = now.stage.adapter is not None and now.stage.adapter.quantize is not None
    fit = now.stage.trainer.optim in SHARDED_OPTIMIZERS and now.stage.precision != "fp16" and not quantized
    if _trains(now) and now.machine.processes > 1 and not now.sharded and fit:
        yield "parallel.shard=fsdp2"


def _shared_critic(now: _State) -> Iterator[str]:
    if _separate_critic(now):
        yield "method.critic={name: shared}"


def _lora(now: _State) -> Iterator[str]:
    if _trains(now) and now.stage.adapter is None:
        yield "adapter={r: 16}"


def _quantized(now: _State) -> Iterator[str]:
    adapter = now.stage.adapter
    if now.machine.gpu and adapter and not adapter.quantize and not now.sharded and not _separate_critic(now):
        yield "adapter.quantize=nf4"


def _more_gpus(now: _State) -> Iterator[str]:
    processes = now.machine.processes
    while now.machine.gpu and _trains(now) and processes < MOST_PROCESSES:
        processes *= 2
        yield f"{GPUS}{processes}"


PROPOSALS = (
    _smaller_micro_batches,
    _bf16,
    _checkpointing,
    _fewer_slots,
    _sharding,
    _bf16,  # again: it halves the gathered weights
    _more_gpus,
    _shared_critic,
    _lora,
    _quantized,
)


def _trains(now: _State) -> bool:
    return bool(now.plan.needs.trained)


def _separate_critic(now: _State) -> bool:
    assert now.stage.method is not None
    settings = any_spec(now.stage.method.name).config(**now.stage.method.settings)
    critic = settings.critic if isinstance(settings, PolicyGradientConfig) else None
    return isinstance(critic, Critic) and critic.name == "separate"
