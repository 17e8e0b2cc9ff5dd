"""Streams: rows in order, without end, and a loader that resumes from any step with the same examples."""

from __future__ import annotations

import json
from typing import Any

import pytest

from burnish import PPO, SFT, UserError
from burnish.data import readers as rows
from burnish.data import streaming
from burnish.data.readers import Skipped
from burnish.data.streaming import RowStream, Source, StreamLoader
from burnish.types import Changed, Encoded, Example, Pair, Row, Sequence, Text


def source(name: str, size: int, weight: float | None = None, bad: tuple[int, ...] = ()) -> Source:
    def read():
        for i in range(size):
            place = f"{name}:{i + 1}"
            yield Skipped(place, "empty text", f"{place}: empty text") if i in bad else Text(name * (i + 1), place)

    return Source(name, read, weight)


def places(rows: list[Row]) -> list[str]:
    return [row.source for row in rows]


def test_sources_follow_one_another_and_start_again():
    stream = RowStream([source("a", 2), source("b", 1)])
    assert places(stream.take(2)[0]) == ["a:1", "a:2"]
    assert places(stream.take(5)[0]) == ["b:1", "a:1", "a:2", "b:1", "a:1"]


def test_rows_are_drawn_in_proportion_to_the_weights():
    stream = RowStream([source("a", 100, 2.0), source("b", 1, 1.0)])
    assert places(stream.take(6)[0]) == ["a:1", "b:1", "a:2", "a:3", "b:1", "a:4"]


@pytest.mark.parametrize("weight", [None, 1.5])
@pytest.mark.parametrize("stop", range(9))
def test_a_stream_resumes_from_any_row(stop: int, weight: float | None):
    def stream() -> RowStream:
        return RowStream([source("a", 3, weight, bad=(1,)), source("b", 2, weight)])

    straight = stream()
    straight.take(stop)
    state = json.loads(json.dumps(straight.state_dict()))
    again = stream()
    again.load_state_dict(state)
    assert again.take(7) == straight.take(7)


def test_skipped_rows_are_returned_in_every_pass():
    good, skipped = RowStream([source("a", 3, bad=(0,))]).take(4)
    assert places(good) == ["a:2", "a:3", "a:2", "a:3"]
    assert [s.source for s in skipped] == ["a:1", "a:1"]


@pytest.mark.parametrize("weight", [None, 1.0])
def test_a_source_without_rows_is_an_error(weight: float | None):
    with pytest.raises(UserError, match="a: no rows: every row was skipped, the first one because of a:1: empty text"):
        RowStream([source("a", 1, weight, bad=(0,))]).take(1)
    with pytest.raises(UserError, match="no rows"):
        RowStream([source("a", 0, weight), source("b", 0, weight)]).take(1)
    for others in ([source("a", 1, weight), source("b", 0, weight)], [source("b", 0, weight), source("a", 1, weight)]):
        with pytest.raises(UserError, match="b: no rows"):
            RowStream(others).take(2)


@pytest.mark.parametrize("weight", [None, 1.0])
def test_a_source_that_loses_its_rows_is_an_error(weight: float | None):
    sizes = iter([2, 0, 0])
    first = Source("a", lambda: iter([Text("a", "a:1")] * next(sizes)), weight)
    with pytest.raises(UserError, match="a: no rows"):
        RowStream([first]).take(3)


def test_a_file_is_read_only_as_far_as_needed(tmp_path):
    path = tmp_path / "big.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n{"text": 3}\n')
    stream = RowStream([Source("big", lambda: rows.read(str(path), (Text,)))])
    assert places(stream.take(2)[0]) == [f"{path}:1", f"{path}:2"]
    with pytest.raises(UserError, match=r"big.jsonl:3: text: not text"):
        stream.take(1)


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_a_stream_stops_if_one_of_its_files_changes(tmp_path, taken):
    """In the middle of a pass, at its end and in the next one, even if the new text is the same."""
    path = tmp_path / "big.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')

    def stream() -> RowStream:
        return RowStream([Source("big", lambda: rows.read(path, (Text,)), files=rows.Unchanged(path))])

    straight = stream()
    assert len(straight.take(5)[0]) == 5
    changed = stream()
    changed.take(taken)
    path.with_suffix(".new").write_bytes(path.read_bytes())
    path.with_suffix(".new").rename(path)
    with pytest.raises(UserError, match=r"big.jsonl changed while it was being read"):
        changed.take(1)


