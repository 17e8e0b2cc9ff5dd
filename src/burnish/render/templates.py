"""Chat templates: plain ones for models without a template of their own, and messages rendered to text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from burnish.errors import UserError, did_you_mean
from burnish.render import worker
from burnish.types import Messages, Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A model that samples after "Answer:" begins with a space of its own; answers in files rarely do. The template writes
# exactly one space for both, so that scoring an answer sees the ids that training saw.
QUESTION_ANSWER = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{ 'System: ' + message['content'] + '\\n\\n' }}
{%- elif message['role'] == 'user' -%}{{ 'Question: ' + message['content'] + '\\n\\n' }}
{%- elif message['role'] == 'assistant' -%}{{ 'Answer:' }}
{%- generation -%}
{{- ('' if message['content'][:1] == ' ' else ' ') + message['content'] + (eos_token or '') -}}
{%- endgeneration -%}
{%- if not loop.last or add_generation_prompt -%}{{ '\\n\\n' }}{%- endif -%}
{%- else -%}{{ raise_exception('question_answer has no place for the role ' + message['role']) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Answer:' }}{%- endif -%}"""

TEXT = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{ message['content'] + (eos_token or '') }}{%- endgeneration -%}
{%- else -%}{{ message['content'] }}
{%- endif -%}
{%- endfor -%}"""

PLAIN_TEMPLATES = {"question_answer": QUESTION_ANSWER, "text": TEXT}
"""Templates for models without one, by name. ``question_answer`` writes ``Question: ...\\n\\nAnswer: ...``, preceded by
``System: ...\\n\\n`` if there is a system message; ``text`` joins the contents as they are. Both end an answer with the
tokenizer's EOS token if it has one."""

SHOWN_ROLES = 8
MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
READS = {
    "tools": re.compile(r"\btools\b"),
    "tool_calls": re.compile(r"\btool_calls\b"),
    "reasoning_content": re.compile(r"\b(reasoning_content|thinking)\b"),
}
"""How a template names what it may leave out. Templates without tools ignore these keys instead of refusing them."""


def set_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Make a plain template the tokenizer's chat template; it is saved with the tokenizer.

    Raises:
        UserError: there is no plain template of that name.
    """
    if name not in PLAIN_TEMPLATES:
        hint = did_you_mean(name, PLAIN_TEMPLATES) or f"; expected one of {', '.join(PLAIN_TEMPLATES)}"
        raise UserError(f"template: there is no plain template {name!r}{hint}")
    tokenizer.chat_template = PLAIN_TEMPLATES[name]


class NoTemplateError(UserError):
    """A tokenizer has no chat template, which concerns all rows."""


def prepare_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Start the process that renders the tokenizer's template, so that it is ready when the first row needs it."""
    if tokenizer.chat_template is not None and tokenizer.chat_template not in PLAIN_TEMPLATES.values():
        worker.start()


class Unrendered(NamedTuple):
    """Messages to render: ``Unrendered(({"role": "user", "content": "Hi"},), True, "chat.jsonl:17")``.

    With ``add_generation_prompt``, the template opens the assistant's turn after them.
    """

    messages: Messages
    add_generation_prompt: bool
    source: str
    tools: Tools = ()


class Rendered(NamedTuple):
    """Messages as text: ``Rendered("<s>Hi Yo</s>", ((6, 12),), ({"role": "user", ...}, ...), False, "chat.jsonl:17")``.

    ``generated`` are the spans of characters inside the template's ``{% generation %}`` blocks, one for each block, if
    they were asked for.
    """

    text: str
    generated: tuple[tuple[int, int], ...]
    messages: Messages
    add_generation_prompt: bool
    source: str
    tools: Tools = ()


class ChatTemplate:
    """The chat template that a tokenizer has now: ``ChatTemplate(tokenizer).render(messages, "chat.jsonl:17").text``.

    A template that does not come with Burnish is foreign code, and is rendered in another process with limits on time
    and memory (``burnish.render.worker``).

    ``marks_generation`` says whether the template marks the assistant's text by ``{% generation %}``; ``plain``
    whether it is one of ``PLAIN_TEMPLATES``.

    Raises:
        NoTemplateError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        try:
            self.source = tokenizer.get_chat_template()
        except ValueError as error:
            names = " or ".join(PLAIN_TEMPLATES)
            raise NoTemplateError(
                f"{tokenizer.name_or_path}: no chat template: set template: {names} ({error})"
            ) from error
        self.marks_generation = MARK.search(self.source) is not None
        self.plain = self.source in PLAIN_TEMPLATES.values()
        self._unread = [name for name, pattern in READS.items() if pattern.search(self.source) is None]
        # Those that the template does not name would only cost time, for every conversation.
        special: dict[str, Any] = tokenizer.special_tokens_map
        self._special_tokens = {name: token for name, token in special.items() if name in self.source}

    def render(
        self,
        messages: Messages,
        source: str,
        add_generation_prompt: bool = False,
        find_generated: bool = False,
        tools: Tools = (),
    ) -> Rendered:
        """Render messages to text; ``find_generated``: with the spans that the template marks as generated.

        Raises:
            UserError: the template refuses the messages, fails, exceeds a limit, or does not read the tools, tool calls
                or reasoning that there are.
        """
        return self.render_many([Unrendered(messages, add_generation_prompt, source, tools)], find_generated)[0]

    def render_many(self, conversations: list[Unrendered], find_generated: bool = False) -> list[Rendered]:
        """Like ``render``, for many conversations. The error is that of the first one that cannot be rendered."""
        if self._unread:
            for one in conversations:
                self._check_read(one)
        batch = worker.Batch(
            self.source,
            self._special_tokens,
            find_generated,
            [(one.messages, one.add_generation_prompt, one.tools) for one in conversations],
        )
        try:
            texts = worker.render_here(batch) if self.plain else worker.render(batch)
        except worker.RenderingError as error:
            raise UserError(_message(conversations[error.index], error.failure)) from error
        return [Rendered(text, generated, *one) for one, (text, generated) in zip(conversations, texts, strict=True)]

    def reads(self, name: str) -> bool:
        """Whether the template reads ``tools``, ``tool_calls`` or ``reasoning_content``."""
        return name not in self._unread

    def _check_read(self, conversation: Unrendered) -> None:
        """Raise a UserError for the first key of a conversation that the template would silently leave out."""
        there = {"tools"} if conversation.tools else set()
        there.update(key for message in conversation.messages if len(message) > 2 for key in message)
        for name in self._unread:
            if name in there:
                raise UserError(
                    f"{conversation.source}: the chat template does not read {name!r}, so the model would not see it:"
                    " use a template that does, or remove it from the row"
                )


def _message(conversation: Unrendered, failure: worker.Failure) -> str:
    """What is wrong, and where."""
    what = f"{conversation.source}: the chat template"
    if failure.kind == "refused":
        roles = [message["role"] for message in conversation.messages]
        shown = ", ".join(roles if len(roles) <= SHOWN_ROLES else [*roles[:SHOWN_ROLES], "..."])
        return f"{what} refuses these messages ({shown}): {failure.reason}"
    if failure.kind == "failed":
        return f"{what} failed: {failure.reason}"
    problem = f"is not valid: {failure.reason}" if failure.kind == "syntax" else failure.reason
    return f"{what} {problem}: fix it in the tokenizer's files, or set template: {' or '.join(PLAIN_TEMPLATES)}"
