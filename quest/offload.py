"""The second tier of a paged cache: what a user asks for, what was moved, and where whole sequences are kept."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

__all__ = ["FileTier", "HostTier", "Offload", "OffloadStats"]


@dataclass(frozen=True)
class Offload:
    """Keep at most `max_bytes` of K and V in a cache's memory, the rest in a second tier: files for a cache on the CPU
    (under Linux), the host's memory, pinned, for one on a GPU. All summaries stay in the first.

    A step fetches what its selection names; what was read lately or often stays. All that a layer's step reads is in
    memory at once, so a dense read, of a dense layer or of a prompt, goes beyond `max_bytes` until its layer is done,
    and a selection too, where it alone is larger.

    Args:
        directory: where the files are, which have no name there and so leave nothing behind; the system's folder for
            temporary files if None. In a folder that is memory itself (tmpfs) they free none. None for a GPU.
        max_bytes: of all layers together. On a GPU each layer of the pools has an equal share, which is allocated with
            its first keys; layers that never get any leave theirs unused.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.
    """

    directory: str | os.PathLike[str] | None = None
    max_bytes: int = field(kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.max_bytes, bool) or not isinstance(self.max_bytes, int):
            raise TypeError(f"Offload: max_bytes must be an int, got {self.max_bytes!r}")
        if self.max_bytes < 0:
            raise ValueError(f"Offload: max_bytes must be at least 0, got {self.max_bytes}")
        if self.directory is not None and not isinstance(self.directory, (str, os.PathLike)):
            raise TypeError(f"Offload: directory must be a path or None, got {self.directory!r}")
        if not os.path.isdir(self.place):
            raise ValueError(f"Offload: directory must be a folder that exists, got {self.place!r}")

    @property
    def place(self) -> str:
        """The directory, as a string."""
        return tempfile.gettempdir() if self.directory is None else os.fspath(self.directory)


@dataclass(frozen=True)
class OffloadStats:
    """What `Offload` has moved so far. A unit is a few tokens of one KV head, whose K and V move together.

    Attributes:
        hits, misses: units that steps selected and that were in memory, or not.
        bytes_in, bytes_out: moved from the second tier, and to it.
        resident_bytes: K and V in memory, of all layers; `peak_resident_bytes` the most so far.
        max_bytes: the budget.
    """

    hits: int
    misses: int
    bytes_in: int
    bytes_out: int
    resident_bytes: int
    peak_resident_bytes: int
    max_bytes: int

    @property
    def hit_rate(self) -> float:
        """Of the units that were read, 1 if none were."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 1.0

    def __str__(self) -> str:
        return (
            f"{self.hit_rate:.1%} of {self.hits + self.misses:,} units were in memory; {self.bytes_in / 1e6:,.1f} MB "
            f"brought in, {self.bytes_out / 1e6:,.1f} MB moved out; {self.resident_bytes / 1e6:,.1f} MB of K and V "
            f"in memory (most {self.peak_resident_bytes / 1e6:,.1f}, budget {self.max_bytes / 1e6:,.1f})"
        )


def unnamed_file(directory: str) -> BinaryIO:
    """A new file that has no name, so that it is gone with whoever holds it.

    Raises:
        OSError: it can't be made there.
    """
    try:
        return tempfile.TemporaryFile(buffering=0, dir=directory)
    except OSError as error:
        raise OSError(
            error.errno, f"making an offload file failed: {os.strerror(error.errno or 0)}", directory
        ) from None


class _InFile(NamedTuple):
    file: BinaryIO
    layout: list[tuple[torch.Size, torch.dtype]]
    num_bytes: int

    def __deepcopy__(self, memo: dict[int, Any]) -> _InFile:
        return self  # is never written again


class FileTier:
    """Tensors in files without a name, one for each `store`: a dropped one gives its disk space back at once.

    Attributes:
        num_bytes: of all that is stored.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = tempfile.gettempdir() if directory is None else os.fspath(directory)
        self.num_bytes = 0

    def store(self, tensors: Iterable[Tensor]) -> _InFile:
        """Write tensors to a new file, one after another as they come; gives what `load` and `drop` need.

        Raises:
            OSError: the disk is full or fails. Nothing is left of it then.
        """
        file, layout, total = unnamed_file(self.directory), [], 0
        try:
            for tensor in tensors:
                data = _bytes_of(tensor.cpu().contiguous())
                while len(data):  # a write may do less than it is told
                    data = data[file.write(data) :]
                layout.append((tensor.shape, tensor.dtype))
                total += tensor.nbytes
        except BaseException as error:
            file.close()
            if isinstance(error, OSError):
                raise self._failed(error, "storing a sequence failed, it stays where it is") from None
            raise
        self.num_bytes += total
        return _InFile(file, layout, total)

    def load(self, handle: _InFile) -> Iterator[Tensor]:
        """The tensors again, on the CPU, one after another.

        Raises:
            OSError: the file can't be read; it stays.
        """
        offset = 0
        for shape, dtype in handle.layout:
            tensor = torch.empty(shape, dtype=dtype)
            data = _bytes_of(tensor)
            while len(data):
                try:
                    count = os.preadv(handle.file.fileno(), [data], offset)
                    if not count:
                        raise OSError(errno.EIO, "the file ends too early")
                except OSError as error:
                    raise self._failed(error, "reading a sequence back failed, it stays in its file") from None
                offset += count
                data = data[count:]
            yield tensor

    def drop(self, handle: _InFile) -> None:
        """Forget what was stored; the file goes with the last reference to its handle."""
        self.num_bytes -= handle.num_bytes

    def _failed(self, error: OSError, what: str) -> OSError:
        return OSError(error.errno, f"{what}: {error.strerror}", self.directory)


class _InHost(NamedTuple):
    tensors: list[Tensor]
    ready: torch.cuda.Event | None  # after the copies to the host
    num_bytes: int

    def __deepcopy__(self, memo: dict[int, Any]) -> _InHost:
        return self


class HostTier:
    """Tensors in host memory, pinned where they come from a GPU.

    Copies run on the current stream: after what was queued before them, before what is queued after them.

    Attributes:
        num_bytes: of all that is stored.
    """

    def __init__(self) -> None:
        self.num_bytes = 0

    def store(self, tensors: Iterable[Tensor]) -> _InHost:
        """Copy tensors to the host; gives what `load` and `drop` need.

        Raises:
            RuntimeError: there is no memory for it. Nothing is left of it then.
        """
        kept, ready = [], None
        for tensor in tensors:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            kept.append(host.copy_(tensor, non_blocking=True))
            if tensor.is_cuda:
                ready = torch.cuda.current_stream(tensor.device).record_event(ready)
        total = sum(tensor.nbytes for tensor in kept)
        self.num_bytes += total
        return _InHost(kept, ready, total)

    def load(self, handle: _InHost) -> Iterator[Tensor]:
        """The tensors again, on the host, one after another. Copies to a GPU must run on its current stream."""
        if handle.ready is not None:  # they may have been stored on another stream
            torch.cuda.current_stream(handle.ready.device).wait_event(handle.ready)
        yield from handle.tensors

    def drop(self, handle: _InHost) -> None:
        """Forget what was stored; its memory goes with the last reference to its handle."""
        self.num_bytes -= handle.num_bytes


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
