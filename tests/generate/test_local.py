"""The local generator against transformers' generate, full forward passes and exact probabilities."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import peft
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from burnish.errors import UserError
from burnish.generate.draw import draw
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Completion, Request, complete, request_seed
from burnish.generate.sampling import Sampling
from burnish.math.tensors import token_logprobs, warp
from burnish.models.heads import SharedCritic, StepValueHead, head_values

V = 50
SHAPE: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

EAGER: dict[str, Any] = {"attn_implementation": "eager"}


def llama(dtype=torch.float64, **changes: Any) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = SHAPE | {"num_key_value_heads": 2} | changes
    model: Any = LlamaForCausalLM(LlamaConfig(**settings))
    return model.to(dtype).eval()


def prompts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(2, V, (n,), generator=generator).tolist()) for n in lengths]


def requests(*lengths, seed=0):
    return [Request(tokens, 100 + i) for i, tokens in enumerate(prompts(*lengths, seed=seed))]


class Done(NamedTuple):
    """A completion as plain values, which can be compared."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


def plain(completion: Completion) -> Done:
    assert completion.tokens.dtype == "int64" and completion.logprobs.dtype == "float64"
    return Done(tuple(completion.tokens.tolist()), tuple(completion.logprobs.tolist()), completion.finish_reason)


def pads(pad_id):
    return SimpleNamespace(pad_token_id=pad_id)


def run(model: Any, requests, batch_size=64, eos_ids=(), pad_id=None, tokenizer=None, **sampling: Any):
    generator = LocalGenerator(model, tokenizer or (None if pad_id is None else pads(pad_id)), slots=batch_size)
    settings = {"sampling": Sampling(**sampling), "stop_ids": frozenset(eos_ids)}
    return [plain(done) for done in complete(generator, [replace(request, **settings) for request in requests])]


def reference(model, tokens, new, eos_ids):
    out = model.generate(
        torch.tensor([tokens]), do_sample=False, max_new_tokens=new, eos_token_id=list(eos_ids), pad_token_id=0
    )
    return out[0, len(tokens) :].tolist()


def teacher_forced(model, tokens, completion, temperature=1.0, top_k=None, top_p=None):
    ids = torch.tensor([[*tokens, *completion.tokens]])
    with torch.no_grad():
        logits = warp(model(ids).logits, temperature, top_k, top_p)
    return token_logprobs(logits, ids)[0, len(tokens) :]


MODELS = {
    "llama": lambda: llama(),
    "float32": lambda: llama(torch.float32),
    "tied": lambda: llama(tie_word_embeddings=True),
    "eager": lambda: llama(**EAGER),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3)
    ).double(),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE)).double(),
    "sliding": lambda: MistralForCausalLM(MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=6)).double(),
    "mixed windows": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            **SHAPE, num_key_value_heads=2, use_sliding_window=True, sliding_window=6, max_window_layers=1
        )
    ).double(),
    "soft-capped": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **SHAPE, **EAGER, num_key_value_heads=2, head_dim=8, sliding_window=6, final_logit_softcapping=3.0
        )
    ).double(),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_greedy_decoding_equals_transformers(name):
    torch.manual_seed(1)
    model = MODELS[name]().eval()
    wanted = requests(1, 5, 9, 3, 20, 7, 2)
    free = [reference(model, request.tokens, 14, ()) for request in wanted]
    ends = (free[1][3], free[2][6])
    done = run(model, wanted, batch_size=3, eos_ids=ends, temperature=0.0, max_new_tokens=14)
    expected = [reference(model, request.tokens, 14, ends) for request in wanted]
    assert [list(completion.tokens) for completion in done] == expected
    assert [completion.finish_reason for completion in done] == [
        "stop" if e[-1] in ends else "length" for e in expected
    ]
    assert len({len(e) for e in expected}) > 1


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8, "temperature": 1.3}])
def test_logprobs_equal_those_of_a_full_forward_pass(settings):
    model = llama()
    wanted = requests(1, 5, 9, 3, 20)
    for request, completion in zip(wanted, run(model, wanted, batch_size=2, eos_ids=(4,), **settings), strict=True):
        expected = teacher_forced(model, request.tokens, completion, **settings)
        torch.testing.assert_close(torch.tensor(completion.logprobs, dtype=torch.float64), expected, rtol=0, atol=1e-9)


