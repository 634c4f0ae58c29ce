"""The module ``torch.virtual``: the device's module, as ``torch.cuda`` is for NVIDIA GPUs."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import accelerator
from torch.accelerator import empty_cache as empty_cache
from torch.accelerator import max_memory_allocated as max_memory_allocated
from torch.accelerator import max_memory_reserved as max_memory_reserved
from torch.accelerator import memory_allocated as memory_allocated
from torch.accelerator import memory_reserved as memory_reserved
from torch.accelerator import memory_stats as memory_stats
from torch.accelerator import reset_peak_memory_stats as reset_peak_memory_stats
from torch.accelerator import set_stream as set_stream
from torch.accelerator import synchronize as synchronize

if TYPE_CHECKING:
    from dataparallel.virtual.interface import Extension

DeviceLike: TypeAlias = torch.device | str | int | None


def _index(device: DeviceLike) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return current_device() if device < 0 else device
    parsed = torch.device(device)
    if parsed.type != "virtual":
        raise ValueError(f"expected a virtual device, got {parsed}")
    return current_device() if parsed.index is None else parsed.index


# Activation checkpointing asks for this name; without it, it keeps no generator state.
_initialized = True

_extension: Extension
default_generators: tuple[torch.Generator, ...] = ()


def use(extension: Extension) -> None:
    """Let this be the extension whose devices this module shows."""
    global _extension, default_generators
    _extension, default_generators = extension, tuple(extension.default_generators())


# --- devices ---------------------------------------------------------------------------------


def is_available() -> bool:
    """True if there are virtual devices."""
    return device_count() > 0


# The devices need no further initialization.
is_initialized = is_available


def defers() -> bool:
    """True if default streams, too, do their work later: else the host does it."""
    return _extension.strict() or _extension.is_dry()


current_device = accelerator.current_device_index
set_device = accelerator.set_device_index


def init() -> None:
    """Do nothing: enabling the devices has initialized them."""


_lazy_init = init


def device_count() -> int:
    """Return the number of virtual devices."""
    return _extension.device_count()


def _is_in_bad_fork() -> bool:
    return _extension.in_forked_child()


class device:
    """Context manager that makes a device current within its block."""

    def __init__(self, device: DeviceLike) -> None:
        self.idx = _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_device()
        set_device(self.idx)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        set_device(self.prev_idx)


class device_of(device):
    """Context manager that makes the device of a tensor current, if it is a virtual one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == "virtual" else None)


class DeviceProperties(NamedTuple):
    """The properties of a virtual device; ``total_memory`` in bytes."""

    name: str
    total_memory: int
    multi_processor_count: int


def get_device_name(device: DeviceLike = None) -> str:
    """Return the name of a device."""
    return f"virtual device on {platform.machine()}"


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    """Name, memory and number of processors of a device."""
    return DeviceProperties(get_device_name(device), mem_get_info(device)[1], 1)


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    """Return a capability of no meaning, for code that asks for one."""
    return (0, 0)


def can_device_access_peer(device: DeviceLike, peer: DeviceLike) -> bool:
    """True if one device can copy from another directly: always."""
    return True


# --- streams and events ----------------------------------------------------------------------


class Stream(torch.Stream):
    """A stream of a virtual device."""

    def __new__(cls, device: DeviceLike = None, priority: int = 0) -> Stream:
        return super().__new__(cls, f"virtual:{_index(device)}", priority=priority)


class Event(torch.Event):
    """An event of a virtual device."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False) -> Event:
        return super().__new__(cls, "virtual", enable_timing=enable_timing, blocking=blocking)


def current_stream(device: DeviceLike = None) -> torch.Stream:
    """Return this thread's current stream of a device."""
    return accelerator.current_stream(_index(device))


def default_stream(device: DeviceLike = None) -> torch.Stream:
    """Return the stream that is current if no other was chosen."""
    like = current_stream(device)
    return torch.Stream(stream_id=0, device_index=like.device_index, device_type=like.device_type)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make a stream, and its device, current within a block; None changes nothing."""
    if stream is None:
        yield
        return
    with device(stream.device):
        # Not `with stream`, which keeps what was current in the object, for all threads together.
        before = current_stream(stream.device)
        set_stream(stream)
        try:
            yield
        finally:
            set_stream(before)


_on_stream = stream


def is_current_stream_capturing() -> bool:
    """True if what this thread queues on the current device is recorded in a graph, not run."""
    return _extension.is_capturing(current_device())


class VirtualGraph:
    """Recorded work of a virtual device, as ``torch.cuda.CUDAGraph`` is of a GPU."""

    def __init__(self) -> None:
        self._graph = _extension.Graph()

    def capture_begin(self, pool: object = None) -> None:
        """Record what is queued on the current stream from now on; nothing of it runs."""
        stream = current_stream()
        self._graph.begin(stream.device_index, stream.stream_id)

    def capture_end(self) -> None:
        """Let the stream run again what is queued."""
        self._graph.end()

    def replay(self) -> None:
        """Queue all of it on the current stream of its device."""
        self._graph.replay()


def graph_pool_handle() -> object:
    """Return a name for memory that graphs share; those of virtual devices share none."""
    return object()


@contextlib.contextmanager
def graph(
    graph: VirtualGraph,
    pool: object = None,
    stream: torch.Stream | None = None,
    capture_error_mode: str = "thread_local",
) -> Iterator[None]:
    """Record what is queued within a block, on ``stream`` or one of its own."""
    synchronize()
    with _on_stream(stream or Stream()):
        graph.capture_begin(pool)
        try:
            yield
        finally:
            graph.capture_end()


# --- memory ----------------------------------------------------------------------------------


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Free and total bytes; the host's memory is each device's own, up to its limit."""
    free, total = _extension.memory_info(_index(device))
    return free, total


# --- random numbers --------------------------------------------------------------------------


def _generator(device: DeviceLike) -> torch.Generator:
    return default_generators[_index(device)]


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    _generator(None).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed all devices alike."""
    for generator in default_generators:
        generator.manual_seed(int(seed))


def seed() -> None:
    """Seed the current device at random."""
    _generator(None).seed()


def seed_all() -> None:
    """Seed all devices with one random number."""
    manual_seed_all(_generator(None).seed())


def initial_seed() -> int:
    """Return the seed of the current device."""
    return _generator(None).initial_seed()


def get_rng_state(device: DeviceLike = "virtual") -> torch.Tensor:
    """Return the state of a device's generator, as a tensor of bytes."""
    return _generator(device).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the state of every device's generator."""
    return [generator.get_state() for generator in default_generators]


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = "virtual") -> None:
    """Put a device's generator into a state that ``get_rng_state`` gave."""
    _generator(device).set_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Put every device's generator into its state."""
    for generator, state in zip(default_generators, new_states, strict=True):
        generator.set_state(state)


# --- mixed precision -------------------------------------------------------------------------


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the types that autocast may compute in."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """True if bfloat16 works: it does."""
    return True
