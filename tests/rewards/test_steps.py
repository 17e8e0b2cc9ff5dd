"""Rewards of steps: where they lie, what they sum up to, and that PPO gets them on the tokens that were sampled."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from builders import word_tokenizer
from burnish import PPO, StepValue, config
from burnish.config import run as pipeline
from burnish.errors import UserError
from burnish.generate.sampling import Sampling
from burnish.math import advantages
from burnish.render.renderer import Renderer
from burnish.render.solutions import step_ends, step_tokens
from burnish.report.metrics import read_metrics
from burnish.rewards.functions import NamedReward
from burnish.rewards.scoring import score
from burnish.rewards.steps import StepReward
from burnish.types import Messages, Prompt, Trajectory

MONTE_CARLO = {"lam": 1.0, "whiten": False}
QUESTION: Messages = ({"role": "user", "content": "3+4-2=?"},)


@pytest.fixture
def answer(tiny_tokenizer):
    def make(text: str, finish: str = "stop") -> Trajectory:
        tokens = tuple(tiny_tokenizer.encode(text, add_special_tokens=False))
        tokens += (tiny_tokenizer.eos_token_id,) * (finish == "stop")
        return Trajectory.from_text(text.strip(), QUESTION, tokens=tokens, finish_reason=finish, source="p.jsonl:1")

    return make


@pytest.fixture
def reward(tiny_llama, tiny_tokenizer):
    def make(**settings: Any) -> StepReward:
        torch.manual_seed(1)
        network = StepValue().prepare(tiny_llama(), tiny_tokenizer)
        torch.nn.init.normal_(network.critic.value.weight)  # type: ignore[union-attr, arg-type]
        return StepReward(network, tiny_tokenizer, **settings)

    return make


def value(reward: StepReward, text: str) -> float:
    """V of a question and what follows, by transformers' own forward pass and the head's weights."""
    tokenizer, body, head = reward.tokenizer, reward.network.policy, reward.network.critic
    ids = [*Renderer(tokenizer).prompt(QUESTION), *tokenizer.encode(text, add_special_tokens=False)]
    assert callable(body)
    hidden = body(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]
    layer: Any = getattr(head, "value")  # noqa: B009
    return math.tanh((hidden @ layer.weight[0] + layer.bias[0]).item())


def test_each_step_is_rewarded_by_the_difference_of_values(reward, answer):
    score_ = reward()
    text = "3+4=7\n7-2=5\n"
    (rewards,) = score_([answer(text)])
    first, second = value(score_, text[:6]), value(score_, text)
    expected = [0.0] * 13  # twelve characters and the end token
    expected[5], expected[11] = first, second - first
    assert rewards == pytest.approx(expected, abs=1e-6)
    # differences telescope: the last value less that of the start, which is 0
    assert sum(rewards) == pytest.approx(second, abs=1e-6)
    (raw,) = reward(steps="raw")([answer(text)])
    expected[11] = second
    assert raw == pytest.approx(expected, abs=1e-6)


def test_an_episode_without_turns_has_no_rewards(reward, answer):
    failed = replace(answer("", "error"), turns=())
    assert reward()([failed, answer("5\n")])[0] == []


def test_scores_do_not_depend_on_the_batch(reward, answer):
    score_ = reward(token_budget=60)
    answers = [answer("3+4=7\n7-2=5\n"), answer("9\n"), answer("1\n2\n3\n4\n"), answer("5\n", "length")]
    alone = [score_([one])[0] for one in answers]
    for values, expected in zip(score_(answers), alone, strict=True):
        assert values == pytest.approx(expected, abs=1e-5)


def test_a_question_is_computed_once_for_its_answers(reward, answer, monkeypatch):
    widths = []
    score_ = reward()
    run = score_.network.values
    monkeypatch.setattr(score_.network, "values", lambda batch: (widths.append(batch.tokens.numel()), run(batch))[1])
    answers = [answer("3+4=7\n7-2=5\n"), answer("9\n"), answer("1\n2\n3\n")]
    apart = sum((score_([one]), widths.pop())[1] for one in answers)
    score_(answers)
    asked = len(Renderer(score_.tokenizer).prompt(QUESTION))
    assert widths == [apart - 2 * (asked - 1)]


@pytest.mark.parametrize("text", ["3+4=7\n7-2", "3+4=7", "", "\n\n"])
def test_an_answer_whose_last_step_does_not_end_fails(text, reward, answer):
    for finish in ("stop", "length"):
        if text or finish == "stop":
            (rewards,) = reward()([answer(text, finish)])
            assert sum(rewards) == pytest.approx(-1.0)


def test_an_answer_that_was_cut_off_fails_even_at_the_end_of_a_step(reward, answer):
    (rewards,) = reward()([answer("3+4=7\n7-2=5\n", "length")])
    assert sum(rewards) == pytest.approx(-1.0) and rewards[5] != 0 and rewards[11] != 0
    (raw,) = reward(steps="raw")([answer("3+4=7\n7-2=5\n", "length")])
    assert raw[11] == -1.0


def test_another_tokenizer_is_refused(reward, answer):
    foreign = answer("3+4=7\n")
    other = Trajectory.from_text("what the policy wrote", QUESTION, tokens=foreign.tokens, source="p.jsonl:7")
    with pytest.raises(UserError, match=r"p\.jsonl:7: the value model's tokenizer decodes '3\+4=7"):
        reward()([other])


# --- where steps end -----------------------------------------------------------------------------------------------


def merged(*pieces: str) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words and their ends, in which a delimiter may be a part of a token."""
    return word_tokenizer("<unk>", "<end>", *pieces, eos_token="<end>", unk_token="<unk>")


