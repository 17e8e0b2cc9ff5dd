"""Reward models through the trainer: identities of the loss, pooling, weights of pairs, and held-out numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

import burnish.methods.reward as reward_module
from burnish import RewardModel, UserError
from burnish.math.statistics import wilson
from burnish.models.adapters import add_adapter
from burnish.models.settings import AdapterConfig
from burnish.render.truncate import Truncation
from burnish.types import Messages, Metric, Pair, Preference, Ranking, Sequence

LN2 = math.log(2)


def said(text: str, role: str = "assistant") -> Messages:
    return ({"role": role, "content": text},)


def preference(i: int, chosen: str, rejected: str, **more: Any) -> Preference:
    settings: dict[str, Any] = {"margin": None, "p_chosen": None, **more}
    return Preference(said(f"{i}?", "user"), said(chosen), said(rejected), **settings, source=f"pairs:{i}")


def preferences(n: int) -> list[Preference]:
    return [preference(i, "abcdef"[: i % 5 + 1], "xyzuvw"[: i % 3 + 1]) for i in range(n)]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.fixture
def classifier(tiny_llama: Any) -> Any:
    def make(*, zero: bool = False, **changes: Any) -> LlamaForSequenceClassification:
        labels = {"id2label": {0: "score"}, "label2id": {"score": 0}}
        config = LlamaConfig.from_dict(tiny_llama().config.to_dict() | labels | changes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = LlamaForSequenceClassification(config).eval()
        if zero:
            torch.nn.init.zeros_(model.score.weight)
        return model

    return make


@torch.no_grad()
def plain_score(model: Any, sequence: Sequence) -> float:
    """By transformers alone, one sequence without padding: the head on the last token's hidden state."""
    hidden = model.model(torch.tensor([sequence.tokens.tolist()])).last_hidden_state
    return model.score(hidden[0, -1]).item()


def sequences(rows: list[Any], tokenizer: Any) -> list[tuple[Sequence, ...]]:
    return [e.sequences for e in RewardModel().examples(rows, tokenizer, Truncation()).examples]


# --- the loss on given scores -------------------------------------------------------------------------------------


def terms(monkeypatch: pytest.MonkeyPatch, given: list[float], pairs: list[Pair], **settings: Any) -> dict[str, Metric]:
    """The terms and metrics of a step whose sequences have these scores, with what they are divided by."""
    from burnish.models.batching import collate
    from burnish.types import Example

    monkeypatch.setattr(reward_module, "scores", lambda policy, batch: torch.tensor(given, dtype=torch.float64))
    example = Example(tuple(Sequence((5, 6), (False, False), "row") for _ in given), tuple(pairs))
    network: Any = torch.nn.Module()
    network.policy = None
    method = RewardModel(**settings)
    found: dict[str, Metric] = {}
    for name, part in method.loss(network, collate([example], 0)).items():
        assert part.count is not None
        found[name] = Metric(part.total, part.count)
    assert example.counts["pairs"] == pytest.approx(float(found["preference"].count))
    return found


def test_equal_scores_cost_ln_2_and_count_as_half_right(monkeypatch: pytest.MonkeyPatch) -> None:
    found = terms(monkeypatch, [1.5, 1.5, -2.0, -2.0], [Pair(0, 1), Pair(2, 3)])
    assert found["preference"].mean.item() == pytest.approx(LN2)
    assert found["accuracy"].mean.item() == 0.5 and found["margin"].mean.item() == 0.0


def test_only_differences_of_scores_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [Pair(0, 1), Pair(2, 1, margin=0.5, p_better=0.7)]
    here = terms(monkeypatch, [0.3, -0.4, 2.0], pairs)
    there = terms(monkeypatch, [7.3, 6.6, 9.0], pairs)
    assert there["preference"].mean.item() == pytest.approx(here["preference"].mean.item())
    assert there["chosen"].mean.item() == pytest.approx(here["chosen"].mean.item() + 7)
    centered = [
        terms(monkeypatch, s, [Pair(0, 1)], centering=0.01)["centering"].mean.item() for s in ([1.0, 2.0], [2.0, 3.0])
    ]
    assert centered == pytest.approx([9.0, 25.0])


def test_swapping_a_pair_adds_the_difference_of_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    for a, b in ((0.3, -0.4), (-2.0, 5.0)):
        one, other = (terms(monkeypatch, [a, b], [pair])["preference"].mean.item() for pair in (Pair(0, 1), Pair(1, 0)))
        assert one - other == pytest.approx(-(a - b))


