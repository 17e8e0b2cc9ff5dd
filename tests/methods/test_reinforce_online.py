"""REINFORCE on prompts: what is sampled, compared, clipped and penalized; RLOO, GRPO and REINFORCE++ as settings."""

from __future__ import annotations

import copy
import math
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from burnish import Reinforce, UserError
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Completion
from burnish.generate.sampling import Sampling
from burnish.models.layout import Layout
from burnish.types import Example, Prompt, Scored, Sequence, Trajectory

FOUR = Sampling(max_new_tokens=6, samples=4)
SETTINGS: dict[str, dict[str, Any]] = {
    "reinforce": {},
    "rloo": {"advantage": "rloo", "kl_coef": 0.05},
    "grpo": {
        "advantage": "group_std",
        "reduction": "sequence_mean",
        "policy_loss": "clip",
        "kl_coef": 0.04,
        "kl_in": "loss",
        "kl_estimate": "k3",
    },
    "reinforce++": {
        "advantage": "batch_whitened",
        "reduction": "token_mean",
        "policy_loss": "clip",
        "kl_coef": 0.01,
    },
}


def by_tokens(answers: list[Trajectory]) -> list[float]:
    """A score that follows from the tokens alone."""
    return [sum(a.tokens) % 9 / 4 - 1 for a in answers]


def prompts(n: int) -> list[Prompt]:
    return [Prompt(({"role": "user", "content": f"{i} + {'1' * (i % 3)}"},), {}, f"prompts:{i}") for i in range(n)]


@pytest.fixture
def run(make_trainer: Any, tiny_llama: Any) -> Any:
    """Trains and keeps the rollouts of every iteration and the examples of every step."""

    def go(
        model: Any = None,
        sampling: Sampling = FOUR,
        rows: int = 4,
        generator: Any = None,
        batch: int = 2,
        optim: str = "adamw_torch_fused",
        reward: Any = by_tokens,
        **settings: Any,
    ) -> tuple[Any, list[list[Example]], list[list[Example]]]:
        if model is None:
            model = tiny_llama()
        model.generation_config.eos_token_id = [2, *range(15, 25)]  # so that some completions stop
        trainer = make_trainer(
            Reinforce(reward, sampling, generator, **settings),
            model,
            prompts(rows),
            batch=batch,
            lr=1e-2,
            optim=optim,
        )
        loader, step = trainer.get_train_dataloader(), trainer.training_step
        batches: list[list[Example]] = []
        steps: list[list[Example]] = []
        gather = loader._collect

        def collecting(indices: list[int]) -> None:
            gather(indices)
            batches.append(loader.pending)

        def stepping(model: Any, inputs: Any, *rest: Any) -> Any:
            steps.append(inputs[0])
            return step(model, inputs, *rest)

        loader._collect, trainer.training_step = collecting, stepping
        trainer.train()
        return trainer, batches, steps

    return go


def completion(example: Example) -> list[int]:
    (sequence,) = example.sequences
    return [token for token, on in zip(sequence.tokens, sequence.loss_mask, strict=True) if on]


def advantage(example: Example) -> list[float]:
    (sequence,) = example.sequences
    return [x for x, on in zip(sequence.arrays["advantages"], sequence.loss_mask, strict=True) if on]


def score(example: Example) -> float:
    return sum(completion(example)) % 9 / 4 - 1


@torch.no_grad()
def plain_logprobs(model: Any, sequence: Sequence) -> torch.Tensor:
    """Log-probabilities of the learned tokens by transformers alone."""
    tokens = torch.tensor([sequence.tokens.tolist()])
    found = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    return found[torch.tensor(sequence.loss_mask[1:].tolist())]


# --- the four -----------------------------------------------------------------------------------------------------


