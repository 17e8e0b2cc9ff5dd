"""Runs the user's code: a reward, a stage's function, or the import of a file that holds one.

A run must give the same result whatever a reward does beside scoring. ``user_code`` puts back what would change the
run, and turns an exception into one ``UserCodeError`` that says whose code raised it.
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

from burnish.types import UserCodeError, UserError


@contextlib.contextmanager
def user_code(
    what: str, during: str = "", *, seed: int | None = None, keep_environment: bool = False
) -> Iterator[None]:
    """Run the body, which calls code of the user, and put back what it changes of the process.

    These are put back: the working directory, environment variables, warnings filters; torch's grad mode, default dtype
    and device, number of threads, deterministic mode, precision of float32 products and cuDNN's flags; the random
    states of ``random``, numpy and torch (CPU and CUDA). These are not, as they cannot change a result: ``sys.path``,
    imported modules, signal handlers, the locale, logging, and the garbage collector.

    Args:
        what: whose code it is, as messages name it: ``reward brevity (my_rewards.py:brevity)``.
        during: what it was called with, as messages name it: ``on prompts.jsonl:3``.
        seed: where its random numbers start, the same for every call with this seed; None leaves the states as they
            are. At least 0.
        keep_environment: environment variables stay as the code leaves them: a file that is imported may set some
            (an API key) that its functions read later.

    Raises:
        UserCodeError: the code raised an exception, or called ``sys.exit``. A ``UserError`` passes through.
    """
    try:
        with _put_back(keep_environment):
            if seed is not None:
                _seed(seed)
            yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        name, said = type(error).__name__, _said(error)
        message = " ".join(part for part in (what, "raised", name, during) if part)
        raise UserCodeError(f"{message}: {said}" if said else message, _own_traceback(error)) from error


# --- what is put back ---------------------------------------------------------------------------------------------


def _matmul_precision() -> str | None:
    """None where torch cannot tell, because its old and its new way to set it were both used."""
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


# Each is read before, and set where it differs afterwards.
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
def _put_back(keep_environment: bool) -> Iterator[None]:
    folder, environment = os.getcwd(), os.environ.copy()
    filters, listed = warnings.filters, list(warnings.filters)
    settings = [(read(), read, write) for read, write in SETTINGS]
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    torch_seed = torch.initial_seed()
    try:
        yield
    finally:
        # where the folder is now may be gone
        os.chdir(folder)
        if not keep_environment:
            _set_environment(environment)
        if warnings.filters is not filters or list(filters) != listed:
            warnings.filters = filters
            warnings.resetwarnings()  # forgets which warnings were shown under the other filters
            filters[:] = listed  # type: ignore[index]
        for before, read, write in settings:
            if read() != before:
                write(before)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        else:  # nothing was drawn there: it begins where it was seeded together with the CPU
            torch.cuda.manual_seed_all(torch_seed)


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


# --- what is told -------------------------------------------------------------------------------------------------


def _said(error: BaseException) -> str:
    return str(traceback.TracebackException.from_exception(error, limit=0))


def _own_traceback(error: BaseException) -> str:
    """The traceback with the frames of the user's files only; all below the call where there are none."""
    found = traceback.TracebackException.from_exception(error)
    del found.stack[:2]  # the context manager and its body
    todo = [found]
    while todo:
        one = todo.pop()
        one.stack[:] = [frame for frame in one.stack if not _is_library(frame.filename)] or one.stack
        todo += [other for other in (one.__cause__, one.__context__, *(one.exceptions or ())) if other is not None]
    return "".join(found.format())


LIBRARIES = (str(Path(__file__).parent), *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")))


def _is_library(file: str) -> bool:
    inside = file.startswith("<frozen") or any(Path(file).is_relative_to(folder) for folder in LIBRARIES)
    return inside or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
