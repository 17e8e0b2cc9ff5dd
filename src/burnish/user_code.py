"""Runs the user's code: a reward, a stage's function, or the import of a file that holds one.

The result of a run must not depend on the side effects of a reward. ``user_code`` restores what would change the run,
and turns an exception into a ``UserCodeError`` that names the code that raised it.
"""

from __future__ import annotations

import contextlib
import os
import random
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from burnish.errors import UserCodeError, UserError


@contextlib.contextmanager
def user_code(
    what: str, during: str = "", *, seed: int | None = None, keep_environment: bool = False
) -> Iterator[None]:
    """A context for the user's code, which restores afterwards what the code changed in the process.

    Restored: the working directory, environment variables and warnings filters; torch's grad mode, default dtype,
    default device, number of threads, deterministic mode, float32 matmul precision, and cuDNN's deterministic and
    benchmark flags; the random states of ``random``, numpy and torch (CPU and CUDA).

    Not restored: ``sys.path``, imported modules, signal handlers, the locale, logging, the garbage collector, and other
    settings of torch, such as those of scaled dot product attention, TF32 and autocast. A call takes about half a
    millisecond.

    Args:
        what: the code as messages name it: ``reward brevity (my_rewards.py:brevity)``.
        during: what it was called for, as messages name it: ``on prompts.jsonl:3``.
        seed: at least 0; the code draws the same random numbers whenever it is called with the same seed. None leaves
            the random states as they are.
        keep_environment: do not restore environment variables. A file may set some when it is imported, such as an API
            key, that its functions read later.

    Raises:
        UserCodeError: the code raised an exception or called ``sys.exit``. ``UserError`` and ``KeyboardInterrupt`` pass
            through.
    """
    try:
        with _restored(keep_environment):
            if seed is not None:
                _seed(seed)
            yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        name, text = type(error).__name__, _text(error)
        message = " ".join(part for part in (what, "raised", name, during) if part)
        raise UserCodeError(f"{message}: {text}" if text else message, _own_traceback(error)) from error


# --- what is restored ---------------------------------------------------------------------------------------------


def _matmul_precision() -> str | None:
    """The precision, or None: it cannot be read if it was set both by its setter and by ``fp32_precision``."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_matmul_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _cudnn() -> tuple[bool, bool]:
    return torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark


def _set_cudnn(flags: tuple[bool, bool]) -> None:
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = flags


# A getter and a setter each. The setter runs only if the value changed.
SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, _set_default_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (_matmul_precision, _set_matmul_precision),
    (_cudnn, _set_cudnn),
)


@contextlib.contextmanager
def _restored(keep_environment: bool) -> Iterator[None]:
    folder, environment = os.getcwd(), os.environ.copy()
    filters, listed = warnings.filters, list(warnings.filters)
    settings = [(read(), read, write) for read, write in SETTINGS]
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    torch_seed = torch.initial_seed()
    try:
        yield
    finally:
        os.chdir(folder)  # without a comparison: the current folder may be gone
        for before, read, write in settings:
            if read() != before:
                write(before)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        else:  # CUDA was not in use: restore the seed, because torch.manual_seed sets it for CPU and CUDA alike
            torch.cuda.manual_seed_all(torch_seed)
        # After the settings, because torch imports modules there that set environment variables and filters.
        if not keep_environment:
            _set_environment(environment)
        if warnings.filters is not filters or list(filters) != listed:
            warnings.filters = filters
            warnings.resetwarnings()  # also makes Python forget which warnings it has filtered
            filters[:] = listed  # type: ignore[index]


def _set_environment(wanted: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


# --- messages -----------------------------------------------------------------------------------------------------


def _text(error: BaseException) -> str:
    return str(traceback.TracebackException.from_exception(error, limit=0))


def _own_traceback(error: BaseException) -> str:
    """The traceback with only the frames of the user's files, or with all frames below the call if there are none."""
    whole = traceback.TracebackException.from_exception(error)
    del whole.stack[:2]  # the context manager and its body
    todo = [whole]
    while todo:
        one = todo.pop()
        one.stack[:] = [frame for frame in one.stack if not _is_library(frame.filename)] or one.stack
        todo += [other for other in (one.__cause__, one.__context__, *(one.exceptions or ())) if other is not None]
    return "".join(whole.format())


LIBRARIES = (str(Path(__file__).parent), *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")))


def _is_library(file: str) -> bool:
    inside = file.startswith("<frozen") or any(Path(file).is_relative_to(folder) for folder in LIBRARIES)
    return inside or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
