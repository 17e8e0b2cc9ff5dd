"""Log-probabilities of sequences under a language model, in as few forward passes as fit."""

from __future__ import annotations

from torch import nn

from burnish.models.forward import PLAIN, SamplingTransform, evaluating, hidden_states, token_logprobs
from burnish.models.layout import Layout
from burnish.types import Example, Sequence

TOKEN_BUDGET = 8192
"""Maximum number of tokens, including padding, in one forward pass."""


def logprobs(
    model: nn.Module, sequences: list[Sequence], transform: SamplingTransform = PLAIN, budget: int = TOKEN_BUDGET
) -> list[list[float]]:
    """Log-probabilities of the tokens that each sequence's loss mask selects."""
    results: list[list[float]] = [[] for _ in sequences]
    examples = [Example((sequence,)) for sequence in sequences]
    layout = Layout([model])
    with evaluating(model):
        for group, batch, values in layout.passes(
            lambda batch: token_logprobs(model, hidden_states(model, batch), batch, transform, "off")[0],
            examples,
            budget,
        ):
            learned = values.flatten()[batch.learned].split([int(sequences[i].loss_mask.sum()) for i in group])
            for i, mine in zip(group, learned, strict=True):
                results[i] = mine.tolist()
    return results
