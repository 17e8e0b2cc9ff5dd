"""A new adapter changes nothing, can be merged into its base, and leaves the base unchanged."""

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaForSequenceClassification

from burnish import kernels
from burnish.errors import UserError
from burnish.models.adapters import Reference, add_adapter, disabled, is_fresh
from burnish.models.batching import collate
from burnish.models.forward import head, hidden_states, scores
from burnish.models.settings import AdapterConfig
from burnish.types import Example, Sequence


def lora(**settings: Any) -> AdapterConfig:
    return AdapterConfig(**settings)


KINDS = [lora(r=4), lora(r=4, rslora=True), lora(r=4, dora=True)]
TOKENS = (5, 9, 2, 30, 7, 11)
BATCH = collate([Example((Sequence(TOKENS, (False,) + (True,) * 5, "x"),))], 0)


def logits(model):
    with torch.no_grad():
        return head(model)(hidden_states(model, BATCH))


def moved(model, by=0.3):
    """The model with every trainable weight changed, as training would."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += by * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("config", KINDS, ids=str)
def test_a_fresh_adapter_gives_the_logits_of_its_base(config, tiny_llama):
    base = tiny_llama()
    before = logits(base)
    model = add_adapter(base, config, "CAUSAL_LM").eval()
    torch.testing.assert_close(logits(model), before, atol=1e-6, rtol=1e-6)
    assert is_fresh(model) and not is_fresh(moved(model))


@pytest.mark.parametrize("config", KINDS, ids=str)
def test_a_merged_adapter_gives_the_logits_of_the_adapted_model(config, tiny_llama):
    torch.manual_seed(0)  # peft draws the first factors
    model = moved(add_adapter(tiny_llama(), config, "CAUSAL_LM"), 0.1).eval()
    adapted, base = logits(model), logits(tiny_llama())
    assert (adapted - base).abs().max() > 0.1
    torch.testing.assert_close(logits(model.merge_and_unload()), adapted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", KINDS, ids=str)
def test_only_the_adapter_is_trained_and_the_base_stays_unchanged(config, tiny_llama):
    base = tiny_llama()
    before = copy.deepcopy(base.state_dict())
    model = moved(add_adapter(base, config, "CAUSAL_LM"))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert names and all("lora_" in name for name in names)
    assert {name.split(".")[-4] for name in names if "lora_B" in name} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    after = {k.removeprefix("base_model.model.").replace(".base_layer", ""): v for k, v in model.state_dict().items()}
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_the_heads_of_classifiers_stay_trainable(tiny_llama):
    config = copy.deepcopy(tiny_llama().config)
    config.num_labels = 1
    model = add_adapter(LlamaForSequenceClassification(config), lora(r=2), "SEQ_CLS")
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert [name for name in trained if "lora_" not in name] == [
        "base_model.model.score.modules_to_save.default.weight"
    ]
    assert not any("score" in name for name in trained if "lora_" in name)
    with torch.no_grad():
        before = scores(model, BATCH)
        moved(model)
        after = scores(model, BATCH)
        assert before != after
        torch.testing.assert_close(scores(model.merge_and_unload(), BATCH), after, atol=1e-5, rtol=1e-5)


def test_without_the_adapter_the_model_is_its_base(tiny_llama):
    before = logits(tiny_llama())
    model = moved(add_adapter(tiny_llama(), lora(r=4), "CAUSAL_LM")).eval()
    adapted = logits(model)
    with disabled(model) as base:
        assert torch.equal(logits(base), before)
    assert torch.equal(logits(model), adapted)


def test_an_error_restores_the_adapter(tiny_llama):
    model = moved(add_adapter(tiny_llama(), lora(r=4), "CAUSAL_LM")).eval()
    adapted = logits(model)
    with pytest.raises(KeyError), disabled(model):
        raise KeyError
    assert torch.equal(logits(model), adapted)
    assert any(p.requires_grad for p in model.parameters())


def test_a_model_without_an_adapter_is_refused(tiny_llama):
    with pytest.raises(ValueError, match="expected a model with an adapter"), disabled(tiny_llama()):
        pass


@pytest.mark.parametrize("kind", ["plain", "fresh adapter", "used adapter"])
def test_a_reference_stays_the_policy_at_its_start(kind, tiny_llama):
    policy = tiny_llama()
    if kind != "plain":
        policy = add_adapter(policy, lora(r=4), "CAUSAL_LM").eval()
    if kind == "used adapter":
        moved(policy)
    start = logits(kernels.enable(policy))
    reference = Reference(policy)
    assert (reference.frozen is None) == (kind == "fresh adapter")  # no second copy where the base will do
    assert reference.equals(policy)
    after = logits(moved(policy, 0.2))
    with reference.use(policy) as frozen:
        torch.testing.assert_close(logits(frozen), start, atol=1e-6, rtol=1e-6)
        if kind != "fresh adapter":
            assert not any(p.requires_grad for p in frozen.parameters())
    assert not reference.equals(policy)
    assert torch.equal(logits(policy), after) and not torch.allclose(after, start, atol=1e-3)


def test_a_base_in_half_precision_keeps_its_dtype_and_has_no_gradient(tiny_llama):
    model = add_adapter(tiny_llama(dtype=torch.bfloat16), lora(r=4), "CAUSAL_LM").train()
    head(model)(hidden_states(model, BATCH)).sum().backward()
    base = {n: p for n, p in model.named_parameters() if "lora_" not in n}
    assert all(p.dtype == torch.bfloat16 and p.grad is None and not p.requires_grad for p in base.values())
    adapter = {n: p for n, p in model.named_parameters() if "lora_" in n}
    assert all(p.dtype == torch.float32 and p.grad is not None for p in adapter.values())


@pytest.mark.parametrize("config", KINDS, ids=str)
def test_merging_an_adapter_restores_the_plain_model(config, tiny_llama):
    model = moved(add_adapter(tiny_llama(), config, "CAUSAL_LM"), 0.1).eval()
    with disabled(model):
        torch.testing.assert_close(logits(model), logits(tiny_llama()), atol=0, rtol=0)
    assert set(model.merge_and_unload().state_dict()) == set(tiny_llama().state_dict())


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            ["q_proj", "qproj"],
            "no module 'qproj': the linear layers of LlamaForCausalLM are down_proj, gate_proj, k_proj",
        ),
        ("q_proj", "A string is a pattern that has to match whole names"),
        (["input_layernorm"], "is not supported"),
        ([], "No `target_modules` passed"),
    ],
)
def test_missing_targets_are_an_error(targets, message, tiny_llama):
    with pytest.raises(UserError, match=message):
        add_adapter(tiny_llama(), lora(r=4, targets=targets), "CAUSAL_LM")


@pytest.mark.parametrize("targets", [["q_proj"], r".*\.q_proj", ["self_attn.q_proj"]])
def test_targets_can_be_names_or_a_pattern(targets, tiny_llama):
    model = add_adapter(tiny_llama(), lora(r=4, targets=targets), "CAUSAL_LM")
    assert sum("lora_A" in name for name, _ in model.named_parameters()) == 2
