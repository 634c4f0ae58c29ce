"""Replicas whose modules or functions are compiled with ``torch.compile``.

Note [Compiled one after another]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch.compile compiles at the first call, and again when a call differs from all before in what the
compiled code depends on. If all replicas came to that at the same time, each would compile the same
thing for itself. So in a call that is unlike all before it, in the kind or shape of its arguments
or in a setting of torch, the replicas run one after another, each in its own thread: replica 0
compiles, and the others find it done (replicas on another device compile for that). Where a replica
waits for others, as in synchronized batch norm, the next one takes its turn.

A call like an earlier one runs its replicas at the same time. So does one that differs in sizes
only, once two such calls in a row compiled nothing: then what was compiled takes any size, and
training with ever new sequence lengths is as parallel as any other. If something has to be compiled
then after all, that replica does it alone, see Note [One lock for compiling and running] in
``dataparallel.compile_lock``: each replica may compile the same thing once, but the results are
right, and the next call starts over with the replicas one after another.

The clones are new objects at each forward, and share what was compiled for the first: torch.compile
looks at the kind, the parameters' shapes and the attributes of a module, not at its identity.

Not covered: a forward that is the first in the process to import the compiler compiles without any
of this, once. Replicas that wait for each other by other means than ``current_rendezvous()`` cannot
do so in a call in which they run one after another; they fail after ``turns.timeout`` seconds.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from dataparallel import torch_internals
from dataparallel.threads import compile_lock
from dataparallel.threads import meeting as rendezvous
from dataparallel.threads.compile_lock import Compilations
from dataparallel.threads.likeness import Likeness, modules_of
from dataparallel.threads.turns import LOOK, TurnTimeout, turns
from dataparallel.threads.workers import SecondaryError

T = TypeVar("T")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
# Calls in a row that differ in sizes and compile nothing, after which sizes are trusted.
_QUIET = 2
# Kinds of calls that are remembered; arguments with ever new strings must not fill the memory.
_MAX_KINDS = 256


def untraced(function: FunctionT) -> FunctionT:
    """Keep the compiler out of a function and all that it calls, without importing the compiler.

    In something bigger that is compiled, the compiled code ends before the call and begins again
    after it, as with ``torch.compiler.disable``, which imports the compiler and costs at each call.

    Example::

        @untraced
        def forward(self, *inputs): ...

    Args:
        function: A Python function, marked in place.

    Returns:
        The function itself.
    """
    why = "replicas run in threads, which cannot be compiled"
    return torch_internals.mark_untraced(function, why)


# --- what is compiled ------------------------------------------------------------------------


def has_compiled(module: nn.Module) -> bool:
    """Whether a module, or a part of it, is compiled or calls a compiled function.

    Functions are found where the module holds them in an attribute, or where a method of its class
    names them. What is called in a roundabout way is not found; see
    Note [Compiled one after another] for what becomes of it.

    Example::

        has_compiled(nn.Sequential(torch.compile(nn.Linear(2, 2))))     # True
    """
    if not _is_used():
        return False
    optimized = torch_internals.optimized_module()
    for part in modules_of(module):
        if isinstance(part, optimized) or _names_compiled(type(part)):
            return True
        for value in part.__dict__.values():
            if type(value) is types.FunctionType and _is_compiled(value):
                return True
    return False


class _Use:
    seen = False


def _is_used() -> bool:
    """Whether this process has compiled anything, or is to: torch keeps a list of the backends."""
    if not _Use.seen:
        _Use.seen = any(map(callable, torch_internals.backends_in_use()))
    return _Use.seen


def _is_compiled(value: object) -> bool:
    return isinstance(value, types.FunctionType) and torch_internals.is_compiled_function(
        value.__dict__
    )


_naming: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def _names_compiled(kind: type) -> bool:
    found = _naming.get(kind)
    if found is None:
        found = any(
            _is_compiled(value) or any(map(_is_compiled, _globals_of(value)))
            for base in kind.__mro__
            if base.__module__.partition(".")[0] != "torch" and base is not object
            for value in vars(base).values()
        )
        _naming[kind] = found
    return found


def _globals_of(value: object) -> Iterator[object]:
    if isinstance(value, types.FunctionType):
        for name in value.__code__.co_names:
            yield value.__globals__.get(name)


# --- calls that are arranged ------------------------------------------------------------------


class _Experience:
    """What is known of the calls of one kind."""

    __slots__ = ("quiet", "sizes")

    def __init__(self) -> None:
        self.sizes: set[Hashable] = set()
        #: Calls in a row with new sizes that compiled nothing.
        self.quiet = 0


class CompiledCalls:
    """How the replicas of one owner run when something in them is compiled.

    See Note [Compiled one after another].

    Example::

        with compiled_calls.arranged(calls, devices) as arranged:
            return apply_replicas(arranged, devices)
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, _Experience] = {}
        # Something that `has_compiled` does not see was compiled in a replica.
        self._compiles = False

    @contextlib.contextmanager
    def arranged(
        self, calls: Sequence[Callable[[], T]], devices: Sequence[torch.device]
    ) -> Iterator[Sequence[Callable[[], T]]]:
        """The calls of the replicas, changed so that compiling in them disturbs nobody.

        Args:
            calls: One function without arguments per replica. Modules and arguments are found in
                a ``functools.partial``.
            devices: One device per replica.
        """
        if not compile_lock.install():
            yield calls
            return
        made = Compilations(len(set(devices)))
        experience, sizes = self._experience_of(calls, devices)
        in_turn = experience is not None and (
            sizes not in experience.sizes and experience.quiet < _QUIET
        )
        if rendezvous.current_rendezvous() is None:
            turns.let_pass()
        with _kept_state(), turns.paused():
            if in_turn:
                order = _Order(len(calls))
                yield [_InTurn(call, made, order, index) for index, call in enumerate(calls)]
            else:
                yield [_Beside(call, made) for call in calls]
        self._learn(experience, sizes, made, in_turn)

    def _experience_of(
        self, calls: Sequence[Callable[[], Any]], devices: Sequence[torch.device]
    ) -> tuple[_Experience | None, Hashable]:
        modules = [part for part in _parts_of(calls[0]) if isinstance(part, nn.Module)]
        if len(calls) < 2 or not modules:
            return None, ()
        if not self._compiles and not any(map(has_compiled, modules)):
            return None, ()
        likeness = Likeness()
        likeness.add_settings(devices)
        likeness.add(calls[0])
        for call in calls[1:]:
            # Their modules are alike.
            likeness.add([part for part in _parts_of(call) if not isinstance(part, nn.Module)])
        if len(self._known) >= _MAX_KINDS:
            self._known.clear()
        experience = self._known.setdefault(tuple(likeness.kinds), _Experience())
        return experience, tuple(likeness.sizes)

    def _learn(
        self, experience: _Experience | None, sizes: Hashable, made: Compilations, in_turn: bool
    ) -> None:
        self._compiles |= made.count > 0
        if experience is None:
            return
        if in_turn:
            experience.sizes.add(sizes)
            experience.quiet = 0 if made.count else experience.quiet + 1
        elif made.count:
            experience.sizes.clear()
            experience.quiet = 0


