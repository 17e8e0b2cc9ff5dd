"""Training on completions of a vLLM server gives the same in one process and in two, and stops with one message."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import character_tokenizer, llama
from burnish.generate import vllm as module
from fake_vllm import Serving, serving
from generate import vllm_job as job

UPDATES = 4


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Serving]]:
    """A server for each case: one that dies in its second update, and two whose answers are wrong."""
    monkeypatch.setattr(module, "PAUSE", 0.05)
    with ExitStack() as stack:
        served = {name: stack.enter_context(serving(llama(), character_tokenizer())) for name in job.CASES}
        served["dies"].dies_at = "/update_weights", 1
        served["other tokens"].change = lambda answer: answer["choices"][0].update(prompt_token_ids=[9, 11])
        served["drifts"].change = drifting()
        yield served


def drifting() -> Any:
    """Changes log-probabilities, by more with each completion."""
    answers = 0

    def change(answer: dict[str, Any]) -> None:
        nonlocal answers
        answers += 1
        shown = answer["choices"][0]["logprobs"]
        shown["token_logprobs"] = [value - 0.004 * answers for value in shown["token_logprobs"]]

    return change


def asked(server: Serving) -> list[tuple[int, list[int]]]:
    """The seed and the prompt of each request, without the check of log-probabilities at the beginning."""
    return sorted((body["seed"], body["prompt"]) for body in server.bodies if body["max_tokens"] > 1)


def check_errors(case: str, results: dict[str, Any]) -> None:
    messages = {
        "other tokens": "AnswerError: .* expected a completion of the tokens .*, got one of",
        "drifts": "RuntimeError: the log-probabilities of sampler and trainer differ by",
    }
    for error in results["errors"]:
        assert re.match(messages[case], error), error


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # caused by peft
def test_one_process(servers: dict[str, Serving], tmp_path: Path) -> None:
    whole = job.train(tmp_path / "tensors", servers["tensors"].url)
    assert whole["sent"] == [{"requests": 1 + 2 * 3 * 7, "weights": UPDATES}] and len(whole["scores"]) == UPDATES
    died = job.train(tmp_path / "dies", servers["dies"].url)
    assert servers["dies"].lives == 2
    assert all(torch.equal(weight, died["weights"][name]) for name, weight in whole["weights"].items())
    for case in ("other tokens", "drifts"):
        check_errors(case, job.attempt(tmp_path / case, servers[case].url))
    assert (tmp_path / "drifts" / "checkpoint-1").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_two_processes(servers: dict[str, Serving], tmp_path: Path) -> None:
    with serving(llama(), character_tokenizer()) as tensors, serving(llama(), character_tokenizer()) as files:
        one = {
            "tensors": job.train(tmp_path / "one", tensors.url),
            "adapter": job.train(tmp_path / "one adapter", files.url, adapter=True),
        }
        expected = {"tensors": asked(tensors), "adapter": asked(files)}
    urls = [f"{name}={server.url}" for name, server in servers.items()]
    tests = Path(__file__).parents[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(tests), *sys.path])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", job.__file__]
    done = subprocess.run([*command, tmp_path, *urls], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = torch.load(tmp_path / "results.pt")
    for case, same in (("tensors", "tensors"), ("sharded", "tensors"), ("adapter", "adapter")):
        two = results[case]
        assert asked(servers[case]) == expected[same]
        first, second = two["sent"]
        # the check of log-probabilities, and batches of four and of three prompts: the first process has one more
        assert (first["requests"], second["requests"]) == (1 + 2 * 3 * 4, 1 + 2 * 3 * 3)
        assert (first["weights"], second["weights"]) == (UPDATES if case != "adapter" else 0, 0)
        assert two["scores"] == pytest.approx(one[same]["scores"], abs=1e-9)
        for name, weight in one[same]["weights"].items():
            torch.testing.assert_close(two["weights"][name], weight, atol=1e-5, rtol=1e-5, msg=f"{case}: {name}")
    assert servers["adapter"].calls.count("/v1/load_lora_adapter") == UPDATES
    first, second = results["dies"]["errors"]
    assert first == second and "the vLLM server has failed (1 attempts)" in first
    for name, weight in results["tensors"]["weights"].items():
        assert torch.equal(results["resumed"]["weights"][name], weight)
    for case in ("other tokens", "drifts"):
        check_errors(case, results[case])
