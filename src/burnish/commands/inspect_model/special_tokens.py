"""The section on special tokens: of the tokenizer, of the config, and those that end a generation."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from burnish.commands.inspect_model.description import Description
from burnish.commands.inspect_model.opening import Model, model_file
from burnish.errors import UserError
from burnish.models import loading
from burnish.rewards.model import longest


def load_tokenizer(model: Model, described: Description) -> PreTrainedTokenizerBase | None:
    """The tokenizer as it is stored. None, with a warning, if it cannot be loaded."""
    own = model.adapter if model.adapter and model_file(model.adapter, "tokenizer_config.json") else model.source
    try:
        gguf = {"gguf_file": model.gguf} if model.gguf else {}
        return loading.stored_tokenizer(own, trust_remote_code=False, **gguf)
    except UserError as error:
        described.warnings.append(f"no tokenizer: {error}")
        return None


def describe_special_tokens(model: Model, tokenizer: PreTrainedTokenizerBase, described: Description) -> None:
    """Describe the special tokens. Afterwards, the tokenizer has a pad token."""
    text = model.config.get_text_config() if model.config is not None else None
    stored_pad = tokenizer.pad_token_id
    for kind in ("pad", "eos", "bos"):
        token, number = getattr(tokenizer, f"{kind}_token"), getattr(tokenizer, f"{kind}_token_id")
        known = "none in the tokenizer" if number is None else f"{token!r} ({number})"
        configured = getattr(text, f"{kind}_token_id", None)
        differs = "" if configured == number else f"; in the config: {'none' if configured is None else configured}"
        described.add("special tokens", {kind: known + differs})
    loading.choose_pad_token(tokenizer)
    if stored_pad is None:
        chosen = f"{tokenizer.pad_token!r} ({tokenizer.pad_token_id})"
        described.add(
            "special tokens", {"pad": f"{described.facts['special tokens']['pad']}; Burnish pads with {chosen}"}
        )
    same = stored_pad is not None and stored_pad == tokenizer.eos_token_id
    described.add("special tokens", {"pad equals eos": "yes" if same else "no"})
    stops = model.read("generation_config.json").get("eos_token_id")
    if stops is not None and stops != tokenizer.eos_token_id:
        described.add("special tokens", {"generation ends with": str(stops)})
    embeddings = getattr(text, "vocab_size", None)
    if isinstance(embeddings, int) and len(tokenizer) > embeddings:
        described.warnings.append(
            f"the tokenizer has {len(tokenizer):,} tokens, but the model has only {embeddings:,} embeddings: it cannot "
            "compute a text with one of the other tokens"
        )
    if model.config is not None and (limit := longest(model.config, tokenizer)) is not None:
        described.add("model", {"longest text": f"{limit:,} tokens, by the model and its tokenizer"})