def test_a_completion_depends_on_its_own_request_only():
    model = llama(torch.float32)
    wanted = requests(4, 4, 1, 17, 30, 8, 2)
    wanted += [Request(wanted[0].tokens, 900 + i) for i in range(5)]
    together = run(model, wanted, eos_ids=(3, 5, 8), max_new_tokens=30, pad_id=0)
    for size, order in ((1, wanted), (2, wanted[::-1]), (5, wanted[3:] + wanted[:3])):
        again = dict(zip(order, run(model, order, size, eos_ids=(3, 5, 8), max_new_tokens=30, pad_id=0), strict=True))
        for request, completion in zip(wanted, together, strict=True):
            assert again[request].tokens == completion.tokens
            assert again[request].finish_reason == completion.finish_reason
            assert again[request].logprobs == pytest.approx(completion.logprobs, abs=1e-5)
    assert len({completion.tokens for completion in together[-5:]}) > 1, "samples of one prompt differ"
    assert {completion.finish_reason for completion in together} == {"stop", "length"}


def test_a_prompt_is_computed_once_for_all_its_samples():
    model = llama()
    read = []
    hook = model.model.register_forward_pre_hook(
        lambda _, __, kwargs: read.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    long, short = prompts(9, 4)
    run(model, [Request(long, i) for i in range(6)] + [Request(short, i) for i in range(2)], max_new_tokens=3)
    hook.remove()
    assert read == [(2, 8), (8, 1), (8, 1), (8, 1)]


def test_finished_rows_leave_and_waiting_requests_take_their_places():
    model = llama()
    rows = []
    hook = model.model.register_forward_pre_hook(
        lambda _, __, kwargs: rows.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    done = run(model, requests(*[6] * 12), batch_size=4, eos_ids=range(2, 12), max_new_tokens=20)
    hook.remove()
    decoded = sum(row for row, length in rows if length == 1)
    assert decoded == sum(len(completion.tokens) for completion in done), "no row is decoded after its stop"
    assert max(row for row, _ in rows) == 4


def test_prompts_of_similar_length_are_prefilled_together():
    model = llama()
    read = []
    hook = model.model.register_forward_pre_hook(
        lambda _, __, kwargs: read.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    run(model, requests(*[101] * 6, *[21] * 6, *[91] * 6), batch_size=18, max_new_tokens=1)
    hook.remove()
    assert read == [(12, 100), (6, 20), (18, 1)], "from a thousand tokens on, what is much shorter is read apart"


def test_growing_the_cache_does_not_change_results():
    model = llama()
    (request,) = requests(60)
    (completion,) = run(model, [request], temperature=0.0, max_new_tokens=150)
    assert list(completion.tokens) == reference(model, request.tokens, 150, ())


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"top_k": 7}, {"top_p": 0.6}])
@pytest.mark.parametrize("vocabulary", [40, 300])
def test_draws_follow_the_exact_probabilities(settings, vocabulary):
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(1)) * 2
    n = 20_000
    uniforms = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tokens, logprobs = draw(logits.expand(n, -1), uniforms, Sampling(**settings), torch.zeros(1, vocabulary).bool())
    # the definition, by sorting: softmax(z / temperature), its k largest, or the fewest that reach p
    p = (logits[0].double() / settings.get("temperature", 1.0)).softmax(0)
    ordered = p.sort(descending=True)
    kept = settings.get("top_k") or vocabulary
    if "top_p" in settings:
        kept = next(k for k in range(1, vocabulary) if ordered.values[:k].sum() >= settings["top_p"])
    support = ordered.indices[:kept]
    expected = torch.zeros_like(p).index_put((support,), p[support] / p[support].sum())
    assert set(tokens.tolist()) <= set(support.tolist())
    torch.testing.assert_close(logprobs.double(), expected[tokens].log(), rtol=0, atol=1e-5)
    counts = torch.bincount(tokens, minlength=vocabulary)
    assert (
        counts - expected * n
    ).abs().max() <= 1.1  # an interval of length p holds n p of n even numbers, give or take 1


