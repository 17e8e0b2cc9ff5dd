"""Burnish against itself with one thing taken away at a time.

``python benchmarks/ablations.py sft dpo --repeats 3`` alternates whole runs with runs without each thing that a method
has, and writes to ``benchmarks/results.json``. To add one, add a line to ``ABLATIONS``.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import run


class Without(NamedTuple):
    """What is taken away, of which methods, and how: arguments of ``Trainer``, settings of the method, or a patch."""

    what: str
    methods: tuple[str, ...]
    trainer: dict[str, Any] = {}  # noqa: RUF012
    settings: dict[str, Any] = {}  # noqa: RUF012
    patch: Callable[[], None] = lambda: None


def unsorted() -> None:
    """Micro-batches take rows as they come, under the same budget."""
    from burnish.models import layout

    def in_order(examples: list[Any], budget: int | None, **_: Any) -> list[list[int]]:
        groups: list[list[int]] = [[]]
        for i in range(len(examples)):
            sequences = [sequence for j in [*groups[-1], i] for sequence in examples[j].sequences]
            if groups[-1] and max(len(s.tokens) for s in sequences) * len(sequences) > (budget or math.inf):
                groups.append([])
            groups[-1].append(i)
        return groups

    layout.micro_batches = in_order


def products_of_torch() -> None:
    """Linear layers as they are in PyTorch."""
    from burnish.kernels import linear

    linear.has_onednn = lambda: False


def attention_of_torch() -> None:
    """Packed attention is a call of PyTorch's kernel for each row, in float32."""
    from burnish.kernels import grouped

    grouped.fits = lambda dtype, device: False


def padded_attention_of_torch() -> None:
    """Attention of padded rows is in bfloat16."""
    from burnish.kernels import attention

    attention.sdpa = attention.sdpa_attention_forward


def layers_of_peft() -> None:
    """LoRA layers are peft's."""
    from burnish.kernels import lora

    lora.LoraLinear.forward = lora.lora.Linear.forward  # type: ignore[method-assign]


def plain_weights() -> None:
    """Models sample with their weights as they are."""
    from burnish.kernels import blocked

    blocked.copies = lambda model, max_bytes: {}


def wide_logits() -> None:
    """Logits in bfloat16 are converted to float32 as a whole."""
    from burnish.models import forward

    narrow = forward.head
    forward.head = lambda model, wide=True: narrow(model)


def head_everywhere() -> None:
    """The head runs on every token that has one before it."""
    from burnish.models import forward

    at_learned = forward.at_learned

    def at_all(function: Any, hidden: Any, batch: Any, logits: int) -> list[Any]:
        everywhere = dataclasses.replace(batch, learned=(batch.positions > 0).flatten().nonzero()[:, 0])
        return [x.where(batch.loss_mask, 0.0) for x in at_learned(function, hidden, everywhere, logits)]

    forward.at_learned = at_all


ROWS = ("sft", "dpo", "reward")
APART = {"packed": False, "token_budget": 10**9, "shared_prompts": False}
ABLATIONS = {
    "products": Without("oneDNN's products: PyTorch's own", (*ROWS, "grpo", "ppo"), patch=products_of_torch),
    "packing": Without("packed rows: padded ones, sorted by length", (*ROWS, "grpo"), {"packed": False}),
    "sorting": Without("packed rows and their order by length", ROWS, {"packed": False}, patch=unsorted),
    "budget": Without("a token budget: the step is one micro-batch", ROWS, {"token_budget": 10**9}),
    "sharing": Without("prompts that run once", ("dpo", "reward", "grpo"), {"shared_prompts": False}),
    "sampled": Without(
        "the sampler's log-probabilities: another pass",
        ("grpo", "ppo"),
        settings={"correction": {"mode": "truncate", "cap": 1e9}},
    ),
    "copies": Without("copies of the weights for sampling", ("grpo", "ppo"), patch=plain_weights),
    "precomputed": Without("the reference worked out once", ("dpo",), settings={"reference": "live"}),
    "head": Without("the head on learned tokens only", ("sft", "dpo"), patch=head_everywhere),
    "all": Without("all of this but oneDNN: one padded batch", ("sft", "dpo"), APART, patch=head_everywhere),
}

IN_HALF = {
    "attention": Without("grouped attention: PyTorch's in float32, row by row", ("sft",), patch=attention_of_torch),
    "padded": Without("attention of padded rows in float32", ("reward",), patch=padded_attention_of_torch),
    "lora": Without("Burnish's LoRA layers: those of peft", ("sft",), patch=layers_of_peft),
    "logits": Without("logits in bfloat16: converted to float32", ("sft",), patch=wide_logits),
}
"""What is taken away in bfloat16 (``precision.py --ablations``)."""

IN_DECODING = {
    "blocked": Without("copies of the weights in oneDNN's layout", ("decode",), patch=plain_weights),
}
"""What is taken away of decoding, in float32 and in bfloat16 (``precision.py --ablations``)."""


def main() -> None:
    """Read the command line, run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=["sft", "dpo", "grpo"])
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    with run.models(options.vocabulary) as folder:
        for method in options.methods:
            named = [name for name, one in ABLATIONS.items() if method in one.methods]
            pairs: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {name: [] for name in named}
            for _ in range(options.repeats if named else 0):
                start = (method, folder, options.vocabulary, "--steps", options.steps)
                whole = run.side("burnish", *start)
                for name in named:
                    pairs[name].append((whole, run.side("burnish", *start, "--without", name)))
            found = []
            for name in named:
                speeds = [b["tokens"] / b["cpu"] / a["tokens"] * a["cpu"] for a, b in pairs[name]]
                memory = median(b["peak"] / a["peak"] for a, b in pairs[name])
                what = ABLATIONS[name].what
                found.append({"without": what, "speed": median(speeds), "memory": memory})
                print(f"{method:7} {what:45} speed {median(speeds):5.2f} x  memory {memory:5.2f} x", flush=True)
            if found:
                where = {"method": method, "vocabulary": options.vocabulary, "machine": run.machine()}
                run.write(f"ablations-{method}-{options.vocabulary}", where | {"ablations": found})


if __name__ == "__main__":
    main()