def test_margins_and_soft_labels_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    found = terms(monkeypatch, [0.9, -0.2], [Pair(0, 1, margin=0.5, p_better=0.8)])
    x = 0.9 + 0.2 - 0.5
    assert found["preference"].mean.item() == pytest.approx(-0.8 * math.log(sigmoid(x)) - 0.2 * math.log(sigmoid(-x)))
    moved = terms(monkeypatch, [0.4, -0.2], [Pair(0, 1, p_better=0.8)])  # a margin is a smaller difference
    assert moved["preference"].mean.item() == pytest.approx(found["preference"].mean.item())
    logit = math.log(0.7 / 0.3)
    entropy = -0.7 * math.log(0.7) - 0.3 * math.log(0.3)
    losses = [terms(monkeypatch, [logit + d, 0.0], [Pair(0, 1, p_better=0.7)])["preference"].mean.item()
              for d in (-0.1, 0.0, 0.1)]  # fmt: skip
    assert losses[1] == pytest.approx(entropy) and losses[1] < min(losses[0], losses[2])


def test_the_pairs_of_a_ranking_count_as_one_row(monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Any) -> None:
    ranking = Ranking(said("?", "user"), (said("a"), said("b"), said("c")), (0.0, 2.0, 1.0), "ranked:1")
    (example,) = RewardModel().examples([ranking], tiny_tokenizer, Truncation()).examples
    assert {(p.better, p.worse) for p in example.pairs} == {(1, 0), (2, 0), (1, 2)}
    assert all(p.weight == pytest.approx(1 / 3) for p in example.pairs)
    found = terms(monkeypatch, [0.1, 0.5, -0.3], list(example.pairs))
    by_hand = [-math.log(sigmoid(x)) for x in (0.4, -0.4, 0.8)]
    assert found["preference"].mean.item() == pytest.approx(sum(by_hand) / 3)
    assert float(found["preference"].count) == pytest.approx(1)
    assert found["accuracy"].mean.item() == pytest.approx(2 / 3)


def test_a_ranking_of_two_is_a_preference(tiny_tokenizer: Any) -> None:
    ranking = Ranking(said("0?", "user"), (said("x"), said("a")), (-1.0, 3.0), "pairs:0")
    (two,) = RewardModel().examples([ranking], tiny_tokenizer, Truncation()).examples
    (one,) = RewardModel().examples([preference(0, "a", "x")], tiny_tokenizer, Truncation()).examples
    (pair,) = two.pairs
    assert (two.sequences[pair.better], two.sequences[pair.worse]) == one.sequences
    assert pair[2:] == one.pairs[0][2:] == (1.0, 0.0, 1.0)


# --- through the trainer ------------------------------------------------------------------------------------------


def test_a_head_of_zeros_costs_ln_2(make_trainer: Any, classifier: Any) -> None:
    trainer = make_trainer(RewardModel(), classifier(zero=True), preferences(4), own={"eval_dataset": preferences(10)})
    found = trainer.evaluate()
    assert found["eval_loss"] == found["eval_preference"] == pytest.approx(LN2, abs=1e-6)
    # Wilson at 5 of 10: (0.5 + z^2 / 20) / (1 + z^2 / 10), +- z / (1 + z^2 / 10) * sqrt(1 / 40 + z^2 / 400)
    assert found["eval_accuracy"] == 0.5
    assert found["eval_accuracy_low"] == pytest.approx(0.2366, abs=1e-4)
    assert found["eval_accuracy_high"] == pytest.approx(0.7634, abs=1e-4)
    assert found["eval_score_mean"] == found["eval_score_std"] == 0.0
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(LN2, abs=1e-6)


LAYOUTS = [{}, {"padding_side": "left"}, {"packed": True}, {"token_budget": 1}, {"pad_to": 64, "padding_side": "left"}]


