"""How a vLLM server gets trained weights: an adapter as files, all other weights as tensors over a group of processes.

Both keep what they were given, because a server that has died and come back needs it again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, Protocol

import peft
import torch
import torch.distributed as dist
from torch import Tensor, nn

from burnish import files
from burnish.errors import UserError
from burnish.generate.nccl import Broadcast
from burnish.generate.vllm_server import NotFoundError, ServerGoneError, VllmServer
from burnish.models import adapters

GRACE_SECONDS = 10.0
"""If a transfer fails in this process, the server has this long to answer why."""

Weights = Iterable[tuple[str, Tensor]] | Path


class Target(NamedTuple):
    """Where completions come from: the name of a model or adapter, and the label of its weights, if they have one."""

    model: str
    weights: str | None


class Transfer(Protocol):
    """Brings weights to a server."""

    def keep(self, weights: Weights) -> None:
        """Replace the weights to send."""
        ...

    def send(self) -> Target:
        """Send the weights, whatever the server has of them, and drop what it has cached of earlier ones.

        Raises:
            ServerGoneError: if the server died.
            UserError: if the server refuses the weights.
        """
        ...

    def disconnect(self) -> None:
        """Forget the connection to a server that has failed. The next ``send`` makes a new one."""
        ...

    def end(self) -> None:
        """Undo what sending needs. The server need not be alive."""
        ...


class AdapterFiles:
    """Saves an adapter into a folder of its own for every update, and makes the server load it from there.

    vLLM keys its prefix cache by the adapter's name and folder, so earlier keys and values are not used again.

    Args:
        server: the server.
        model: the base with the adapter.
        folder: where to save adapters. The server must see the same files there.
    """

    def __init__(self, server: VllmServer, model: peft.PeftModel, folder: str | None) -> None:
        for config in model.peft_config.values():
            if not isinstance(config, peft.LoraConfig) or config.use_dora or config.modules_to_save:
                raise UserError(
                    "generator: {name: vllm}: vLLM loads plain LoRA adapters, without DoRA and without whole modules "
                    "beside them: set adapter.dora: false, or use {name: local}"
                )
        self.server, self.model = server, model
        self._temporary = None
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="burnish-adapters-")
            folder = self._temporary.name
        self.folder = Path(folder).expanduser().resolve()
        self._names = _labels()
        self._adapter: tuple[str, Path] | None = None
        self._written: Path | None = None
        self._loaded: str | None = None

    def keep(self, weights: Weights) -> None:
        """Save the adapter under a new name. Weights that are not given are those of the model."""
        self._delete()
        name = next(self._names)
        if isinstance(weights, Path):
            self._adapter = name, weights.expanduser().resolve()
            return
        own = {key: tensor.detach() for key, tensor in self.model.named_parameters() if "lora_" in key}
        state = own | checked(self.model, weights)
        self._written = self.folder / name
        with files.storing(self._written):
            adapters.save(self.model, self._written, state_dict=state)
        self._adapter = name, self._written

    def send(self) -> Target:
        """Load the adapter, after the earlier one was unloaded."""
        assert self._adapter is not None
        name, folder = self._adapter
        try:
            self._unload()
            self._loaded = name  # even if the answer is lost
            self.server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        except NotFoundError as error:
            raise UserError(
                f"{self.server.url}{error}: expected a server that can load {folder}: start it with --enable-lora and "
                "with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and let it see this folder (generator.folder)"
            ) from None
        return Target(name, None)

    def disconnect(self) -> None:
        """Nothing to forget: files need no connection."""

    def end(self) -> None:
        """Unload the adapter and delete its files."""
        if self._loaded is not None:
            self.server.leave("/v1/unload_lora_adapter", {"lora_name": self._loaded})
            self._loaded = None
        self._delete()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _unload(self) -> None:
        """Unload what is loaded. A server that was started again does not know it."""
        if self._loaded is not None:
            with contextlib.suppress(NotFoundError):
                self.server.post("/v1/unload_lora_adapter", {"lora_name": self._loaded})
            self._loaded = None

    def _delete(self) -> None:
        """Delete the files of the last update."""
        if self._written is not None:
            shutil.rmtree(self._written, ignore_errors=True)
            self._written = None


class BroadcastTensors:
    """Sends all parameters of a model by vLLM's weight transfer: HTTP calls, and beside them a broadcast.

    The trained ones are copied to the CPU at every update. The server loads its weights layer by layer, so the others
    are sent too.

    Args:
        server: the server.
        model: the model.
        base: the name of the model on the server.
        group: makes a group of this process and the workers of the server.
    """

    def __init__(self, server: VllmServer, model: nn.Module, base: str, group: Callable[[], Broadcast]) -> None:
        self.server, self.model, self.base, self.make = server, model, base, group
        self._names = _labels()
        self._kept: dict[str, Tensor] = {}
        self._group: Broadcast | None = None

    def keep(self, weights: Weights) -> None:
        """Copy the weights, and keep those that are not among them."""
        if isinstance(weights, Path):
            raise ValueError(f"{weights} is an adapter's folder, but the model has no adapter")
        self._kept |= checked(self.model, weights)

    def send(self) -> Target:
        """Send all parameters. Requests that arrive meanwhile wait for the new weights."""
        label = next(self._names)
        try:
            if self._group is None:
                self._connect()
            self.server.post("/pause?mode=keep")
            self.server.post("/start_weight_update")
            tensors = [(name, self._kept.get(name, own)) for name, own in self.model.named_parameters()]
            info = {
                "names": [name for name, _ in tensors],
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
                "shapes": [list(tensor.shape) for _, tensor in tensors],
            }
            self._beside("/update_weights", {"update_info": info}, lambda group: _send_all(group, tensors))
            self.server.post("/finish_weight_update", {"weight_version": label})
            # Requests that this process has canceled may still hold blocks of the cache.
            if not self.server.post("/reset_prefix_cache?reset_running_requests=true")["success"]:
                raise UserError(
                    f"{self.server.url}/reset_prefix_cache: the server cannot drop its cache: expected a server that "
                    "nothing else uses"
                )
            self.server.post("/resume")
        except NotFoundError as error:
            self.disconnect()
            raise UserError(
                f"{self.server.url}{error}: expected vLLM's weight transfer: start the server with "
                'VLLM_SERVER_DEV_MODE=1 and with --weight-transfer-config \'{"backend": "nccl"}\''
            ) from None
        except BaseException:
            self.disconnect()
            raise
        return Target(self.base, label)

    def disconnect(self) -> None:
        """Leave the group, which also ends a transfer that is blocked."""
        group, self._group = self._group, None
        if group is not None:
            group.end()

    def end(self) -> None:
        """Leave the group, at the server too."""
        if self._group is not None:
            self.disconnect()
            self.server.leave("/shutdown_weight_transfer_engine")

    def _connect(self) -> None:
        """Make a group with the workers, which may still be in one with a trainer that has died."""
        try:
            self.server.post("/shutdown_weight_transfer_engine")
        except ServerGoneError:  # the answer in the middle of an update
            self.server.post("/finish_weight_update")
            self.server.post("/shutdown_weight_transfer_engine")
        workers = self.server.get("/get_world_size")["world_size"]
        self._group = self.make()
        info = {**self._group.invitation(), "rank_offset": 1, "world_size": workers + 1, "packed": False}
        self._beside("/init_weight_transfer_engine", {"init_info": info}, lambda group: group.join(workers + 1))

    def _beside(self, path: str, body: dict[str, object], work: Callable[[Broadcast], None]) -> None:
        """Call the server and do this process's part of the call at the same time."""
        group = self._group
        assert group is not None
        own: Future[None] = Future()

        def run() -> None:
            try:
                own.set_result(work(group))
            except BaseException as error:
                own.set_exception(error)

        call = self.server.start(self.server.request("POST", path, body))
        # A daemon, because it may block for good if the server dies.
        threading.Thread(target=run, name="burnish weights", daemon=True).start()
        try:
            concurrent.futures.wait([call, own], return_when=concurrent.futures.FIRST_EXCEPTION)
            if call.done():
                call.result()
            elif error := own.exception():
                with contextlib.suppress(concurrent.futures.TimeoutError):
                    call.result(GRACE_SECONDS)
                raise ServerGoneError(f"{path}: {type(error).__name__}: {error}") from error
            own.result()
        finally:
            call.cancel()


