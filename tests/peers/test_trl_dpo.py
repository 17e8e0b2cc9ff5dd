"""The DPO family against TRL: the same policy, reference, pairs and template, one step."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from burnish import DPO

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:::trl"),
    # TRL still says gradient checkpointing, which transformers has renamed
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]

ANSWERS = [("yes", "no, never"), ("perhaps some day", "a"), ("it is 12", "12"), ("b", "cd")]


def said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def labelled(answers: list[tuple[str, str]]) -> list[Any]:
    """Good and bad answers in turns, each to a prompt of its own."""
    return [
        {"prompt": said("user", f"{i}?"), "completion": said("assistant", pair[i % 2]), "label": i % 2 == 0}
        for i, pair in enumerate(answers)
    ]


def pairs(answers: list[tuple[str, str]]) -> list[Any]:
    return [
        {"prompt": said("user", f"{i}?"), "chosen": said("assistant", a), "rejected": said("assistant", b)}
        for i, (a, b) in enumerate(answers)
    ]


@pytest.fixture
def models(tiny_llama: Any) -> tuple[Any, Any]:
    """A policy and a reference that is near it: at the reference itself most losses are constants."""
    policy, reference = tiny_llama(), tiny_llama()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return policy, reference


@pytest.fixture
def tokenizer(written: Any) -> Any:
    """Nothing stands behind the end of a turn: TRL would learn it, as in SFT."""
    return written("{{- '\\n' -}}\n{%- endfor -%}", "{%- endfor -%}")


def logprobs(model: Any, tokenizer: Any, prompt: Any, answer: Any) -> tuple[Tensor, int]:
    """log p of every token but the first, by transformers alone, and how many of them are the prompt's."""
    before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    ids = torch.tensor([tokenizer.apply_chat_template(prompt + answer, return_dict=False)])
    found = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return found, len(before) - 1


# --- equal --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({}, {"loss_type": "sigmoid"}),
        ({"average": True}, {"loss_type": "sigmoid_norm"}),
        ({"loss": "robust", "label_smoothing": 0.2}, {"loss_type": "robust", "label_smoothing": 0.2}),
        ({"loss": "ipo", "average": True}, {"loss_type": "ipo"}),
        ({"loss": "hinge"}, {"loss_type": "hinge"}),
        ({"loss": "sppo"}, {"loss_type": "sppo_hard"}),
        ({"loss": "apo_zero"}, {"loss_type": "apo_zero"}),
        ({"loss": "apo_down"}, {"loss_type": "apo_down"}),
        ({"loss": "nca_pair"}, {"loss_type": "nca_pair"}),
        ({"nll_weight": 0.5}, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    ],
    ids=str,
)
def test_losses(mine: Any, theirs: Any, ours: Any, trl_step: Any, same: Any, models: Any, tokenizer: Any) -> None:
    policy, reference = models
    rows = pairs(ANSWERS)
    expected = trl_step("DPO", policy, rows, tokenizer, {"beta": 0.4} | theirs, ref_model=reference)
    found = ours(DPO(beta=0.4, **mine), policy, rows, reference, processing_class=tokenizer)
    name = theirs["loss_type"]
    same(f"DPO, {name if isinstance(name, str) else ' + '.join(name)}", found, expected)


def test_an_adapter_that_is_off_is_the_reference(
    ours: Any, trl_step: Any, same: Any, tiny_llama: Any, tokenizer: Any
) -> None:
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    rows = pairs(ANSWERS)
    expected = trl_step("DPO", model, rows, tokenizer, {"beta": 0.4})
    same("DPO, sigmoid, adapter", ours(DPO(beta=0.4), model, rows, processing_class=tokenizer), expected)


def test_simpo(ours: Any, trl_step: Any, same: Any, models: Any, tokenizer: Any) -> None:
    policy, rows = models[0], pairs(ANSWERS)
    config = {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.7, "max_length": 256}
    expected = trl_step("cpo.CPO", policy, rows, tokenizer, config)
    same("SimPO", ours(DPO(loss="simpo", beta=2.0, gamma=0.7), policy, rows, processing_class=tokenizer), expected)


