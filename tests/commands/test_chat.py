"""The chat in the terminal: streaming, memory, full context windows, commands and interrupts."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from burnish import cli
from burnish.commands.chat import Talk, pieces, run
from burnish.errors import UserError
from burnish.generate.local import LocalGenerator
from burnish.generate.protocol import Request, complete, request_seed
from burnish.generate.sampling import Sampling
from burnish.models.loaded import Loaded


@pytest.fixture
def make_talk(tiny_llama: Any, tiny_tokenizer: Any) -> Any:
    def make(system: str | None = None, context: int = 256, **sampling: Any) -> Talk:
        model = tiny_llama(dtype=torch.float64, max_position_embeddings=context)
        settings: dict[str, Any] = {"max_new_tokens": 8} | sampling
        return Talk(Loaded("tiny", model, tiny_tokenizer), Sampling(**settings), seed=3, system=system)

    return make


def bytes_tokenizer() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_characters_of_several_tokens_are_yielded_whole() -> None:
    tokenizer, text = bytes_tokenizer(), "aé 漢字 👩‍👩‍👧 ok"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    shown = list(pieces(tokenizer, ids))
    assert "".join(shown) == text
    assert "\ufffd" not in "".join(shown) and shown[:3] == ["a", "é", " "]


def test_an_incomplete_character_is_yielded_at_the_end() -> None:
    tokenizer = bytes_tokenizer()
    ids = tokenizer.encode("a漢")[:-1]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "a\ufffd"


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 20}, {"stop": ["a", "e", "0"]}]
)
def test_streamed_tokens_equal_those_of_the_generator(make_talk: Any, settings: Any) -> None:
    talk = make_talk(max_new_tokens=20, **settings)
    model, tokenizer = talk.loaded.model, talk.loaded.tokenizer
    for number in range(5):
        prompt, said = talk.prompt([{"role": "user", "content": f"question {number}"}]), list[int]()
        talk.answers = number
        request = Request(prompt, request_seed(3, number, 0, 0), talk.sampling, frozenset({2}))
        (whole,) = complete(LocalGenerator(model, tokenizer), [request])
        assert list(talk._sampled(prompt, said)) == said == whole.tokens.tolist()
        assert talk.ended_by == whole.finish_reason


def test_a_turn_continues_from_the_cache_of_the_previous_one(make_talk: Any) -> None:
    talk = make_talk(system="sys")
    first = "".join(talk.answer("hello"))
    widths: list[int] = []
    talk.loaded.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    "".join(talk.answer("again"))
    assert [m["role"] for m in talk.turns] == ["user", "assistant", "user", "assistant"]
    assert talk.turns[1]["content"] == first.partition(" [")[0].strip()
    new = len(talk.prompt(talk.turns[:3])) - len(talk.prompt(talk.turns[:1]))
    assert 1 < widths[0] < new, "only what came after the first answer is read"


def test_a_full_context_drops_the_oldest_whole_turns(make_talk: Any) -> None:
    talk = make_talk(system="sys", context=128)
    for n in range(4):
        shown = "".join(talk.answer(f"question {n}"))
    text = talk.loaded.tokenizer.decode(talk.generator._session.requests[0].tokens)
    assert "system\nsys<|im_end|>" in text and "question 0" not in text
    assert "the context of 128 tokens is full; dropped: 'question " in shown
    assert talk.turns[0]["role"] == "user" and talk.turns[-2]["content"] == "question 3"
    assert "question 0" not in [m["content"] for m in talk.turns]
    before = list(talk.turns)
    with pytest.raises(UserError, match="do not fit the context window of 128"):
        "".join(talk.answer("x" * 200))
    assert talk.turns == before, "a message that does not fit costs no other"


def test_ctrl_c_stops_an_answer_and_keeps_its_text(make_talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = make_talk(max_new_tokens=20)
    poll, calls = talk.generator.poll, []

    def interrupted(timeout: Any) -> Any:
        calls.append(timeout)
        talk.stopped = len(calls) == 4
        return poll(timeout)

    monkeypatch.setattr(talk.generator, "poll", interrupted)
    shown = "".join(talk.answer("hello"))
    assert shown.endswith(" [stopped]\n")
    assert len(calls) == 4 and talk.turns[-1]["role"] == "assistant"
    assert talk.turns[-1]["content"] == shown.removesuffix(" [stopped]\n").strip()


def test_commands(tiny_folder: Path) -> None:
    lines = ["/system be brief", "hello", "/reset", "/rest", "/nothing", "/help", "/exit", "never read"]
    done = CliRunner().invoke(
        cli.app, ["chat", str(tiny_folder), "--max-new-tokens", "4"], input="".join(f"{line}\n" for line in lines)
    )
    assert done.exit_code == 0, done.output
    for text in (
        "[system message set]",
        "[conversation cleared]",
        "did you mean '/reset'?",
        "unknown command /nothing",
        "/system TEXT",
    ):
        assert text in done.output


def test_terminal_escapes_in_answers_are_shown_as_text(make_talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burnish.commands.chat.pieces", lambda tokenizer, tokens: iter(["a\x1b[2J", "b\n\tc"]))
    assert "".join(make_talk().answer("hi")).startswith("a\\x1b[2Jb\n\tc")


def test_a_line_that_is_not_text_is_refused_and_the_chat_goes_on(
    make_talk: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a pipe, the lines after it were lost."""
    for errors in ("strict", "surrogateescape"):
        typed = io.BytesIO(b"a\xf0\x9f\n/system \xff\n/reset\n/exit\n")
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(typed, encoding="utf-8", errors=errors))
        run(make_talk())
        assert capsys.readouterr().out.splitlines() == [
            "[this line: not valid UTF-8 at character 2, '\\udcf0']",
            "[this line: not valid UTF-8 at character 9, '\\udcff']",
            "[conversation cleared]",
        ]


def test_in_a_terminal(tiny_folder: Path, request: pytest.FixtureRequest) -> None:
    """Ctrl-C at the prompt and during an answer, another line, Ctrl-D."""
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "burnish", "chat", str(tiny_folder), "--max-new-tokens", "200"]
    # processes that run in the background may inherit that Ctrl-C is ignored
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        command, stdin=child, stdout=child, stderr=child, start_new_session=True, preexec_fn=hears
    )
    request.addfinalizer(process.wait)
    request.addfinalizer(process.kill)
    os.close(child)
    seen = b""

    def wait_for(pattern: bytes, seconds: float = 60, interrupt: bool = False) -> None:
        nonlocal seen
        until = time.monotonic() + seconds
        while (match := re.search(pattern, seen)) is None:
            assert time.monotonic() < until, seen
            if interrupt:  # again where the first came before the line was being read, which waits for a key then
                process.send_signal(signal.SIGINT)
            if select.select([parent], [], [], 0.5)[0]:
                seen += os.read(parent, 4096)
        seen = seen[match.end() :]

    wait_for(b"> ")
    wait_for(rb"\[Ctrl-D or /exit leaves\]", interrupt=True)
    wait_for(b"> ")
    os.write(parent, b"hello\n")
    wait_for(b"hello\r\n")
    process.send_signal(signal.SIGINT)
    wait_for(rb"\[stopped\]|\[Ctrl-D or /exit leaves\]")  # the latter where nothing was being said yet, or any more
    wait_for(b"> ")
    os.write(parent, b"/system brief\n")
    wait_for(rb"\[system message set\]")
    wait_for(b"> ")  # a Ctrl-D before the prompt appears would be lost
    os.write(parent, b"\x04")
    assert process.wait(20) == 0
    os.close(parent)
