"""Hidden states, log-probabilities and scores equal those of transformers, in every layout."""

import dataclasses
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from burnish.errors import UserError
from burnish.math.tensors import upcast
from burnish.models import forward
from burnish.models.batching import collate
from burnish.models.forward import (
    SamplingTransform,
    backbone,
    can_pack,
    can_share,
    head,
    hidden_states,
    prefers_packed,
    score_head,
    scores,
    token_logprobs,
    token_values,
)
from burnish.models.heads import separate_critic
from burnish.types import Example, MicroBatch, Sequence

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CAUSAL = {
    "llama": (hf.LlamaConfig, {}),
    "gemma2": (hf.Gemma2Config, {"head_dim": 8, "final_logit_softcapping": 3.0}),
    "granite": (hf.GraniteConfig, {"logits_scaling": 3.0}),
    "cohere": (hf.CohereConfig, {"logit_scale": 0.3}),
    "gpt_neox": (hf.GPTNeoXConfig, {}),
    "gpt2": (hf.GPT2Config, {}),
    "qwen2": (hf.Qwen2Config, {}),
}
LAYOUTS = [
    {"pad_id": 0},
    {"pad_id": 2, "pad_to": 20},
    {"pad_id": 5, "side": "left"},
    {"pad_id": 0, "packed": True},
    {"pad_id": 9, "packed": True, "side": "left", "pad_to": 40},
]


