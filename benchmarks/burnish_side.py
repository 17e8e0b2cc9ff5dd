"""Burnish's trainer for a job: its defaults."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from ablations import ABLATIONS, Without
from side import Clock, Job, score
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments
from workload import LONGEST

from burnish import DPO, GRPO, PPO, RLOO, SFT, Trainer
from burnish.data.loader import permutation
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Completion, Request
from burnish.generate.sampling import Sampling
from burnish.methods.reward import RewardModel
from burnish.rewards.functions import NamedReward
from burnish.rewards.model import ModelReward

PPO_EPOCHS = 4
GRPO_AS_TRL: dict[str, Any] = {"advantage": "group_mean", "reduction": "token_mean", "kl_coef": 0.0}


def trainer(job: Job, clock: Clock, out: str) -> tuple[Any, int]:
    """A trainer whose first epoch takes the rows in their order, and how many optimizer steps are one step of TRL's."""
    without = ABLATIONS.get(job.options.without, Without("nothing", ()))
    without.patch()
    tokenizer = AutoTokenizer.from_pretrained(job.folder / "model")
    kind = AutoModelForSequenceClassification if job.method == "reward" else AutoModelForCausalLM
    model = kind.from_pretrained(job.folder / ("reward" if job.method == "reward" else "model"))
    ticks = PPO_EPOCHS if job.method == "ppo" else 1
    rows = job.rows[: job.batch] if job.method == "ppo" else job.rows
    placed: list[Any] = [None] * len(rows)
    for place, row in zip(permutation(len(rows), 42, 0), rows, strict=True):
        placed[place] = row["row"]
    clipped: dict[str, Any] = {} if job.method != "ppo" else {"max_grad_norm": 0.0}  # TRL's PPO does not clip gradients
    made = Trainer(
        model=model,
        args=TrainingArguments(**job.arguments(out), max_steps=(job.warmup + job.steps) * ticks, **clipped),
        method=method(job, clock, tokenizer, without.settings),
        train_dataset=placed,
        processing_class=tokenizer,
        callbacks=[clock.callback()],
        **without.trainer,
    )
    step = made.training_step

    def seen(model: Any, *others: Any) -> Any:
        began = time.process_time()
        loss = step(model, *others)
        clock.update += time.process_time() - began
        if job.given and job.method == "ppo":
            clock.look(float(loss), model)
        return loss

    made.training_step = seen  # type: ignore[method-assign]
    return made, ticks


def method(job: Job, clock: Clock, tokenizer: Any, settings: dict[str, Any]) -> Any:
    """The method with what TRL does by default, and further settings."""
    how: dict[str, Any] = {
        "sampling": Sampling(max_new_tokens=LONGEST, samples=job.samples),
        "generator": counted(job, clock),
    }
    function: dict[str, Any] = {"reward": lambda answers: score([answer.tokens for answer in answers]), **how}
    match job.method:
        case "sft":
            return SFT(**settings)
        case "dpo":
            return DPO(**settings)
        case "reward":
            return RewardModel(**settings)
        case "grpo":
            return GRPO(**function, **GRPO_AS_TRL, **settings)
        case "rloo":
            return RLOO(**function, kl_coef=0.05, **settings)
        case _:
            scorer = AutoModelForSequenceClassification.from_pretrained(job.folder / "reward")
            reward = [NamedReward("reward", 1.0, ModelReward(scorer, tokenizer))]
            return PPO(reward, **how, epochs=PPO_EPOCHS, critic={"coef": 0.1, "clip": 0.2}, kl_coef=0.05, **settings)


def counted(job: Job, clock: Clock) -> Any:
    """Makes the default generator, or one that gives the job's completions; it counts tokens."""

    class Counted(LocalGenerator):
        def submit(self, requests: Sequence[Request], version: int) -> list[int]:
            self.given = as_given(job, self.model, requests) if job.given else []
            self.handles = super().submit(requests, version)
            self.prompts = {handle: r.tokens for handle, r in zip(self.handles, requests, strict=True)}
            self.done: dict[int, Completion] = {}
            return self.handles

        def poll(self, timeout: float | None) -> list[tuple[int, Completion]]:
            if job.given:
                done = list(zip(self.handles, self.given, strict=True))
                self.cancel()
            else:
                done = super().poll(timeout)
            self.done.update(done)
            if len(self.done) == len(self.handles):
                groups: dict[tuple[int, ...], list[int]] = {}
                for handle in self.handles:
                    groups.setdefault(self.prompts[handle], []).append(len(self.done[handle].tokens))
                clock.sequences.append([(len(prompt), answers) for prompt, answers in groups.items()])
                clock.completed.append(sum(len(completion.tokens) for completion in self.done.values()))
            return done

    return Counted


@torch.no_grad()
def as_given(job: Job, model: Any, requests: Sequence[Request]) -> list[Completion]:
    """The job's completions with the model's log-probabilities."""
    completions = [ids for samples in job.given or [] for ids in samples]
    done = []
    for request, ids in zip(requests, completions, strict=True):
        logits = model(torch.tensor([[*request.tokens, *ids]])).logits[0, len(request.tokens) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
        finish_reason = "stop" if ids[-1] == 2 else "length"
        done.append(Completion(np.array(ids), np.array(logprobs), None, None, finish_reason, version=0))
    return done
