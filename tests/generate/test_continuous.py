"""The generator based on transformers' continuous batching: equal plans give equal bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from burnish.errors import UserError
from burnish.generate.continuous import ContinuousGenerator, check_top_p
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Request, complete
from burnish.generate.sampling import Sampling
from burnish.math.tensors import token_logprobs, warp
from generating import ENDS, llama, plain, requests


class Letters:
    """A tokenizer that writes token i as the letter i."""

    pad_token_id = 0

    def batch_decode(self, rows: Any, **options: Any) -> list[str]:
        return ["".join(chr(97 + token % 26) for token in row) for row in rows]


@pytest.fixture
def model() -> Any:
    made = llama(max_position_embeddings=64)
    # the model's own generation config is not used
    made.generation_config.update(top_k=2, temperature=0.1, repetition_penalty=3.0)
    return made


def make(model: Any) -> ContinuousGenerator:
    return ContinuousGenerator(model, Letters(), slots=6, page_size=16, max_batch_tokens=64)


def test_equal_plans_give_equal_bytes_and_global_state_is_restored(model: Any) -> None:
    model.train()
    model.model.layers[0].eval()
    training = [module.training for module in model.modules()]
    torch.manual_seed(5)
    first = torch.rand(3)
    torch.manual_seed(5)
    made = complete(make(model), requests())
    assert torch.equal(torch.rand(3), first), "the random state is the caller's"
    assert [module.training for module in model.modules()] == training
    assert model.config._attn_implementation == "sdpa" and torch.is_grad_enabled()
    torch.manual_seed(6)
    assert plain(complete(make(model), requests())) == plain(made)
    moved = [replace(request, seed=request.seed + 1) for request in requests()]
    assert plain(complete(make(model), moved)) != plain(made), "other seeds, other draws"
    assert {c.finish_reason for c in made} == {"stop", "length"}
    for completion in made:
        assert (completion.finish_reason == "stop") == (completion.tokens[-1] in ENDS)
        assert not ENDS & set(completion.tokens[:-1].tolist()) and 0 not in completion.tokens


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_k": 8}, {"top_p": 0.8}])
def test_logprobs_equal_those_of_the_processed_distribution(model: Any, sampling: dict[str, Any]) -> None:
    wanted = requests(8, **sampling)
    generator = ContinuousGenerator(model, None, slots=3, page_size=16, max_batch_tokens=64)
    for request, completion in zip(wanted, complete(generator, wanted), strict=True):
        ids = torch.tensor([[*request.tokens, *completion.tokens.tolist()]])
        with torch.no_grad():
            logits = warp(
                model(ids).logits, sampling.get("temperature", 1.0), sampling.get("top_k"), sampling.get("top_p")
            )
        expected = token_logprobs(logits, ids)[0, len(request.tokens) :]
        assert completion.logprobs == pytest.approx(expected.double().numpy(), abs=1e-4)


def test_greedy_completions_equal_those_of_the_local_generator(model: Any) -> None:
    wanted = requests(8, temperature=0.0) + requests(3, temperature=0.0, length_range=[2, 9])
    wanted.append(Request((9,) * 60, 0, Sampling(temperature=0.0), frozenset()))
    ours = complete(LocalGenerator(model, Letters()), wanted)
    theirs = complete(make(model), wanted)
    # only the local one counts the tokens that it does not compute again
    assert plain([replace(c, cached_tokens=0) for c in ours]) == plain(theirs)
    assert theirs[-1].finish_reason == "context" and len(theirs[-1].tokens) == 4


def test_new_weights_are_used_and_settings_may_differ_between_requests(model: Any) -> None:
    generator = make(model)
    wanted = requests(4, temperature=0.0) + requests(4) + requests(4, top_k=1)
    before = complete(generator, wanted)
    assert [c.tokens.tolist() for c in before[:4]] == [c.tokens.tolist() for c in before[8:]], "one token is left"
    changed = {name: torch.randn_like(x) * 0.3 for name, x in model.named_parameters()}
    generator.update_weights(1, changed.items())
    after = complete(generator, wanted, 1)
    assert plain(after[:4]) == plain(
        [replace(c, version=1) for c in complete(LocalGenerator(model, Letters()), wanted[:4])]
    )
    assert plain(after) != plain(before)


def test_a_completion_is_truncated_after_its_stop_string(model: Any) -> None:
    free = complete(make(model), requests(6, frozenset()))
    texts = Letters().batch_decode([c.tokens.tolist() for c in free])
    stop = texts[0][4:7]
    done = complete(make(model), requests(6, frozenset(), stop=[stop]))
    ends = [text.index(stop) + 3 if stop in text else 20 for text in texts]
    assert [c.tokens.tolist() for c in done] == [c.tokens[:end].tolist() for c, end in zip(free, ends, strict=True)]
    assert done[0].finish_reason == "stop" and len(done[0].logprobs) == len(done[0].tokens) <= 7


def test_unsupported_requests_are_refused(model: Any) -> None:
    generator = make(model)
    with pytest.raises(UserError, match="returns no values"):
        generator.submit([replace(request, return_values=True) for request in requests(1)], 0)
    with pytest.raises(UserError, match="continuous batching ignores it"):
        generator.submit(requests(1, min_new_tokens=2), 0)
    with pytest.raises(UserError, match="request 0: the prompt is empty"):
        generator.submit([Request((), 0)], 0)
    assert generator.poll(None) == []


def test_top_p_under_deterministic_algorithms_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    check_top_p(gpu)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    check_top_p(torch.device("cpu"))
    with pytest.raises(UserError, match=r"generation\.top_p: .* full_determinism on a GPU"):
        check_top_p(gpu)
