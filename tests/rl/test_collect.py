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
from burnish.render.renderer import Renderer
from burnish.render.truncate import Truncation
from burnish.report.metrics import Recorder, read_lines
from burnish.rewards.functions import NamedReward
from burnish.rl.collect import (
    Rollout,
    collect,
    eos_ids,
    final_scores,
    interval,
    mean_sampler_mismatch,
    summary,
    value_metrics,
    with_arrays,
)
from burnish.types import Answer, Example, Prompt, Sequence

SHORT = Sampling(max_new_tokens=5)


def tokens_reward(answers: list[Answer]) -> list[float]:
    return [sum(a.tokens) % 9 / 4 - 1 for a in answers]


def prompt(text: str, number: int) -> Prompt:
    return Prompt(({"role": "user", "content": text},), {"number": number}, f"prompts:{number}")


def prompts(n: int) -> list[Prompt]:
    return [prompt(f"{i} + 1", i) for i in range(n)]


def rollout(score: float, finish: str = "stop", tokens: int = 2) -> Rollout:
    answer = Answer(({"role": "user", "content": "?"},), "!", (7,) * tokens, finish, {}, "row 1")
    return Rollout(Sequence((5, *answer.tokens), (False,) + (True,) * tokens, "row 1"), answer, score, {"one": score})


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

    def sampled(indices: list[int], samples: int, iteration: int) -> list[Rollout]:
        sampling = Sampling(max_new_tokens=5, samples=samples)
        rewards = [NamedReward("tokens", 1.0, tokens_reward)]
        generator = trainer.method.sampler.bind(trainer.context)
        return collect(rows, tokens, indices, iteration, sampling, rewards, trainer.context, generator)

    four = sampled([4, 0, 2], 4, 7)
    assert [r.answer.source for r in four] == [f"prompts:{i}" for i in (4, 0, 2) for _ in range(4)]
    for r in four:
        number = r.answer.columns["number"]
        assert tuple(r.sequence.tokens) == tokens[number] + r.answer.tokens
        assert tuple(r.sequence.loss_mask) == (False,) * len(tokens[number]) + (True,) * len(r.answer.tokens)
        assert r.answer.prompt == rows[number].messages and r.sequence.source == r.answer.source
        assert r.score == r.rewards["tokens"] == tokens_reward([r.answer])[0]
    groups = [[r.answer.tokens for r in four[i : i + 4]] for i in (0, 4, 8)]
    assert all(len(set(group)) == 4 for group in groups)
    # a completion depends on its prompt, its number and the iteration, not on what else is sampled
    assert [r.answer.tokens for r in sampled([2, 4], 2, 7)] == groups[2][:2] + groups[0][:2]
    assert sampled([4], 4, 8)[0].answer.tokens != groups[0][0]


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
    seen: list[Answer] = []

    def watching(answers: list[Answer]) -> list[float]:
        seen.extend(answers)
        return tokens_reward(answers)

    longest = len(Renderer(tiny_tokenizer).prompt(rows[7].messages))
    length = Truncation.model_validate({"max_length": longest + 5, "too_long": too_long})
    trainer = trainer_of(rows, watching, own={"length": length, "eval_dataset": rows})
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


def test_a_length_without_room_for_a_completion_is_told(trainer_of: Any) -> None:
    trainer = trainer_of(prompts(4), own={"length": Truncation(max_length=5)})
    with pytest.raises(UserError, match=r"max_length: 5 leaves no room for a prompt beside a completion of 5 tokens"):
        trainer.train()
    with pytest.raises(UserError, match=r"prompts:0: .* tokens, max_length 7"):
        trainer_of(prompts(4), own={"length": Truncation(max_length=12)}).train()


def test_prompts_that_are_all_dropped_are_told(trainer_of: Any) -> None:
    length = Truncation(max_length=12, too_long="drop")
    with pytest.raises(UserError, match="0 prompts are less than one batch of 4"):
        trainer_of(prompts(4), own={"length": length}).train()
    with pytest.raises(UserError, match="nothing to evaluate on"):
        trainer_of(prompts(4), own={"length": length, "eval_dataset": prompts(4)}).evaluate()


