"""The work of a pool: items that one device computes together, and the treatment of errors.

Note [What fails alone]
~~~~~~~~~~~~~~~~~~~~~~~
If a batch of several items fails, each of them is computed by itself. So the error is that of the
item that has caused it, and the others get their results. If memory runs out, the halves of the
batch are computed one after the other, then their halves, down to one sample. Later batches on that
device are no larger than those for which there was memory. Items that were changed in place fail.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from asyncio import wrap_future
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from dataparallel import devices as _devices
from dataparallel import torch_internals
from dataparallel.batch.gather import gather_outputs, has_scalars
from dataparallel.batch.scatter import ScatterPlan, execute, move, plan_scatter
from dataparallel.batch.tree import flatten
from dataparallel.errors import listed, locate
from dataparallel.pool.batches import JointKey, Shares, join, key_of, take_apart
from dataparallel.pool.crew import refuse_to_wait
from dataparallel.pool.targets import Calls, Lent
from dataparallel.replicas.values import versions
from dataparallel.threads import exclusive
from dataparallel.threads.apply import apply_alone
from dataparallel.threads.context import ThreadContext, is_portable
from dataparallel.threads.workers import Interrupted

T = TypeVar("T")
_CPU = torch.device("cpu")
_log = logging.getLogger("dataparallel")


class PoolFuture(Future[T]):
    """A ``concurrent.futures.Future`` that asyncio can await, too.

    Args:
        is_here: True if the calling thread is one of the pool's.
    """

    def __init__(self, is_here: Callable[[], bool]) -> None:
        super().__init__()
        self._is_here = is_here

    def result(self, timeout: float | None = None) -> T:
        """Return the result, or raise the error, of the item."""
        self._refuse_to_wait()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error of the item."""
        self._refuse_to_wait()
        return super().exception(timeout)

    def _refuse_to_wait(self) -> None:
        if not self.done():
            refuse_to_wait(self._is_here())

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
    #: True if a part of an item is an item, too.
    divides: bool = True

    def plan(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], parts: int = 1) -> ScatterPlan:
        """Plan how the arguments of one call are divided."""
        return plan_scatter(args, kwargs, parts, self.dim, None, self.in_dims)


