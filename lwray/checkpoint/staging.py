"""Memory that a rank copies its state into and its writer process reads: training stands still for this copy only."""

import mmap
import os
import tempfile
from typing import Any

import torch
from torch import Tensor

from lwray.checkpoint.fragment import Layout


class Staging:
    """Shared memory that holds a rank's whole file; pinned for the copy from a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # macOS has no memfd: there a file without a name
        self.descriptor = os.memfd_create("lwray-staging") if hasattr(os, "memfd_create") else _nameless_file()
        self.size = 0
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def reserve(self, size: int) -> None:
        """Make room for a file of `size` bytes; the pages are touched now, so that no copy waits for them."""
        if size <= self.size:
            return
        self._unpin()
        os.ftruncate(self.descriptor, size)
        mapped = mmap.mmap(self.descriptor, size)
        self._memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self._memory.zero_()
        self.size = size
        if self.device.type == "cuda":
            # where the system pins no more memory, the copy is slower and as right
            self._pinned = int(_cudart().cudaHostRegister(self._memory.data_ptr(), size, 0)) == 0

    def fill(self, layout: Layout) -> None:
        """Copy a file's header and data; returns when all of it is here."""
        self.reserve(layout.size)
        self._memory[: len(layout.prefix)] = torch.frombuffer(bytearray(layout.prefix), dtype=torch.uint8)
        for fragment, offset in zip(layout.fragments, layout.offsets, strict=True):
            data = fragment.data
            if data.numel():
                self._view(offset, data).copy_(data, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Give the memory back."""
        self._unpin()
        os.close(self.descriptor)

    def _view(self, offset: int, like: Tensor) -> Tensor:
        return self._memory[offset : offset + like.numel() * like.itemsize].view(like.dtype)

    def _unpin(self) -> None:
        if self._pinned:
            # after an error of the device this fails too, and must not hide it
            _cudart().cudaHostUnregister(self._memory.data_ptr())
            self._pinned = False
        self._memory = torch.empty(0, dtype=torch.uint8)


def _nameless_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