def test_ten_lines_of_plain_torch_give_the_same_gradient(make_trainer: Any, tiny_llama: Any, run: Any) -> None:
    start = tiny_llama()
    trainer, batches, _ = run(rows=2, advantage="rloo")
    loss = torch.zeros(())
    for i, example in enumerate(batches[0]):
        others = [score(e) for j, e in enumerate(batches[0]) if j != i and j // 4 == i // 4]
        (sequence,) = example.sequences
        tokens = torch.tensor([sequence.tokens.tolist()])
        logprobs = start(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        loss = (
            loss
            - (score(example) - sum(others) / 3) * (logprobs * torch.tensor(sequence.loss_mask[1:].tolist())).sum() / 8
        )
    loss.backward()
    line = trainer.state.log_history[0]
    assert line["loss"] == pytest.approx(loss.item(), abs=1e-3)
    norm = torch.cat([p.grad.flatten() for p in start.parameters()]).norm().item()
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("name", SETTINGS)
def test_each_compares_as_its_paper_says(name: str, run: Any, tiny_llama: Any) -> None:
    trainer, batches, steps = run(**SETTINGS[name])
    assert len(batches) == len(steps) == 2 and all(len(batch) == 8 for batch in batches)
    for number, batch in enumerate(batches):
        scores = torch.tensor([score(e) for e in batch], dtype=torch.float64).view(2, 4)
        if name == "grpo":
            std = scores.std(1, correction=0, keepdim=True)
            expected = ((scores - scores.mean(1, keepdim=True)) / std.where(std > 0, 1)).flatten()
            assert [advantage(e)[0] for e in batch] == pytest.approx(expected.tolist(), abs=1e-5)
        elif name == "reinforce":
            assert [advantage(e)[0] for e in batch] == pytest.approx(scores.flatten().tolist())
        elif name == "rloo" and number == 0:  # where the KL is still 0
            expected = (4 / 3) * (scores - scores.mean(1, keepdim=True))
            assert [advantage(e)[0] for e in batch] == pytest.approx(expected.flatten().tolist(), abs=1e-6)
        elif name == "reinforce++":
            pooled = torch.tensor([x for e in batch for x in advantage(e)], dtype=torch.float64)
            assert pooled.mean().item() == pytest.approx(0, abs=1e-6)
            assert pooled.var().item() == pytest.approx(1, abs=1e-5)
        if name in ("reinforce", "rloo", "grpo"):
            assert all(len(set(advantage(e))) == 1 for e in batch)  # one for the whole completion
    first = trainer.state.log_history[0]
    assert first["ratio"] == pytest.approx(1, abs=1e-5) and first["approxkl"] < 1e-5
    assert first["sampler_mismatch"] < 1e-5 and 0 < first["entropy"] <= math.log(105)
    assert first["zero_advantage_fraction"] == sum(not any(advantage(e)) for e in batches[0]) / 8 < 1
    assert ("kl" in first) == (name != "reinforce")
    assert first.get("kl", 0.0) == first.get("kl_loss", 0.0) == first.get("clipfrac", 0.0) == 0.0


def test_rloo_takes_the_kl_from_the_whole_completion(run: Any, tiny_llama: Any) -> None:
    reference = tiny_llama()
    trainer, batches, _ = run(advantage="rloo", kl_coef=0.5)
    batch = batches[1]
    ratios = []
    for example in batch:
        (sequence,) = example.sequences
        now = math.fsum(x for x, on in zip(sequence.arrays["old_logprobs"], sequence.loss_mask, strict=True) if on)
        ratios.append(now - plain_logprobs(reference, sequence).sum().item())
    rewards = torch.tensor([score(e) - 0.5 * d for e, d in zip(batch, ratios, strict=True)]).view(2, 4)
    expected = (4 / 3) * (rewards - rewards.mean(1, keepdim=True)).flatten()
    assert max(map(abs, ratios)) > 0.01
    assert [advantage(e)[0] for e in batch] == pytest.approx(expected.tolist(), abs=1e-4)
    kls = [line["kl"] for line in trainer.state.log_history if "kl" in line]
    assert kls[1] == pytest.approx(sum(ratios) / 8, abs=1e-4)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_the_kl_in_the_loss_is_that_of_the_tokens(kind: str, run: Any, tiny_llama: Any) -> None:
    reference, model = tiny_llama(), tiny_llama()
    settings = SETTINGS["grpo"] | {"kl_estimate": kind}
    trainer, batches, _ = run(model, **settings)
    line = trainer.state.log_history[1]
    each = []
    for example in batches[1]:
        (sequence,) = example.sequences
        now = torch.tensor([x for x, on in zip(sequence.arrays["old_logprobs"], sequence.loss_mask, strict=True) if on])
        d = now - plain_logprobs(reference, sequence)
        each.append((d.square() / 2 if kind == "k2" else torch.exp(-d) - 1 + d).mean().item())
    assert line["kl_loss"] == pytest.approx(sum(each) / 8, abs=1e-5) and line["kl_loss"] > 1e-4
    assert line["loss"] == pytest.approx(line["policy"] + 0.04 * line["kl_loss"], abs=1e-4)


def test_one_update_needs_no_clip(run: Any) -> None:
    # plain gradient descent: Adam would make a step of full size out of the rounding of a gradient near 0
    how = {"advantage": "rloo", "optim": "sgd"}
    plain, clipped = (run(**how, **clip)[0] for clip in ({}, {"policy_loss": "clip"}))
    for a, b in zip(plain.network.parameters(), clipped.network.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_several_updates_are_clipped(run: Any) -> None:
    trainer, _, steps = run(
        advantage="group_std",
        policy_loss={"name": "clip", "clip_low": 0.01, "clip_high": 0.01},
        epochs=3,
        mini_batches=2,
    )
    assert [len(step) for step in steps] == [4] * 12
    lines = [line for line in trainer.state.log_history if "clipfrac" in line]
    assert lines[0]["clipfrac"] == 0.0 and max(line["clipfrac"] for line in lines) > 0.1
    stopped, _, taken = run(advantage="group_std", policy_loss="clip", epochs=3, target_kl=1e-7)
    # the second step's own pass tells that the first went too far
    assert [bool(step) for step in taken] == [True, True, False] * 2
    assert stopped.state.global_step == 6


class Witness(LocalGenerator):
    """Keeps a copy of every policy that it samples from."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.policies: list[Any] = []

    def submit(self, requests: Any, version: int) -> list[int]:
        self.policies.append(copy.deepcopy(self.model))
        return super().submit(requests, version)


def test_the_kl_is_that_of_whole_distributions_whatever_top_k_leaves_out(run: Any, tiny_llama: Any) -> None:
    reference = tiny_llama()
    sampling = Sampling(max_new_tokens=6, samples=4, top_k=3, temperature=0.5)
    settings = SETTINGS["grpo"] | {"kl_estimate": "k2", "reduction": "fixed_length"}
    trainer, batches, _ = run(sampling=sampling, generator=Witness, **settings)
    witness = trainer.method.sampler.generator
    line = trainer.state.log_history[1]
    sums, squares, policy = [], [], []
    for example in batches[1]:
        (sequence,) = example.sequences
        on, tokens = torch.tensor(sequence.loss_mask[1:].tolist()), torch.tensor(sequence.tokens[1:].tolist())[:, None]
        with torch.no_grad():
            logits, before = (
                m(torch.tensor([sequence.tokens.tolist()])).logits[0, :-1] / 0.5
                for m in (witness.policies[1], reference)
            )
        kept = logits.masked_fill(logits < logits.topk(3).values[:, -1:], -torch.inf)
        inside, now, then = (x.log_softmax(-1).gather(1, tokens)[on, 0] for x in (kept, logits, before))
        assert torch.tensor(sequence.arrays["old_logprobs"][1:].tolist())[on].tolist() == pytest.approx(
            inside.tolist(), abs=1e-4
        )
        sums.append((now - then).sum().item())
        squares.append((now - then).square().sum().item() / 2 / 6)
        policy.append(-sum(advantage(example)) / 6)
    assert line["sampler_mismatch"] < 1e-5
    assert line["kl"] == pytest.approx(sum(sums) / 8, abs=1e-4)
    assert line["kl_loss"] == pytest.approx(sum(squares) / 8, abs=1e-5) and line["kl_loss"] > 1e-4
    assert line["policy"] == pytest.approx(sum(policy) / 8, abs=1e-4)


def test_a_prompt_runs_once_for_its_completions(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[list[int]] = [[], []]
    found = []
    for shared, seen in zip((True, False), widths, strict=True):
        collate = Layout.collate

        def watched(layout: Any, examples: list[Example], shared=shared, seen=seen, collate=collate) -> Any:
            layout.shared_prompts = shared
            batch = collate(layout, examples)
            seen.append(int((batch.segments > 0).sum()))
            return batch

        with monkeypatch.context() as patch:
            patch.setattr(Layout, "collate", watched)
            found.append(run(rows=2, **SETTINGS["grpo"]))
    (trainer, (batch,), _), (alone, (same,), _) = found
    prompt = sum(not on for on in batch[0].sequences[0].loss_mask)
    assert widths[1][-1] - widths[0][-1] == sum(
        3 * (sum(not on for on in batch[i].sequences[0].loss_mask) - 1) for i in (0, 4)
    )
    assert prompt > 10 and [completion(e) for e in batch] == [completion(e) for e in same]
    for a, b in zip(trainer.network.parameters(), alone.network.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def per_token(answers: list[Trajectory]) -> list[list[float]]:
    return [[float(token % 3) for token in a.tokens] for a in answers]


def test_rewards_of_tokens_count_from_where_they_lie(make_trainer: Any, tiny_llama: Any) -> None:
    method = Reinforce(per_token, FOUR, advantage="batch_whitened", score_scale=2.0)
    trainer = make_trainer(method, tiny_llama(), prompts(2), batch=2)
    loader = trainer.get_train_dataloader()
    (step,) = iter(loader)
    later = [2.0 * sum(t % 3 for t in completion(e)[i:]) for e in step for i in range(len(completion(e)))]
    mean, std = statistics.fmean(later), statistics.stdev(later)
    found = [x for e in step for x in advantage(e)]
    assert found == pytest.approx([(x - mean) / std for x in later], abs=1e-4)


def test_groups_of_equal_scores_are_told(run: Any) -> None:
    trainer, batches, _ = run(sampling=Sampling(max_new_tokens=1, top_k=1, samples=4), advantage="group_std")
    assert all(set(advantage(e)) == {0.0} for batch in batches for e in batch)
    assert [
        line["zero_advantage_fraction"] for line in trainer.state.log_history if "zero_advantage_fraction" in line
    ] == [1.0, 1.0]


def test_equal_scores_carry_no_signal_when_whitened(run: Any) -> None:
    def equal(answers: list[Trajectory]) -> list[float]:
        return [0.1] * len(answers)

    trainer, batches, _ = run(reward=equal, advantage="batch_whitened")
    lengths = {len(completion(e)) for batch in batches for e in batch}
    assert len(lengths) > 1
    assert all(set(advantage(e)) == {0.0} for batch in batches for e in batch)
    assert [
        line["zero_advantage_fraction"] for line in trainer.state.log_history if "zero_advantage_fraction" in line
    ] == [1.0, 1.0]


def test_scores_are_normalized_by_all_so_far(run: Any) -> None:
    _, batches, _ = run(score_normalize=True, score_scale=0.5)
    seen: list[float] = []
    for batch in batches:
        seen += [score(e) for e in batch]
        mean, std = statistics.fmean(seen), statistics.stdev(seen)
        assert [advantage(e)[0] for e in batch] == pytest.approx(
            [0.5 * (score(e) - mean) / std for e in batch], abs=1e-5
        )


def test_a_greedy_evaluation_takes_the_likeliest_tokens(run: Any, make_trainer: Any, tiny_llama: Any) -> None:
    model = tiny_llama()
    method = Reinforce(by_tokens, Sampling(max_new_tokens=4, samples=3), evaluation="greedy", reference=True)
    shown: list[dict[str, Any]] = []
    own = {"eval_dataset": prompts(3), "show_samples": shown.extend}
    trainer = make_trainer(method, model, prompts(4), own=own)
    found = trainer.evaluate()
    assert found["eval_kl"] == 0.0
    for row, sample in zip(prompts(3), shown, strict=True):
        tokens = trainer.tokenizer.apply_chat_template(list(row.messages), add_generation_prompt=True)["input_ids"]
        start = len(tokens)
        for _ in range(4):
            tokens = [*tokens, model(torch.tensor([tokens])).logits[0, -1].argmax().item()]
        text = trainer.tokenizer.decode(tokens[start:], skip_special_tokens=True)
        assert text.startswith(sample["completion"])


def test_the_weight_of_what_another_sampled_is_capped(run: Any) -> None:
    class Liar(LocalGenerator):
        """Says that each token was less likely than it was, by a factor that grows along the completion."""

        def poll(self, timeout: float | None) -> list[tuple[int, Completion]]:
            done = super().poll(timeout)
            return [(n, replace(c, logprobs=c.logprobs - 0.1 * np.arange(len(c.logprobs)))) for n, c in done]

    _, (honest, *_), _ = run(rows=2, max_sampler_mismatch=1.0)
    correction = {"mode": "truncate", "cap": 1.25}
    _, (found, *_), _ = run(rows=2, generator=Liar, max_sampler_mismatch=1.0, correction=correction)
    for a, b in zip(honest, found, strict=True):
        weights = [w for w, on in zip(b.sequences[0].arrays["correction"], b.sequences[0].loss_mask, strict=True) if on]
        expected = [x * min(math.exp(0.1 * i), 1.25) for i, x in enumerate(advantage(a))]
        assert [x * w for x, w in zip(advantage(b), weights, strict=True)] == pytest.approx(expected, rel=1e-4)


# --- both forms ---------------------------------------------------------------------------------------------------


def test_prompts_evaluate_what_is_learned_from_scored_rows(make_trainer: Any, tiny_llama: Any) -> None:
    rows = [Scored((*p.messages, {"role": "assistant", "content": "1"}), 1.0, p.source) for p in prompts(8)]

    def ones(answers: list[Trajectory]) -> list[float]:
        return [float(a.text.startswith("1")) for a in answers]

    method = Reinforce(ones, Sampling(max_new_tokens=2))
    trainer = make_trainer(method, tiny_llama(), rows, lr=1e-2, num_train_epochs=5, own={"eval_dataset": prompts(20)})
    before = trainer.evaluate()["eval_score"]
    trainer.train()
    after = trainer.evaluate()
    assert before < 0.3 and after["eval_score"] > 0.9 and after["eval_win_rate"] > 0.8


def test_the_scores_of_the_start_go_with_the_state_of_a_run(make_trainer: Any, tiny_llama: Any) -> None:
    rated = [Scored((*p.messages, {"role": "assistant", "content": "1"}), 1.0, p.source) for p in prompts(4)]
    for rows in (prompts(4), rated):
        started, gone_on = (Reinforce(by_tokens, Sampling(max_new_tokens=2)) for _ in range(2))
        trainers = [make_trainer(m, tiny_llama(), rows, own={"eval_dataset": prompts(3)}) for m in (started, gone_on)]
        before, after = (trainer.get_train_dataloader() for trainer in trainers)
        trainers[0].evaluate()
        after.load_state_dict(copy.deepcopy(before.state_dict()))
        assert gone_on.sampler.start_scores == started.sampler.start_scores
        assert set(started.sampler.start_scores) == {f"prompts:{i}" for i in range(3)}


def test_better_answers_become_likelier(make_trainer: Any, tiny_llama: Any) -> None:
    def digits(answers: list[Trajectory]) -> list[float]:
        return [float(any(c.isdigit() for c in a.text)) for a in answers]

    method = Reinforce(digits, Sampling(max_new_tokens=3, samples=8), advantage="group_std")
    trainer = make_trainer(method, tiny_llama(), prompts(16), batch=8, lr=1e-2, num_train_epochs=8)
    trainer.train()
    scores = [line["score"] for line in trainer.state.log_history if "score" in line]
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_low": 0.2}, "clip_low"),
        ({"epochs": 2}, "epochs 2: after the first optimizer step the rollouts are off-policy"),
        ({"mini_batches": 2}, "mini_batches 2: after the first optimizer step the rollouts are off-policy"),
        ({"kl_in": "loss", "kl_coef": 0.1}, "k1 has no gradient as a loss"),
        ({"kl_in": "loss", "kl_coef": 0.1, "kl_estimate": "k2", "kl_target": 1.0}, "kl_target"),
        ({"policy_loss": {"name": "clip", "floor": -5.0}}, "floor"),
        ({"missing_eos": "subtract"}, "set missing_eos_penalty"),
    ],
)
def test_settings_that_contradict_each_other_are_told(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Reinforce(by_tokens, **settings)


def test_settings_that_do_not_fit_the_rows_are_told(make_trainer: Any, tiny_llama: Any) -> None:
    scored = [Scored((*p.messages, {"role": "assistant", "content": "1"}), 1.0, p.source) for p in prompts(5)]

    def told(rows: list[Any], message: str, reward: Any = by_tokens, sampling: Any = None, **settings: Any) -> None:
        with pytest.raises(UserError, match=message):
            make_trainer(Reinforce(reward, sampling, **settings), tiny_llama(), rows).train()

    told(prompts(4), "prompts need a reward", None)
    told([*prompts(4), *scored], "prompts:0 is a Prompt row and prompts:0 a Scored row")
    told(prompts(4), "advantage rloo compares completions of a prompt: got 1", advantage="rloo")
    told(prompts(4), "temperature", sampling=Sampling(temperature=0.0))
    told(prompts(4), "learn_eos belongs to scored rows", learn_eos=False)
    told(scored, r"method.mini_batches belongs to prompts", policy_loss="clip", mini_batches=2)
    told(scored, "set kl_in: loss", kl_coef=0.1)
    told(scored, "fixed_length divides by", reduction="fixed_length")
    told(scored, "5 rows in steps of 4 leave a step of one", advantage="mean")
