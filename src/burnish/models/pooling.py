"""Which token of a text a sequence classifier scores: as plain transformers does it, and as Burnish does.

A causal classifier computes logits at every position and returns those of one of them. Transformers finds this position
by the pad id in the config, so the score of a text may depend on padding. Burnish uses the last token of the text.

To find the position without any weights, ``replace_backbone`` makes the hidden state of each position the number of the
position. The code of transformers and of Burnish then returns the position that it reads instead of a score.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from burnish.models.batching import collate
from burnish.models.forward import scores
from burnish.types import Example, Sequence

Padding = Literal["alone", "alone, padded", "batch, padded right", "batch, padded left"]
PADDINGS: tuple[Padding, ...] = ("alone", "alone, padded", "batch, padded right", "batch, padded left")


class _Positions(nn.Module):
    """Replaces a backbone. The hidden state of each position is its number."""

    def __init__(self) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(()))  # its dtype is the dtype of the backbone

    def forward(self, input_ids: Tensor, *_: Any, **__: Any) -> BaseModelOutputWithPast:
        rows, length = input_ids.shape
        numbers = torch.arange(length, dtype=torch.float32).expand(rows, length)
        return BaseModelOutputWithPast(last_hidden_state=numbers.unsqueeze(-1))  # type: ignore[arg-type]


def replace_backbone(model: PreTrainedModel) -> PreTrainedModel:
    """Make the score of a causal classifier the position that it is read at. The model may be on the meta device."""
    setattr(model, model.base_model_prefix, _Positions())
    model.score = nn.Identity()
    return model.eval()


@torch.no_grad()
def plain_score(model: PreTrainedModel, text: list[int], pad_id: int, padding: Padding) -> float:
    """The first logit that plain transformers gives to a text.

    Args:
        model: a sequence classifier.
        text: the token ids of the text.
        pad_id: the token to pad with.
        padding: the text by itself or in a batch with a longer one, without padding or with as much padding as text.

    Raises:
        ValueError: transformers refuses the batch.
    """
    longer, pad, ones, zeros = text + text, [pad_id] * len(text), [1] * len(text), [0] * len(text)
    rows, masks = {
        "alone": ([text], [ones]),
        "alone, padded": ([text + pad], [ones + zeros]),
        "batch, padded right": ([text + pad, longer], [ones + zeros, ones + ones]),
        "batch, padded left": ([pad + text, longer], [zeros + ones, ones + ones]),
    }[padding]
    return model(input_ids=torch.tensor(rows), attention_mask=torch.tensor(masks)).logits[0, 0].item()


@torch.no_grad()
def burnish_score(model: PreTrainedModel, text: list[int], pad_id: int) -> float:
    """The first logit that Burnish gives to a text, in a batch with a longer one."""
    rows = [Example((Sequence(ids, (False,) * len(ids), "text"),)) for ids in (text, text + text)]
    return scores(model, collate(rows, pad_id))[0].item()


def plain_position(model: PreTrainedModel, text: list[int], pad_id: int, padding: Padding) -> int:
    """The position in the text that plain transformers reads. It is negative or beyond the text if that is padding.

    ``model`` is the result of ``replace_backbone``; otherwise as ``plain_score``.
    """
    position = round(plain_score(model, text, pad_id, padding))
    return position - len(text) if padding == "batch, padded left" else position


def burnish_position(model: PreTrainedModel, text: list[int], pad_id: int) -> int:
    """The position in the text that Burnish reads. ``model`` is the result of ``replace_backbone``."""
    return round(burnish_score(model, text, pad_id))


def positions_of_encoder(model: PreTrainedModel, text: list[int]) -> list[int] | None:
    """The positions whose last hidden states an encoder's logits depend on, found by gradients.

    ``[0]`` if the encoder reads the first token, all positions if it averages. None if the model does not return its
    hidden states.
    """
    ids = torch.tensor([text])
    outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
    if not outputs.get("hidden_states"):
        return None
    (gradient,) = torch.autograd.grad(outputs.logits.sum(), outputs.hidden_states[-1], allow_unused=True)
    return None if gradient is None else gradient[0].abs().sum(-1).nonzero().flatten().tolist()