def test_steps_end_where_their_delimiter_is_complete(tiny_tokenizer):
    tokens = tuple(tiny_tokenizer.encode("ab\ncd\n\n\ne", add_special_tokens=False))
    assert step_ends(tiny_tokenizer, tokens) == [2, 5]  # blank lines are no steps, nor is what is not ended
    tokens = tuple(tiny_tokenizer.encode("a;;b;c;;", add_special_tokens=False))
    assert step_ends(tiny_tokenizer, tokens, ";;") == [2, 7]


def test_a_delimiter_inside_a_token_ends_a_step_there():
    tokenizer = merged("so 7", ".\n", "\n\n", "7.\nThen")
    dot, blank, over = (tokenizer.get_vocab()[piece] for piece in (".\n", "\n\n", "7.\nThen"))
    so = tokenizer.get_vocab()["so 7"]
    assert step_ends(tokenizer, (so, dot, so, blank, 1)) == [1, 3]
    assert step_ends(tokenizer, (over, so, dot)) == [0, 2]


def test_steps_end_where_training_put_their_values(tiny_tokenizer):
    steps = [step_tokens(Renderer(tiny_tokenizer), text) for text in ("3+4=7", "7-2=5", "so 5")]
    tokens = sum(steps, ())
    ends = [len(steps[0]) - 1, len(steps[0] + steps[1]) - 1, len(tokens) - 1]
    assert step_ends(tiny_tokenizer, (*tokens, tiny_tokenizer.eos_token_id)) == ends


# --- in PPO --------------------------------------------------------------------------------------------------------


def test_scores_keep_token_rewards(answer):
    answers = [answer("ab"), answer("c")]
    rewards = [
        NamedReward("steps", 2.0, lambda answers: [[1.0] * len(a.tokens) for a in answers]),
        NamedReward("more", 1.0, lambda answers: [(0.0,) * (len(a.tokens) - 1) + (0.5,) for a in answers]),  # type: ignore
        NamedReward("whole", 1.0, lambda answers: [10.0 for _ in answers]),
        NamedReward("watched", 0.0, lambda answers: [[7.0] * len(a.tokens) for a in answers]),
    ]
    totals, by_name, tokens = score(answers, rewards)
    assert totals == [2 * 3 + 0.5 + 10, 2 * 2 + 0.5 + 10]
    assert by_name == {"steps": [3, 2], "more": [0.5, 0.5], "whole": [10, 10], "watched": [21, 14]}
    assert tokens is not None and [one.tolist() for one in tokens] == [[2.0, 2.0, 2.5], [2.0, 2.5]]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([[1.0], [1.0]], "returned 1 numbers for the 3 tokens of p.jsonl:1"),
        ([[1.0, math.nan, 0.0], [1.0, 1.0]], "returned nan for p.jsonl:1"),
        ([[1.0, 0.0, 0.0], 1.0], "returned token scores for only some trajectories"),
    ],
)
def test_token_scores_are_checked(returned, message, answer):
    with pytest.raises(UserError, match=message):
        score([answer("ab"), answer("c")], [NamedReward("mine", 1.0, lambda _: returned)])


