"""Batches that are sampled while the policy is updated: in which order, and with which weights."""

from __future__ import annotations

import asyncio
import copy
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from burnish import GRPO, PPO, Observation, Trainer, UserError
from burnish.errors import UserCodeError
from burnish.generate.continuous import ContinuousGenerator
from burnish.generate.local import LocalGenerator
from burnish.generate.sampling import Sampling
from burnish.methods.settings import PolicyGradientConfig
from burnish.rl import loader as loaders
from burnish.rl.ahead import Ahead, Plan, Progress, SampledBatch, Steps
from burnish.rl.environment import Environments
from burnish.rl.trajectory import from_plain, to_plain
from burnish.training import checkpoint
from burnish.types import Prompt, Trajectory
from tiny_runs import lora

ROWS = [Prompt(({"role": "user", "content": f"{i} + {'1' * (i % 3)}"},), {"number": i}, f"rows:{i}") for i in range(16)]
FAST, SLOW, NEVER = 0, 3, 10**9
"""How many polls of a trainer that does not wait find nothing, after each plan."""


class Worker(LocalGenerator):
    """Samples from its own copy of the model, as a generator in another process, but only as fast as it is told."""

    overlaps = True

    def __init__(self, model: Any, tokenizer: Any, held: int, log: list[tuple[Any, ...]]) -> None:
        super().__init__(copy.deepcopy(model), tokenizer)
        self.held, self.log, self.left = held, log, 0

    def update_weights(self, version: int, weights: Any) -> None:
        given = dict(weights)
        super().update_weights(version, given.items())
        self.log.append(("weights", version, weights_of(given)))

    def submit(self, requests: Any, version: int) -> list[int]:
        self.left = self.held
        self.log.append(("requests", version, [request.seed for request in requests]))
        return super().submit(requests, version)

    def poll(self, timeout: float | None) -> list[Any]:
        if timeout == 0 and self.left:
            self.left -= 1
            return []
        return super().poll(None)


def weights_of(named: Any) -> bytes:
    return b"".join(w.detach().numpy().tobytes() for w in dict(named).values())


def by_tokens(answers: list[Trajectory]) -> list[float]:
    return [sum(a.tokens) % 9 / 4 - 1 for a in answers]


class Twice:
    """Answers every message with its length and what the row says, and ends after a message with a digit."""

    def reset(self, number: int, seed: int) -> str:
        self.number = number
        return f" {seed % 10}"

    async def respond(self, message: dict[str, Any]) -> Observation:
        """Answer after a while."""
        await asyncio.sleep(0)
        done = any(letter.isdigit() for letter in message["content"])
        return Observation(f"{len(message['content'])} {self.number}", done, float(done) + len(message["content"]) / 50)


class Found(NamedTuple):
    """What a run did: its trainer, the bytes of the weights before each step, and what its worker did."""

    trainer: Trainer
    weights: list[bytes]
    log: list[tuple[Any, ...]]

    def logged(self, name: str) -> list[float]:
        return [line[name] for line in self.trainer.state.log_history if name in line]

    @property
    def batches(self) -> list[tuple[int, list[int]]]:
        """The version and the seeds of each plan of training."""
        return [(version, seeds) for kind, version, seeds in self.log if kind == "requests" and version >= 0]


Run = Callable[..., Found]