class FromFirstProcess:
    """Sends weights from the first process of a run, while the others wait for it. All processes call it together."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer, self.first = transfer, dist.get_rank() == 0

    def keep(self, weights: Weights) -> None:
        """Replace the weights to send. The others only take part in gathering them."""
        if self.first:
            self.transfer.keep(weights)
        elif not isinstance(weights, Path):
            for _ in weights:
                pass

    def send(self) -> Target:
        """Send the weights. An error of the first process is an error of all."""
        answer: list[tuple[Target | None, Exception | None]] = [(None, None)]
        if self.first:
            try:
                answer = [(self.transfer.send(), None)]
            except (ServerGoneError, UserError) as error:
                answer = [(None, type(error)(str(error)))]
        dist.broadcast_object_list(answer, src=0)
        target, failure = answer[0]
        if failure is not None:
            raise failure
        assert target is not None
        return target

    def disconnect(self) -> None:
        """Forget the connection."""
        self.transfer.disconnect()

    def end(self) -> None:
        """Undo what sending needs."""
        self.transfer.end()


def checked(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies of weights on the CPU, by the names of the model's parameters.

    Raises:
        ValueError: if the model has no parameter of a tensor's name and shape.
    """
    own = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
    copies: dict[str, Tensor] = {}
    for name, tensor in weights:
        if own.get(name) != tuple(tensor.shape):
            got = f"{own[name]}, expected" if name in own else "no such parameter: given"
            raise ValueError(f"{type(model).__name__}: {name}: {got} {tuple(tensor.shape)}")
        copies[name] = tensor.detach().to("cpu", copy=True)
    return copies


def _send_all(group: Broadcast, tensors: list[tuple[str, Tensor]]) -> None:
    with torch.no_grad():
        for _, tensor in tensors:
            group.send(tensor.detach())


def _labels() -> Iterator[str]:
    """Names that no other run and no earlier update has used."""
    run, number = secrets.token_hex(4), 0
    while True:
        number += 1
        yield f"burnish-{run}-{number}"
