"""A part on a GPU, shared over CUDA IPC. Stdlib and torch only: engines import it for `open_handle`."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class CudaRegion:
    """Bytes on a GPU. They pass through pinned memory of the host, where they are checked."""

    fd = None

    def __init__(self, device: str, size: int) -> None:
        import torch

        self._bytes = torch.empty(size, dtype=torch.uint8, device=device)

    @contextmanager
    def landing(self, offset: int, size: int) -> Iterator[memoryview]:
        """Pinned memory, copied to the GPU at the end."""
        import torch

        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        with memoryview(pinned.numpy()) as view:
            yield view
        self._bytes[offset : offset + size].copy_(pinned)

    def copy(self, offset: int, size: int, other: CudaRegion, other_offset: int) -> None:
        """A copy within the GPU."""
        self._bytes[offset : offset + size].copy_(other._bytes[other_offset : other_offset + size])

    def seal(self) -> None:
        """Wait for the copies. CUDA has no read-only memory to share: engines are trusted not to write."""
        import torch

        torch.cuda.synchronize(self._bytes.device)

    def description(self) -> dict[str, Any]:
        """A handle of its own for each client: torch counts them."""
        values = self._bytes.untyped_storage()._share_cuda_()
        packed = [{"bytes": base64.b64encode(v).decode()} if isinstance(v, bytes) else v for v in values]
        return {"kind": "cuda", "handle": {"values": packed}}

    def close(self) -> None:
        """Torch gives the memory back when the last client has dropped it."""
        del self._bytes


def open_handle(handle: dict[str, Any]) -> Any:
    """The memory of a part of kind ``"cuda"`` as a ``torch.UntypedStorage``, in an engine.

    Parameters
    ----------
    handle : dict
        `Part.handle`, as the store sent it.

    Returns
    -------
    torch.UntypedStorage
    """
    import torch

    values = [base64.b64decode(v["bytes"]) if isinstance(v, dict) else v for v in handle["values"]]
    torch.cuda.init()
    return torch.UntypedStorage._new_shared_cuda(*values)
