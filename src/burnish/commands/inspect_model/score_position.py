"""The section on the position of the score: which token of a sample text plain transformers and Burnish score."""

from __future__ import annotations

from typing import Any

from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from burnish.commands.inspect_model.description import Description
from burnish.commands.inspect_model.opening import READ_LIMIT, Model, model_file
from burnish.commands.inspect_model.template import ANSWER, QUESTION, messages
from burnish.errors import UserError
from burnish.models import loading, pooling
from burnish.models.heads import VALUE_HEAD
from burnish.render.renderer import Renderer
from burnish.render.solutions import step_ends
from burnish.render.templates import ChatTemplate
from burnish.types import Conversation

CLOSE = 1e-3  # rounding of a score
STEPS = ("2 + 3 = 5", "The answer is 5")


def describe_score_position(
    model: Model, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate | None, described: Description
) -> None:
    """Describe which tokens of a sample text are scored."""
    head = described.facts.get("head", {})
    if not model.classifies and "delimiter" not in head:
        return
    try:
        text = _sample(tokenizer, template)
    except UserError as error:
        described.warnings.append(str(error))
        return
    tokens = [str(tokenizer.decode([token])) for token in text]
    described.add("position of the score", {"sample": f"{str(tokenizer.decode(text))!r}: tokens 0 to {len(text) - 1}"})
    if not model.classifies:
        _describe_steps(model, tokenizer, template, described)
    elif model.is_encoder:
        _describe_encoder(model, text, tokens, described)
    else:
        _describe_pooling(model, tokenizer, text, tokens, described)


def _sample(tokenizer: PreTrainedTokenizerBase, template: ChatTemplate | None) -> list[int]:
    if template is None:
        return list(tokenizer(f"{QUESTION} {ANSWER}")["input_ids"])  # pyright: ignore[reportArgumentType]
    row = Conversation(messages(QUESTION, ANSWER), None, "a sample conversation")
    return Renderer(tokenizer).answers([row])[0].tokens.tolist()


def _describe_steps(
    model: Model, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate | None, described: Description
) -> None:
    """Describe where a step-value model is read."""
    path = model_file(model.folder, VALUE_HEAD)
    assert path is not None
    with safe_open(path, "pt") as file:
        delimiter = (file.metadata() or {})["delimiter"]
    solution = delimiter.join((*STEPS, ""))
    ids = list(tokenizer(solution, add_special_tokens=False)["input_ids"])  # pyright: ignore[reportArgumentType]
    ends = step_ends(tokenizer, tuple(ids), delimiter)
    read = ", ".join(f"{end} {str(tokenizer.decode([ids[end]]))!r}" for end in ends)
    described.add(
        "position of the score",
        {
            "sample": f"{solution!r}, after a prompt: tokens 0 to {len(ids) - 1}",
            "Burnish": f"reads a value at the last token of each step: {read}",
            "transformers": "does not read the value head",
        },
    )


def _describe_encoder(model: Model, text: list[int], tokens: list[str], described: Description) -> None:
    """Describe what an encoder pools. Burnish calls its class, so plain transformers reads the same."""
    same = "reads the same: it calls the class of transformers, with padding on the right"
    described.add("position of the score", {"transformers": "as its class pools", "Burnish": same})
    network = _loaded(model, text, described)
    if network is None:
        return
    read = pooling.positions_of_encoder(network, text)
    if read is not None:
        every = read == list(range(len(text)))
        places = "all tokens" if every else ", ".join(f"{i} {tokens[i]!r}" for i in read)
        described.add("position of the score", {"transformers": f"pools {places}, as the gradient of the logits shows"})
    described.add("position of the score", {"score of the sample": f"{pooling.burnish_score(network, text, 0):.4g}"})


def _describe_pooling(
    model: Model, tokenizer: PreTrainedTokenizerBase, text: list[int], tokens: list[str], described: Description
) -> None:
    """Describe which position plain transformers and Burnish read, and warn where they differ."""
    assert model.network is not None and model.config is not None
    pad_id: Any = tokenizer.pad_token_id
    pad = 0 if pad_id is None else pad_id
    loaded = _loaded(model, text, described)
    network = pooling.replace_backbone(model.network)

    def place(position: int, score: float | None) -> str:
        what = repr(tokens[position]) if 0 <= position < len(tokens) else "padding"
        return f"{position} {what}" + (f", score {score:.4g}" if score is not None else "")

    expected = pooling.burnish_position(network, text, pad)
    score = pooling.burnish_score(loaded, text, pad) if loaded is not None else None
    reads, refusals = {}, {}
    for padding in pooling.PADDINGS:
        try:
            position = pooling.plain_position(network, text, pad, padding)
            plain = pooling.plain_score(loaded, text, pad, padding) if loaded is not None else None
        except ValueError as error:
            reads[padding] = f"refused: {error}"
            refusals[f"plain transformers cannot score a batch: {error}"] = padding
            continue
        reads[padding] = place(position, plain)
        if position != expected:
            described.warnings.append(
                f"plain transformers reads another token than Burnish ({padding}): {place(position, plain)} instead of "
                f"{place(expected, score)}"
            )
        elif plain is not None and score is not None and abs(plain - score) > CLOSE * max(1.0, abs(score)):
            described.warnings.append(
                f"the score of plain transformers depends on padding ({padding}): {plain:.4g} instead of {score:.4g}, "
                "because the model counts positions from the padding"
            )
    described.warnings.extend(refusals)
    described.add("position of the score", {f"transformers, {padding}": read for padding, read in reads.items()})
    described.add("position of the score", {"Burnish": f"{place(expected, score)}, with any padding"})
    configured = model.config.get_text_config().pad_token_id
    if configured is None:
        described.warnings.append(
            "the config has no pad_token_id, by which transformers finds the end of a text: set it to the id of a "
            "token that no text ends with"
        )
    elif configured == tokenizer.eos_token_id:
        described.warnings.append(
            "the pad_token_id of the config is the eos token: of a text that ends with it, plain transformers reads "
            "the token before, and Burnish the last one"
        )


def _loaded(model: Model, text: list[int], described: Description) -> PreTrainedModel | None:
    """The classifier with its weights, or None if it is large or cannot be loaded."""
    size = model.stored.bytes
    if size > READ_LIMIT or not model.stored.complete:
        why = f"{size / 2**30:.1f} GiB of weights" if size > READ_LIMIT else "without all weights"
        described.add("position of the score", {"score of the sample": f"not computed ({why})"})
        return None
    if model.network is None or model.config is None or model.config.is_encoder_decoder:
        return None
    settings = model.config.get_text_config()
    if max(text) >= settings.vocab_size or 2 * len(text) > getattr(settings, "max_position_embeddings", 2 * len(text)):
        described.add(
            "position of the score", {"score of the sample": "not computed (the model cannot take the sample)"}
        )
        return None
    try:
        return loading.load_reward_model(model.folder, labels=None).eval()  # type: ignore[return-value]
    except UserError as error:
        described.warnings.append(str(error))
        return None
