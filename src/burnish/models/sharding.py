"""Weights that are sharded over processes with torch's FSDP2, and how they are read and written as whole tensors.

Every process calls these functions alike: gathering a whole tensor needs all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from burnish.models.forward import unwrap


def shard(root: nn.Module, models: list[nn.Module], device: torch.device) -> None:
    """Shard the parameters of ``root`` over all processes, in place. The parameters are new objects afterwards.

    Each decoder layer of ``models``, which are parts of ``root``, is gathered when it runs. All other parameters are
    gathered while ``root`` runs. Between two passes no process holds a whole parameter. As with DistributedDataParallel,
    all processes start with the values of the first one.
    """
    with torch.no_grad():
        for tensor in [*root.parameters(), *root.buffers()]:
            dist.broadcast(tensor, 0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for model in models:
        names = unwrap(model)._no_split_modules
        for layer in [module for module in model.modules() if type(module).__name__ in names]:
            fully_shard(layer, mesh=mesh)
    # torch would keep the root's parameters whole until the next backward pass: optimizers and saving would see them
    fully_shard(root, mesh=mesh, reshard_after_forward=True)
    if not all(isinstance(parameter, DTensor) for parameter in root.parameters()):
        raise RuntimeError("fully_shard left parameters unsharded")


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered from all processes if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The state dict of a module with whole tensors, on the CPU of the first process; empty in the others."""
    return get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def load_state_dict(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load whole tensors, which every process has, into a module whose parameters may be sharded; strictly."""
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        set_model_state_dict(module, dict(weights), options=StateDictOptions(full_state_dict=True))
    else:
        module.load_state_dict(weights)


def with_parameters(model: nn.Module, make: Callable[[nn.Parameter], Tensor]) -> nn.Module:
    """A copy of a model whose parameters are made from the originals. Tied parameters stay tied."""
    made = {id(p): nn.Parameter(make(p), requires_grad=p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, made)  # type: ignore[arg-type]
