"""The work of a pool: items that one device computes together, and the treatment of errors.

Note [What fails alone]
~~~~~~~~~~~~~~~~~~~~~~~
If a batch of several items fails, each of them is computed by itself. So the error is that of the
item that has caused it, and the others get their results. If memory runs out, the halves of the
batch are computed one after the other, then their halves, down to one sample. Later batches on that
device are no larger than those for which there was memory.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from asyncio import wrap_future
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from dataparallel import devices as _devices
from dataparallel import torch_internals
from dataparallel.batch.gather import gather_outputs, has_scalars
from dataparallel.batch.scatter import ScatterPlan, execute, move, plan_scatter
from dataparallel.batch.tree import flatten
from dataparallel.errors import locate
from dataparallel.pool.batches import JointKey, Shares, join, key_of, take_apart
from dataparallel.pool.targets import Calls, Lent
from dataparallel.threads import exclusive
from dataparallel.threads.apply import apply_alone
from dataparallel.threads.context import ThreadContext, is_portable

T = TypeVar("T")
_CPU = torch.device("cpu")
_log = logging.getLogger("dataparallel")


class PoolFuture(Future[T]):
    """A ``concurrent.futures.Future`` that asyncio can await, too."""

    def __await__(self) -> Generator[Any, None, T]:
        return wrap_future(self).__await__()


@dataclass(frozen=True)
class PoolOptions:
    """The options of a pool, see :class:`dataparallel.Pool`."""

    devices: tuple[torch.device, ...]
    #: The device of results; None: where they were computed.
    output_device: torch.device | None
    inference: bool
    max_batch: int | None
    max_wait: float
    dim: int
    in_dims: Mapping[str | int, Any] | None
    out_dims: Any

    def plan(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], parts: int = 1) -> ScatterPlan:
        """Plan how the arguments of one call are divided."""
        return plan_scatter(args, kwargs, parts, self.dim, None, self.in_dims)


class Item:
    """One item, and the future of its result."""

    def __init__(self, value: Any, number: int) -> None:
        self.value, self.number = value, number
        self.future: PoolFuture[Any] = PoolFuture()
        #: How its samples are divided, for one that may be joined with others.
        self.plan: ScatterPlan | None = None

    def begin(self) -> bool:
        """Return whether somebody waits for the result."""
        return self.future.running() or self.future.set_running_or_notify_cancel()

    def fail(self, error: BaseException) -> None:
        """Let the future raise an error, unless it has something already."""
        if not self.future.done() and self.begin():
            self.future.set_exception(error)


class Call:
    """Everything but the items: what is called, in which context of the caller, by which rules."""

    def __init__(self, lent: Lent, options: PoolOptions) -> None:
        if not is_portable():
            raise RuntimeError(
                "the items of a pool run in other threads, where transforms of torch.func and "
                "torch.jit.trace do not hold; put the transform into a function, and make a pool "
                "of that"
            )
        exclusive.lock.refuse("a pool")
        self.lent, self.options = lent, options
        self.within_cached = torch_internals.is_caching_parametrizations()
        # Its block with False would switch gradients on.
        with torch.inference_mode() if options.inference else contextlib.nullcontext():
            self.context = ThreadContext(options.devices, by_number=True)

    def is_like(self, other: Call) -> bool:
        """True if items of both can be computed together."""
        return self is other or (self.lent is other.lent and self.context.is_like(other.context))

    def arguments(self, value: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the arguments that an item stands for."""
        if self.lent.target.unpacks and type(value) is tuple:
            return value, {}
        if self.lent.target.unpacks and isinstance(value, Mapping):
            return (), dict(value)
        return (value,), {}


class _Begun(NamedTuple):
    """An output that a device still computes, or copies to the host."""

    leaves: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]
    #: It is there after these events.
    events: Sequence[torch.Event]
    #: The indices of leaves in pinned memory.
    staged: Sequence[int]

    def end(self) -> Any:
        """Wait for the device, and return the output."""
        for event in self.events:
            event.synchronize()
        # Pinned memory is scarce, and serves for the next output.
        for index in self.staged:
            self.leaves[index] = self.leaves[index].clone()
        return self.rebuild(self.leaves)


class _Launched(NamedTuple):
    """Some items that a device computes by one call."""

    items: Sequence[Item]
    #: The samples that belong to each of several items.
    shares: Shares | None
    begun: _Begun


