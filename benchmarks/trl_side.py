"""TRL's trainer for a job: its defaults, except for what a CPU needs."""

from __future__ import annotations

import os
from typing import Any

import torch
from datasets import Dataset
from side import Clock, Job, score
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from workload import LONGEST

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
PLAIN = {"sft": "SFT", "dpo": "DPO", "reward": "Reward", "grpo": "GRPO", "rloo": "RLOO"}
SAME_MATH = {"grpo": {"scale_rewards": "none"}}  # TRL divides by the deviation over K - 1 samples, Burnish over K


def trainer(job: Job, clock: Clock, out: str) -> tuple[Any, int]:
    """A trainer that takes the rows in their order, and 1."""
    arguments = {**job.arguments(out), "gradient_checkpointing": False}
    tokenizer = AutoTokenizer.from_pretrained(job.folder / "model")
    if job.method == "ppo":
        return ppo(job, clock, arguments, tokenizer), 1
    import trl  # type: ignore[import-not-found]

    online = job.method in ("grpo", "rloo")
    if online:
        arguments |= {"num_generations": job.samples, "max_completion_length": LONGEST, "shuffle_dataset": False}
        arguments |= {"per_device_train_batch_size": job.batch * job.samples, **SAME_MATH.get(job.method, {})}
    else:
        arguments |= {"train_sampling_strategy": "sequential"}
    kind = AutoModelForSequenceClassification if job.method == "reward" else AutoModelForCausalLM
    name = PLAIN[job.method]

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        clock.completed.append(sum(map(len, completion_ids)))
        return score(completion_ids)

    made = getattr(trl, f"{name}Trainer")(
        model=kind.from_pretrained(job.folder / ("reward" if job.method == "reward" else "model")),
        args=getattr(trl, f"{name}Config")(**arguments, max_steps=job.warmup + job.steps),
        train_dataset=Dataset.from_list([row["row"] for row in job.rows]),
        processing_class=tokenizer,
        callbacks=[clock.callback()],
        **({"reward_funcs": reward} if online else {}),
    )
    if job.given:
        completions = [ids for samples in job.given for ids in samples]
        made._generate_single_turn = lambda *_, **__: (completions, None) if job.method == "grpo" else completions
    return made, 1


def ppo(job: Job, clock: Clock, arguments: dict[str, Any], tokenizer: Any) -> Any:
    """The last PPO of TRL's, with a value model that starts from the reward model, one batch of prompts an update."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer  # type: ignore[import-not-found]

    def load(kind: Any, name: str) -> Any:
        return kind.from_pretrained(job.folder / name)

    prompts = [tokenizer.apply_chat_template(row["row"]["prompt"], add_generation_prompt=True, return_dict=False)
               for row in job.rows[: job.batch]]  # fmt: skip
    tokenizer.padding_side = "left"
    made = PPOTrainer(
        args=PPOConfig(
            **arguments,
            total_episodes=job.batch * (job.warmup + job.steps),
            response_length=LONGEST,
            stop_token="eos",
            temperature=1.0,
            num_sample_generations=0,
        ),
        processing_class=tokenizer,
        model=load(AutoModelForCausalLM, "model"),
        ref_model=load(AutoModelForCausalLM, "model"),
        reward_model=load(AutoModelForSequenceClassification, "reward"),
        value_model=load(AutoModelForSequenceClassification, "reward"),
        train_dataset=Dataset.from_dict({"input_ids": prompts}),
        callbacks=[clock.callback()],
    )
    generate = ppo_trainer.batch_generation

    @torch.no_grad()
    def counted(model: Any, queries: torch.Tensor, _: Any, pad: int, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        width = queries.shape[1]
        if job.given:
            answers = {tuple(prompt): samples[0] for prompt, samples in zip(prompts, job.given, strict=True)}
            found = torch.tensor([answers[tuple(q[q != pad].tolist())] for q in queries])
            whole = torch.cat([queries, found], 1)
            done = whole, ppo_trainer.forward(model, whole, pad).logits[:, width - 1 : -1]
        else:
            done = generate(model, queries, _, pad, *others)
        ended = (done[0][:, width:] == tokenizer.eos_token_id).cumsum(1)
        clock.completed.append(int((ended == 0).sum() + (ended[:, -1] > 0).sum()))
        return done

    ppo_trainer.batch_generation = counted
    if job.given:
        backward = made.accelerator.backward

        def seen(loss: torch.Tensor) -> None:
            backward(loss)
            clock.look(loss.item(), made.model)

        made.accelerator.backward = seen
    return made
