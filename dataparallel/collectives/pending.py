"""The works that are under way, found by the storage that they write.

A collective returns before its result is there. Whoever reads the result first has to wait, and all
it has is a tensor: perhaps a view of the result, perhaps in another thread.

Note [Works and storages]
~~~~~~~~~~~~~~~~~~~~~~~~~
- The key is the identity of the storage. A weak reference to it keeps its address from being used
  again, so an entry never speaks of another tensor that got the same memory.
- All works on one storage share one list, and all claims on it share that list: a second work on a
  tensor is seen by those who got hold of it before.
- A work is waited for once. The others block meanwhile, and all get the same outcome. On an
  accelerator a wait orders only the stream of the waiting thread, so an event takes the place of
  the work, and other streams wait for the event.
- An entry goes away when nobody can wait for it any more (its storage is gone), and when a wait
  would do nothing and no claim is held. A work usually holds the tensor that it writes, and the
  entry holds the work: so a work that has finished without a wait is finished off by a later call.
- Finalizers run anywhere, also while their thread holds the lock. They only note the key; the next
  call works it off.
"""

from __future__ import annotations

import collections
import copy
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dataparallel import torch_internals
from dataparallel.devices import Stream, current_stream

#: How many entries each registration examines for leftovers; more than it adds.
_EXAMINED = 2


class Work(Protocol):
    """Something that writes a tensor, and has been started."""

    def wait(self) -> None:
        """Wait until it is written: the host on the CPU, the current stream on an accelerator.

        Called once, by any thread, and not recorded by autograd.
        """

    def done(self) -> bool:
        """Whether a wait would return at once, and every thread and stream may use the result."""


class Claim:
    """Shared handle on what is being written to one storage; keeps the outcome.

    From :func:`claim`. A tensor that waits by itself and its views hold the same one.
    """

    __slots__ = ("__weakref__", "_writes")

    def __init__(self, writes: _Writes) -> None:
        self._writes = writes

    @property
    def completed(self) -> bool:
        """Whether everything was written, without an error, and a wait would do nothing."""
        return self._writes.completed

    def wait(self) -> None:
        """Wait for all works on the storage, in their order.

        Raises:
            Exception: What the first of them that failed raised; again at every call.
        """
        self._writes.wait()


def nothing(device: torch.device) -> Claim:
    """A claim on memory that nothing writes."""
    return Claim(_Writes(device))


def register(tensor: Tensor, work: Work) -> None:
    """Note that ``work`` writes the memory of ``tensor``.

    Example::

        register(result, work)
        wait(result.view(-1))       # waits for the work

    Args:
        tensor: With a storage. Works on it that were registered before are waited for first.
        work: Started already.

    Raises:
        TypeError: The tensor has no storage.
    """
    _registry.register(tensor, work)


def claim(tensor: Tensor) -> Claim | None:
    """The handle on what writes the memory of ``tensor``; None if nothing is under way.

    Also None for tensors without a storage, such as those of a transform or a sparse layout.
    """
    return _registry.claim(tensor)


def wait(tensor: Tensor) -> None:
    """Wait for what writes the memory of ``tensor``, if anything does.

    Args:
        tensor: Any; a view of the result will do.

    Raises:
        Exception: What the work raised.
    """
    _registry.wait(tensor)


def count() -> int:
    """How many storages there are for which a wait would do something."""
    return _registry.count()


class _Writes:
    """The works on one storage, in order, and what came of them."""

    __slots__ = (
        "_event",
        "_failure",
        "_ordered",
        "_reported",
        "_turn",
        "_waiting",
        "device",
        "works",
    )

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.works: collections.deque[Work] = collections.deque()
        self._failure: Exception | None = None
        self._reported = False
        # Held by the one that waits for the works. Reentrant only to tell a mistake from a hang.
        self._turn = threading.RLock()
        self._waiting = False
        # On an accelerator: when the works have happened, and the streams that wait for that.
        self._event: torch.Event | None = None
        self._ordered: set[Stream] = set()

    @property
    def completed(self) -> bool:
        if self.works or self._failure is not None:
            return False
        return self._has_happened() or current_stream(self.device) in self._ordered

    @property
    def idle(self) -> bool:
        """Whether a wait would do nothing, on every stream."""
        return not self.works and self._failure is None and self._has_happened()

    @property
    def over(self) -> bool:
        """Whether nobody needs a new handle: all is written, or somebody got the error."""
        return not self.works and (self._failure is None or self._reported) and self._has_happened()

    def wait(self) -> None:
        if self.works:
            with self._turn:
                error = self._finish()
            if error is not None:
                self._reported = True
                try:
                    raise error
                finally:
                    # Its traceback holds this frame.
                    del error
        if self._failure is not None:
            self._reported = True
            raise _copied(self._failure)
        if self._event is not None and not self._has_happened():
            self._order(current_stream(self.device))

    def settle(self) -> None:
        """Finish works off that are done, if nobody waits for them just now."""
        if self._turn.acquire(blocking=False):
            try:
                if not self._waiting and all(work.done() for work in tuple(self.works)):
                    self._finish()
            finally:
                self._turn.release()

    def _finish(self) -> Exception | None:
        """Wait for the works; the error of the first that failed, with its traceback."""
        if self._waiting:
            raise RuntimeError(
                "a work waits for the tensor that it writes itself; its wait() must use the plain "
                "tensor"
            )
        self._waiting = True
        first: Exception | None = None
        try:
            while self.works:
                # Stays in the list until it has finished, so that others see that they must wait.
                error = self._finish_one(self.works[0])
                if error is not None and self._failure is None:
                    # Without the traceback, whose frames keep tensors alive.
                    first, self._failure = error, _copied(error)
                    self._reported = False
                self.works.popleft()
        finally:
            self._waiting = False
        return first

    def _finish_one(self, work: Work) -> Exception | None:
        failure: Exception | None = None
        stream = current_stream(self.device)
        self._order(stream)
        try:
            # The work began before the tensor had a history: what it still writes is no change.
            with torch_internals.below_versions():
                work.wait()
        except Exception as error:
            failure = error
        if stream is not None:
            self._ordered = {stream}
            self._event = stream.record_event()
        return failure

    def _order(self, stream: Stream) -> None:
        event = self._event
        if event is not None and stream is not None and stream not in self._ordered:
            stream.wait_event(event)
            self._ordered.add(stream)

    def _has_happened(self) -> bool:
        event = self._event
        return event is None or event.query()


