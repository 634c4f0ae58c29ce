"""A worker that is one of several in this process, and the calls between them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dataparallel import devices
from dataparallel.distributed_autograd.call_threads import CallThreads
from dataparallel.distributed_autograd.endpoint import Endpoint, entered
from dataparallel.distributed_autograd.extension import Context, LocalLink, extension
from dataparallel.distributed_autograd.local_reference import LocalReference
from dataparallel.distributed_autograd.parcel import Parcel, Streams, on_streams, pack, unpack
from dataparallel.distributed_autograd.pending_calls import PendingCall, PendingCalls
from dataparallel.distributed_autograd.remote_value import Reference, expect_future, is_async
from dataparallel.errors import add_note

Function = Callable[..., Any]


class LocalEndpoint(Endpoint):
    """One worker of a group.

    Args:
        group: The group.
        worker_id: Its place in the group.
        name: Its name.
        device: Where tensors are that arrive here. None: where they were at the sender.
    """

    def __init__(
        self, group: LocalGroup, worker_id: int, name: str, device: torch.device | None
    ) -> None:
        super().__init__(extension().Worker(name, worker_id, group.link))
        self.group = group
        self.name = name
        self.device = device
        self.threads = CallThreads(name, device, group.max_calls)
        group.link.join(self.worker)

    def closed(self) -> bool:
        """Whether the workers of the group were closed."""
        return self.group.closed

    def resolve(self, to: Any) -> int:
        name = getattr(to, "name", to)
        if isinstance(name, int) and 0 <= name < len(self.group.endpoints):
            return int(name)
        for endpoint in self.group.endpoints:
            if endpoint.name == name:
                return endpoint.worker.id()
        known = ", ".join(repr(endpoint.name) for endpoint in self.group.endpoints)
        raise ValueError(f"there is no worker {to!r}; the workers are {known}")

    def name_of(self, worker_id: int) -> str:
        return self.group.endpoints[worker_id].name

    def hold(self, to: int) -> Reference:
        return LocalReference(self.group.endpoints[to])

    def outstanding_calls(self) -> int:
        return self.group.pending.count(self.worker.id())

    def default_timeout(self) -> float:
        return self.group.timeout

    def call(
        self,
        to: int,
        function: Function,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float | None,
        context: Context | None,
    ) -> torch.futures.Future[Any]:
        callee = self.group.endpoints[to]
        callee.threads.check_process()
        shown = getattr(function, "__qualname__", None) or repr(function)
        label = f"{shown} on worker '{callee.name}'"
        seconds = self.group.timeout if timeout is None else timeout
        caller = None if context is None else self.worker.id()
        call: PendingCall[Any] = PendingCall(label, seconds, caller)
        self.group.pending.add(call)
        try:
            parcel = pack(
                (tuple(args), dict(kwargs)),
                "(args, kwargs)",
                context,
                self.worker.id(),
                to,
                callee.device,
            )
            streams = self.group.current_streams()
            answer = _Answer(self, callee, call, context, streams)
            callee.threads.submit(functools.partial(_serve, answer, function, [parcel]))
        except BaseException:
            # The caller gets the error here; nobody has the future.
            self.group.pending.drop(call)
            raise
        return call.future


class LocalGroup:
    """Workers that call each other, without the object that users hold.

    Args:
        names: The name of each worker, in order of their ids.
        places: The device of each, or None.
        timeout: Seconds that a call or a backward pass may take if the caller does not say.
        max_calls: How many calls a worker may run at the same time.
    """

    def __init__(
        self,
        names: Sequence[str],
        places: Sequence[torch.device | None],
        timeout: float,
        max_calls: int,
    ) -> None:
        self.link: LocalLink = extension().LocalLink()
        self.timeout = timeout
        self.max_calls = max_calls
        self.closed = False
        self.pending = PendingCalls()
        self.devices = tuple(dict.fromkeys(place for place in places if place is not None))
        self.endpoints = [
            LocalEndpoint(self, index, name, place)
            for index, (name, place) in enumerate(zip(names, places, strict=True))
        ]

    def current_streams(self) -> Streams:
        """The streams of the calling thread."""
        return {device: devices.current_stream(device) for device in self.devices}

    def close(self) -> None:
        """End all calls and threads."""
        self.closed = True
        self.pending.close("its LocalWorkers were closed")
        for endpoint in self.endpoints:
            endpoint.threads.close()
        for endpoint in self.endpoints:
            endpoint.worker.close()


class _Answer:
    """The way back of one call."""

    def __init__(
        self,
        caller: LocalEndpoint,
        callee: LocalEndpoint,
        call: PendingCall[Any],
        context: Context | None,
        streams: Streams,
    ) -> None:
        self.caller = caller
        self.callee = callee
        self.call = call
        self.context = context
        self.streams = streams

    def context_at_callee(self) -> Context | None:
        """The context of the call, as the callee has it; None for none, or if it has ended."""
        if self.context is None:
            return None
        return self.callee.worker.obtain(self.context.id())

    def send(self, result: Any, context: Context | None) -> None:
        """Bring the result to the caller; called at the callee."""
        pending = self.caller.group.pending
        if not pending.waits(self.call):
            return
        try:
            with torch.enable_grad():
                parcel = pack(
                    result,
                    f"the result of {self.call.label}",
                    context,
                    self.callee.worker.id(),
                    self.caller.worker.id(),
                    self.caller.device,
                )
            alive = None if self.context is None or self.context.released() else self.context
            with on_streams(self.streams):
                value = unpack(parcel, alive)
        except BaseException as error:
            self.fail(error)
            return
        pending.succeed(self.call, value)

    def fail(self, error: BaseException) -> None:
        """Tell the caller what went wrong at the callee."""
        where = "" if self.callee.device is None else f" (device {self.callee.device})"
        add_note(error, f"raised by {self.call.label}{where}")
        self.caller.group.pending.fail(self.call, error)


def _serve(
    answer: _Answer, function: Function, parcels: list[Parcel], done: Callable[[], None]
) -> None:
    """Run a call in a thread of the callee."""
    try:
        context = answer.context_at_callee()
        with entered(answer.callee, context):
            args, kwargs = unpack(parcels.pop(), context)
            result = function(*args, **kwargs)
            del args, kwargs
    except BaseException as error:
        done()
        # Without this frame, which says nothing to the caller.
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        answer.fail(error)
        return
    done()
    if is_async(function):
        _send_later(answer, result, context)
    else:
        answer.send(result, context)


def _send_later(answer: _Answer, result: Any, context: Context | None) -> None:
    try:
        promised = expect_future(result, answer.call.label)
    except TypeError as error:
        answer.fail(error)
        return

    def arrived(future: torch.futures.Future[Any]) -> None:
        try:
            value = future.value()
        except BaseException as error:
            answer.fail(error)
        else:
            answer.send(value, context)

    promised.add_done_callback(arrived)
