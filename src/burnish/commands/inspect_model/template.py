"""The section on the chat template: its family, and what it does to turns, prefixes and reasoning."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from burnish.commands.inspect_model.description import Description
from burnish.errors import UserError
from burnish.render.renderer import Renderer
from burnish.render.templates import PLAIN_TEMPLATES, ChatTemplate
from burnish.types import Conversation, Message

QUESTION, ANSWER = "What is 2 + 3?", "2 + 3 is 5."
# Families of chat templates, by what they write; more special ones first.
FAMILIES = {
    "Harmony (gpt-oss)": "<|channel|>",
    "ChatML": "<|im_start|>",
    "Llama 3": "<|start_header_id|>",
    "Llama 4": "<|header_start|>",
    "Gemma": "<start_of_turn>",
    "Command R": "<|START_OF_TURN_TOKEN|>",
    "DeepSeek": "<\uff5cUser\uff5c>",
    "Granite": "<|start_of_role|>",
    "Phi": "<|end|>",
    "Zephyr": "<|user|>",
    "Llama 2 or Mistral": "[INST]",
    "Alpaca": "### Instruction",
    "Vicuna": "USER:",
}


def messages(*contents: str) -> tuple[Message, ...]:
    """A conversation of the user and the assistant in turn."""
    return tuple(Message(role="assistant" if i % 2 else "user", content=content) for i, content in enumerate(contents))


def describe_template(tokenizer: PreTrainedTokenizerBase, described: Description) -> ChatTemplate | None:
    """Describe the chat template. Returns None if there is none that works."""
    section = "chat template"
    try:
        template = ChatTemplate(tokenizer)
    except UserError:
        described.add(section, {"family": f"none: a recipe has to set template: {' or '.join(PLAIN_TEMPLATES)}"})
        return None
    chat = messages(QUESTION, ANSWER, QUESTION, ANSWER)
    try:
        texts = {n: template.render(chat[:n], "a sample conversation").text for n in (2, 4)}
        prompts = {
            n: template.render(chat[:n], "a sample conversation", add_generation_prompt=True).text for n in (1, 3)
        }
    except UserError as error:
        described.warnings.append(str(error))
        described.add(section, {"family": "unknown: it cannot render a conversation"})
        return None
    described.add(
        section,
        {
            "family": _family(template, texts[4]),
            "marks the assistant": "yes" if template.marks_generation else "no",
            "ends turns": _end_of_turns(tokenizer, chat),
            "keeps prefixes": _kept(
                texts[4].startswith(texts[2]), all(texts[4].startswith(text) for text in prompts.values())
            ),
            "keeps reasoning of earlier turns": _kept_reasoning(template),
        },
    )
    return template


def _family(template: ChatTemplate, text: str) -> str:
    if template.plain:
        return next(name for name, source in PLAIN_TEMPLATES.items() if source == template.source)
    return next((family for family, mark in FAMILIES.items() if mark in text), "unknown")


def _end_of_turns(tokenizer: PreTrainedTokenizerBase, chat: tuple[Message, ...]) -> str:
    """The token that ends the assistant's turns, as the token after the learned text of a turn."""
    row = Conversation(chat[:2], None, "a sample conversation")
    try:
        renderer = Renderer(tokenizer)
        with_end, without = (renderer.conversation(row, "last", learn_eos=learned) for learned in (True, False))
    except UserError as error:
        return f"no: {error}"
    ends = with_end.tokens[with_end.loss_mask & ~without.loss_mask].tolist()
    return f"yes, with {', '.join(repr(str(tokenizer.decode([token]))) for token in ends)}"


def _kept(turns: bool, prompts: bool) -> str:
    if turns and prompts:
        return "yes"
    lost = [what for what, kept in (("turns", turns), ("prompts", prompts)) if not kept]
    return f"no: earlier {' and '.join(lost)} are written in another way when more follows"


def _kept_reasoning(template: ChatTemplate) -> str | None:
    """Whether the reasoning in an earlier turn stays. None if the template rejects it."""
    chat = messages(QUESTION, f"<think>\nseven\n</think>\n\n{ANSWER}", QUESTION, ANSWER)
    try:
        return "yes" if "seven" in template.render(chat, "a sample conversation").text else "no"
    except UserError:
        return None
