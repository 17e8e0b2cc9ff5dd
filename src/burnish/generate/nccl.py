"""A NCCL group of this process and the workers of a vLLM server, through NCCL's C library.

vLLM's workers join by a NCCL unique id, which no interface of torch.distributed can hand out. After they have joined,
all ranks add up one number. (vLLM 0.33: distributed/device_communicators/pynccl.py, from_unique_id_bytes.)
"""

from __future__ import annotations

import base64
import ctypes
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from burnish.errors import UserError

LIBRARY = "libnccl.so.2"
UNIQUE_ID_BYTES = 128
SUM = 0
TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""NCCL's numbers of data types, from nccl.h."""


class Broadcast(Protocol):
    """Sends tensors to all workers of a server.

    The worker's side of each call runs during an HTTP call, so ``join`` and ``send`` block until the workers take part.
    """

    def invitation(self) -> dict[str, object]:
        """What the workers need in order to join, as part of ``init_info``."""
        ...

    def join(self, size: int) -> None:
        """Join as rank 0 of ``size``."""
        ...

    def send(self, tensor: Tensor) -> None:
        """Send a tensor, from any device."""
        ...

    def end(self) -> None:
        """Leave the group. This also ends a ``join`` or ``send`` that blocks on another thread."""
        ...


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class NcclBroadcast:
    """Broadcasts from the current CUDA device.

    Raises:
        UserError: if there is no CUDA device or no NCCL library.
    """

    def __init__(self, library: Any = None) -> None:
        if library is None:
            if not torch.cuda.is_available():
                raise UserError(
                    "generator: {name: vllm} sends trained weights with NCCL, which needs a CUDA GPU for the trainer, "
                    "besides those of the server: train an adapter:, which is sent as files, or use {name: local}"
                )
            try:
                library = ctypes.CDLL(LIBRARY)
            except OSError as error:
                raise UserError(
                    f"generator: {{name: vllm}} needs NCCL, but {LIBRARY} cannot be loaded: {error}"
                ) from None
        self.library = library
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        self._id = _UniqueId()
        self._group = ctypes.c_void_p()
        self._call("ncclGetUniqueId", ctypes.byref(self._id))

    def invitation(self) -> dict[str, object]:
        """The unique id of the group."""
        return {"nccl_unique_id_b64": base64.b64encode(bytes(self._id)).decode()}

    def join(self, size: int) -> None:
        """Join the group, and take part in the sum with which vLLM's workers test it."""
        with self._on_device():
            self._call("ncclCommInitRank", ctypes.byref(self._group), ctypes.c_int(size), self._id, ctypes.c_int(0))
            number = torch.zeros(1, device=self.device)
            at = ctypes.c_void_p(number.data_ptr())
            kind = ctypes.c_int(TYPES[number.dtype])
            self._call(
                "ncclAllReduce", at, at, ctypes.c_size_t(1), kind, ctypes.c_int(SUM), self._group, self._stream()
            )
            self._wait()

    def send(self, tensor: Tensor) -> None:
        """Send a tensor and wait until it has been received."""
        with self._on_device():
            sent = (tensor if self.device is None else tensor.to(self.device)).contiguous()
            at = ctypes.c_void_p(sent.data_ptr())
            count, kind = ctypes.c_size_t(sent.numel()), ctypes.c_int(TYPES[sent.dtype])
            self._call("ncclBroadcast", at, at, count, kind, ctypes.c_int(0), self._group, self._stream())
            self._wait()

    def end(self) -> None:
        """Abort the group, so that no kernel of it stays on the device."""
        group, self._group = self._group, ctypes.c_void_p()
        if group:
            self.library.ncclCommAbort(group)  # which can only fail if the group has failed already

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            text = self.library.ncclGetErrorString
            text.restype = ctypes.c_char_p
            raise RuntimeError(f"{name}: {text(code).decode()}")

    def _on_device(self) -> AbstractContextManager[object]:
        return nullcontext() if self.device is None else torch.cuda.device(self.device)

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream if self.device else None)

    def _wait(self) -> None:
        if self.device is not None:
            torch.cuda.current_stream().synchronize()
