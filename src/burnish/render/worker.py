"""Renders chat templates, those of foreign models in a child process with limits.

The chat template of a downloaded model is foreign code. Jinja's sandbox keeps it away from files and from Python, but
it can still loop forever or fill the memory. Therefore, each process has one child that renders such templates. The
operating system limits the CPU time that the child spends on a row, and its memory. A child that exceeds a limit ends,
and the next row starts a new one.

The parent sends a pickle for each batch. The child answers with marshalled data for each row, which runs no code when
it is read. At the start of each row, the child writes a byte to another pipe, so that the parent knows in which row a
child ended. The child has its own session, so Ctrl-C does not reach it. It ends when its parent ends, because that
closes its input.

macOS does not enforce limits on memory. CPU time and the length of texts are limited there too.
"""

from __future__ import annotations

import atexit
import marshal
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BufferedWriter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from burnish.types import Messages, Tools  # an import that the child does not need

BATCH = 1024  # rows; a pipe must hold a byte for each, and some hold only 4096
SIZE = 8  # bytes that a size takes
REASON = 500  # characters of an error message that a template made
OUT_OF_MEMORY = 77  # exit code
EXCESSES = 10  # rows in a row, after which a template is not run again


class Limits(NamedTuple):
    """What the child may use: ``Limits(seconds=5.0, memory=10**9, characters=10**6)``.

    Attributes:
        seconds: CPU time for one row. Wall-clock time would also depend on what else the machine does.
        memory: bytes of memory.
        characters: of one rendered text.

    Long messages raise each limit.
    """

    seconds: float = 5.0
    memory: int = 10**9
    characters: int = 10**6


LIMITS = Limits()
SECONDS_PER_CHARACTER = 1e-6  # of the messages; many templates take less than a hundredth
MEMORY_PER_BYTE = 20  # of a batch; a template copies its text several times, with up to 4 bytes for each character
TEXT_PER_CHARACTER = 10  # of the messages


class Text(NamedTuple):
    """A rendered text and the spans of its ``{% generation %}`` blocks: ``Text("<s>Hi Yo</s>", ((6, 12),))``."""

    text: str
    generated: tuple[tuple[int, int], ...]


class Failure(NamedTuple):
    """Why a template could not be rendered: ``Failure("failed", "ZeroDivisionError: division by zero")``.

    ``kind`` is ``refused`` if the template called ``raise_exception`` or Jinja refused it, ``syntax`` if it is not
    valid, ``failed`` for any other exception, and ``limit`` if it exceeded a limit or ended the child in another way.
    """

    kind: Literal["refused", "syntax", "failed", "limit"]
    reason: str


