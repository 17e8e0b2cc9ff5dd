"""Step-level values: the loss against another formula, what gets a gradient, what is measured, going on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from burnish import SFT, StepValue
from burnish.data.loader import RowLoader
from burnish.errors import UserError
from burnish.methods.step_value import measured
from burnish.models.batching import collate
from burnish.models.heads import Network, StepValueHead
from burnish.render.truncate import Truncation
from burnish.types import Conversation, Example, Messages, MicroBatch, Steps, total_counts

QUESTION: Messages = ({"role": "user", "content": "3+8-2=?"},)
RIGHT = Steps(QUESTION, ("3+8=11", "11-2=9"), (0.5, 1.0), "s:1")
WRONG = Steps(QUESTION, ("3+8=12", "12-2=10", "so 10"), (-0.5, 0.0, -1.0), "s:2")
ROWS = [RIGHT, WRONG, Steps(QUESTION, ("9",), (1.0,), "s:3"), Steps(QUESTION, ("10",), (-1.0,), "s:4")]


class Gradients(TrainerCallback):
    """Keeps the gradient of every step."""

    def __init__(self) -> None:
        self.found: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model: Any = None, **_):
        self.found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def gradient(make_trainer, method, model, rows, step=0, **own) -> dict[str, torch.Tensor]:
    keep = Gradients()
    make_trainer(method, model, rows, batch=len(rows), max_steps=step + 1, own={"callbacks": [keep]} | own).train()
    return keep.found[step]


def batch_of(tokenizer, rows, **settings) -> tuple[MicroBatch, list[Example]]:
    examples = StepValue(**settings).examples(rows, tokenizer, Truncation()).examples
    return collate(examples, 0), examples


def network(tiny_llama, **config) -> Network:
    torch.manual_seed(4)
    net = StepValue().prepare(tiny_llama(**config), None)  # type: ignore[arg-type]
    head: Any = net.critic
    torch.nn.init.normal_(head.value.weight)
    return net


def test_both_parts_are_those_of_transformers_logits_and_a_linear_layer(tiny_llama, tiny_tokenizer):
    method, net = StepValue(), network(tiny_llama, tie_word_embeddings=False)
    batch, examples = batch_of(tiny_tokenizer, ROWS)
    terms = method.loss(net, batch)
    loss, error, tokens, ends = 0.0, 0.0, 0, 0
    for example in examples:
        (sequence,) = example.sequences
        ids = torch.tensor([sequence.tokens.tolist()])
        out: Any = net.policy(ids, output_hidden_states=True)
        logprobs = out.logits[0].log_softmax(-1)
        for t, learned in enumerate(sequence.loss_mask):
            if learned:
                loss, tokens = loss - logprobs[t - 1, sequence.tokens[t]].item(), tokens + 1
        head: Any = net.critic
        for t, outcome in enumerate(sequence.arrays["outcomes"]):
            if outcome:
                z = (out.hidden_states[-1][0, t] @ head.value.weight[0] + head.value.bias[0]).item()
                error, ends = error + (math.tanh(z) - sequence.arrays["targets"][t]) ** 2, ends + 1
    assert (tokens, ends) == (15 + 3, 2 + 3 + 1 + 1)
    assert terms["nll"].count == tokens and terms["value"].count == ends
    assert terms["nll"].total.item() == pytest.approx(loss, rel=1e-5)
    assert terms["value"].total.item() == pytest.approx(error, rel=1e-5)
    counts = total_counts(examples)
    assert (counts["tokens"], counts["step_ends"]) == (tokens, ends)


def test_without_alpha_it_is_supervised_fine_tuning(make_trainer, tiny_llama):
    text = "3+8=11\n11-2=9\n"
    talk = Conversation((*QUESTION, {"role": "assistant", "content": text}), None, "s:1")
    expected = gradient(make_trainer, SFT(), tiny_llama(), [talk])
    found = gradient(make_trainer, StepValue(alpha=0.0), tiny_llama(), [RIGHT])
    assert set(found) == set(expected)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7)


def test_values_equal_to_their_targets_leave_nothing_to_learn(tiny_llama, tiny_tokenizer):
    method, net = StepValue(), network(tiny_llama)
    batch, _ = batch_of(tiny_tokenizer, ROWS)
    batch.arrays["targets"].copy_(net.values(batch).detach())  # type: ignore[attr-defined]
    value = method.loss(net, batch)["value"]
    assert value.total == 0
    value.total.backward()
    assert not any(p.grad.any() for p in net.parameters() if p.grad is not None)


def test_an_incorrect_solution_moves_values_and_backbone_but_no_word(make_trainer, tiny_llama):
    model = tiny_llama(tie_word_embeddings=False)
    found = gradient(make_trainer, StepValue(), model, [WRONG], step=1)  # in the first step the head is zero
    assert "policy.lm_head.weight" not in found
    for part in ("critic.value.weight", "critic.value.bias", "policy.model.layers.0.mlp.down_proj.weight"):
        assert found[part].norm() > 0, part
    assert all(gradient.isfinite().all() for gradient in found.values())


def test_values_start_at_zero_and_the_head_may_have_its_own_learning_rate(make_trainer, tiny_llama, tiny_tokenizer):
    trainer = make_trainer(StepValue(head_learning_rate=0.5), tiny_llama(), [WRONG], batch=1, max_steps=1, lr=1e-9)
    batch, _ = batch_of(tiny_tokenizer, [WRONG])
    assert not trainer.network.values(batch).any()
    trainer.train()
    # Adam's first step moves every weight that has a gradient by its learning rate
    assert trainer.network.critic.value.bias.item() == pytest.approx(-0.5, rel=1e-3)


def test_a_part_with_nothing_to_count_adds_exactly_0(make_trainer, tiny_llama, tiny_tokenizer):
    method, net = StepValue(), network(tiny_llama)
    batch, _ = batch_of(tiny_tokenizer, [WRONG, ROWS[3]])
    terms = method.loss(net, batch)
    assert (terms["nll"].total, terms["nll"].count) == (0, 0)
    trainer = make_trainer(StepValue(alpha=0.5), tiny_llama(), [WRONG, ROWS[3]], batch=2)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["nll"] == 0
    assert log["loss"] == pytest.approx(0.5 * log["value"], rel=1e-5)


def test_values_lie_between_minus_one_and_one(tiny_llama, tiny_tokenizer):
    net = network(tiny_llama)
    net.critic.value.weight.data.mul_(1e4)  # type: ignore[union-attr, operator]
    batch, _ = batch_of(tiny_tokenizer, ROWS)
    values = net.values(batch)
    assert values.abs().max() <= 1 and values.min() < -0.9 < 0.9 < values.max()


def test_a_value_reads_the_token_it_stands_on_and_none_after(tiny_llama, tiny_tokenizer):
    net = network(tiny_llama)
    batch, _ = batch_of(tiny_tokenizer, [RIGHT])
    before = net.values(batch)[0]
    at = 12
    batch.tokens[0, at] += 1
    moved = (net.values(batch)[0] != before).nonzero()[0].item()
    assert moved == at


def test_training_changes_no_token_and_learns_none_twice(make_trainer, tiny_llama, tiny_tokenizer):
    for learn in ("steps", "everything"):
        method = StepValue(learn=learn)
        _, examples = batch_of(tiny_tokenizer, ROWS, learn=learn)
        tokens = [list(e.sequences[0].tokens) for e in examples]
        trainer = make_trainer(method, tiny_llama(), ROWS, batch=2, num_train_epochs=2)
        loader = trainer.get_train_dataloader()
        trainer.train()
        assert isinstance(loader, RowLoader)
        assert [list(e.sequences[0].tokens) for e in loader.examples] == tokens
        assert loader.examples == examples


# --- metrics -------------------------------------------------------------------------------------------------------


def test_errors_by_outcome_and_depth_by_hand():
    values = torch.tensor([[0.5, 9.0, -0.5, 0.0, 1.0], [0.5, 0.25, 9.0, 0.0, 9.0]])
    targets = torch.tensor([[0.0, 0.0, 0.5, 1.0, 1.0], [-1.0, 0.25, 0.0, -1.0, 0.0]])
    outcomes = torch.tensor([[1.0, 0.0, 1.0, 1.0, 1.0], [-1.0, -1.0, 0.0, -1.0, 0.0]])
    depths = torch.tensor([[1 / 4, 0, 2 / 4, 3 / 4, 1], [1 / 3, 2 / 3, 0, 1, 0]])
    found = measured(values, targets, outcomes, depths)
    expected = {
        "value_correct": (0.25 + 1.0 + 1.0 + 0.0, 4),
        "value_incorrect": (2.25 + 0.0 + 1.0, 3),
        "value_first": (0.25 + 2.25, 2),  # steps 1 of 4 and 1 of 3
        "value_middle": (1.0 + 0.0, 2),  # 2 of 4 and 2 of 3
        "value_last": (1.0 + 0.0 + 1.0, 3),  # 3 and 4 of 4, 3 of 3
        "sign_accuracy": (1.0 + 0.5, 2),  # a value of 0 counts one half
    }
    assert {name: (term.total.item(), term.count.item()) for name, term in found.items()} == expected


def test_evaluation_gives_an_interval_over_solutions_that_have_their_last_step(make_trainer, tiny_llama):
    trainer = make_trainer(StepValue(), tiny_llama(), ROWS)
    metrics = trainer.evaluate(ROWS)
    low, share, high = (metrics[f"eval_sign_accuracy{end}"] for end in ("_low", "", "_high"))
    assert 0 <= low < share < high <= 1 and share in (0.25, 0.5, 0.75)
    assert metrics["eval_loss"] == pytest.approx(metrics["eval_nll"] + 0.1 * metrics["eval_value"])
    # cut before its last step, a solution does not say how it ends
    short = {"truncation": Truncation(max_length=45, too_long="truncate_right")}
    cut = make_trainer(StepValue(), tiny_llama(), ROWS, own=short).evaluate([WRONG])
    assert "eval_sign_accuracy_low" not in cut and cut["eval_value_incorrect"] > 0


def test_a_delimiter_that_cannot_be_read_back_is_told(make_trainer, tiny_llama):
    with pytest.raises(UserError, match="the tokenizer reads '→' behind a step 1 back as '1'"):
        make_trainer(StepValue(delimiter="→"), tiny_llama(), ROWS).train()
    make_trainer(StepValue(delimiter=";;"), tiny_llama(), ROWS).train()


def test_it_learns_the_values_of_four_rows(make_trainer, tiny_llama):
    trainer = make_trainer(StepValue(alpha=1.0), tiny_llama(), ROWS, lr=5e-3, num_train_epochs=60)
    trainer.train()
    metrics = trainer.evaluate(ROWS)
    assert metrics["eval_sign_accuracy"] == 1 and metrics["eval_value"] < 0.05 and metrics["eval_nll"] < 0.1


# --- going on ------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_with_the_same_bytes(make_trainer, tiny_llama, weights, tmp_path):
    def trainer(folder: str) -> Any:
        torch.manual_seed(5)
        saves = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path / folder)}
        return make_trainer(StepValue(), tiny_llama(), ROWS, batch=2, num_train_epochs=3, **saves)

    straight = trainer("straight")
    straight.train()
    again = trainer("again")
    torch.nn.init.zeros_(again.network.critic.value.weight)
    again.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-3"))
    assert again.state.global_step == straight.state.global_step == 6
    assert weights(again.network) == weights(straight.network)
    assert isinstance(again.network.critic, StepValueHead)
