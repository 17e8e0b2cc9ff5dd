"""The files of a run's metrics and samples, byte by byte."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.errors import UserError
from burnish.report.metrics import (
    METRICS,
    Recorder,
    describe,
    duration,
    headline,
    is_timing,
    number,
    order,
    read_lines,
    read_metrics,
)


def test_a_line_has_the_step_first_and_shortest_digits(tmp_path: Path) -> None:
    Recorder(tmp_path / "runs" / "sft").metrics(3, {"loss": 0.1, "tokens": 40, "tensor": torch.tensor(0.5)})
    written = (tmp_path / "runs" / "sft" / "metrics.jsonl").read_bytes()
    assert written == b'{"step": 3, "loss": 0.1, "tokens": 40, "tensor": 0.5}\n'


def test_values_that_are_not_finite_are_strict_json_and_read_back(tmp_path: Path) -> None:
    Recorder(tmp_path).metrics(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": torch.tensor(math.nan)})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": "NaN"}\n'
    line = read_metrics(tmp_path)[0]
    assert math.isnan(line["a"]) and math.isnan(line["d"])
    assert (line["b"], line["c"]) == (math.inf, -math.inf)


def test_text_of_samples_is_kept_even_if_it_is_not_valid_unicode(tmp_path: Path) -> None:
    text = 'NaN "é" 世界 \u2028\x00\n\ud800'
    Recorder(tmp_path).samples([{"prompt": text, "rewards": {"a": math.nan}}])
    assert read_lines(tmp_path / "samples.jsonl") == [{"prompt": text, "rewards": {"a": "NaN"}}]
    assert "世界".encode() in (tmp_path / "samples.jsonl").read_bytes()


@given(st.lists(st.floats() | st.integers(-(10**9), 10**9), max_size=4))
def test_every_number_reads_back_as_itself(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    folder = tmp_path_factory.mktemp("run")
    Recorder(folder).metrics(1, {str(i): value for i, value in enumerate(values)})
    back = list(read_metrics(folder)[0].values())[1:]
    assert [repr(value) for value in back] == [repr(value) for value in values]


def test_resume_ends_with_the_bytes_of_an_uninterrupted_run(tmp_path: Path) -> None:
    def steps(recorder: Recorder, numbers: range) -> None:
        for step in numbers:
            recorder.metrics(step, {"loss": 1 / step})
            recorder.samples([{"step": step, "completion": "é" * step}] * 2)

    whole, cut = Recorder(tmp_path / "whole"), Recorder(tmp_path / "cut")
    steps(whole, range(1, 9))
    steps(cut, range(1, 5))
    offsets = cut.offsets()
    steps(cut, range(5, 7))
    with (tmp_path / "cut" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 7, "lo')  # killed in the middle of a line
    assert [line["step"] for line in read_metrics(tmp_path / "cut")] == [1, 2, 3, 4, 5, 6]
    resumed = Recorder(tmp_path / "cut")
    resumed.truncate(offsets)
    steps(resumed, range(5, 9))
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_offsets_are_sizes_in_bytes_and_no_offsets_remove_everything(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    assert recorder.offsets() == {"metrics.jsonl": 0, "samples.jsonl": 0}
    recorder.metrics(1, {})
    assert recorder.offsets() == {"metrics.jsonl": len('{"step": 1}\n'), "samples.jsonl": 0}
    recorder.truncate({})
    assert recorder.offsets() == {"metrics.jsonl": 0, "samples.jsonl": 0}


def test_a_file_shorter_than_its_offset_is_reported(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.metrics(1, {})
    with pytest.raises(UserError, match=r"metrics\.jsonl: 12 bytes, but .* when it had 13.*--fresh"):
        recorder.truncate({"metrics.jsonl": 13})
    assert read_metrics(tmp_path) == [{"step": 1}]


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "absent") == []


def test_timings_are_known_by_their_names() -> None:
    assert all(map(is_timing, ["seconds", "generation_seconds", "tokens_per_second", "eval_samples_per_second"]))
    assert not any(map(is_timing, ["loss", "tokens", "epoch"]))


def test_headline_metrics_differ_by_method() -> None:
    common = {"epoch": 1, "tokens": 5, "grad_norm": 1.0, "loss": 1.0, "learning_rate": 1e-4}
    assert headline({**common, "nll": 1.0}) == ["loss", "learning_rate"]
    assert headline({**common, "accuracy": 0.5}) == ["accuracy", "loss", "learning_rate"]
    assert headline({**common, "kl": 1.0, "score": 1.0, "value": 1.0}) == ["score", "kl", "value"]
    intervals = {"reward_a_low": 1.0, "reward_a_high": 3.0, "reward_a_change_low": 0.5, "reward_a_change_high": 1.5}
    assert headline({"score": 1.0, "reward_a": 2.0, **intervals}) == ["score", "reward_a"]
    assert headline({"eval_perplexity": 9.0, "eval_loss": 2.0, "epoch": 1}) == ["eval_loss", "eval_perplexity"]


def test_every_metric_has_a_name() -> None:
    assert describe("eval_kl") == METRICS["kl"]
    assert describe("reward_brevity").label == "Reward: brevity"
    assert describe("my/own_metric").label == "My own metric"
    assert sorted(["zzz", "kl", "eval_loss", "score"], key=order) == ["score", "eval_loss", "kl", "zzz"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (3, "3"), (12345, "12,345"), (1.23456, "1.235"), (12345.6, "12,346"), (5e-5, "5.0e-05"),
     (0.25, "0.2500"), (-12.3456, "-12.35"), (math.nan, "nan"), (-math.inf, "-inf"), (24.0, "24.00")],
)  # fmt: skip
def test_numbers_are_formatted_for_readers(value: float, text: str) -> None:
    assert number(value) == text


def test_shares_and_times_are_formatted_for_readers() -> None:
    assert number(0.7341, share=True) == "73.4 %"
    assert number(0.123456, digits=2) == "0.12"
    assert [duration(s) for s in (0.4, 42, 250, 3900, 3599.9)] == [
        "0 s",
        "42 s",
        "4 min 10 s",
        "1 h 05 min",
        "1 h 00 min",
    ]


def test_lines_are_strict_json(tmp_path: Path) -> None:
    Recorder(tmp_path).samples([{"rewards": {"a": [math.inf]}}])

    def reject(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    json.loads((tmp_path / "samples.jsonl").read_text(), parse_constant=reject)
