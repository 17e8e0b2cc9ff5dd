"""Chat completions of a local model in the format of OpenAI."""

from __future__ import annotations

import math
from typing import Any

import httpx2
import pytest
import torch

from builders import character_tokenizer, llama
from burnish.models.loaded import Loaded
from burnish.render.renderer import Renderer
from burnish.serving.chat import Chat, ChatRequest, chat_service
from services import TOKEN, get, post, running

HEADERS = {"authorization": f"Bearer {TOKEN}"}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A or B?"}]


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(Loaded("tiny", llama(), character_tokenizer()), "tiny")


@pytest.fixture(scope="module")
def url(chat: Chat):
    with running(chat_service(chat, TOKEN)) as url:
        yield url


def ask(url: str, **settings: Any) -> httpx2.Response:
    body = {"model": "tiny", "messages": MESSAGES, "seed": 1, **settings}
    return post(f"{url}/v1/chat/completions", json=body, headers=HEADERS, timeout=30)


def next_token(chat: Chat, *sampled: int) -> torch.Tensor:
    """The log-probabilities of the next token, by the model's own forward pass."""
    prompt = Renderer(chat.tokenizer).prompt(tuple(MESSAGES))  # type: ignore[arg-type]
    with torch.no_grad():
        return chat.model(torch.tensor([[*prompt, *sampled]])).logits[0, -1].double().log_softmax(-1)


def test_an_answer_has_the_format_of_openai(url: str) -> None:
    answer = ask(url, max_tokens=5, temperature=0.7, n=2).json()
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        assert choice["message"]["role"] == "assistant" and choice["logprobs"] is None
        assert choice["finish_reason"] in ("stop", "length")
    usage = answer["usage"]
    assert 2 <= usage["completion_tokens"] <= 10
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    (model,) = get(f"{url}/v1/models", headers=HEADERS).json()["data"]
    assert model["id"] == "tiny"


def test_logprobs_are_those_of_the_model(url: str, chat: Chat) -> None:
    (choice,) = ask(url, max_tokens=3, temperature=2.0, logprobs=True, top_logprobs=105).json()["choices"]
    sampled: list[int] = []
    names = [chat.tokenizer.decode([i]) for i in range(105)]
    for entry in choice["logprobs"]["content"]:
        expected = next_token(chat, *sampled)
        sampled.append(names.index(entry["token"]))
        assert entry["logprob"] == pytest.approx(expected[sampled[-1]].item(), abs=1e-5)
        top = entry["top_logprobs"]
        assert [one["logprob"] for one in top] == pytest.approx(
            expected.sort(descending=True).values.tolist(), abs=1e-5
        )
        assert math.fsum(math.exp(one["logprob"]) for one in top) == pytest.approx(1, abs=1e-5)
        assert entry["bytes"] == list(entry["token"].encode())
    assert len(sampled) >= 1


def test_greedy_answers_take_the_likeliest_token(url: str, chat: Chat) -> None:
    (choice,) = ask(url, max_tokens=1, temperature=0, logprobs=True, top_logprobs=2).json()["choices"]
    (entry,) = choice["logprobs"]["content"]
    assert (
        entry["token"] == entry["top_logprobs"][0]["token"] == chat.tokenizer.decode([int(next_token(chat).argmax())])
    )
    assert len(entry["top_logprobs"]) == 2


def test_the_token_that_ends_an_answer_has_logprobs() -> None:
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[2] = 0
    chat = Chat(Loaded("tiny", model, character_tokenizer()), "tiny")
    asked = ChatRequest.model_validate({"model": "tiny", "messages": MESSAGES, "max_tokens": 400, "logprobs": True})
    while True:  # every token has the probability 1 / 105
        (choice,) = chat.answer(asked)["choices"]
        if choice["finish_reason"] == "stop":
            break
    *_, last = choice["logprobs"]["content"]
    assert (last["token"], last["top_logprobs"]) == ("<|im_end|>", [])
    assert last["logprob"] == pytest.approx(-math.log(105))
    assert "<|im_end|>" not in choice["message"]["content"]


def test_a_seed_repeats_an_answer_and_answers_of_one_request_differ(url: str) -> None:
    def texts(**settings: Any) -> list[str]:
        return [choice["message"]["content"] for choice in ask(url, max_tokens=12, n=4, **settings).json()["choices"]]

    assert texts() == texts() != texts(seed=2)
    assert len(set(texts())) == 4
    assert texts(seed=None) != texts(seed=None)


def test_a_stop_string_is_not_part_of_the_answer(url: str) -> None:
    long = ask(url, max_tokens=40).json()["choices"][0]["message"]["content"]
    stop = long[5]
    short = ask(url, max_tokens=40, stop=stop).json()["choices"][0]
    assert short["message"]["content"] == long[: long.index(stop)] and short["finish_reason"] == "stop"


def test_parts_and_developer_messages(url: str) -> None:
    parts = [{"type": "text", "text": "A or"}, {"type": "text", "text": " B?"}]
    other = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert ask(url, messages=other).json()["choices"] == ask(url).json()["choices"]


@pytest.mark.parametrize(
    ("settings", "status", "message"),
    [
        ({"model": "gpt"}, 404, "no model 'gpt': this service has 'tiny'"),
        ({"stream": True}, 400, "stream: expected False, got true"),
        ({"frequency_penalty": 1}, 400, "frequency_penalty: unknown key"),
        ({"temperature": 1e-5}, 400, "temperature"),
        ({"top_logprobs": 5}, 400, "top_logprobs needs logprobs: true"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, 400, "are the same"),
        ({"messages": []}, 400, "messages: expected a list of 1 or more"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, 422, "leaves no room"),
    ],
)
def test_requests_that_cannot_be_answered(url: str, settings: dict[str, Any], status: int, message: str) -> None:
    response = ask(url, **settings)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]
    assert post(f"{url}/v1/chat/completions", json={}).status_code == 401
