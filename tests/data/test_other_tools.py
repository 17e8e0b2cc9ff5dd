"""Rows as TRL, LLaMA-Factory, OpenRLHF, axolotl and UltraFeedback write them.

They are read as they are, or with the lines of a recipe that the message gives.
"""

from typing import Any, NamedTuple

import pytest

from burnish.config.yaml import read
from burnish.data.readers import BadRow, load
from burnish.methods import METHODS
from burnish.types import Conversation, Labelled, Messages, Preference, Prompt, Ranking, Row, Text

HI, MORE = {"role": "user", "content": "Hi"}, {"role": "user", "content": "More"}
YES, NO = {"role": "assistant", "content": "Yes"}, {"role": "assistant", "content": "No"}
SYSTEM = {"role": "system", "content": "s"}
HUMAN, GPT, GPT_NO = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}, {"from": "gpt", "value": "No"}
ASKED: Messages = ({"role": "user", "content": "Hi"},)
WITH_INPUT: Messages = ({"role": "user", "content": "Hi\n\nx"},)
S: Messages = ({"role": "system", "content": "s"},)
SAID_YES: Messages = ({"role": "assistant", "content": "Yes"},)
SAID_NO: Messages = ({"role": "assistant", "content": "No"},)
AT = "row 1"


def pair(prompt: Messages = ASKED) -> Preference:
    return Preference(prompt, SAID_YES, SAID_NO, None, None, AT)


def chat(prompt: Messages = ASKED, start: int | None = None) -> Conversation:
    return Conversation(prompt + SAID_YES, start, AT)


def judged(prompt: Messages = ASKED) -> Labelled:
    return Labelled(prompt, SAID_YES, True, AT)


class Case(NamedTuple):
    """A row of another tool, the method that reads it, what it means, and the settings that it needs."""

    method: str
    record: dict[str, Any]
    expected: Row
    settings: str = ""


def rated(response: str, score: float, system: str = "Be kind.") -> dict[str, Any]:
    """A completion of the original UltraFeedback."""
    return {
        "model": "alpaca-7b",
        "principle": "helpfulness",
        "custom_system_prompt": system,
        "response": response,
        "annotations": {"honesty": {"Rating": "4", "Rationale": "It is."}},
        "critique": "Fine.",
        "fine-grained_score": 4.25,
        "overall_score": score,
    }


ULTRAFEEDBACK = {
    "source": "sharegpt",
    "instruction": "Hi",
    "models": ["alpaca-7b", "bard"],
    "completions": [rated("Yes", 8.5), rated("No", 7.0, "")],
    "correct_answers": ["None"],
    "incorrect_answers": ["None"],
}
BINARIZED = {
    "prompt": "Hi",
    "prompt_id": "f0e37e9f7800261167ce91143f98f511f768847236f133f2d0aed60b444ebe57",
    "chosen": [HI, YES],
    "rejected": [HI, NO],
    "messages": [HI, YES],
    "score_chosen": 8.5,
    "score_rejected": 7.0,
}
RANKED = Ranking(ASKED, (SAID_YES, SAID_NO), (8.5, 7.0), AT)
SPEAKERS = [{"speaker": "human", "text": "Hi"}, {"speaker": "gpt", "text": "Yes"}]

