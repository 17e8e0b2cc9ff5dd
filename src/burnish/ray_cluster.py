"""The Ray cluster of a run: joins it, reserves resources in it, and starts actors there."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import Field

from burnish.errors import UserError
from burnish.types import Config

LOGS = "/tmp/ray/session_latest/logs"
"""Where Ray writes its own logs and those of actors, on each machine."""
LOCAL = "local"
"""The address of a cluster of this machine that is started for this run."""
_joined: str | None = None
"""The address of the cluster that this process has joined."""


def join(address: str | None, several: bool = False) -> Any:
    """Join a Ray cluster and return the module ``ray``. A process joins only one.

    Args:
        address: address of the cluster; ``auto`` for one that was started on this machine. Default: the environment
            variable RAY_ADDRESS, which a Ray job has; without it, a new cluster of this machine, which ends with this
            process.
        several: whether several processes have to join the same cluster, so that none of them may start one.

    Raises:
        UserError: if Ray is not installed, there is no such cluster, or this process has joined another one.
    """
    global _joined
    if importlib.util.find_spec("ray") is None:
        raise UserError("Ray is not installed: run pip install 'burnish[ray]'")
    ray: Any = importlib.import_module("ray")
    if ray.is_initialized():
        if _joined is not None and address not in (None, _joined) and (address != "auto" or _joined == LOCAL):
            raise UserError(
                f"address: {address}: this run has already joined another Ray cluster, {_joined}: use one address in "
                "the whole recipe"
            )
        return ray
    address = address or os.environ.get("RAY_ADDRESS") or LOCAL
    if address == LOCAL and several:
        raise UserError(
            "several processes need a Ray cluster that is already running: start one with ray start --head, and set "
            "address: auto or the environment variable RAY_ADDRESS"
        )
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what Ray otherwise announces with a warning
    own: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {}
    try:
        with _own_handler():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        where = "on this machine" if address == LOCAL else f"at {address}"
        raise UserError(f"cannot join the Ray cluster {where}: {reason}: check ray status, and the address") from error
    _joined = address
    return ray


@contextlib.contextmanager
def _own_handler() -> Iterator[None]:
    """Keep the handler of SIGTERM, with which a run saves a checkpoint. Ray would replace it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def room(nodes: Iterable[Mapping[str, float]], each: Mapping[str, float]) -> int:
    """How many workers fit on nodes with these resources, if each needs ``each``.

    >>> room([{"CPU": 8, "GPU": 1}, {"CPU": 2}], {"CPU": 2})
    5
    """
    tolerance = 1e-6  # 0.3 / 0.1 is less than 3
    return sum(
        min(int(node.get(name, 0) / amount + tolerance) for name, amount in each.items() if amount) for node in nodes
    )


def described(resources: Mapping[str, float]) -> str:
    """``8 CPUs, 1 GPU``."""
    return ", ".join(
        f"{resources.get(name, 0):g} {name}{'' if resources.get(name, 0) == 1 else 's'}" for name in ("CPU", "GPU")
    )


class Actors(Config, use_attribute_docstrings=True):
    """Actors of a Ray cluster: ``{workers: 4, cpus: 2, gpus: 0.5}``."""

    workers: int = Field(1, ge=1, le=4096)
    """Number of actors, which share the work."""
    cpus: float = Field(1.0, gt=0, le=4096)
    """CPUs of each actor, and its number of threads."""
    gpus: float = Field(0.0, ge=0, le=64)
    """GPUs of each actor, such as 0.5. With 0, it computes on the CPU."""
    address: str | None = Field(None, min_length=1)
    """Address of the cluster, or auto. Default: RAY_ADDRESS, or else a cluster of this machine for this run."""
    timeout: float = Field(300.0, gt=0, le=86400)
    """Seconds to wait for resources that others use, and for an actor to start."""

    @property
    def threads(self) -> int:
        """The number of torch threads of an actor."""
        return max(1, int(self.cpus))

    @property
    def device(self) -> str:
        """The device on which an actor computes."""
        return "cuda" if self.gpus else "cpu"

    def __str__(self) -> str:
        workers = f"{self.workers} worker{'' if self.workers == 1 else 's'}"
        return f"{workers} with {described({'CPU': self.cpus, 'GPU': self.gpus})} each"


class Reservation:
    """Resources for actors, each of which fits on one node: a placement group.

    Args:
        wanted: the actors.
        what: the key of the recipe that asks for them, for messages.
        processes: how many processes make the same reservation.

    Raises:
        UserError: if Ray is not installed, there is no such cluster, the cluster is too small, or the resources do not
            become free in time.
    """

    def __init__(self, wanted: Actors, what: str, processes: int = 1) -> None:
        self.wanted, self.what = wanted, what
        try:
            self.ray = join(wanted.address, processes > 1)
        except UserError as error:
            raise UserError(f"{what}: {error}") from error
        each = {"CPU": wanted.cpus} | ({"GPU": wanted.gpus} if wanted.gpus else {})
        self._check_size(each, processes)
        self.group = self.ray.util.placement_group([each] * wanted.workers, strategy="PACK")
        if not self.group.wait(wanted.timeout):
            self.close()
            raise UserError(
                f"{what}: the Ray cluster has no room for {wanted} after {wanted.timeout:g} seconds: others use it, "
                f"and only {described(self.ray.available_resources())} are free: wait for them, ask for less, or set "
                "a longer timeout"
            )

    def _check_size(self, each: Mapping[str, float], processes: int) -> None:
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        if (fitting := room(nodes, each)) >= self.wanted.workers * processes:
            return
        wanted = str(self.wanted) if processes == 1 else f"{self.wanted}, in each of {processes} processes"
        has = "; ".join(described(node) for node in nodes)
        raise UserError(
            f"{self.what}: the Ray cluster is too small for {wanted}: it has room for {fitting} on its nodes, which "
            f"have {has}: lower workers, cpus or gpus, or add nodes"
        )

    def actor(self, cls: type, index: int, *arguments: Any, concurrency: int = 1) -> Any:
        """Start an actor of a class in the place of worker ``index``. ``concurrency``: how many calls run at once."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
        needs = {"num_cpus": self.wanted.cpus, "num_gpus": self.wanted.gpus, "max_concurrency": concurrency}
        return self.ray.remote(cls).options(scheduling_strategy=place, **needs).remote(*arguments)

    def close(self) -> None:
        """Return the resources. Actors that use them end."""
        if self.ray.is_initialized():
            self.ray.util.remove_placement_group(self.group)


def last_words(error: BaseException) -> str:
    """What Ray says about the end of an actor: its first and last line, without the ids between them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"{' '.join(dict.fromkeys((lines[0], lines[-1])))} (logs: {LOGS})"
