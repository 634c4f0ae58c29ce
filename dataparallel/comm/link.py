"""Links between processes: collectives with a time limit, on a process group of their own.

Collectives of one process group are matched by their order alone. Two parts of a program that share
a group, and come in another order in another process, get each other's numbers without an error.
So every part that communicates has a link, and every link a process group of its own.

Note [Late failures]
~~~~~~~~~~~~~~~~~~~~
The wait for a collective on an accelerator orders streams, and the host goes on. If the backend
fails then, nobody waits any more, and what is in the tensor is not the result. So a link remembers
what it has launched there until that has ended. Whoever launches the next collective over the same
processes, on whatever link, or begins a forward, looks at what has ended since, and raises the
error of what has failed. So does whoever finds that a link was given up while its collectives were
under way: their results will never come.

Note [Time limits on accelerators]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
NCCL makes a communicator in the first collective of a device, and the host waits there for all
processes, however long that takes. So a link has it made by a thread beforehand, and waits in
slices, for as long as the time limit of the parent at least: no collective has begun.

A kernel whose peer never comes ends by an abort only, and the host may be behind it, in
``loss.item()`` or ``x.to(device)``. So while collectives are under way there, a thread looks for
what has ended the generation, and closes the links; whoever comes next raises. At the time limit of
its group, NCCL's watchdog ends the process, with no error in Python. It counts from the launch, and
so the time of a slow device, too. So backends of accelerators get more time than the link, and the
thread gives up first.

Note [What a backend takes]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Contiguous tensors on the devices for which the group has a backend. Gloo adds float16 and bfloat16
in their own precision, rounded at every process on the way; torch's DDP leaves it at that, and so
do we: same numbers. It adds few types of sparse tensors, so they travel as float32 or float64.

Note [Groups for accelerators only]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The package's own messages are CPU tensors, which a group as ``init_process_group("nccl")`` makes it
refuses. If the parent has no backend for them, the new group has gloo beside the parent's own, so
that control and buckets go through the same link.

Note [The thread that ends a group]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The end of a group waits for what its processes have begun, so a thread of its own ends it. In
free-threaded Python an object whose last reference another thread drops goes back to the thread
that has made it, and that one would wait. It is freed at once where its maker is gone, so there a
thread that ends makes the group.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import functools
import json
import sys
import threading
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import constants

from dataparallel import devices as _devices
from dataparallel import torch_internals
from dataparallel.comm import interpreter_end
from dataparallel.comm.errors import CollectiveError, CollectiveTimeout, Failure, name_ranks
from dataparallel.comm.failures import OWN, SLICE, failures_of, shared_store

T = TypeVar("T")

#: Gives a collective to the backend of a group, and does not wait for it.
Start: TypeAlias = Callable[[dist.ProcessGroup], Any]

# True if Python was built so that it can run without its lock, be that on or off.
_FREE_THREADED = "t" in getattr(sys, "abiflags", "")
# Shorter waits are not possible: for gloo, 0 ms mean forever.
_SHORTEST = 0.001
# Seconds by which the backend's own time limit comes first: it ends the collective, ours only the
# wait for it.
_MARGIN = 0.15
# Seconds that remain on accelerators after twice the time limit of the link: until it is given up,
# and from then until the backend ends the process. See Note [Time limits on accelerators].
_PATIENCE = 10.0
# How many collectives are remembered, should a backend not tell that they have ended.
_KEPT = 256
# The code of a success in torch's ``WorkResult``.
_SUCCESS = 0
# Seconds that releasing a group may take before it goes on in the background.
_RELEASE_TIMEOUT = 2.0

_HOST = torch.device("cpu")


def wait_briefly(work: dist.Work, device: torch.device, seconds: float) -> bool:
    """Wait for a collective for at most so many seconds, and tell whether it has ended."""
    if _devices.is_accelerator(device):
        # Orders the current stream, or blocks up to the time limit of the group.
        work.wait()
        return True
    try:
        work.wait(datetime.timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        # Raises if it was more than the end of this short wait.
        work.wait()
    return True


@dataclass(eq=False)
class Pending:
    """A collective that was launched: where, what the backend computes with, where that belongs."""

    link: ProcessLink
    where: str
    work: dist.Work
    sent: torch.Tensor
    #: None if it is what was sent, or nobody wants it.
    target: torch.Tensor | None
    started: float = field(default_factory=time.monotonic)

    def wait(self) -> None:
        """Wait until the result is in the tensor. May be called again."""
        wait = functools.partial(wait_briefly, self.work, self.sent.device)
        self.link.wait_in_slices(self.where, self.started, wait)
        target, self.target = self.target, None
        if target is not None:
            with torch.no_grad():
                target.copy_(self.sent)

    def done(self) -> bool:
        """True if it has ended, well or not."""
        result = self._result()
        return bool(self.work.is_completed() if result is None else result.done())

    def reason(self) -> str | None:
        """Return why an ended collective has failed; None if it has not."""
        result = self._result()
        try:
            if result is None:
                self.work.wait()
            elif result.value() != _SUCCESS:
                # Torch has nothing else that tells why. It warns once that this is deprecated, and
                # if warnings are errors, this one goes to the hook for a program's last error.
                warnings.filterwarnings("ignore", "Work::exception", UserWarning)
                return str(self.work.exception())
        except RuntimeError as error:
            return str(error)
        except TypeError:
            return f"torch {torch.__version__} hands no error of the backend to Python"
        return None

    def has_arrived(self) -> bool:
        """True if it has ended well."""
        return self.done() and self.reason() is None

    def _result(self) -> torch.futures.Future[int] | None:
        """Return the result of a backend whose wait does not block; None for other backends."""
        # Torch's types lack it.
        untyped: Any = self.work
        try:
            result: torch.futures.Future[int] = untyped.get_future_result()
        except RuntimeError:
            return None
        return result


class ProcessLink:
    """A process group of one's own, whose waits are limited and say what went wrong.

    When a collective fails, processes may have left it at different points, so later ones would be
    matched wrongly: the link is broken from then on, in every process. Gloo has no way to end a
    collective, so the wait ends and it is left alone, with the memory that it reads and writes.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float | None = None,
        purpose: str,
    ) -> None:
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout is a positive number of seconds, but got {timeout}")
        parent = parent_group(group)
        self.rank, self.world_size = parent.rank(), parent.size()
        limit = timeout_of(parent)
        self.timeout = limit if timeout is None else timeout
        self._connecting_timeout = max(limit, self.timeout)
        # The devices that can launch collectives.
        self._connected: set[torch.device] = set()
        #: How many collectives were launched, by operation.
        self.launched: Counter[str] = Counter()
        self._error = ""
        self._launching = threading.Lock()
        self._failing = threading.Lock()
        self._watching, self._is_watched = threading.Lock(), False
        # See Note [Late failures]; whoever goes over it or takes from it holds `_watching`.
        self._under_way: deque[Pending] = deque(maxlen=_KEPT)
        self._failures = failures_of(parent)
        self.name, self.generation, number = self._failures.meet(purpose, self.timeout)
        # Two wrappers have links for one purpose, and may wait for each other.
        self._purpose = purpose if number == 1 else f"{purpose} {number}"
        try:
            make = functools.partial(_make_group, parent, self.name, self.timeout)
            if _FREE_THREADED:
                # See Note [The thread that ends a group].
                with concurrent.futures.ThreadPoolExecutor(1) as thread:
                    self._holder = [thread.submit(make).result()]
            else:
                self._holder = [make()]
        except RuntimeError as error:
            text = f"rank {dist.get_rank()} could not connect to {name_ranks(self._failures.ranks)}"
            lost = CollectiveError(f"{text} for {self.name!r}: {error}")
            self.report(lost, f"the making of the link for {purpose!r}")
            raise lost from error
        self._finalizer = weakref.finalize(self, _release, self._holder)
        # At exit all connections end anyway.
        self._finalizer.atexit = False
        self._failures.add(self)
        #: The name of the backend for each type of device that has one.
        self.backends = {
            device.type: str(torch_internals.group_backend(self.group, device).name())
            for device in torch_internals.group_devices(self.group)
        }
        # Every process has to be connected before the first closes the link.
        work = dist.all_reduce(torch.zeros(1, device=_HOST), group=self.group, async_op=True)
        where = f"the making of the process group {purpose!r}"
        self.wait_in_slices(where, time.monotonic(), functools.partial(wait_briefly, work, _HOST))

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group that the link owns."""
        try:
            return self._holder[0]
        except IndexError:
            raise self._unusable() from None

    def close(self) -> None:
        """Give the process group back. Returns within seconds in any case; may be called again."""
        self._error = self._error or "it was closed"
        self._clear()
        self._finalizer()

    def blocks(self, device: torch.device) -> bool:
        """True if the host waits for collectives of tensors on a device."""
        return device.type not in self.backends or not _devices.is_accelerator(device)

    # --- failures --------------------------------------------------------------------------------

    @property
    def failure(self) -> Failure | None:
        """Return the known failure of a process of the link; None if there is none."""
        return self._failures.ends.get(self.generation)

    @property
    def broken(self) -> str:
        """Return why the link can't be used any more; empty if it can."""
        return self._error or ("" if self.failure is None else str(self.failure))

    def report(self, error: BaseException, doing: str, *, kind: str = "raised") -> None:
        """Let all processes of the link raise, since this one has failed."""
        self._failures.report(error, doing, kind=kind, generation=self.generation)

    def give_up(self) -> None:
        """Close all connections, since processes may be at different collectives."""
        if self._finalizer.detach() is not None:
            _release(self._holder, 0.0, aborts=True)

    def failed(
        self, where: str, started: float, reason: str | None = None, *, timed_out: bool = False
    ) -> CollectiveError | CollectiveTimeout:
        """Return the error for a failed collective; from now on all ranks' links are broken."""
        with self._failing:
            if self._error:
                return self._unusable()
            timed_out |= time.monotonic() - started >= self.timeout
            error = self._failures.explain(
                where, started, self.generation, reason, timed_out=timed_out
            )
            self._error = str(error)
        return error

    def check_late(self) -> None:
        """Raise the error of a collective that has failed; see Note [Late failures]."""
        while self._under_way:
            with self._failing, self._watching:
                if not self._under_way:
                    return
                pending = self._under_way[0]
                has_ended = pending.done()
                if not has_ended and not self.broken:
                    return
                self._under_way.popleft()
            reason = pending.reason() if has_ended else None
            if reason is not None or not has_ended:
                # Whatever else was launched has no result, either.
                self._clear()
                raise self.failed(pending.where, pending.started, reason)

    @property
    def under_way(self) -> tuple[Pending, ...]:
        """The collectives whose end nobody has seen yet; none where the host waits for each."""
        with self._watching:
            return tuple(self._under_way)

    def _clear(self) -> None:
        with self._watching:
            self._under_way.clear()

    def forget(self) -> None:
        """Raise no late error for what is under way, or is being launched by another thread."""
        self._under_way = deque(maxlen=0)

    def _watch(self) -> None:
        """Give up where a process has failed, until all that is under way has ended."""
        while True:
            time.sleep(SLICE)
            with self._watching:
                pending = next((each for each in tuple(self._under_way) if not each.done()), None)
                if pending is None or self.broken:
                    self._is_watched = False
                    return
            timed_out = time.monotonic() - pending.started > 2 * self.timeout + _PATIENCE
            if timed_out or self._failures.has_lost_another():
                self._failures.end(pending.where, self.generation, timed_out=timed_out)

    def _unusable(self) -> CollectiveError:
        error = CollectiveError(
            f"the link for {self._purpose!r} is broken; make a new one in every process, or start "
            f"the processes again. Why: {self.broken}",
            self.failure,
        )
        self._failures.note_error(error, self.generation)
        return error

    # --- collectives -----------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, *, op: str = "sum", what: str) -> Pending:
        """Replace a tensor, in every process, by the sum over all, or another reduction."""
        of_torch: Any = getattr(dist.ReduceOp, op.upper())
        sent, target = self._sendable(tensor)
        start = functools.partial(dist.all_reduce, sent, of_torch, async_op=True)
        return self._launch("all_reduce", what, start, sent, target)

    def broadcast(self, tensor: torch.Tensor, source: int, *, what: str) -> Pending:
        """Replace a tensor, in every process, by that of the process ``source``."""
        sent, target = self._sendable(tensor, load=self.rank == source)
        start = functools.partial(dist.broadcast, sent, None, async_op=True, group_src=source)
        return self._launch("broadcast", what, start, sent, target)

    def all_gather(self, tensor: torch.Tensor, *, what: str) -> list[torch.Tensor]:
        """Return the tensors of all processes, by rank, as new tensors on this one's device."""
        sent, _ = self._sendable(tensor)
        parts = [torch.empty_like(sent) for _ in range(self.world_size)]
        start = functools.partial(dist.all_gather, parts, sent, async_op=True)
        self.run("all_gather", sent, start, what=what)
        return [part.to(tensor.device) for part in parts]

    def all_gather_json(self, value: Any, *, what: str) -> list[Any]:
        """Return the values of all processes, by rank: two small collectives, and no pickle."""
        data = json.dumps(value).encode()
        sizes = self.all_gather(torch.tensor(len(data), device=_HOST), what=f"size of {what}")
        padded = torch.frombuffer(bytearray(data.ljust(int(max(sizes)))), dtype=torch.uint8)
        return [json.loads(bytes(part.tolist())) for part in self.all_gather(padded, what=what)]

    def tell(self, *numbers: float, what: str) -> Pending:
        """Tell all processes some numbers. Those of all, by rank, will be in what is ``sent``."""
        own = torch.tensor(numbers * self.world_size, dtype=torch.float64, device=_HOST)
        everyone = torch.empty_like(own)

        def start(group: dist.ProcessGroup) -> Any:
            # Straight from each to each, at half of what an all-reduce costs the host.
            return dist.all_to_all_single(everyone, own, group=group, async_op=True)

        return self._launch("all_to_all", what, start, everyone)

    def run(self, operation: str, sent: torch.Tensor, start: Start, *, what: str) -> None:
        """Launch a collective of torch and wait for it."""
        self._launch(operation, what, start, sent).wait()

    def wait_for(self, future: torch.futures.Future[T], *, what: str) -> T:
        """Return the value of a future that somebody else completes, such as a hook."""
        ready, where, started = threading.Event(), f"the wait for {what}", time.monotonic()
        future.add_done_callback(lambda _: ready.set())
        self.wait_in_slices(where, started, ready.wait)
        try:
            return future.wait()
        except RuntimeError as error:
            # A process that has failed closes its connections.
            if self._failures.has_lost_another():
                raise self.failed(where, started, str(error)) from error
            raise

    def _sendable(
        self, tensor: torch.Tensor, *, load: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a tensor for the backend, see the note of that name; and a copy's original."""
        backend = self.backends.get(tensor.device.type)
        if tensor.layout != torch.strided:
            # Gloo adds up sparse tensors, and NCCL does not: those go through the host.
            place = tensor.device if backend == "gloo" else _HOST
            wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            # A detached sparse tensor does not share changes.
            return tensor.detach().to(place, wide), tensor
        tensor = tensor.detach()
        if backend is not None and tensor.is_contiguous():
            return tensor, None
        place = _HOST if backend is None else tensor.device
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=place)
        # Onto the host this blocks until the current stream got there.
        return copy.copy_(tensor) if load else copy, tensor

    def _launch(
        self,
        operation: str,
        what: str,
        start: Start,
        sent: torch.Tensor,
        target: torch.Tensor | None = None,
    ) -> Pending:
        with self._launching:
            self._failures.check_late()
            number = self.launched.total() + 1
            where = f"{operation} of {what} (collective {number}) for {self._purpose!r}"
            started = time.monotonic()
            if self.broken:
                raise self.failed(where, started)
            if _devices.is_accelerator(sent.device) and sent.device not in self._connected:
                self._connect(sent.device)
                self._connected.add(sent.device)
            self.launched[operation] += 1
            try:
                work = start(self.group)
            except (RuntimeError, ValueError) as error:
                raise self.failed(where, started, str(error)) from error
        assert work is not None, "only processes outside of the group get nothing"
        pending = Pending(self, where, work, sent, target)
        if _devices.is_accelerator(sent.device):
            with self._watching:
                self._under_way.append(pending)
                starts, self._is_watched = not self._is_watched, True
            if starts:
                watch = threading.Thread(target=self._watch, name="dataparallel-watch", daemon=True)
                interpreter_end.start_thread(watch)
        return pending

    def _connect(self, device: torch.device) -> None:
        """Make the communicator of a device; a collective call."""
        backend = torch_internals.group_backend(self.group, device)
        made: Future[None] = Future()

        def connect() -> None:
            try:
                made.set_result(backend.eager_connect_single_device(device))
            except Exception as error:
                made.set_exception(error)

        def wait(seconds: float) -> bool:
            if concurrent.futures.wait([made], seconds).done:
                made.result()
                return True
            # Nothing else ends the wait for one that has come to the link, and not here.
            if self._failures.has_lost_another():
                raise RuntimeError("another process has failed")
            return False

        interpreter_end.run_beside(connect, "dataparallel-connect")
        where = f"the making of the communicator of {device} for {self._purpose!r}"
        self.wait_in_slices(where, time.monotonic(), wait, self._connecting_timeout)

    def wait_in_slices(
        self,
        where: str,
        started: float,
        wait: Callable[[float], object],
        timeout: float | None = None,
    ) -> None:
        """Wait for a collective. All waits come here."""
        timeout = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout + _MARGIN
        while True:
            remaining = deadline - time.monotonic()
            try:
                if wait(max(_SHORTEST, min(SLICE, remaining))):
                    break
            except RuntimeError as error:
                raise self.failed(where, started, str(error)) from error
            if self.broken or self._failures.while_waiting() is not None or remaining <= 0:
                raise self.failed(where, started, timed_out=remaining <= 0)
        self._failures.check_late()


