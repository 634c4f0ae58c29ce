"""The operations on a device: device lists, streams, copies and threads.

This is the only file that branches on the device type. Everything above it works with
``torch.device`` and the streams that come from here. Accelerators are driven through
``torch.accelerator`` and the device's own module, such as ``torch.cuda``, and by name only in
:func:`bind_thread`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import torch

from dataparallel import torch_internals

DeviceLike: TypeAlias = int | str | torch.device

_log = logging.getLogger("dataparallel")

_CPU = torch.device("cpu")


# --- which devices there are -----------------------------------------------------------------


def accelerators() -> tuple[torch.device, ...]:
    """Return the accelerators that this process can use.

    A build of torch for CUDA names ``cuda`` as its accelerator on every machine; where it counts no
    device there is none. Apple's MPS is left out: torch has no streams for it. A process that is
    forked afterwards can still use CUDA.

    Example::

        dataparallel.accelerators()   # (device(type='cuda', index=0), device(type='cuda', index=1))

    Returns:
        One device with its index per accelerator, in index order; empty when there are none.
    """
    kind = torch.accelerator.current_accelerator()
    if kind is None or not _has_streams(torch.get_device_module(kind)):
        return ()
    # CUDA itself cannot say after a fork if the accelerator is available; the driver can say the
    # number.
    count = torch.accelerator.device_count()
    return tuple(torch.device(kind.type, index) for index in range(count))


def _has_streams(module: Any) -> bool:
    return hasattr(module, "current_stream")


@functools.lru_cache(maxsize=64)
def lacks_kernels(device: torch.device) -> bool:
    """True if this build of torch has no kernels for an architecture such as this CUDA device's.

    Kernels run on devices of the same major version and no lower minor one, PTX on all later ones.
    """
    if device.type != "cuda" or torch.version.hip:
        return False
    major, minor = torch.cuda.get_device_capability(device)
    built = [arch.split("_") for arch in torch.cuda.get_arch_list() if "_" in arch]
    for kind, version in built:
        digits = int("".join(filter(str.isdigit, version)))
        its = divmod(digits, 10)
        is_exact = version.endswith("a")
        if its == (major, minor) or (kind == "compute" and not is_exact and its < (major, minor)):
            return False
        if kind == "sm" and not is_exact and its[0] == major and its[1] < minor:
            return False
    return bool(built)


def _usable() -> tuple[torch.device, ...]:
    """Return the accelerators for which torch has kernels; all if it has them for none."""
    there = accelerators()
    if len(there) < 2:
        return there
    lacking = tuple(filter(lacks_kernels, there))
    if not lacking or lacking == there:
        return there
    _tell_of_lacking(lacking)
    return tuple(device for device in there if device not in lacking)


@functools.lru_cache(maxsize=1)
def _tell_of_lacking(lacking: tuple[torch.device, ...]) -> None:
    _log.warning(
        "left out, since this build of torch has no kernels for them: %s. It was built for %s; "
        "device_ids= names devices explicitly",
        ", ".join(f"{one} ({_module(one).get_device_properties(one).name})" for one in lacking),
        " ".join(torch.cuda.get_arch_list()),
    )


def parse_device(spec: DeviceLike) -> torch.device:
    """Return the ``torch.device`` that is meant; a TypeError or a ValueError if there is none.

    Without an index it is the current device of its type; an int is the index of an accelerator.
    """
    if isinstance(spec, bool) or not isinstance(spec, (int, str, torch.device)):
        raise TypeError(
            f"a device is an int, a str or a torch.device, but got {spec!r} "
            f"of type {type(spec).__name__}"
        )
    if isinstance(spec, int):
        there = accelerators()
        if spec not in range(len(there)):
            raise ValueError(f"device {spec} does not exist; {_devices_that_exist()}")
        return there[spec]
    try:
        device = torch.device(spec)
        if device.type == "cpu":
            return _CPU
        module: Any = torch.get_device_module(device)
        count = int(module.device_count())
    except (RuntimeError, AttributeError) as error:
        fault = str(error).splitlines()[0]
        if str(spec).startswith("virtual"):
            fault = (
                "call dataparallel.virtual.enable() at the start of the program, or set "
                "DATAPARALLEL_VIRTUAL_DEVICES"
            )
        raise ValueError(f"{spec!r} is not a device: {fault}; {_devices_that_exist()}") from error
    if count and not _has_streams(module):
        raise ValueError(
            f"replicas cannot be on {spec!r}: {module.__name__} has no streams, by which work of "
            "several replicas is ordered. Use the bare module there, or CPU replicas: "
            'device_ids=["cpu", "cpu"]'
        )
    index = device.index
    if index is None:
        index = int(module.current_device()) if count else 0
    if index >= count:
        raise ValueError(f"device {spec!r} does not exist; {_devices_that_exist()}")
    return torch.device(device.type, index)


def parse_devices(device_ids: Sequence[DeviceLike] | None) -> tuple[torch.device, ...]:
    """Return the device slots of a list, one per replica; None means all accelerators, or one CPU.

    A device may have several slots. None leaves out those for which torch has no kernels.
    """
    if device_ids is None:
        return _usable() or (_CPU,)
    if isinstance(device_ids, str) or not isinstance(device_ids, Iterable):
        raise TypeError(
            f"device_ids is a list with one entry per replica, but got {device_ids!r}; write "
            f'[{device_ids!r}] for one device, range(n) for n of them, ["cpu"] * n for CPU replicas'
        )
    slots = tuple(map(parse_device, device_ids))
    if not slots:
        raise ValueError(
            "device_ids is empty, but a replica needs a device; leave it out to use every "
            f"device. {_devices_that_exist()}"
        )
    return slots


def parse_output_device(spec: DeviceLike | None, default: torch.device) -> torch.device:
    """Like :func:`parse_device`; ``None`` means ``default`` and ``-1`` the CPU, as in torch."""
    if spec is None:
        return default
    if spec == -1:
        return _CPU
    return parse_device(spec)


def _devices_that_exist() -> str:
    names = ", ".join(str(device) for device in (*accelerators(), _CPU))
    none = '; of accelerators this machine has none: for CPU replicas say device_ids=["cpu", "cpu"]'
    return f"the devices of this machine are: {names}{'' if accelerators() else none}"


# --- what differs between device types -------------------------------------------------------


class _Bound(threading.local):
    def __init__(self) -> None:
        self.devices: set[torch.device] = set()


#: The GPUs whose contexts this thread has.
_bound = _Bound()


def is_accelerator(device: torch.device) -> bool:
    """True if work on ``device`` is queued on streams (everything but the CPU).

    The autograd engine has a thread for it; on the CPU a backward runs in that of its caller.
    """
    return device.type != "cpu"


def has_hardware_links(device: torch.device) -> bool:
    """True if copies to other devices of this type go over hardware, not through host memory."""
    return device.type not in ("cpu", "virtual")


#: The share of the largest device that each should have; as in torch.nn.DataParallel.
_ENOUGH = 0.75


def describe_imbalance(devices: Iterable[torch.device]) -> str:
    """Name an accelerator with much less memory or fewer processors than another one; "" if none.

    The rule is that of ``torch.nn.DataParallel``: less than 75 %.
    """
    distinct = [device for device in dict.fromkeys(devices) if is_accelerator(device)]
    if len(distinct) < 2:
        return ""
    for attribute, unit, scale in (
        ("total_memory", "GiB of memory", 2**30),
        ("multi_processor_count", "multiprocessors", 1),
    ):
        sizes = {}
        for device in distinct:
            ask = getattr(_module(device), "get_device_properties", None)
            sizes[device] = getattr(ask(device), attribute, 0) if ask else 0
        least, most = min(distinct, key=sizes.__getitem__), max(distinct, key=sizes.__getitem__)
        if sizes[least] < _ENOUGH * sizes[most]:
            few, many = sizes[least] / scale, sizes[most] / scale
            return f"{least} has {few:,.4g} {unit}, {most} has {many:,.4g}"
    return ""


def use_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` the current device of its type within a ``with`` block."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    context: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return context


def bind_thread(device: torch.device) -> None:
    """Give this thread the context of a GPU. It has none until CUDA's runtime is called in it.

    Without one cuBLAS warns. Reading the free memory is also allowed while a graph is captured.
    """
    if device.type == "cuda" and device not in _bound.devices:
        torch.cuda.mem_get_info(device)
        _bound.devices.add(device)


def is_capturing(device: torch.device) -> bool:
    """True if what this thread queues on its current stream is recorded in a graph, not run."""
    if device.type == "cpu":
        return False
    ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    if ask is None:
        return False
    # It asks about the current device.
    with use_device(device):
        return bool(ask())


#: By type of device, what the class of its graphs is called.
_GRAPHS = {"cuda": "CUDAGraph", "virtual": "VirtualGraph"}


def has_graphs(device: torch.device) -> bool:
    """True if work on ``device`` can be recorded in a graph and replayed."""
    return device.type in _GRAPHS


@contextlib.contextmanager
def recording(stream: torch.Stream, pool: Any) -> Iterator[Any]:
    """Record what is queued within a ``with`` block in a graph, in place of running it.

    Graphs with one ``pool`` (``graph_pool_handle()``) and one stream use each other's free memory.
    """
    module: Any = torch.get_device_module(stream.device)
    graph = getattr(module, _GRAPHS[stream.device.type])()
    # Other threads may pin memory meanwhile, or ask whether a collective has ended.
    here = module.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    with use_device(stream.device), here:
        yield graph


def _module(device: torch.device) -> Any:
    """Return the module for a device, not for ``torch.accelerator``: there may be virtual ones."""
    return torch.get_device_module(device)


def memory_allocated(device: torch.device) -> int:
    """Bytes that tensors occupy on an accelerator; 0 on the CPU, where torch does not count."""
    return 0 if device.type == "cpu" else int(_module(device).memory_allocated(device))


class Memory(NamedTuple):
    """The memory of an accelerator; zeros for the CPU."""

    #: The most bytes that tensors have occupied at a time.
    peak: int = 0
    #: Bytes that there are.
    total: int = 0
    #: The number of times that the allocator found no memory, gave back its cache, and tried again.
    retries: int = 0


def memory_of(device: torch.device) -> Memory:
    """Return the facts about a device's memory."""
    if device.type == "cpu":
        return Memory()
    stats, total = _module(device).memory_stats(device), 0
    # Not each backend tells it.
    with contextlib.suppress(RuntimeError):
        total = _module(device).mem_get_info(device)[1]
    retries = stats.get("num_alloc_retries", 0)
    return Memory(stats.get("allocated_bytes.all.peak", 0), total, retries)


