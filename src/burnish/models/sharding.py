"""Weights that are sharded over processes with torch's FSDP2.

All processes call these functions together, since a tensor is only gathered if all of them take part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from burnish.errors import UserError
from burnish.models import collectives
from burnish.models.forward import layers_of, unwrap
from burnish.models.quantize import is_quantized


def check_model(model: nn.Module) -> None:
    """Raise a UserError if a model cannot be sharded."""
    if is_quantized(unwrap(model)):
        raise UserError("sharded: quantized weights cannot be sharded: remove sharded or quantize")
    if not unwrap(model)._no_split_modules:
        raise UserError(f"sharded: {type(model).__name__} does not name its layers (_no_split_modules): remove sharded")


def shard(
    root: nn.Module,
    models: list[nn.Module],
    heads: list[nn.Module],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> None:
    """Shard the parameters of ``root`` over all processes, in place. This replaces the parameters.

    Each layer of ``models``, which are modules inside ``root``, is gathered while it runs, and so is each of ``heads``,
    and the head of a reward model or critic, if it is computed in another dtype. The other parameters are gathered
    while ``root`` runs. All processes start with the first one's values.

    Args:
        root: the module.
        models: transformers models inside it.
        heads: scalar heads inside it, which are computed in the dtype of their parameters.
        device: that of the parameters.
        dtype: parameters are gathered in this dtype; None means in their own. Shards and gradients keep theirs.
    """
    broadcast(root)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for model in models:
        _shard_layers(model, mesh, dtype)
        _gathered[model] = dtype
        for name in ("score", "classifier"):  # the names of transformers
            if dtype is not None and hasattr(unwrap(model), name):
                fully_shard(getattr(unwrap(model), name), mesh=mesh)
    for head in heads:
        if {p.dtype for p in head.parameters()} != {dtype or unwrap(model).dtype for model in models}:
            fully_shard(head, mesh=mesh)  # parameters that are gathered together must have one dtype
    # By default the root's parameters would stay gathered until the next backward pass, also after a pass without
    # gradient, and new weights that are loaded in the meantime would not be used.
    fully_shard(root, mesh=mesh, reshard_after_forward=True, mp_policy=_policy(dtype, inputs=False))
    assert all(isinstance(parameter, DTensor) for parameter in root.parameters())
    collectives.watch(root)


_gathered: WeakKeyDictionary[nn.Module, torch.dtype | None] = WeakKeyDictionary()
"""In which dtype the parameters of sharded models are gathered; None means in their own."""


def gathered_in(model: nn.Module) -> torch.dtype | None:
    """The dtype in which the parameters of a sharded model are gathered, if it is not their own."""
    return _gathered.get(model)


def shard_frozen(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> None:
    """Shard the layers of a frozen model, which runs on its own, in place; its embeddings, norm and head stay whole."""
    for layer in _shard_layers(model, mesh, dtype):
        collectives.watch(layer)


def _shard_layers(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> list[nn.Module]:
    layers = layers_of(model)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=_policy(dtype))
    return layers


def _policy(dtype: torch.dtype | None, inputs: bool = True) -> MixedPrecisionPolicy:
    """Gather parameters in a dtype, and cast the inputs to it if ``inputs``. Gradients are summed in float32."""
    if dtype is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=inputs)


def broadcast(module: nn.Module) -> None:
    """Give all processes the parameters and buffers of the first one."""
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor, 0)


def sum_gradients(module: nn.Module) -> None:
    """Add up the gradients of all processes. A parameter that has one in no process has none afterwards."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    has = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
    has = has.to(parameters[0].device)
    dist.all_reduce(has, dist.ReduceOp.MAX)
    running = []
    for parameter, anywhere in zip(parameters, has.tolist(), strict=True):
        if anywhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = parameter.grad.contiguous()
            running.append(dist.all_reduce(parameter.grad, async_op=True))
    for work in running:
        assert work is not None
        work.wait()


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The processes that a model is sharded over; None if it is not sharded."""
    return next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all processes if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_state_dict(module: nn.Module, leave_out: Collection[str] = ()) -> dict[str, Tensor]:
    """The state dict of a module with full tensors, on the CPU of the first process. The others get an empty one.

    Tied parameters are one tensor, so that transformers saves them once.

    Args:
        module: may be sharded.
        leave_out: the names of tensors that are not needed.
    """
    state: dict[str, Tensor] = {}
    names: dict[int, str] = {}  # the first name of each tensor
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name in leave_out:
            continue
        if (first := names.setdefault(id(tensor), name)) == name:
            full = whole(tensor.detach())
            if dist.get_rank() == 0:
                state[name] = full.cpu()
        elif dist.get_rank() == 0:
            state[name] = state[first]
    return state


def load_state_dict(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Strictly load full tensors into a module, which may be sharded. Every process needs the tensors."""
    if mesh_of(module) is not None:
        set_model_state_dict(module, dict(weights), options=StateDictOptions(full_state_dict=True))
    else:
        module.load_state_dict(weights)


def with_parameters(model: nn.Module, make: Callable[[nn.Parameter], Tensor]) -> nn.Module:
    """A copy of a model with new parameters, each made from the original. Tied parameters stay tied."""
    made = {id(p): nn.Parameter(make(p), requires_grad=p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, made)  # type: ignore[arg-type]


def without_weights(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters take no memory."""
    return with_parameters(model, lambda p: torch.empty_like(p, device="meta"))
