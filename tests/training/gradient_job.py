"""The gradient of one optimizer step of each method, as one process or several see it; run by test_shape.py.

``python -m torch.distributed.run --nproc-per-node 2 gradient_job.py OUT`` saves {method: flat gradient} of each dtype,
and the weights of ``partial_steps``.
"""

import gc
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainingArguments,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from burnish import DPO, PPO, SFT, Distill, Pretrain, Reinforce, RewardModel, StepValue, Trainer
from burnish.data.loader import RowLoader
from burnish.methods.dpo import mismatched
from burnish.models.adapters import add_adapter
from burnish.models.heads import Network, SharedCritic, StepValueHead
from burnish.models.layout import Layout
from burnish.models.loaded import Loaded
from burnish.models.settings import AdapterConfig
from burnish.rl.trajectory import learned_arrays, shares, with_learned_arrays
from burnish.types import Encoded, Example, Pair, Sequence, Text, total_counts

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=1,
    eos_token_id=1,
    bos_token_id=None,
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One word an id; pad is eos, as in many chat models."""
    words = {"<eos>": 1} | {str(i): i for i in range(32) if i != 1}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), eos_token="<eos>", pad_token="<eos>"
    )


def sequence(seed: int, *arrays: str) -> Sequence:
    """Tokens (the pad id among them), a mask with gaps, and arrays of numbers."""
    r = random.Random(seed)
    n = r.randint(3, 14)
    trained = [False, True, *(r.random() < 0.7 for _ in range(n - 2))]
    numbers = {name: tuple(r.gauss(-1 if "log" in name else 0, 0.3) for _ in range(n)) for name in arrays}
    return Sequence(tuple(r.randrange(1, 32) for _ in range(n)), tuple(trained), f"row {seed}", numbers)


def answers(seed: int) -> Example:
    """Two answers to one prompt of several tokens."""
    a, b, prompt = sequence(300 + seed), sequence(400 + seed), sequence(500 + seed).tokens.tolist()
    both = (
        Sequence(prompt + s.tokens.tolist(), [False] * len(prompt) + s.loss_mask.tolist(), s.source) for s in (a, b)
    )
    return Example(tuple(both), (Pair(0, 1, margin=0.2, p_better=0.8),))


def completions(*arrays: str) -> list[Example]:
    """Nine completions of three prompts in turn, with arrays of numbers, which prompts have none of."""
    examples = []
    for i in range(9):
        start, s = sequence(700 + i % 3).tokens.tolist(), sequence(800 + i, *arrays)
        numbers = {name: [0.0] * (len(start) + 1) + values[1:].tolist() for name, values in s.arrays.items()}
        mask = [False] * len(start) + s.loss_mask.tolist()
        examples.append(Example((Sequence(start + s.tokens.tolist(), mask, s.source, numbers),)))
    return examples


def episodes(*arrays: str) -> list[Example]:
    """Trajectories of one, two or three sequences, as they are if a chat template rewrites history."""
    examples = [Example(tuple(sequence(900 + 3 * i + k, *arrays) for k in range(1 + i % 3))) for i in range(9)]
    return with_learned_arrays(
        examples, share=shares(examples), **{name: learned_arrays(examples)[1][name] for name in arrays}
    )


def solved(seed: int) -> Example:
    """A solution in steps, correct where the seed is odd: of another one no token is learned."""
    r, base = random.Random(seed), sequence(600 + seed, "targets")
    ends = [*(r.random() < 0.4 for _ in base.tokens[1:]), True]
    outcomes = tuple((1.0 if seed % 2 else -1.0) * end for end in ends)
    depths = tuple(sum(ends[: t + 1]) / sum(ends) * end for t, end in enumerate(ends))
    trained = tuple(learned and seed % 2 == 1 for learned in base.loss_mask)
    return Example((replace(base, loss_mask=trained).with_arrays(outcomes=outcomes, depths=depths),))


def exact(model: Any, dtype: torch.dtype) -> Any:
    """The model in this dtype, its norms too: Llama's own ones compute in float32 whatever the model's dtype is."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, LlamaRMSNorm):
                setattr(parent, name, torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon))
    return model.to(dtype)


