"""Episodes of a real model: what is computed, what does not depend on the slots, and training on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from burnish import GRPO, PPO, Observation, Trainer
from burnish.generate.local import LocalGenerator
from burnish.generate.process import ProcessGenerator
from burnish.generate.protocol import Generator, Request, complete, request_seed
from burnish.generate.sampling import Sampling
from burnish.models.logprobs import logprobs
from burnish.render.renderer import Renderer
from burnish.rl.collect import sample_and_score
from burnish.rl.environment import Environments
from burnish.types import Prompt, Trajectory


class Twice:
    """Answers every message with its length and what the row says, and ends after a message with a digit."""

    def reset(self, number: int, seed: int) -> str:
        self.number, self.seed = number, seed
        return f" {seed % 10}"

    def respond(self, message: dict[str, Any]) -> Observation:
        """Answer."""
        done = any(letter.isdigit() for letter in message["content"])
        return Observation(f"{len(message['content'])} {self.number}", done, float(done) + len(message["content"]) / 50)


ROWS = [Prompt(({"role": "user", "content": f"Say {i}."},), {"number": i}, f"rows:{i}") for i in range(6)]
SAMPLING = Sampling(max_new_tokens=12, samples=2)


def environments(**limits: Any) -> Environments:
    return Environments({"": Twice}, turns=True, max_turns=4, **limits)


def episodes(
    model: Any, tokenizer: Any, slots: int = 64, context: int | None = 256, generator: Generator | None = None
) -> list[Trajectory]:
    prompts = Renderer(tokenizer).prompts(ROWS)
    stops = frozenset([2, *range(15, 25)])
    requests = [
        Request(ids, request_seed(0, i, g, 0), SAMPLING, stops) for i, ids in enumerate(prompts) for g in (0, 1)
    ]
    generator = generator or LocalGenerator(model, tokenizer, slots=slots)
    rows, world = [row for row in ROWS for _ in (0, 1)], environments()
    return sample_and_score(rows, requests, world.rewards([]), generator, tokenizer, world, context=context)


@pytest.mark.parametrize("slots", [64, 3])
def test_each_token_is_computed_once(slots: int, tiny_llama: Any, tiny_tokenizer: Any) -> None:
    model = tiny_llama()
    read: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    trajectories = episodes(model, tiny_tokenizer, slots)
    assert max(len(t.turns) for t in trajectories) > 2 and all(len(t.sequences) == 1 for t in trajectories)
    for t in trajectories:
        for before, turn in zip(t.turns, t.turns[1:], strict=False):
            # all that was there before, but the last sampled token, which the model had not read yet
            assert turn.cached_tokens == before.prompt_tokens + before.tokens - 1
        # A prompt is read once for all its samples, each turn once as it is sampled, and each answer once.
        computed = sum(turn.prompt_tokens - turn.cached_tokens + turn.tokens for turn in t.turns)
        assert computed == len(t.sequences[0]) - t.turns[0].cached_tokens + len(t.turns) - 1
    tokens = sum(len(t.sequences[0]) - t.turns[0].cached_tokens for t in trajectories)
    assert tokens - len(trajectories) <= sum(read) <= 1.1 * tokens  # answers of different lengths are padded


def test_episodes_do_not_depend_on_the_number_of_slots(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    model = tiny_llama(dtype=torch.float64)
    runs = [episodes(model, tiny_tokenizer, slots) for slots in (64, 3, 1)]
    for other in runs[1:]:
        for one, two in zip(runs[0], other, strict=True):
            assert [s.tokens.tolist() for s in one.sequences] == [s.tokens.tolist() for s in two.sequences]
            assert (one.score, one.messages, one.finish_reason) == (two.score, two.messages, two.finish_reason)
    assert runs[0] == episodes(model, tiny_tokenizer)


def test_sampler_and_trainer_agree_on_all_turns(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    model = tiny_llama(dtype=torch.float64)
    for t in episodes(model, tiny_tokenizer):
        (sequence,) = t.sequences
        (values,) = logprobs(model, [sequence])
        assert np.abs(values - sequence.arrays["sampler_logprobs"][sequence.loss_mask]).max() < 1e-9


def test_an_episode_ends_before_the_context_is_full(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    model = tiny_llama(max_position_embeddings=80)
    trajectories = episodes(model, tiny_tokenizer, context=80)
    assert "context" in {t.finish_reason for t in trajectories}
    assert max(len(s) for t in trajectories for s in t.sequences) <= 80


@pytest.fixture
def trainer_of(make_trainer: Any, tiny_llama: Any) -> Callable[..., Trainer]:
    def make(kind: type = PPO, epochs: int = 2, **settings: Any) -> Trainer:
        model = tiny_llama()
        model.generation_config.eos_token_id = [2, *range(15, 25)]
        method = kind([], SAMPLING, environments=environments(reward_at=settings.pop("reward_at", "turns")), **settings)
        return make_trainer(
            method, model, ROWS, batch=3, lr=5e-3, num_train_epochs=epochs, save_strategy="steps", save_steps=1
        )

    return make


class Stop(TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 2


def test_ppo_learns_from_episodes_and_resumes_to_the_same_bytes(trainer_of: Any, weights: Any, tmp_path: Path) -> None:
    whole = trainer_of()
    whole.train()
    logged = [line for line in whole.state.log_history if "turns" in line]
    assert len(logged) == 4 and all(line["turns"] > 1 and line["environment_tokens"] > 5 for line in logged)
    assert all(abs(line["sampler_mismatch"]) < 1e-5 for line in logged)
    expected = weights(whole.model)
    stopped = trainer_of()
    stopped.add_callback(Stop())
    stopped.train()
    assert weights(stopped.model) != expected
    resumed = trainer_of()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert weights(resumed.model) == expected


def test_groups_are_of_trajectories_with_different_numbers_of_turns(trainer_of: Any) -> None:
    trainer = trainer_of(GRPO, epochs=1, reward_at="end")
    trainer.train()
    line = next(line for line in trainer.state.log_history if "turns" in line)
    assert line["turns"] != round(line["turns"]) and line["zero_advantage_fraction"] < 1


class Consults:
    """Lets the policy itself, and a generator of its own, write a part of every answer."""

    model: Any = None
    tokenizer: Any = None

    def respond(self, message: dict[str, Any]) -> Observation:
        ids = torch.tensor([[1, 5, 9]])
        written = self.model.generate(ids, max_new_tokens=3, do_sample=True)[0].tolist()
        generator = LocalGenerator(self.model, self.tokenizer)
        (one,) = complete(generator, [Request((1, 5, 9), 0, Sampling(max_new_tokens=3))])
        return Observation(f"{len(written)} {len(one.tokens)}")


def test_an_environment_may_call_the_model(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    Consults.model, Consults.tokenizer = tiny_llama(), tiny_tokenizer
    world = Environments({"": Consults}, turns=True, max_turns=3)
    prompts = Renderer(tiny_tokenizer).prompts(ROWS)
    requests = [Request(ids, i, Sampling(max_new_tokens=6), frozenset()) for i, ids in enumerate(prompts)]
    generator = LocalGenerator(Consults.model, tiny_tokenizer, slots=4)
    for t in sample_and_score(ROWS, requests, world.rewards([]), generator, tiny_tokenizer, world):
        assert (t.finish_reason, [m["content"] for m in t.messages if m["role"] == "user"]) == ("turns", ["6 3"] * 3)
        (values,) = logprobs(Consults.model, [t.sequences[0]])
        assert np.abs(values - t.sequences[0].arrays["sampler_logprobs"][t.sequences[0].loss_mask]).max() < 1e-4


def test_a_generator_in_another_process_samples_the_same_episodes(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    def tokens(trajectories: list[Trajectory]) -> list[Any]:
        assert all(turn.cached_tokens for t in trajectories for turn in t.turns[1:])
        return [[s.tokens.tolist() for s in t.sequences] for t in trajectories]

    model = tiny_llama()
    generator = ProcessGenerator(model, tiny_tokenizer)
    try:
        assert tokens(episodes(model, tiny_tokenizer, generator=generator)) == tokens(episodes(model, tiny_tokenizer))
    finally:
        generator.close()