# The messages of plain RuntimeErrors: of the CPU's allocator, and of libraries that allocate for
# themselves.
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if an exception says that there was too little memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _OUT_OF_MEMORY)


def empty_cache(device: torch.device) -> None:
    """Let the allocator of an accelerator give back the memory that it keeps for later."""
    empty = None if device.type == "cpu" else getattr(_module(device), "empty_cache", None)
    if empty is not None:
        with use_device(device):
            empty()


# --- streams ---------------------------------------------------------------------------------


#: None is the stream of the CPU, which executes at once: everything on it has already happened.
Stream: TypeAlias = torch.Stream | None

#: By device, and by whether they are for copies to it.
_side_streams: dict[tuple[torch.device, bool], torch.Stream] = {}


def current_stream(device: torch.device) -> Stream:
    """Return the stream on which work for ``device`` is queued by this thread."""
    if device.type == "cpu":
        return None
    stream: torch.Stream = torch.get_device_module(device).current_stream(device)
    return stream


def stream_reader(device: torch.device) -> Callable[[], torch.Stream]:
    """Return a quick way to :func:`current_stream`; compare what it returns with its kind alone."""
    kind = torch.accelerator.current_accelerator()
    if kind is not None and kind.type == device.type:
        return functools.partial(torch_internals.accelerator_stream, device.index)
    return functools.partial(_module(device).current_stream, device)