def _parts_of(call: Callable[[], Any]) -> tuple[Any, ...]:
    if isinstance(call, functools.partial):
        return (call.func, *call.args, call.keywords)
    return (call,)


# Replicas meet in Python's own locks, which the compiler cannot follow.
untraced(rendezvous.Rendezvous.exchange)


# --- how calls run ---------------------------------------------------------------------------


class _Beside(Generic[T]):
    """The call of a replica that runs at the same time as the others."""

    __slots__ = ("_call", "_made")

    def __init__(self, call: Callable[[], T], made: Compilations) -> None:
        self._call = call
        self._made = made

    def __call__(self) -> T:
        turns.enter_together()
        try:
            return _run(self._call, self._made)
        finally:
            turns.leave_together()


class _InTurn(Generic[T]):
    """The call of a replica that runs after those before it."""

    __slots__ = ("_call", "_index", "_made", "_order")

    def __init__(
        self, call: Callable[[], T], made: Compilations, order: _Order, index: int
    ) -> None:
        self._call = call
        self._made = made
        self._order = order
        self._index = index

    def __call__(self) -> T:
        order, index = self._order, self._index
        try:
            order.wait(index)
            with turns.alone(), turns.telling(functools.partial(order.pass_on, index)):
                return _run(self._call, self._made)
        except BaseException:
            order.failed = True
            raise
        finally:
            order.pass_on(index)


def _run(call: Callable[[], T], made: Compilations) -> T:
    entry = rendezvous._current.get()
    assert entry is not None, "not called by apply_replicas"
    rendezvous._current.set((_PausingRendezvous(entry[0]), entry[1]))
    before = compile_lock.count_in(made)
    try:
        return call()
    finally:
        compile_lock.count_in(before)
        rendezvous._current.set(entry)


class _Order:
    """Lets the replicas of one call start one after another."""

    def __init__(self, num_replicas: int) -> None:
        self._passed = [threading.Event() for _ in range(num_replicas)]
        self.failed = False

    def pass_on(self, index: int) -> None:
        """Replica ``index`` has ended, or waits for the others."""
        self._passed[index].set()

    def wait(self, index: int) -> None:
        """Wait for the turn of replica ``index``.

        Raises:
            SecondaryError: A replica before it failed.
            TurnTimeout: The one before it does not end.
        """
        deadline = time.monotonic() + turns.timeout
        while index and not self._passed[index - 1].wait(LOOK):
            if compile_lock.is_held():
                deadline = time.monotonic() + turns.timeout
            elif time.monotonic() > deadline:
                raise TurnTimeout(
                    f"replica {index} waited {turns.timeout:.3g} s for replica {index - 1} to end; "
                    "replicas of which something is compiled run one after another at first, so "
                    "they may wait for each other through current_rendezvous() only"
                )
        if self.failed:
            raise SecondaryError("a replica before this one failed")


class _PausingRendezvous(rendezvous.Rendezvous):
    """The meeting point of a call, at which a replica that waits lets others run alone."""

    def __init__(self, meeting: rendezvous.Rendezvous) -> None:
        # The same meetings, in the same state.
        self.__dict__ = meeting.__dict__

    def _await(self, *args: Any) -> None:
        with turns.paused():
            super()._await(*args)


# --- torch's own variables -------------------------------------------------------------------


class _State:
    """Each call of compiled code changes variables of the process and restores what it found.

    That is wrong for calls that overlap. So the first of the calls that overlap restores what it
    found when the last has ended.
    """

    lock = threading.Lock()
    calls = 0
    write_back: Callable[[], None]


@contextlib.contextmanager
def _kept_state() -> Iterator[None]:
    with _State.lock:
        if _State.calls == 0:
            _State.write_back = torch_internals.state_of_compiled_calls()
        _State.calls += 1
    try:
        yield
    finally:
        with _State.lock:
            _State.calls -= 1
            if _State.calls == 0:
                _State.write_back()
