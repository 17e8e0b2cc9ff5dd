"""An environment whose tool runs Python in the sandbox: ``environment: {class: burnish.rl.python:Python}``."""

from __future__ import annotations

import atexit
import logging
import re
import threading
from typing import Any, Literal

from pydantic import Field

from burnish.rl.sandbox.client import Sandbox, default_preload
from burnish.rl.sandbox.types import History, Limits, Result
from burnish.types import Config

SESSIONS = 64
"""Namespaces that are kept. With more open episodes, snippets of an episode may run again before its next one."""
WALL_SECONDS = 4
"""Seconds on the clock for each second of CPU time, because snippets and training share the cores."""
ADDRESS = re.compile(" at 0x[0-9a-f]+>")

logger = logging.getLogger(__name__)


class PythonConfig(Config):
    """Settings of ``Python``: ``PythonConfig(preload=["math"], seconds=2, sandbox="landlock")``."""

    preload: list[str] = Field(default_factory=lambda: list(default_preload()))
    """Modules to import in advance. Of others, only those of the standard library can be imported."""
    seconds: int = Field(default=5, ge=1)
    """Maximum CPU time of a call. On the clock, a call may take four times as long."""
    sandbox: Literal["landlock", "none"] = "landlock"
    """none runs the model's code without protection. Then it can read and start whatever your user can."""


class Python:
    """An environment with one tool, ``python``. Variables live as long as the episode.

    All episodes of a process share one sandbox. It starts with the first instance, and ends with the process. The
    environment has no reward of its own, so the recipe needs one.

    Args:
        **settings: as in ``PythonConfig``.

    Raises:
        UserError: if a setting is wrong, if this machine cannot lock processes in and ``sandbox`` is not ``none``, or
            if a module cannot be preloaded.
    """

    def __init__(self, **settings: Any) -> None:
        self._sandbox = shared_sandbox(PythonConfig(**settings))
        self._history: History = ()

    def reset(self, **columns: Any) -> None:
        """Begin an episode, without variables."""
        self._history = ()

    def python(self, code: str) -> str:
        """Run Python code. Returns what it prints and the value of its last expression. Variables are kept.

        Args:
            code: The code to run.
        """
        result = self._sandbox.run(code, after=self._history)
        self._history = result.history
        return shown(result)


def shown(result: Result) -> str:
    """The result as the model sees it: its output, and then its value, or the reason why it failed.

    Addresses are left out, because they would differ if an interrupted run is resumed.
    """
    value = result.value if result.reason == "ok" else f"{result.reason}: {result.value}"
    lines = [part for part in (result.output.removesuffix("\n"), value) if part]
    return ADDRESS.sub(" at 0x...>", "\n".join(lines)) or "(no output)"


_sandboxes: dict[str, Sandbox] = {}
_lock = threading.Lock()


def shared_sandbox(settings: PythonConfig) -> Sandbox:
    """The sandbox of this process with these settings."""
    key = settings.model_dump_json()
    with _lock:
        if key not in _sandboxes or _sandboxes[key].closed:
            limits = Limits(cpu_seconds=settings.seconds, wall_seconds=WALL_SECONDS * settings.seconds)
            sandbox = Sandbox(limits, settings.preload, settings.sandbox != "none", SESSIONS)
            atexit.register(sandbox.close)
            _sandboxes[key] = sandbox
            enforced = "; ".join(f"{what}: {how}" for what, how in sandbox.enforced().items())
            logger.warning("how the Python that the model runs is limited: %s", enforced)
        return _sandboxes[key]
