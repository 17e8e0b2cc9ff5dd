"""Trajectories of one and of several turns: what aligns with what, and advantages across what was not sampled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish import GRPO
from burnish.generate.protocol import Completion
from burnish.generate.sampling import Sampling
from burnish.math.advantages import gae, group, token_rewards
from burnish.models.batching import collate
from burnish.rl.trajectory import (
    begin,
    learned_arrays,
    shares,
    with_context,
    with_learned_arrays,
    with_rewritten_history,
    with_scores,
    with_turn,
)
from burnish.types import Example, Prompt, Sequence, Trajectory, Turn

ROW = Prompt(({"role": "user", "content": "12 + 30 ="},), {"answer": "42"}, "prompts.jsonl:17")


def completion(tokens: list[int], finish_reason: str = "stop") -> Completion:
    ids = np.array(tokens, np.int64)
    return Completion(ids, -ids / 10, None, None, finish_reason, version=0)


def test_a_completion_is_a_trajectory_of_one_turn() -> None:
    trajectory = with_turn(begin(ROW, [5, 6]), completion([42, 2]), Turn("42", "stop"))
    logprobs = {"sampler_logprobs": [0.0, 0.0, -4.2, -0.2]}
    sequence = Sequence([5, 6, 42, 2], [False, False, True, True], "prompts.jsonl:17", logprobs)
    expected = Trajectory(ROW.messages, (Turn("42", "stop"),), (sequence,), "stop", ROW.columns, ROW.source)
    assert trajectory == expected
    assert trajectory.text == "42" and trajectory.tokens.tolist() == [42, 2] and trajectory.stopped
    scored = with_scores(trajectory, 1.5, {"exact": 1.5}, [0.5, 1.0])
    assert scored.sequences[0].arrays["step_rewards"].tolist() == [0.0, 0.0, 0.5, 1.0]
    assert (scored.score, scored.rewards, trajectory.rewards) == (1.5, {"exact": 1.5}, {})


def test_a_trajectory_from_text_is_one_to_try_a_reward_on() -> None:
    trajectory = Trajectory.from_text("42", tokens=[7, 8], columns={"answer": "42"})
    assert (trajectory.text, trajectory.columns, trajectory.finish_reason) == ("42", {"answer": "42"}, "stop")
    assert trajectory.tokens.tolist() == [7, 8] and Trajectory.from_text("").tokens.tolist() == []


ids = st.lists(st.integers(1, 99), max_size=5)
parts = st.lists(st.tuples(st.sampled_from(["turn", "context", "rewritten"]), ids), max_size=6)


@given(st.lists(st.integers(1, 99), min_size=1, max_size=5), parts)
def test_sampled_tokens_are_kept_and_arrays_align(prompt: list[int], parts: list[tuple[str, list[int]]]) -> None:
    trajectory = begin(ROW, prompt)
    sampled, sequences = [], [[(token, False) for token in prompt]]
    for kind, tokens in parts:
        if kind == "turn":
            trajectory = with_turn(trajectory, completion(tokens, "length"), Turn("x", "length"))
            sampled += tokens
            sequences[-1] += [(token, True) for token in tokens]
        elif kind == "context":
            trajectory = with_context(trajectory, tokens)
            sequences[-1] += [(token, False) for token in tokens]
        else:
            trajectory = with_rewritten_history(trajectory, [1, *tokens])
            sequences.append([(token, False) for token in [1, *tokens]])
    assert [list(zip(s.tokens.tolist(), s.loss_mask.tolist(), strict=True)) for s in trajectory.sequences] == sequences
    assert trajectory.tokens.tolist() == sampled
    assert len(trajectory.turns) == sum(kind == "turn" for kind, _ in parts)
    for s in trajectory.sequences:
        assert s.arrays["sampler_logprobs"].tolist() == np.where(s.loss_mask, -s.tokens / 10, 0.0).tolist()
    scored = with_scores(trajectory, 0.0, {}, [float(token) for token in sampled])
    mask, arrays = learned_arrays([Example(scored.sequences)])
    assert mask.tolist() == [[True] * len(sampled)]
    assert arrays["step_rewards"].tolist() == [sampled]
    assert arrays["sampler_logprobs"].tolist() == [[-token / 10 for token in sampled]]


# --- sampled tokens as tensors ------------------------------------------------------------------------------------


def test_learned_arrays_round_trip() -> None:
    one = with_turn(begin(ROW, [5, 6]), completion([42, 2]), Turn("42", "stop"))
    two = with_turn(
        with_context(with_turn(begin(ROW, [5]), completion([7]), Turn("", "stop")), [8, 8]),
        completion([9, 2]),
        Turn("", "stop"),
    )
    three = with_turn(
        with_rewritten_history(with_turn(begin(ROW, [5]), completion([7]), Turn("", "stop")), [8]),
        completion([9]),
        Turn("", "stop"),
    )
    examples = [Example(t.sequences) for t in (one, two, three)]
    mask, arrays = learned_arrays(examples)
    assert mask.tolist() == [[True, True, False], [True, True, True], [True, True, False]]
    assert arrays["sampler_logprobs"].tolist() == [[-4.2, -0.2, 0.0], [-0.7, -0.9, -0.2], [-0.7, -0.9, 0.0]]
    made = with_learned_arrays(examples, a=torch.arange(9.0).view(3, 3))
    assert [[s.arrays["a"].tolist() for s in e.sequences] for e in made] == [
        [[0.0, 0.0, 0.0, 1.0]],
        [[0.0, 3.0, 0.0, 0.0, 4.0, 5.0]],
        [[0.0, 6.0], [0.0, 7.0]],
    ]
    assert all(set(s.arrays) == {"a"} and s.arrays["a"].dtype == np.float64 for e in made for s in e.sequences)
    back = learned_arrays(with_learned_arrays(examples, **arrays))
    assert torch.equal(back[0], mask) and torch.equal(back[1]["sampler_logprobs"], arrays["sampler_logprobs"])


@pytest.mark.parametrize("rewritten", [False, True])
def test_advantages_skip_tokens_that_were_not_sampled(rewritten: bool) -> None:
    """5 + 100 + 5 tokens, V = 0.5, R = 1, lambda 0.95: the last advantage of turn 1 is 0.3869, not -0.4947."""
    first = with_turn(begin(ROW, [1]), completion([7] * 5), Turn("a", "stop"))
    between = with_rewritten_history(first, [8] * 100) if rewritten else with_context(first, [8] * 100)
    trajectory = with_turn(between, completion([9] * 5), Turn("b", "stop"))
    mask, arrays = learned_arrays([Example(trajectory.sequences)])
    values = torch.full_like(arrays["sampler_logprobs"], 0.5)
    rewards = token_rewards(torch.tensor([1.0]), torch.zeros(mask.shape), mask, 0.0)
    advantages, _ = gae(rewards, values, mask, 1.0, 0.95)
    (made,) = with_learned_arrays([Example(trajectory.sequences)], advantages=advantages)
    first_turn = made.sequences[0]
    assert first_turn.arrays["advantages"][5] == pytest.approx(0.5 * 0.95**5, abs=1e-6)
    assert round(float(first_turn.arrays["advantages"][5]), 4) == 0.3869
    assert all((s.arrays["advantages"][~s.loss_mask] == 0.0).all() for s in made.sequences)


def test_groups_count_trajectories_and_not_sequences() -> None:
    one = with_turn(begin(ROW, [1]), completion([7, 7]), Turn("a", "stop"))
    two = with_turn(with_rewritten_history(one, [8]), completion([9]), Turn("b", "stop"))
    mask, _ = learned_arrays([Example(t.sequences) for t in (one, two)])
    assert mask.shape == (2, 3)
    scores = group(torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.long), "mean")
    rewards = token_rewards(scores, torch.zeros(mask.shape), mask, 0.0)
    assert rewards.tolist() == [[0.0, 0.5, 0.0], [0.0, 0.0, -0.5]]


def test_shares_give_a_trajectory_of_several_sequences_the_weight_of_one() -> None:
    """The mean over 3 tokens in one sequence, and over 1 + 2 tokens in two sequences."""
    one = Example((Sequence([1, 2, 3, 4], [False, True, True, True], "a"),))
    two = Example((Sequence([1, 2], [False, True], "b"), Sequence([1, 9, 3, 4], [False, False, True, True], "b")))
    assert shares([one, two]).tolist() == [[1, 1, 1], [1 / 3, 2 / 3, 2 / 3]]
    batch = collate(with_learned_arrays([one, two], share=shares([one, two])), 0)
    losses = torch.zeros(3, 4)
    losses[0, 1:], losses[1, 1], losses[2, 2:] = torch.tensor([1.0, 2, 6]), 1.0, torch.tensor([2.0, 6])
    term = GRPO(len, Sampling(samples=2))._reduced(losses, batch)  # type: ignore[arg-type]
    assert term.unit == "trajectories" and batch.counts["trajectories"] == 2
    torch.testing.assert_close(term.total / 2, torch.tensor(3.0))
