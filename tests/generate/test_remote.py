"""Requests are split over workers by a fixed plan, and a worker that dies changes nothing. The workers are threads."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.errors import UserError
from burnish.generate import remote
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Completion, Request, complete
from burnish.generate.remote import LostWorkerError, RemoteGenerator, serve, shares
from burnish.generate.sampling import Sampling
from generating import PAD, llama, plain, requests


class Thread:
    """A worker that dies when it is sent message number ``unsent``, or when its answer number ``unread`` is read."""

    def __init__(self, unsent: int | None = None, unread: int | None = None) -> None:
        self.unsent, self.unread, self.ended = unsent, unread, False
        self.messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.sent = self.read = 0
        model = llama()  # not in the thread: the seed is that of the whole process
        given = Inbox(self.messages), self.answers, lambda: (model, PAD, None), 4
        threading.Thread(target=serve, args=given, daemon=True).start()

    def send(self, messages: Any) -> None:
        for message in messages:
            if self.sent == self.unsent:
                raise LostWorkerError("killed while it listened")
            self.sent += 1
            self.messages.put(message)

    def receive(self) -> Any:
        answer = self.answers.get(timeout=30)
        if self.read == self.unread:
            raise LostWorkerError("killed while it spoke")
        self.read += 1
        return answer

    def end(self) -> None:
        self.ended = True
        self.messages.put(None)


class Inbox:
    def __init__(self, messages: queue.SimpleQueue[Any]) -> None:
        self.messages = messages

    def waiting(self) -> bool:
        return not self.messages.empty()

    def receive(self) -> Any:
        message = self.messages.get()
        if message is None:
            raise EOFError
        return message


class Threads:
    """Starts workers. ``deaths`` says how the first ones of each place die."""

    def __init__(self, deaths: dict[int, list[dict[str, int]]] | None = None) -> None:
        self.deaths = deaths or {}
        self.started: list[tuple[int, Thread]] = []
        self.closed = False

    def start(self, index: int) -> Thread:
        planned = self.deaths.get(index, [])
        worker = Thread(**(planned.pop(0) if planned else {}))
        self.started.append((index, worker))
        return worker

    def wait(self, workers: list[Thread], timeout: float | None) -> list[Thread]:
        end = time.monotonic() + (30 if timeout is None else timeout)
        while True:
            ready = [worker for worker in workers if not worker.answers.empty()]
            if ready or time.monotonic() >= end:
                return ready
            time.sleep(0.002)

    def keep(self, value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else value

    def close(self) -> None:
        self.closed = True


def made(workers: int, deaths: dict[int, list[dict[str, int]]] | None = None) -> tuple[RemoteGenerator, Threads]:
    place = Threads(deaths)
    return RemoteGenerator(llama(), PAD, None, 4, place, workers), place


@given(st.integers(0, 50), st.integers(1, 9))
def test_the_shares_are_equal_and_keep_the_order(requests: int, workers: int) -> None:
    parts = shares(requests, workers)
    assert [i for part in parts for i in part] == list(range(requests))
    assert len(parts) == workers and max(map(len, parts)) - min(map(len, parts)) <= 1


def test_one_worker_gives_the_bytes_of_local_and_several_give_the_same_each_time() -> None:
    wanted = requests(10)
    local = complete(LocalGenerator(llama(), PAD, slots=4), wanted)
    assert len({c.finish_reason for c in local}) == 2
    one, _ = made(1)
    assert plain(complete(one, wanted)) == plain(local)
    three, place = made(3)
    first = complete(three, wanted)
    assert {index for index, _ in place.started} == {0, 1, 2}
    assert plain(complete(three, wanted)) == plain(first)
    for ours, expected in zip(first, local, strict=True):
        assert ours.tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(ours.logprobs, expected.logprobs, atol=1e-5)
    one.close()
    three.close()
    assert place.closed and all(worker.ended for _, worker in place.started)


@pytest.mark.parametrize("death", [{"unsent": 0}, {"unsent": 4}, {"unread": 0}, {"unread": 1}, {"unread": 2}])
def test_a_worker_that_dies_is_replaced_and_nothing_changes(death: dict[str, int]) -> None:
    wanted, other = requests(8), llama(seed=1)
    expected, changed = [], []
    for deaths in (None, {1: [death, {"unsent": 2}]}):
        generator, place = made(2, deaths)
        changed.append(plain(complete(generator, wanted)))
        generator.update_weights(1, other.named_parameters())
        handles = generator.submit(wanted, 1)
        done: dict[int, Completion] = {}
        while len(done) < len(handles):
            arrived = dict(generator.poll(None))
            assert not arrived.keys() & done.keys()
            done |= arrived
        assert {c.version for c in done.values()} == {1}
        expected.append(plain([done[handle] for handle in handles]))
        generator.drop_cache()
        assert generator.poll(None) == []
        assert [index for index, _ in place.started].count(0) == 1
        generator.close()
    assert expected[0] == expected[1] and changed[0] == changed[1]
    assert expected[0] != changed[0]
    assert len(place.started) == 4


def test_workers_that_die_without_progress_are_an_error() -> None:
    generator, _ = made(2, {1: [{"unread": 0}] * remote.ATTEMPTS})
    with pytest.raises(RuntimeError, match="3 workers of the generator died in a row, the last one: killed while it s"):
        complete(generator, requests(4))
    assert len(complete(generator, requests(4))) == 4  # it can be used again


def test_progress_of_a_worker_forgives_its_deaths() -> None:
    settings = Sampling(max_new_tokens=1)
    one_by_one = [Request((9, 10), i, settings) for i in range(40)]
    deaths = [{"unread": 1}] * remote.ATTEMPTS  # each gives one answer before
    generator, place = made(1, {0: deaths})
    assert plain(complete(generator, one_by_one)) == plain(complete(LocalGenerator(llama(), PAD, slots=4), one_by_one))
    assert len(place.started) == 1 + remote.ATTEMPTS


def test_errors_of_a_worker_are_raised_and_it_is_replaced() -> None:
    generator, place = made(2)
    broken = dict(llama().named_parameters())["lm_head.weight"].detach().clone()
    broken[3] = torch.nan
    generator.update_weights(1, [("lm_head.weight", broken)])
    with pytest.raises(UserError, match=r"logits are not numbers \(NaN\)"):
        complete(generator, requests(4), 1)
    assert all(worker.ended for _, worker in place.started)
    with pytest.raises(RuntimeError, match="LlamaForCausalLM: nonsense: no such parameter"):
        generator.update_weights(2, [("nonsense", broken)])
    with pytest.raises(ValueError, match="requests for weights of version 1: the generator holds version 2"):
        generator.submit(requests(1), 1)
    with pytest.raises(UserError, match="the prompt is empty"):
        generator.submit([Request((), 0)], 2)


def test_requests_in_flight_keep_the_weights_as_they_are() -> None:
    generator, _ = made(1)
    generator.submit(requests(2), 0)
    for change in (generator.drop_cache, lambda: generator.update_weights(1, ())):
        with pytest.raises(RuntimeError, match="requests are in flight"):
            change()
    generator.close()


def test_polling_does_not_wait_longer_than_asked() -> None:
    generator, _ = made(1)
    generator.submit(requests(2), 0)
    generator._place.wait = lambda workers, timeout: []  # type: ignore[method-assign]
    began = time.monotonic()
    assert generator.poll(0) == [] and generator.poll(0.05) == []
    assert time.monotonic() - began < 5
    generator.close()
