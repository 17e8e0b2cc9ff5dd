"""The optimizer's state in a checkpoint: one layout, whatever the number of processes, and sharded or not.

``optimizer/`` holds the tensors as ``torch.distributed.checkpoint`` writes them, named ``PARAMETER/KEY``, and the
settings of the parameter groups in ``groups.pt``. Only parameters that have been updated have tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.tensor import DTensor

from burnish.errors import UserError

FOLDER, GROUPS = "optimizer", "groups.pt"


def can_name(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the state of every parameter consists of plain tensors and numbers.

    Optimizers with their own kinds of tensors, such as 8-bit ones, are saved as transformers does.
    """
    states = optimizer.state_dict()["state"].values()
    plain = (Tensor, nn.Parameter, DTensor, float, int, bool, type(None))
    return all(isinstance(state, dict) and all(type(x) in plain for x in state.values()) for state in states)


def save(network: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, rank: int, sharded: bool) -> None:
    """Write the state of an optimizer of ``network``. All processes call it; the first writes what is not sharded."""
    if rank > 0 and not sharded:
        return
    state, groups = _named(network, optimizer)
    tensors = {f"{name}/{key}": x for name, of in state.items() for key, x in of.items() if isinstance(x, Tensor)}
    with _plain_errors():
        save_tensors(tensors, checkpoint_id=folder, no_dist=not sharded)
    if rank == 0:
        numbers = {name: {key: x for key, x in of.items() if not isinstance(x, Tensor)} for name, of in state.items()}
        torch.save({"groups": groups, "numbers": numbers}, folder / GROUPS)


def load(network: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, sharded: bool) -> None:
    """Load what ``save`` wrote into an optimizer of the same network.

    Raises:
        UserError: the checkpoint's groups of parameters are others, or one of its tensors has another shape.
    """
    stored = torch.load(folder / GROUPS, weights_only=True)
    _, groups = _named(network, optimizer)
    if [group["params"] for group in groups] != [group["params"] for group in stored["groups"]]:
        raise UserError(
            f"{folder.parent}: it was saved with other groups of parameters: resume with the same learning rates of "
            "parts, optimizer and adapter, or start over"
        )
    parameters = dict(network.named_parameters())
    state: dict[str, dict[str, Any]] = {name: dict(numbers) for name, numbers in stored["numbers"].items()}
    tensors = dict(_empty(parameters, folder))
    with _plain_errors():
        load_tensors(tensors, checkpoint_id=folder, no_dist=not sharded)
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        state[name][key] = tensor
    # torch expects numbers instead of names: the position among the parameters of all groups
    names = [name for group in groups for name in group["params"]]
    numbered = [{**group, "params": [names.index(name) for name in group["params"]]} for group in stored["groups"]]
    optimizer.load_state_dict(
        {"state": {i: state[name] for i, name in enumerate(names) if name in state}, "param_groups": numbered}
    )


def _named(network: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The state by parameter name, and the groups with names."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    flat = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    stored = optimizer.state_dict()
    groups = [{**group, "params": [flat[i] for i in group["params"]]} for group in stored["param_groups"]]
    return {flat[i]: of for i, of in stored["state"].items()}, groups


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the errors of torch.distributed.checkpoint as they were, such as that of a full disk or KeyboardInterrupt.

    torch puts those of all processes into one that is no Exception. It also warns that a process saves or loads alone,
    as asked, which is hidden.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            yield
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error


def _empty(parameters: dict[str, nn.Parameter], folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Tensors for all that is stored; those of a parameter's shape are sharded as it is."""
    for path, stored in FileSystemReader(folder).read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        parameter = parameters[path.rpartition("/")[0]].detach()
        dtype = stored.properties.dtype
        same = stored.size == parameter.shape
        yield path, torch.empty_like(parameter, dtype=dtype) if same else torch.empty(stored.size, dtype=dtype)
