"""Which jobs share a call, and what becomes of those that fail or are canceled."""

from __future__ import annotations

import threading
import time

import pytest

from burnish.serving.worker import AT_ONCE, Worker


def doubled(calls: list[list[int]]):
    def function(items: list[int]) -> list[int]:
        calls.append(items)
        if 13 in items:
            raise ValueError("13")
        return [2 * item for item in items]

    return function


def answered(*jobs: tuple[list[int], bool]) -> tuple[list[list[int]], list[object]]:
    """The calls of a worker for which these jobs waited, and their results or exceptions."""
    calls: list[list[int]] = []
    worker = Worker(doubled(calls))
    results = [worker.submit(items, joined) for items, joined in jobs]
    worker.stop()
    worker.run()
    return calls, [result.exception() or result.result() for result in results]


def test_waiting_jobs_share_a_call_in_their_order() -> None:
    calls, results = answered(([1, 2], True), ([3], True), ([4, 5], True))
    assert calls == [[1, 2, 3, 4, 5]]
    assert results == [[2, 4], [6], [8, 10]]


def test_a_job_that_is_not_joined_has_a_call_of_its_own() -> None:
    calls, results = answered(([1], True), ([2], False), ([3], True), ([4], True))
    assert calls == [[1], [2], [3, 4]]
    assert results == [[2], [4], [6], [8]]


def test_a_shared_call_has_a_limit() -> None:
    half = list(range(20, 20 + AT_ONCE // 2))
    calls, _ = answered((half, True), (half, True), ([1], True))
    assert [len(call) for call in calls] == [AT_ONCE, 1]


def test_a_job_fails_only_by_its_own_fault() -> None:
    calls, (first, second, third) = answered(([1], True), ([13], True), ([3], True))
    assert calls == [[1, 13, 3], [1], [13], [3]]
    assert (first, third) == ([2], [6]) and str(second) == "13"


def test_a_wrong_number_of_results_is_an_error() -> None:
    worker = Worker[int, int](lambda items: items[:1])
    result = worker.submit([1, 2])
    worker.stop()
    worker.run()
    assert "got 1 results for 2 items" in str(result.exception())


def test_a_canceled_job_is_not_computed() -> None:
    calls: list[list[int]] = []
    worker = Worker(doubled(calls))
    first, second, third = (worker.submit([i], True) for i in (1, 2, 3))
    assert second.cancel()
    worker.stop()
    worker.run()
    assert calls == [[1, 3]] and (first.result(), third.result()) == ([2], [6])


@pytest.mark.parametrize("joined", [True, False])
def test_jobs_that_arrive_later_are_answered_until_it_stops(joined: bool) -> None:
    worker = Worker(doubled([]))
    thread = threading.Thread(target=worker.run)
    thread.start()
    for i in range(5):
        assert worker.submit([i], joined).result(5) == [2 * i]
    time.sleep(0.01)
    assert thread.is_alive()
    last = worker.submit([7], joined)
    worker.stop()
    thread.join(5)
    assert not thread.is_alive() and last.result() == [14]


def test_jobs_that_come_too_late_are_canceled() -> None:
    worker = Worker(doubled([]))
    worker.stop()
    first = worker.submit([1])
    worker.run()
    assert first.cancelled() and worker.submit([2]).cancelled()


def test_jobs_are_canceled_if_the_worker_is_interrupted() -> None:
    def interrupted(items: list[int]) -> list[int]:
        raise KeyboardInterrupt

    worker = Worker[int, int](interrupted)
    _, second = worker.submit([1]), worker.submit([2])
    with pytest.raises(KeyboardInterrupt):
        worker.run()
    assert second.cancelled()
