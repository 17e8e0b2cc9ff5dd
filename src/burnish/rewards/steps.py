"""A step-value model as a reward: each reasoning step of a solution is rewarded at its end."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from burnish.errors import UserError
from burnish.models.heads import Network, StepValueHead
from burnish.models.layout import Layout
from burnish.render.renderer import Renderer
from burnish.render.solutions import step_ends
from burnish.rewards.model import TOKEN_BUDGET
from burnish.types import Example, Prompt, Sequence, Trajectory

FAILED = -1.0  # the value that tree search gives to a dead end


class StepReward:
    """Rewards reasoning steps by their values V: one number per sampled token, which is 0 except at the end of a step.

    ``differences``: V_k - V_{k-1} at the end of step k, where V_0 = 0 because training rows give no value to a bare
    question. The sum over a solution is its last value. ``raw``: V_k, so many fair steps are worth more than a few.

    A solution that was cut off, or whose last line lacks its delimiter, has failed: its last token gets the value -1.
    Otherwise the policy could avoid the value of a bad step by never ending it.

    The model reads the sampled token ids directly, so it must have the policy's tokenizer.
    """

    def __init__(
        self,
        network: Network,
        tokenizer: PreTrainedTokenizerBase,
        *,
        steps: Literal["differences", "raw"] = "differences",
        token_budget: int = TOKEN_BUDGET,
    ) -> None:
        """Create a reward from the result of ``load_value_model``, which is frozen, and its tokenizer."""
        assert isinstance(network.critic, StepValueHead)
        self.network = network.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.delimiter = network.critic.delimiter
        self.steps = steps
        self.token_budget = token_budget

    @cached_property
    def layout(self) -> Layout:
        """The layout of solutions in a batch. A prompt is computed once for all its solutions."""
        return Layout(self.network.models)

    def __call__(self, trajectories: list[Trajectory], /) -> list[list[float]]:
        """Return one number per sampled token of each trajectory.

        Raises:
            UserError: if the template rejects a prompt, the tokens come from another tokenizer, or a trajectory has
                several turns.
        """
        if several := [t.source for t in trajectories if len(t.turns) > 1]:
            raise UserError(f"{several[0]}: a step-value model scores completions of one turn, but this is an episode")
        return [self._rewards(t, values) for t, values in zip(trajectories, self.values(trajectories), strict=True)]

    def _rewards(self, trajectory: Trajectory, values: list[float]) -> list[float]:
        """The rewards of a solution, computed from the values of its prefixes."""
        tokens = trajectory.tokens.tolist()
        if not tokens:  # an environment failed before the first turn
            return []
        self._check_tokenizer(trajectory)
        value_at = {t: values[t] for t in step_ends(self.tokenizer, tokens, self.delimiter)}
        if not trajectory.stopped or self._unfinished(tokens, value_at):
            value_at[len(tokens) - 1] = FAILED
        rewards, before = [0.0] * len(tokens), 0.0
        for t, value in value_at.items():
            rewards[t] = value - before if self.steps == "differences" else value
            before = value
        return rewards

    def _check_tokenizer(self, trajectory: Trajectory) -> None:
        text = self._decoded(trajectory.tokens.tolist())
        if text != trajectory.text:
            raise UserError(
                f"{trajectory.source}: the value model's tokenizer decodes {text[:80]!r}, but the policy wrote "
                f"{trajectory.text[:80]!r}: a step reward needs a value model with the policy's tokenizer"
            )

    def _unfinished(self, tokens: list[int], value_at: dict[int, float]) -> bool:
        """Whether text follows the last step, or there are no steps."""
        return not value_at or bool(self._decoded(tokens[max(value_at) + 1 :]))

    def _decoded(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    @torch.no_grad()
    def values(self, trajectories: list[Trajectory]) -> list[list[float]]:
        """V of each prefix of each solution: one number per sampled token."""
        prompts = Renderer(self.tokenizer).prompts([Prompt(t.prompt, {}, t.source, t.tools) for t in trajectories])
        examples = [_example(prompt, t) for prompt, t in zip(prompts, trajectories, strict=True)]
        values: list[list[float]] = [[] for _ in trajectories]
        passes = self.layout.passes(
            lambda batch: self.network.values(batch).flatten().tolist(), examples, self.token_budget
        )
        for group, batch, flat in passes:
            for i, end in zip(group, batch.ends.tolist(), strict=True):
                values[i] = flat[end + 1 - len(trajectories[i].tokens) : end + 1]
        return values


def _example(prompt: tuple[int, ...], trajectory: Trajectory) -> Example:
    """A prompt rendered with this tokenizer, followed by the sampled ids."""
    tokens = np.concatenate([np.asarray(prompt, np.int64), trajectory.tokens])
    return Example((Sequence(tokens, np.arange(len(tokens)) >= len(prompt), trajectory.source),))
