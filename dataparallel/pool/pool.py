"""The pool that users see."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, get_args

import torch
from torch import nn
from torch.utils.data import Dataset

from dataparallel.batch.gather import gather_outputs
from dataparallel.devices import DeviceLike, parse_devices, parse_output_device
from dataparallel.errors import add_note, chosen, listed
from dataparallel.pool.crew import Crew
from dataparallel.pool.results import (
    Collate,
    ItemResults,
    OnError,
    collate_samples,
    in_batches,
    no_bar,
    progress_bar,
    values_of,
)
from dataparallel.pool.targets import (
    FunctionTarget,
    Lent,
    MethodTarget,
    ModuleTarget,
    Target,
    WrapperTarget,
)
from dataparallel.pool.work import Batch, Call, Item, PoolFuture, PoolOptions

# Batches per device that are on their way, or wait to be taken.
_PER_DEVICE = 4


class Pool:
    """Calls a module or a function with items, each on whichever device is free.

    Training splits each batch over all devices. For everything else, items are independent: texts
    to embed, images to classify, requests to answer, trainings to run. A pool gives each item to
    one device. A device that is slow, or has a long item, takes fewer.

    A module has a clone on each device, and shares its memory on its own. When the module has
    changed, the clones follow at the next call that finds the pool idle; if its parameters have,
    that call waits for the items on their way. Assignments of a forward to attributes are dropped.
    A function gets each item as it is, in a thread whose current device is the item's; if it has a
    parameter ``device``, it gets the device, too.

    Items run within the caller's settings, such as autocast, and by default in inference mode. Each
    has random generators of its own: for one ``torch.manual_seed`` it draws the same numbers,
    whichever device takes it.

    Example::

        with dataparallel.Pool(net, ["cuda:0", "cuda:1"]) as pool:
            for output in pool.map(x for x, _ in loader):       # in order, on the CPU
                ...
            outputs = pool.predict(x for x, _ in loader)        # all of them in one
            future = pool.submit(x)             # a concurrent.futures.Future; or: await pool(x)

    Args:
        target: A module, on the first device or on the CPU; or a function; or a wrapper of this
            package, whose replicas are used. A module gets a tuple as its positional arguments, a
            dict as its keyword arguments, everything else as its only argument. Default: nothing,
            for a pool that only runs functions, see :meth:`run`.
        device_ids: One entry per device slot, as for :class:`dataparallel.DataParallel`: ``["cpu",
            "cpu"]`` for two items at a time on the CPU. Or another pool, whose devices and threads
            this one shares. Default: all accelerators; for a wrapper, its devices.
        output_device: The device to which tensors in results are copied. None leaves them where
            they were computed. Default: the CPU.
        inference: False for items with the caller's grad mode. Items may require grad, parameters
            of a module may not. Default: inference mode.
        max_batch: The most samples of requests to join to one batch: those that :meth:`submit`,
            :meth:`map` and ``pool(x)`` get within ``max_wait``. Each item is then a batch itself,
            of one sample or more, and its result is its part of the output: a view. Items are
            joined if they have the same types, shapes and settings. Default: none are joined.
        max_wait: The most seconds that an item waits for others to join. Default: 0.005.
        dim: The batch dimension of items and outputs. Default: 0.
        in_dims, out_dims: The dimensions of samples in the arguments and the outputs, as for
            :class:`dataparallel.DataParallel`. They are used where items are joined or divided.

    Attributes:
        device_ids: The device of each slot.

    Raises:
        TypeError: ``target`` or a device is of the wrong type, or the module cannot be cloned.
        ValueError: A device does not exist, the module is elsewhere or not initialized, or an
            option has an impossible value.
    """

    def __init__(
        self,
        target: nn.Module | Callable[..., Any] | None = None,
        device_ids: Sequence[DeviceLike] | Pool | None = None,
        *,
        output_device: DeviceLike | None = "cpu",
        inference: bool = True,
        max_batch: int | None = None,
        max_wait: float = 0.005,
        dim: int = 0,
        in_dims: Mapping[str | int, Any] | None = None,
        out_dims: Any = None,
    ) -> None:
        if max_batch is not None and max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, but got {max_batch}")
        if not max_wait >= 0:
            raise ValueError(f"max_wait must be at least 0 s, but got {max_wait}")
        # A wrapper of this package stands above this room.
        wrapper: Any = target if hasattr(type(target), "_lend_to_pool") else None
        if wrapper is not None and device_ids is None:
            device_ids = wrapper.device_ids
        # A pool that shares the threads of another one does not end them.
        self._owns = not isinstance(device_ids, Pool)
        devices: tuple[torch.device, ...]
        if isinstance(device_ids, Pool):
            devices = device_ids._options.devices
            self._crew: Crew = device_ids._crew
        else:
            devices = parse_devices(device_ids)
            self._crew = Crew(len(devices))
        self.device_ids = list(devices)
        self._options: PoolOptions = PoolOptions(
            devices,
            None if output_device is None else parse_output_device(output_device, devices[0]),
            inference,
            max_batch,
            max_wait,
            dim,
            in_dims,
            out_dims,
        )
        self._lent = Lent(_target_of(target, devices, wrapper), devices, self._crew.is_here)
        self._name = getattr(target, "__name__", type(target).__name__)
        self._numbers = itertools.count()

    # --- many items -------------------------------------------------------------------------------

    def map(
        self,
        items: Iterable[Any] | Dataset[Any],
        batch_size: int | None = None,
        *,
        ordered: bool = True,
        on_error: OnError = "raise",
        progress: bool = False,
        collate_fn: Collate = collate_samples,
        max_ahead: int | None = None,
    ) -> ItemResults:
        """Return an iterator over the results of items, which are taken as devices become free.

        The calling thread pulls items, so generators and DataLoaders are safe. Do not change an
        item before its result is there.

        Example::

            for embedding in pool.map(dataset, batch_size=64, progress=True):
                ...

        Args:
            items: Any iterable. The batch of a DataLoader is one item. A dataset has samples as its
                items, which are mostly to be joined: see ``batch_size``.
            batch_size: Join so many items, which are samples, to one batch. Each sample has its own
                result: its entry of the output, a view. Default: each item is one call.
            ordered: False for results as they come. Default: True.
            on_error: With ``"raise"``, the error of an item is raised in its turn; whoever goes on
                gets the next result. With ``"return"``, it is the result. Default: ``"raise"``.
            progress: True to show a bar, with tqdm or rich if one is installed. Default: False.
            collate_fn: Makes a batch of a list of samples. Default: as torch's DataLoader; tuples
                give a tuple. ``list`` leaves the list as it is.
            max_ahead: The most batches that are on their way, or wait to be taken. Default: four
                per device.

        Returns:
            An iterator; its ``close()`` forgets the items that no device has begun.

        Raises:
            BaseException: As the iterator advances: the error of an item, with "in item i on device
                d" added.
            RuntimeError: The pool is closed, or the caller is an item of the same pool.
            ValueError: An option has an impossible value.
        """
        _check_batches(batch_size, collate_fn, self._options.dim)
        values = values_of(items)
        # No generator: an iterable may go on after an error.
        batches = map(_alone, values) if batch_size is None else in_batches(values, batch_size)
        return ItemResults(
            self._crew,
            Call(self._lent, self._options),
            batches,
            None if batch_size is None else collate_fn,
            ordered=ordered,
            most=max_ahead or _PER_DEVICE * len(self.device_ids),
            on_error=chosen("on_error", on_error, get_args(OnError)),
            bar=progress_bar(items) if progress else no_bar,
        )

    def predict(
        self,
        items: Iterable[Any] | Dataset[Any],
        batch_size: int | None = None,
        *,
        progress: bool = False,
        collate_fn: Collate = collate_samples,
    ) -> Any:
        """Return the outputs for all items in one, put together as those of replicas are.

        Example::

            logits = pool.predict(x for x, _ in loader)     # torch.cat of all, on the CPU

        Args:
            items, batch_size, progress, collate_fn: See :meth:`map`.

        Returns:
            One container as each call returned it, tensors concatenated along ``dim`` on
            ``output_device``; tensors without dimensions are stacked. None if there are no items.

        Raises:
            BaseException: The error of the first item that has failed.
            ValueError: The outputs cannot be put together.
        """
        _check_batches(batch_size, collate_fn, self._options.dim)
        batches: Iterable[Any] = values_of(items)
        if batch_size is not None:
            batches = map(collate_fn, in_batches(batches, batch_size))
        options, sizes, outputs = self._options, list[int | None](), list[Any]()
        call = Call(self._lent, options)

        def counted() -> Iterable[list[Any]]:
            for value in batches:
                sizes.append(_size_of(options, call, value))
                yield [value]

        bar = progress_bar(items, batch_size) if progress else no_bar
        results = ItemResults(
            self._crew,
            call,
            iter(counted()),
            None,
            ordered=True,
            most=_PER_DEVICE * len(self.device_ids),
            on_error="raise",
            bar=bar,
        )
        try:
            outputs.extend(results)
        finally:
            results.close()
        if not outputs:
            return None
        known = [size for size in sizes if size is not None]
        chunks = known if len(known) == len(outputs) else None
        target, dims = options.output_device, options.out_dims
        return gather_outputs(outputs, target, options.dim, dims, "stack", (), chunks, None)

    def run(
        self,
        function: Callable[..., Any],
        items: Iterable[Any] | Dataset[Any],
        *,
        on_error: OnError = "raise",
        progress: bool = False,
    ) -> list[Any]:
        """Call a function for each item, one per device at a time: trainings, sweeps, other models.

        The function runs in the caller's grad mode. The device of its thread is the current one,
        and is its argument ``device`` if it has such a parameter.

        Example::

            def train(rate, device):
                ...
            accuracies = dataparallel.Pool().run(train, [0.1, 0.03, 0.01])

        Args:
            function: Called with an item.
            items: Any iterable.
            on_error: With ``"raise"``, the first error is raised when all items have ended. With
                ``"return"`` errors are among the results. Default: ``"raise"``.
            progress: See :meth:`map`.

        Returns:
            The function's results as they are, in the order of the items.

        Raises:
            BaseException: The error of the first item that has failed.
        """
        chosen("on_error", on_error, get_args(OnError))
        values = list(values_of(items))
        other = Pool(function, self, output_device=None, inference=False)
        bar = progress_bar(values) if progress else no_bar
        results = ItemResults(
            self._crew,
            Call(other._lent, dataclasses.replace(other._options, divides=False)),
            ([value] for value in values),
            None,
            ordered=True,
            most=max(1, len(values)),
            on_error="return",
            bar=bar,
        )
        try:
            found = list(results)
        finally:
            results.close()
        errors = [one for one in found if isinstance(one, BaseException)]
        if errors and on_error == "raise":
            succeeded = len(found) - len(errors)
            add_note(
                errors[0],
                f'{succeeded} of {len(found)} items have succeeded; on_error="return" gives their '
                "results beside the errors",
            )
            raise errors[0]
        return found

    # --- single items -----------------------------------------------------------------------------

    def submit(self, item: Any) -> PoolFuture[Any]:
        """Have one item computed, and return the future of its result; ``pool(item)`` is the same.

        Example::

            futures = [pool.submit(x) for x in requests]
            outputs = [future.result() for future in futures]

        Args:
            item: See ``target``.

        Returns:
            A ``concurrent.futures.Future``, which asyncio can await, too.

        Raises:
            RuntimeError: The pool is closed.
            ValueError: With ``max_batch``, samples and parts of the item cannot be told apart.
        """
        # Each request takes a seed of its own.
        one = Item(item, next(self._numbers), 0, self._crew.is_here)
        batch = Batch(Call(self._lent, self._options), [one])
        try:
            batch.prepare()
            self._crew.put(batch)
        except BaseException as error:
            batch.fail(error)
            raise
        return one.future

    __call__ = submit

    def method(self, name: str) -> Pool:
        """Return a pool that calls a method other than ``forward``, on the same replicas.

        Example::

            for tokens in pool.method("generate").map(prompts):
                ...

        Args:
            name: The name of the method.

        Returns:
            A pool with the devices, threads and options of this one, which ends with it.

        Raises:
            TypeError: The pool has a function, or nothing.
            AttributeError: The module has no such method.
        """
        target = self._lent.target
        if isinstance(target, FunctionTarget):
            raise TypeError(f"only modules have methods, so there is no {name!r} to call")
        options = self._options
        method: Any = MethodTarget(target, name, f"{self._name}.{name}")
        # An error now says more than one for each item.
        with method.lend():
            pass
        return Pool(
            method,
            self,
            output_device=options.output_device,
            inference=options.inference,
            max_batch=options.max_batch,
            max_wait=options.max_wait,
            dim=options.dim,
            in_dims=options.in_dims,
            out_dims=options.out_dims,
        )

    # --- life -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Do the work that is left, and end the threads; one that shares them does nothing."""
        if self._owns:
            self._crew.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._owns:
            # Nobody takes the results.
            self._crew.give_up()
            if isinstance(error, KeyboardInterrupt):
                self._crew.interrupt()
        self.close()

    def __reduce__(self) -> str:
        raise TypeError("a pool has threads, which cannot be copied; make another one")

    def __repr__(self) -> str:
        devices = ", ".join(map(str, self.device_ids))
        return f"{type(self).__name__}({self._name}, device_ids=[{devices}])"