def test_a_reward_changes_neither_rollouts_nor_rows_nor_what_comes_after(trainer_of: Any, tiny_tokenizer: Any) -> None:
    def spoiling(answers: list[Answer]) -> list[float]:
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

    def noise(answers: list[Answer]) -> list[float]:
        return [a.columns["number"] + random.random() + torch.rand(()).item() for a in answers]

    def state() -> list[Any]:
        random_states = random.getstate(), torch.get_rng_state().tolist()
        return [os.getcwd(), torch.is_grad_enabled(), torch.get_default_dtype(), *random_states]

    rows = prompts(4)
    trainer = trainer_of(rows)
    tokens = [Renderer(tiny_tokenizer).prompt(row.messages, row.source) for row in rows]

    def rollouts(reward: Any, iteration: int = 7) -> list[Rollout]:
        rewards = [NamedReward("tokens", 2.0, reward), NamedReward("noise", 1.0, noise)]
        generator = trainer.method.sampler.bind(trainer.context)
        sampling = Sampling(max_new_tokens=5, samples=2)
        return collect(rows, tokens, [3, 0, 1], iteration, sampling, rewards, trainer.context, generator)

    well = rollouts(tokens_reward)
    random.seed(5)  # what a reward draws depends on the iteration, not on what was drawn before
    torch.manual_seed(5)
    before = state()
    assert rollouts(spoiling) == well
    assert state() == before
    assert rows == prompts(4)
    assert [r.rewards["noise"] for r in well] != [r.rewards["noise"] for r in rollouts(tokens_reward, 8)]


# --- numbers ------------------------------------------------------------------------------------------------------


def test_final_scores_by_hand() -> None:
    rollouts = [rollout(-3.0), rollout(0.5, "length"), rollout(2.0, "context"), rollout(1.0)]
    expected = {
        (): [-3.0, 0.5, 2.0, 1.0],
        (2.0,): [-6.0, 1.0, 4.0, 2.0],
        (2.0, 1.5): [-1.5, 1.0, 1.5, 1.5],
        (2.0, 1.5, "subtract", 3.0): [-1.5, -2.0, -1.5, 1.5],
        (1.0, None, "replace", -4.0): [-3.0, -4.0, -4.0, 1.0],
    }
    for arguments, scores in expected.items():
        assert final_scores(rollouts, *arguments).tolist() == scores


def test_summary_by_hand() -> None:
    found = summary([rollout(1.0), rollout(1.0, "length", 6), rollout(4.0), rollout(0.0, "context", 2)])
    assert found == {
        "score": 1.5,
        "score_std": 1.5,
        "ties": 0.25,
        "length": 3.0,
        "stopped": 0.5,
        "reward_one": 1.5,
    }


def test_interval_by_hand() -> None:
    found = interval("x", [1.0, 2.0, 3.0, 6.0])
    half = 1.959964 * math.sqrt(14 / 3 / 4)  # squares around 3: 4 + 1 + 0 + 9 over n - 1
    assert found == pytest.approx({"x": 3.0, "x_low": 3 - half, "x_high": 3 + half})
    assert interval("x", [2.0]) == {"x": 2.0}


def test_the_gap_is_a_mean_over_learned_tokens() -> None:
    def examples(*sampled: float) -> list[Example]:
        rows = (((9.0, *sampled[:2]), (False, True, True)), ((9.0, sampled[2], 9.0), (False, True, False)))
        arrays = [{"old_logprobs": (0.0,) * 3, "sampler_logprobs": theirs} for theirs, _ in rows]
        return [Example((Sequence((5,) * 3, on, "row", a),)) for (_, on), a in zip(rows, arrays, strict=True)]

    assert mean_sampler_mismatch(examples(0.1, -0.2, 0.0), 0.11) == pytest.approx(0.1)
    for bad in ((0.1, -0.2, 0.0), (math.nan,) * 3, (-math.inf,) * 3):
        with pytest.raises(RuntimeError, match="would not be what was sampled"):
            mean_sampler_mismatch(examples(*bad), 0.09)


def test_explained_variance_by_hand() -> None:
    mask = torch.tensor([[True, True, True, True, False]])
    returns = torch.tensor([[0.0, 2.0, 4.0, 6.0, 50.0]])
    exact = value_metrics(returns, returns + 3, mask)
    assert exact == pytest.approx({"returns": 3.0, "values": 6.0, "explained_variance": 1.0})
    none = value_metrics(returns, torch.full((1, 5), 3.0), mask)
    assert none["explained_variance"] == 0.0
    half = value_metrics(returns, torch.tensor([[0.0, 2.0, 0.0, 2.0, 9.0]]), mask)
    assert half["explained_variance"] == pytest.approx(1 - 4 / 5)  # errors 0 0 4 4, variance 4; of the returns 5
    assert value_metrics(torch.ones(1, 5), returns, mask)["explained_variance"] == 0.0


def test_arrays_are_cut_to_each_sequence() -> None:
    examples = [Example((Sequence((5,) * n, (False,) + (True,) * (n - 1), "row"),)) for n in (2, 3)]
    made = with_arrays(examples, a=torch.arange(6.0).view(2, 3))
    arrays = [{name: values.tolist() for name, values in e.sequences[0].arrays.items()} for e in made]
    assert arrays == [{"a": [0.0, 1.0]}, {"a": [3.0, 4.0, 5.0]}]


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