def numbered(example: Example, seed: int, name: str) -> Example:
    """The example with an array: random log-probabilities, or 1 and 0 in turn."""
    r = random.Random(seed)
    values = [seed % 2 if name == "desirable" else r.gauss(-4, 0.5) for s in example.sequences for _ in s.tokens]
    each = iter(values)
    return replace(
        example,
        sequences=tuple(s.with_arrays(**{name: tuple(next(each) for _ in s.tokens)}) for s in example.sequences),
    )


def cases(dtype: torch.dtype) -> dict:
    """Method, model and the examples of one step, for each method and each kind of critic."""
    torch.manual_seed(0)
    plain = [Example((sequence(i),)) for i in range(9)]
    whole = [
        Example((replace(s, loss_mask=(False,) + (True,) * (len(s.tokens) - 1)),)) for s in map(sequence, range(9))
    ]
    pairs = [
        Example((sequence(2 * i), sequence(2 * i + 1)), (Pair(0, 1, margin=0.1 * i, p_better=0.9),)) for i in range(4)
    ]
    ranked = Example(
        tuple(sequence(100 + i) for i in range(3)), (Pair(0, 1, 1 / 3), Pair(0, 2, 1 / 3), Pair(1, 2, 1 / 3))
    )
    pairs += [answers(i) for i in range(4)]
    referred = [numbered(e, i, "ref_logprobs") for i, e in enumerate([*pairs, ranked])]
    judged = [numbered(e, i, "desirable") for i, e in enumerate(plain)]
    judged = [numbered(e, i, "ref_logprobs") for i, e in enumerate(mismatched(judged))]
    rollouts = [Example((sequence(i, "old_logprobs", "advantages", "values", "returns"),)) for i in range(9)]

    scored = [Example((sequence(i, "advantages", "ref_logprobs"),)) for i in range(9)]

    def policy() -> Any:
        torch.manual_seed(1)
        return exact(LlamaForCausalLM(CONFIG), dtype)

    def adapted() -> Any:
        """A policy with an adapter that is no longer fresh, else its first factors would have no gradient."""
        model = add_adapter(policy(), AdapterConfig.model_validate({"r": 4, "dropout": 0.3}), "CAUSAL_LM")
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        return model.to(dtype)

    def gpt2() -> Any:
        torch.manual_seed(1)
        dropout: dict[str, Any] = {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.0}
        model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=32, n_layer=2, n_head=4, **dropout))
        return model.to(dtype)

    def classifier() -> Any:
        torch.manual_seed(1)
        config = LlamaConfig.from_dict(CONFIG.to_dict() | {"id2label": {0: "score"}, "label2id": {"score": 0}})
        return exact(LlamaForSequenceClassification(config), dtype)

    def reward(answers: list) -> list[float]:
        return [0.0] * len(answers)

    def ppo(**settings: Any) -> PPO:
        return PPO(reward, reference=False, kl_coef=0.0, entropy_coef=0.01, **settings)

    def distill(divergence: str, **settings: Any) -> Distill:
        torch.manual_seed(3)
        larger = exact(LlamaForCausalLM(LlamaConfig.from_dict(CONFIG.to_dict() | {"num_hidden_layers": 3})), dtype)
        teacher = Loaded("teacher", larger, tokenizer())
        return Distill(load=lambda _: teacher, teacher="teacher", divergence=divergence, **settings)

    k3: Any = {"kl_in": "loss", "kl_estimate": "k3"}
    clip: Any = {"name": "clip", "clip_low": 0.2, "clip_high": 0.3}
    return {
        "pretrain": (Pretrain(), policy(), whole),
        "pretrain, dropout of the model": (Pretrain(), gpt2(), whole),
        "sft": (SFT(), policy(), plain),
        "sft, noise, completions": (SFT(), policy(), completions()),
        "sft, dropout of an adapter, completions": (SFT(), adapted(), completions()),
        "reward": (RewardModel(centering=0.01), classifier(), [*pairs, ranked]),
        "reinforce": (Reinforce(), policy(), scored),
        "reinforce, all options": (
            Reinforce(reduction="sequence_mean", policy_loss={"unlikelihood": True}, kl_coef=0.1, **k3),
            policy(),
            scored,
        ),
        "reinforce as grpo": (
            Reinforce(reward, reduction="sequence_mean", policy_loss=clip, kl_coef=0.1, **k3),
            policy(),
            [Example((sequence(i, "advantages", "old_logprobs", "ref_logprobs"),)) for i in range(9)],
        ),
        "step_value": (StepValue(alpha=0.5), policy(), [solved(i) for i in range(9)]),
        "dpo": (DPO(nll_weight=0.1), policy(), referred),
        "dpo, noise": (DPO(), policy(), referred),
        "dpo ipo": (DPO(loss="ipo", average=True), policy(), referred),
        "dpo orpo": (DPO(loss="orpo"), policy(), referred),
        "dpo kto": (DPO(loss="kto", desirable_weight=1.5), policy(), judged),
        "distill forward": (distill("forward"), policy(), plain),
        "distill reverse, completions": (distill("reverse"), policy(), completions("sampler_logprobs")),
        "distill jensen_shannon, adapter, completions": (
            distill("jensen_shannon", beta=0.3),
            adapted(),
            completions("sampler_logprobs"),
        ),
        "distill sampled, completions": (distill("sampled"), policy(), completions("sampler_logprobs")),
        "ppo separate": (ppo(critic="separate"), policy(), rollouts),
        "ppo separate, completions": (
            ppo(critic="separate", reduction="sequence_sum"),
            policy(),
            completions("old_logprobs", "advantages", "values", "returns"),
        ),
        "ppo shared, completions": (
            ppo(critic="shared"),
            policy(),
            completions("old_logprobs", "advantages", "values", "returns"),
        ),
        "rloo, completions": (
            Reinforce(reward, advantage="rloo"),
            policy(),
            completions("advantages", "old_logprobs"),
        ),
        "grpo, completions": (
            Reinforce(reward, reduction="sequence_mean", policy_loss=clip, kl_coef=0.1, **k3),
            policy(),
            completions("advantages", "old_logprobs", "ref_logprobs"),
        ),
        "fixed length, completions": (
            Reinforce(reward, reduction="fixed_length", policy_loss=clip),
            policy(),
            completions("advantages", "old_logprobs"),
        ),
        "grpo, trajectories of several sequences": (
            Reinforce(reward, reduction="sequence_mean", policy_loss=clip, kl_coef=0.1, **k3),
            policy(),
            episodes("advantages", "old_logprobs", "ref_logprobs"),
        ),
        "ppo shared": (ppo(critic="shared", reduction="sequence_mean"), policy(), rollouts),
    }


