"""A chat with a model in the terminal, which shows tokens as they are generated."""

from __future__ import annotations

import contextlib
import importlib
import io
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import typer

from burnish.errors import UserError, did_you_mean
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Request, request_seed
from burnish.generate.sampling import Sampling
from burnish.generate.stopping import eos_ids
from burnish.models.forward import unwrap
from burnish.models.loaded import Loaded
from burnish.render.renderer import Renderer
from burnish.terminal import check_typed, visible
from burnish.types import Message

HELP = {
    "/reset": "clear the conversation, but keep the system message",
    "/system TEXT": "set the system message, or remove it if TEXT is empty",
    "/help": "show this list",
    "/exit": "leave, like Ctrl-D; Ctrl-C stops an answer",
}


# --- tokens -------------------------------------------------------------------------------------------------------


def pieces(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
    """Decode tokens as they arrive. A character that spans several tokens is held back until it is complete."""

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    ids: list[int] = []
    # Decode each piece together with the previous one, because some tokenizers drop a leading space.
    start, done = 0, 0
    for token in tokens:
        ids.append(token)
        before, whole = decode(ids[start:done]), decode(ids[start:])
        if len(whole) > len(before) and not whole.endswith("\ufffd"):
            yield whole[len(before) :]
            start, done = done, len(ids)
    if rest := decode(ids[start:])[len(decode(ids[start:done])) :]:
        yield rest


# --- the conversation ---------------------------------------------------------------------------------------------


@dataclass
class Talk:
    """The state of a conversation: ``Talk(loaded, Sampling(temperature=0.7), system="Be brief.")``."""

    loaded: Loaded
    sampling: Sampling
    seed: int = 0
    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    answers: int = 0
    stopped: bool = False
    ended_by: str | None = None

    def __post_init__(self) -> None:
        self.generator = LocalGenerator(self.loaded.model, self.loaded.tokenizer, slots=1, frozen=True)
        config = unwrap(self.loaded.model).config.get_text_config(decoder=True)
        self.context: int | None = getattr(config, "max_position_embeddings", None)

    def prompt(self, turns: list[Message]) -> tuple[int, ...]:
        """Tokens of the system message and the turns, up to the start of the model's answer."""
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return Renderer(self.loaded.tokenizer).prompt((*system, *turns))

    def fit(self, turns: list[Message]) -> tuple[tuple[int, ...], int]:
        """The prompt's tokens, and the number of oldest messages (whole turns) dropped to leave room for an answer.

        Raises:
            UserError: if the last message alone fills the context window, or the template rejects the messages.
        """
        starts = [i for i, message in enumerate(turns) if message["role"] == "user"]
        for start in starts:
            tokens = self.prompt(turns[start:])
            if self.context is None or len(tokens) + min(self.sampling.longest, self.context // 4) <= self.context:
                return tokens, start
        assert self.context is not None
        if len(tokens) >= self.context:
            raise UserError(
                f"{len(tokens)} tokens do not fit the context window of {self.context}: shorten the message"
            )
        return tokens, starts[-1]

    def answer(self, question: str) -> Iterator[str]:
        """Yield the text of the answer while it is generated, and notes in brackets.

        Setting ``stopped`` ends the answer. The text generated so far stays in the conversation.

        Raises:
            UserError: as in ``fit``. The question is then not added to the conversation.
        """
        asked: Message = {"role": "user", "content": question}
        prompt, start = self.fit([*self.turns, asked])
        dropped = [message["content"] for message in self.turns[:start] if message["role"] == "user"]
        self.turns = [*self.turns[start:], asked]
        if dropped:
            short = visible(", ".join(map(_short, dropped)))
            yield _note(f"the context of {self.context} tokens is full; dropped: {short}")
            yield "\n"
        tokenizer, sampled = self.loaded.tokenizer, list[int]()
        begun, note = False, ""
        for piece in pieces(tokenizer, self._sampled(prompt, sampled)):
            shown = piece if begun else piece.lstrip()
            begun = begun or bool(shown)
            yield visible(shown)
        if self.ended_by is None:
            note = "stopped"
        elif self.ended_by != "stop":
            note = f"truncated after {len(sampled)} tokens" + (
                ": the context is full" if self.ended_by == "context" else ""
            )
        self.answers += 1
        self.turns.append({"role": "assistant", "content": tokenizer.decode(sampled, skip_special_tokens=True).strip()})
        yield f" {_note(note)}\n" if note else "\n"

    def _sampled(self, prompt: tuple[int, ...], sampled: list[int]) -> Iterator[int]:
        """Yield sampled tokens and append them to ``sampled``. Sets ``ended_by``, which is None if stopped."""
        ends = frozenset(eos_ids(self.loaded.model, self.loaded.tokenizer))
        request = Request(prompt, request_seed(self.seed, self.answers, 0, 0), self.sampling, ends, keep_cache=True)
        (handle,) = self.generator.submit([request], self.generator.version)
        self.ended_by = None
        while not self.stopped and self.ended_by is None:
            done = self.generator.poll(0)
            if done:
                self.ended_by = done[0][1].finish_reason
            tokens = done[0][1].tokens.tolist() if done else self.generator.tokens_so_far(handle)
            sampled.append(tokens[-1])
            yield tokens[-1]
        self.generator.cancel()


def _note(text: str) -> str:
    return f"[{text}]"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 40 else f"{line[:37]}...")


# --- the terminal -------------------------------------------------------------------------------------------------


def run(talk: Talk) -> None:
    """Read questions and print answers until the end of the input or ``/exit``."""
    with contextlib.suppress(ImportError):  # line editing and history, if Python was built with them
        importlib.import_module("readline")
    if isinstance(sys.stdin, io.TextIOWrapper):  # a strict one would lose the lines after bytes that are not text
        sys.stdin.reconfigure(errors="surrogateescape")
    terminal = sys.stdin.isatty()
    if terminal:
        typer.echo(f"{talk.loaded.reference}  (/help lists the commands; Ctrl-D leaves)")
    while True:
        try:
            line = check_typed(input("> " if terminal else ""), "this line").strip()
            if line == "/exit":
                return
            if line.startswith("/"):
                typer.echo(_command(talk, line))
            elif line:
                _speak(talk, line)
        except UserError as error:
            typer.echo(_note(str(error)))
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.echo("\n[Ctrl-D or /exit leaves]")


def _speak(talk: Talk, line: str) -> None:
    """Print an answer. Ctrl-C stops it between two tokens."""

    def stop(*_: Any) -> None:
        talk.stopped = True

    talk.stopped = False
    before = signal.signal(signal.SIGINT, stop)
    try:
        for text in talk.answer(line):
            typer.echo(text, nl=False)
    except UserError as error:
        typer.echo(visible(_note(str(error))))
    finally:
        signal.signal(signal.SIGINT, before)


def _command(talk: Talk, line: str) -> str:
    name, _, rest = line.partition(" ")
    if name == "/reset":
        talk.turns.clear()
        return _note("conversation cleared")
    if name == "/system":
        talk.system = rest.strip() or None
        return _note("system message set" if talk.system else "no system message")
    if name == "/help":
        return "\n".join(f"{command:<14} {what}" for command, what in HELP.items())
    names = [command.split()[0] for command in HELP]
    return _note(f"unknown command {name}" + (did_you_mean(name, names) or f"; commands are {', '.join(names)}"))
