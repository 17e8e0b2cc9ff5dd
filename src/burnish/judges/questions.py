"""How pairs and completions are put to a judge as questions. Pure functions of messages."""

from __future__ import annotations

import json
from dataclasses import replace

from burnish.judges.protocol import Question
from burnish.types import Message, Messages

PAIR = ("A", "B")
GRADES = tuple(str(grade) for grade in range(1, 11))

_PAIR = """\
Below are a conversation and two possible replies to it, A and B.

<conversation>
{prompt}
</conversation>

<reply A>
{first}
</reply A>

<reply B>
{second}
</reply B>

{principle}
Which reply is better? Answer with A or B, and nothing else."""

_SCORE = """\
Below are a conversation and a reply to it.

<conversation>
{prompt}
</conversation>

<reply>
{completion}
</reply>

{principle}
How good is the reply? Answer with a whole number from 1 (very bad) to 10 (very good), and nothing else."""

_UNPRINCIPLED = "Judge how helpful, correct and harmless a reply is."
_REASON = "\n\nDo not answer yet. First, explain your reasoning in a few sentences."
_CHOOSE = "Now answer with {choices}, and nothing else."


def pair_question(prompt: Messages, first: Messages, second: Messages, principle: str | None = None) -> Question:
    """Which of two completions is better: choices A (the first) and B.

    Args:
        prompt: the conversation before the completions.
        first: the messages of completion A.
        second: the messages of completion B.
        principle: what to judge by: "Prefer the reply that is more honest."; None for helpful, correct and harmless.
    """
    text = _PAIR.format(
        prompt=transcript(prompt),
        first=_reply(first),
        second=_reply(second),
        principle=principle or _UNPRINCIPLED,
    )
    return Question((Message(role="user", content=text),), PAIR)


def score_question(prompt: Messages, completion: Messages, principle: str | None = None) -> Question:
    """How good a completion is: choices 1 (very bad) to 10 (very good). Arguments are as in ``pair_question``."""
    text = _SCORE.format(prompt=transcript(prompt), completion=_reply(completion), principle=principle or _UNPRINCIPLED)
    return Question((Message(role="user", content=text),), GRADES)


def reasoning_question(question: Question) -> Question:
    """The question with a request for reasoning before the answer."""
    *before, last = question.messages
    return replace(question, messages=(*before, Message(role="user", content=last["content"] + _REASON)))


def after_reasoning(question: Question, reasoning: str) -> Question:
    """The question once the judge has written its reasoning; the question itself if that is empty."""
    if not reasoning:
        return question
    listed = " or ".join((", ".join(question.choices[:-1]), question.choices[-1]))
    written = Message(role="assistant", content=reasoning)
    choose = Message(role="user", content=_CHOOSE.format(choices=listed))
    return replace(question, messages=(*reasoning_question(question).messages, written, choose))


def transcript(messages: Messages) -> str:
    """Messages as text: a single message of the user as it is, others each after the name of its role."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return messages[0]["content"]
    return "\n\n".join(f"{message['role'].capitalize()}: {_content(message)}" for message in messages)


def _reply(completion: Messages) -> str:
    return _content(completion[0]) if len(completion) == 1 else transcript(completion)


def _content(message: Message) -> str:
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return "\n".join([part for part in (message["content"], *calls) if part])
