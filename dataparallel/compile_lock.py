"""The lock that everything holds which compiles with torch.compile.

Note [One lock for compiling and running]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch has one lock for all that compiles, ``torch._dynamo.convert_frame.compile_lock``, which keeps
two threads from compiling at the same time, but not one from running while another compiles. The
lock that stands in its place here is torch's and, before that, the turn to be alone: it waits until
no replica runs, see Note [Together and alone] in ``dataparallel.turns``. A replica that finds
nothing compiled for its inputs in the middle of forward so stops the others at the next place where
they wait, end, or want to compile as well.

What compiles in the thread of a replica is given three things, all of them only for that time:

- torch's own random generators. What compiles draws from them and restores their states, so that
  it leaves no trace; the replica's would be drawn from, or read where it should not.
- Backward compiled together with forward. It is compiled at the first backward otherwise, in which
  the threads of several devices may come to it at the same time.
- As many times the entries of torch's cache as the replicas have devices, since what is compiled
  for one device serves no other.

Note [The first call of what was compiled]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch runs it in a mode that looks at each operation, in search of custom operations that return
what they were given. In such a mode the operations that draw random numbers do not see which
replica they are in, and would draw from the default generator. So what a replica compiles is run
without that search.

Note [Threads that look up what is compiled]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch goes through the entries for a function, checks each, and moves the one that fits to the
front. A check lets other threads go on, so one may move an entry past the place where another is;
that one does not find it, and compiles the same again. With several devices it would happen all the
time, since each has an entry of its own. So the entries stay where they are, by the switch that
torch's own documentation of checkpointing names.

Note [Compiled backward in several threads]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A backward call hands its context variables to the threads of the devices, as one
``contextvars.Context``, and what is compiled runs in it. A context runs in one thread at a time, so
with two devices the second raised "cannot enter context". What is handed on here is an object that
runs each in a copy.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
import torch.autograd.graph

from dataparallel import random_dispatch
from dataparallel.turns import turns

# The compiler looks for gradients of parameters, which those of a clone do not have themselves.
_GRAD_OF_ALIAS = "The .grad attribute of a Tensor that is not a leaf"

T = TypeVar("T")
P = ParamSpec("P")


@dataclass
class Compilations:
    """How often the replicas of one call came to compile, and on how many devices they are."""

    num_devices: int
    count: int = 0


class _Local(threading.local):
    call: Compilations | None = None
    depth = 0
    exits: contextlib.ExitStack | None = None


_local = _Local()
_install_lock = threading.Lock()


class _CompileLock:
    """See Note [One lock for compiling and running]."""

    held = False

    def __init__(self, torchs: Any) -> None:
        self._torchs = torchs

    def __enter__(self) -> bool:
        self.acquire()
        return True

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> bool:
        if _local.depth == 0:
            with contextlib.ExitStack() as stack:
                stack.enter_context(turns.alone())
                stack.enter_context(self._torchs)
                if _local.call is not None:
                    _local.call.count += 1
                    _enter_settings(stack, _local.call.num_devices)
                stack.callback(setattr, _CompileLock, "held", False)
                _CompileLock.held = True
                _local.exits = stack.pop_all()
        _local.depth += 1
        return True

    def release(self) -> None:
        _local.depth -= 1
        if _local.depth == 0:
            stack, _local.exits = _local.exits, None
            assert stack is not None
            stack.close()


def _enter_settings(stack: contextlib.ExitStack, num_devices: int) -> None:
    if random_dispatch.current_source() is not None:
        stack.enter_context(random_dispatch.use_source(_DefaultGenerators()))
    _patch(stack, "torch._functorch.config", force_non_lazy_backward_lowering=True)
    _without_search(stack)
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", _GRAD_OF_ALIAS)
    if num_devices > 1:
        limits: Any = sys.modules["torch._dynamo.config"]
        names = ("recompile_limit", "accumulated_recompile_limit")
        scaled = {name: getattr(limits, name, 0) * num_devices for name in names}
        _patch(stack, "torch._dynamo.config", **scaled)


def _patch(stack: contextlib.ExitStack, name: str, **values: Any) -> None:
    """Change settings of torch until ``stack`` is left; those that this torch has."""
    config: Any = sys.modules.get(name)
    known = {key: value for key, value in values.items() if hasattr(config, key)}
    if known:
        stack.enter_context(config.patch(known))


def _without_search(stack: contextlib.ExitStack) -> None:
    """See Note [The first call of what was compiled]."""
    wrappers = sys.modules.get("torch._functorch._aot_autograd.runtime_wrappers")
    first: Any = getattr(wrappers, "_FirstInvocationContext", None)
    if first is not None:
        stack.callback(setattr, first, "__init__", first.__init__)
        first.__init__ = _not_first


def _not_first(context: Any) -> None:
    context._is_first = False


class _DefaultGenerators:
    """Source of random numbers that leads to torch's own generators."""

    def generator(self, device: torch.device) -> None:
        return None


def install() -> bool:
    """Put the lock in the place of torch's, once in a process.

    Returns:
        Whether anything can be compiled: False as long as nobody has imported the compiler, which
        takes seconds and is not done here.
    """
    frames: Any = sys.modules.get("torch._dynamo.convert_frame")
    torchs = getattr(frames, "compile_lock", None)
    if torchs is None or isinstance(torchs, _CompileLock):
        return torchs is not None
    # Whoever compiles now ends that first.
    with _install_lock, torchs:
        if not isinstance(frames.compile_lock, _CompileLock):
            _keep_entries_in_place()
            _copy_contexts()
            frames.compile_lock = _CompileLock(torchs)
    return True


def _keep_entries_in_place() -> None:
    """See Note [Threads that look up what is compiled]."""
    set_order: Any = getattr(torch._C._dynamo.eval_frame, "_set_lru_cache", None)
    if set_order is not None:
        set_order(False)


def _copy_contexts() -> None:
    """See Note [Compiled backward in several threads]."""
    module: Any = torch.autograd.graph
    if getattr(module, "contextvars", None) is contextvars:
        module.contextvars = _ContextVariables()


class _ContextVariables:
    """What ``torch.autograd.graph`` uses of ``contextvars``, with contexts for any thread."""

    def copy_context(self) -> _Context:
        return _Context()

    def __getattr__(self, name: str) -> Any:
        return getattr(contextvars, name)


class _Context:
    """A context that several threads may run something in at the same time, each in a copy."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()

    def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self._context.copy().run(call, *args, **kwargs)

    def copy(self) -> _Context:
        """Itself, which each call copies: torch 2.15 asks for a copy before it runs something."""
        return self


def is_held() -> bool:
    """Whether some thread compiles now."""
    return _CompileLock.held


def count_in(call: Compilations | None) -> Compilations | None:
    """Count in ``call`` what this thread, a replica's, compiles from now on.

    Returns:
        Where it was counted before, to be given to this function afterwards.
    """
    before, _local.call = _local.call, call
    return before
