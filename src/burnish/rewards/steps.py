"""A step-level value model as a reward: each step of a solution is rewarded where it ends."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from burnish.errors import UserError
from burnish.models.heads import Network, StepValueHead
from burnish.models.layout import Layout
from burnish.render import chat
from burnish.render.solutions import step_ends
from burnish.rewards.model import TOKEN_BUDGET
from burnish.types import Example, Sequence, Trajectory

FAILED = -1.0  # what tree search gives a state that leads nowhere


class StepReward:
    """Rewards the steps of answers by their values V: a number for each token, 0 but where a step ends.

    ``differences``: V_k - V_{k-1} at the end of step k, where V_0 = 0, since no training row says what a bare question
    is worth; the sum over a solution is its last value. ``raw``: V_k, so that many fair steps are worth more than few.

    An answer that was cut off, or whose last line lacks its delimiter, fails: its last token is a step worth -1, or
    else never to end a step would be a way around a bad one.

    The sampled ids are read as they are: the model's tokenizer must be the policy's.
    """

    def __init__(
        self,
        network: Network,
        tokenizer: PreTrainedTokenizerBase,
        *,
        steps: Literal["differences", "raw"] = "differences",
        token_budget: int = TOKEN_BUDGET,
    ) -> None:
        """Take what ``load_value_model`` gives, which is frozen, and the tokenizer it was trained with."""
        assert isinstance(network.critic, StepValueHead)
        self.network = network.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.delimiter = network.critic.delimiter
        self.steps = steps
        self.token_budget = token_budget

    @cached_property
    def layout(self) -> Layout:
        """How answers lie in a batch; a prompt runs once for all its answers."""
        return Layout(self.network.models)

    def __call__(self, answers: list[Trajectory], /) -> list[list[float]]:
        """One number for each token of each answer.

        Raises:
            UserError: the template refuses a prompt, or the tokens are not this tokenizer's.
        """
        rewards = []
        for answer, values in zip(answers, self.values(answers), strict=True):
            text = self.tokenizer.decode(list(answer.tokens), skip_special_tokens=True)
            if str(text).strip() != answer.text:
                raise UserError(
                    f"{answer.source}: the value model's tokenizer reads {str(text)[:80]!r} where the policy wrote "
                    f"{answer.text[:80]!r}: a reward for steps needs a value model with the policy's tokenizer"
                )
            worth = {t: values[t] for t in step_ends(self.tokenizer, answer.tokens, self.delimiter)}
            if answer.finish_reason != "stop" or self._unfinished(answer, worth):
                worth[len(answer.tokens) - 1] = FAILED
            mine, before = [0.0] * len(answer.tokens), 0.0
            for t, value in worth.items():
                mine[t] = value - before if self.steps == "differences" else value
                before = value
            rewards.append(mine)
        return rewards

    def _unfinished(self, answer: Trajectory, worth: dict[int, float]) -> bool:
        """Whether text follows the last step, or there is no step at all."""
        rest = self.tokenizer.decode(list(answer.tokens[max(worth, default=-1) + 1 :]), skip_special_tokens=True)
        return not worth or bool(str(rest).strip())

    @torch.no_grad()
    def values(self, answers: list[Trajectory]) -> list[list[float]]:
        """V of every prefix of each answer, one number for each of its tokens."""
        writer = chat.Renderer(self.tokenizer)
        prompts = chat.results(chat.prompt.draft(writer, answer.prompt, answer.source) for answer in answers)
        examples = []
        for answer, prompt in zip(answers, prompts, strict=True):
            asked = (False,) * len(prompt) + (True,) * len(answer.tokens)
            examples.append(Example((Sequence(prompt + answer.tokens, asked, answer.source),)))
        found: list[list[float]] = [[] for _ in answers]
        passes = self.layout.passes(
            lambda batch: self.network.values(batch).flatten().tolist(), examples, self.token_budget
        )
        for group, batch, values in passes:
            for i, end in zip(group, batch.ends.tolist(), strict=True):
                found[i] = values[end + 1 - len(answers[i].tokens) : end + 1]
        return found
