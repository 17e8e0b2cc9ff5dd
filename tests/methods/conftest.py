"""Runs of PPO on a model with random weights, with all that happened in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from transformers import TrainerCallback

from burnish import PPO
from burnish.generate.sampling import Sampling
from burnish.models.adapters import add_adapter
from burnish.models.settings import AdapterConfig
from burnish.types import Example, Prompt, Trajectory

ENDS = [2, *range(15, 25)]  # the end token and ten letters, so that some completions stop and others are cut
SHORT = Sampling(max_new_tokens=6)


def by_tokens(answers: list[Trajectory]) -> list[float]:
    """A score that follows from the tokens alone: -1, -0.75, ... 1."""
    return [sum(a.tokens) % 9 / 4 - 1 for a in answers]


def prompts(n: int) -> list[Prompt]:
    return [Prompt(({"role": "user", "content": f"{i} + {'1' * (i % 3)}"},), {}, f"prompts:{i}") for i in range(n)]


class Run(NamedTuple):
    """What a run did: rollouts of each iteration, examples of each step, weights around each step, its log."""

    trainer: Any
    batches: list[list[Example]]
    steps: list[list[Example]]
    policy: list[bytes]
    critic: list[bytes]
    log: list[dict[str, float]]

    def experience(self, key: str) -> list[float]:
        """A metric of every iteration."""
        return [line[key] for line in self.log if key in line]

    def learned(self, examples: list[Example], name: str) -> list[float]:
        """The numbers of an array at learned tokens."""
        sequences = [example.sequences[0] for example in examples]
        return [x for s in sequences for x, t in zip(s.arrays[name], s.loss_mask, strict=True) if t]

    def completion(self, example: Example) -> tuple[int, ...]:
        (sequence,) = example.sequences
        return tuple(token for token, t in zip(sequence.tokens, sequence.loss_mask, strict=True) if t)

    def score(self, example: Example) -> float:
        """What ``by_tokens`` gives it."""
        return sum(self.completion(example)) % 9 / 4 - 1

    def ends(self, example: Example) -> list[int]:
        """Where the completion has a token that ends it."""
        return [i for i, token in enumerate(self.completion(example)) if token in ENDS]


@pytest.fixture
def policy(tiny_llama: Any) -> Callable[..., Any]:
    def make(*, lora: bool = False) -> Any:
        model = tiny_llama()
        model.generation_config.eos_token_id = ENDS
        return add_adapter(model, AdapterConfig.model_validate({"r": 4}), "CAUSAL_LM") if lora else model

    return make


@pytest.fixture
def by_tokens_reward() -> Any:
    return by_tokens


@pytest.fixture
def run(make_trainer: Any, policy: Any, weights: Any) -> Callable[..., Run]:
    def go(
        *,
        reward: Any = by_tokens,
        sampling: Sampling = SHORT,
        rows: int = 8,
        lora: bool = False,
        model: Any = None,
        generator: Any = None,
        arguments: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Run:
        settings = {"epochs": 2, "mini_batches": 2} | settings
        method = PPO(reward, sampling, generator, **settings)
        found = Run(None, [], [], [], [], [])

        class Keep(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
                if not found.policy:
                    self.on_step_end(args, state, control, model)

            def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
                found.policy.append(weights(model.policy))
                found.critic.append(weights(model.critic))

        trainer = make_trainer(
            method,
            policy(lora=lora) if model is None else model,
            prompts(rows),
            **{"batch": 4, "lr": 1e-2, "own": {"callbacks": [Keep()]}} | (arguments or {}),
        )
        loader, step = trainer.get_train_dataloader(), trainer.training_step
        gather = loader._collect

        def collecting(indices: list[int]) -> None:
            gather(indices)
            found.batches.append(loader.pending)

        def stepping(model: Any, inputs: Any, *rest: Any) -> Any:
            found.steps.append(inputs[0])
            return step(model, inputs, *rest)

        loader._collect, trainer.training_step = collecting, stepping
        trainer.train()
        log = [line for line in trainer.state.log_history if "train_runtime" not in line]
        return found._replace(trainer=trainer, log=log)

    return go
