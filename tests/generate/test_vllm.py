"""The generator on a vLLM server, against a stand-in for the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

from builders import byte_tokenizer, character_tokenizer, llama
from burnish.errors import UserError
from burnish.generate import vllm as module
from burnish.generate import vllm_server
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Completion, Request, complete
from burnish.generate.sampling import Sampling
from burnish.generate.vllm import VllmGenerator
from burnish.generate.vllm_completion import AnswerError
from burnish.models import adapters
from fake_vllm import NAME, GlooBroadcast, Serving, refused, serving

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
def test_an_adapter_goes_as_files(tmp_path: Path) -> None:
    base = llama()
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model: Any = peft.get_peft_model(llama(), lora).eval()
    tokenizer = character_tokenizer()
    with serving(base, tokenizer) as vllm:
        vllm.without = {"/v1/load_lora_adapter"}
        needed = "start it with --enable-lora and with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        with closing(generator(model, vllm.url)) as ours, pytest.raises(UserError, match=needed):
            complete(ours, requests(1))
        vllm.without = set()
        vllm.calls.clear()
        ours = generator(model, vllm.url, folder=str(tmp_path / "adapters"))
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
        assert len(list((tmp_path / "adapters").iterdir())) == 1
        # a server that dies while it samples loads the adapter again
        vllm.dies_at = "/v1/completions", 1
        assert_equal(complete(ours, requests(), 4), complete(local, requests(), 4))
        assert vllm.lives == 2
        # an adapter's folder
        adapters.save(model, tmp_path / "saved")
        ours.update_weights(5, tmp_path / "saved")
        local.update_weights(5, ())
        assert_equal(complete(ours, requests(), 5), complete(local, requests(), 5))
        ours.close()
        assert not vllm.vllm.adapters and not list((tmp_path / "adapters").iterdir())
        assert (tmp_path / "saved").exists()
        assert vllm.calls == [
            "/v1/models",
            "/tokenize",
            "/is_paused",
            "/v1/load_lora_adapter",
            *["/v1/unload_lora_adapter", "/v1/load_lora_adapter"] * 3,
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
        assert vllm.calls[3:] == [*init, *update, *update, "/shutdown_weight_transfer_engine"]


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
    monkeypatch.setattr(vllm_server, "FIRST_PAUSE", 0.02)
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
    plan = [Request((9, 10), seed, Sampling(temperature=0.5, top_k=7, top_p=0.9), ENDS) for seed in range(5)]
    for _ in range(2):
        complete(ours, plan)
    first, again = (sorted(bodies, key=lambda body: body["seed"]) for bodies in (vllm.bodies[:5], vllm.bodies[5:]))
    assert first == again
    assert [body["seed"] for body in first] == list(range(5))
    kept = ("model", "prompt", "max_tokens", "temperature", "top_k", "top_p", "stop_token_ids", "ignore_eos")
    assert [first[0][key] for key in kept] == [NAME, [9, 10], 64, 0.5, 7, 0.9, [2, 30, 41], True]
    assert first[0]["logit_bias"] == {"0": -100.0}


def test_only_some_requests_are_in_flight_and_results_arrive_in_parts(ours: VllmGenerator, vllm: Serving) -> None:
    flying, most, lock = 0, 0, threading.Lock()
    together, released = threading.Barrier(4), threading.Event()
    sample = vllm.vllm._sample

    def counted(*what: Any) -> Any:
        nonlocal flying, most
        with lock:
            flying += 1
            most = max(most, flying)
        released.wait(60)
        together.wait(60)
        with lock:
            flying -= 1
        return sample(*what)

    vllm.vllm._sample = counted  # type: ignore[method-assign]
    handles = ours.submit(requests(12), 0)
    assert ours.poll(0) == []
    released.set()
    done: dict[int, Completion] = {}
    polls = 0
    while len(done) < len(handles):
        done.update(ours.poll(None))
        polls += 1
    assert sorted(done) == handles and polls > 1 and ours.poll(None) == []
    assert most == ours.slots == 4


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("/start_weight_update", marks=pytest.mark.slow),
        "/update_weights",
        pytest.param("/finish_weight_update", marks=pytest.mark.slow),
        "/v1/completions",
    ],
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


@pytest.mark.slow
def test_a_server_that_dies_for_good_stops_the_run(model: Any, vllm: Serving) -> None:
    ours = generator(model, vllm.url, wait=0.3)
    vllm.dies_at, vllm.comes_back = ("/update_weights", 0), False
    with pytest.raises(UserError, match=rf"{vllm.url} has not answered for 0.3 s .*start the vLLM server and run"):
        ours.update_weights(0, model.named_parameters())
    ours.close()


@pytest.mark.slow
def test_a_server_that_always_fails_stops_the_run(ours: VllmGenerator, vllm: Serving) -> None:
    vllm.vllm._sample = lambda *what: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(UserError, match=rf"{vllm.url}: the vLLM server has failed .3 attempts., last with: /v1/compl"):
        complete(ours, requests(1))
    assert ours.poll(None) == []


@pytest.mark.slow
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


def test_a_server_that_completes_other_tokens_stops_the_run(ours: VllmGenerator, vllm: Serving) -> None:
    vllm.change = lambda answer: answer["choices"][0].update(prompt_token_ids=[9, 11])
    with pytest.raises(AnswerError, match=rf"{vllm.url}: .* expected a completion of the tokens \[9, 10\], got one of"):
        complete(ours, requests(1))


def test_stop_strings_the_context_and_greedy_decoding(ours: VllmGenerator, model: Any) -> None:
    local = LocalGenerator(model, character_tokenizer())
    plans = [
        requests(6, stop=["a", "b", "c", "d"], max_new_tokens=16),
        requests(3, min_new_tokens=8),
        requests(2, temperature=0.0),
        [Request(tuple([7] * 250), seed, Sampling(max_new_tokens=20), ENDS) for seed in range(2)],
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"raw": True}, "reports log-probabilities from before .* --logprobs-mode processed_logprobs"),
        ({"model": llama(vocab_size=90)}, "Token id 104 is out of vocabulary"),
        ({"tokenizer": byte_tokenizer()}, "serves served/model, whose tokenizer is not the model's: it makes"),
    ],
)
def test_a_server_that_does_not_suit_the_model_is_refused(model: Any, settings: dict[str, Any], message: str) -> None:
    settings = {"model": llama(), "tokenizer": character_tokenizer()} | settings
    with serving(**settings) as vllm, pytest.raises(UserError, match=message):
        generator(model, vllm.url)


def test_what_the_server_has_to_offer(vllm: Serving, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm.version = "0.32.1"
    with pytest.raises(UserError, match=r"runs vLLM 0.32.1: expected at least 0.33"):
        generator(model, vllm.url)
    vllm.version, vllm.without = "0.34.0rc1", {"/start_weight_update"}
    needed = "start the server with VLLM_SERVER_DEV_MODE=1 and with --weight-transfer-config"
    with closing(generator(model, vllm.url)) as ours, pytest.raises(UserError, match=needed):
        complete(ours, requests(1))
    assert vllm.vllm.paused  # as after any update that ends early
    vllm.without = {"/v1/models"}
    with pytest.raises(UserError, match=r"/v1/models: status 404: .*: expected the address of a vLLM server"):
        generator(model, vllm.url)
    vllm.without, vllm.key = set(), "sk-secret"
    with pytest.raises(UserError, match=r"status 401: .*set generator.key to the NAME of the variable with the server"):
        generator(model, vllm.url)
    with pytest.raises(UserError, match=r"generator.key: the environment variable VLLM_KEY is not set"):
        generator(model, vllm.url, key="VLLM_KEY")
    monkeypatch.setenv("VLLM_KEY", "sk-secret")
    generator(model, vllm.url, key="VLLM_KEY").close()
    assert not vllm.vllm.paused
    vllm.stop()
    began = time.monotonic()
    with pytest.raises(UserError, match=r"has not answered for 0.2 s .*generator.wait"):
        generator(model, vllm.url, wait=0.2)
    assert time.monotonic() - began < 3


def test_without_a_gpu_full_weights_are_refused(vllm: Serving, model: Any) -> None:
    ours = VllmGenerator(model, character_tokenizer(), url=vllm.url)
    with pytest.raises(UserError, match=r"needs a CUDA GPU for the trainer.*: train an adapter"):
        ours.submit(requests(1), 0)
    ours.close()


def test_a_key_that_the_server_repeats_is_not_shown(vllm: Serving, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KEY", "sk-secret")
    monkeypatch.setattr(vllm.vllm, "tokenize", lambda request: refuse(f"no: {request.headers['authorization']}"))

    async def refuse(message: str) -> Any:
        return refused(400, message)

    with pytest.raises(UserError, match=r"no: Bearer \*\*\*"):
        generator(model, vllm.url, key="VLLM_KEY")


JOB = """
import json, sys
import torch.distributed as dist
from generate.test_vllm import GlooBroadcast, UserError, VllmGenerator, character_tokenizer, complete, llama, requests
dist.init_process_group("gloo")
rank, model = dist.get_rank(), llama(seed=1)
ours = VllmGenerator(model, character_tokenizer(), url=sys.argv[1], group=GlooBroadcast)
ours.update_weights(0, model.named_parameters())
found = {i: made.tokens.tolist() for i, made in zip(range(6)[rank::2], complete(ours, requests()[rank::2]))}
parts = [None, None]
dist.all_gather_object(parts, found)
try:
    ours.update_weights(1, [("lm_head.weight", model.lm_head.weight * float("nan"))] if rank == 0 else ())
    complete(ours, requests(1), 1)
    error = None
except UserError as caught:
    error = str(caught)
errors = [None, None]
dist.all_gather_object(errors, error)
ours.close()
if rank == 0:
    json.dump([parts, errors], open(sys.argv[2], "w"))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_share_a_server(vllm: Serving, expected: list[Completion], tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    tests = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), *sys.path])}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    job = [*command, str(tmp_path / "job.py"), vllm.url, str(tmp_path / "out.json")]
    vllm.dies_at = "/start_weight_update", 1
    done = subprocess.run(job, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    parts, errors = json.loads((tmp_path / "out.json").read_text())
    found = {int(index): tokens for part in parts for index, tokens in part.items()}
    assert [found[index] for index in range(6)] == [made.tokens.tolist() for made in expected]
    assert vllm.calls.count("/update_weights") == 1
    assert errors[0] == errors[1] and "the vLLM server has failed (1 attempts)" in errors[0]
