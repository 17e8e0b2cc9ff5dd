"""GRPO and RLOO as settings of REINFORCE against TRL's trainers: the same policy, rollouts and rewards, one step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from burnish import Reinforce
from burnish.data.loader import RowLoader
from burnish.generate.sampling import Sampling
from burnish.math.advantages import group
from burnish.types import Encoded, Example, Sequence, Text

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:::trl"),
    # TRL still says gradient checkpointing, which transformers has renamed
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]

LONGEST, SAMPLES = 9, 4
CLIPS = {"epsilon": 0.2, "epsilon_high": 0.28}
CLIP = {"name": "clip", "clip_low": 0.2, "clip_high": 0.28}


class Rollout(NamedTuple):
    prompt: list[int]
    completion: list[int]
    old: list[float]
    reference: list[float]
    advantage: float


def logprobs(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """log p of the completion's tokens, by transformers alone."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def rollouts(model: Any) -> list[Rollout]:
    """Completions of several lengths; old and reference probabilities on both sides of the policy's."""
    r = random.Random(0)
    made = []
    for i in range(6):
        prompt, completion = ([r.randrange(5, 105) for _ in range(n)] for n in (2 + i % 3, 1 + 3 * i % LONGEST))
        with torch.no_grad():
            now = logprobs(model, prompt, completion).tolist()
        old, reference = ([x + r.gauss(0, 0.4) for x in now] for _ in range(2))
        made.append(Rollout(prompt, completion, old, reference, r.gauss(0, 1)))
    return made


def padded(rows: list[list[Any]], side: str = "right") -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) if side == "right" else [0] * (width - len(row)) + row
                         for row in rows])  # fmt: skip


def as_trl(made: list[Rollout]) -> dict[str, torch.Tensor]:
    """What TRL's loss takes."""
    return {
        "prompt_ids": padded([r.prompt for r in made], "left"),
        "prompt_mask": padded([[1] * len(r.prompt) for r in made], "left"),
        "completion_ids": padded([r.completion for r in made]),
        "completion_mask": padded([[1] * len(r.completion) for r in made]),
        "old_per_token_logps": padded([r.old for r in made]),
        "ref_per_token_logps": padded([r.reference for r in made]),
        "old_logps": torch.tensor([sum(r.old) for r in made]),
        "advantages": torch.tensor([r.advantage for r in made]),
        "num_items_in_batch": torch.tensor(sum(len(r.completion) for r in made)),
    }


def as_examples(made: list[Rollout]) -> list[Example]:
    """What our loss takes."""
    examples = []
    for r in made:
        before, after = len(r.prompt), len(r.completion)
        arrays = {"old_logprobs": r.old, "ref_logprobs": r.reference, "advantages": [r.advantage] * after}
        examples.append(
            Example(
                (
                    Sequence(
                        (*r.prompt, *r.completion),
                        (False,) * before + (True,) * after,
                        "rollout",
                        {name: (0.0,) * before + tuple(values) for name, values in arrays.items()},
                    ),
                )
            )
        )
    return examples


@pytest.fixture
def trl_loss(trl_trainer: Any, backward: Any) -> Callable[..., Any]:
    """The step of TRL's loss on given rollouts."""

    def run(name: str, model: Any, made: list[Rollout], beta: float = 0.0, **config: Any) -> Any:
        settings = {"num_generations": len(made), "max_completion_length": LONGEST, "beta": 0.0} | config
        rows = [{"prompt": "a"}] * len(made)
        trainer = trl_trainer(name, model, rows, config=settings, reward_funcs=lambda completions, **_: [0.0])
        trainer.current_gradient_accumulation_steps = 1
        trainer.beta = beta  # a reference model of its own would have to lie on disk
        return backward(trainer._compute_loss(trainer.model.train(), as_trl(made)), trainer.model)

    return run


@pytest.fixture
def our_loss(ours: Any) -> Callable[..., Any]:
    """The step of our loss on given rollouts."""

    def run(model: Any, made: list[Rollout], **settings: Any) -> Any:
        method = Reinforce(sampling=Sampling(max_new_tokens=LONGEST), **settings)
        method.examples = lambda *_: Encoded(as_examples(made), [])  # type: ignore[method-assign]
        method.loader = lambda examples, *_: RowLoader(examples, len(made), 0)  # type: ignore[method-assign]
        return ours(method, model, [Text("", "rollouts")])

    return run


