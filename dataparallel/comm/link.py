"""Links between processes: collectives with a time limit, on a process group of their own.

Note [A link of one's own]
~~~~~~~~~~~~~~~~~~~~~~~~~~
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

Note [What a backend takes]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Contiguous tensors of some types, on the devices for which the group has a backend. Gloo adds
float16 and bfloat16 in their own precision, rounded at every process on the way; torch's DDP
leaves it at that, and so do we: same numbers.

Other types have no sum anywhere. Integers travel as int64, where the sum is exact and wraps on
return as it would have; small floats travel as float32, complex ones as complex64, and are
rounded once, on return. What is only moved travels as bytes. Sparse tensors can be added by gloo
if they have one of few types, so they all travel as float32, float64 or int64.

Note [Groups for accelerators only]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
What this package itself has to say is in CPU tensors, which a group as
``init_process_group("nccl")`` makes it refuses. Where the parent has no backend for them, the new
group has gloo beside the parent's own, so that control and buckets go through the same link.

Note [Groups that are bound]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Where the default group is bound to a device (``init_process_group(device_id=...)``), torch splits
new communicators from that of the default group. For a split all processes of the default group
have to come, and only those of the parent make the new one: they would wait for ever. And a link
needs a communicator only once a tensor on an accelerator goes through it. So torch is not to see,
for this moment, that the default group is bound, and makes a communicator anew.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import constants

from dataparallel import devices as _devices
from dataparallel import torch_internals
from dataparallel.comm import interpreter_end
from dataparallel.comm.failures import OWN, SLICE, failures_of, shared_store
from dataparallel.comm.process_errors import (
    CollectiveError,
    CollectiveTimeout,
    Failure,
    Place,
    name_ranks,
    purpose_of,
)

T = TypeVar("T")

#: What every backend takes; see Note [What a backend takes].
TAKEN = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)

# Shorter waits are not possible: for gloo, 0 ms mean forever.
_SHORTEST = 0.001
# Seconds by which the backend's own time limit comes first: it ends the collective, ours only the
# wait for it.
_MARGIN = 0.15
# How many collectives are remembered, should a backend not tell that they have ended.
_KEPT = 256
# Greatest length of the text of one process, in bytes. Plans of a model take far less.
_LONGEST_TEXT = 256 << 20
# What backends write when nothing but their time limit was reached.
_TIME_IS_OVER = ("timed out", "timeout")
# Of a collective, in torch's ``WorkResult``.
_SUCCESS = 0
# Seconds that releasing a group may take before it goes on in the background.
_RELEASE_TIMEOUT = 2.0

_HOST = torch.device("cpu")


def wait_briefly(work: dist.Work, seconds: float) -> bool:
    """Wait for a collective for at most so many seconds, and tell whether it has ended."""
    try:
        work.wait(datetime.timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        # Raises if it was more than the end of this short wait.
        work.wait()
    return True


def is_time_limit(message: str) -> bool:
    """Whether this is what a backend writes when nothing but its time limit was reached."""
    return any(word in message.lower() for word in _TIME_IS_OVER)


class Pending:
    """A collective that was launched. Made by :class:`ProcessLink`."""

    def __init__(
        self, link: ProcessLink, place: Place, started: float, work: dist.Work, carried: Carried
    ) -> None:
        self._link = link
        self.place = place
        self.started = started
        self._work = work
        self._carried = carried

    def __repr__(self) -> str:
        return f"Pending({self.place}, done={self.done()})"

    def wait(self) -> None:
        """Wait until the result is in the tensor. May be called again."""
        self.wait_for_backend()
        self._carried.deliver()

    def wait_for_backend(self) -> None:
        """Wait until what was sent has its result, without bringing that to the tensor."""
        if _devices.is_accelerator(self._carried.sent.device):
            # Orders the current stream, or blocks up to the time limit of the group.
            self._link.wait_in_slices(self.place, self.started, lambda _: self._work.wait())
            self._link.check_all_late()
        else:
            wait = functools.partial(wait_briefly, self._work)
            self._link.wait_in_slices(self.place, self.started, wait)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        result = self._result()
        return bool(self._work.is_completed() if result is None else result.done())

    def reason(self) -> str | None:
        """Why one that has ended has failed; None if it has not."""
        result = self._result()
        if result is None:
            try:
                self._work.wait()
            except RuntimeError as error:
                return str(error)
            return None
        if result.value() == _SUCCESS:
            return None
        # Torch warns that it is deprecated, and has nothing else that tells why.
        try:
            return str(self._work.exception())
        except TypeError:
            return f"torch {torch.__version__} hands no error of the backend to Python"

    def _result(self) -> torch.futures.Future[int] | None:
        """Where a backend whose wait does not block says how it ended; None for others."""
        # Torch's types lack it.
        untyped: Any = self._work
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
        self.timeout = timeout_of(parent) if timeout is None else timeout
        self.launched: Counter[str] = Counter()
        self._sequence = 0
        self._failures = failures_of(parent)
        self._broken: str | None = None
        self._cause: Failure | None = None
        self._is_closed = False
        self._launching = threading.Lock()
        self._failing = threading.Lock()
        # See Note [Late failures].
        self._under_way: deque[Pending] = deque(maxlen=_KEPT)
        self._looking = threading.Lock()
        self._next_look = 0.0
        self.name = self._failures.meet(purpose, self.timeout)
        self._generation = self._failures.generation
        try:
            self._holder = [_make_group(parent, self.name, self.timeout)]
        except CollectiveError as error:
            self._failures.report(error, f"the making of the link for {purpose!r}")
            raise
        self._finalizer = weakref.finalize(self, _release, self._holder)
        # At exit all connections end anyway.
        self._finalizer.atexit = False
        self._failures.watch_over(self, self.name, self.timeout)
        self._backends = {
            device.type: str(torch_internals.group_backend(self.group, device).name())
            for device in torch_internals.group_devices(self.group)
        }
        self.devices = frozenset(self._backends)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "broken" if self.broken else "open"
        return f"ProcessLink({self.name}, rank {self.rank} of {self.world_size}, {state})"

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group that the link owns."""
        try:
            return self._holder[0]
        except IndexError:
            raise self._unusable() from None

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._is_closed

    def close(self) -> None:
        """Give the process group back. Returns within seconds in any case; may be called again."""
        self._is_closed = True
        self._finalizer()

    def backend_for(self, device: torch.device) -> str | None:
        """The name of the backend that computes with tensors on a device; None if none does."""
        return self._backends.get(device.type) or self._backends.get("cpu")

    # --- failures --------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        """Whether the processes have begun another generation; see Note [Generations]."""
        return self._failures.generation != self._generation

    @property
    def failure(self) -> Failure | None:
        """What is known of a process of the link that has failed; None if nothing is."""
        return self._cause or (None if self._is_over else self._failures.failure)

    @property
    def broken(self) -> str | None:
        """Why the link can't be used any more; ``None`` if it can."""
        if self._broken is None and self._is_over:
            return "the processes have made new links after a failure"
        return self._broken or (None if self.failure is None else str(self.failure))

    def look(self) -> Failure | None:
        """As :attr:`failure`, after a look into the store."""
        if self.world_size > 1 and not self._is_over:
            self._failures.look()
        return self.failure

    def report(self, error: BaseException, doing: str, *, kind: str = "raised") -> None:
        """Let all processes of the link raise, since this one has failed."""
        if self.world_size > 1 and not self._is_over:
            self._failures.report(error, doing, kind=kind)

    def give_up(self) -> None:
        """Close all connections, since processes may be at different collectives."""
        if self._finalizer.detach() is not None:
            _release(self._holder, 0.0)

    def failed(
        self, place: Place, started: float, reason: str | None = None, *, timed_out: bool = False
    ) -> CollectiveError | CollectiveTimeout:
        """The error for a collective that failed; from now on the link is broken in all ranks."""
        with self._failing:
            if self._is_closed or self._broken is not None or self._is_over:
                return self._unusable()
            seconds = time.monotonic() - started
            timed_out |= seconds >= self.timeout
            if reason is not None and is_time_limit(reason):
                reason, timed_out = None, True
            error = self._failures.explain(place, self.name, seconds, reason, timed_out=timed_out)
            self._broken, self._cause = str(error), error.failure
        return error

    def check_late(self) -> None:
        """Raise the error of a collective that has failed; see Note [Late failures]."""
        while self._under_way:
            with self._looking:
                if not self._under_way:
                    return
                pending = self._under_way[0]
                has_ended = pending.done()
                if not has_ended and not self._is_given_up():
                    return
                self._under_way.popleft()
            reason = pending.reason() if has_ended else None
            if (reason is not None or not has_ended) and not self._is_closed:
                # Whatever else was launched has no result, either.
                self._under_way.clear()
                raise self.failed(pending.place, pending.started, reason)

    def check_all_late(self) -> None:
        """The same for all links over the processes of the group."""
        self._failures.check_late()

    def _is_given_up(self) -> bool:
        now = time.monotonic()
        if now > self._next_look:
            self._next_look = now + SLICE
            self.look()
        return self.broken is not None

    def _check(self, operation: str, what: str) -> None:
        """Raise a CollectiveError if the link is closed or broken; says what came next."""
        if self._is_closed or self._broken is not None:
            raise self._unusable()
        if self.broken is not None:
            raise self.failed(Place(self._sequence + 1, operation, what), time.monotonic())

    def _unusable(self) -> CollectiveError:
        if self._is_closed:
            return CollectiveError(
                f"{self!r}: the link was closed; make a new one in every process"
            )
        return CollectiveError(
            f"the link for {purpose_of(self.name)!r} is broken, because its processes may be at "
            "different collectives since one failed; close it and make a new one in every process, "
            f"or start the processes again. What failed: {self.broken}",
            failure=self.failure,
        )

    # --- collectives -----------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, *, op: str = "sum", what: str) -> Pending:
        """Replace a tensor, in every process, by the sum over all, or another reduction."""
        carried = self._carry(tensor, dtype=summed_as(tensor))
        of_torch: Any = getattr(dist.ReduceOp, op.upper())
        return self._launch(
            "all_reduce",
            what,
            carried,
            lambda group: dist.all_reduce(carried.sent, of_torch, group, async_op=True),
        )

    def broadcast(self, tensor: torch.Tensor, source: int, *, what: str) -> Pending:
        """Replace a tensor, in every process, by that of the process ``source``."""
        if not 0 <= source < self.world_size:
            raise ValueError(f"source is from 0 to {self.world_size - 1}, but got {source}")
        _check_strided(tensor, "broadcast", what)
        carried = self._carry(tensor, load=self.rank == source)
        return self._launch(
            "broadcast",
            what,
            carried,
            lambda group: dist.broadcast(
                carried.sent, group=group, group_src=source, async_op=True
            ),
        )

    def all_gather(self, tensor: torch.Tensor, *, what: str) -> list[torch.Tensor]:
        """The tensors of all processes, by rank, as new tensors on the device of this one."""
        _check_strided(tensor, "all_gather", what)
        carried = self._carry(tensor)
        parts = [torch.empty_like(carried.sent) for _ in range(self.world_size)]
        self._launch(
            "all_gather",
            what,
            carried,
            lambda group: dist.all_gather(parts, carried.sent, group, async_op=True),
        ).wait_for_backend()
        return [carried.restored(part) for part in parts]

    def all_gather_json(self, value: Any, *, what: str) -> list[Any]:
        """The values of all processes, by rank: two small collectives, and no pickle."""
        data = json.dumps(value).encode()
        sizes = self.all_gather(torch.tensor(len(data), device=_HOST), what=f"size of {what}")
        lengths = [int(size) for size in sizes]
        _check_lengths(lengths, what)
        padded = torch.tensor(list(data.ljust(max(lengths))), dtype=torch.uint8, device=_HOST)
        parts = self.all_gather(padded, what=what)
        return [_decoded(part, rank, what) for rank, part in enumerate(parts)]

    def run(
        self,
        operation: str,
        sent: torch.Tensor,
        start: Callable[[dist.ProcessGroup], dist.Work | None],
        *,
        what: str,
    ) -> None:
        """Launch any other collective of torch and wait for it."""
        self._launch(operation, what, self._carry(sent), start).wait_for_backend()

    def wait_for(self, future: torch.futures.Future[T], *, what: str) -> T:
        """The value of a future that somebody else completes, such as a communication hook."""
        ready = threading.Event()
        future.add_done_callback(lambda _: ready.set())
        place = Place(self._sequence, "future", what)
        self.wait_in_slices(place, time.monotonic(), ready.wait)
        return future.wait()

    def _carry(
        self, tensor: torch.Tensor, *, dtype: torch.dtype | None = None, load: bool = True
    ) -> Carried:
        self._check("the next collective", "this link")
        taken = tensor.device.type in self.devices
        if tensor.layout != torch.strided:
            # Gloo adds up sparse tensors, and NCCL does not: those go through the host.
            taken = taken and self._backends[tensor.device.type] == "gloo"
        return Carried(tensor, taken=taken, dtype=dtype or tensor.dtype, load=load)

    def _launch(
        self,
        operation: str,
        what: str,
        carried: Carried,
        start: Callable[[dist.ProcessGroup], dist.Work | None],
    ) -> Pending:
        with self._launching:
            self._failures.check_late()
            self._check(operation, what)
            self._sequence += 1
            place = Place(self._sequence, operation, what)
            self.launched[operation] += 1
            started = time.monotonic()
            try:
                work = start(self.group)
            except (RuntimeError, ValueError) as error:
                raise self.failed(place, started, str(error)) from error
        assert work is not None, "only processes outside of the group get nothing"
        pending = Pending(self, place, started, work, carried)
        if _devices.is_accelerator(carried.sent.device):
            self._under_way.append(pending)
        return pending

    def wait_in_slices(self, place: Place, started: float, wait: Callable[[float], object]) -> None:
        """Wait for a collective. All waits come here."""
        deadline = time.monotonic() + self.timeout + _MARGIN
        while True:
            remaining = deadline - time.monotonic()
            try:
                if wait(max(_SHORTEST, min(SLICE, remaining))):
                    return
            except RuntimeError as error:
                raise self.failed(place, started, str(error)) from error
            interpreter_end.come_by()
            if self.look() is not None or self.broken is not None or remaining <= 0:
                raise self.failed(place, started, timed_out=remaining <= 0)


