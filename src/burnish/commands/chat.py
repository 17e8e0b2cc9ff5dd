"""A conversation with a model in the terminal, in which tokens appear as they are made."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import typer
from torch import Tensor
from transformers.cache_utils import DynamicCache

from burnish.commands.generate import Loaded
from burnish.errors import UserError, did_you_mean
from burnish.generate.local import completes_stop, draw, request_seed
from burnish.generate.sampling import Sampling
from burnish.models.forward import backbone, evaluating, head, unwrap
from burnish.render import chat
from burnish.rl.collect import eos_ids
from burnish.types import Message

HELP = {
    "/reset": "forget the conversation; the system message stays",
    "/system TEXT": "set the system message; without TEXT, take it away",
    "/help": "this list",
    "/exit": "leave, as Ctrl-D does; Ctrl-C stops an answer",
}


# --- tokens -------------------------------------------------------------------------------------------------------


@dataclass
class Reader:
    """A model with the keys and values of the tokens that it has read: ``Reader(model).logits((1, 9, 8))``."""

    model: Any
    read: tuple[int, ...] = ()
    cache: DynamicCache | None = None

    def logits(self, tokens: tuple[int, ...]) -> Tensor:
        """Logits (1, V) of what follows; tokens that go on from those read before are read from there."""
        done = len(self.read)
        if self.cache is None or not done < len(tokens) or tokens[:done] != self.read:
            self.cache, done = DynamicCache(config=unwrap(self.model).config.get_text_config(decoder=True)), 0
        self.read = ()  # a forward pass that fails leaves a half-filled cache
        with evaluating(self.model):
            inputs = torch.tensor([tokens[done:]], device=unwrap(self.model).device)
            hidden = backbone(self.model)(input_ids=inputs, past_key_values=self.cache, use_cache=True)
            logits = head(self.model)(hidden.last_hidden_state[:, -1])
        self.read = tokens
        return logits


def sampled(
    reader: Reader, prompt: tuple[int, ...], sampling: Sampling, seed: int, limit: int, tokenizer: Any
) -> Iterator[int]:
    """Tokens of one completion, each as soon as it is drawn: the same as ``LocalGenerator`` draws with this seed."""
    ends = eos_ids(reader.model, tokenizer)
    pad = tokenizer.pad_token_id
    uniforms = torch.rand(sampling.longest, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    tokens: list[int] = []
    for uniform in uniforms[:limit]:
        logits = reader.logits((*prompt, *tokens))
        never = torch.arange(logits.shape[-1], device=logits.device)[None] == (
            -1 if pad is None or pad in ends else pad
        )
        token = int(draw(logits, uniform[None].to(logits.device), sampling, never)[0])
        tokens.append(token)
        yield token
        if token in ends or (sampling.stop and completes_stop(tokenizer, [tokens], sampling.stop)[0]):
            return


def pieces(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
    """Text of tokens as they come; a character of several tokens is held back until it is whole."""

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    ids: list[int] = []
    # A piece is decoded behind the one before it, since some tokenizers drop the space a text begins with.
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
    """A conversation so far: ``Talk(loaded, Sampling(temperature=0.7), system="Be brief.")``."""

    loaded: Loaded
    sampling: Sampling
    seed: int = 0
    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    answers: int = 0
    stopped: bool = False

    def __post_init__(self) -> None:
        self.reader = Reader(self.loaded.model)
        config = unwrap(self.loaded.model).config.get_text_config(decoder=True)
        self.context: int | None = getattr(config, "max_position_embeddings", None)

    def prompt(self, turns: list[Message]) -> tuple[int, ...]:
        """Tokens of turns below the system message, up to where the model answers."""
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return chat.prompt(self.loaded.tokenizer, (*system, *turns))

    def fit(self, turns: list[Message]) -> tuple[tuple[int, ...], int]:
        """The prompt's tokens, and how many of the oldest messages had to go, whole turns, to leave room to answer.

        Raises:
            UserError: the last message alone fills the context window, or the template refuses the messages.
        """
        starts = [i for i, message in enumerate(turns) if message["role"] == "user"]
        for start in starts:
            tokens = self.prompt(turns[start:])
            if self.context is None or len(tokens) + min(self.sampling.longest, self.context // 4) <= self.context:
                return tokens, start
        assert self.context is not None
        if len(tokens) >= self.context:
            raise UserError(f"{len(tokens)} tokens do not fit the context window of {self.context}: say it shorter")
        return tokens, starts[-1]

    def answer(self, question: str) -> Iterator[str]:
        """Text that appears while the model answers; notes stand in brackets.

        Once ``stopped`` is set the answer ends; what was said by then stays in the conversation.

        Raises:
            UserError: as ``fit`` does; the question is not kept then.
        """
        asked: Message = {"role": "user", "content": question}
        prompt, start = self.fit([*self.turns, asked])
        dropped = [message["content"] for message in self.turns[:start] if message["role"] == "user"]
        self.turns = [*self.turns[start:], asked]
        if dropped:
            yield _note(f"the context of {self.context} tokens is full; forgotten: {', '.join(map(_short, dropped))}")
            yield "\n"
        room = self.sampling.longest if self.context is None else self.context - len(prompt)
        limit = min(room, self.sampling.longest)
        tokenizer, said = self.loaded.tokenizer, []
        seed = request_seed(self.seed, self.answers, 0, 0)

        def kept() -> Iterator[int]:
            for token in sampled(self.reader, prompt, self.sampling, seed, limit, tokenizer):
                said.append(token)
                yield token
                if self.stopped:
                    return

        begun, note = False, ""
        for piece in pieces(tokenizer, kept()):
            shown = piece if begun else piece.lstrip()
            begun = begun or bool(shown)
            yield _harmless(shown)
        if self.stopped:
            note = "stopped"
        elif len(said) == limit and said[-1] not in eos_ids(self.loaded.model, tokenizer):
            note = f"cut after {limit} tokens" + (": the context is full" if limit == room else "")
        self.answers += 1
        self.turns.append({"role": "assistant", "content": tokenizer.decode(said, skip_special_tokens=True).strip()})
        yield f" {_note(note)}\n" if note else "\n"


def _note(text: str) -> str:
    return f"[{text}]"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 40 else f"{line[:37]}...")


def _harmless(text: str) -> str:
    """Text of a model that cannot act on the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


