"""From prompts to scored experience: order, alignment, scores of an update, evaluation, and what is written down."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch

from burnish import PPO, UserError
from burnish.generate.sampling import Sampling
from burnish.generate.stopping import eos_ids
from burnish.render.renderer import Renderer
from burnish.render.truncate import Truncation
from burnish.report.metrics import Recorder, read_lines
from burnish.rewards.functions import NamedReward
from burnish.rl.collect import collect
from burnish.types import Prompt, Trajectory

SHORT = Sampling(max_new_tokens=5)


def tokens_reward(trajectories: list[Trajectory]) -> list[float]:
    return [t.tokens.sum().item() % 9 / 4 - 1 for t in trajectories]


def prompt(text: str, number: int) -> Prompt:
    return Prompt(({"role": "user", "content": text},), {"number": number}, f"prompts:{number}")


def prompts(n: int) -> list[Prompt]:
    return [prompt(f"{i} + 1", i) for i in range(n)]


@pytest.fixture
def trainer_of(make_trainer: Any, tiny_llama: Any) -> Callable[..., Any]:
    def make(
        rows: list[Prompt],
        reward: Any = tokens_reward,
        sampling: Sampling = SHORT,
        own: dict[str, Any] | None = None,
        lr: float = 1e-2,
        **settings: Any,
    ) -> Any:
        model = tiny_llama()
        model.generation_config.eos_token_id = [2, *range(15, 25)]
        return make_trainer(PPO(reward, sampling, **settings), model, rows, own=own, lr=lr)

    return make


# --- collecting ---------------------------------------------------------------------------------------------------


def test_every_prompt_gets_its_samples_in_order(trainer_of: Any, tiny_tokenizer: Any) -> None:
    rows = prompts(6)
    trainer = trainer_of(rows)
    tokens = [Renderer(tiny_tokenizer).prompt(row.messages, row.source) for row in rows]

    def sampled(indices: list[int], samples: int, iteration: int) -> list[Trajectory]:
        sampling = Sampling(max_new_tokens=5, samples=samples)
        rewards = [NamedReward("tokens", 1.0, tokens_reward)]
        generator = trainer.method.sampler.bind(trainer.engine, trainer.run)
        return collect(rows, tokens, indices, iteration, sampling, rewards, trainer.engine, trainer.run, generator)

    four = sampled([4, 0, 2], 4, 7)
    assert [t.source for t in four] == [f"prompts:{i}" for i in (4, 0, 2) for _ in range(4)]
    for t in four:
        number, (sequence,) = t.columns["number"], t.sequences
        assert sequence.tokens.tolist() == [*tokens[number], *t.tokens]
        assert sequence.loss_mask.tolist() == [False] * len(tokens[number]) + [True] * len(t.tokens)
        assert t.prompt == rows[number].messages and sequence.source == t.source
        assert t.score == t.rewards["tokens"] == tokens_reward([t])[0]
    groups = [[t.tokens.tolist() for t in four[i : i + 4]] for i in (0, 4, 8)]
    assert all(len({tuple(ids) for ids in group}) == 4 for group in groups)
    # a completion depends on its prompt, its number and the iteration, not on what else is sampled
    assert [t.tokens.tolist() for t in sampled([2, 4], 2, 7)] == groups[2][:2] + groups[0][:2]
    assert sampled([4], 4, 8)[0].tokens.tolist() != groups[0][0]


def test_end_tokens_are_the_tokenizers_and_the_models(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    model = tiny_llama()
    assert eos_ids(model, tiny_tokenizer) == {2}
    model.generation_config.eos_token_id = [0, 9]  # 0 is a token like any other
    assert eos_ids(model, tiny_tokenizer) == {0, 2, 9}
    model.generation_config.eos_token_id = None
    assert eos_ids(model, tiny_tokenizer) == {2}


@pytest.mark.parametrize("too_long", ["drop", "truncate_left"])
def test_long_prompts_leave_prompts_and_rows_aligned(too_long: str, trainer_of: Any, tiny_tokenizer: Any) -> None:
    rows = [prompt("x" * 60 if i in (0, 3, 4) else f"{i}" * (i + 1), i) for i in range(8)]
    seen: list[Trajectory] = []

    def watching(answers: list[Trajectory]) -> list[float]:
        seen.extend(answers)
        return tokens_reward(answers)

    longest = len(Renderer(tiny_tokenizer).prompt(rows[7].messages))
    truncation = Truncation.model_validate({"max_length": longest + 5, "too_long": too_long})
    trainer = trainer_of(rows, watching, own={"truncation": truncation, "eval_dataset": rows})
    loader = trainer.get_train_dataloader()
    kept = [1, 2, 5, 6, 7] if too_long == "drop" else list(range(8))
    assert [row.source for row in loader.rows] == [f"prompts:{i}" for i in kept]
    for row, tokens in zip(loader.rows, loader.prompts, strict=True):
        text = tiny_tokenizer.decode(tokens)
        assert row.messages[0]["content"][:40].lstrip("x") in text
        if row.columns["number"] not in (0, 3, 4):
            assert tokens == Renderer(tiny_tokenizer).prompt(row.messages, row.source)
    # a completion of the greatest length still fits
    assert max(len(tokens) for tokens in loader.prompts) + SHORT.max_new_tokens <= longest + 5
    trainer.evaluate()
    assert {a.columns["number"] for a in seen} == set(kept)
    assert all(a.prompt == rows[a.columns["number"]].messages for a in seen)


def test_a_max_length_without_room_for_a_completion_is_refused(trainer_of: Any) -> None:
    trainer = trainer_of(prompts(4), own={"truncation": Truncation(max_length=5)})
    with pytest.raises(UserError, match=r"max_length: 5 leaves no room for a prompt before a completion of 5 tokens"):
        trainer.train()
    with pytest.raises(UserError, match=r"prompts:0: \d+ tokens and 5 for the completion, max_length 12"):
        trainer_of(prompts(4), own={"truncation": Truncation(max_length=12)}).train()


def test_dropping_all_prompts_is_an_error(trainer_of: Any) -> None:
    truncation = Truncation(max_length=12, too_long="drop")
    with pytest.raises(UserError, match="0 prompts do not fill one batch of 4"):
        trainer_of(prompts(4), own={"truncation": truncation}).train()
    with pytest.raises(UserError, match="no prompts to evaluate on"):
        trainer_of(prompts(4), own={"truncation": truncation, "eval_dataset": prompts(4)}).evaluate()


def test_a_reward_cannot_change_rollouts_rows_or_later_results(trainer_of: Any, tiny_tokenizer: Any) -> None:
    def spoiling(answers: list[Trajectory]) -> list[float]:
        scores = tokens_reward(answers)
        answers.sort(key=lambda a: a.text)
        for a in answers:
            a.prompt[0]["content"] = "?"
            a.columns.clear()  # type: ignore[attr-defined]
        answers.pop()
        os.chdir("/")
        random.seed(0)
        torch.manual_seed(0)
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        return scores

    def noise(answers: list[Trajectory]) -> list[float]:
        return [a.columns["number"] + random.random() + torch.rand(()).item() for a in answers]

    def state() -> list[Any]:
        random_states = random.getstate(), torch.get_rng_state().tolist()
        return [os.getcwd(), torch.is_grad_enabled(), torch.get_default_dtype(), *random_states]

    rows = prompts(4)
    trainer = trainer_of(rows)
    tokens = [Renderer(tiny_tokenizer).prompt(row.messages, row.source) for row in rows]

    def rollouts(reward: Any, iteration: int = 7) -> list[Trajectory]:
        rewards = [NamedReward("tokens", 2.0, reward), NamedReward("noise", 1.0, noise)]
        generator = trainer.method.sampler.bind(trainer.engine, trainer.run)
        sampling = Sampling(max_new_tokens=5, samples=2)
        return collect(rows, tokens, [3, 0, 1], iteration, sampling, rewards, trainer.engine, trainer.run, generator)

    well = rollouts(tokens_reward)
    random.seed(5)  # what a reward draws depends on the iteration, not on what was drawn before
    torch.manual_seed(5)
    before = state()
    assert rollouts(spoiling) == well
    assert state() == before
    assert rows == prompts(4)
    assert [t.rewards["noise"] for t in well] != [t.rewards["noise"] for t in rollouts(tokens_reward, 8)]


# --- evaluation and samples ---------------------------------------------------------------------------------------


def test_evaluations_use_the_same_seeds_and_hand_computed_intervals(trainer_of: Any, tmp_path: Any) -> None:
    held_out = [prompt(f"9 - {i}", 100 + i) for i in range(10)]
    trainer = trainer_of(
        prompts(8),
        own={"eval_dataset": held_out, "recorder": Recorder(tmp_path)},
        sampling=Sampling(max_new_tokens=5, samples=2),
    )
    first, again = trainer.evaluate(), trainer.evaluate()
    assert "eval_win_rate" not in first and first["eval_kl"] == first["eval_kl_low"] == first["eval_kl_high"] == 0.0
    assert {name: again[name] for name in first} == first
    assert (again["eval_win_rate"], again["eval_win_rate_low"], again["eval_win_rate_high"]) == (0.5, 0.5, 0.5)
    trainer.train()
    after = trainer.evaluate()
    rows = [row for row in read_lines(tmp_path / "samples.jsonl") if row["kind"] == "eval"]
    assert [row["source"] for row in rows] == [row.source for row in held_out] * 3
    assert [row["step"] for row in rows] == [0] * 20 + [trainer.state.global_step] * 10
    assert rows[:10] == rows[10:20]
    before, now = ([row["score"] for row in rows[i : i + 10]] for i in (0, 20))
    half = 1.959964 * statistics.stdev(now) / math.sqrt(10)
    assert after["eval_score"] == pytest.approx(statistics.mean(now))
    assert after["eval_score_low"] == pytest.approx(statistics.mean(now) - half)
    assert after["eval_score_high"] == pytest.approx(statistics.mean(now) + half)
    won = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in zip(now, before, strict=True)]
    assert after["eval_win_rate"] == pytest.approx(sum(won) / 10)
    half = 1.959964 * statistics.stdev(won) / math.sqrt(10)
    assert after["eval_win_rate_high"] == pytest.approx(min(sum(won) / 10 + half, 1.0))
    assert before != now and after["eval_kl"] != 0.0
    assert 0 < after["eval_stopped"] <= 1 and 1 <= after["eval_length"] <= 5


def test_an_evaluation_changes_nothing_in_training(trainer_of: Any, weights: Any) -> None:
    plain = trainer_of(prompts(8))
    plain.train()
    measured = trainer_of(prompts(8), own={"eval_dataset": prompts(3)})
    measured.evaluate()
    measured.train()
    assert weights(measured.network) == weights(plain.network)


def test_rows_of_samples(trainer_of: Any, tmp_path: Any) -> None:
    shown: list[list[dict[str, Any]]] = []
    rewards = [
        NamedReward("tokens", 2.0, tokens_reward),
        NamedReward("zero", 1.0, lambda answers: [0.0] * len(answers)),
    ]
    trainer = trainer_of(
        prompts(24),
        rewards,
        own={"recorder": Recorder(tmp_path), "show_samples": shown.append},
        epochs=1,
        mini_batches=2,
        show_every=2,
    )
    trainer.train()
    rows = read_lines(tmp_path / "samples.jsonl")
    assert rows == json.loads(json.dumps([row for table in shown for row in table]))
    assert [row["step"] for row in rows] == [step for step in (0, 4, 8) for _ in range(4)]  # of six iterations
    for row in rows:
        assert set(row) == {"step", "kind", "prompt", "completion", "score", "rewards", "finish_reason", "source"}
        assert row["kind"] == "train" and row["finish_reason"] in ("stop", "length")
        assert row["prompt"] == f"{row['source'].removeprefix('prompts:')} + 1"
        assert row["rewards"]["zero"] == 0.0 and row["score"] == 2 * row["rewards"]["tokens"]
