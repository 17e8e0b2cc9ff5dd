"""Requests and answers of vLLM's route for completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from burnish.generate.protocol import Completion, Request
from burnish.generate.sampling import Sampling
from burnish.generate.vllm_completion import AnswerError, LostError, Sizes, body, read, room
from burnish.generate.vllm_weights import Target

SIZES = Sizes(vocabulary=50, context=8, pad=0)
TARGET = Target("served", "run-1")


class Letters:
    """A tokenizer that writes token i as the letter i."""

    def batch_decode(self, rows: Any, **options: Any) -> list[str]:
        return ["".join(chr(97 + token % 26) for token in row) for row in rows]


def request(prompt: tuple[int, ...] = (9, 8), **sampling: Any) -> Request:
    return Request(prompt, 5, Sampling(**({"max_new_tokens": 3} | sampling)), frozenset({2}))


def answer(tokens: list[int], reason: str, stopped_by: int | str | None = None, **changes: Any) -> dict[str, Any]:
    choice = {
        "token_ids": tokens,
        "prompt_token_ids": [9, 8],
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in tokens],
            "token_logprobs": [-0.5 * (place + 1) for place in range(len(tokens))],
        },
        "finish_reason": reason,
        "stop_reason": stopped_by,
        "weight_versions": [{"version": "run-1", "start": 0, "end": len(tokens)}],
    }
    return {"model": "served", "choices": [choice | changes]}


def completed(answered: Any, asked: Request | None = None) -> Completion:
    return read(answered, asked or request(), TARGET, SIZES, Letters(), 7)


def test_the_room_of_a_completion() -> None:
    assert room(request(), 8) == 3 and room(request(), 4) == 2 and room(request(), None) == 3
    drawn = [room(Request((9,), seed, Sampling(length_range=[2, 5])), None) for seed in range(30)]
    assert set(drawn) == {2, 3, 4}


def test_a_request_leaves_nothing_to_the_server() -> None:
    asked = request(min_new_tokens=2, stop=["ab"])
    assert body(asked, TARGET, SIZES) == {
        "model": "served",
        "prompt": [9, 8],
        "max_tokens": 3,
        "min_tokens": 2,
        "seed": 5,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {"0": -100.0},
        "stop": ["ab"],
        "stop_token_ids": [2],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "return_weight_versions": True,
    }
    full = body(request((9,) * 7, min_new_tokens=2), TARGET, SIZES)
    assert (full["max_tokens"], full["min_tokens"]) == (1, 1)  # the context window is nearly full
    # a pad id that ends completions can be sampled
    assert body(request(), TARGET, SIZES._replace(pad=2))["logit_bias"] == {}
    assert body(request(), TARGET, SIZES._replace(pad=None))["logit_bias"] == {}


@pytest.mark.parametrize(
    ("tokens", "reason", "stopped_by", "sampling", "expected"),
    [
        ([4, 2], "stop", 2, {}, ([4, 2], "stop")),
        ([4, 5, 6], "length", None, {}, ([4, 5, 6], "length")),
        ([4, 5, 2], "stop", 2, {}, ([4, 5, 2], "stop")),
        ([4, 5, 6, 7, 8, 9], "length", None, {"max_new_tokens": 10}, ([4, 5, 6, 7, 8, 9], "context")),
        # token 27 writes "b": the completion ends with it, whether or not the server has stopped there
        ([4, 27], "stop", "b", {"stop": ["b"]}, ([4, 27], "stop")),
        ([4, 27, 6], "length", None, {"stop": ["b"]}, ([4, 27], "stop")),
        ([27, 4, 27], "length", None, {"stop": ["b"], "min_new_tokens": 3}, ([27, 4, 27], "stop")),
        # a text that only the server can see in the tokens
        ([4, 5], "stop", "é", {"stop": ["é"]}, ([4, 5], "stop")),
    ],
)
def test_completions(tokens: Any, reason: str, stopped_by: Any, sampling: Any, expected: Any) -> None:
    made = completed(answer(tokens, reason, stopped_by), request(**sampling))
    assert (made.tokens.tolist(), made.finish_reason) == expected
    assert made.logprobs.tolist() == [-0.5, -1.0, -1.5, -2.0, -2.5, -3.0][: len(expected[0])]
    assert (made.version, made.values, made.final_value) == (7, None, None)


def test_greedy_decoding_has_log_probability_0() -> None:
    assert completed(answer([4, 2], "stop", 2), request(temperature=0.0)).logprobs.tolist() == [0, 0]


def logprobs(values: Callable[[list[Any]], list[Any]]) -> dict[str, Any]:
    made = answer([4, 5, 2], "stop", 2)
    shown = made["choices"][0]["logprobs"]
    shown["token_logprobs"] = values(shown["token_logprobs"])
    return made


@pytest.mark.parametrize(
    ("answered", "message"),
    [
        (answer([4, 2], "stop", 2, prompt_token_ids=[9]), r"completion of the tokens \[9, 8\], got one of \[9\]"),
        (answer([4, 2], "stop", 2) | {"model": "other"}, "completion of the model served, got one of other"),
        (answer([4, 2], "stop", 2) | {"choices": []}, "expected one choice with tokens and log-probabilities, got"),
        (answer([4, 2], "stop", 2, token_ids=None), "expected 1 to 3 tokens, got None"),
        (answer([], "stop"), r"expected 1 to 3 tokens, got \[\]"),
        (answer([4, 5, 6, 7], "length"), r"expected 1 to 3 tokens, got \[4, 5, 6, 7\]"),
        (answer([4, 50, 2], "stop", 2), "token 1 is 50: expected an id below 50, the model's vocabulary"),
        (answer([4, -1, 2], "stop", 2), "token 1 is -1: expected an id below 50"),
        (answer([4, 5, 6], "length", token_ids=[4, 5, 7]), "expected a log-probability of each of 3 tokens, got 3 of"),
        (logprobs(lambda values: values[:2]), "expected a log-probability of each of 3 tokens, got 2 of"),
        (logprobs(lambda values: [*values[:2], None]), "token 2 has the log-probability None"),
        (logprobs(lambda values: [0.1, *values[1:]]), "token 0 has the log-probability 0.1: expected at most 0"),
        (logprobs(lambda values: [-9999.0, *values[1:]]), "token 0 has the log-probability -9999.0"),
        (logprobs(lambda values: [float("nan"), *values[1:]]), "token 0 has the log-probability nan"),
        (answer([4, 5], "stop", None), r"'stop' does not fit 2 tokens that end with 5: the limit is 3, and .* \[2\]"),
        (answer([4, 5], "stop", "x"), "'stop' does not fit 2 tokens"),
        (answer([4, 5], "length"), "'length' does not fit 2 tokens"),
        (answer([4, 5, 2], "length"), "'length' does not fit 3 tokens that end with 2"),
        (answer([4, 5, 6], "repetition"), "'repetition' does not fit 3 tokens"),
        (answer([4, 2, 6], "length"), "token 1 is the stop id 2, but 1 tokens follow it"),
        (answer([4, 2], "stop", 2, weight_versions=None), "does not say which weights have sampled it"),
    ],
)
def test_an_answer_that_does_not_fit_its_request_is_an_error(answered: Any, message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        completed(answered)


def test_lost_completions_are_noticed() -> None:
    for spans in ([("default", 0, 2)], [("run-1", 0, 1), ("run-2", 1, 2)]):
        versions = [dict(zip(("version", "start", "end"), span, strict=True)) for span in spans]
        with pytest.raises(LostError, match="expected a completion of the weights run-1, got one of"):
            completed(answer([4, 2], "stop", 2, weight_versions=versions))
    with pytest.raises(LostError, match="the server aborted a completion"):
        completed(answer([4], "abort"))
    # an adapter's weights have no label of their own
    adapter = answer([4, 2], "stop", 2, weight_versions=None)
    assert read(adapter, request(), Target("served", None), SIZES, Letters(), 7).finish_reason == "stop"
