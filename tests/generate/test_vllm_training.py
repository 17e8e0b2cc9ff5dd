"""Training on completions of a vLLM server gives the same in one process and in two, and stops with one message."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import character_tokenizer, llama
from burnish.generate import vllm as module
from burnish.generate import vllm_server
from fake_vllm import Serving, serving
from generate import vllm_job as job

UPDATES = 2


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Serving]]:
    """A server for each case: one that dies in its second update, and two whose answers are wrong."""
    monkeypatch.setattr(module, "PAUSE", 0.05)
    monkeypatch.setattr(vllm_server, "FIRST_PAUSE", 0.02)
    with ExitStack() as stack:
        served = {name: stack.enter_context(serving(llama(), character_tokenizer())) for name in job.CASES}
        served["dies"].dies_at = "/update_weights", 1
        served["other tokens"].change = after_the_check(lambda choice: choice.update(prompt_token_ids=[9, 11]))
        served["drifts"].change = after_the_check(drifting())
        yield served


def after_the_check(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """Changes answers, but not those to the check at the beginning, whose prompt is one token."""
    return lambda answer: change(answer["choices"][0]) if len(answer["choices"][0]["prompt_token_ids"]) > 1 else None


def drifting() -> Callable[[dict[str, Any]], None]:
    """Lowers log-probabilities, by more with each completion."""
    answers = itertools.count()

    def change(choice: dict[str, Any]) -> None:
        error = 0.004 * next(answers)
        choice["logprobs"]["token_logprobs"] = [value - error for value in choice["logprobs"]["token_logprobs"]]

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


def test_a_server_whose_answers_are_wrong_stops_the_run(servers: dict[str, Serving], tmp_path: Path) -> None:
    for case in ("other tokens", "drifts"):
        check_errors(case, job.attempt(tmp_path / case, servers[case].url))
    assert (tmp_path / "drifts" / "checkpoint-1").exists()


@pytest.mark.slow
def test_a_server_that_dies_in_an_update_changes_nothing_in_one_process(
    servers: dict[str, Serving], tmp_path: Path
) -> None:
    whole, died = (job.train(tmp_path / case, servers[case].url) for case in ("tensors", "dies"))
    assert whole["sent"] == [{"requests": 1 + 3 * 7, "weights": UPDATES}] and len(whole["scores"]) == UPDATES
    assert servers["dies"].lives == 2
    assert all(torch.equal(weight, died["weights"][name]) for name, weight in whole["weights"].items())


@pytest.mark.acceptance
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # caused by peft
def test_two_processes_sample_and_learn_what_one_does(servers: dict[str, Serving], tmp_path: Path) -> None:
    with serving(llama(), character_tokenizer()) as tensors, serving(llama(), character_tokenizer()) as files:
        one = {
            "tensors": job.train(tmp_path / "one", tensors.url),
            "adapter": job.train(tmp_path / "one adapter", files.url, adapter=True),
        }
        expected = {"tensors": asked(tensors), "adapter": asked(files)}
    urls = [f"{name}={server.url}" for name, server in servers.items()]
    tests = Path(__file__).parents[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(tests), *sys.path])}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(job.__file__),
    ]
    done = subprocess.run([*command, tmp_path, *urls], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = torch.load(tmp_path / "results.pt")
    for case, same in (("tensors", "tensors"), ("sharded", "tensors"), ("adapter", "adapter")):
        two = results[case]
        assert asked(servers[case]) == expected[same]
        first, second = two["sent"]
        # the check of log-probabilities, and batches of four and of three prompts: the first process has one more
        assert (first["requests"], second["requests"]) == (1 + 3 * 4, 1 + 3 * 3)
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