CASES = {
    "trl, text": Case("pretrain", {"text": "Once"}, Text("Once", AT)),
    "trl, messages": Case("sft", {"messages": [HI, YES]}, chat()),
    "trl, prompt and completion": Case("sft", {"prompt": "Hi", "completion": "Yes"}, chat(start=1)),
    "trl, conversational completion": Case("sft", {"prompt": [HI], "completion": [YES]}, chat(start=1)),
    "trl, preference": Case("dpo", {"prompt": "Hi", "chosen": "Yes", "rejected": "No"}, pair()),
    "trl, conversational preference": Case("dpo", {"prompt": [HI], "chosen": [YES], "rejected": [NO]}, pair()),
    "trl, implicit prompt": Case("dpo", {"chosen": [HI, YES], "rejected": [HI, NO]}, pair()),
    "trl, unpaired": Case("dpo", {"prompt": "Hi", "completion": "Yes", "label": True}, judged()),
    "trl, conversational unpaired": Case("dpo", {"prompt": [HI], "completion": [YES], "label": True}, judged()),
    "trl, prompt": Case("grpo", {"prompt": [HI], "answer": "4"}, Prompt(ASKED, {"answer": "4"}, AT)),
    "llama-factory, alpaca": Case(
        "sft",
        {"instruction": "Hi", "input": "x", "output": "Yes", "system": "s", "history": [["Hi", "Yes"]]},
        Conversation(S + ASKED + SAID_YES + WITH_INPUT + SAID_YES, 2, AT),
    ),
    "llama-factory, alpaca preference": Case(
        "dpo", {"instruction": "Hi", "input": "x", "chosen": "Yes", "rejected": "No"}, pair(WITH_INPUT)
    ),
    "llama-factory, alpaca kto": Case(
        "dpo",
        {"instruction": "Hi", "input": "x", "output": "Yes", "kto_tag": True},
        judged(WITH_INPUT),
        "keys: {label: kto_tag}",
    ),
    "llama-factory, sharegpt": Case(
        "sft", {"conversations": [HUMAN, GPT], "system": "s", "tools": ""}, chat(S + ASKED)
    ),
    "llama-factory, sharegpt preference": Case(
        "dpo",
        {"conversations": [HUMAN, GPT, HUMAN], "chosen": GPT, "rejected": GPT_NO},
        pair(ASKED + SAID_YES + ASKED),
    ),
    "llama-factory, sharegpt kto": Case(
        "dpo", {"conversations": [HUMAN, GPT], "kto_tag": True}, judged(), "keys: {label: kto_tag}"
    ),
    "llama-factory, messages and label": Case("dpo", {"messages": [HI, YES], "label": True}, judged()),
    "llama-factory, openai": Case("sft", {"messages": [SYSTEM, HI, YES]}, chat(S + ASKED)),
    "openrlhf, sft": Case(
        "sft", {"input": "Hi", "output": "Yes"}, chat(start=1), "keys: {prompt: input, completion: output}"
    ),
    "openrlhf, sft as messages": Case("sft", {"input": [HI, YES]}, chat(), "keys: {messages: input}"),
    "openrlhf, open-orca": Case(
        "sft", {"system_prompt": "s", "question": "Hi", "response": "Yes"}, chat(S + ASKED, start=2)
    ),
    "openrlhf, preference": Case(
        "reward",
        {"chosen": [HI, YES], "rejected": [HI, NO], "chosen_score": 4.0, "rejected_score": 2},
        pair(),
        "keep: [chosen_score, rejected_score]",
    ),
    "openrlhf, kto": Case(
        "dpo",
        {"instruction": "Hi", "response": "Yes", "score": 1},
        judged(),
        "keys: {output: response, label: score}",
    ),
    "openrlhf, prompts": Case(
        "ppo",
        {"context_messages": [HI], "label": "4"},
        Prompt(ASKED, {"label": "4"}, AT),
        "keys: {prompt: context_messages}",
    ),
    "axolotl, chat_template": Case("sft", {"messages": [HI, YES]}, chat()),
    "axolotl, field_messages": Case("sft", {"conversation": [HI, YES]}, chat(), "keys: {messages: conversation}"),
    "axolotl, message_property_mappings": Case(
        "sft", {"chat": SPEAKERS}, chat(), "keys: {messages: chat, role: speaker, content: text}"
    ),
    "axolotl, properties of messages": Case(
        "sft", {"messages": SPEAKERS}, chat(), "keys: {role: speaker, content: text}"
    ),
    "axolotl, completion": Case("pretrain", {"input": "Once"}, Text("Once", AT), "keys: {text: input}"),
    "axolotl, alpaca": Case("sft", {"instruction": "Hi", "input": "", "output": "Yes"}, chat(start=1)),
    "axolotl, gpteacher": Case(
        "sft", {"instruction": "Hi", "input": "x", "response": "Yes"}, chat(WITH_INPUT, 1), "keys: {output: response}"
    ),
    "axolotl, oasst": Case(
        "sft",
        {"INSTRUCTION": "Hi", "RESPONSE": "Yes"},
        chat(start=1),
        "keys: {prompt: INSTRUCTION, completion: RESPONSE}",
    ),
    "axolotl, chat_template preference": Case("dpo", {"messages": [HI], "chosen": YES, "rejected": NO}, pair()),
    "axolotl, intel": Case(
        "dpo",
        {"system": "s", "question": "Hi", "chosen": "Yes", "rejected": "No"},
        pair(S + ASKED),
        "keys: {prompt: question}",
    ),
    "axolotl, argilla": Case(
        "dpo",
        {"system": "s", "instruction": "Hi", "chosen_response": "Yes", "rejected_response": "No"},
        pair(S + ASKED),
        "keys: {chosen: chosen_response, rejected: rejected_response}",
    ),
    "axolotl, kto": Case(
        "dpo",
        {"system": "s", "question": "Hi", "completion": "Yes", "label": True},
        judged(S + ASKED),
        "keys: {prompt: question}",
    ),
    "ultrafeedback": Case("reward", ULTRAFEEDBACK, RANKED, "keep: [custom_system_prompt]"),
    "ultrafeedback, binarized": Case(
        "dpo", BINARIZED, pair(), "keep: [prompt_id, messages, score_chosen, score_rejected]"
    ),
    "ultrafeedback, binarized, sft": Case(
        "sft", BINARIZED, chat(), "keep: [prompt, prompt_id, chosen, rejected, score_chosen, score_rejected]"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_are_read_as_they_are_or_with_the_lines_that_the_message_gives(case: Case) -> None:
    kinds = METHODS[case.method].kinds
    if case.settings:
        with pytest.raises(BadRow) as caught:
            load([case.record], kinds)
        name, _, value = case.settings.partition(": ")
        assert f"data.{name}: {value}" in str(caught.value)
    settings: Any = read(case.settings, "message").value or {}
    assert load([case.record], kinds, **settings).rows == [case.expected]


@pytest.mark.parametrize(
    ("method", "record", "message"),
    [
        (
            "sft",
            {"messages": [HI, YES], "conversations": [HUMAN, GPT_NO]},
            "fits several shapes: messages, sharegpt: choose one with data.format",
        ),
        ("sft", {"messages": [HI, {**YES, "train": False}]}, r"messages\[1\]\.train: .* 'train' would be lost"),
        (
            "sft",
            {"segments": [{"label": True, "text": "<s>Hi"}]},
            "segments: not supported: text with a loss mask of its own",
        ),
        ("sft", {"conversations": [HUMAN, {"from": "function_call", "value": "{}"}]}, "unknown role"),
        ("sft", {"messages": [HI, YES], "images": ["a.png"]}, "images: unknown column"),
        (
            "dpo",
            {"chosen": "The sky is blue.", "rejected": "The sky is green."},
            "write a text that both answers follow",
        ),
        (
            "dpo",
            {"question": "Hi", "chosen": "Yes", "rejected": "No", "images": ["a.png"]},
            r"not a transcript: [^;]*;[^;]*$",
        ),
        ("sft", {"prompt": '[{"role": "user", "content": "Hi"}]', "completion": "Yes"}, "prompt: messages as text"),
        (
            "sft",
            {"instruction": "Hi", "output": "Yes", "history": [["Hi"]]},
            r"history\[0\]: not a question and an ans",
        ),
        ("reward", {"instruction": "Hi", "completions": [{"response": "Yes"}]}, "overall_score: missing key"),
        ("dpo", {"messages": [YES], "label": True}, "messages: no prompt"),
        ("grpo", {"prompt": "Hi", "instruction": "Ho"}, "prompt, alpaca_prompt: choose one with data.format$"),
    ],
)
def test_what_cannot_be_read_is_refused(method: str, record: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRow, match=message):
        load([record], METHODS[method].kinds)


def test_a_prompt_keeps_the_input_and_history_of_an_instruction() -> None:
    record = {"instruction": "Hi", "input": "x", "history": [["Hi", "Yes"]], "answer": 3}
    assert load([record], (Prompt,)).rows == [Prompt(ASKED + SAID_YES + WITH_INPUT, {"answer": 3}, AT)]