def test_kto(ours: Any, trl_step: Any, same: Any, models: Any, tokenizer: Any) -> None:
    """TRL takes the answer to the row before as the one to another prompt, we that to the row behind."""
    policy, reference = models
    rows = labelled(ANSWERS)
    config = {"beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    expected = trl_step("KTO", policy, rows, tokenizer, config, ref_model=reference)
    found = ours(DPO(loss="kto", **config), policy, rows[::-1], reference, processing_class=tokenizer)
    same("KTO", found, expected)


# --- equal but for a name, a formula or a term --------------------------------------------------------------------


@torch.no_grad()
def test_white_space_after_the_end_is_an_answer_s_to_trl(
    ours: Any, trl_step: Any, models: Any, tiny_tokenizer: Any
) -> None:
    policy, reference = models
    rows = pairs(ANSWERS)
    ratios = torch.zeros(2, len(rows), 2)  # without and with the newline; rows; sides
    for i, row in enumerate(rows):
        for k, side in enumerate(("chosen", "rejected")):
            (now, prompt), (before, _) = (
                logprobs(model, tiny_tokenizer, row["prompt"], row[side]) for model in (policy, reference)
            )
            ratio = (now - before)[prompt:]
            ratios[:, i, k] = torch.stack([ratio[:-1].sum(), ratio.sum()])
    without, with_newline = (-torch.nn.functional.logsigmoid(0.4 * (x[:, 0] - x[:, 1])).mean().item() for x in ratios)
    with torch.enable_grad():
        theirs = trl_step("DPO", policy, rows, config={"beta": 0.4}, ref_model=reference)
        found = ours(DPO(beta=0.4), policy, rows, reference)
    assert theirs.loss == pytest.approx(with_newline, rel=1e-5)
    assert found.loss == pytest.approx(without, rel=1e-5)
    assert abs(with_newline - without) > 1e-3


def test_cdpo_is_not_in_trl_but_as_aot_of_single_pairs(
    ours: Any, trl_step: Any, same: Any, models: Any, tokenizer: Any
) -> None:
    """AOT sorts the log-ratios of a batch, which leaves a batch of one as it is; sigmoid ignores label_smoothing."""
    policy, reference = models
    rows = pairs(ANSWERS)

    def theirs(**config: Any) -> Any:
        return trl_step(
            "DPO", policy, rows, tokenizer, {"beta": 0.4, "label_smoothing": 0.2} | config, ref_model=reference
        )

    def mine(**settings: Any) -> Any:
        return ours(DPO(beta=0.4, **settings), policy, rows, reference, processing_class=tokenizer)

    alone = {"loss_type": "aot", "per_device_train_batch_size": 1, "gradient_accumulation_steps": len(rows)}
    same("cDPO, as aot of single pairs", mine(label_smoothing=0.2), theirs(**alone))
    same("DPO, sigmoid with label_smoothing", mine(), theirs(loss_type="sigmoid"))


def test_ipo_on_sums(ours: Any, trl_step: Any, same: Any, models: Any, tokenizer: Any) -> None:
    """(h - 1 / (2 b))^2 of sums over n tokens is n^2 times that of averages at n b."""
    policy, reference = models
    rows, n = pairs([("yes", "no!"), ("abc", "xyz"), ("one", "two")]), 4  # with the end
    theirs = trl_step("DPO", policy, rows, tokenizer, {"beta": 0.4 * n, "loss_type": "ipo"}, ref_model=reference)
    scaled = type(theirs)(theirs.loss * n**2, {name: g * n**2 for name, g in theirs.gradient.items()})
    found = ours(DPO(loss="ipo", beta=0.4), policy, rows, reference, processing_class=tokenizer)
    same("DPO, ipo on sums", found, scaled)


def test_orpo(ours: Any, trl_step: Any, same: Any, plus: Any, models: Any, tokenizer: Any) -> None:
    """TRL's likelihood of the chosen answers is a mean over the prompts' tokens too."""
    policy, rows = models[0], pairs(ANSWERS)
    theirs = trl_step("orpo.ORPO", policy, rows, tokenizer, {"beta": 0.3, "max_length": 256})
    found = ours(DPO(loss="orpo", orpo_weight=0.3), policy, rows, processing_class=tokenizer)
    chosen = [logprobs(policy, tokenizer, row["prompt"], row["chosen"]) for row in rows]
    everything = torch.cat([x for x, _ in chosen])
    answers = torch.cat([x[prompt:] for x, prompt in chosen])
    same("ORPO, prompts learned", plus(found, policy, answers.mean() - everything.mean()), theirs)


@torch.no_grad()
def test_orpo_ends_twice_in_trl_where_white_space_follows_the_end(
    trl_step: Any, models: Any, tiny_tokenizer: Any
) -> None:
    policy, rows = models[0], pairs(ANSWERS)
    with torch.enable_grad():
        theirs = trl_step("orpo.ORPO", policy, rows, config={"beta": 0.3, "max_length": 256})
    ended = copy.deepcopy(tiny_tokenizer)
    ended.chat_template += "{%- if not add_generation_prompt -%}{{- eos_token -}}{%- endif -%}"
    sides = {k: [logprobs(policy, ended, row["prompt"], row[k]) for row in rows] for k in ("chosen", "rejected")}
    chosen, rejected = (torch.stack([x[n:].mean() for x, n in sides[k]]) for k in ("chosen", "rejected"))
    odds = (chosen - rejected) - ((1 - chosen.exp()).log() - (1 - rejected.exp()).log())
    nll = -torch.cat([x for x, _ in sides["chosen"]]).mean()
    assert theirs.loss == pytest.approx((nll - 0.3 * odds.sigmoid().log().mean()).item(), rel=1e-5)


def test_rpo_over_micro_batches(ours: Any, trl_step: Any, same: Any, plus: Any, models: Any, tokenizer: Any) -> None:
    """TRL's likelihood is a mean over micro-batches of means over tokens, so it changes with the micro-batch."""
    policy, reference = models
    rows = pairs(ANSWERS)
    config = {"beta": 0.4, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}
    alone = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": len(rows)}
    theirs = trl_step("DPO", policy, rows, tokenizer, config | alone, ref_model=reference)
    found = ours(DPO(beta=0.4, nll_weight=0.5), policy, rows, reference, processing_class=tokenizer, token_budget=1)
    chosen = [logprobs(policy, tokenizer, row["prompt"], row["chosen"]) for row in rows]
    answers = [x[prompt:] for x, prompt in chosen]
    means = torch.stack([x.mean() for x in answers]).mean()
    same("RPO, micro-batches", plus(found, policy, 0.5 * (torch.cat(answers).mean() - means)), theirs)


def test_kto_over_micro_batches(ours: Any, trl_step: Any, models: Any, tokenizer: Any) -> None:
    """TRL's z0 is one a micro-batch: two of them are two batches; ours is one a step, however it is cut."""
    policy, reference = models
    rows, settings = labelled(ANSWERS), {"beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.5}

    def theirs(rows: list[Any], **config: Any) -> float:
        return trl_step("KTO", policy, rows, tokenizer, settings | config, ref_model=reference).loss

    def mine(**layout: Any) -> float:
        method = DPO(loss="kto", **settings)
        return ours(method, policy, rows[::-1], reference, processing_class=tokenizer, **layout).loss

    halves = (theirs(rows[:2]) + theirs(rows[2:])) / 2
    assert theirs(rows, per_device_train_batch_size=2, gradient_accumulation_steps=2) == pytest.approx(halves, rel=1e-5)
    assert mine(token_budget=1) == pytest.approx(mine(), rel=1e-5) == pytest.approx(theirs(rows), rel=1e-5)
    assert abs(halves - mine()) > 1e-3
