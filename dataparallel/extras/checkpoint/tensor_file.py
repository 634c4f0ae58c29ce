"""Tensors in a safetensors file that is hashed while it is written, and while it is read.

Note [What is checked is what is used]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The bytes that are hashed are those that the tensors then hold: they are read once, straight into
the memory of the tensors. A file that is changed between two looks at it deceives nobody. The hash
is SHA-256: of those that nobody can forge, the fastest where the processor has instructions for it
(1.7 GB/s here, BLAKE2b 0.9), and ``sha256sum`` checks it without this package.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from dataparallel.extras.checkpoint import safetensors_header
from dataparallel.extras.checkpoint.errors import CheckpointError
from dataparallel.extras.checkpoint.files import write_all
from dataparallel.extras.checkpoint.safetensors_header import Header, Place
from dataparallel.extras.checkpoint.strict_json import shown

# Bytes that are written or read at once: few calls, and both the copy and the hash find them in
# the cache of the processor.
_CHUNK = 1 << 20
# Chunks that may wait to be hashed; the tensors that they are of stay in memory as long.
_WAITING = 16
# Less than this is hashed sooner than a thread has started.
_WORTH_A_THREAD = 1 << 18

Progress = Callable[[int], None]


def check(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse what cannot be saved.

    Args:
        tensors: By name.

    Raises:
        TypeError: One is not a tensor, or of a type or layout that the format does not have.
        ValueError: The name is the one that the format keeps for itself.
    """
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"names of tensors are strings, not {shown(name)}")
        if name == "__metadata__":
            raise ValueError("a tensor cannot be called '__metadata__'; give it another name")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{shown(name)} is not a tensor but of type {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_nested:
            raise TypeError(
                f"{shown(name)} has the layout {tensor.layout}; save it dense (to_dense())"
            )
        if tensor.is_meta:
            raise TypeError(f"{shown(name)} is on the meta device and has no values to save")
        if not safetensors_header.supports(tensor.dtype):
            raise TypeError(f"{shown(name)} is of {tensor.dtype}, which cannot be saved")


def write(
    fd: int, tensors: Mapping[str, torch.Tensor], metadata: Any, progress: Progress | None
) -> tuple[int, Callable[[], str]]:
    """Write a file.

    Args:
        fd: Of the file, empty.
        tensors: As :func:`check` takes them. They must not change meanwhile.
        metadata: What JSON can hold.
        progress: Called with the number of bytes after each piece that was written.

    Returns:
        The size of the file in bytes; and what returns its SHA-256, once it is known. Until then
        there is time to synchronize the file with the disk.

    Raises:
        OSError: The file could not be written.
        ValueError: The header would be too long, or the metadata is not JSON.
        TypeError: The metadata holds something that JSON does not have.
    """
    _refuse_big_endian()
    header = safetensors_header.plan(tensors, metadata)
    start = safetensors_header.encode(header)
    size = len(start) + header.data_bytes
    hasher = _hasher_for(size)
    try:
        for piece, owner in _pieces(start, header, tensors):
            hasher.update(piece, owner)
            write_all(fd, piece)
            if progress is not None:
                progress(len(piece))
    finally:
        hasher.end()
    return size, hasher.digest


def read(
    fd: int, size: int, sha256: str, wanted: Collection[str] | None = None
) -> tuple[dict[str, torch.Tensor], Header]:
    """Read tensors of a file, if all of it is as it was written.

    Args:
        fd: Of the file.
        size: How many bytes it must have.
        sha256: The hash of its bytes.
        wanted: Names of tensors; the others are only compared with the hash. Default: all.

    Returns:
        The tensors by name, in memory of their own, and the header.

    Raises:
        ValueError: It is not as it was written, or not a safetensors file; the text says which.
        OSError: It could not be read.
    """
    _refuse_big_endian()
    source = _Source(fd, size)
    header = source.header()
    tensors = {}
    chunk = torch.empty(min(_CHUNK, source.left), dtype=torch.uint8)
    for place in header.places:
        if wanted is None or place.name in wanted:
            tensors[place.name] = _read_tensor(source, place)
        else:
            _pass_over(source, place, chunk)
    source.compare(sha256)
    return tensors, header


def _read_tensor(source: _Source, place: Place) -> torch.Tensor:
    tensor = torch.empty(place.shape, dtype=place.dtype)
    memory = memory_of(tensor)
    for start in range(0, len(memory), _CHUNK):
        source.read_into(memory[start : start + _CHUNK])
    if tensor.dtype == torch.bool:
        _refuse_other_bits(place.name, tensor.view(torch.uint8))
    return tensor


def _pass_over(source: _Source, place: Place, chunk: torch.Tensor) -> None:
    memory = memory_of(chunk)
    for start in range(place.begin, place.end, _CHUNK):
        count = min(_CHUNK, place.end - start)
        source.read_into(memory[:count])
        if place.dtype == torch.bool:
            _refuse_other_bits(place.name, chunk[:count])


class _Source:
    """A file that is hashed while it is read, once and in order."""

    def __init__(self, fd: int, size: int) -> None:
        found = os.fstat(fd).st_size
        if found != size:
            raise ValueError(f"it has {found:,} bytes instead of {size:,}")
        self._fd = fd
        self._size = size
        self._hash = hashlib.sha256()
        self.left = size

    def header(self) -> Header:
        """Read the header, and be at the start of the data."""
        start = bytearray(min(8, self._size))
        self.read_into(memoryview(start))
        length = safetensors_header.header_length(bytes(start), self._size)
        text = bytearray(length)
        self.read_into(memoryview(text))
        return safetensors_header.decode(text, self.left)

    def read_into(self, memory: memoryview) -> None:
        """Fill some memory with the next bytes."""
        rest = memory
        while rest:
            count = os.readv(self._fd, [rest])
            if not count:
                raise ValueError("it became shorter while it was read")
            rest = rest[count:]
        self._hash.update(memory)
        self.left -= len(memory)

    def compare(self, sha256: str) -> None:
        """Raise ValueError if the bytes so far are not those of the hash."""
        if self._hash.hexdigest() != sha256:
            raise ValueError("its bytes are not those that were written (SHA-256 differs)")


class _HasherInline:
    """Hashes the pieces of a file where they are made."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, piece: memoryview, owner: object) -> None:
        """Hash the next piece."""
        self._hash.update(piece)

    def end(self) -> None:
        """There are no more pieces."""

    def digest(self) -> str:
        """The hash of all pieces."""
        return self._hash.hexdigest()


class _Hasher(_HasherInline):
    """Hashes the pieces of a file in a thread, while they are written in another."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: queue.Queue[tuple[memoryview, object] | None] = queue.Queue(_WAITING)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dataparallel-hash", daemon=True)
        self._thread.start()

    def update(self, piece: memoryview, owner: object) -> None:
        """Hash a piece soon; ``owner`` lives until then."""
        self._pieces.put((piece, owner))

    def end(self) -> None:
        """There are no more pieces; the thread ends when it has hashed those that it has."""
        self._pieces.put(None)

    def digest(self) -> str:
        """The hash of all pieces, once they are all hashed."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return super().digest()

    def _run(self) -> None:
        # Goes on after an error: whoever puts pieces into the queue must not wait for ever.
        while (item := self._pieces.get()) is not None:
            try:
                self._hash.update(item[0])
            except BaseException as error:
                self._error = error


def _hasher_for(size: int) -> _HasherInline:
    """What hashes a file of so many bytes."""
    if size < _WORTH_A_THREAD:
        return _HasherInline()
    try:
        return _Hasher()
    except RuntimeError:
        # The interpreter waits at its end for what is being written. From Python 3.12 on, no other
        # thread can start then.
        return _HasherInline()


def _pieces(
    start: bytes, header: Header, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[memoryview, object]]:
    """All bytes of the file in order, and for each piece what keeps its memory alive."""
    yield memoryview(start), start
    for place in header.places:
        # One after the other, so that at most one is copied from its device at a time.
        tensor = tensors[place.name].detach().cpu().resolve_conj().resolve_neg().contiguous()
        memory = memory_of(tensor)
        for begin in range(0, len(memory), _CHUNK):
            yield memory[begin : begin + _CHUNK], tensor


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, for as long as the tensor lives."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def _refuse_other_bits(name: str, values: torch.Tensor) -> None:
    # Any other byte than 0 and 1 makes a boolean that is neither true nor false.
    if values.numel() and values.max() > 1:
        raise ValueError(f"{shown(name)} has values that are not booleans")


def _refuse_big_endian() -> None:
    if sys.byteorder != "little":
        raise CheckpointError("checkpoints need a processor that has the low byte first")