# --- process groups --------------------------------------------------------------------------


def parent_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group itself, or the default group."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "collectives across processes need a process group; call "
            "torch.distributed.init_process_group() first, or train with one process"
        )
    parent = dist.group.WORLD if group is None else group
    if not isinstance(parent, dist.ProcessGroup):
        raise ValueError(
            f"rank {dist.get_rank()} is not a member of the process group; make the link in the "
            "processes of the group only"
        )
    return parent


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the time limit of a group's collectives, in seconds: the shortest of its backends'."""
    limits = torch_internals.time_limits(group)
    return min(limits, default=constants.default_pg_timeout).total_seconds()


def _make_group(parent: dist.ProcessGroup, name: str, timeout: float) -> dist.ProcessGroup:
    """Return a new group over the processes of ``parent``, with its backends and a CPU one."""
    backends = dist.get_backend_config(parent)
    # See Note [Groups for accelerators only].
    has_cpu = any(pair.startswith("cpu:") for pair in backends.split(","))
    group: dist.ProcessGroup = torch_internals.new_process_group(
        parent,
        dist.get_process_group_ranks(parent),
        dist.Backend(dist.get_backend(parent) if has_cpu else f"cpu:gloo,{backends}"),
        shared_store(parent),
        # Torch knows all groups of a process by name, and the numbers of two parents are alike.
        f"{parent.group_name}/{name}",
        timeout=datetime.timedelta(seconds=timeout),
        group_desc=f"{OWN}{name}",
    )
    limit = datetime.timedelta(seconds=2 * (timeout + _PATIENCE))
    host = torch_internals.group_backend(group, _HOST).name()
    for device in torch_internals.group_devices(group):
        # Gloo is one backend for all devices, and has no watchdog.
        if torch_internals.group_backend(group, device).name() != host:
            torch_internals.set_time_limit(group, device, limit)
    return group


def _release(
    holder: list[dist.ProcessGroup], seconds: float = _RELEASE_TIMEOUT, *, aborts: bool = False
) -> None:
    """Give the connections and threads of a group back, at once if it ``aborts`` collectives."""

    def release() -> None:
        group = holder.pop()
        # Otherwise the user has destroyed all groups already, or does so just now.
        if torch_internals.is_registered(group):
            for device in torch_internals.group_devices(group) if aborts else ():
                # Destroying waits for kernels on the device, which wait for processes that will
                # not come. On the host it ends waits by closing connections.
                if _devices.is_accelerator(device):
                    with contextlib.suppress(AttributeError, RuntimeError):
                        torch_internals.group_backend(group, device).abort()
            with contextlib.suppress(KeyError, ValueError):
                dist.destroy_process_group(group)

    interpreter_end.run_beside(release, "dataparallel-release").join(seconds)