def _copied(error: Exception) -> Exception:
    """The error for one of several waiters: raising one object in two threads mixes tracebacks."""
    try:
        twin = copy.copy(error)
    except Exception:
        # Its constructor takes other arguments than it passed on.
        return error
    if type(twin) is not type(error):
        return error
    twin.__cause__ = error.__cause__
    return twin


class _Entry:
    """What the registry knows of one storage."""

    __slots__ = ("claim", "storage", "writes")

    def __init__(self, storage: StorageWeakRef, device: torch.device) -> None:
        self.storage = storage
        self.writes = _Writes(device)
        self.claim: weakref.ref[Claim] | None = None

    def held(self) -> Claim | None:
        return None if self.claim is None else self.claim()

    def make_claim(self, on_freed: Callable[[int, weakref.ref[Claim]], None]) -> Claim:
        made = Claim(self.writes)
        key: int = self.storage.cdata
        self.claim = weakref.ref(made, functools.partial(on_freed, key))
        return made

    def is_of_use(self) -> bool:
        expired: Any = self.storage.expired
        if expired():
            return False
        return self.held() is not None or not self.writes.over


class _Registry:
    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._lock = threading.RLock()
        # Keys whose claim was freed, and keys in the order in which they are examined.
        self._freed: collections.deque[int] = collections.deque()
        self._rotation: collections.deque[int] = collections.deque()

    def register(self, tensor: Tensor, work: Work) -> None:
        key = _key(tensor)
        if key is None:
            raise TypeError(
                f"a work writes the storage of a tensor, but a {type(tensor).__name__} of layout "
                f"{tensor.layout} has none; register the plain tensors that it consists of"
            )
        self._work_off()
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                make: Any = StorageWeakRef
                entry = _Entry(make(_storage(tensor)), tensor.device)
                self._entries[key] = entry
                self._rotation.append(key)
            entry.writes.works.append(work)

    def claim(self, tensor: Tensor) -> Claim | None:
        own = _own_claim(tensor)
        if own is not None:
            return None if own.completed else own
        if self._find(tensor) is None:
            return None
        with self._lock:
            # Once more, since another thread may just have dropped it.
            entry = self._find(tensor)
            if entry is None or entry.writes.idle:
                return None
            held = entry.held()
            if held is None:
                held = entry.make_claim(self._note)
            return held

    def wait(self, tensor: Tensor) -> None:
        own = _own_claim(tensor)
        if own is not None:
            own.wait()
        entry = self._find(tensor)
        if entry is None:
            return
        try:
            entry.writes.wait()
        finally:
            self._drop_if_useless(entry.storage.cdata)

    def count(self) -> int:
        for key in tuple(self._entries):
            self._examine(key)
        return sum(not entry.writes.over for entry in tuple(self._entries.values()))

    def _find(self, tensor: Tensor) -> _Entry | None:
        if not self._entries:
            return None
        key = _key(tensor)
        return None if key is None else self._entries.get(key)

    def _note(self, key: int, _: weakref.ref[Claim]) -> None:
        # See Note [Works and storages]: a finalizer may not take the lock.
        self._freed.append(key)

    def _work_off(self) -> None:
        for keys, most in ((self._freed, len(self._freed)), (self._rotation, _EXAMINED)):
            for _ in range(most):
                try:
                    key = keys.popleft()
                except IndexError:
                    # Another thread took the last ones.
                    break
                if self._examine(key) and keys is self._rotation:
                    keys.append(key)

    def _examine(self, key: int) -> bool:
        """Finish an entry off if it is left over; whether it stays."""
        entry = self._entries.get(key)
        if entry is not None and entry.writes.works and entry.held() is None:
            entry.writes.settle()
        return self._drop_if_useless(key)

    def _drop_if_useless(self, key: int) -> bool:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return False
            if entry.is_of_use():
                return True
            del self._entries[key]
        # Its works, and with them their tensors, are freed here, outside of the lock.
        return False


def _own_claim(tensor: Tensor) -> Claim | None:
    """The claim that a tensor that waits by itself carries: its own storage is an empty one."""
    held = None if type(tensor) is Tensor else getattr(tensor, "_claim", None)
    return held if isinstance(held, Claim) else None


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    # Of the base class, since a subclass may do more.
    return torch_internals.storage_of(tensor)


def _key(tensor: Tensor) -> int | None:
    try:
        return torch_internals.address_of_storage(_storage(tensor))
    except NotImplementedError:
        # Wrapped by a transform, or not strided.
        return None


_registry = _Registry()
