"""The calls of NCCL's C library, on a stand-in for it. Nothing here needs a GPU."""

from __future__ import annotations

import base64
import ctypes
from typing import Any

import pytest
import torch

from burnish.errors import UserError
from burnish.generate.nccl import UNIQUE_ID_BYTES, NcclBroadcast


class Library:
    """Keeps the names of calls, and the numbers that were broadcast."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[Any] = []
        self.fails = fails
        self.ncclGetErrorString = lambda code: b"bad luck"

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "ncclGetUniqueId":
                identity = arguments[0]._obj
                ctypes.memmove(ctypes.byref(identity), bytes(range(UNIQUE_ID_BYTES)), UNIQUE_ID_BYTES)
            elif name == "ncclCommInitRank":
                arguments[0]._obj.value = 77
                self.calls.append((name, arguments[1].value, arguments[3].value))
            else:
                self.calls.append((name, *(argument.value for argument in arguments[2:])))
            if name == "ncclBroadcast":
                self.calls.append(list((ctypes.c_float * arguments[2].value).from_address(arguments[0].value)))
            return 5 if name == self.fails else 0

        return call


def test_the_order_of_calls() -> None:
    library = Library()
    group = NcclBroadcast(library)
    invitation = group.invitation()
    assert base64.b64decode(str(invitation["nccl_unique_id_b64"])) == bytes(range(UNIQUE_ID_BYTES))
    group.join(3)
    group.send(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T)
    group.end()
    group.end()
    float32, rank = 7, 0
    assert library.calls == [
        ("ncclCommInitRank", 3, 0),
        ("ncclAllReduce", 1, float32, 0, 77, None),
        ("ncclBroadcast", 4, float32, rank, 77, None),
        [1.0, 3.0, 2.0, 4.0],
        ("ncclCommAbort",),
    ]


def test_errors_are_raised_with_their_text() -> None:
    group = NcclBroadcast(Library(fails="ncclBroadcast"))
    group.join(2)
    with pytest.raises(RuntimeError, match="ncclBroadcast: bad luck"):
        group.send(torch.zeros(2))
    with pytest.raises(KeyError):
        group.send(torch.zeros(2, dtype=torch.complex64))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_there_has_to_be_a_gpu() -> None:
    with pytest.raises(UserError, match="needs a CUDA GPU for the trainer"):
        NcclBroadcast()
