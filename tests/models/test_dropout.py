"""Masks depend only on the tokens, the step and the seed, and pass the tests of random ones."""

import copy
import math
import random
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel

from builders import SIZES
from burnish import SFT
from burnish.models.adapters import add_adapter, without_warning
from burnish.models.batching import collate
from burnish.models.dropout import DropoutKeys, TokenDropout, disable_dropout, key_dropout, mix, token_keys
from burnish.models.settings import AdapterConfig
from burnish.types import Example, MicroBatch, Sequence

GPT2: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
tokens = st.lists(st.integers(0, 3), min_size=1, max_size=6)


def lay_out(examples: list[list[list[int]]], **layout: Any) -> MicroBatch:
    """Of each example its sequences; no token but the last of one is learned."""
    made = [[Sequence(tuple(s), (False,) * (len(s) - 1) + (len(s) > 1,), "x") for s in group] for group in examples]
    return collate([Example(tuple(group)) for group in made], 0, **layout)


def keys_of(batch: MicroBatch, seed: int = 0, step: int = 0) -> list[list[int]]:
    """The keys of each sequence of a batch, those of a shared prompt left out."""
    keys = token_keys(batch, seed, step).flatten().tolist()
    return [keys[a : b + 1] for a, b in zip(batch.starts.tolist(), batch.ends.tolist(), strict=True)]


# --- keys ----------------------------------------------------------------------------------------------------------


def test_the_hash_is_the_published_one():
    def lowbias32(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    r = random.Random(0)
    numbers = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, *(r.randrange(2**32) for _ in range(200))]
    hashed = mix(torch.tensor(numbers).to(torch.int32))
    assert [x % 2**32 for x in hashed.tolist()] == [lowbias32(x) for x in numbers]


