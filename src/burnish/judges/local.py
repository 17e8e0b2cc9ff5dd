"""A language model in this process as a judge: the probabilities of all spellings of the choices, in batched passes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from burnish import kernels
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Request, complete
from burnish.generate.sampling import Sampling
from burnish.generate.stopping import eos_ids
from burnish.judges.protocol import Judge, NoVerdictError, Question, Verdict
from burnish.judges.questions import after_reasoning, reasoning_question
from burnish.judges.spelling import NOT_A_CHOICE, continued, continues_word
from burnish.models.forward import evaluating, head, hidden_states, unwrap
from burnish.models.layout import Layout
from burnish.models.limits import context_window
from burnish.models.reference import weights_digest
from burnish.render.encode import cache_key
from burnish.render.renderer import Renderer
from burnish.types import Example, MicroBatch, Prompt
from burnish.types import Sequence as Tokens

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from burnish.judges.settings import JudgeSettings

AT_ONCE = 32
"""Questions that are judged together. Their verdicts are stored together, so that a resumed run has equal batches."""
NEGLIGIBLE = 1e-4
"""Beginnings of a choice with less probability, such as rare white space, are not continued: their mass is lost.

Those with up to twice this probability count partly, so that rounding does not decide whether they count.
"""


class _Step(NamedTuple):
    """What the next token may do after a text: the ids that matter, and for each its next text and choice."""

    ids: Tensor
    """(K,), on the CPU."""
    texts: list[str | None]
    choices: list[int]
    ends: int
    """The choice that the text is already, which is complete unless the next token continues it; or NOT_A_CHOICE."""
    continuing: list[bool]
    """(K,), whether the token continues that choice."""


@dataclass
class _Branch:
    """A beginning of an answer to a question: its tokens, its text, and its log-probability."""

    question: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprob: float = 0.0


@dataclass
class _Found:
    """What is known about a question: the probability of each choice so far, and the tokens that were read."""

    probabilities: list[float]
    reasoning: str = ""
    calls: int = 1
    tokens: int = 0


class LocalJudge(Judge):
    """Reads how likely a language model begins its answer with each choice.

    ``LocalJudge(model, tokenizer).ask([Question(({"role": "user", "content": "Reply with A or B."},), ("A", "B"))])``

    p(choice) is the sum over all sequences of tokens whose text, without the white space around it, is the choice. A
    choice that begins another one, such as "1" and "10", counts only if the next token does not continue the word. The
    probabilities are then divided by their sum, which is the ``mass`` of the verdict (Lee et al. 2023, RLAIF).

    Args:
        model: a causal language model.
        tokenizer: its tokenizer with a chat template.
        reasoning: maximum number of tokens that the model writes, at temperature 0, before it chooses; 0 for none.
        negligible: beginnings of choices with less probability than this are not continued.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        reasoning: int = 0,
        negligible: float = NEGLIGIBLE,
    ) -> None:
        self.model, self.tokenizer = kernels.enable(model).eval(), tokenizer
        self.reasoning, self.negligible = reasoning, negligible
        self.renderer = Renderer(tokenizer)
        self.layout = Layout([self.model])
        self._steps: dict[tuple[str, tuple[str, ...]], _Step] = {}

    @classmethod
    def of(cls, model: nn.Module, tokenizer: PreTrainedTokenizerBase, settings: JudgeSettings) -> LocalJudge:
        """A judge with the settings of a recipe."""
        return cls(model, tokenizer, reasoning=settings.max_reasoning_tokens if settings.reasoning else 0)

    @cached_property
    def identity(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A digest of the weights, the tokenizer and the settings."""
        settings = {"reasoning": self.reasoning, "negligible": self.negligible}
        parts = {"weights": weights_digest(self.model).hex()[:32], "tokenizer": cache_key(self.tokenizer)[:32]}
        return json.dumps({"judge": "local", **parts, **settings})

    def ask(self, questions: Sequence[Question]) -> list[Verdict]:
        """The verdicts on questions, in their order. Equal batches give equal verdicts; others differ by rounding.

        Raises:
            NoVerdictError: a question does not fit into the model's context window, or every choice has probability 0.
            UserError: the template rejects a question.
        """
        verdicts = []
        for index, verdict in (one for some in self.each(questions) for one in some):
            if isinstance(verdict, NoVerdictError):
                raise verdict
            assert index == len(verdicts)
            verdicts.append(verdict)
        return verdicts

    def each(self, questions: Sequence[Question]) -> Iterator[list[tuple[int, Verdict | NoVerdictError]]]:
        """The verdicts on questions, ``AT_ONCE`` together."""
        for start in range(0, len(questions), AT_ONCE):
            verdicts = self._batch(questions[start : start + AT_ONCE])
            yield [(start + i, _at(start + i, verdict)) for i, verdict in enumerate(verdicts)]

    def _batch(self, questions: Sequence[Question]) -> list[Verdict | NoVerdictError]:
        began = time.monotonic()
        found = [_Found([0.0] * len(question.choices)) for question in questions]
        failed: dict[int, NoVerdictError] = {}
        asked = list(questions)
        if self.reasoning:
            prompts = self._prompts(
                [reasoning_question(question) for question in asked], [self.reasoning] * len(asked), failed
            )
            for i, (text, tokens) in self._reason(prompts).items():
                found[i].reasoning, found[i].calls, found[i].tokens = text, 2, tokens
                asked[i] = after_reasoning(asked[i], text)
        longest = [max(len(choice.encode()) for choice in question.choices) for question in asked]
        prompts = self._prompts(asked, longest, failed)
        branches = [_Branch(i) for i in prompts]
        while branches:
            branches = self._advance(branches, prompts, asked, found)
            branches = [branch for branch in branches if len(branch.tokens) <= longest[branch.question]]
        seconds = (time.monotonic() - began) / len(questions)
        return [failed[i] if i in failed else _verdict(one, seconds) for i, one in enumerate(found)]

    def _prompts(
        self, questions: list[Question], rooms: list[int], failed: dict[int, NoVerdictError]
    ) -> dict[int, tuple[int, ...]]:
        """The tokens of the questions by index, and in ``failed`` those that leave no room for so many more tokens."""
        indices = [i for i in range(len(questions)) if i not in failed]
        rows = [Prompt(questions[i].messages, {}, "a question of the judge") for i in indices]
        prompts, context = dict(zip(indices, self.renderer.prompts(rows), strict=True)), context_window(self.model)
        for i, tokens in prompts.items():
            if context is not None and len(tokens) + rooms[i] > context:
                failed[i] = NoVerdictError(
                    f"the question has {len(tokens):,} tokens and the answer up to {rooms[i]:,}, but the judge reads "
                    f"at most {context:,}",
                    i,
                )
        return {i: tokens for i, tokens in prompts.items() if i not in failed}

    def _reason(self, prompts: dict[int, tuple[int, ...]]) -> dict[int, tuple[str, int]]:
        """What the model writes about each question, and the number of tokens read and written."""
        sampling, ends = Sampling(max_new_tokens=self.reasoning, temperature=0.0), eos_ids(self.model, self.tokenizer)
        generator = LocalGenerator(self.model, self.tokenizer, frozen=True)
        requests = [Request(tokens, 0, sampling, frozenset(ends)) for tokens in prompts.values()]
        with evaluating(self.model):
            completions = complete(generator, requests)
        generator.close()
        return {
            i: (
                str(self.tokenizer.decode(completion.tokens, skip_special_tokens=True)).strip(),
                len(tokens) + len(completion.tokens),
            )
            for (i, tokens), completion in zip(prompts.items(), completions, strict=True)
        }

    def _advance(
        self,
        branches: list[_Branch],
        prompts: dict[int, tuple[int, ...]],
        questions: list[Question],
        found: list[_Found],
    ) -> list[_Branch]:
        """Read the next token of every branch: add what it completes to ``found``, and return the longer branches."""
        steps = [self._step(branch.text, questions[branch.question].choices) for branch in branches]
        sequences = [
            Tokens(
                (*prompts[branch.question], *branch.tokens),
                (False,) * len(prompts[branch.question]) + (True,) * len(branch.tokens),
                "a question of the judge",
            )
            for branch in branches
        ]
        longer = []
        for branch, step, sequence, logprobs in zip(
            branches, steps, sequences, self._next(sequences, steps), strict=True
        ):
            one = found[branch.question]
            one.tokens += len(sequence)
            kept = 1.0
            for k, logprob in enumerate(logprobs):
                share, choice, text = math.exp(logprob), step.choices[k], step.texts[k]
                if step.continuing[k]:
                    kept -= share
                if choice not in (NOT_A_CHOICE, step.ends):
                    one.probabilities[choice] += math.exp(branch.logprob + logprob)
                elif text is not None and (part := self._part(math.exp(branch.logprob + logprob))) > 0:
                    tokens = (*branch.tokens, int(step.ids[k]))
                    longer.append(_Branch(branch.question, tokens, text, branch.logprob + logprob + math.log(part)))
            if step.ends != NOT_A_CHOICE:
                one.probabilities[step.ends] += math.exp(branch.logprob) * max(kept, 0.0)
        return longer

    def _part(self, p: float) -> float:
        """The part of a beginning with probability p that counts: 0 if p is negligible, and 1 from twice that on."""
        return min(max(p / self.negligible - 1, 0.0), 1.0) if self.negligible else float(p > 0)

    def _next(self, sequences: list[Tokens], steps: list[_Step]) -> list[list[float]]:
        """After each sequence, the log-probabilities of the ids of its step."""
        logits_of = head(self.model)
        results: list[list[float]] = [[]] * len(sequences)

        def last(batch: MicroBatch) -> Tensor:
            return logits_of(hidden_states(self.model, batch).flatten(0, 1)[batch.ends])

        with evaluating(self.model):
            for group, _, logits in self.layout.passes(last, [Example((one,)) for one in sequences]):
                logprobs = logits.double().log_softmax(-1).cpu()
                for i, row in zip(group, logprobs, strict=True):
                    results[i] = row[steps[i].ids].tolist()
        return results

    def _step(self, text: str, choices: tuple[str, ...]) -> _Step:
        """What each token does after a text."""
        key = (text, choices)
        if key not in self._steps:
            ends = choices.index(text) if text in choices else NOT_A_CHOICE
            ids, texts, complete, continuing = [], [], [], []
            for token, written in enumerate(self._texts):
                if not written:
                    continue
                after = continued(text, written, choices)
                goes_on = ends != NOT_A_CHOICE and (
                    continues_word(written) or after.text is not None or after.choice not in (NOT_A_CHOICE, ends)
                )
                if goes_on or after.text is not None or after.choice != NOT_A_CHOICE:
                    ids.append(token)
                    texts.append(after.text)
                    complete.append(after.choice)
                    continuing.append(goes_on)
            self._steps[key] = _Step(torch.tensor(ids, dtype=torch.long), texts, complete, ends, continuing)
        return self._steps[key]

    @cached_property
    def _texts(self) -> list[str]:
        """The text of each token inside of a text, with its white space; "" if it is special."""
        size = min(len(self.tokenizer), int(unwrap(self.model).config.get_text_config(decoder=True).vocab_size))
        rust: Any = self.tokenizer.backend_tokenizer
        special = set(self.tokenizer.all_special_ids)
        alone = rust.decode_batch([[i] for i in range(size)], skip_special_tokens=False)
        # some decoders drop the white space at the start of a text
        anchor = next((i for i, text in enumerate(alone) if len(text) == 1 and text.isalpha() and text.isascii()), None)
        texts = alone
        if anchor is not None:
            joined = rust.decode_batch([[anchor, i] for i in range(size)], skip_special_tokens=False)
            texts = [
                both.removeprefix(alone[anchor]) if both.startswith(alone[anchor]) else one
                for both, one in zip(joined, alone, strict=True)
            ]
        return ["" if i in special else text for i, text in enumerate(texts)]


def _at(index: int, verdict: Verdict | NoVerdictError) -> Verdict | NoVerdictError:
    return NoVerdictError(str(verdict), index) if isinstance(verdict, NoVerdictError) else verdict


def _verdict(found: _Found, seconds: float) -> Verdict | NoVerdictError:
    mass = math.fsum(found.probabilities)
    if not mass > 0:
        return NoVerdictError("the judge gives every choice the probability 0")
    return Verdict(
        tuple(p / mass for p in found.probabilities),
        min(mass, 1.0),
        found.reasoning,
        found.calls,
        found.tokens,
        seconds,
    )
