"""DPO and its relatives through the trainer: what is learned, the reference, z0, and what a loss does not read."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import burnish.models.reference as precomputed
from burnish import DPO, SFT, UserError
from burnish.config import load
from burnish.data.readers import load as rows_of
from burnish.methods.dpo import mismatched, per_sequence, watch
from burnish.models.adapters import add_adapter
from burnish.models.batching import collate
from burnish.models.settings import AdapterConfig
from burnish.render.renderer import Renderer
from burnish.render.truncate import Truncation
from burnish.types import Conversation, Example, Labelled, Messages, Pair, Preference, Ranking, Sequence

KINDS = ["sigmoid", "robust", "ipo", "hinge", "sppo", "apo_zero", "apo_down", "nca_pair", "simpo", "orpo", "kto"]


def said(text: str, role: str = "assistant") -> Messages:
    return ({"role": role, "content": text},)


def preference(i: int, chosen: str, rejected: str, **more: Any) -> Preference:
    settings: dict[str, Any] = {"margin": None, "p_chosen": None, **more}
    return Preference(said(f"{i}?", "user"), said(chosen), said(rejected), **settings, source=f"pairs:{i}")


def preferences(n: int) -> list[Any]:
    return [preference(i, "abcdef"[: i % 5 + 1], "xyzuvw"[: i % 3 + 1]) for i in range(n)]


def labelled(n: int) -> list[Any]:
    return [Labelled(said(f"{i}?", "user"), said("abcdef"[: i % 5 + 1]), i % 3 > 0, f"kto:{i}") for i in range(n)]


def examples(rows: list[Any], tokenizer: Any, **settings: Any) -> list[Example]:
    return DPO(**settings).examples(rows, tokenizer, Truncation()).examples


def first_log(trainer: Any) -> dict[str, float]:
    trainer.train()
    return trainer.state.log_history[0]


@torch.no_grad()
def plain_logprob(model: Any, sequence: Sequence) -> float:
    """By transformers alone, one sequence without padding: the sum over its learned tokens."""
    logits = model(torch.tensor([sequence.tokens.tolist()])).logits[0].double().log_softmax(-1)
    learned = [t for t, trained in enumerate(sequence.loss_mask) if trained]
    return sum(logits[t - 1, sequence.tokens[t]].item() for t in learned)


# --- rows ----------------------------------------------------------------------------------------------------------


def test_the_answers_of_both_sides_are_learned_with_their_end(tiny_tokenizer: Any) -> None:
    (example,) = examples([preference(7, "yes", "no")], tiny_tokenizer)
    texts = []
    for sequence in example.sequences:
        start = sequence.loss_mask.tolist().index(True)
        assert tiny_tokenizer.decode(sequence.tokens[:start]).endswith("assistant\n")
        texts.append(tiny_tokenizer.decode([t for t, x in zip(sequence.tokens, sequence.loss_mask, strict=True) if x]))
    assert texts == ["yes<|im_end|>", "no<|im_end|>"] and example.pairs == (Pair(0, 1),)


def test_a_row_that_the_loss_does_not_read_is_an_error_with_its_place(tiny_tokenizer: Any) -> None:
    ranking = Ranking(said("?", "user"), (said("a"), said("b")), (1.0, 0.0), "ranked:4")
    cases = [
        (labelled(1)[0], "sigmoid", r"kto:0: one labelled answer, but loss sigmoid compares answers: set loss: kto"),
        (ranking, "kto", r"ranked:4: a ranking, but kto reads answers that are good or bad"),
        (preference(3, "a", "b", margin=1.0), "ipo", r"pairs:3: loss ipo does not read margin: sigmoid, robust, hinge"),
        (preference(3, "a", "b", p_chosen=0.8), "robust", r"pairs:3: loss robust does not read p_chosen: sigmoid, ipo"),
    ]
    for row, loss, message in cases:
        with pytest.raises(UserError, match=message):
            examples([row], tiny_tokenizer, loss=loss)
    for row in (ranking, preference(3, "a", "b", margin=1.0, p_chosen=0.8)):
        assert examples([row], tiny_tokenizer)[0].pairs


def test_answers_that_change_the_ids_of_their_prompt_are_refused(tiny_tokenizer: Any) -> None:
    def merging(*_: Any, **__: Any) -> list[Example]:
        """What a template can do: it writes the prompt differently before another answer."""
        pair = [Sequence((5, 8 + n, 9), (False, False, True), "pairs:8") for n in (0, 1)]
        return [Example(tuple(pair), (Pair(0, 1),))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Renderer, "comparisons", merging)
        with pytest.raises(UserError, match="pairs:8: the answers change the ids of the prompt before them"):
            examples([preference(8, "a", "b")], tiny_tokenizer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "orpo", "beta": 0.2}, "loss orpo does not use beta"),
        ({"gamma": 1.0}, "loss sigmoid does not use gamma"),
        ({"loss": "simpo", "reference": "live"}, "loss simpo does not use reference"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "loss ipo does not use label_smoothing"),
        ({"loss": "kto", "nll_weight": 0.1}, "loss kto does not use nll_weight"),
        ({"label_smoothing": 0.5}, "less than 0.5"),
    ],
)
def test_a_setting_that_would_be_ignored_is_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DPO(**settings)


# --- the loss ------------------------------------------------------------------------------------------------------


def test_per_sequence_sums_in_every_layout() -> None:
    r = random.Random(0)
    made = []
    for i in range(5):
        n = r.randint(2, 7)
        numbers = tuple(r.gauss(0, 1) for _ in range(n))
        made.append(Example((Sequence((3,) * n, (False,) + (True,) * (n - 1), f"{i}", {"x": numbers}),)))
    expected = [sum(e.sequences[0].arrays["x"]) for e in made]
    layouts: list[dict[str, Any]] = [
        {},
        {"side": "left"},
        {"packed": True},
        {"packed": True, "side": "left", "pad_to": 60},
    ]
    for layout in layouts:
        batch = collate(made, 0, **layout)
        assert per_sequence(batch.arrays["x"], batch).tolist() == pytest.approx(expected, abs=1e-5)


START = {
    "sigmoid": math.log(2), "robust": math.log(2), "ipo": 25.0, "hinge": 1.0, "sppo": 50.0, "apo_zero": 1.0,
    "apo_down": 1.0, "nca_pair": 2 * math.log(2), "kto": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("loss", KINDS)
@pytest.mark.parametrize("lora", [False, True])
def test_the_first_step_of_every_loss(loss: str, lora: bool, make_trainer: Any, tiny_llama: Any) -> None:
    model = tiny_llama()
    if lora:
        model = add_adapter(model, AdapterConfig.model_validate({"r": 4}), "CAUSAL_LM")
    rows = labelled(4) if loss == "kto" else preferences(4)
    trainer = make_trainer(DPO(loss=loss), model, rows)
    log = first_log(trainer)
    if loss in START:
        assert log["loss"] == pytest.approx(START[loss], abs=2e-3)
        assert log["chosen"] == pytest.approx(0, abs=1e-5)
    assert log["grad_norm"] > 0
    assert trainer.method.reference is None or (trainer.method.reference.reference.frozen is None) == lora


@pytest.mark.parametrize("reference", ["live", "precomputed"])
@pytest.mark.parametrize("kind", ["all weights", "adapter", "adapter on a base in bfloat16"])
@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_the_first_step_in_bfloat16_starts_at_a_margin_of_0(
    loss: str, kind: str, reference: str, make_trainer: Any, tiny_llama: Any
) -> None:
    in_half = kind.endswith("bfloat16")
    model = tiny_llama(dtype=torch.bfloat16 if in_half else torch.float32)
    if kind != "all weights":
        model = add_adapter(model, AdapterConfig.model_validate({"r": 4}), "CAUSAL_LM")
    rows = labelled(12) if loss == "kto" else preferences(12)
    method = DPO(loss=loss, reference=reference)
    log = first_log(make_trainer(method, model, rows, batch=12, bf16=True, own={"token_budget": 64}))
    # a log-probability may depend on the rows that share its pass, by rounding; packed rows keep them apart
    assert log["chosen"] == pytest.approx(0, abs=1e-6)
    assert log["loss"] == pytest.approx(START[loss], abs=1e-5)


def test_the_loss_and_its_metrics_by_hand(make_trainer: Any, tiny_llama: Any, tiny_tokenizer: Any) -> None:
    rows = [preference(i, "abc", "xy"[: i + 1], margin=0.2 * i, p_chosen=1 - 0.1 * i) for i in range(2)]
    ranking = Ranking(said("?", "user"), (said("a"), said("bcd"), said("ef")), (3.0, 2.0, 1.0), "ranked:4")
    method = DPO(beta=0.3, nll_weight=0.5)
    policy, reference = tiny_llama(seed=0), tiny_llama(seed=1)
    trainer = make_trainer(method, reference, [*rows, ranking], own={"eval_dataset": [*rows, ranking]})
    trainer.network.policy.load_state_dict(policy.state_dict())  # as after some training
    found = trainer.evaluate()
    total, chosen, nll, tokens, right = 0.0, 0.0, 0.0, 0.0, 0.0
    for example in examples([*rows, ranking], tiny_tokenizer):
        ours, theirs = ([plain_logprob(m, s) for s in example.sequences] for m in (policy, tiny_llama(seed=1)))
        for better, worse, weight, margin, p in example.pairs:
            h = (ours[better] - theirs[better]) - (ours[worse] - theirs[worse])
            x = 0.3 * h - margin
            total += weight * (p * math.log(1 + math.exp(-x)) + (1 - p) * math.log(1 + math.exp(x)))
            chosen += weight * 0.3 * (ours[better] - theirs[better])
            nll -= weight * ours[better]
            tokens += weight * sum(example.sequences[better].loss_mask)
            right += weight * (h > 0)
    assert found["eval_preference"] == pytest.approx(total / 3, rel=1e-4)
    assert found["eval_nll"] == pytest.approx(nll / tokens, rel=1e-4)
    assert found["eval_loss"] == pytest.approx(total / 3 + 0.5 * nll / tokens, rel=1e-4)
    assert found["eval_chosen"] == pytest.approx(chosen / 3, rel=1e-3, abs=1e-4)
    assert found["eval_accuracy"] == pytest.approx(right / 3, abs=1e-6)
    assert found["eval_accuracy_low"] < found["eval_accuracy"] < found["eval_accuracy_high"]
    assert found["eval_margin"] == pytest.approx(found["eval_chosen"] - found["eval_rejected"])


def test_the_nll_beside_the_loss_is_a_mean_over_weighted_tokens(make_trainer: Any, tiny_llama: Any) -> None:
    ranking = Ranking(said("?", "user"), (said("a"), said("bcd"), said("efgh")), (3.0, 2.0, 1.0), "ranked:4")
    rows = [preference(1, "abc", "xy"), ranking]
    log = first_log(make_trainer(DPO(nll_weight=0.5), tiny_llama(), rows))
    assert log["loss"] == pytest.approx(log["preference"] + 0.5 * log["nll"], rel=1e-5)


def test_orpo_of_weight_0_is_sft_on_the_chosen_answers(make_trainer: Any, tiny_llama: Any) -> None:
    after = []
    rows = preferences(6)
    chats = [Conversation(row.prompt + row.chosen, len(row.prompt), row.source) for row in rows]
    for method, data in ((DPO(loss="orpo", orpo_weight=0.0), rows), (SFT(), chats)):
        # plain gradient descent: Adam would make a step of full size out of the rounding of a gradient near 0
        how = {"optim": "sgd", "learning_rate": 0.1}
        trainer = make_trainer(method, tiny_llama(), data, batch=3, num_train_epochs=2, **how)
        trainer.train()
        after.append(trainer)
    for ours, theirs in zip(*(t.network.parameters() for t in after), strict=True):
        torch.testing.assert_close(ours, theirs)
    losses = [[line["loss"] for line in t.state.log_history if "loss" in line] for t in after]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


# --- the reference -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
@pytest.mark.parametrize("lora", [False, True])
def test_precomputed_is_live(loss: str, lora: bool, make_trainer: Any, tiny_llama: Any) -> None:
    logs = []
    for reference in ("live", "precomputed"):
        model = tiny_llama()
        if lora:
            torch.manual_seed(0)
            model = add_adapter(model, AdapterConfig.model_validate({"r": 4}), "CAUSAL_LM")
        trainer = make_trainer(
            DPO(loss=loss, reference=reference), model, preferences(6), batch=3, lr=1e-2, num_train_epochs=2,
            own={"eval_dataset": preferences(4)},
        )  # fmt: skip
        trainer.train()
        logs.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
        logs[-1].append(trainer.evaluate()["eval_loss"])
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)
    assert len(set(logs[0])) == 5


def test_precomputed_is_read_again_for_the_same_reference_only(
    make_trainer: Any, tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []
    live = precomputed.ReferenceLogprobs.live

    def counted(self: Any, context: Any, examples: list[Example]) -> list[Example]:
        passes.append(len(examples))
        return live(self, context, examples)

    monkeypatch.setattr(precomputed.ReferenceLogprobs, "live", counted)

    def train(seed: int, n: int) -> list[float]:
        trainer = make_trainer(DPO(), tiny_llama(seed=seed), preferences(n), lr=1e-2, num_train_epochs=2)
        trainer.train()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    first = train(0, 4)
    assert passes == [4]
    assert train(0, 4) == first and passes == [4]
    train(1, 4)
    train(0, 5)
    assert passes == [4, 4, 5]


@pytest.mark.parametrize("harm", [lambda x: b"", lambda x: x[:60], lambda x: x[:-1], lambda x: x[:-9] + b"?" + x[-8:]])
def test_a_damaged_file_of_the_reference_is_made_again(
    harm: Any, make_trainer: Any, tiny_llama: Any, tmp_path: Path
) -> None:
    def train() -> list[float]:
        trainer = make_trainer(DPO(), tiny_llama(), preferences(4), lr=1e-2, num_train_epochs=2)
        trainer.train()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    first = train()
    (path,) = (tmp_path / "cache" / "reference").iterdir()
    whole = path.read_bytes()
    path.write_bytes(harm(whole))
    with pytest.warns(UserWarning, match="is damaged and will be rebuilt"):
        assert train() == first
    assert path.read_bytes() == whole


# --- KTO -----------------------------------------------------------------------------------------------------------


def test_an_answer_meets_the_next_prompt_that_is_another() -> None:
    def example(prompt: int, *answers: int) -> Example:
        return Example(tuple(Sequence((prompt, a, 9), (False, True, True), f"{prompt}{a}") for a in answers))

    found = mismatched([example(1, 5), example(1, 6), example(2, 7, 8), example(1, 4)])
    tokens = [[tuple(s.tokens[:2]) for s in e.sequences] for e in found]
    assert tokens == [[(1, 5), (1, 7)], [(1, 6), (1, 7)], [(2, 7), (2, 8), (2, 4), (2, 4)], [(1, 4), (1, 7)]]
    same = mismatched([example(1, 5), example(1, 6), example(1, 7)])  # where there is no other, the next answer
    assert [e.sequences[1].tokens[1] for e in same] == [6, 7, 5]
    long = Example((Sequence((1, 2, 3, 4, 5), (False, False, False, True, True), "long"),))
    cut = mismatched([long, example(7, 8)])
    assert [tuple(e.sequences[1].tokens) for e in cut] == [(1, 2, 3, 8, 9), (7, 4, 5)]
    with pytest.raises(UserError, match="kto needs at least two rows"):
        mismatched([long])


@pytest.mark.parametrize("average", [False, True])
def test_z0_is_the_mean_over_the_whole_step(
    average: bool, make_trainer: Any, tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    rows = [*labelled(4), preference(9, "abcd", "yy")]
    policy, reference = tiny_llama(seed=1), tiny_llama(seed=0, initializer_range=0.5)
    found = []
    for budget in (None, 1):
        trainer = make_trainer(
            DPO(loss="kto", beta=0.5, undesirable_weight=0.7, average=average),
            tiny_llama(seed=0, initializer_range=0.5), rows,
            own={"eval_dataset": rows, "token_budget": budget},
        )  # fmt: skip
        trainer.network.policy.load_state_dict(policy.state_dict())
        found.append(trainer.evaluate())

    def ratio(sequence: Sequence) -> float:
        total = plain_logprob(policy, sequence) - plain_logprob(reference, sequence)
        return total / sum(sequence.loss_mask) if average else total

    own = examples(rows, tiny_tokenizer, loss="kto")
    strangers = [s for e in mismatched(own) for s in e.sequences[len(e.sequences) // 2 :]]
    assert len(strangers) == 6
    z0 = max(0.0, sum(map(ratio, strangers)) / 6)
    assert z0 > 0.1
    loss = 0.0
    for sequence in (s for e in own for s in e.sequences):
        good = sequence.arrays["desirable"][0] == 1.0
        x = 0.5 * (ratio(sequence) - z0) * (1 if good else -1)
        loss += (1.0 if good else 0.7) / (1 + math.exp(x))
    for metrics in found:
        assert metrics["eval_baseline"] == pytest.approx(z0, abs=1e-4)
        assert metrics["eval_kto"] == pytest.approx(loss / 6, rel=1e-4)


# --- the watch -----------------------------------------------------------------------------------------------------


def test_a_warning_when_the_chosen_answers_keep_falling(make_trainer: Any, tiny_llama: Any) -> None:
    rows = [preference(i, "ab", "ba") for i in range(30)]
    trainer = make_trainer(DPO(), tiny_llama(), rows, batch=1)
    loader = trainer.get_train_dataloader()
    for i in range(20):
        counted = watch(-0.1 * i, loader.kept)
    assert counted == 19
    with pytest.warns(UserWarning, match="chosen answers has fallen for 20 steps"):
        watch(-2.5, loader.kept)
    again = make_trainer(DPO(), tiny_llama(), rows, batch=1).get_train_dataloader()
    again.load_state_dict(loader.state_dict())
    assert again.kept == loader.kept and again.kept["falling"] == 20
    assert watch(3.0, again.kept) == 0


def test_the_watch_reads_every_step_of_a_run(make_trainer: Any, tiny_llama: Any) -> None:
    trainer = make_trainer(DPO(), tiny_llama(), [preference(i, "ab", "ba") for i in range(4)], batch=1)
    trainer.train()
    chosen, counts = (
        [line[name] for line in trainer.state.log_history if name in line] for name in ("chosen", "chosen_falling")
    )
    # the reward before the first step is 0, and each step sees that of the one before it
    assert chosen[0] == 0 and len(counts) == 3
    smoothed = 0.0
    for value in chosen[:-1]:
        smoothed = 0.9 * smoothed + 0.1 * value
    assert trainer.loader.kept["smoothed"] == pytest.approx(smoothed)


# --- the page ------------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "dpo.md").read_text("utf-8")


def test_the_recipe_of_the_page_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    model = tmp_path / "runs" / "my-sft" / "sft" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    for name in ("pairs.jsonl", "pairs-eval.jsonl"):
        (tmp_path / "data" / name).write_text('{"prompt": "?", "chosen": "a", "rejected": "b"}\n')
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "my-dpo.yaml").write_text(text)
    recipe = load("my-dpo.yaml", [])
    assert recipe.stages[0].method is not None and recipe.stages[0].method.name == "dpo"


def test_the_page_shows_every_loss_and_rows_that_are_read() -> None:
    named = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert sorted(named) == sorted(KINDS)
    (rows,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    kinds = [type(rows_of([json.loads(line)], DPO.spec.kinds).rows[0]) for line in rows.splitlines()]
    assert kinds == [Preference, Ranking, Labelled]