@settings(max_examples=40)
@given(st.lists(st.lists(tokens, min_size=1, max_size=3), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_no_layout_changes_a_key(examples, packed, shared):
    alone = [keys_of(lay_out([[s]]))[0] for group in examples for s in group]
    for side in ("left", "right"):
        keys = keys_of(lay_out(examples, side=side, packed=packed, shared=shared, pad_to=20))
        assert [key[-len(part) :] for key, part in zip(alone, keys, strict=True)] == keys


def test_a_shared_prompt_has_the_same_keys_as_alone():
    prompt, answers = [5, 6, 7, 8], [[1, 2], [3]]
    example = [prompt + answer for answer in answers]
    batch = collate(
        [Example(tuple(Sequence(tuple(s), (False,) * 4 + (True,) * (len(s) - 4), "x") for s in example))],
        0,
        shared=True,
        side="left",
        pad_to=12,
    )
    alone = [keys_of(lay_out([[s]]))[0] for s in example]
    shared = token_keys(batch, 0, 0)[0, batch.segments[0] == 1].tolist()
    assert len(shared) == 3 and shared == alone[0][:3] == alone[1][:3]
    assert keys_of(batch) == [key[3:] for key in alone]


def test_keys_differ_if_prefixes_seeds_or_steps_differ():
    r = random.Random(0)
    rows = [[r.randrange(3) for _ in range(r.randint(1, 9))] for _ in range(60)]
    prefixes: dict[int, tuple[int, int, tuple[int, ...]]] = {}
    for seed in (0, 1, 42):
        for step in (0, 1, 2):
            for row, keys in zip(rows, keys_of(lay_out([[row] for row in rows]), seed, step), strict=True):
                for t, key in enumerate(keys):
                    named = (seed, step, tuple(row[: t + 1]))
                    assert prefixes.setdefault(key, named) == named
    assert len(prefixes) > 1000


# --- masks ---------------------------------------------------------------------------------------------------------


def masks(p: float, width: int, *, layers: int = 1, steps: int = 1, length: int = 200) -> torch.Tensor:
    """Which elements are kept, (steps, layers, length, width), of one sequence of few different tokens."""
    keys = DropoutKeys()
    made = [TokenDropout(p, keys).train() for _ in range(layers)]
    batch = lay_out([[[i % 3 for i in range(length)]]])
    ones = torch.ones(1, length, width)
    masks = []
    for step in range(steps):
        with keys.of(batch, 0, step):
            masks.append(torch.cat([layer(ones) for layer in made]))
    return torch.stack(masks) > 0


@pytest.mark.parametrize("p", [0.01, 0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("width", [1, 31, 64])
def test_the_share_of_kept_elements_is_one_minus_p(p, width):
    kept = masks(p, width, layers=3, steps=4).double()
    spread = math.sqrt(p * (1 - p))
    assert abs(kept.mean() - (1 - p)) < 4.5 * spread / math.sqrt(kept.numel())
    # and of each feature, token, layer and step
    for dimension in range(4):
        each = kept.transpose(0, dimension).flatten(1)
        z = (each.mean(1) - (1 - p)) / (spread / math.sqrt(each.shape[1]))
        if min(p, 1 - p) * each.shape[1] > 20:
            assert z.abs().max() < 5
            # spread as widely as independent draws are, neither more nor less
            n = len(z)
            assert n < 20 or abs(z.square().mean() - 1) < 5 * math.sqrt(2 / n)


@pytest.mark.parametrize("dimension", range(4), ids=["steps", "layers", "tokens", "features"])
def test_masks_are_independent_over(dimension):
    kept = masks(0.5, 64, layers=6, steps=6).double() * 2 - 1
    for distance in (1, 2, 3, 4, 5):
        a, b = (
            kept.narrow(dimension, 0, kept.shape[dimension] - distance),
            kept.narrow(dimension, distance, kept.shape[dimension] - distance),
        )
        assert abs((a * b).mean()) < 4.5 / math.sqrt(a.numel())


def test_features_are_pairwise_independent():
    kept = masks(0.5, 64, layers=20, length=500)[0].double().flatten(0, 1) * 2 - 1
    n = len(kept)
    products = (kept.T @ kept / n).triu(1)
    z = products[products != 0] * math.sqrt(n)
    assert z.abs().max() < 5 and abs(z.square().mean() - 1) < 5 * math.sqrt(2 / len(z))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_kept_elements_are_scaled_so_that_the_mean_stays_the_same(dtype):
    keys = DropoutKeys()
    layer = TokenDropout(0.25, keys).train()
    x = torch.randn(2, 4, 7, dtype=dtype, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with keys.of(lay_out([[[1, 2, 3, 4]], [[5, 6, 7, 8]]]), 0, 0):
        y, flat = layer(x), layer(x.flatten(0, 1))
    y.sum().backward()
    kept = y != 0
    assert 0 < kept.sum() < x.numel() and y.dtype == dtype and torch.equal(flat, y.flatten(0, 1))
    torch.testing.assert_close(y, torch.where(kept, x / 0.75, 0))
    torch.testing.assert_close(x.grad, kept.to(dtype) / 0.75)


def test_evaluation_has_no_dropout_and_without_keys_it_is_that_of_torch():
    keys = DropoutKeys()
    layer, x = TokenDropout(0.5, keys), torch.ones(1, 4, 8)
    with keys.of(lay_out([[[1, 2, 3, 4]]]), 0, 0):
        assert torch.equal(layer.eval()(x), x)
        assert torch.equal(layer.train()(x), layer(x)) and not torch.equal(layer(x), x)
    torch.manual_seed(0)
    expected = torch.nn.functional.dropout(x, 0.5)
    torch.manual_seed(0)
    assert torch.equal(layer(x), expected)
    layer.p = 0.0
    assert torch.equal(layer(x), x)


# --- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "layers", "off", "attention"),
    [
        (hf.GPT2Config(**GPT2, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.4), 5, "attn_dropout 0.4", "sdpa"),
        (hf.GPT2Config(**GPT2, attn_pdrop=0.4), 5, "attn_dropout 0.4", "eager"),
        (hf.LlamaConfig(**SIZES, attention_dropout=0.5), 0, "attention_dropout 0.5", "sdpa"),
        (hf.GPTNeoXConfig(**SIZES, attention_dropout=0.4, hidden_dropout=0.3), 5, "attention_dropout 0.4", "sdpa"),
        (
            hf.OPTConfig(vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4),
            0,
            "dropout 0.1",
            "sdpa",
        ),
        (
            hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, attention_dropout=0.3),
            0,
            "attention_dropout 0.3",
            "eager",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_dropout_of_single_tokens_stays_and_all_other_dropout_is_named(config, layers, off, attention):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention).eval()
    with pytest.warns(UserWarning, match=f"dropout of the model is switched off: .*{off}"):
        keys = key_dropout([model])
    assert keys.layers == layers == sum(isinstance(module, TokenDropout) for module in model.modules())
    assert not any(module.training for module in model.modules())
    batch = lay_out([[[1, 2, 3, 4]], [[5, 6, 7, 8]]])
    model.train()
    passes = []
    for step in (0, 0, 1):
        with keys.of(batch, 0, step):
            passes.append(model(batch.tokens).logits)
    assert torch.equal(passes[0], passes[1])
    assert torch.equal(passes[0], passes[2]) == (layers == 0)
    disable_dropout(model)
    with keys.of(batch, 0, 0):
        torch.testing.assert_close(model(batch.tokens).logits, model.eval()(batch.tokens).logits)


def test_a_model_without_dropout_is_unchanged(tiny_llama):
    model = tiny_llama()
    keys = key_dropout([model])
    with keys.of(lay_out([[[1, 2]]]), 0, 0):
        assert keys.current is None and keys.layers == 0


def test_dropout_of_the_head_is_switched_off_because_it_sees_only_learned_tokens(tiny_llama, make_trainer):
    """A step ended in an error: the head's input has another shape than the tokens of the batch."""
    settings = {"r": 4, "dropout": 0.3, "targets": ["q_proj", "lm_head"]}
    model: Any = add_adapter(tiny_llama(), AdapterConfig.model_validate(settings), "CAUSAL_LM")
    rows = [{"prompt": str(i), "completion": str(i)} for i in range(4)]
    with pytest.warns(UserWarning, match="dropout of the model is switched off"):
        trainer = make_trainer(SFT(), model, rows)
    assert trainer.dropout.layers == 2  # those of q_proj
    trainer.train()


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_is_saved_under_its_usual_names(dora, tiny_llama, tmp_path):
    config = AdapterConfig.model_validate({"r": 4, "dropout": 0.3, "dora": dora})
    model: Any = add_adapter(tiny_llama(), config, "CAUSAL_LM")
    names = list(model.state_dict())
    keys = key_dropout([model])
    assert keys.layers == 14
    assert list(model.state_dict()) == names
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path)
    with without_warning():
        loaded: Any = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    assert loaded.peft_config["default"].lora_dropout == 0.3
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(loaded.eval()(ids).logits, model.eval()(ids).logits)
    batch, passes = lay_out([[[1, 2, 3]]]), []
    for step in (0, 0, 1):
        with keys.of(batch, 0, step):
            passes.append(model.train()(ids).logits)
    assert torch.equal(passes[0], passes[1]) and not torch.equal(passes[0], passes[2])
    # a second training starts with keys of its own
    assert key_dropout([model]).layers == 14
    adapted = model.eval()(ids).logits
    torch.testing.assert_close(model.merge_and_unload()(ids).logits, adapted)