@pytest.mark.parametrize("own", LAYOUTS, ids=str)
@pytest.mark.parametrize("pad_is_end", [False, True])
def test_scores_are_those_of_the_last_token_of_each_answer_alone(
    pad_is_end: bool, own: dict, make_trainer: Any, classifier: Any, tiny_tokenizer: Any
) -> None:
    if pad_is_end:  # and the end token is the last one, which is read all the same
        tiny_tokenizer.pad_token = tiny_tokenizer.eos_token
        tiny_tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    model = classifier(pad_token_id=tiny_tokenizer.pad_token_id)
    rows = preferences(7)
    pairs = sequences(rows, tiny_tokenizer)
    assert not pad_is_end or all(s.tokens[-1] == tiny_tokenizer.pad_token_id for pair in pairs for s in pair)
    better, worse = ([plain_score(model, pair[side]) for pair in pairs] for side in (0, 1))
    found = make_trainer(RewardModel(), model, rows, own={"eval_dataset": rows, **own}).evaluate()
    losses = [-math.log(sigmoid(a - b)) for a, b in zip(better, worse, strict=True)]
    right = [float(a > b) for a, b in zip(better, worse, strict=True)]
    every = better + worse
    mean = sum(every) / 14
    expected = {
        "preference": sum(losses) / 7,
        "accuracy": sum(right) / 7,
        "chosen": sum(better) / 7,
        "rejected": sum(worse) / 7,
        "margin": (sum(better) - sum(worse)) / 7,
        "score_mean": mean,
        "score_std": math.sqrt(sum((s - mean) ** 2 for s in every) / 14),
    }
    assert {name: found[f"eval_{name}"] for name in expected} == pytest.approx(expected, abs=1e-4)
    assert 0 < expected["accuracy"] < 1


def test_a_step_weighs_rows_alike_whatever_their_pairs(make_trainer: Any, classifier: Any, tiny_tokenizer: Any) -> None:
    model = classifier()
    ranking = Ranking(said("r", "user"), tuple(said(x) for x in "abc"), (3.0, 2.0, 1.0), "ranked:1")
    rows = [preference(0, "hello", "no", margin=0.5), ranking]
    (two, three) = ([plain_score(model, s) for s in group] for group in sequences(rows, tiny_tokenizer))
    first = -math.log(sigmoid(two[0] - two[1] - 0.5))
    second = sum(-math.log(sigmoid(three[i] - three[j])) for i, j in ((0, 1), (0, 2), (1, 2))) / 3
    centered = ((two[0] + two[1]) ** 2 + sum((three[i] + three[j]) ** 2 for i, j in ((0, 1), (0, 2), (1, 2))) / 3) / 2
    trainer = make_trainer(RewardModel(centering=0.1), model, rows, batch=2)
    trainer.train()
    line = trainer.state.log_history[0]
    assert line["preference"] == pytest.approx((first + second) / 2, abs=1e-5)
    assert line["centering"] == pytest.approx(centered, abs=1e-4)
    assert line["loss"] == pytest.approx((first + second) / 2 + 0.1 * centered, abs=1e-4)


def test_an_adapter_learns_and_its_base_does_not(make_trainer: Any, classifier: Any) -> None:
    model = add_adapter(classifier(), AdapterConfig.model_validate({"r": 4, "dropout": 0.5}), "SEQ_CLS")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    trainer = make_trainer(RewardModel(), model, preferences(8), lr=1e-2, own={"eval_dataset": preferences(8)})
    first, again = trainer.evaluate(), trainer.evaluate()
    changes = {f"eval_{name}_change_{end}": 0.0 for name in ("accuracy", "loss", "margin") for end in ("low", "high")}
    assert again == first | changes
    trainer.train()
    changed = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    assert any("lora" in name for name in changed) and any("score" in name for name in changed)
    assert all("lora" in name or "modules_to_save" in name for name in changed)
    assert trainer.evaluate()["eval_preference"] < first["eval_preference"]


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_of_the_literature(right: int, n: int, low: float, high: float) -> None:
    # Newcombe, "Two-sided confidence intervals for the single proportion", 1998, table I, method 3
    assert wilson(right / n, n) == pytest.approx((low, high), abs=5e-5)


def test_mistakes_are_told(make_trainer: Any, classifier: Any) -> None:
    tied = Ranking(said("?", "user"), (said("a"), said("b")), (1.0, 1.0), "ranked:3")
    with pytest.raises(UserError, match="ranked:3: all answers have the same score"):
        make_trainer(RewardModel(), classifier(), [tied]).train()
    dropping = {"truncation": Truncation(max_length=4, too_long="drop"), "eval_dataset": preferences(2)}
    with pytest.raises(UserError, match="nothing to evaluate on"):
        make_trainer(RewardModel(), classifier(), preferences(2), own=dropping).evaluate()
