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

What torch does in one thread at a time, or for one at a time, is changed with it, see the patches
in ``dataparallel.torch_internals``: the order of what it compiled, the context of a backward, the
first call of what was compiled, the guard that its threads share.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from dataparallel import torch_internals
from dataparallel.threads import random_dispatch
from dataparallel.threads.turns import turns

# The compiler looks for gradients of parameters, which those of a clone do not have themselves.
_GRAD_OF_ALIAS = "The .grad attribute of a Tensor that is not a leaf"


@dataclass
class Compilations:
    """How often the replicas of one call came to compile, and on how many devices they are."""

    num_devices: int
    count: int = 0


class _Local(threading.local):
    call: Compilations | None = None
    depth = 0
    exits: contextlib.ExitStack | None = None


class _Installed:
    done = False


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
    stack.enter_context(torch_internals.settings_of_compiler(num_devices))
    stack.enter_context(torch_internals.first_calls_without_search())
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", _GRAD_OF_ALIAS)


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
    torchs = torch_internals.compile_lock()
    if torchs is None or _Installed.done:
        return torchs is not None
    with _install_lock:
        if not _Installed.done:
            torch_internals.keep_guard_of_compiler()
            torch_internals.keep_compiled_entries_in_place()
            torch_internals.hand_on_contexts_for_any_thread()
            # Whoever compiles now ends that first.
            with torchs:
                torch_internals.replace_compile_lock(_CompileLock)
            _Installed.done = True
    return True


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