def test_first_tokens_follow_the_model():
    model = llama()
    (prompt,) = prompts(5)
    n = 3000
    done = run(model, [Request(prompt, request_seed(0, 0, i, 0)) for i in range(n)], 1000, max_new_tokens=1)
    with torch.no_grad():
        p = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor([c.tokens[0] for c in done]), minlength=V)
    often = p * n >= 10
    chi_square = ((counts - p * n)[often] ** 2 / (p * n)[often]).sum().item()
    freedom = int(often.sum())
    assert freedom > 10
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("uniform, expected", [(0.0, 1), (0.2, 1), (0.26, 2), (1 - 2**-53, 2)])
def test_uniforms_at_the_edges_draw_tokens_of_positive_probability(uniform, expected):
    logits = torch.tensor([[-torch.inf, 0.0, math.log(3.0), -torch.inf]])
    uniforms = torch.tensor([uniform], dtype=torch.float64)
    tokens, logprobs = draw(logits, uniforms, Sampling(), torch.zeros(1, 4).bool())
    assert tokens.tolist() == [expected]
    assert logprobs.item() == pytest.approx(math.log(0.25 if expected == 1 else 0.75))


def test_banned_tokens_stay_in_the_probabilities():
    logits = torch.tensor([[math.log(0.5), math.log(0.3), math.log(0.2)]]).expand(100, 3)
    uniforms = (torch.arange(100, dtype=torch.float64) + 0.5) / 100
    tokens, logprobs = draw(logits, uniforms, Sampling(), torch.tensor([[True, False, False]]))
    assert (tokens == 1).sum() == 60  # 0.3 / (0.3 + 0.2)
    assert logprobs[tokens == 1].tolist() == pytest.approx([math.log(0.3)] * 60)
    # if all allowed tokens are banned, the likeliest other one
    tokens, logprobs = draw(logits, uniforms, Sampling(top_k=1), torch.tensor([[True, False, False]]))
    assert tokens.tolist() == [1] * 100
    assert logprobs.tolist() == pytest.approx([math.log(0.3)] * 100)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_reported(temperature):
    model = llama()
    model.lm_head.weight.data[3] = torch.nan
    with pytest.raises(UserError, match=r"logits are not numbers \(NaN\)"):
        run(model, requests(3, 5), temperature=temperature)


def biased(**biases):
    """A model whose logit of token ``t<i>`` is larger by this amount at every position."""
    model = llama()
    row = torch.zeros(V, dtype=torch.float64)
    for name, value in biases.items():
        row[int(name[1:])] = value
    project = torch.nn.Linear(32, V, dtype=torch.float64)
    project.weight.data.copy_(model.lm_head.weight.data)
    project.bias.data.copy_(row)
    model.lm_head = project
    return model


def test_min_new_tokens_delays_the_end():
    model = biased(t7=20.0)
    assert {len(c.tokens) for c in run(model, requests(3, 5, 9), eos_ids=(7,))} == {1}
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_k": 1}]
    for settings in ways:
        for completion in run(model, requests(3, 5, 9), eos_ids=(7,), min_new_tokens=4, max_new_tokens=9, **settings):
            assert completion.finish_reason == "stop"
            assert 7 not in completion.tokens[:4]
            assert completion.tokens[4:] == (7,)
            assert all(math.isfinite(logprob) for logprob in completion.logprobs)


def test_the_pad_token_is_never_sampled_unless_it_ends():
    model = biased(t6=20.0)
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_p": 0.5}]
    for settings in ways:
        assert all(6 not in c.tokens for c in run(model, requests(3, 5), pad_id=6, eos_ids=(7,), **settings))
        assert [c.tokens for c in run(model, requests(3, 5), pad_id=6, eos_ids=(6,), **settings)] == [(6,), (6,)]


def test_an_end_token_with_id_0_ends():
    done = run(biased(t0=20.0), requests(3, 5), pad_id=0, eos_ids=(0,))
    assert [(c.tokens, c.finish_reason) for c in done] == [((0,), "stop"), ((0,), "stop")]


class Letters:
    """A tokenizer that writes token i as the letter i."""

    pad_token_id = None

    def batch_decode(self, rows, **options):
        return ["".join(chr(97 + token % 26) for token in row) for row in rows]