@pytest.fixture
def run(make_trainer: Any, tiny_llama: Any, tmp_path: Path) -> Run:
    def go(
        staleness: int = 1,
        held: int = FAST,
        name: str = "run",
        start: int | None = None,
        generator: Any = None,
        reward: Any = by_tokens,
        kind: Any = PPO,
        rows: int = 16,
        evaluated: bool = False,
        environments: Environments | None = None,
        callbacks: tuple[TrainerCallback, ...] = (),
        token_budget: int | None = None,
        arguments: dict[str, Any] | None = None,
        sampling: Sampling | None = None,
        adapter: bool = False,
        **settings: Any,
    ) -> Found:
        model, log, seen = tiny_llama(), [], []
        model.generation_config.eos_token_id = [2, *range(15, 25)]
        if adapter:
            model = lora(model)
        generator = generator or (lambda model, tokenizer: Worker(model, tokenizer, held, log))
        settings = {"epochs": 1, "mini_batches": 2, "max_staleness": staleness} | settings
        method = kind(reward, sampling or Sampling(max_new_tokens=6), generator, environments, **settings)

        class Keep(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
                seen.append(weights_of(model.policy.named_parameters()))

        own = {"callbacks": [Keep(), *callbacks], "token_budget": token_budget} | (
            {"eval_dataset": ROWS[:3]} if evaluated else {}
        )
        more = {"eval_strategy": "steps", "eval_steps": 3} if evaluated else {}
        trainer = make_trainer(
            method,
            model,
            ROWS[:rows],
            **{"batch": 4, "lr": 1e-2, "own": own, "output_dir": str(tmp_path / name)} | more | (arguments or {}),
        )
        if start is None and evaluated:
            trainer.evaluate()
        trainer.train(resume_from_checkpoint=start and str(tmp_path / "run" / f"checkpoint-{start}"))
        seen.append(weights_of(trainer.network.policy.named_parameters()))
        method.close()
        return Found(trainer, seen, log)

    return go


# --- order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [1, 2])
def test_batch_k_is_sampled_with_the_weights_after_k_minus_s_updates(staleness: int, run: Run) -> None:
    found = run(staleness)
    iterations = [max(0, k - staleness) for k in range(4)]
    assert [version for version, _ in found.batches] == iterations
    updates = [found.weights[2 * version] for version in iterations]  # an update has two optimizer steps
    assert len(set(updates)) == 4 - staleness
    assert [(v, w) for kind, v, w in found.log if kind == "weights"] == list(zip(iterations, updates, strict=True))
    assert found.logged("staleness") == [min(k, staleness) for k in range(4)]
    same = run(0)
    assert [seeds for _, seeds in same.batches] == [seeds for _, seeds in found.batches]
    assert same.logged("staleness") == [] and [version for version, _ in same.batches] == [0, 1, 2, 3]


def test_no_batch_is_sampled_that_no_update_would_use(run: Run) -> None:
    assert len(run(3, arguments={"num_train_epochs": 2}).batches) == 8
    assert len(run(3, arguments={"max_steps": 5}).batches) == 3  # two optimizer steps each, one of the last
    assert len(run(5, iterations=2).batches) == 2


def test_a_staleness_of_0_gives_the_bytes_of_the_local_generator(run: Run) -> None:
    assert run(0, generator=LocalGenerator).weights == run(0).weights == run(0, held=NEVER).weights


def test_without_learning_staleness_changes_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def collected(staleness: int) -> list[Any]:
        summary = loaders.summary
        seen: list[Any] = []
        monkeypatch.setattr(
            loaders, "summary", lambda batch: seen.append([to_plain(t) for t in batch]) or summary(batch)
        )
        found = run(staleness, arguments={"lr": 0.0, "num_train_epochs": 2})
        monkeypatch.setattr(loaders, "summary", summary)
        assert len(seen) == 8 and len(set(found.weights)) == 1
        return seen

    assert collected(2) == collected(0)


# --- speed does not matter ----------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "completions": dict,
    "evaluated": lambda: {"evaluated": True},
    "two": lambda: {"staleness": 2},
    "dynamic": lambda: {
        "kind": GRPO,
        "dynamic_sampling": 2,
        "sampling": Sampling(max_new_tokens=2, samples=2),
        "reward": lambda answers: [float(sum(a.tokens) % 3 == 0) for a in answers],
    },
    "episodes": lambda: {
        "environments": Environments({"": Twice}, turns=True, max_turns=4, reward_at="turns"),
        "reward": None,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_worker_gives_the_bytes_of_a_fast_one(kind: str, run: Run) -> None:
    speeds = (FAST, SLOW, NEVER) if kind in ("completions", "episodes") else (FAST, NEVER)
    fast, *others = (run(held=held, **KINDS[kind]()) for held in speeds)
    for other in others:
        assert fast.weights == other.weights and fast.log == other.log
    assert len(set(fast.weights)) > 4
    if kind == "dynamic":
        assert sum(fast.logged("replaced_prompts")) > 0
    if kind == "episodes":
        assert max(fast.logged("turns")) > 1


@pytest.mark.parametrize(
    ("kind", "held"),
    [
        ("completions", FAST),
        ("episodes", NEVER),
        *(pytest.param(kind, held, marks=pytest.mark.slow) for kind, held in [("evaluated", NEVER), ("two", FAST)]),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [("dynamic", NEVER), ("episodes", FAST)]),
    ],
)
def test_a_run_that_is_resumed_gives_the_same_bytes(kind: str, held: int, run: Run) -> None:
    def saved(**more: Any) -> dict[str, Any]:
        settings = KINDS[kind]()
        every = {"save_strategy": "steps", "save_steps": 1} | settings.pop("arguments", {})
        return {"held": held, "arguments": every, **settings, **more}

    whole = run(**saved())
    for step in (3, 4):
        again = run(**saved(start=step, name="again"))
        assert again.weights == whole.weights[step:], step
        assert whole.logged("score") == again.logged("score")
        if kind == "evaluated":
            assert whole.logged("eval_score") == again.logged("eval_score")
    # what a checkpoint keeps: rollouts, or the weights that sample them again
    state = torch.load(whole.trainer.folder / "checkpoint-3" / "burnish.pt", weights_only=True)["loader"]
    finished = [one["sampled"] is not None for one in state["queue"]]
    assert len(finished) == (2 if kind == "two" else 1)
    if held == NEVER and kind != "evaluated":
        assert not any(finished) and set(state["weights"]) == {one["version"] for one in state["queue"]}
    if held == FAST and kind == "completions":
        assert all(finished) and not state["weights"]


def test_of_an_adapter_only_the_adapter_is_kept(run: Run) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole = run(held=NEVER, adapter=True, arguments=saving)
    state = torch.load(whole.trainer.folder / "checkpoint-3" / "burnish.pt", weights_only=True)["loader"]
    (kept,) = state["weights"].values()
    assert kept and all(".lora_" in name for name in kept)
    again = run(held=NEVER, adapter=True, arguments=saving, start=3, name="again")
    assert again.weights == whole.weights[3:] and len(set(whole.weights)) == 9


def test_a_run_that_is_killed_at_several_moments_gives_the_same_bytes(run: Run, tmp_path: Path) -> None:
    arguments = {"save_strategy": "steps", "save_steps": 1}
    whole = run(arguments=arguments, name="whole")

    def latest() -> int | None:
        found, _ = checkpoint.latest(tmp_path / "run")
        return found and checkpoint.step_of(found)

    moments = random.Random(time.time_ns())
    for target in (1, 3, 5):
        if (child := os.fork()) == 0:
            try:
                run(arguments=arguments, start=latest())
            finally:
                os._exit(0)
        while not (tmp_path / "run" / f"checkpoint-{target}").exists():
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    step = latest()
    assert step is not None and 5 <= step < 8
    again = run(arguments=arguments, start=step)
    assert again.weights == whole.weights[step:] and again.logged("score") == whole.logged("score")


def test_an_evaluation_has_the_current_weights_and_changes_nothing(run: Run) -> None:
    found = run(held=SLOW, evaluated=True)
    assert found.weights == run(held=SLOW).weights
    evaluated = [at for kind, version, at in found.log if kind == "weights" and version == -1]
    assert evaluated == [found.weights[step] for step in (0, 3, 6, 8)]
    # the batch in flight was sampled as a whole before
    kinds = [(kind, version) for kind, version, _ in found.log]
    assert all(kinds[i + 1] == ("requests", version) for i, (kind, version) in enumerate(kinds) if kind == "weights")


def test_episodes_go_on_while_the_policy_is_updated(run: Run) -> None:
    at_end: list[bool] = []

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            at_end.extend(result is not None for _, result in found[0].plans())

    found: list[Ahead] = []
    settings = KINDS["episodes"]()
    patched = Ahead.submit

    def submit(self: Ahead, *given: Any) -> None:
        found[:] = [self]
        patched(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ahead, "submit", submit)
        run(callbacks=(Look(),), token_budget=40, **settings)
    assert len(at_end) == 6 and all(at_end[1::2])  # after both optimizer steps of an update


# --- corrections --------------------------------------------------------------------------------------------------


def test_stale_tokens_weigh_the_ratio_to_the_policy_before_the_update(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    compute = loaders.correction_weights

    def recording(old: Any, sampler: Any, mask: Any, *given: Any, **bounds: Any) -> Any:
        weights, touched = compute(old, sampler, mask, *given, **bounds)
        seen.append((old, sampler, mask, weights))
        return weights, touched

    monkeypatch.setattr(loaders, "correction_weights", recording)
    found = run(1, arguments={"lr": 3e-2})
    for k, (old, sampler, mask, weights) in enumerate(seen):
        ratio = np.exp((old - sampler)[mask].numpy())
        assert weights[mask].numpy() == pytest.approx(np.minimum(ratio, 2), abs=1e-5)
        assert (np.abs(ratio - 1).max() < 1e-4) == (k == 0)
        size = np.minimum(ratio, 2)
        assert found.logged("effective_sample_size")[k] == pytest.approx(size.sum() ** 2 / len(size) / (size**2).sum())
        assert found.logged("sampler_mismatch")[k] == pytest.approx((old - sampler)[mask].abs().mean().item(), abs=1e-9)
    assert len(seen) == 4 and max(float(weights.max()) for *_, weights in seen) == 2
    assert max(found.logged("sampler_mismatch")) > 0.05  # the limit is for samplers of the current weights
    assert found.logged("ratio")[0] == pytest.approx(1, abs=1e-5)


def test_a_generator_that_differs_from_the_trainer_is_corrected(run: Run) -> None:
    class Other:
        """Another program, whose log-probabilities differ from the trainer's."""

        def __init__(self, model: Any, tokenizer: Any) -> None:
            self.inner = LocalGenerator(model, tokenizer)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def poll(self, timeout: float | None) -> list[Any]:
            done = self.inner.poll(timeout)
            return [(h, type(c)(c.tokens, c.logprobs - 0.01, *list(vars(c).values())[2:])) for h, c in done]

    found = run(0, generator=Other)
    assert found.logged("effective_sample_size") == [pytest.approx(1.0)] * 4
    assert found.logged("sampler_mismatch") == [pytest.approx(0.01, abs=1e-5)] * 4
    assert run(0).logged("effective_sample_size") == []


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generator", [LocalGenerator, ContinuousGenerator])
def test_a_generator_in_this_process_is_refused(generator: Any, run: Run) -> None:
    with pytest.raises(UserError, match=r"max_staleness: 1 needs a generator .* such as generator: \{name: process\}"):
        run(generator=generator)


@pytest.mark.parametrize("held", [FAST, NEVER])
def test_an_error_of_the_users_code_ends_the_run_with_its_message(held: int, run: Run) -> None:
    calls: list[int] = []

    def failing(answers: list[Trajectory]) -> list[float]:
        calls.append(len(answers))
        if len(calls) == 3:
            raise RuntimeError("CUDA out of memory")  # not of the trainer, which would repeat its step
        return by_tokens(answers)

    with pytest.raises(
        UserCodeError, match=r"reward reward .*on a batch of 4 trajectories \(rows:\d+ \.\.\. rows:\d+\)"
    ):
        run(held=held, reward=failing)
    assert len(calls) == 3


def test_a_reward_that_takes_too_long_is_interrupted(run: Run) -> None:
    from burnish.rewards.functions import NamedReward

    calls: list[int] = []

    def hanging(answers: list[Trajectory]) -> list[float]:
        calls.append(len(answers))
        if len(calls) == 3:
            time.sleep(60)
        return by_tokens(answers)

    began = time.monotonic()
    with pytest.raises(UserCodeError, match=r"exceeded its time limit of 0\.5 seconds"):
        run(reward=[NamedReward("slow", 1.0, hanging, timeout=0.5)])
    assert time.monotonic() - began < 30


def test_time_in_which_a_coroutine_cannot_run_is_not_its_time(run: Run) -> None:
    """The optimizer steps take longer than the limit of a reward that waits for a moment."""
    from burnish.rewards.functions import NamedReward

    async def waiting(answers: list[Trajectory]) -> list[float]:
        await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        return by_tokens(answers)

    class Long(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            time.sleep(0.4)

    one = NamedReward("waits", 1.0, waiting, timeout=0.3)
    found = run(reward=[one], rows=8, callbacks=(Long(),))
    assert len(found.logged("score")) == 2


# --- the queue ----------------------------------------------------------------------------------------------------


def steps(name: str, log: list[str], *progress: Progress) -> Steps[SampledBatch]:
    try:
        for i, one in enumerate(progress):
            log.append(f"{name}{i}")
            yield one
        log.append(f"{name} ends")
        return SampledBatch([], {})
    finally:
        log.append(f"{name} closes")


@pytest.mark.parametrize("in_rounds", [False, True])
def test_what_needs_other_processes_waits_until_it_is_taken(in_rounds: bool) -> None:
    ahead, log = Ahead(), []
    ahead.in_rounds = in_rounds
    for name in "ab":
        work = steps(name, log, Progress.MADE, Progress.TOGETHER, Progress.MADE)
        ahead.submit(Plan(0, 0, ()), work)
    ahead.advance()
    ahead.advance()
    assert log == (["a0", "a1"] if in_rounds else ["a0", "a1", "b0", "b1"])
    ahead.take()
    assert log[-3:] == ["a2", "a ends", "a closes"]
    ahead.finish()
    assert log[-3:] == ["b2", "b ends", "b closes"] and [result for _, result in ahead.plans()] == [
        SampledBatch([], {})
    ]


def test_a_batch_advances_until_it_has_to_wait_and_is_cancelled() -> None:
    ahead, log = Ahead(), []
    patience: list[float | None] = []

    def asking() -> Iterator[Progress]:
        while True:
            patience.append(ahead.patience())
            yield Progress.WAITING

    ahead.submit(Plan(0, 0, ()), steps("a", log, Progress.MADE, Progress.WAITING, Progress.WAITING))
    ahead.submit(Plan(1, 0, ()), asking())  # type: ignore[arg-type]
    ahead.advance()
    assert log == ["a0", "a1"]
    ahead.advance()
    assert log == ["a0", "a1", "a2"] and not patience
    ahead.take()
    ahead.advance()
    assert patience == [0.0] and ahead.patience() is None
    ahead.submit(Plan(2, 0, ()), steps("b", log, Progress.WAITING))
    ahead.close()
    assert len(ahead) == 0


def test_trajectories_survive_a_checkpoint(run: Run, tmp_path: Path) -> None:
    kept: list[Trajectory] = []
    summary = loaders.summary
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders, "summary", lambda batch: kept.extend(batch) or summary(batch))
        run(**KINDS["episodes"]())
    torch.save([to_plain(t) for t in kept], tmp_path / "state.pt")
    rows = {row.source: row for row in ROWS}
    again = [from_plain(x, rows[t.source]) for t, x in zip(kept, torch.load(tmp_path / "state.pt"), strict=True)]
    assert again == kept and any(len(t.turns) > 1 for t in kept)


def test_the_setting_is_a_count() -> None:
    assert PolicyGradientConfig().max_staleness == 0
    with pytest.raises(ValueError, match="max_staleness"):
        PolicyGradientConfig(max_staleness=-1)


# --- speed and learning -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environments", [None, "episodes"])
def test_rollouts_as_long_as_updates_take_no_time(environments: str | None, run: Run) -> None:
    """On a simulated clock, n batches and n updates of D seconds take 2nD seconds, of which (n - 1) D can be saved."""
    seconds, batches, now = 60.0, 4, 0.0

    class Simulated(Worker):
        """A worker that takes a fixed time for a batch of one or several turns, in which this process may compute."""

        def submit(self, requests: Any, version: int) -> list[int]:
            self.ready = now + seconds / turns
            return super().submit(requests, version)

        def poll(self, timeout: float | None) -> list[Any]:
            nonlocal now
            now = max(now, self.ready if timeout is None else min(self.ready, now + timeout))
            return super().poll(None) if now >= self.ready else []

    class Timed(PPO):
        def loss(self, network: Any, batch: Any) -> Any:
            nonlocal now
            now += seconds * len(batch.sources) / 4  # of four rollouts
            return super().loss(network, batch)

    def measured(staleness: int) -> float:
        nonlocal now
        now = 0.0
        settings = KINDS["episodes"]() if environments else {}
        run(staleness, generator=lambda m, t: Simulated(m, t, 0, []), kind=Timed, token_budget=40, **settings)
        return now

    turns = 4 if environments else 1  # of each batch; its episodes have at most as many
    alternating, overlapping = measured(0), measured(1)
    possible = (batches - 1) * (alternating - batches * seconds) / batches
    assert alternating - overlapping >= 0.8 * possible
    if not environments:
        assert (alternating, overlapping) == (2 * batches * seconds, (batches + 1) * seconds)


def test_a_policy_learns_from_stale_batches(run: Run) -> None:
    def digits(answers: list[Trajectory]) -> list[float]:
        return [float(any(c.isdigit() for c in a.text)) for a in answers]

    found = run(
        kind=GRPO,
        reward=digits,
        sampling=Sampling(max_new_tokens=3, samples=8),
        mini_batches=1,
        kl_coef=0.0,
        arguments={"batch": 8, "num_train_epochs": 10},
    )
    scores = found.logged("score")
    assert math.fsum(scores[-3:]) / 3 > math.fsum(scores[:3]) / 3 + 0.3


@pytest.mark.acceptance
def test_two_processes_of_different_speeds_give_the_same_bytes_and_resume(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = Path(__file__).with_name("ahead_job.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*command, job, tmp_path], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ends = torch.load(tmp_path / "end.pt")
    for kind in ("completions", "rounds", "sharded"):
        straight, *others = (ends[kind, name] for name in ("straight", "other", "resumed"))
        assert all(torch.equal(weight, other[name]) for other in others for name, weight in straight.items())
    for name, weight in ends["completions", "straight"].items():
        torch.testing.assert_close(ends["sharded", "straight"][name], weight, atol=1e-5, rtol=1e-5)
    assert not torch.equal(ends["rounds", "other"]["lm_head.weight"], ends["completions", "other"]["lm_head.weight"])