def spread(model: nn.Module) -> nn.Module:
    """The model with weights large enough that every token matters."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2, generator=generator)
    return model.eval()


def causal(name: str) -> nn.Module:
    config, settings = CAUSAL[name]
    return spread(hf.AutoModelForCausalLM.from_config(config(**TINY, **settings)))


def classifier(config: type, labels: int = 1, **settings: object) -> nn.Module:
    return spread(hf.AutoModelForSequenceClassification.from_config(config(**{**TINY, **settings}, num_labels=labels)))


def sequences(*lengths: int) -> list[Example]:
    """Random tokens, pad (0) and end (2) among them."""
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = [torch.randint(0, 64, (n,), generator=generator).tolist() for n in lengths]
    return [Example((Sequence(tuple(t), (False, *[True] * (len(t) - 1)), "x"),)) for t in rows]


def ids(example: Example) -> torch.Tensor:
    return torch.tensor([example.sequences[0].tokens.tolist()])


def spans(batch) -> list[tuple[int, int]]:
    return [(start, end + 1) for start, end in zip(batch.starts.tolist(), batch.ends.tolist(), strict=True)]


EXAMPLES = sequences(9, 3, 14)


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", CAUSAL)
def test_logits_are_the_same_as_for_each_sequence_alone(name, layout):
    model = causal(name)
    batch = collate(EXAMPLES, **layout)
    logits = head(model)(hidden_states(model, batch)).flatten(0, 1)
    for example, (start, end) in zip(EXAMPLES, spans(batch), strict=True):
        torch.testing.assert_close(logits[start:end], model(ids(example)).logits[0], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_logits_are_at_least_float32(tiny_llama):
    for dtype, expected in [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]:
        model = tiny_llama(dtype=dtype)
        assert head(model)(hidden_states(model, collate(EXAMPLES, 0))).dtype == expected


@torch.no_grad()
@pytest.mark.parametrize("changed", range(3))
def test_changing_one_packed_sequence_leaves_the_others_unchanged(changed):
    model = causal("llama")
    other = [*EXAMPLES[:changed], sequences(14 if changed == 2 else len(ids(EXAMPLES[changed])[0]), 1)[0]]
    other += EXAMPLES[changed + 1 :]
    before, after = (hidden_states(model, collate(rows, 0, packed=True))[0] for rows in (EXAMPLES, other))
    for i, (start, end) in enumerate(spans(collate(EXAMPLES, 0, packed=True))):
        assert torch.equal(before[start:end], after[start:end]) == (i != changed)


@torch.no_grad()
def test_a_packed_sequence_longer_than_the_attention_window_is_refused():
    model = spread(hf.MistralForCausalLM(hf.MistralConfig(**TINY, sliding_window=10)))
    short = sequences(9, 10)
    batch = collate(short, 0, packed=True)
    logits = head(model)(hidden_states(model, batch)).flatten(0, 1)
    for example, (start, end) in zip(short, spans(batch), strict=True):
        torch.testing.assert_close(logits[start:end], model(ids(example)).logits[0], atol=1e-5, rtol=1e-4)
    with pytest.raises(UserError, match="window of 10 tokens"):
        hidden_states(model, collate(sequences(11, 3), 0, packed=True))


# --- log-probabilities ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_logprobs_and_entropies_are_those_of_the_tempered_softmax(temperature):
    model, batch = causal("llama"), collate(EXAMPLES, 0)
    with torch.no_grad():
        logprobs, entropies = token_logprobs(
            model, hidden_states(model, batch), batch, SamplingTransform(temperature=temperature)
        )
        for row, example in enumerate(EXAMPLES):
            n = len(ids(example)[0])
            p = (model(ids(example)).logits[0].double() / temperature).softmax(-1)[:-1]
            expected = p.gather(1, ids(example)[0, 1:, None]).log()[:, 0]
            torch.testing.assert_close(logprobs[row, 1:n].double(), expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(entropies[row, 1:n].double(), -(p * p.log()).sum(-1), atol=1e-5, rtol=1e-5)
            assert logprobs[row, 0] == 0 and not logprobs[row, n:].any() and not entropies[row, n:].any()


def test_only_learned_tokens_have_a_logprob():
    model, batch = causal("llama"), collate(EXAMPLES, 0)
    mask = batch.loss_mask & (torch.arange(batch.tokens.shape[1]) % 3 == 1)
    hidden = hidden_states(model, batch)
    some, _ = token_logprobs(model, hidden, learning(batch, mask))
    every, _ = token_logprobs(model, hidden, batch)
    torch.testing.assert_close(some, every.where(mask, 0))


def learning(batch: MicroBatch, mask: torch.Tensor) -> MicroBatch:
    """The micro-batch with other learned tokens."""
    return dataclasses.replace(batch, loss_mask=mask, learned=mask.flatten().nonzero()[:, 0])


def test_an_empty_mask_gives_zeros_and_no_gradient():
    model, batch = causal("llama"), collate(EXAMPLES, 0)
    nothing = learning(batch, torch.zeros_like(batch.loss_mask))
    logprobs, entropies = token_logprobs(model, hidden_states(model, batch), nothing)
    assert not logprobs.any() and not entropies.any()
    logprobs.sum().backward()
    assert not any(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    "transform", [SamplingTransform(), SamplingTransform(0.7, top_k=10), SamplingTransform(top_p=0.9)], ids=str
)
def test_a_head_in_chunks_gives_the_same_values_and_gradients(transform, monkeypatch):
    def run():
        model = causal("gemma2").double()
        batch = collate(EXAMPLES, 0)
        logprobs, entropies = token_logprobs(model, hidden_states(model, batch), batch, transform, entropies="learned")
        (logprobs.clamp(min=-20).sum() + 0.3 * entropies.sum()).backward()
        return [logprobs, entropies, *(p.grad for p in model.parameters() if p.grad is not None)]

    whole = run()
    monkeypatch.setattr(forward, "LOGITS_AT_ONCE", 64 * 4)
    seen: list[int] = []
    monkeypatch.setattr(forward, "upcast", lambda z: (seen.append(len(z)), upcast(z))[1])
    parts = run()
    assert max(seen) == 4
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-9)


# --- scores and values ---------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("config", [hf.LlamaConfig, hf.GPTNeoXConfig, hf.Qwen2Config, hf.GPT2Config])
def test_a_causal_classifier_is_read_at_the_last_token_of_each_sequence(config, layout):
    model = classifier(config)
    actual = scores(model, collate(EXAMPLES, **layout))
    base = backbone(model)
    expected = torch.stack([score_head(model)(base(ids(e)).last_hidden_state[0, -1])[0] for e in EXAMPLES])
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("config", [hf.LlamaConfig, hf.GPTNeoXConfig, hf.Qwen2Config, hf.GPT2Config])
def test_a_causal_classifier_scores_as_transformers_does(config):
    model = classifier(config)
    # without the pad id among the tokens, which transformers would take for padding
    rows = [Example((Sequence((*s.tokens[:-1], 7), s.loss_mask, "x"),)) for (s,) in (e.sequences for e in EXAMPLES)]
    batch = collate(rows, 0)
    logits = model(input_ids=batch.tokens, attention_mask=(batch.segments > 0).long()).logits
    torch.testing.assert_close(scores(model, batch), logits[:, 0], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_classifier_without_a_pad_id_scores_a_padded_batch():
    model = classifier(hf.GPTNeoXConfig, pad_token_id=None)
    assert model.config.pad_token_id is None  # type: ignore[union-attr]
    batched = scores(model, collate(EXAMPLES, 0))
    for score, example in zip(batched, EXAMPLES, strict=True):
        torch.testing.assert_close(score, model(ids(example)).logits[0, 0], atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_last_token_that_is_the_pad_token_is_still_the_last(side):
    model = classifier(hf.LlamaConfig, pad_token_id=2)
    ended = [Example((Sequence((5, 8, 2), (False, True, True), "x"),)), *EXAMPLES]
    batched = scores(model, collate(ended, 2, side=side))
    alone = score_head(model)(backbone(model)(torch.tensor([[5, 8, 2]])).last_hidden_state[0, 2])[0]
    torch.testing.assert_close(batched[0], alone, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_pair_has_the_same_scores_together_alone_and_packed():
    model = classifier(hf.LlamaConfig)
    together = Example(tuple(e.sequences[0] for e in EXAMPLES))
    alone = torch.cat([scores(model, collate([e], 0)) for e in EXAMPLES])
    for layout in LAYOUTS:
        torch.testing.assert_close(scores(model, collate([together], **layout)), alone, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_an_encoder_scores_as_transformers_does():
    model = classifier(hf.BertConfig)
    batch = collate(EXAMPLES, 0, pad_to=20)
    expected = torch.cat([model(ids(e)).logits[:, 0] for e in EXAMPLES])
    torch.testing.assert_close(scores(model, batch), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("layout", [{"side": "left"}, {"packed": True}], ids=str)
def test_an_encoder_refuses_packed_and_left_padded_rows(layout):
    with pytest.raises(ValueError, match="one sequence per row, padded on the right"):
        scores(classifier(hf.BertConfig), collate(EXAMPLES, 0, **layout))


@torch.no_grad()
def test_a_label_selects_its_column():
    model = classifier(hf.BertConfig, labels=3)
    batch = collate(EXAMPLES, 0)
    logits = model(input_ids=batch.tokens, attention_mask=(batch.segments > 0).long()).logits
    torch.testing.assert_close(scores(model, batch, label=2), logits[:, 2])


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gpt2"])
def test_values_are_predicted_before_their_token(name, layout):
    critic = separate_critic(causal(name))
    score_head(critic).weight.normal_(generator=torch.Generator().manual_seed(0))
    batch = collate(EXAMPLES, **layout)
    values = token_values(critic, batch).flatten()
    for example, (start, end) in zip(EXAMPLES, spans(batch), strict=True):
        before = critic(ids(example)).logits[0, :-1, 0]  # type: ignore[operator]
        torch.testing.assert_close(values[start + 1 : end], before, atol=1e-5, rtol=1e-4)


# --- rows that hold several sequences -------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
GROUPED = {**HEADS, "num_key_value_heads": 1, "intermediate_size": 32}


@pytest.mark.parametrize("large", [False, True])  # weights as they are drawn hardly look at other tokens
@pytest.mark.parametrize(
    ("config", "settings", "shared", "packed"),
    [
        (hf.LlamaConfig, GROUPED, True, True),
        (hf.GPT2Config, {"n_embd": 16, "n_layer": 2, "n_head": 2}, True, True),
        (hf.GPTNeoXConfig, {**HEADS, "intermediate_size": 32}, True, True),
        (hf.Qwen2Config, GROUPED, True, True),
        (hf.MistralConfig, GROUPED, False, True),  # a sliding window counts the columns of the row
        (hf.GPTNeoConfig, {"hidden_size": 16, "num_layers": 2, "num_heads": 2,
                           "attention_types": [[["global", "local"], 1]]}, False, True),  # so does a local one
        (hf.MptConfig, {"d_model": 16, "n_layers": 2, "n_heads": 2}, False, True),  # and ALiBi
        (hf.BloomConfig, {"hidden_size": 16, "n_layer": 2, "n_head": 2}, False, False),  # takes no block mask
        (hf.Lfm2Config, {**GROUPED, "full_attn_idxs": [1]}, False, False),  # a convolution crosses to the next sequence
        (hf.Mamba2Config, {"hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "n_groups": 1,
                           "state_size": 8}, False, False),  # and a state
    ],
    ids=lambda value: value.__name__.removesuffix("Config") if isinstance(value, type) else "",
)  # fmt: skip
def test_trials_tell_which_models_can_pack_and_share(
    config: Any, settings: dict[str, Any], shared: bool, packed: bool, large: bool
) -> None:
    torch.manual_seed(0)
    model: Any = hf.AutoModelForCausalLM.from_config(config(**SMALL, **settings))
    model = spread(model) if large else model
    model.train()
    assert (can_share(model), can_pack(model)) == (shared, packed)
    assert model.training


@pytest.mark.parametrize("config", [hf.LlamaConfig, hf.BloomConfig], ids=["packs", "does not"])
@pytest.mark.parametrize("autocast", [True, False])
def test_trials_of_deep_models_in_half_precision_are_not_misled_by_rounding(config: Any, autocast: bool) -> None:
    torch.manual_seed(0)
    settings = GROUPED if config is hf.LlamaConfig else {"hidden_size": 16, "n_layer": 2, "n_head": 2}
    deep: dict[str, Any] = settings | {"num_hidden_layers": 24}
    model: Any = spread(hf.AutoModelForCausalLM.from_config(config(**SMALL, **deep)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight *= 30 if "q_proj" in name else 1  # sharp attention, so that rounding changes what it chooses
    model = model if autocast else model.bfloat16()
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert can_pack(model) == can_share(model) == prefers_packed(model) == (config is hf.LlamaConfig)
    for name, weight in model.named_parameters():
        assert weight.dtype == weights[name].dtype and torch.equal(weight, weights[name]), name
