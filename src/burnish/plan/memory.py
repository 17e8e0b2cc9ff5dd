"""The memory of one process, as sums of bytes.

There are three moments of interest: an optimizer step of training, sampling, and merging the adapter at the end. Models
that only one of the first two needs stay in memory in the other one, since nothing is offloaded in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from burnish.models.forward import LOGITS_AT_ONCE

FLOAT32 = 4


@dataclass(frozen=True)
class ModelSize:
    """The bytes of a model: ``ModelSize("policy", weights=538e6, rest=113e6, layer=14e6, trained=538e6, ...)``."""

    name: str
    weights: int
    """All weights."""
    rest: int = 0
    """Weights outside of the layers: embeddings, the last norm, and the head."""
    layer: int = 0
    """Weights of the largest layer."""
    trained: int = 0
    """Weights that are trained. Their gradients take as much."""
    trained_rest: int = 0
    """Trained weights outside of the layers."""
    trained_layer: int = 0
    """Trained weights of the largest layer."""
    states: int = 0
    """State of the optimizer."""
    embedding: int = 0
    """The embeddings, if they are trained."""
    tied: bool = False
    """Whether the embeddings are also the head."""


@dataclass(frozen=True)
class Sampling:
    """What sampling needs: ``Sampling(cache=2.1e9, passes=3e8, copy=0)``."""

    cache: int
    """Keys and values of the completions that are decoded together."""
    passes: int
    """Logits of a decoding pass, or the activations of the pass over the prompts, whichever is larger."""
    copy: int = 0
    """An unsharded copy of the policy, or that of a generator in another process."""
    blocked: int = 0
    """Copies of the weights of linear layers in oneDNN's layout, which exist only during sampling on a CPU."""


@dataclass(frozen=True)
class Needs:
    """What one process of a stage needs, in bytes. Without ``trained`` models, the stage only samples or measures."""

    trained: tuple[ModelSize, ...] = ()
    """The models that run and learn in a training step, such as the policy and a separate critic."""
    frozen: tuple[ModelSize, ...] = ()
    """Models that are sharded with the trained ones, except for the weights outside of their layers."""
    whole: tuple[ModelSize, ...] = ()
    """Models that every process keeps whole, such as reward models."""
    activations: int = 0
    """What autograd keeps of the layers in the passes of a micro-batch."""
    casts: int = 0
    """Weights in the dtype of autocast, which autograd keeps too."""
    logits: int = 0
    """What the head needs at its peak (``logits_bytes``)."""
    micro_batches: int = 1
    """Micro-batches of an optimizer step in this process."""
    sampling: Sampling | None = None
    merged: int = 0
    """The policy in float32, if it is loaded again at the end, so that its adapter is merged in that precision."""
    processes: int = 1
    """Number of processes over which weights are sharded, if they are."""
    sharded: bool = False
    gathered: float = 1.0
    """The size of gathered weights, as a share of that of the shards: 0.5 if float32 is gathered in bfloat16."""
    reserved: int = 0
    """What the process needs before it loads a model."""


@dataclass(frozen=True)
class Memory:
    """The bytes of a process by phase and part: ``Memory({"training": {"policy": 538e6, "gradients": 538e6}})``."""

    phases: Mapping[str, Mapping[str, int]]

    @property
    def totals(self) -> dict[str, int]:
        """The sum of each phase."""
        return {phase: sum(parts.values()) for phase, parts in self.phases.items()}

    @property
    def peak(self) -> int:
        """The largest sum."""
        return max(self.totals.values())


def memory(needs: Needs) -> Memory:
    """The memory of a process in each of its phases."""
    phases = {}
    if needs.trained:
        phases["training"] = _held(needs) | _step(needs) | {"reserved": needs.reserved}
    if needs.sampling is not None or not needs.trained:
        phases["sampling"] = _held(needs) | _sampling(needs) | {"reserved": needs.reserved}
    if needs.merged:
        phases["merging"] = _held(needs) | {needs.trained[0].name: needs.merged} | {"reserved": needs.reserved}
    return Memory({phase: {name: size for name, size in parts.items() if size} for phase, parts in phases.items()})


