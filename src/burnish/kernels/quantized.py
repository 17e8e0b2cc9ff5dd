"""LoRA layers on weights in 4 bits. Importing this file needs bitsandbytes."""

from __future__ import annotations

from peft.tuners.lora.bnb import Linear4bit  # pyright: ignore[reportAttributeAccessIssue]

from burnish.kernels.lora import OneRounding


class LoraLinear4bit(OneRounding, Linear4bit):
    """``peft.tuners.lora.Linear4bit`` with one rounding in half precision."""