# --- steps ---------------------------------------------------------------------------------------------------------


def encode(rows: list[Row]) -> Encoded:
    """Rows of one letter give no example, and rows of three letters give two."""
    examples, changed = [], []
    for row in rows:
        assert isinstance(row, Text)
        pieces = {1: 0, 3: 2}.get(len(row.text), 1)
        if pieces != 1:
            changed.append(Changed(row.source, "drop: short" if pieces == 0 else "split: odd"))
        for piece in range(pieces):
            tokens = (len(row.text), piece)
            second = Sequence(tokens, (False, True), row.source, {"weight": (0.0, 0.5)})
            examples.append(Example((Sequence(tokens, (False, False), row.source), second), (Pair(1, 0, margin=0.5),)))
    return Encoded(examples, changed)


def loader(steps: int = 12, size: int = 5, buffer: int = 4) -> StreamLoader:
    return StreamLoader(RowStream([source("a", size, bad=(1,))], buffer), encode, 3, 0, steps)


def test_every_pass_has_every_example_once_and_none_is_lost_between_buffers():
    steps = list(loader(steps=10, size=5, buffer=3))
    assert len(steps) == 10 and all(len(step) == 3 for step in steps)
    order = [example.source for step in steps for example in step]
    once = {"a:3": 2, "a:4": 1, "a:5": 1}
    # a row waits for at most one buffer, so after six passes of four examples it has come at least five times
    assert all(5 * times <= order.count(place) <= 9 * times for place, times in once.items())
    assert "a:1" not in order and "a:2" not in order


def test_every_buffer_is_shuffled_differently():
    def alone(rows: list[Row]) -> Encoded:
        return Encoded([Example((Sequence((1, 2), (False, True), row.source),)) for row in rows], [])

    first, second = StreamLoader(RowStream([source("a", 8)], 8), alone, 8, 0, 2)
    orders = [[example.source for example in step] for step in (first, second)]
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]


@pytest.mark.parametrize("buffer", [1, 4, 50])
@pytest.mark.parametrize("stop", range(13))
def test_a_loader_resumes_from_any_step(stop: int, buffer: int):
    expected = list(loader(buffer=buffer)) if buffer > 1 else None
    if buffer == 1:  # a buffer of one row that makes no example
        with pytest.raises(UserError, match="all 1 rows were dropped, the first one because of a:1: drop: short"):
            list(loader(buffer=1))
        return
    assert expected is not None
    straight = loader(buffer=buffer)
    iterator = iter(straight)
    assert [next(iterator) for _ in range(stop)] == expected[:stop]
    state = straight.state_dict()
    again = loader(buffer=buffer)
    again.load_state_dict(state)
    assert list(again) == expected[stop:]
    list(iterator)
    assert again.counts() == straight.counts()


def test_rows_are_counted_and_named_once(monkeypatch):
    monkeypatch.setattr(streaming, "MAX_NAMED", 2)
    made = loader(steps=4, size=5, buffer=8)  # two passes of four good rows, ten examples, three steps; again
    list(made)
    assert made.counts() == {
        "rows": 12,
        "skipped": ["a:2: empty text", "a:2: empty text"],
        "dropped": ["a:1: short", "a:1: short"],
        "shortened": ["a:3: split: odd", "a:3: split: odd"],
        "skipped in all": 4,
        "dropped in all": 4,
        "shortened in all": 4,
    }


def test_a_stream_needs_max_steps_and_a_method_that_can_stream():
    streaming.check(SFT(), 5)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"set trainer\.max_steps"):
        streaming.check(SFT(), -1)  # type: ignore[arg-type]
    ppo: Any = PPO(lambda answers: [0.0] * len(answers))
    with pytest.raises(UserError, match="method 'ppo' needs all of its rows at once"):
        streaming.check(ppo, 5)