def test_a_stop_string_ends_with_the_token_that_completes_it():
    model = llama()
    wanted = requests(3, 5, 9, 2)
    free = run(model, wanted, max_new_tokens=20)
    texts = Letters().batch_decode([c.tokens for c in free])
    stops = [texts[0][4:7], texts[1][9]]
    ends = [min([text.find(stop) + len(stop) for stop in stops if stop in text], default=20) for text in texts]
    done = run(model, wanted, max_new_tokens=20, stop=stops, tokenizer=Letters())
    assert [c.tokens for c in done] == [c.tokens[:end] for c, end in zip(free, ends, strict=True)]
    assert done[0].finish_reason == "stop"
    assert len(done[0].tokens) <= 7
    late = run(model, wanted, max_new_tokens=20, min_new_tokens=12, stop=stops, tokenizer=Letters())
    assert all(len(c.tokens) >= 12 for c in late)
    with pytest.raises(UserError, match="stop strings need a tokenizer"):
        run(model, wanted, stop=["a"])


def test_lengths_are_drawn_from_the_range():
    wanted = [Request((5, 6), request_seed(0, i, 0, 0)) for i in range(300)]
    done = run(llama(), wanted, length_range=[2, 6])
    counts = [sum(len(c.tokens) == n for c in done) for n in range(8)]
    assert sum(counts[2:6]) == 300
    assert min(counts[2:6]) > 45  # 75 expected, standard deviation 7.5
    assert {c.finish_reason for c in done} == {"length"}


def test_a_full_context_window_ends_a_completion():
    model = llama(max_position_embeddings=12)
    done = run(model, requests(10, 4), max_new_tokens=8)
    assert [(len(c.tokens), c.finish_reason) for c in done] == [(2, "context"), (8, "length")]
    with pytest.raises(UserError, match=r"request 0: a prompt of 12 tokens leaves no room in .* window of 12"):
        run(model, requests(12))
    with pytest.raises(UserError, match="request 1: the prompt is empty"):
        run(model, requests(3, 0))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_generates_as_its_merged_model():
    model = llama()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.eval()
    wanted = requests(3, 5, 9)
    done = run(adapted, wanted, temperature=0.0, max_new_tokens=10)
    with adapted.disable_adapter():
        base = run(adapted, wanted, temperature=0.0, max_new_tokens=10)
    merged = adapted.merge_and_unload()
    assert [list(c.tokens) for c in done] == [reference(merged, r.tokens, 10, ()) for r in wanted]
    assert base != done


def test_training_mode_is_restored():
    model = llama(attention_dropout=0.5).train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    assert run(model, requests(3, 5)) == run(model, requests(3, 5)), "no dropout while sampling"
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()