def copy_stream(device: torch.device) -> Stream:
    """Return the side stream for this package's copies to ``device``, which overlap computation.

    One per device for the life of the process; the caller orders it with :func:`wait_stream`.
    """
    return None if device.type == "cpu" else _side_stream(device, True)


def host_stream(device: torch.device) -> torch.Stream:
    """Return the side stream for copies from an accelerator to the host, beside those to it."""
    return _side_stream(device, False)


def _side_stream(device: torch.device, is_inward: bool) -> torch.Stream:
    if (key := (device, is_inward)) not in _side_streams:
        # If several threads come here at once, one of them wins.
        _side_streams.setdefault(key, torch.Stream(device))
    return _side_streams[key]


@contextlib.contextmanager
def use_stream(stream: Stream) -> Iterator[None]:
    """Queue this thread's work for the stream's device on ``stream`` within a ``with`` block."""
    if stream is None:
        yield
        return
    device = stream.device
    module: Any = torch.get_device_module(device)
    with use_device(device):
        # Not `with stream`, which keeps what was current in the object, for all threads together.
        before = module.current_stream(device)
        module.set_stream(stream)
        try:
            yield
        finally:
            module.set_stream(before)


def current_streams(devices: Iterable[torch.device]) -> tuple[torch.Stream, ...]:
    """Return this thread's current streams of the accelerators among some devices."""
    return tuple(filter(None, map(current_stream, devices)))