class RenderingError(Exception):
    """The conversation at ``index`` of a batch could not be rendered."""

    def __init__(self, index: int, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.index = index
        self.failure = failure


class Batch(NamedTuple):
    """Conversations to render with one template, each with its ``add_generation_prompt`` and its tools.

    ``Batch("{% for m in messages %}...", {"eos_token": "</s>"}, False, [(({"role": "user", ...},), True, ())])``

    ``find_generated`` asks for the spans of the ``{% generation %}`` blocks.
    """

    template: str
    special_tokens: Mapping[str, Any]
    find_generated: bool
    conversations: Sequence[tuple[Messages, bool, Tools]]


def start() -> None:
    """Start the child if it is not running. This does not wait for its imports, which take half a second."""
    _worker.start()


def render(batch: Batch) -> list[Text]:
    """Render conversations in the child.

    Raises:
        RenderingError: for the first conversation that cannot be rendered.
    """
    return _worker.render(batch)


def render_here(batch: Batch) -> list[Text]:
    """Like ``render``, but in this process and without limits."""
    texts = []
    for index, result in enumerate(_results(batch)):
        if isinstance(result, Failure):
            raise RenderingError(index, result)
        texts.append(result)
    return texts


def _results(batch: Batch) -> Iterator[Text | Failure]:
    """Render one conversation after the other."""
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    for messages, add_generation_prompt, tools in batch.conversations:
        try:
            texts, generated = render_jinja_template(
                conversations=[list(messages)],  # pyright: ignore[reportArgumentType]
                tools=list(tools) or None,
                chat_template=batch.template,
                return_assistant_tokens_mask=batch.find_generated,
                add_generation_prompt=add_generation_prompt,
                **batch.special_tokens,
            )
        except MemoryError:
            raise
        except jinja2.TemplateSyntaxError as error:
            yield Failure("syntax", f"line {error.lineno}: {_one_line(error.message)}")
        except jinja2.TemplateError as error:
            yield Failure("refused", _one_line(error.message))
        except Exception as error:
            yield Failure("failed", f"{type(error).__name__}: {_one_line(str(error))}")
        else:
            spans: Any = tuple(generated[0]) if batch.find_generated else ()
            yield Text(texts[0], spans)


def _one_line(message: str | None) -> str:
    line = " ".join((message or "")[: 10 * REASON].split())
    return line if len(line) <= REASON else line[:REASON] + "..."


# --- in the parent ------------------------------------------------------------------------------------------------


class _ChildEnded(Exception):
    """The child ended in the row ``index`` of a batch; -1 is before the first row."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Child:
    """The child process and the parent's ends of the pipes."""

    def __init__(self) -> None:
        self._progress, write_end = os.pipe()
        path = [entry for entry in sys.path if isinstance(entry, str)]
        code = f"import sys; sys.path[:] = {path}; from burnish.render import worker; worker.serve({write_end})"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[write_end],
                start_new_session=True,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # numpy's threads would only take memory
            )
        finally:
            os.close(write_end)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def render(self, batch: Batch) -> list[Text]:
        """Render at most ``BATCH`` conversations.

        Raises:
            RenderingError: for the first conversation that cannot be rendered.
            _ChildEnded: if the child ended.
        """
        request = pickle.dumps((LIMITS, batch), pickle.HIGHEST_PROTOCOL)
        texts: list[Text] = []
        failure = None
        with suppress(BrokenPipeError):
            self._requests.write(len(request).to_bytes(SIZE, "little") + request)
            self._requests.flush()
            while failure is None and len(texts) < len(batch.conversations):
                size = int.from_bytes(self._answers.read(SIZE), "little")
                answer = self._answers.read(size)
                if not answer or len(answer) < size:
                    break
                first, second = marshal.loads(answer)
                if isinstance(second, str):
                    failure = Failure(first, second)
                else:
                    texts.append(Text(first, second))
        begun = len(os.read(self._progress, BATCH))
        if failure is not None:
            raise RenderingError(len(texts), failure)
        if len(texts) < len(batch.conversations):
            raise _ChildEnded(begun - 1)
        return texts

    def end(self) -> int:
        """End the process, which has nothing to save, and return its exit code."""
        self._process.kill()
        code = self._process.wait()
        with suppress(BrokenPipeError):  # from a request that it did not read
            self._requests.close()
        self._answers.close()
        os.close(self._progress)
        return code


@dataclass
class _Excesses:
    """The conversations for which a template exceeded a limit, and how many of them came one after the other."""

    failures: dict[str, Failure] = field(default_factory=dict)
    in_a_row: int = 0