def trainer(
    folder: str,
    method: Any,
    model: Any,
    loader: Any,
    steps: int,
    callback: TrainerCallback,
    neftune: float | None = None,
    bf16: bool = False,
    **layout: Any,
) -> Trainer:
    """A trainer of ``steps`` steps that a loader gives, by Adam with weight decay."""
    method.loader, method.examples = loader, lambda *_: Encoded([], [])
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=0,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        ddp_backend="gloo" if "RANK" in os.environ else None,
        neftune_noise_alpha=neftune,
        bf16=bf16,
    )
    made = Trainer(
        model=model,
        args=arguments,
        method=method,
        train_dataset=[Text("", "none")],
        processing_class=tokenizer(),
        callbacks=[callback],
        **layout,
    )
    if isinstance(made.network.critic, SharedCritic | StepValueHead):
        # heads start at zero, which would hide the gradient that goes through them
        torch.manual_seed(2)
        for parameter in made.network.critic.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return made


def network(critic: bool) -> Network:
    """A policy in float64, with a critic that is a head on it where asked."""
    torch.manual_seed(1)
    policy = exact(LlamaForCausalLM(CONFIG), torch.float64).eval()
    head = SharedCritic(CONFIG.hidden_size, torch.float64) if critic else None
    if head is not None:
        torch.nn.init.normal_(head.score.weight, std=0.3)
    return Network(policy, head)


