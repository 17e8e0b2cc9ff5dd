"""Runs the user's code: a reward, a stage's function, or the import of a file that contains one.

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
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from burnish.errors import UserCodeError, UserError
from burnish.time_limit import TimeLimitExceeded, time_limit


@contextlib.contextmanager
def user_code(
    what: str,
    during: str = "",
    *,
    seed: int | None = None,
    keep_environment: bool = False,
    timeout: float | None = None,
) -> Iterator[None]:
    """A context for the user's code that undoes the changes it makes to the process.

    Restored: the working directory, environment variables and warnings filters; torch's grad mode, default dtype,
    default device, number of threads, deterministic mode, float32 matmul precision, and cuDNN's deterministic and
    benchmark flags; the random states of ``random``, numpy and torch (CPU and CUDA).

    Not restored: ``sys.path``, imported modules, signal handlers, the locale, logging, the garbage collector, and other
    settings of torch, such as those of scaled dot product attention, TF32 and autocast. A call takes about half a
    millisecond.

    Args:
        what: the name of the code in messages: ``reward brevity (my_rewards.py:brevity)``.
        during: what it was called for, in messages: ``on prompts.jsonl:3``.
        seed: seed (at least 0) of the code's random numbers. None leaves the random states as they are.
        keep_environment: do not restore environment variables. A file may set some when it is imported, such as an API
            key, that its functions read later.
        timeout: time limit in seconds; None sets no limit.

    Raises:
        UserCodeError: if the code raises an exception of any class, calls ``sys.exit``, or exceeds its time limit.
            ``UserError``, ``UserCodeError`` and ``KeyboardInterrupt`` pass through.
    """
    with reported(what, during, timeout), isolated(keep_environment):
        if seed is not None:
            seed_random(seed)
        with contextlib.nullcontext() if timeout is None else time_limit(timeout):
            yield


@contextlib.contextmanager
def reported(what: str, during: str, timeout: float | None) -> Iterator[None]:
    """Convert exceptions of the user's code to ``UserCodeError``. Arguments are as in ``user_code``."""
    try:
        yield
    except (UserError, UserCodeError, KeyboardInterrupt, GeneratorExit):  # the last one closes a coroutine
        raise
    except TimeLimitExceeded as error:
        message = " ".join(part for part in (what, f"exceeded its time limit of {timeout:g} seconds", during) if part)
        raise UserCodeError(f"{message}; a larger timeout allows more", _own_traceback(error)) from error
    except BaseException as error:
        name, text = type(error).__name__, last_line(error)
        message = " ".join(part for part in (what, "raised", name, during) if part)
        raise UserCodeError(f"{message}: {text}" if text else message, _own_traceback(error)) from error


# --- what is restored ---------------------------------------------------------------------------------------------


def _matmul_precision() -> str | None:
    """The precision. None if it was set both by its setter and by ``fp32_precision``: it cannot be read then."""
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


# Pairs of a getter and a setter. The setter runs only if the value changed.
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
def isolated(keep_environment: bool = False) -> Iterator[None]:
    """Restore what the body changes in the process. The docstring of ``user_code`` lists it."""
    folder, environment = os.getcwd(), os.environ.copy()
    filters, listed = warnings.filters, list(warnings.filters)
    settings = [(read(), read, write) for read, write in SETTINGS]
    states = random_states()
    try:
        yield
    finally:
        os.chdir(folder)  # without reading the current folder, which may no longer exist
        for before, read, write in settings:
            if read() != before:
                write(before)
        set_random_states(states)
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


# --- random numbers -----------------------------------------------------------------------------------------------


class RandomStates(NamedTuple):
    """The random states of the process. ``cuda`` is None if CUDA is not in use."""

    python: Any
    numpy: Any
    torch: torch.Tensor
    torch_seed: int
    cuda: list[torch.Tensor] | None


def random_states() -> RandomStates:
    """The states of ``random``, numpy and torch."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return RandomStates(random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.initial_seed(), cuda)


def set_random_states(states: RandomStates) -> None:
    """Restore the states that ``random_states`` returned."""
    random.setstate(states.python)
    np.random.set_state(states.numpy)
    torch.set_rng_state(states.torch)
    if states.cuda is not None:
        torch.cuda.set_rng_state_all(states.cuda)
    else:  # CUDA was not in use: restore the seed, because torch.manual_seed sets it for CPU and CUDA alike
        _seed_cuda(states.torch_seed)


def seed_random(seed: int) -> None:
    """Seed ``random``, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    _seed_cuda(seed)


def _seed_cuda(seed: int) -> None:
    """Seed the GPUs. Without a GPU, ``manual_seed_all`` has no effect but still takes a millisecond."""
    if _has_cuda():
        torch.cuda.manual_seed_all(seed)


@cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


# --- messages -----------------------------------------------------------------------------------------------------


def last_line(error: BaseException) -> str:
    """The text of an exception, even if its own method ``__str__`` raises one."""
    return str(traceback.TracebackException.from_exception(error, limit=0))


def _own_traceback(error: BaseException) -> str:
    """The traceback with only the frames of the user's files, or with all frames of the code if there are none."""
    whole = traceback.TracebackException.from_exception(error)
    while whole.stack and _is_caller(whole.stack[0].filename):
        del whole.stack[0]
    unfiltered = [whole]
    while unfiltered:
        one = unfiltered.pop()
        one.stack[:] = [frame for frame in one.stack if not _is_library(frame.filename)] or one.stack
        unfiltered += [
            cause for cause in (one.__cause__, one.__context__, *(one.exceptions or ())) if cause is not None
        ]
    return "".join(whole.format())


PACKAGE = Path(__file__).parent
LIBRARIES = (str(PACKAGE), *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")))


def _is_library(file: str) -> bool:
    inside = file.startswith("<frozen") or any(Path(file).is_relative_to(folder) for folder in LIBRARIES)
    return inside or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _is_caller(file: str) -> bool:
    """Whether a file is part of Burnish. Functions of shipped recipes count as the user's code."""
    return Path(file).is_relative_to(PACKAGE) and not Path(file).is_relative_to(PACKAGE / "recipes")