def use_streams(streams: Iterable[torch.Stream]) -> AbstractContextManager[None]:
    """Like :func:`use_stream` for several devices; the current device stays the same."""
    given = tuple(streams)
    return _using(given) if given else contextlib.nullcontext()


@contextlib.contextmanager
def _using(streams: Sequence[torch.Stream]) -> Iterator[None]:
    others = [stream for stream in streams if current_stream(stream.device) != stream]
    if not others:
        yield
        return
    kind = others[0].device.type
    here = torch.device(kind, torch.get_device_module(kind).current_device())
    with contextlib.ExitStack() as stack:
        for stream in others:
            stack.enter_context(use_stream(stream))
        stack.enter_context(use_device(here))
        yield


@contextlib.contextmanager
def restored_streams(streams: Collection[torch.Stream]) -> Iterator[Callable[[torch.Stream], None]]:
    """Give a function that makes a stream current; afterwards these and the device are again.

    Cheaper than :func:`use_stream` for each of many copies between the devices of ``streams``.
    """
    module: Any = torch.get_device_module(next(iter(streams)).device)
    here = module.current_device()
    try:
        yield module.set_stream
    finally:
        for stream in streams:
            module.set_stream(stream)
        module.set_device(here)


def wait_stream(waiting: Stream, awaited: Stream) -> None:
    """Let later work on ``waiting`` start only after all work queued so far on ``awaited``.

    The host does not block, unless the CPU waits for a device: it has no queue to order.
    """
    if awaited is None or waiting == awaited:
        return
    if waiting is None:
        awaited.synchronize()
    else:
        # Not by an event of torch.cuda's, for which a torch.Stream does not wait.
        waiting.wait_stream(awaited)


def record_event(stream: torch.Stream) -> torch.Event:
    """Return an event that happens when all has that is queued on ``stream`` so far."""
    # Not by the stream, which may give one of torch.cuda's: see `wait_stream`.
    event = torch.Event(stream.device)
    event.record(stream)
    return event


def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    """Keep the memory of ``tensor`` until work queued so far on ``stream`` has used it.

    Needed if a tensor is used on another stream than the one on which it was allocated.
    """
    if stream is None or tensor.device.type == "cpu":
        return
    if tensor.layout == torch.sparse_coo:
        torch_internals.sparse_indices(tensor).record_stream(stream)
        tensor = torch_internals.sparse_values(tensor)
    tensor.record_stream(stream)


def timing_event(device: torch.device) -> torch.Event | None:
    """Return an event that happens when all has that this thread has queued; None for the CPU."""
    if device.type == "cpu":
        return None
    return _recorded(torch.Event(device, enable_timing=True), device)


def runs_behind(device: torch.device) -> bool:
    """True if work on a device may happen after the host has issued it."""
    defers = getattr(torch.get_device_module(device), "defers", None)
    return device.type != "cpu" if defers is None else bool(defers())


def _recorded(event: torch.Event, device: torch.device) -> torch.Event:
    with use_device(device):
        event.record(torch.get_device_module(device).current_stream(device))
    return event


def to_host_later(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Event]:
    """Copy a tensor of an accelerator to the host; return the copy and the event after it."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    return copy, _recorded(torch.Event(tensor.device), tensor.device)


def synchronize(device: torch.device) -> None:
    """Block the host until all work queued on ``device`` has happened."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def device_uuid(device: torch.device) -> str | None:
    """Return the identity of an accelerator in every process and tool; None if it has none."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    uuid = None if properties is None else getattr(properties(device), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


# --- intra-op threads ------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def intra_op_shares(devices: tuple[torch.device, ...], num_threads: int) -> tuple[int, ...]:
    """Divide intra-op threads among the slots, so that CPU slots together use those of one.

    At least 1, as (3, 3, 2) of 8; all for accelerators, whose threads need no limit.
    """
    num_on_cpu = [device.type for device in devices].count("cpu")
    whole, rest = divmod(num_threads, max(1, num_on_cpu))
    shares = iter([max(1, whole + (i < rest)) for i in range(num_on_cpu)])
    return tuple(next(shares) if device.type == "cpu" else num_threads for device in devices)
