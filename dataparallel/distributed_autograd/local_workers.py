"""Workers that are threads of this process, each with its own device."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType

import torch

from dataparallel import devices
from dataparallel.devices import DeviceLike
from dataparallel.distributed_autograd.endpoint import (
    Endpoint,
    _context,
    _here,
    _of_process,
)
from dataparallel.distributed_autograd.extension import Context, loaded
from dataparallel.distributed_autograd.local_endpoint import LocalEndpoint, LocalGroup

#: Ids of workers share numbers with counters, so there is a largest one.
_MOST_WORKERS = 2**16 - 2


class LocalWorkers:
    """Workers that are threads of this process, each with its own device.

    The parts of a model live on several devices of one process, and one
    :func:`~dataparallel.distributed_autograd.backward` goes through all of them. Calls are those
    between processes: :func:`~dataparallel.distributed_autograd.rpc_sync` to a worker by its name,
    and each worker has its own contexts and gradients.

    Example::

        with LocalWorkers({"front": "cpu", "back": "cpu"}), context() as context_id:
            hidden = rpc_sync("front", torch.mul, args=(w, x))
            loss = rpc_sync("back", torch.sum, args=(hidden,))
            backward(context_id, [loss])
            get_gradients(context_id)[w]   # x

    Tensors in arguments and results are copied to the device of the worker that gets them, wherever
    they are in tuples, lists, dicts and dataclasses, which are built anew. So nothing that a worker
    changes in place in them shows at another one. Everything else arrives as the object itself:
    functions, modules, optimizers, data sets, and what such objects hold.

    On accelerators nobody waits on the host: arguments are ready on the worker's current streams,
    and results on those that were current where the call was made. Threads that the caller starts
    are on the main worker too, unless several groups of workers are open.

    Args:
        workers: The device of each worker by its name, or a list of devices for workers with the
            names ``"worker0"``, ``"worker1"`` and so on. A device is a string, a ``torch.device``
            or the index of an accelerator, and may be named several times.
        main: The name of the worker that the caller is. Default: ``"main"``.
        main_device: Where results arrive that come back to the caller. Default: they stay on the
            device that they were returned on.
        timeout: Seconds that a call or a backward may take if nothing else is said where it is
            made. 0: no limit. Default: 60.
        max_calls: How many calls a worker runs at the same time at most, at least 2. Half of them
            may come from outside of the workers, and more wait; the rest is for nested ones.
            Default: 64.

    Raises:
        ValueError: There are no workers, two have one name, or a device does not exist.
        TypeError: A name is no string, or a device is of another type.
    """

    def __init__(
        self,
        workers: Mapping[str, DeviceLike] | Sequence[DeviceLike],
        *,
        main: str = "main",
        main_device: DeviceLike | None = None,
        timeout: float = 60.0,
        max_calls: int = 64,
    ) -> None:
        if not isinstance(workers, Mapping):
            listed = devices.parse_devices(workers)
            workers = {f"worker{index}": device for index, device in enumerate(listed)}
        _check(workers, main, timeout, max_calls)
        places = devices.parse_devices(list(workers.values()))
        home = None if main_device is None else devices.parse_device(main_device)
        self.names: tuple[str, ...] = (main, *workers)
        self.devices: tuple[torch.device | None, ...] = (home, *places)
        self._timeout = timeout
        self._max_calls = max_calls
        self._group: LocalGroup | None = None
        self._finalizer: weakref.finalize[..., LocalWorkers] | None = None
        self._before: tuple[Endpoint | None, Context | None] = (None, None)

    def __repr__(self) -> str:
        workers = dict(zip(self.names[1:], map(str, self.devices[1:]), strict=True))
        state = "closed" if self.closed else "open" if self._group is not None else "not started"
        return f"LocalWorkers({workers}, main={self.names[0]!r}, {state})"

    @property
    def closed(self) -> bool:
        """Whether the workers have been closed; they cannot be started again."""
        return self._finalizer is not None and not self._finalizer.alive

    def start(self) -> LocalWorkers:
        """Start the workers and make the calling thread the main one, until :meth:`close`.

        What ``with`` does at the start of its block; where a block does not fit, as over the cells
        of a notebook, call this and keep the object.

        Example::

            workers = LocalWorkers(["cpu", "cpu"]).start()
            rpc_sync("worker1", torch.add, args=(1, 2))
            workers.close()

        Returns:
            This object.

        Raises:
            RuntimeError: They were started before.
        """
        if self._group is not None:
            raise RuntimeError(f"{self!r} was started before; make new LocalWorkers for each use")
        self._group = LocalGroup(self.names, self.devices, self._timeout, self._max_calls)
        self._finalizer = weakref.finalize(self, _close, self._group, os.getpid())
        _open_groups.add(self._group)
        self._before = _here.get(), _context.get()
        _here.set(self._group.endpoints[0])
        _context.set(None)
        return self

    def close(self) -> None:
        """End the workers; a second call does nothing.

        Calls without an answer fail, contexts that still exist are released. A function that still
        runs is not interrupted; its thread ends after it.

        Example::

            workers = LocalWorkers(["cpu"]).start()
            workers.close()
        """
        if self._finalizer is not None:
            self._finalizer()
        # In another thread than that of the start there is nothing to leave.
        if self._group is not None and _here.get() is self._group.endpoints[0]:
            before, context = self._before
            left = isinstance(before, LocalEndpoint) and before.group.closed
            _here.set(None if left else before)
            if _context.get() is None:
                _context.set(context)

    def __enter__(self) -> LocalWorkers:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _check(workers: Mapping[str, DeviceLike], main: str, timeout: float, max_calls: int) -> None:
    for name in (main, *workers):
        if not isinstance(name, str) or not name:
            raise TypeError(f"the name of a worker is a str that is not empty, but got {name!r}")
    if not workers:
        raise ValueError("there are no workers: name at least one, for example {'front': 'cpu'}")
    if len(workers) > _MOST_WORKERS:
        raise ValueError(f"{len(workers)} workers were named, but at most {_MOST_WORKERS} can be")
    if main in workers:
        raise ValueError(
            f"'{main}' is the name of a worker and of the caller; give the caller another one, for "
            f"example main='{main}_caller'"
        )
    if not timeout >= 0:
        raise ValueError(f"timeout is {timeout} s, but must be at least 0 (0: no limit)")
    if max_calls < 2:
        raise ValueError(f"max_calls is {max_calls}, but must be at least 2")


_open_groups: weakref.WeakSet[LocalGroup] = weakref.WeakSet()


def _close(group: LocalGroup, process: int) -> None:
    _open_groups.discard(group)
    if process == os.getpid():
        group.close()


def _of_pass() -> Endpoint | None:
    """Where hooks run that a backward pass calls: on the worker whose part it is."""
    native = loaded()
    under_way = None if native is None else native.current_pass()
    if under_way is None:
        return None
    worker = under_way.context().worker()
    endpoints = [endpoint for group in list(_open_groups) for endpoint in group.endpoints]
    return next((endpoint for endpoint in endpoints if endpoint.worker is worker), None)


def _of_any_thread() -> Endpoint | None:
    """Where threads run that the user has started: on the main worker, if there is just one."""
    groups = list(_open_groups)
    if len(groups) > 1:
        raise RuntimeError(
            f"{len(groups)} LocalWorkers are open, and this thread belongs to none of them: let it "
            "run its function with contextvars.copy_context().run, copied where they were opened"
        )
    return groups[0].endpoints[0] if groups else None


_of_process.insert(0, _of_pass)
_of_process.append(_of_any_thread)
