"""Any sequence-classification checkpoint as a reward: its raw logit on the prompt with the completion."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from burnish import kernels
from burnish.errors import UserError, did_you_mean
from burnish.models.forward import scores, unwrap
from burnish.models.layout import Layout
from burnish.render.renderer import Renderer
from burnish.render.truncate import Truncation
from burnish.types import Conversation, Example, Message, Trajectory

TOKEN_BUDGET = 8192
"""Tokens, padding included, that are scored in one forward pass."""


class ModelReward:
    """Scores completions by a reward model or a classifier: the raw logit of one label, never a sigmoid or softmax.

    ``ModelReward(model, tokenizer)([Trajectory.from_text("Hello!", ({"role": "user", "content": "Hi"},))])`` gives
    ``[1.7]``. The text is rendered with this tokenizer's own template, as the training rows of the model were. If it is
    too long, the oldest part of the prompt is truncated.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        label: str | int | None = None,
        length: Truncation | None = None,
        normalize: bool = False,
        token_budget: int = TOKEN_BUDGET,
    ) -> None:
        """Take a sequence classifier and the tokenizer it was trained with.

        Args:
            model: a transformers model for sequence classification, plain or with an adapter; it is frozen.
            tokenizer: with a chat template.
            label: the name or number of the logit that is the score; None if there is only one.
            length: the longest sequence; None is the longest that the model takes, with prompts truncated.
            normalize: give (score - mean) / std, with the mean and std of held-out scores stored with the model.
            token_budget: tokens of one forward pass, padding included.

        Raises:
            UserError: no such label, or there are several and none is named; no mean and std to normalize by.
        """
        self.model = kernels.enable(model).eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.label = find_label(unwrap(model).config, label)
        self.length = length or Truncation(
            max_length=longest(unwrap(model).config, tokenizer), too_long="truncate_left"
        )
        self.token_budget = token_budget
        self.mean, self.std = stored_scale(unwrap(model).config) if normalize else (0.0, 1.0)

    @cached_property
    def layout(self) -> Layout:
        """How trajectories lie in a batch."""
        pad_id: Any = self.tokenizer.pad_token_id
        return Layout([self.model], pad_id=pad_id or 0)

    def __call__(self, trajectories: list[Trajectory], /) -> list[float]:
        """One logit for each trajectory, in their order.

        Raises:
            UserError: the template refuses a completion, or it is too long even without its prompt.
        """
        rows = [
            Conversation((*t.prompt, Message(role="assistant", content=t.text)), len(t.prompt), t.source)
            for t in trajectories
        ]
        examples = [Example((sequence,)) for sequence in Renderer(self.tokenizer).answers(rows, self.length)]
        rewards = [0.0] * len(trajectories)
        with torch.no_grad():
            passes = self.layout.passes(
                lambda batch: scores(self.model, batch, self.label).tolist(), examples, self.token_budget
            )
            for group, _, values in passes:
                for i, value in zip(group, values, strict=True):
                    rewards[i] = (value - self.mean) / self.std
        return rewards


def stored_scale(config: Any) -> tuple[float, float]:
    """Mean and standard deviation of a reward model's held-out scores, as its training stored them.

    Raises:
        UserError: there are none.
    """
    scale = getattr(config, "score_mean", None), getattr(config, "score_std", None)
    if None in scale or scale[1] == 0:
        raise UserError("normalize: the reward model has no stored score_mean and score_std: train it with data.eval")
    return scale  # pyright: ignore[reportReturnType]


def find_label(config: Any, label: str | int | None) -> int:
    """The column of the logits that a label names, by its name in the checkpoint or its number.

    Raises:
        UserError: no such label, or there are several and none is named.
    """
    names = {index: str(name) for index, name in config.id2label.items()}
    known = ", ".join(f"{name!r}" for name in names.values())
    if label is None:
        if len(names) > 1:
            raise UserError(f"label: the reward model has {len(names)} labels: name one of {known}")
        return 0
    if label in names:
        return int(label)
    same = [index for index, name in names.items() if name == label]
    if same:
        return same[0]
    hint = did_you_mean(str(label), names.values()) or f"; expected one of {known}"
    raise UserError(f"label: the reward model has no label {label!r}{hint}")


def longest(config: Any, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The most tokens that the model and its tokenizer were made for; None if neither says."""
    window = getattr(config.get_text_config(), "max_position_embeddings", None)
    # A tokenizer without a limit has one of 1e30.
    limits = [limit for limit in (window, tokenizer.model_max_length) if limit is not None and limit < 1e9]
    return int(min(limits)) if limits else None