# --- the terminal -------------------------------------------------------------------------------------------------


def run(talk: Talk) -> None:
    """Read questions and write answers, until the end of the input or ``/exit``."""
    with contextlib.suppress(ImportError):  # line editing and history, where Python was built with it
        importlib.import_module("readline")
    terminal = sys.stdin.isatty()
    if terminal:
        typer.echo(f"{talk.loaded.reference}  (/help lists what you can do; Ctrl-D leaves)")
    while True:
        try:
            line = input("> " if terminal else "").strip()
            if line == "/exit":
                return
            if line.startswith("/"):
                typer.echo(_command(talk, line))
            elif line:
                _speak(talk, line)
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.echo("\n[Ctrl-D or /exit leaves]")


def _speak(talk: Talk, line: str) -> None:
    """Write an answer; Ctrl-C stops it between two tokens."""

    def stop(*_: Any) -> None:
        talk.stopped = True

    talk.stopped = False
    before = signal.signal(signal.SIGINT, stop)
    try:
        for text in talk.answer(line):
            typer.echo(text, nl=False)
    except UserError as error:
        typer.echo(_note(str(error)))
    finally:
        signal.signal(signal.SIGINT, before)


def _command(talk: Talk, line: str) -> str:
    name, _, rest = line.partition(" ")
    if name == "/reset":
        talk.turns.clear()
        return _note("forgotten")
    if name == "/system":
        talk.system = rest.strip() or None
        return _note("system message set" if talk.system else "no system message")
    if name == "/help":
        return "\n".join(f"{command:<14} {what}" for command, what in HELP.items())
    names = [command.split()[0] for command in HELP]
    return _note(f"no command {name}" + (did_you_mean(name, names) or f"; commands are {', '.join(names)}"))