# --- what travels ----------------------------------------------------------------------------


class Carried:
    """A tensor on its way through a collective."""

    __slots__ = ("_buffer", "sent", "tensor")

    def __init__(
        self, tensor: torch.Tensor, *, taken: bool, dtype: torch.dtype, load: bool
    ) -> None:
        is_strided = tensor.layout == torch.strided
        # A detached sparse tensor does not share changes.
        self.tensor = tensor.detach() if is_strided else tensor
        self._buffer: torch.Tensor | None = None
        if is_strided:
            plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        else:
            plain = not tensor.requires_grad
        if not (taken and plain and dtype == tensor.dtype):
            place = tensor.device if taken else _HOST
            if is_strided:
                self._buffer = torch.empty(tensor.shape, dtype=dtype, device=place)
                if load:
                    # Onto the host this blocks until the current stream got there.
                    self._buffer.copy_(self.tensor)
            else:
                self._buffer = tensor.detach().to(place, dtype)
        self.sent = self.tensor if self._buffer is None else self._buffer
        if is_strided and dtype not in TAKEN:
            self.sent = self.sent.view(-1).view(torch.uint8)

    def deliver(self) -> None:
        """Bring the result to the tensor."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        with torch.no_grad():
            if buffer.device == self.tensor.device or buffer.layout != torch.strided:
                self.tensor.copy_(buffer)
                return
            # From memory that isn't pinned, so this blocks: for the one copy, not for what the
            # current stream computes meanwhile.
            with _devices.use_stream(_devices.copy_stream(self.tensor.device)):
                self.tensor.copy_(buffer)

    def restored(self, part: torch.Tensor) -> torch.Tensor:
        """A tensor like the original out of one like ``sent``."""
        part = part.view(-1).view(self.tensor.dtype).view(self.tensor.shape)
        return part.to(self.tensor.device)


def summed_as(tensor: torch.Tensor) -> torch.dtype:
    """The type in which to add values of a tensor; see Note [What a backend takes]."""
    dtype = tensor.dtype
    wide = torch.float32 if dtype.is_floating_point else torch.int64
    if tensor.layout != torch.strided:
        return dtype if dtype == torch.float64 else wide
    if dtype in TAKEN:
        return dtype
    return torch.complex64 if dtype.is_complex else wide


def _check_strided(tensor: torch.Tensor, operation: str, what: str) -> None:
    if tensor.layout != torch.strided:
        raise ValueError(
            f"{operation} takes strided tensors, but {what} has the layout {tensor.layout}; "
            "send its indices and values"
        )


def _check_lengths(lengths: Sequence[int], what: str) -> None:
    """Refuse texts for which there would have to be more memory than for any real one."""
    for rank, length in enumerate(lengths):
        if not 0 < length <= _LONGEST_TEXT:
            raise ValueError(
                f"rank {rank} announces {what} of {length} bytes, but it may have 1 to "
                f"{_LONGEST_TEXT}; all processes have to run the same version of this package"
            )


def _decoded(part: torch.Tensor, rank: int, what: str) -> Any:
    text = bytes(part.tolist())
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"rank {rank} sent {text[:60]!r} as {what}, which is no JSON ({error}); all "
            "processes have to run the same version of this package"
        ) from error


# --- process groups --------------------------------------------------------------------------


def parent_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group itself, or the default group."""
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
    """The time limit of a group's collectives, in seconds: the shortest of its backends'."""
    limits = torch_internals.time_limits(group)
    return min(limits, default=constants.default_pg_timeout).total_seconds()