class Batch:
    """Items that one device computes together; the line may join several batches of one item.

    Args:
        call: Everything but the items.
        items: The items.
        collate: Makes the argument of the call out of the values of items, which are samples.
            Default: there is one item, which is the argument.
    """

    def __init__(
        self, call: Call, items: Sequence[Item], collate: Callable[[list[Any]], Any] | None = None
    ) -> None:
        self._call, self._items, self._collate = call, items, collate
        #: See :class:`dataparallel.pool.crew.Job`.
        self.key: Hashable = None
        self.size, self.most, self.deadline = 1, 1, 0.0
        options = call.options
        if options.max_batch is not None and collate is None:
            self._may_join(options, options.max_batch)
        self._calls: Calls = call.lent.acquire(self)

    def _may_join(self, options: PoolOptions, most: int) -> None:
        (item,) = self._items
        item.plan = options.plan(*self._call.arguments(item.value))
        parts = key_of(item.plan)
        if parts is not None:
            self.key = JointKey(parts, self._call)
            self.size, self.most = item.plan.batch_size or 0, most
            self.deadline = time.monotonic() + options.max_wait

    def is_over(self) -> bool:
        """True if nobody waits for a result any more."""
        return all(item.future.cancelled() for item in self._items)

    def fail(self, error: BaseException) -> None:
        """Tell whoever waits for a result that there is none."""
        for item in self._items:
            item.fail(error)
        self.release()

    def cancel(self) -> None:
        """Give up what nobody has begun; what has begun ends, and nobody looks at it."""
        if all([item.future.cancel() for item in self._items]):
            self.release()

    def release(self) -> None:
        """Let go of what is called."""
        self._calls = ()
        self._call.lent.release(self)

    def start(self, slot: int, others: Sequence[Any]) -> Callable[[], None] | None:
        """Begin the work together with that of others; returns what ends it, if it is not done."""
        batches = (self, *others)
        items = [item for batch in batches for item in batch._items if item.begin()]
        launched = self._launch(slot, items) if items else []
        end = functools.partial(self._end, launched, batches)
        if any(one.begun.events for one in launched):
            return end
        end()
        return None

    def _end(self, launched: Sequence[_Launched], batches: Sequence[Batch]) -> None:
        for one in launched:
            try:
                output = one.begun.end()
                parts = [output]
                if one.shares is not None:
                    parts = take_apart(output, one.shares, self._call.options.out_dims)
                for item, part in zip(one.items, parts, strict=True):
                    item.future.set_result(part)
            except Exception as error:
                for item in one.items:
                    item.fail(error)
        for batch in batches:
            batch.release()

    # --- in the thread of a device ---------------------------------------------------------------

    def _launch(self, slot: int, items: Sequence[Item]) -> list[_Launched]:
        """Begin some items; see Note [What fails alone]."""
        limits = self._call.lent.limits
        is_memory = slot in limits and self._size(items) > limits[slot]
        error: Exception | None = None
        if not is_memory:
            try:
                return [self._begin(slot, items)]
            except Exception as caught:
                error = caught
                is_memory = _devices.is_out_of_memory(error)
            if is_memory:
                self._note_limit(slot, self._size(items), error)
        if len(items) > 1:
            step = (len(items) + 1) // 2 if is_memory else 1
            starts = range(0, len(items), step)
            return [one for i in starts for one in self._launch(slot, items[i : i + step])]
        (item,) = items
        try:
            if error is not None and not (is_memory and self._size(items) > 1):
                raise error
            output = self._in_parts(slot, item.number, *self._arguments(items)[:2])
        except Exception as caught:
            locate(caught, f"in item {item.number} on device {self._call.options.devices[slot]}")
            item.fail(caught)
            # The frames of the error hold this one.
            del error
        else:
            item.future.set_result(output)
        return []

    def _size(self, items: Sequence[Item]) -> int:
        """Return the number of samples of some items; 1 if nobody knows."""
        if self._collate is not None:
            return len(items)
        total = 0
        for item in items:
            plan = item.plan
            try:
                plan = plan or self._call.options.plan(*self._call.arguments(item.value))
            except (TypeError, ValueError):
                # Something that cannot be divided.
                return 1
            total += plan.batch_size or 1
        return total

    def _note_limit(self, slot: int, size: int, error: Exception) -> None:
        """Give memory back, and divide what is as large as this from now on."""
        # Its frames hold what was computed.
        error.__traceback__ = None
        device = self._call.options.devices[slot]
        _devices.empty_cache(device)
        if size > 1:
            half = (size + 1) // 2
            self._call.lent.limits[slot] = half
            _log.warning(
                "%s had no memory for a batch of %d samples, and gets at most %d at a time from "
                "now on",
                device,
                size,
                half,
            )

    def _arguments(
        self, items: Sequence[Item]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any], Shares | None]:
        """Return the arguments of the one call for some items, and the share of each."""
        dim = self._call.options.dim
        if self._collate is not None:
            args, kwargs = self._call.arguments(self._collate([item.value for item in items]))
            return args, kwargs, Shares([1] * len(items), dim, are_samples=True)
        plans = [item.plan for item in items if item.plan is not None]
        if len(items) == 1:
            return *self._call.arguments(items[0].value), None
        sizes = [plan.batch_size or 0 for plan in plans]
        return *join(plans), Shares(sizes, dim, are_samples=False)

    def _begin(self, slot: int, items: Sequence[Item]) -> _Launched:
        args, kwargs, shares = self._arguments(items)
        return _Launched(items, shares, self._run(slot, items[0].number, args, kwargs))

    def _run(
        self, slot: int, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> _Begun:
        """Run one call on a device, in the context of the caller."""
        return self._call.context.task(slot, self._compute, slot, args, kwargs, number=number)()

    def _compute(self, slot: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Begun:
        call, options = self._call, self._call.options
        device = options.devices[slot]
        if call.lent.target.moves:
            args, kwargs = move((args, kwargs), device)
        run = functools.partial(self._calls[slot], *args, **kwargs)
        count = len(options.devices)
        output = apply_alone(run, device, count, within_cached=call.within_cached)
        return _leave(output, device, options.output_device)

    def _in_parts(
        self, slot: int, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return the output of one call, computed in parts for which there is memory."""
        options = self._call.options
        whole = options.plan(args, kwargs).batch_size or 1
        limit = self._call.lent.limits.get(slot, 1)
        plan = options.plan(args, kwargs, -(-whole // limit))
        split = plan.by_action.get("split", ())
        origin = next((leaf.value.device for leaf in split), _CPU)
        outputs = []
        for part in execute(plan, [origin] * len(plan.sizes)):
            try:
                outputs.append(self._run(slot, number, part.inputs, part.kwargs).end())
            except Exception as caught:
                size = max(plan.sizes)
                if not _devices.is_out_of_memory(caught) or size < 2:
                    raise
                self._note_limit(slot, size, caught)
                break
        else:
            if any(map(has_scalars, outputs)):
                raise RuntimeError(
                    "there was no memory for the whole batch, and its output has a tensor without "
                    "dimensions, which cannot be put together from parts; return one entry per "
                    "sample, or give smaller items"
                )
            target, dims = options.output_device, options.out_dims
            sizes = plan.sizes
            return gather_outputs(outputs, target, options.dim, dims, "stack", (), sizes, None)
        outputs.clear()
        return self._in_parts(slot, number, args, kwargs)


def _leave(output: Any, device: torch.device, target: torch.device | None) -> _Begun:
    """Let an output leave for the device of results, while this device goes on."""
    leaves, structure = flatten(output)
    if target is not None and target != _CPU:
        leaves, structure = flatten(move(output, target))
    events: dict[torch.device, torch.Event] = {}
    staged = []
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor) or not _devices.is_accelerator(leaf.device):
            continue
        if target != _CPU:
            stream = _devices.current_stream(leaf.device)
            assert stream is not None
            events[leaf.device] = _devices.record_event(stream)
        elif type(leaf) is torch.Tensor and leaf.layout == torch.strided and not leaf.is_nested:
            side = _devices.host_stream(leaf.device)
            _devices.wait_stream(side, _devices.current_stream(leaf.device))
            with _devices.use_stream(side):
                leaves[index], events[leaf.device] = _devices.to_host_later(leaf.detach())
            _devices.record_stream(leaf, side)
            staged.append(index)
        else:
            leaves[index] = move(leaf, target)
    if not events and _devices.is_accelerator(device):
        # Work without an output may fail, too.
        stream = _devices.current_stream(device)
        assert stream is not None
        events[device] = _devices.record_event(stream)
    return _Begun(leaves, structure.rebuild, tuple(events.values()), staged)
