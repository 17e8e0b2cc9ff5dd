"""Reads and compares mathematical expressions with math-verify, in a process of its own.

sympy can take forever in C code, for example at 9^9^9^9, and cannot be interrupted there. The process may use a few
seconds of CPU time for each question. If it needs more, the kernel ends it, and the next question starts another.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import resource
import signal
import subprocess
import sys
import threading
from typing import Any

SECONDS = 5.0
"""CPU time of reading or comparing expressions."""
MEMORY = 2**32
"""Bytes of address space of the process."""


@functools.lru_cache(maxsize=2**16)
def math_answer(text: str) -> str | None:
    """The last mathematical expression in a text, as math-verify finds it: what is boxed, else the last number."""
    return _process.ask({"text": text})


@functools.lru_cache(maxsize=2**16)
def math_equal(expected: str, answer: str) -> bool | None:
    """Whether an answer equals the expected one, by math-verify; None if it cannot tell, or not in time."""
    return _process.ask({"expected": expected, "answer": answer})


class _Process:
    """The process, as its parent sees it. It starts with the first question, and ends with its parent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.child: subprocess.Popen[str] | None = None

    def ask(self, question: dict[str, str]) -> Any:
        """The answer to a question; None if the process cannot find it in time."""
        line = json.dumps({"seconds": SECONDS, **question}) + "\n"
        with self.lock:
            child = self.child or self._start()
            assert child.stdin is not None and child.stdout is not None
            try:
                child.stdin.write(line)
                child.stdin.flush()
                said = child.stdout.readline()
            except BaseException:  # such as Ctrl-C: the next question must not read the answer to this one
                self._end()
                raise
            if said:
                return json.loads(said)
            self._end()
            return None

    def _start(self) -> subprocess.Popen[str]:
        # Neither the folder of this file nor the current one changes what the process imports.
        self.child = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            encoding="utf-8",
        )
        assert self.child.stdout is not None
        if not self.child.stdout.readline():
            code = self.child.wait()
            self._end()
            raise RuntimeError(f"math-verify did not start, exit code {code}: is it installed? pip install math-verify")
        return self.child

    def _end(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.communicate()
            self.child = None


_process = _Process()
atexit.register(_process._end)


def _serve() -> None:
    """Answer the questions on standard input, a line of JSON each."""
    from math_verify import parse, verify

    logging.disable()  # math-verify warns if it has no time limit of its own
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    print("ready", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, question["seconds"])  # SIGPROF ends the process, also inside of C code
        try:
            if "text" in question:
                found = parse(question["text"], parsing_timeout=0)
                said = str(found[-1]) if found else None
            else:
                gold = parse(question["expected"], parsing_timeout=0)
                answer = parse(question["answer"], parsing_timeout=0)
                said = bool(verify(gold, answer, timeout_seconds=0)) if gold else None
        except (MemoryError, RecursionError):
            said = None
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    _serve()
