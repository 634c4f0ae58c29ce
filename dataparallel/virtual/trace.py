"""The trace of what virtual devices queue, and the dry mode, in which nothing of it runs.

A trace tells what a program asks of its devices: kernels with their bytes and operations, copies,
events, memory, waits of the host. ``dataparallel bench simulate`` plays it on a stated machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

from dataparallel.virtual.backend import required


class TraceEntry(NamedTuple):
    """One thing that a program has asked of a virtual device.

    Example::

        with dataparallel.virtual.record_trace() as trace:
            train_step()
        print(sum(entry.flops for entry in trace))

    Attributes:
        kind: ``"kernel"``, ``"copy"`` (between host and device, or between devices), ``"record"``
            and ``"wait"`` (of an event, on a stream), ``"host_wait"`` (for a stream, or for an
            event), ``"replay"`` (of a captured graph, whose kernels follow), ``"allocate"``,
            ``"use"`` (one more stream uses a block) and ``"free"``, or ``"mark"``.
        name: The operator, or what ``Trace.mark`` was given.
        device: The index of the device; -1 for a mark.
        stream: The number of the stream, 0 for the default one; of memory, the stream it is for.
        read: The bytes that a kernel or copy reads.
        written: The bytes that it writes; of memory, the size of the block.
        flops: The operations of matrix products and convolutions; 0 for other kernels.
        source: The index of the device that a copy comes from; -1 for the host.
        destination: The index of the device that it goes to; -1 for the host.
        id: The number of an event, or of a block while it exists; 0 for none.
        replayed: True for what a captured graph queues, at no further cost for the host.
        thread: The number of the thread.
        seconds: The time of the host, by a clock that only goes forward.
    """

    kind: str
    name: str
    device: int
    stream: int
    read: int
    written: int
    flops: int
    source: int
    destination: int
    id: int
    replayed: bool
    thread: int
    seconds: float


class Trace(Sequence[TraceEntry]):
    """The entries that ``record_trace`` has recorded, in the order in which the host made them.

    Example::

        with record_trace() as trace:
            y = model(x)
            trace.mark("backward")
            y.sum().backward()
        kernels = [entry for entry in trace if entry.kind == "kernel"]
    """

    def __init__(self) -> None:
        self._entries: list[TraceEntry] | None = None

    def mark(self, name: str) -> None:
        """Add an entry of the kind ``"mark"``, while the trace is being recorded.

        Args:
            name: The name of the entry.

        Raises:
            RuntimeError: The block of ``record_trace`` has ended.
        """
        if self._entries is not None:
            raise RuntimeError(f"the trace has ended, so the mark {name!r} would not be recorded")
        required().mark(name)

    def _end(self) -> None:
        self._entries = [TraceEntry(*entry) for entry in required().end_trace()]

    def _ended(self) -> list[TraceEntry]:
        if self._entries is None:
            raise RuntimeError("the trace can be read when the block of record_trace has ended")
        return self._entries

    def __len__(self) -> int:
        return required().trace_length() if self._entries is None else len(self._entries)

    @overload
    def __getitem__(self, index: int) -> TraceEntry: ...
    @overload
    def __getitem__(self, index: slice) -> list[TraceEntry]: ...
    def __getitem__(self, index: int | slice) -> TraceEntry | list[TraceEntry]:
        return self._ended()[index]

    def __iter__(self) -> Iterator[TraceEntry]:
        return iter(self._ended())


@contextlib.contextmanager
def record_trace() -> Iterator[Trace]:
    """Record what all threads ask of all virtual devices within a block.

    Example::

        x = torch.ones(1024, device="virtual:0")
        with record_trace() as trace:
            y = x.to("virtual:1")
        (copy,) = [entry for entry in trace if entry.kind == "copy"]
        assert (copy.source, copy.destination, copy.read) == (0, 1, 4096)

    Yields:
        The trace, which is to be read after the block.

    Raises:
        RuntimeError: Virtual devices are not enabled, or a trace is being recorded already.
    """
    required().begin_trace()
    trace = Trace()
    try:
        yield trace
    finally:
        trace._end()


def is_dry() -> bool:
    """Tell whether dry mode is on.

    Example::

        assert not dataparallel.virtual.is_dry()

    Returns:
        True in dry mode.

    Raises:
        RuntimeError: Virtual devices are not enabled.
    """
    return required().is_dry()


def set_dry(value: bool) -> None:
    """Turn dry mode on or off, for all devices and threads. See ``dry_mode``.

    Example::

        dataparallel.virtual.set_dry(True)
        shape = model(x).shape
        dataparallel.virtual.set_dry(False)

    Args:
        value: True for dry mode. All that is queued before runs first.

    Raises:
        RuntimeError: Virtual devices are not enabled.
    """
    required().set_dry(bool(value))


@contextlib.contextmanager
def dry_mode(value: bool = True) -> Iterator[None]:
    """Let nothing run that is queued within a block, and restore the old mode afterwards.

    The shapes of results come from meta kernels. Memory is reserved and never touched, so models
    fit that this machine has no memory for. Numbers that the host reads are zeros, and so is what
    is copied to it. Each stream is always idle.

    Example::

        with dataparallel.virtual.dry_mode():
            large = torch.empty(10**10, device="virtual:0")
            assert (large @ large).item() == 0

    Args:
        value: The mode within the block. Default: True.

    Raises:
        RuntimeError: Virtual devices are not enabled. Within the block,
            ``NotImplementedError`` where only running an operator tells the shapes of its results.
    """
    before = is_dry()
    set_dry(value)
    try:
        yield
    finally:
        set_dry(before)