@pytest.mark.parametrize(
    ("reduction", "loss_type"),
    [
        ("sequence_mean", "grpo"),
        ("token_mean", "bnpo"),
        ("token_mean", "dapo"),
        ("fixed_length", "dr_grpo"),
        ("sequence_sum", "luspo"),
    ],
)
def test_grpo(reduction: str, loss_type: str, our_loss: Any, trl_loss: Any, same: Any, tiny_llama: Any) -> None:
    model = tiny_llama()
    made = rollouts(model)
    config = {"loss_type": loss_type, **CLIPS, "use_bias_correction_kl": False}
    clips = {"reduction": reduction, "policy_loss": CLIP}
    same(f"GRPO, {loss_type}", our_loss(model, made, **clips), trl_loss("GRPO", model, made, **config))
    k3 = our_loss(model, made, **clips, kl_coef=0.1, kl_in="loss", kl_estimate="k3")
    same(f"GRPO, {loss_type}, KL", k3, trl_loss("GRPO", model, made, beta=0.1, **config))


def test_grpo_weighs_the_kl_by_the_ratio_by_default(
    our_loss: Any, trl_loss: Any, same: Any, plus: Any, tiny_llama: Any
) -> None:
    """``use_bias_correction_kl``: the estimate of a token's KL times exp(l - l_old), through which gradient flows."""
    model = tiny_llama()
    made = rollouts(model)
    theirs = trl_loss("GRPO", model, made, loss_type="bnpo", beta=0.1, **CLIPS)
    without = our_loss(model, made, reduction="token_mean", policy_loss=CLIP)
    now = torch.cat([logprobs(model, r.prompt, r.completion) for r in made])
    old, reference = (torch.tensor([x for r in made for x in getattr(r, name)]) for name in ("old", "reference"))
    k3 = (reference - now).exp() - (reference - now) - 1
    same("GRPO, bnpo, KL by its ratio", plus(without, model, 0.1 * ((now - old).exp() * k3).mean()), theirs)


def test_rloo(our_loss: Any, trl_loss: Any, same: Any, tiny_llama: Any) -> None:
    """TRL's loss is that of the ratio of whole completions: -mean(A), with the gradient of -mean(A log p)."""
    model = tiny_llama()
    made = rollouts(model)
    with torch.no_grad():
        now = [logprobs(model, r.prompt, r.completion) for r in made]
    made = [r._replace(old=x.tolist()) for r, x in zip(made, now, strict=True)]
    theirs = trl_loss("RLOO", model, made)
    assert theirs.loss == pytest.approx(-sum(r.advantage for r in made) / len(made), rel=1e-5)
    expected = -sum(r.advantage * x.sum().item() for r, x in zip(made, now, strict=True)) / len(made)
    same("RLOO, gradient", our_loss(model, made), theirs._replace(loss=expected))


@pytest.mark.parametrize("name", ["RLOO", "GRPO"])
def test_advantages(name: str, trl_trainer: Any, first_step: Any, tiny_llama: Any) -> None:
    """RLOO's are equal; GRPO's have a spread over K - 1 and 1e-4 beside it, ours one over K and 1e-8 below the root."""
    scores: list[float] = []

    def score(completion_ids: list[list[int]], **_: Any) -> list[float]:
        scores.extend(sum(ids) % 7 / 3 for ids in completion_ids)
        return scores[-len(completion_ids) :]

    rows, found = [{"prompt": text} for text in "abc"], []
    config = {"num_generations": SAMPLES, "max_completion_length": LONGEST, "beta": 0.0}
    config["per_device_train_batch_size"] = SAMPLES * len(rows)
    trainer = trl_trainer(name, tiny_llama(), rows, config=config, reward_funcs=score)
    generate = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: found.append(generate(inputs)) or found[-1]
    first_step(trainer)

    rewards = torch.tensor(scores)
    groups = torch.arange(len(rewards)) // SAMPLES
    if name == "RLOO":
        expected = group(rewards, groups, "rloo")
    else:
        variance = rewards.view(-1, SAMPLES).var(1, correction=0).repeat_interleave(SAMPLES)
        spread = (variance * SAMPLES / (SAMPLES - 1)).sqrt() + 1e-4
        expected = group(rewards, groups, "std") * (variance + 1e-8).sqrt() / spread
    assert len(found) == 1 and len(set(scores)) > 3
    torch.testing.assert_close(found[0]["advantages"], expected.float(), rtol=1e-5, atol=1e-6)