class _Worker:
    """Starts the child when it is needed, and again after it ended.

    A batch with a bad row is encoded again in parts, to find the row. Therefore, conversations that exceed a limit are
    remembered. A template that exceeds limits for many rows in a row is not run again.
    """

    def __init__(self) -> None:
        self._child: _Child | None = None
        self._lock = threading.Lock()
        self._excesses: defaultdict[str, _Excesses] = defaultdict(_Excesses)

    def start(self) -> None:
        """Start the child if it is not running."""
        with self._lock:
            self._running()

    def _running(self) -> _Child:
        if self._child is None:
            self._child = _Child()
        return self._child

    def render(self, batch: Batch) -> list[Text]:
        """Render any number of conversations."""
        texts: list[Text] = []
        with self._lock:
            for start in range(0, len(batch.conversations), BATCH):
                part = batch._replace(conversations=batch.conversations[start : start + BATCH])
                try:
                    texts += self._unless_known(part)
                except RenderingError as error:
                    raise RenderingError(start + error.index, error.failure) from None
        return texts

    def _unless_known(self, batch: Batch) -> list[Text]:
        """Render a part, unless one of its conversations is known to exceed a limit."""
        excesses = self._excesses[batch.template]
        if excesses.in_a_row >= EXCESSES:
            raise RenderingError(
                0, Failure("limit", f"exceeded limits in {EXCESSES} rows in a row and is not run again")
            )
        if excesses.failures:
            for index, conversation in enumerate(batch.conversations):
                if failure := excesses.failures.get(repr(conversation)):
                    raise RenderingError(index, failure)
        try:
            texts = self._part(batch)
        except RenderingError as error:
            if error.index > 0:
                excesses.in_a_row = 0
            if error.failure.kind == "limit":
                excesses.failures[repr(batch.conversations[error.index])] = error.failure
                excesses.in_a_row += 1
            raise
        excesses.in_a_row = 0
        return texts

    def _part(self, batch: Batch) -> list[Text]:
        """Render a part. If something other than a limit ended the child, a new one tries once more."""
        attempts = 2
        while True:
            attempts -= 1
            try:
                return self._running().render(batch)
            except RenderingError:
                raise
            except _ChildEnded as ended:
                code = self._end()
                if not attempts or code in (-signal.SIGPROF, OUT_OF_MEMORY):
                    raise RenderingError(max(0, ended.index), Failure("limit", _reason(code))) from None
            except BaseException:  # such as Ctrl-C: the next batch must not read the answers to this one
                self._end()
                raise

    def _end(self) -> int:
        child, self._child = self._child, None
        return 0 if child is None else child.end()

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """In a forked process: leave the child to the process that started it."""
        self._child, self._lock = None, threading.Lock()


def _reason(code: int) -> str:
    """Why the child ended, by its exit code."""
    if code == -signal.SIGPROF:
        return f"took more than {LIMITS.seconds:g} s of CPU time"
    if code == OUT_OF_MEMORY:
        return f"needed more than {LIMITS.memory / 1e9:g} GB of memory"
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"ended the process that renders it ({how})"


_worker = _Worker()
atexit.register(_worker.close)
os.register_at_fork(after_in_child=_worker.forget)

# --- in the child -------------------------------------------------------------------------------------------------


def serve(progress: int) -> None:
    """Render batches from standard input until it is closed; ``progress`` is the pipe that counts rows."""
    import transformers.utils.chat_template_utils  # noqa: F401  # errors of this import are shown, later ones are not

    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, sys.stdout.fileno())
    os.dup2(nowhere, sys.stderr.fileno())
    while header := requests.read(SIZE):
        size = int.from_bytes(header, "little")
        limits, batch = pickle.loads(requests.read(size))
        with _limited(limits.memory + MEMORY_PER_BYTE * size):
            try:
                _answer(batch, limits, answers, progress)
            except MemoryError:
                os._exit(OUT_OF_MEMORY)
        answers.flush()


def _answer(batch: Batch, limits: Limits, answers: BufferedWriter, progress: int) -> None:
    """Render up to the first conversation that cannot be rendered."""
    results = _results(batch)
    for messages, _, tools in batch.conversations:
        given = sum(len(m["content"]) if len(m) == 2 else len(repr(m)) for m in messages)
        given += len(repr(tools)) if tools else 0
        os.write(progress, b".")
        # When the timer expires, the operating system ends the process with SIGPROF. A handler in Python would not run
        # before a single long operation, such as a large power, returns.
        signal.setitimer(signal.ITIMER_PROF, limits.seconds + SECONDS_PER_CHARACTER * given)
        result = next(results)
        if isinstance(result, Text) and len(result.text) > limits.characters + TEXT_PER_CHARACTER * given:
            result = Failure("limit", f"wrote {len(result.text):,} characters for messages of {given:,}")
        answer = marshal.dumps(tuple(result))
        answers.write(len(answer).to_bytes(SIZE, "little") + answer)
        if isinstance(result, Failure):
            break
    signal.setitimer(signal.ITIMER_PROF, 0)


@contextmanager
def _limited(memory: int) -> Iterator[None]:
    """Limit the memory of this process."""
    if sys.platform != "linux":
        yield
        return
    import resource

    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    size, resident = (int(pages) * resource.getpagesize() for pages in Path("/proc/self/statm").read_text().split()[:2])
    limit = size + memory - resident  # of the address space, which is larger than the memory from the start
    resource.setrlimit(resource.RLIMIT_AS, (limit if before == resource.RLIM_INFINITY else min(limit, before), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))