def _held(needs: Needs) -> dict[str, int]:
    """What a process keeps all the time: weights and the optimizer's state.

    Of a sharded trained model with w bytes on n processes, each keeps w / n; of a frozen one with r bytes outside of
    its layers, (w - r) / n + r.
    """
    n = needs.processes if needs.sharded else 1
    parts: dict[str, int] = {}
    for model in needs.trained:
        parts[model.name] = -(-model.weights // n)
    for model in needs.frozen:
        parts[model.name] = -(-(model.weights - model.rest) // n) + model.rest if needs.sharded else model.weights
    for model in needs.whole:
        parts[model.name] = parts.get(model.name, 0) + model.weights
    parts["optimizer"] = -(-sum(model.states for model in needs.trained) // n)
    if needs.sampling is not None:
        parts["generation copy"] = needs.sampling.copy
    return parts


def _step(needs: Needs) -> dict[str, int]:
    """What an optimizer step adds at its peak.

    With gradients G, activations A, weights C that were cast, logits L and embeddings E, this is the larger of two
    moments of the backward pass: its start, A + C + L + G, and its end, G + k E. In the only micro-batch of a step,
    gradients do not exist at the start, so G counts there only if there are several. Before the gradient E of a pass is
    added to the existing one, it needs memory of its own, once for the head and once for the embeddings: k = 2 if these
    are tied, else 1.

    FSDP2 keeps shards of gradients, G / n. It gathers the weights outside of the layers during the whole pass, and two
    layers at a time: one that runs, and the next one. Their whole gradients exist until they are summed over
    processes, those of a layer in two copies.
    """
    n = needs.processes if needs.sharded else 1
    gradients = -(-sum(model.trained for model in needs.trained) // n)
    parts = {"gathered layers": 0}
    if needs.sharded:
        share = needs.gathered
        rest = sum(math.ceil(share * model.rest) + model.trained_rest for model in needs.trained)
        layer = max(math.ceil(share * model.layer) + model.trained_layer for model in needs.trained)
        parts["gathered layers"] = rest + 2 * layer
    ends = max(((1 + model.tied) * model.embedding for model in needs.trained), default=0)
    start = {"activations": needs.activations, "weights that are cast": needs.casts, "logits": needs.logits}
    if needs.micro_batches > 1:
        start["gradients"] = gradients
    end = {"gradients": gradients + (0 if needs.sharded else ends)}
    return parts | max(start, end, key=lambda part: sum(part.values()))


def _sampling(needs: Needs) -> dict[str, int]:
    if needs.sampling is None:
        return {}
    parts = {"cache": needs.sampling.cache, "logits and prompts": needs.sampling.passes}
    return parts | {"copies of linear weights": needs.sampling.blocked}


def logits_bytes(tokens: int, vocabulary: int, head: int, *, item: int = FLOAT32, filtered: bool = False) -> int:
    """The bytes that the head needs at its peak, with V logits of i bytes for each of N learned tokens.

    Logits are computed in chunks of at most 2^26 of them. If one chunk is enough, it is kept for the backward pass. Its
    gradient is written over it, and then exists beside the gradient of the head's own weights: i N V + w. Otherwise
    each chunk of n tokens is computed again in the backward pass, and the same holds for n. The loss converts a few
    rows at a time to float32, which is not counted.

    Logits that are filtered are converted to float32 and kept beside the result, and the gradient has memory of its
    own: 8 N V + max(4 N V, w), and where they are converted i N V more.

    Args:
        tokens: number of learned tokens N.
        vocabulary: number of logits V of a token.
        head: bytes w of the weights of the head, if they are trained; else 0.
        item: bytes i of a logit as the head computes it.
        filtered: whether top-k or top-p filters them.
    """
    logits = min(tokens, max(1, LOGITS_AT_ONCE // vocabulary)) * vocabulary
    if not filtered:
        return item * logits + head
    converted = item * logits if item < FLOAT32 else 0
    return 2 * FLOAT32 * logits + max(FLOAT32 * logits + converted, head)


def state_bytes(optimizer: str, arguments: str | None, trained: int, count: int) -> int:
    """The bytes of an optimizer's state.

    Args:
        optimizer: its name in ``trainer.optim``.
        arguments: ``trainer.optim_args``.
        trained: bytes of the trained weights.
        count: number of trained weights.

    Returns:
        The number of states of a weight (2 for Adam) times the bytes of a state: those of a weight, or 1 in 8 bits and
        0.5 in 4 bits. What is not known, such as the rank of galore, counts as Adam.
    """
    if optimizer in ("lomo", "adalomo", "adafactor"):  # adafactor keeps sums of rows and columns
        return 0
    states = 2
    if optimizer == "sgd":
        states = int("momentum" in (arguments or ""))
    elif "ademamix" in optimizer:
        states = 3
    elif optimizer.startswith(("adagrad", "rmsprop", "lion", "paged_lion")):
        states = 1
    if "4bit" in optimizer:
        return states * count // 2
    return states * count if "8bit" in optimizer else states * trained
