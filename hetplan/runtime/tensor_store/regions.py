"""Memory that holds one part: filled, checked, then sealed. On the node here, on a GPU in `cuda`."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from hetplan.errors import StoreError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class Region(Protocol):
    """Memory of one part."""

    @property
    def fd(self) -> int | None:
        """What is handed out beside `description`, where there is one."""
        ...

    def landing(self, offset: int, size: int) -> AbstractContextManager[memoryview]:
        """Where a tensor's bytes are to be written. They are in the region once the block ends without an error."""
        ...

    def copy(self, offset: int, size: int, other: Any, other_offset: int) -> None:
        """Copy bytes of a sealed region of the same device into this one."""
        ...

    def seal(self) -> None:
        """Nothing changes any more."""
        ...

    def description(self) -> dict[str, Any]:
        """How a client opens it: its kind, and a handle where it has one."""
        ...

    def close(self) -> None:
        """Give the memory back, as soon as no client maps it."""
        ...


class MemoryRegion:
    """A memfd: memory with a file descriptor and no name. The kernel enforces the seals, also against this process."""

    fd: int

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("hetplan-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            self._memory: mmap.mmap | None = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise

    @contextmanager
    def landing(self, offset: int, size: int) -> Iterator[memoryview]:
        """A part of the mapping itself."""
        assert self._memory is not None  # noqa: S101 - a region is filled before it is sealed
        with memoryview(self._memory) as whole, whole[offset : offset + size] as view:
            yield view

    def copy(self, offset: int, size: int, other: MemoryRegion, other_offset: int) -> None:
        """Read the other memfd as a file, so that it needs no mapping."""
        with self.landing(offset, size) as view:
            done = 0
            while done < size:
                with view[done:] as rest:
                    done += os.preadv(other.fd, [rest], other_offset + done)

    def seal(self) -> None:
        """Drop the writable mapping, which would keep the kernel from it, and seal."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)

    def description(self) -> dict[str, Any]:
        """The file descriptor is all."""
        return {"kind": "memfd"}

    def close(self) -> None:
        """Clients that have it mapped keep it."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        os.close(self.fd)


def make_region(device: str, size: int) -> Region:
    """Memory on a device: ``"cpu"``, or a GPU such as ``"cuda:0"``.

    Raises
    ------
    StoreError
        With code ``"no_room"`` if the system has no memory of that size.
    """
    if device != "cpu":
        from hetplan.runtime.tensor_store.cuda import CudaRegion

        return CudaRegion(device, size)
    try:
        return MemoryRegion(size)
    except OSError as error:
        raise StoreError(
            "no_room", f"{size} bytes on {device}: {error.strerror}. Free memory or file descriptors"
        ) from None