def test_models_whose_cache_is_not_supported_are_refused():
    rwkv = RwkvForCausalLM(RwkvConfig(vocab_size=V, hidden_size=32, num_hidden_layers=2))
    with pytest.raises(UserError, match="RwkvForCausalLM takes no past_key_values, position_ids"):
        run(rwkv, requests(3))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"length_range": [4, 4]}, r"\[4, 4\) is empty"),
        ({"length_range": [2, 9], "max_new_tokens": 5}, "leave max_new_tokens out"),
        ({"max_new_tokens": 5, "min_new_tokens": 6}, "min_new_tokens 6 is more than the shortest limit, 5"),
        ({"temperature": -1.0}, "temperature: expected 0 or more"),
        ({"top_p": 0.0}, "top_p: expected more than 0"),
        ({"stop": [""]}, "at least 1 character"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


def test_seeds_depend_on_every_argument_and_are_fixed():
    grid = [(r, p, s, i) for r in range(3) for p in range(12) for s in range(3) for i in range(12)]
    seeds = [request_seed(*key) for key in grid]
    assert len(set(seeds)) == len(grid)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(0, 17, 0, 3) == 0xDC051BD4AD4AEFD9 >> 1  # printf 0/17/0/3 | b2sum -l 64


# --- requests of one batch ----------------------------------------------------------------------------------------


def test_every_request_has_its_own_settings():
    model, tokens = llama(), prompts(5, 9, 3, 7, 5, 6, 4)
    kinds = [
        (Sampling(max_new_tokens=6), {4}),
        (Sampling(max_new_tokens=12, temperature=0.0), {4}),
        (Sampling(max_new_tokens=9, temperature=0.7, top_k=5), {9, 11}),
        (Sampling(max_new_tokens=14, top_p=0.6, min_new_tokens=8), range(2, 30)),
        (Sampling(max_new_tokens=9, stop=["a", "c"]), ()),
        (Sampling(max_new_tokens=30, stop=["e"], min_new_tokens=3), ()),
        (Sampling(length_range=[2, 20]), {0}),  # the pad id, which can be sampled if it is also a stop id
    ]
    wanted = [
        Request(ids, i, sampling, frozenset(ends))
        for i, (ids, (sampling, ends)) in enumerate(zip(tokens, kinds, strict=True))
    ]
    tokenizer = Letters()
    tokenizer.pad_token_id = 0  # type: ignore[assignment]
    together = complete(LocalGenerator(model, tokenizer, slots=4), wanted)
    for request, mine in zip(wanted, together, strict=True):
        (alone,) = complete(LocalGenerator(model, tokenizer), [request])
        assert mine.tokens.tolist() == alone.tokens.tolist() and mine.finish_reason == alone.finish_reason
        assert mine.logprobs == pytest.approx(alone.logprobs, abs=1e-9)


@pytest.mark.parametrize("kind", ["shared", "steps"])
def test_values_equal_those_of_a_full_forward_pass(kind):
    model = llama(max_position_embeddings=24)
    torch.manual_seed(3)
    critic = SharedCritic(32, torch.float64) if kind == "shared" else StepValueHead(32, torch.float64)
    torch.nn.init.normal_(critic.score.weight if isinstance(critic, SharedCritic) else critic.value.weight)
    tokens = prompts(5, 9, 3, 7, 20, 6)
    sampling = Sampling(max_new_tokens=10)
    wanted = [Request(ids, i, sampling, frozenset(range(3)), i != 1) for i, ids in enumerate(tokens)]
    done = complete(LocalGenerator(model, critic=critic, slots=3), wanted)
    free = complete(LocalGenerator(model, slots=3), [replace(request, return_values=False) for request in wanted])
    assert {c.finish_reason for c in done} == {"stop", "length", "context"}
    for request, completion, without in zip(wanted, done, free, strict=True):
        assert completion.tokens.tolist() == without.tokens.tolist()
        if not request.return_values:
            assert completion.values is None and completion.final_value is None
            continue
        ids = torch.tensor([[*request.tokens, *completion.tokens.tolist()]])
        with torch.no_grad():
            expected = head_values(critic, model.model(ids).last_hidden_state)[0, len(request.tokens) - 1 :].tolist()
        assert completion.values is not None and completion.values.dtype == "float64"
        assert completion.values.tolist() == pytest.approx(expected[:-1], abs=1e-9)
        assert completion.final_value == pytest.approx(expected[-1], abs=1e-9)
    with pytest.raises(UserError, match="values need a critic"):
        complete(LocalGenerator(model), wanted)


# --- reuse --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "sliding", "mixed windows", "soft-capped", "eager"])
def test_a_request_computes_only_tokens_that_are_not_in_the_cache(name):
    torch.manual_seed(1)
    model = MODELS[name]().eval()
    sampling = Sampling(max_new_tokens=8)
    ends = frozenset({4})
    first = [Request(ids, i, sampling, ends, keep_cache=True) for i, ids in enumerate(prompts(20, 31, 25, 18, 40))]
    widths = []
    model.base_model.register_forward_pre_hook(
        lambda _, __, kwargs: widths.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )

    def turns(generator):
        before = complete(generator, first)
        widths.clear()
        second = [
            Request((*r.tokens, *c.tokens.tolist(), *more), 100 + r.seed + sample, sampling, ends)
            for r, c, more in zip(first, before, prompts(3, 6, 2, 9, 4, seed=1), strict=True)
            for sample in range(1 + (r.seed == 2))
        ]
        return second, complete(generator, second)

    second, done = turns(LocalGenerator(model, slots=7))
    read = [shape for shape in widths if shape[1] > 1]
    assert read == [(5, 9)], "the last token sampled and what follows it, but for the last token of the prompt"
    fresh = complete(LocalGenerator(model, slots=7), second)
    for mine, expected in zip(done, fresh, strict=True):
        assert mine.tokens.tolist() == expected.tokens.tolist()
        assert mine.logprobs == pytest.approx(expected.logprobs, abs=1e-9)
    _, again = turns(LocalGenerator(model, slots=7))
    assert [plain(c) for c in again] == [plain(c) for c in done], "equal plans give equal bytes"


def test_the_cache_has_no_more_slots_than_a_plan_needs():
    generator = LocalGenerator(llama(), slots=64)
    for count, slots in ((2, 2), (5, 5), (3, 5), (70, 64)):
        complete(generator, requests(*range(20, 20 + count)))
        session = generator._session
        assert session is not None
        assert {len(store.keys) for store in session.cache.stores} == {session.slots} == {slots}


def test_the_cache_is_dropped_with_the_weights():
    model, widths = llama(), []
    model.model.register_forward_pre_hook(
        lambda _, __, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    generator, request = LocalGenerator(model, slots=2), replace(requests(40)[0], keep_cache=True)
    drops = (
        lambda: None,
        generator.drop_cache,
        lambda: generator.update_weights(0, model.named_parameters()),
    )
    before = complete(generator, [request])
    for drop, most in zip(drops, (1, 39, 39), strict=True):
        drop()
        widths.clear()
        assert complete(generator, [request])[0].tokens.tolist() == before[0].tokens.tolist()
        assert max(widths) == most


def test_plans_do_not_share_batches_and_complete_in_order():
    model = llama(torch.float32)
    generator, alone = LocalGenerator(model, slots=3), LocalGenerator(model, slots=3)
    first, second = requests(4, 6, 3, 9), requests(5, 7, seed=1)
    handles = [*generator.submit(first, 0), *generator.submit(second, 0)]
    with pytest.raises(RuntimeError, match="requests are in flight"):
        generator.update_weights(1, ())
    assert generator.poll(0) == [] and len(generator.tokens_so_far(handles[3])) == 1
    done, polls = {}, 0
    while len(done) < len(handles):
        done.update(generator.poll(0.001))
        polls += 1
    assert polls > 2 and generator.poll(None) == []
    expected = complete(alone, first) + complete(alone, second)
    assert [plain(done[handle]) for handle in handles] == [plain(c) for c in expected]
    with pytest.raises(ValueError, match="version 5: the generator holds version 0"):
        generator.submit(first, 5)


def test_weights_are_copied_only_if_they_are_other_tensors():
    model, other = llama(), llama(initializer_range=0.1)
    generator, wanted = LocalGenerator(model), requests(5, 7)
    expected = [plain(c) for c in complete(LocalGenerator(other), wanted)]
    places = [p.data_ptr() for p in model.parameters()]
    assert [plain(c) for c in complete(generator, wanted)] != expected
    generator.update_weights(3, other.state_dict().items())
    assert [plain(c) for c in complete(generator, wanted, 3)] == expected
    assert [p.data_ptr() for p in model.parameters()] == places
    with pytest.raises(ValueError, match=r"lm_head.weight: \(50, 32\), expected \(2, 2\)"):
        generator.update_weights(4, [("lm_head.weight", torch.zeros(2, 2))])


def test_memory_grows_with_what_is_sampled_and_not_with_the_limit():
    """With a context window as large, 200 million tokens took 7.8 GB before the first one was sampled."""
    model = llama(max_position_embeddings=10**9)

    def run_until_stop(limit: int) -> tuple[list[tuple[list[int], list[float]]], int]:
        generator = LocalGenerator(model)
        sampling = Sampling(max_new_tokens=limit)
        wanted = [replace(r, sampling=sampling, stop_ids=frozenset({3})) for r in requests(5, 9, 40, 9, 5, 5)]
        done = [(c.tokens.tolist(), c.logprobs.tolist()) for c in complete(generator, wanted)]
        assert generator._session is not None
        return done, generator._session.state["tokens"].shape[1]

    expected, _ = run_until_stop(2000)
    sampled, width = run_until_stop(200_000_000)
    assert sampled == expected
    longest = max(len(tokens) for tokens, _ in sampled)
    assert 130 < longest < 2000 and width < 2 * longest