def plain_gradient(method: Any, network: Network, layout: Layout, examples: list[Example], budget: int | None) -> Any:
    """The gradient of the loss of one step, without a trainer."""
    counts = total_counts(examples)
    network.zero_grad()
    for batch in layout.cut(examples, budget, 0, 1):
        terms = method.loss(network, batch)
        parts = [weight * terms[n].total / counts[terms[n].unit] for n, weight in method.weights.items()]
        torch.stack(parts).sum().backward()
    return torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])


def partial_steps(folder: str) -> dict[str, dict[str, torch.Tensor]]:
    """The weights after each of four steps in which a part of the network has no gradient in some."""
    made = cases(torch.float64)
    rollouts, solutions = made["ppo separate"][2], made["step_value"][2]
    wrong, right = ([e for i, e in enumerate(solutions) if i % 2 == odd] for odd in (0, 1))
    weights = {}
    # tokens are learned in the third step of step_value alone, and in that of PPO, where else only the critic learns
    for name, steps in (
        ("ppo separate", [rollouts] * 4),
        ("ppo shared", [rollouts] * 4),
        ("step_value", [wrong, wrong, right + wrong, wrong]),
    ):
        method, model, _ = made[name]
        after: list[dict[str, torch.Tensor]] = []
        taken = iter(enumerate(steps))

        class Keep(TrainerCallback):
            def on_step_end(self, args, state, control, model: Any = None, into=after, **_):
                into.append({n.removeprefix("module."): p.detach().clone() for n, p in model.named_parameters()})

        def finish(_: list, taken=taken, method=method) -> list:
            step, examples = next(taken)
            if isinstance(method, PPO):
                method.warming_up = step in (0, 1, 3)
            return examples

        def loader(_, engine, run, finish=finish) -> Any:
            return RowLoader(rollouts, len(rollouts), 0, finish)

        trainer(folder, method, model, loader, len(steps), Keep(), token_budget=60).train()
        weights |= {f"{name}, step {i}": state for i, state in enumerate(after, 1)}
    return weights


def gradients(folder: str, dtype: torch.dtype, bf16: bool = False, **layout: Any) -> dict[str, torch.Tensor]:
    """Run one step of each method, under autocast if ``bf16``, and return the gradient that the optimizer would see."""
    by_method = {}

    for name, (method, model, examples) in cases(dtype).items():
        grads: list[torch.Tensor] = []

        class Keep(TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model: Any = None, into=grads, **_):
                into.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone())

        def loader(_, engine, run, method=method, examples=examples) -> Any:
            ready = (lambda step: method.ready(step, engine)) if isinstance(method, DPO) else None
            return RowLoader(examples, len(examples), 0, ready)

        # as strong as the embeddings, whose standard deviation is 0.02
        neftune = 0.5 if "noise" in name else None
        trainer(folder, method, model, loader, 1, Keep(), neftune, bf16, **layout).train()
        by_method[name] = grads[0]
    return by_method


if __name__ == "__main__":
    gc.freeze()  # transformers collects garbage in each training, which takes long with all that was imported
    results: dict[str, Any] = {
        str(dtype): gradients(sys.argv[1], dtype, token_budget=60) for dtype in (torch.float32, torch.float64)
    }
    results["weights"] = partial_steps(sys.argv[1])
    if torch.distributed.get_rank() == 0:
        torch.save(results, Path(sys.argv[1]) / "gradients.pt")
    torch.distributed.barrier()
    # exit without destroying gloo: its destructor holds the interpreter lock and may wait for a thread that needs it
    os._exit(0)
