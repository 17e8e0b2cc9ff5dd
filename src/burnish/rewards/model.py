"""Any sequence-classification checkpoint as a reward: its raw logit on the prompt with the answer."""

from __future__ import annotations

import difflib
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from burnish.errors import UserError
from burnish.kernels.linear import use_onednn
from burnish.models.forward import scores, unwrap
from burnish.models.layout import Layout
from burnish.render.chat import Renderer, Truncation, answer, results
from burnish.types import Example, Trajectory

TOKEN_BUDGET = 8192
"""Tokens, padding included, that are scored in one forward pass."""


class ModelReward:
    """Scores answers by a reward model or a classifier: the raw logit of one label, never a sigmoid or softmax.

    ``ModelReward(model, tokenizer)([Trajectory(({"role": "user", "content": "Hi"},), "Hello!", ...)])`` is ``[1.7]``. The
    answer's text is written under this tokenizer's own template, as its training rows were. What does not fit is cut
    from the prompt's oldest side.
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
            label: the name or number of the logit that is the score; None where there is only one.
            length: the longest sequence; None is what the model can take, cut from the prompt.
            normalize: give (score - mean) / std, by the mean and std of held-out scores stored with the model.
            token_budget: tokens, padding included, of one forward pass.

        Raises:
            UserError: no such label, or there are several and none is named; no mean and std to normalize by.
        """
        self.model = use_onednn(model).eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.label = find_label(unwrap(model).config, label)
        self.length = length or Truncation(
            max_length=longest(unwrap(model).config, tokenizer), too_long="truncate_left"
        )
        self.token_budget = token_budget
        self.mean, self.std = stored_scale(unwrap(model).config) if normalize else (0.0, 1.0)

    @cached_property
    def layout(self) -> Layout:
        """How answers lie in a batch."""
        pad_id: Any = self.tokenizer.pad_token_id
        return Layout([self.model], pad_id=pad_id or 0)

    def __call__(self, answers: list[Trajectory], /) -> list[float]:
        """One logit for each answer, in their order.

        Raises:
            UserError: an answer that the template refuses, or that is too long even without its prompt.
        """
        writer = Renderer(self.tokenizer)
        drafts = (answer.draft(writer, a.prompt, a.text, self.length, source=a.source) for a in answers)
        examples = [Example((sequence,)) for sequence in results(drafts)]
        found = [0.0] * len(answers)
        with torch.no_grad():
            passes = self.layout.passes(
                lambda batch: scores(self.model, batch, self.label).tolist(), examples, self.token_budget
            )
            for group, _, values in passes:
                for i, value in zip(group, values, strict=True):
                    found[i] = (value - self.mean) / self.std
        return found


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
    said = ", ".join(f"{name!r}" for name in names.values())
    if label is None:
        if len(names) > 1:
            raise UserError(f"label: the reward model has {len(names)} labels: name one of {said}")
        return 0
    if label in names:
        return int(label)
    same = [index for index, name in names.items() if name == label]
    if same:
        return same[0]
    near = difflib.get_close_matches(str(label), names.values(), 1)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {said}"
    raise UserError(f"label: the reward model has no label {label!r}: {hint}")


def longest(config: Any, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The most tokens that the model and its tokenizer were made for; None where neither says."""
    window = getattr(config.get_text_config(), "max_position_embeddings", None)
    # A tokenizer without a limit has one of 1e30.
    limits = [limit for limit in (window, tokenizer.model_max_length) if limit is not None and limit < 1e9]
    return int(min(limits)) if limits else None
