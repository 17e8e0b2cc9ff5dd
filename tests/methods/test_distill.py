"""Distillation: divergences of whole distributions at the right tokens, on completions of the student or on files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from builders import character_tokenizer, llama
from burnish import Distill, UserError, cli
from burnish.config import load
from burnish.config import run as config
from burnish.generate.sampling import Sampling
from burnish.models import forward
from burnish.models.distillation import vocabulary_problem
from burnish.models.loaded import Loaded
from burnish.recipes import write_rows
from burnish.report.metrics import Recorder
from burnish.rewards.functions import NamedReward
from burnish.types import Conversation, Example, MicroBatch, Prompt, Trajectory
from tiny_runs import Gradients, entries, lora

SHORT = Sampling(max_new_tokens=6, samples=2)


def prompts(n: int, first: int = 0) -> list[Prompt]:
    rows = range(first, first + n)
    return [Prompt(({"role": "user", "content": f"{i} + {'1' * (i % 3)}"},), {}, f"prompts:{i}") for i in rows]


def conversations(n: int, first: int = 0) -> list[Conversation]:
    return [
        Conversation(
            ({"role": "user", "content": f"{i} + 1"}, {"role": "assistant", "content": f"{i + 1}{'!' * (i % 4)}"}),
            None,
            f"chat:{i}",
        )
        for i in range(first, first + n)
    ]


def teacher(**config: Any) -> Loaded:
    """A larger model than the student."""
    return Loaded("teacher", llama(7, hidden_size=48, num_hidden_layers=3, **config), character_tokenizer())


def distill(sampling: Sampling | None = SHORT, by: Loaded | None = None, **settings: Any) -> Distill:
    loaded = by or teacher()
    return Distill(sampling=sampling, load=lambda _: loaded, teacher=loaded.reference, **settings)


def batch_of(trainer: Any, examples: list[Example]) -> MicroBatch:
    return trainer.engine.layout.collate(examples)


def whole_logits(model: Any, batch: MicroBatch) -> Tensor:
    """The logits (B, T, V) that predict each token, with one sequence in each row, by transformers alone."""
    logits = model(input_ids=batch.tokens, attention_mask=(batch.segments > 0).long()).logits
    return torch.cat([logits[:, :1], logits[:, :-1]], 1)


def defined(student: Tensor, teacher: Tensor, batch: MicroBatch, kind: str, beta: float = 0.5) -> Tensor:
    """The sum over learned tokens of the definition of a divergence, or of log Q / P of the tokens."""
    log_q, log_p = (x[batch.loss_mask].log_softmax(-1) for x in (student, teacher))
    q, p = log_q.exp(), log_p.exp()
    log_m = (beta * p + (1 - beta) * q).log()
    if kind == "sampled":
        at = batch.tokens[batch.loss_mask][:, None]
        return (log_q.gather(1, at) - log_p.gather(1, at)).sum()
    forms = {
        "forward": p * (log_p - log_q),
        "reverse": q * (log_q - log_p),
        "jensen_shannon": beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m),
    }
    return forms[kind].sum()


# --- the loss -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["forward", "reverse", "jensen_shannon", "sampled"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("at_once", [2**26, 500])
def test_the_loss_is_the_definition_over_the_whole_vocabulary(
    kind: str, temperature: float, at_once: int, make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several chunks of logits too, and with the gradient of the definition."""
    monkeypatch.setattr(forward, "LOGITS_AT_ONCE", at_once)
    settings: dict[str, Any] = {"divergence": kind, "temperature": temperature}
    method = distill(Sampling(temperature=temperature), teacher(dtype=torch.float64), **settings)
    student: Any = llama(dtype=torch.float64)
    trainer = make_trainer(method, student, conversations(5), own={"packed": False})
    batch = batch_of(trainer, trainer.train_examples.examples)
    terms = method.loss(trainer.network, batch)
    logits, other = (whole_logits(model, batch) / temperature for model in (student, method.teacher.model))
    expected = defined(logits, other, batch, kind)
    torch.testing.assert_close(terms["divergence"].total, expected)
    for name in ("forward", "reverse"):
        torch.testing.assert_close(terms[f"{name}_kl"].total, defined(logits, other, batch, name))
    counts = [float(term.count) for term in terms.values() if term.count is not None]
    assert counts == [float(batch.loss_mask.sum())] * 3
    if kind == "sampled":  # the gradient of log Q / P, weighted by it
        log_q, log_p = (x[batch.loss_mask].log_softmax(-1) for x in (logits, other))
        at = batch.tokens[batch.loss_mask][:, None]
        difference = log_q.gather(1, at) - log_p.gather(1, at)
        expected = (difference.detach() * difference).sum()
    wanted = list(student.parameters())
    ours = torch.autograd.grad(terms["divergence"].total, wanted)
    for got, gradient in zip(ours, torch.autograd.grad(expected, wanted), strict=True):
        torch.testing.assert_close(got, gradient, rtol=1e-8, atol=1e-10)