class Item:
    """One item, and the future of its result.

    Args:
        value: The target's argument, or all of them.
        number: The number for messages.
        place: The number among the items of its call, by which it draws random numbers.
        is_here: See :class:`PoolFuture`.
    """

    def __init__(self, value: Any, number: int, place: int, is_here: Callable[[], bool]) -> None:
        self.value, self.number, self.place = value, number, place
        self.future: PoolFuture[Any] = PoolFuture(is_here)
        #: How its samples are divided, for one that may be joined with others.
        self.plan: ScatterPlan | None = None

    def begin(self) -> bool:
        """Return whether somebody waits for the result."""
        return self.future.running() or self.future.set_running_or_notify_cancel()

    def error(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, and return the error, if there is one; a TimeoutError is raised."""
        try:
            return self.future.exception(timeout)
        except CancelledError as error:
            return error

    def fail(self, error: BaseException) -> None:
        """Let the future raise an error, unless it has something already."""
        if not self.future.done() and self.begin():
            if isinstance(error, StopIteration):
                # It would end the loop that takes the results, and asyncio refuses it.
                try:
                    raise RuntimeError(f"item {self.number} raised StopIteration") from error
                except RuntimeError as caught:
                    error = caught
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
        module = lent.target.module
        if not options.inference and torch.is_grad_enabled() and module is not None:
            _refuse_gradients(module)
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


def _refuse_gradients(module: nn.Module) -> None:
    """Raise a RuntimeError if the module has parameters whose gradients would be lost."""
    names = [repr(name) for name, one in module.named_parameters() if one.requires_grad]
    if names:
        raise RuntimeError(
            f"gradients of the parameters {listed(names)} would stay in the clones of the pool; "
            "call requires_grad_(False) of the module for gradients of the items alone, use "
            "torch.no_grad() for none, or train with dataparallel.DataParallel"
        )


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
        self._calls: Calls = ()
        #: See :class:`dataparallel.pool.crew.Job`.
        self.key: Hashable = None
        self.size, self.most, self.deadline = 1, 1, 0.0

    def prepare(self) -> None:
        """Get what is called, in the thread whose work comes first."""
        options = self._call.options
        if options.max_batch is not None and self._collate is None:
            self._may_join(options, options.max_batch)
        self._calls = self._call.lent.acquire(self)
        self._call.context.wait_for_caller()

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
        """Give up what nobody has begun; what has begun ends, and nobody looks at it.

        Finalizers call it, so it takes no lock.
        """
        for item in self._items:
            item.future.cancel()

    def release(self) -> None:
        """Let go of what is called."""
        self._calls = ()
        self._call.lent.release(self)

    def start(self, slot: int, others: Sequence[Any]) -> Callable[[], None] | None:
        """Begin the work together with that of others; returns what ends it, if it is not done."""
        batches = (self, *others)
        begun = [(batch, item) for batch in batches for item in batch._items if item.begin()]
        # Others may be given up, and have let go of what is called.
        launched = begun[0][0]._launch(slot, [item for _, item in begun]) if begun else []
        end = functools.partial(self._end, slot, launched, batches)
        if any(one.begun.events for one in launched):
            return end
        end()
        return None

    def _end(self, slot: int, launched: Sequence[_Launched], batches: Sequence[Batch]) -> None:
        for one in launched:
            try:
                output = one.begun.end()
                parts = [output]
                if one.shares is not None:
                    parts = take_apart(output, one.shares, self._call.options.out_dims)
                for item, part in zip(one.items, parts, strict=True):
                    item.future.set_result(part)
            except Exception as error:
                self._fail_all(slot, one.items, error)
        for batch in batches:
            batch.release()

    def _fail_all(self, slot: int, items: Sequence[Item], error: BaseException) -> None:
        first, last = items[0].number, items[-1].number
        which = f"item {first}" if first == last else f"items {first} to {last}"
        locate(error, f"in {which} on device {self._call.options.devices[slot]}")
        for item in items:
            item.fail(error)

    # --- in the thread of a device ---------------------------------------------------------------

    def _launch(self, slot: int, items: Sequence[Item]) -> list[_Launched]:
        """Begin some items; see Note [What fails alone]."""
        limits = self._call.lent.limits
        is_memory = slot in limits and self._size(items) > limits[slot]
        error: BaseException | None = None
        tensors = [one for item in items for one in flatten(item.value)[0] if torch.is_tensor(one)]
        before = versions(tensors)
        if not is_memory:
            try:
                return [self._begin(slot, items)]
            except Interrupted:
                raise
            except BaseException as caught:
                error = caught
                is_memory = _devices.is_out_of_memory(error)
            if is_memory:
                self._note_limit(slot, self._size(items), error)
            if versions(tensors) != before:
                # A second try would begin with what the first one has left.
                self._fail_all(slot, items, error)
                return []
        if len(items) > 1:
            step = (len(items) + 1) // 2 if is_memory else 1
            starts = range(0, len(items), step)
            return [one for i in starts for one in self._launch(slot, items[i : i + step])]
        (item,) = items
        try:
            if error is not None and not (is_memory and self._size(items) > 1):
                raise error
            output = self._in_parts(slot, item.place, *self._arguments(items)[:2])
        except Interrupted:
            raise
        except BaseException as caught:
            self._fail_all(slot, items, caught)
            # The frames of the error hold this one.
            del error
        else:
            item.future.set_result(output)
        return []

    def _size(self, items: Sequence[Item]) -> int:
        """Return the number of samples of some items; 1 if nobody knows."""
        if self._collate is not None or not self._call.options.divides:
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

    def _note_limit(self, slot: int, size: int, error: BaseException) -> None:
        """Give memory back, and divide what is as large as this from now on."""
        # Its frames hold what was computed.
        error.with_traceback(None)
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
        return _Launched(items, shares, self._run(slot, items[0].place, args, kwargs))

    def _run(
        self, slot: int, place: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> _Begun:
        """Run one call on a device, in the context of the caller."""
        return self._call.context.task(slot, self._compute, slot, args, kwargs, number=place)()

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
        self, slot: int, place: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
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
                outputs.append(self._run(slot, place, part.inputs, part.kwargs).end())
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
        return self._in_parts(slot, place, args, kwargs)


def _is_plain(tensor: torch.Tensor) -> bool:
    """True if a copy of the bytes is all of a tensor."""
    is_strided = tensor.layout == torch.strided and not tensor.is_nested
    return type(tensor) is torch.Tensor and is_strided and not tensor.requires_grad


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
        elif _is_plain(leaf):
            side = _devices.host_stream(leaf.device)
            _devices.wait_stream(side, _devices.current_stream(leaf.device))
            with _devices.use_stream(side):
                leaves[index], events[leaf.device] = _devices.to_host_later(leaf)
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