def _target_of(target: Any, devices: Sequence[torch.device], wrapper: Any) -> Target:
    """Return what a pool calls in each slot."""
    if wrapper is not None:
        if list(devices) != wrapper.device_ids:
            raise ValueError(
                f"a pool of a wrapper is on its devices, {listed(map(str, wrapper.device_ids))}, "
                f"but got {listed(map(str, devices))}; pass the wrapper's .module for others"
            )
        moves = not wrapper._is_model_parallel
        return WrapperTarget(wrapper._lend_to_pool, wrapper.module, moves=moves)
    if isinstance(target, MethodTarget):
        return target
    if isinstance(target, nn.Module):
        return ModuleTarget(target, devices)
    if isinstance(target, type) and issubclass(target, nn.Module):
        name = target.__name__
        raise TypeError(f"a pool takes a module, but got the class {name}; pass {name}(...)")
    if target is None:
        return FunctionTarget(_nothing_to_call, devices)
    if not callable(target):
        raise TypeError(
            f"a pool takes a module or a function, but got {target!r} of type "
            f"{type(target).__name__}"
        )
    return FunctionTarget(target, devices)


def _check_batches(batch_size: int | None, collate_fn: Collate, dim: int) -> None:
    """Raise a ValueError if samples cannot be joined."""
    if batch_size is None:
        return
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, but got {batch_size}")
    if dim != 0 and collate_fn is collate_samples:
        raise ValueError(
            f"samples are joined along dim 0 by default, but the pool's dim is {dim}; pass a "
            "collate_fn that makes batches along that dim"
        )


def _nothing_to_call(item: object) -> None:
    raise TypeError("the pool was made without a module or a function; give run() one")


def _alone(value: Any) -> list[Any]:
    return [value]


def _size_of(options: PoolOptions, call: Call, value: Any) -> int | None:
    """Return the number of samples of an item; None if nothing tells."""
    try:
        return options.plan(*call.arguments(value)).batch_size
    except (TypeError, ValueError):
        return None