def test_a_student_equal_to_its_teacher_learns_nothing(make_trainer: Any) -> None:
    keep = Gradients()
    method = distill(by=Loaded("teacher", llama(0), character_tokenizer()))
    make_trainer(method, llama(0), prompts(4), own={"callbacks": [keep]}).train()
    assert not any(x.any() for step in keep.gradients for x in step.values())


def test_rows_of_the_embeddings_that_only_one_model_has_are_left_out(make_trainer: Any) -> None:
    """Padded embeddings are not tokens. The other logits, and so the loss, stay as they are."""
    rows = conversations(3)
    losses = []
    for student_rows, teacher_rows in ((105, 105), (105, 128), (112, 105)):
        models: list[Any] = [llama(0), teacher().model]
        for model, size in zip(models, (student_rows, teacher_rows), strict=True):
            if size > 105:
                torch.manual_seed(0)
                model.resize_token_embeddings(size, mean_resizing=False)
                model.get_output_embeddings().weight.data[105:] = 3.0
        method = distill(by=Loaded("teacher", models[1], character_tokenizer()))
        trainer = make_trainer(method, models[0], rows)
        total = method.loss(trainer.network, batch_of(trainer, trainer.train_examples.examples))["divergence"].total
        losses.append(total.item())
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


# --- on-policy ----------------------------------------------------------------------------------------------------


def run(
    make_trainer: Any, method: Distill, rows: list[Any], held_out: list[Any], model: Any = None, **more: Any
) -> Any:
    """A trained trainer, with the evaluations before and after, and the examples of each step."""
    own = {"eval_dataset": held_out, **more.pop("own", {})}
    trainer = make_trainer(method, llama() if model is None else model, rows, lr=3e-3, own=own, **more)
    steps: list[list[Example]] = []
    step = trainer.training_step

    def stepping(model: Any, inputs: Any, *rest: Any) -> Any:
        steps.append(inputs[0])
        return step(model, inputs, *rest)

    trainer.training_step = stepping
    before = trainer.evaluate()
    trainer.train()
    return trainer, before, trainer.evaluate(), steps


@pytest.mark.parametrize(
    ("settings", "factor"),
    [({}, 0.7), ({"divergence": "jensen_shannon", "beta": 0.3}, 0.7), ({"divergence": "sampled"}, 0.95)],
)
def test_the_student_comes_closer_to_its_teacher_on_held_out_prompts(
    settings: dict[str, Any], factor: float, make_trainer: Any
) -> None:
    trainer, before, after, steps = run(
        make_trainer, distill(**settings), prompts(16), prompts(12, 100), num_train_epochs=8
    )
    assert after["eval_reverse_kl"] < factor * before["eval_reverse_kl"]
    for name in ("forward_kl", "reverse_kl"):
        assert after[f"eval_{name}_low"] < after[f"eval_{name}"] < after[f"eval_{name}_high"]
        assert after[f"eval_{name}_change_high"] < 0
    assert "eval_score" not in after and after["eval_length"] > 1
    log = [line for line in trainer.state.log_history if "loss" in line]
    assert len(steps) == len(log) == 32 and all(line["sampler_mismatch"] < 1e-4 for line in log)
    assert all(len(step) == 8 for step in steps)  # four prompts with two completions each


def test_the_student_learns_exactly_the_tokens_that_it_sampled(make_trainer: Any) -> None:
    seen: list[Trajectory] = []

    def reward(trajectories: list[Trajectory]) -> list[float]:
        seen.extend(trajectories)
        return [float(len(t.tokens)) for t in trajectories]

    loaded = teacher()
    method = Distill([NamedReward("long", 0.0, reward)], SHORT, load=lambda _: loaded, teacher="teacher")
    trainer, before, _, steps = run(make_trainer, method, prompts(8), prompts(3, 100))
    learned = {(s.source, tuple(s.tokens[s.loss_mask])) for step in steps for e in step for s in e.sequences}
    sampled = {(t.source, tuple(t.tokens)) for t in seen}
    assert learned <= sampled and len({source for source, _ in learned}) == 8
    log = [line for line in trainer.state.log_history if "loss" in line]
    assert before["eval_reward_long"] == before["eval_length"] and log[0]["reward_long"] == log[0]["length"]
    every = {tuple(t.tokens) for t in seen}
    assert all(len(tokens) <= 6 for tokens in every)


