"""The generator on a vLLM server, against a stand-in for the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import peft
import pytest
import torch

from builders import character_tokenizer, llama
from burnish.errors import UserError
from burnish.generate import vllm as module
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Completion, Request, complete
from burnish.generate.sampling import Sampling
from burnish.generate.vllm import VllmGenerator
from vllm_server import NAME, GlooBroadcast, Serving, serving

ENDS = frozenset({2, 30, 41})


def requests(n: int = 6, **sampling: Any) -> list[Request]:
    settings = Sampling(**({"max_new_tokens": 8} | sampling))
    return [Request(tuple(range(9, 11 + i % 3)), i, settings, ENDS) for i in range(n)]


def generator(model: Any, url: str, **settings: Any) -> VllmGenerator:
    return VllmGenerator(model, character_tokenizer(), slots=4, url=url, group=GlooBroadcast, **settings)


def assert_equal(ours: list[Completion], theirs: list[Completion]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert (one.finish_reason, one.version) == (other.finish_reason, other.version)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_goes_as_files() -> None:
    base = llama()
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model: Any = peft.get_peft_model(llama(), lora).eval()
    tokenizer = character_tokenizer()
    with serving(base, tokenizer) as vllm:
        ours = generator(model, vllm.url)
        ours.update_weights(3, ((n, p) for n, p in model.named_parameters() if p.requires_grad))
        local = LocalGenerator(model, tokenizer)
        local.update_weights(3, ())
        assert_equal(complete(ours, requests(), 3), complete(local, requests(), 3))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(3)
        ours.update_weights(4, ((n, p) for n, p in model.named_parameters() if p.requires_grad))
        local.update_weights(4, ())
        assert_equal(complete(ours, requests(), 4), complete(local, requests(), 4))
        ours.close()
        assert vllm.calls == [
            "/v1/models",
            "/tokenize",
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
        ]


def test_weights_go_as_tensors() -> None:
    served, model, tokenizer = llama(), llama(seed=1), character_tokenizer()
    with serving(served, tokenizer) as vllm:
        ours = generator(model, vllm.url)
        local = LocalGenerator(model, tokenizer)
        for version in (0, 1):
            ours.update_weights(version, model.named_parameters())
            local.update_weights(version, ())
            assert_equal(complete(ours, requests(), version), complete(local, requests(), version))
            with torch.no_grad():
                model.lm_head.weight.mul_(2)
        ours.close()
        update = [
            *("/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"),
            *("/reset_prefix_cache", "/resume"),
        ]
        init = ["/shutdown_weight_transfer_engine", "/get_world_size", "/init_weight_transfer_engine"]
        assert vllm.calls[2:] == [*init, *update, *update, "/shutdown_weight_transfer_engine"]


UPDATE = [
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/resume",
]


@pytest.fixture(scope="module")
def model() -> Any:
    return llama(seed=1)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    """A server with other weights than the model."""
    monkeypatch.setattr(module, "PAUSE", 0.05)
    with serving(llama(), character_tokenizer()) as served:
        yield served


@pytest.fixture
def ours(vllm: Serving, model: Any) -> Iterator[VllmGenerator]:
    made = generator(model, vllm.url, timeout=30, wait=20)
    vllm.calls.clear()
    vllm.bodies.clear()
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(model: Any) -> list[Completion]:
    return complete(LocalGenerator(model, character_tokenizer()), requests())


def test_equal_plans_send_equal_requests(ours: VllmGenerator, vllm: Serving) -> None:
    plan = [Request((9, 10), seed, Sampling(temperature=0.5, top_k=7, top_p=0.9), ENDS) for seed in range(9)]
    for _ in range(2):
        complete(ours, plan)
    first, again = (sorted(bodies, key=lambda body: body["seed"]) for bodies in (vllm.bodies[:9], vllm.bodies[9:]))
    assert first == again
    assert [body["seed"] for body in first] == list(range(9))
    kept = ("model", "prompt", "max_tokens", "temperature", "top_k", "top_p", "stop_token_ids", "ignore_eos")
    assert [first[0][key] for key in kept] == [NAME, [9, 10], 64, 0.5, 7, 0.9, [2, 30, 41], True]
    assert first[0]["logit_bias"] == {"0": -100.0}


def test_only_some_requests_are_in_flight_and_results_arrive_in_parts(ours: VllmGenerator, vllm: Serving) -> None:
    flying, most, lock = 0, 0, threading.Lock()
    sample = vllm.vllm._sample

    def counted(*what: Any) -> Any:
        nonlocal flying, most
        with lock:
            flying += 1
            most = max(most, flying)
        time.sleep(0.02)
        with lock:
            flying -= 1
        return sample(*what)

    vllm.vllm._sample = counted  # type: ignore[method-assign]
    handles = ours.submit(requests(12), 0)
    assert ours.poll(0) == []
    done: dict[int, Completion] = {}
    polls = 0
    while len(done) < len(handles):
        done.update(ours.poll(None))
        polls += 1
    assert sorted(done) == handles and polls > 1 and ours.poll(None) == []
    assert most == ours.slots == 4


@pytest.mark.parametrize(
    "path", ["/start_weight_update", "/update_weights", "/finish_weight_update", "/v1/completions"]
)
def test_a_server_that_dies_gets_everything_again(
    ours: VllmGenerator, vllm: Serving, expected: list[Completion], path: str
) -> None:
    vllm.dies_at = path, 2 if path == "/v1/completions" else 0
    assert_equal(complete(ours, requests()), expected)
    assert vllm.lives == 2
    init = ["/shutdown_weight_transfer_engine", "/get_world_size", "/init_weight_transfer_engine"]
    sent = UPDATE if path == "/v1/completions" else UPDATE[: UPDATE.index(path) + 1]
    assert vllm.calls == [*init, *sent, *init, *UPDATE]


def test_a_server_that_dies_for_good_stops_the_run(model: Any, vllm: Serving) -> None:
    ours = generator(model, vllm.url, wait=0.3)
    vllm.dies_at, vllm.comes_back = ("/update_weights", 0), False
    with pytest.raises(UserError, match=rf"{vllm.url} has not answered for 0.3 s .*start the vLLM server and run"):
        ours.update_weights(0, model.named_parameters())
    ours.close()


def test_a_server_that_always_fails_stops_the_run(ours: VllmGenerator, vllm: Serving) -> None:
    vllm.vllm._sample = lambda *what: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(UserError, match=rf"{vllm.url}: the vLLM server failed 3 times in a row, last with: /v1/compl"):
        complete(ours, requests(1))
    assert ours.poll(None) == []


def test_a_server_that_was_started_again_unseen_is_noticed(
    ours: VllmGenerator, vllm: Serving, expected: list[Completion]
) -> None:
    assert_equal(complete(ours, requests()), expected)
    vllm.stop()
    vllm.start()
    assert_equal(complete(ours, requests()), expected)
    assert vllm.calls.count("/update_weights") == 2


def test_a_trainer_takes_over_a_server_that_another_has_left_in_an_update(
    ours: VllmGenerator, vllm: Serving, expected: list[Completion]
) -> None:
    vllm.vllm.updating = vllm.vllm.paused = True
    assert_equal(complete(ours, requests()), expected)
    shut = "/shutdown_weight_transfer_engine"
    assert vllm.calls[:4] == [shut, "/finish_weight_update", shut, "/get_world_size"]


def change_choice(**changes: Any) -> Any:
    def change(answer: dict[str, Any]) -> None:
        choice = answer["choices"][0]
        for key, value in changes.items():
            choice[key] = value(choice[key]) if callable(value) else value

    return change


def change_logprobs(values: Any) -> Any:
    return change_choice(logprobs=lambda old: old | {"token_logprobs": values(old["token_logprobs"])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_choice(prompt_token_ids=[9, 11]), r"expected a completion of the tokens \[9, 10\], got one of \[9, 11"),
        (change_choice(token_ids=lambda tokens: [*tokens[:-1], 105]), "is 105: expected an id below 105"),
        (change_choice(token_ids=[]), r"expected 1 to 8 tokens, got \[\]"),
        (change_choice(token_ids=lambda tokens: tokens * 9), "expected 1 to 8 tokens"),
        (change_choice(token_ids=lambda tokens: [3, *tokens[1:]]), "expected a log-probability of each of"),
        (change_logprobs(lambda values: values[1:]), "expected a log-probability of each of"),
        (change_logprobs(lambda values: [*values[:-1], None]), "has the log-probability None"),
        (change_logprobs(lambda values: [*values[:-1], 0.5]), "has the log-probability 0.5"),
        (change_logprobs(lambda values: [*values[:-1], -9999.0]), "has the log-probability -9999.0"),
        (change_choice(finish_reason="abort"), "the finish reason 'abort' does not fit"),
        (lambda answer: answer.update(choices=[]), "expected one choice with tokens and log-probabilities, got"),
        (
            lambda answer: answer.update(model="other"),
            "expected a completion of the model served/model, got one of oth",
        ),
        (change_choice(weight_versions=None), "does not say which weights have sampled it"),
    ],
)
def test_an_answer_that_does_not_fit_its_request_is_an_error(
    ours: VllmGenerator, vllm: Serving, change: Any, message: str
) -> None:
    vllm.change = change
    with pytest.raises(module.AnswerError, match=message) as caught:
        complete(ours, requests(1))
    assert vllm.url in str(caught.value)


def test_a_finish_reason_has_to_fit_the_tokens(ours: VllmGenerator, vllm: Serving) -> None:
    plan = requests(12)
    reasons = {made.finish_reason for made in complete(ours, plan)}
    assert reasons == {"stop", "length"}
    vllm.change = change_choice(finish_reason=lambda reason: {"stop": "length", "length": "stop"}[reason])
    for request in plan:
        with pytest.raises(module.AnswerError, match="does not fit"):
            complete(ours, [request])


def test_stop_strings_the_context_and_greedy_decoding(ours: VllmGenerator, model: Any) -> None:
    local = LocalGenerator(model, character_tokenizer())
    plans = [
        requests(12, stop=["a", "b"], max_new_tokens=20),
        requests(4, min_new_tokens=8),
        requests(4, temperature=0.0),
        [Request(tuple([7] * 250), seed, Sampling(max_new_tokens=20), ENDS) for seed in range(4)],
    ]
    for plan in plans:
        assert_equal(complete(ours, plan), complete(local, plan))
    assert "context" in {made.finish_reason for made in complete(ours, plans[3])}


def test_requests_that_the_server_cannot_serve_are_refused(ours: VllmGenerator, vllm: Serving) -> None:
    with pytest.raises(UserError, match="returns no values"):
        ours.submit([Request((9,), 0, return_values=True)], 0)
    with pytest.raises(UserError, match=r"vLLM would sample at 0.01 instead of 0.005"):
        ours.submit(requests(1, temperature=0.005), 0)
    with pytest.raises(ValueError, match="requests for weights of version 3: the generator holds version 0"):
        ours.submit(requests(1), 3)
    ours._longest = 9
    with pytest.raises(UserError, match=r"need 10 tokens, but the server .* --max-model-len 10"):
        ours.submit(requests(1), 0)
    assert not vllm.bodies
    with pytest.raises(ValueError, match="nonsense: no such parameter: given"):
        ours.update_weights(1, [("nonsense", torch.zeros(1))])
    ours._longest = 256
    ours.submit(requests(1), 0)
    with pytest.raises(RuntimeError, match="requests are in flight"):
        ours.drop_cache()
