"""Reads replies of OpenAI-compatible endpoints: probabilities from log-probabilities, and votes. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import pydantic
from pydantic import Field

from burnish.judges.spelling import NOT_A_CHOICE, continued, continues_word

AROUND = " \t\r\n*_`'\".,:;!()[]<>"
"""What may stand around a choice in a vote: white space, quotes, and other punctuation."""
ROUNDING = 1e-3
"""How far probabilities may exceed a sum of 1."""


class BadReplyError(ValueError):
    """A reply is not what the API promises. The judge asks again."""


class NoLogprobsError(BadReplyError):
    """A reply has no log-probabilities."""


class _Reply(pydantic.BaseModel):
    """Keys that we do not read are ignored. NaN and infinity are errors."""

    model_config = pydantic.ConfigDict(allow_inf_nan=False, frozen=True)


class Alternative(_Reply):
    """A token that could have been written: ``Alternative(token="A", logprob=-0.1)``."""

    token: str
    logprob: float = Field(le=1e-6)


class WrittenToken(Alternative):
    """The token that was written, and the likeliest ones in its place."""

    top_logprobs: list[Alternative] = []


class _Logprobs(_Reply):
    content: list[WrittenToken] | None = None


class _Message(_Reply):
    content: str | None = None


class _Choice(_Reply):
    message: _Message
    logprobs: _Logprobs | None = None


class _Usage(_Reply):
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(0, ge=0)


class Reply(_Reply):
    """The reply to a chat completion: what was written, its log-probabilities if they were requested, and the usage."""

    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None

    @property
    def texts(self) -> list[str]:
        """What was written, once for each of the ``n`` samples."""
        return [choice.message.content or "" for choice in self.choices]

    @property
    def written(self) -> list[WrittenToken]:
        """The tokens of the first sample.

        Raises:
            NoLogprobsError: there are no log-probabilities.
        """
        logprobs = self.choices[0].logprobs
        if logprobs is None or not logprobs.content or not any(token.top_logprobs for token in logprobs.content):
            raise NoLogprobsError("the reply has no log-probabilities")
        return logprobs.content


def read_reply(body: bytes) -> Reply:
    """The reply in the body of a response.

    Raises:
        BadReplyError: it is not JSON, or keys are missing or have impossible values.
    """
    try:
        return Reply.model_validate_json(body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise BadReplyError(f"{where}: {first['msg']}" if where else first["msg"]) from None


class Read(NamedTuple):
    """The probability of each choice as far as a reply shows it, before normalization.

    ``open`` is the probability of tokens such as "1" that begin another choice too ("10"), where the reply does not
    show what would follow them.
    """

    probabilities: list[float]
    open: float


def read_choices(written: Sequence[WrittenToken], choices: tuple[str, ...]) -> Read:
    """The probabilities of choices, from the alternatives at each written token.

    Alternatives are followed along what was written. A token such as "1" counts as the whole choice if another
    alternative spells "10" with a single token, because then the tokenizer does not split it.

    Raises:
        BadReplyError: the probabilities at a token exceed 1.
    """
    found, open_ = [0.0] * len(choices), 0.0
    text, share = "", 1.0
    for token in written:
        others = [one for one in token.top_logprobs if one.token != token.token]
        if math.fsum(math.exp(one.logprob) for one in (token, *others)) > 1 + ROUNDING:
            raise BadReplyError("the probabilities of the alternatives at a token exceed 1")
        ends = choices.index(text) if text in choices else NOT_A_CHOICE
        after = [(one, continued(text, one.token, choices)) for one in (token, *others)]
        whole = {choices[to.choice] for _, to in after if to.choice != NOT_A_CHOICE}
        kept, following = 1.0, None
        for one, to in after:
            p = math.exp(one.logprob)
            if ends != NOT_A_CHOICE and (
                continues_word(one.token) or to.text is not None or to.choice not in (NOT_A_CHOICE, ends)
            ):
                kept -= p
            if to.choice not in (NOT_A_CHOICE, ends):
                found[to.choice] += share * p
            elif to.text is not None and one is token:
                following = (to.text, share * p)
            elif to.text in choices:
                longer = {choice for choice in choices if choice != to.text and choice.startswith(to.text)}
                if whole & longer:
                    found[choices.index(to.text)] += share * p
                else:
                    open_ += share * p
        if ends != NOT_A_CHOICE:
            found[ends] += share * max(kept, 0.0)
        if following is None:
            return Read(found, open_)
        text, share = following
    if text in choices:  # the end of the reply completes it
        found[choices.index(text)] += share
    return Read(found, open_)


def hidden(written: Sequence[WrittenToken], read: Read) -> float:
    """The most probability that choices can have that a reply does not show.

    Each of them has at most that of the least likely alternative to the first token, and together at most what all
    alternatives leave.
    """
    first = [written[0], *(one for one in written[0].top_logprobs if one.token != written[0].token)]
    shown = [math.exp(one.logprob) for one in first]
    unseen = sum(p == 0 for p in read.probabilities)
    return max(0.0, min(unseen * min(shown), 1 - math.fsum(shown)))


def vote(text: str, choices: tuple[str, ...]) -> int | None:
    """The index of the choice that a text names and nothing else; None if it names none."""
    word = text.strip(AROUND)
    return choices.index(word) if word in choices else None