def test_a_reward_is_measured_and_changes_nothing(make_trainer: Any, weights: Callable[[Any], bytes]) -> None:
    ends = []
    for rewards in (None, [NamedReward("long", 0.0, lambda trajectories: [1.0 * len(t.text) for t in trajectories])]):
        loaded = teacher()
        method = Distill(rewards, SHORT, load=lambda _, loaded=loaded: loaded, teacher="teacher")
        trainer = make_trainer(method, llama(), prompts(4))
        trainer.train()
        ends.append(weights(trainer.network.policy))
    assert ends[0] == ends[1] != weights(llama())


def test_an_adapter_learns_and_the_teacher_does_not(make_trainer: Any, weights: Callable[[Any], bytes]) -> None:
    loaded = teacher()
    start = weights(loaded.model)
    model = lora(llama())
    _, before, after, _ = run(make_trainer, distill(by=loaded), prompts(16), prompts(8, 100), model, num_train_epochs=4)
    assert after["eval_reverse_kl"] < 0.9 * before["eval_reverse_kl"]
    assert weights(loaded.model) == start and not any(p.requires_grad for p in loaded.model.parameters())


def test_samples_have_no_score(make_trainer: Any, tmp_path: Any) -> None:
    shown: list[dict[str, Any]] = []
    own = {"recorder": Recorder(tmp_path), "show_samples": shown.extend}
    run(make_trainer, distill(show_every=1), prompts(8), prompts(2, 100), own=own)
    assert [row["kind"] for row in shown] == ["eval"] * 2 + ["train"] * 8 + ["eval"] * 2
    assert all("score" not in row and row["finish_reason"] in ("stop", "length") for row in shown)


# --- off-policy ---------------------------------------------------------------------------------------------------


def test_conversations_are_learned_at_the_tokens_of_the_assistant(make_trainer: Any) -> None:
    method = distill(None, divergence="forward")
    _, before, after, steps = run(make_trainer, method, conversations(16), conversations(8, 100), num_train_epochs=4)
    assert after["eval_forward_kl"] < 0.7 * before["eval_forward_kl"]
    assert after["eval_loss"] == after["eval_divergence"] == pytest.approx(after["eval_forward_kl"])
    tokenizer = character_tokenizer()
    (row,) = (e.sequences[0] for step in steps[:4] for e in step if e.source == "chat:3")
    assert tokenizer.decode(row.tokens[row.loss_mask]) == "4!!!<|im_end|>"


# --- recipes --------------------------------------------------------------------------------------------------------

RECIPE = """
name: two
out: run
stages:
  - name: teacher
    method: {name: sft}
    model: base
    data: {train: chat.jsonl}
    trainer: &step {max_steps: 1, learning_rate: 1.0e-2}
  - name: on
    method: {name: distill, teacher: {stage: teacher}}
    model: base
    data: {train: prompts.jsonl, eval: prompts.jsonl}
    generation: {max_new_tokens: 4}
    trainer: *step
  - name: off
    method: {name: distill, teacher: {stage: teacher}, divergence: forward}
    model: {stage: on}
    adapter: {r: 4}
    data: {train: chat.jsonl}
    trainer: *step
"""


def test_a_recipe_names_a_stage_as_the_teacher(run_folder: Path) -> None:
    write_rows(run_folder / "prompts.jsonl", [{"prompt": f"{i} + 1", "answer": str(i + 1)} for i in range(8)])
    write_rows(run_folder / "chat.jsonl", [{"prompt": f"{i} + 1", "completion": str(i + 1)} for i in range(8)])
    Path("two.yaml").write_text(RECIPE, "utf-8")
    config.run(load("two.yaml"))
    made = entries(Path("run"))
    for stage in ("on", "off"):
        assert made[stage]["state"] == "done"
        assert "teacher/model/model.safetensors" in made[stage]["inputs"]
    assert {"eval_reverse_kl", "eval_forward_kl_low"} <= made["on"]["results"]["after"].keys()
    inspected = CliRunner().invoke(cli.app, ["inspect", "two.yaml"]).stdout
    assert len(re.findall(r"^teacher +0\.00 GiB", inspected, re.MULTILINE)) == 2
    Path("two.yaml").write_text(RECIPE.replace("teacher: {stage: teacher}}", "teacher: {stage: off}}"), "utf-8")
    with pytest.raises(UserError, match=r"method\.teacher\.stage: 'off' is not an earlier stage"):
        load("two.yaml")
    Path("two.yaml").write_text(RECIPE.replace("teacher: {stage: teacher}}", "teacher: ./none}"), "utf-8")
    with pytest.raises(UserError, match=r"method\.teacher: no such model: \./none"):
        load("two.yaml")


