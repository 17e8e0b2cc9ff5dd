"""Environment variables of the processes in Ray Train's workers, without a process group in the workers themselves.

This module needs Ray.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import ray.train
from ray.train.backend import Backend
from ray.train.torch import TorchConfig


class RanksConfig(TorchConfig):
    """Settings of Ray Train's TorchTrainer that only describe the processes to each worker, as torchrun does."""

    @property
    def backend_cls(self) -> type[Backend]:
        """What sets the variables."""
        return _Ranks


class _Ranks(Backend):
    share_cuda_visible_devices = True  # LOCAL_RANK chooses one of them

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        address, port = worker_group.execute_single(0, _free_address)
        worker_group.execute(_describe, address, port)


def _free_address() -> tuple[str, int]:
    """An address of this machine that the other machines reach."""
    address = ray.util.get_node_ip_address()
    with socket.socket() as free:
        free.bind((address, 0))
        return address, free.getsockname()[1]


def _describe(address: str, port: int) -> None:
    context = ray.train.get_context()
    os.environ |= {
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