def _make_group(parent: dist.ProcessGroup, name: str, timeout: float) -> dist.ProcessGroup:
    """A new group over the processes of ``parent``, with its backends and one for the CPU."""
    ranks = dist.get_process_group_ranks(parent)
    backends = dist.get_backend_config(parent)
    # See Note [Groups for accelerators only].
    has_cpu = any(pair.startswith("cpu:") for pair in backends.split(","))
    try:
        with _unbound.default_group():
            group = torch_internals.new_process_group(
                parent,
                ranks,
                dist.Backend(dist.get_backend(parent) if has_cpu else f"cpu:gloo,{backends}"),
                shared_store(parent),
                # Torch knows all groups of a process by name, and the numbers of two parents are
                # alike.
                f"{parent.group_name}/{name}",
                timeout=datetime.timedelta(seconds=timeout),
                group_desc=f"{OWN}{name}",
            )
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {dist.get_rank()} could not connect to {name_ranks(ranks)} for {name!r}: {error}"
        ) from error
    assert isinstance(group, dist.ProcessGroup)
    return group


class _Unbound:
    """Hides from torch that the default group is bound, as long as any thread wants that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._hidden: tuple[Any, Any] = (None, None)

    @contextlib.contextmanager
    def default_group(self) -> Iterator[None]:
        """See Note [Groups that are bound]."""
        with self._lock:
            self._count += 1
            if self._count == 1:
                world: Any = dist.group.WORLD
                self._hidden = world, world.bound_device_id
                world.bound_device_id = None
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if self._count == 0:
                    world, world.bound_device_id = self._hidden
                    self._hidden = None, None


_unbound = _Unbound()


def _release(holder: list[dist.ProcessGroup], seconds: float = _RELEASE_TIMEOUT) -> None:
    """Give the connections and threads of a group back."""

    def release() -> None:
        group = holder.pop()
        # Otherwise the user has destroyed all groups already, or does so just now.
        if torch_internals.is_registered(group):
            with contextlib.suppress(KeyError, ValueError):
                dist.destroy_process_group(group)

    interpreter_end.run_beside(release, "dataparallel-release").join(seconds)
