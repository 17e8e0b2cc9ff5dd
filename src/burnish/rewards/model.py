"""A sequence-classification checkpoint as a reward: its raw logit on the prompt and completion."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from burnish import kernels
from burnish.errors import UserError, did_you_mean
from burnish.models.forward import scores, unwrap
from burnish.models.heads import widen
from burnish.models.layout import Layout
from burnish.render.renderer import Renderer
from burnish.render.truncate import Truncation
from burnish.types import Conversation, Example, Trajectory

TOKEN_BUDGET = 8192
"""Maximum number of tokens, including padding, in one forward pass."""


class ModelReward:
    """Scores completions with a reward model or a classifier: the raw logit of one label, without sigmoid or softmax.

    ``ModelReward(model, tokenizer)([Trajectory.from_text("Hello!", ({"role": "user", "content": "Hi"},))])`` returns
    ``[1.7]``. The text is rendered with this tokenizer's template, like the model's training rows. If it is too long,
    the oldest part of the prompt is truncated.
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
        """Create a reward from a sequence classifier.

        Args:
            model: a transformers model for sequence classification, plain or with an adapter; it is frozen.
            tokenizer: the tokenizer that the model was trained with; it needs a chat template.
            label: the name or index of the label whose logit is the score; None if there is only one.
            length: truncation settings; None uses the model's maximum length and truncates prompts.
            normalize: return (score - mean) / std, with the mean and std of held-out scores stored with the model.
            token_budget: maximum number of tokens, including padding, in one forward pass.

        Raises:
            UserError: if the label does not exist, or is None although there are several labels; if there are no mean
                and std to normalize by.
        """
        self.model = kernels.enable(model).eval().requires_grad_(False)
        if hasattr(base := unwrap(model), "score"):
            widen(base.score)
        self.tokenizer = tokenizer
        self.label = find_label(unwrap(model).config, label)
        self.length = length or Truncation(
            max_length=longest(unwrap(model).config, tokenizer), too_long=["truncate_left", "drop"]
        )
        self.token_budget = token_budget
        self.mean, self.std = stored_scale(unwrap(model).config) if normalize else (0.0, 1.0)

    @cached_property
    def layout(self) -> Layout:
        """The layout of trajectories in a batch."""
        pad_id: Any = self.tokenizer.pad_token_id
        return Layout([self.model], pad_id=pad_id or 0)

    def __call__(self, trajectories: list[Trajectory], /) -> list[float]:
        """Return one logit per trajectory, in their order.

        Raises:
            UserError: if the template rejects a completion, or the completion is too long even without its prompt.
        """
        rows = [Conversation((*t.prompt, *t.messages), len(t.prompt), t.source, t.tools) for t in trajectories]
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
    """Mean and standard deviation of held-out scores, stored in a reward model's config by its training.

    Raises:
        UserError: if the config has none.
    """
    scale = getattr(config, "score_mean", None), getattr(config, "score_std", None)
    if None in scale or scale[1] == 0:
        raise UserError("normalize: the reward model has no stored score_mean and score_std: train it with data.eval")
    return scale  # pyright: ignore[reportReturnType]


def find_label(config: Any, label: str | int | None) -> int:
    """The index of a label, given its name in the checkpoint or its index.

    Raises:
        UserError: if the label does not exist, or is None although there are several.
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
    """The maximum sequence length of the model and its tokenizer; None if neither has a limit."""
    window = getattr(config.get_text_config(), "max_position_embeddings", None)
    # A tokenizer without a limit has model_max_length 1e30.
    limits = [limit for limit in (window, tokenizer.model_max_length) if limit is not None and limit < 1e9]
    return int(min(limits)) if limits else None