def test_token_rewards_add_up_to_the_score_of_their_row():
    mask = torch.tensor([[False, True, True, True], [False, True, True, False]])
    steps = torch.tensor([[9.0, 0.5, 0.0, 0.25], [9.0, -1.0, 0.0, 9.0]])
    rewards = advantages.token_rewards(torch.tensor([2.0, -1.0]), torch.ones(2, 4), mask, 0.1, steps)
    expected = [[0.0, 0.4, -0.1, 0.25 - 0.1 + 1.25], [0.0, -1.1, -0.1, 0.0]]
    torch.testing.assert_close(rewards, torch.tensor(expected))


@pytest.mark.parametrize("setting", [{"score_clip": 1.0}, {"score_normalize": True}])
def test_settings_that_change_only_scores_are_refused_with_token_rewards(setting, make_trainer, tiny_llama, reward):
    method = PPO(reward(), Sampling(max_new_tokens=4), kl_coef=0.0, reference=False, **setting)
    trainer = make_trainer(method, tiny_llama(), [Prompt(QUESTION, {}, f"p.jsonl:{i}") for i in range(4)])
    with pytest.raises(UserError, match="score_normalize and score_clip change the score of a completion"):
        next(iter(trainer.get_train_dataloader()))


def test_ppo_gets_rewards_on_the_tokens_that_were_sampled(make_trainer, tiny_llama, tiny_tokenizer, reward):
    steps = reward()
    seen: list[Trajectory] = []

    def watched(answers: list[Trajectory]) -> list[list[float]]:
        seen.extend(answers)
        return steps(answers)

    method = PPO(watched, Sampling(max_new_tokens=8), kl_coef=0.0, reference=False, advantage=MONTE_CARLO)
    rows = [Prompt(QUESTION, {}, f"p.jsonl:{i}") for i in range(4)]
    trainer = make_trainer(method, tiny_llama(seed=3), rows)
    loader = trainer.get_train_dataloader()
    examples = next(iter(loader))
    prompt = len(Renderer(tiny_tokenizer).prompt(QUESTION))
    by_tokens = {tuple(answer.tokens): numbers for answer, numbers in zip(seen, steps(seen), strict=True)}
    for (sequence,) in (example.sequences for example in examples):
        rewards = by_tokens[tuple(sequence.tokens[prompt:])]
        # without discount and with lambda 1, a return is what is still to come
        to_come = [sum(rewards[t:]) for t in range(len(rewards))]
        assert sequence.arrays["returns"][prompt:] == pytest.approx(to_come, abs=1e-5)


def test_the_recipe_of_the_page_trains_by_values_of_steps(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "step_value.md").read_text("utf-8")
    (text,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "page.yaml").write_text(text, "utf-8")
    cut = ["stages.prepare.with={rows: 64, prompts: 16, held_out: 16}", "stages.values.trainer.num_train_epochs=1"]
    cut += ["stages.ppo.trainer.per_device_train_batch_size=8", f"out={tmp_path / 'run'}"]
    pipeline.run(config.load(str(tmp_path / "page.yaml"), cut))
    lines = read_metrics(tmp_path / "run" / "ppo")
    values = [line["reward_values"] for line in lines if "reward_values" in line]
    assert len(values) == 2 and all(-1 <= number <= 1 for number in values)
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "ppo" / "model").eos_token == "<eos>"


def test_invalid_settings_are_reported(tmp_path: Path) -> None:
    from burnish.config.schema import RewardFromFunction, RewardFromModel

    with pytest.raises(ValueError, match="steps: only for a reward with model:, but this one has function:"):
        RewardFromFunction.model_validate({"function": "a.py:b", "steps": "raw"})
    with pytest.raises(ValueError, match="label and normalize apply only to a model with one score"):
        RewardFromModel(model="somewhere", steps="raw", normalize=True)