# --- mistakes -----------------------------------------------------------------------------------------------------


def test_a_vocabulary_that_differs_is_described() -> None:
    base = {"a": 0, "b": 1}
    assert vocabulary_problem(base, dict(base)) is None
    moved = vocabulary_problem(base, {"a": 1, "b": 0})
    assert moved == "2 of the tokens have other ids, the first is 'a', 0 in the student and 1 in the teacher"
    more = vocabulary_problem(base, {"a": 0, "c": 1, "d": 2})
    assert more == "of the tokens, 1 only the student has, such as 'b' and 2 only the teacher has, such as 'c'"


def test_models_that_cannot_teach(make_trainer: Any) -> None:
    other = character_tokenizer()
    other.add_tokens(["<tool>"])
    for loaded, problem in (
        (Loaded("big", llama(1), other), "big has another tokenizer .* only the teacher has, such as '<tool>'"),
        (Loaded("big", llama(1), character_tokenizer(), is_reward_model=True), "big is a reward model"),
        (Loaded("big", llama(1, vocab_size=104), character_tokenizer()), "ids up to 104, but big .* only 104"),
    ):
        with pytest.raises(UserError, match=problem):
            make_trainer(distill(by=loaded), llama(), prompts(4))


def test_a_sequence_that_the_teacher_cannot_read_is_named(make_trainer: Any) -> None:
    small = teacher(max_position_embeddings=20)
    with pytest.raises(UserError, match=r"prompts:\d: \d+ tokens, but the teacher teacher reads at most 20"):
        make_trainer(distill(by=small), llama(), prompts(4)).train()
    with pytest.raises(UserError, match=r"chat:\d: \d+ tokens, but the teacher teacher reads at most 20"):
        make_trainer(distill(by=small), llama(), conversations(4)).train()


def test_a_sampled_id_that_is_no_token_is_named(make_trainer: Any) -> None:
    student: Any = llama(0, vocab_size=400)
    with pytest.raises(UserError, match=r"prompts:\d: the student sampled the id \d+, which stands for no token"):
        make_trainer(distill(), student, prompts(4)).train()


@pytest.mark.parametrize(
    ("sampling", "settings", "problem"),
    [
        ({}, {"beta": 0.5}, "divergence reverse does not use beta: remove this key"),
        ({}, {"divergence": "jensen_shannon", "beta": 1.0}, "beta"),
        ({}, {"temperature": 1e-5}, "temperature 1e-05 is too small"),
        ({"temperature": 0.0, "samples": 2}, {}, r"generation\.samples: greedy decoding gives the same completion"),
        ({"top_p": 0.9}, {"divergence": "sampled"}, r"generation\.top_p sample from a part of it"),
        ({"temperature": 0.7}, {"divergence": "sampled"}, r"which is generation\.temperature 0\.7, got 1$"),
    ],
)
def test_settings_that_contradict_each_other(sampling: dict[str, Any], settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        Distill(sampling=Sampling(**sampling), teacher="teacher", **settings)


def test_settings_of_prompts_are_refused_for_conversations(make_trainer: Any) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"show_every": 2}, r"method\.show_every belongs to prompts, but the rows are conversations"),
        ({"divergence": "sampled"}, r"method\.divergence: sampled learns from tokens that the student sampled"),
    ]
    for settings, problem in wrong:
        with pytest.raises(UserError, match=problem):
            make_trainer(distill(**settings), llama(), conversations(4)).train()
    with pytest.raises(UserError, match="prompts:0 is a Prompt row and chat:0 a Conversation row"):
        make_trainer(distill(), llama(), [*prompts(2), *conversations(2)]).train()
    with pytest.raises(UserError, match="expected a folder or a hub id"):
        make_trainer(Distill(teacher={"stage": "sft"}), llama(), prompts(4))
    with pytest.raises(UserError, match="reward long: distill learns from the teacher alone: set weight: 0"):
        Distill([NamedReward("long", 0.5, lambda trajectories: [0.0] * len(trajectories))], teacher="teacher")
