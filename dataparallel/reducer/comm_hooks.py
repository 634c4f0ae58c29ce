"""Communication hooks: a function of the user reduces the buckets, in place of an all-reduce.

A hook is called as ``hook(state, bucket)`` with a :class:`GradBucket` and returns a future of the
bucket's new content, like a hook of torch's ``DistributedDataParallel``; torch's own hooks run
unmodified.

Note [Hooks that launch from callbacks]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A hook may launch further collectives when its first one is done, from a callback of the future.
Where futures are completed by threads, as with gloo, the callbacks of two buckets run in an order
that differs between processes, which mixes their collectives up: torch's wrapper then crashes as
soon as there is a second bucket. Such hooks get one bucket at a time: the next one when the future
of the one before is done. Torch's own ones are recognized; others say so by an attribute:
``hook.one_bucket_at_a_time = True``. It is not the rule for all, since a hook may complete the
futures of several buckets together.
"""

from __future__ import annotations

import functools
import importlib
import threading
import time
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from dataparallel import torch_internals
from dataparallel.comm.link import ProcessLink
from dataparallel.comm.process_errors import CollectiveError
from dataparallel.errors import describe_names, locate
from dataparallel.reducer.buckets import Bucket, BucketStorage

#: Called with a state of the user's and a bucket; the future's value is the bucket's new content.
CommHook: TypeAlias = Callable[[Any, Any], "torch.futures.Future[Any]"]

_TORCHS = "torch.distributed.algorithms.ddp_comm_hooks."
_POWER_SGD = _TORCHS + "powerSGD_hook"
_LAUNCH_FROM_CALLBACKS = (_POWER_SGD, _TORCHS + "quantization_hooks")

# The modules of torch in which there are hooks that have names here.
_NAMED = {
    "allreduce": "default_hooks",
    "bf16_compress": "default_hooks",
    "fp16_compress": "default_hooks",
    "noop": "debugging_hooks",
}

# Seconds between two looks at the other processes.
_SLICE = 0.1


# --- what a hook gets ------------------------------------------------------------------------


class GradBucket:
    """One bucket of gradients, as a communication hook sees it.

    Has the methods of ``torch.distributed.GradBucket``, so hooks written for torch run unmodified.
    With several replicas in the process, the bucket holds their sum.

    Example::

        def hook(state, bucket):
            future = torch.futures.Future()
            future.set_result(bucket.buffer().mul_(0.5))
            return future
    """

    def __init__(
        self,
        bucket: Bucket,
        storage: BucketStorage,
        *,
        is_last: bool,
        in_memory_order: bool,
    ) -> None:
        self._bucket = bucket
        self._views = storage.views
        # A hook may resize what it gets. Another tensor over the same storage keeps the owner's
        # own one in shape, and the views remain valid: they look the memory up in the storage.
        self._first = self._buffer = storage.flat.view(storage.flat.shape)
        self._is_last = is_last
        # PowerSGD views gradients as matrices, which only contiguous tensors allow: it gets their
        # entries in the order of memory, which is not the parameter's in every layout.
        self._in_memory_order = in_memory_order

    def index(self) -> int:
        """Number of the bucket, from 0 in the order of launching."""
        return self._bucket.number

    def is_last(self) -> bool:
        """Whether no bucket of this backward comes after this one."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """The flat tensor of all gradients, shape ``(numel,)``; no copy."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Put another tensor in the place of the flat one, for example of another dtype.

        Args:
            tensor: What :meth:`buffer` returns from now on, and what :meth:`gradients` are views
                of.
        """
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """One view of the buffer per parameter, in the parameter's shape and layout.

        Raises:
            ValueError: The buffer was replaced by one from which they cannot be cut.
        """
        given, needed = self._buffer, sum(view.numel() for view in self._views)
        if given.dim() != 1 or given.numel() < needed or not given.is_contiguous():
            raise ValueError(
                f"the buffer of {self} was replaced by one of shape {tuple(given.shape)} and stride"
                f" {given.stride()}; pass a contiguous tensor of shape ({needed},) to set_buffer"
            )
        start = given.storage_offset() - self._first.storage_offset()
        return [
            given.as_strided(view.shape, self._strides(view), start + view.storage_offset())
            for view in self._views
        ]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the bucket, in the order of :meth:`gradients`: the originals."""
        return list(self._bucket.originals)

    def names(self) -> list[str]:
        """The names of the parameters, in the order of :meth:`parameters`."""
        return list(self._bucket.names)

    def _strides(self, view: torch.Tensor) -> Sequence[int]:
        if self._in_memory_order:
            return torch.empty(view.shape, device="meta").stride()
        return view.stride()

    def __repr__(self) -> str:
        return f"bucket {self.index()} ({describe_names(self.names())})"


# --- which hook ------------------------------------------------------------------------------


class ResolvedHook(NamedTuple):
    """A hook that was accepted, and what is known of it."""

    function: CommHook
    state: Any
    name: str
    #: See Note [Hooks that launch from callbacks].
    one_bucket_at_a_time: bool = False
    is_power_sgd: bool = False


def resolve_hook(hook: object, state: Any = None) -> ResolvedHook:
    """Find a hook by what the user passed, and check it.

    Args:
        hook: A function ``hook(state, bucket)``; or ``"allreduce"``, ``"fp16_compress"``,
            ``"bf16_compress"`` or ``"noop"``; or torch's ``BuiltinCommHookType``.
        state: What a function is called with; for a name, the process group. Default: None, which
            stands for the default group.

    Raises:
        TypeError: It is not callable.
        ValueError: There is no hook of that name.
    """
    if isinstance(hook, str) or type(hook).__name__ == "BuiltinCommHookType":
        key = str(getattr(hook, "name", hook)).lower()
        if key not in _NAMED:
            raise ValueError(
                f"there is no communication hook {hook!r}; pass a function hook(state, bucket) or "
                f"one of {', '.join(map(repr, _NAMED))}"
            )
        found = getattr(importlib.import_module(_TORCHS + _NAMED[key]), f"{key}_hook")
        return ResolvedHook(found, state, str(hook))
    if not callable(hook):
        raise TypeError(
            f"a communication hook must be callable as hook(state, bucket), but got {hook!r}; pass "
            f"a function, or one of {', '.join(map(repr, _NAMED))}"
        )
    inner: Any = hook.func if isinstance(hook, functools.partial) else hook
    # Torch's wrappers of hooks close over them.
    cells = getattr(inner, "__closure__", None) or ()
    parts = [hook, inner, *(cell.cell_contents for cell in cells)]
    modules = {getattr(part, "__module__", None) for part in (*parts, type(state))}
    asks = any(getattr(part, "one_bucket_at_a_time", False) is True for part in parts)
    return ResolvedHook(
        hook,
        state,
        str(getattr(inner, "__qualname__", type(inner).__qualname__)),
        one_bucket_at_a_time=asks or not modules.isdisjoint(_LAUNCH_FROM_CALLBACKS),
        is_power_sgd=_POWER_SGD in modules,
    )


# --- a hook that runs ------------------------------------------------------------------------


class HookSender:
    """Reduces the buckets of one round through a communication hook."""

    def __init__(self, hook: ResolvedHook, control: ProcessLink) -> None:
        self.name = hook.name
        self._hook = hook
        self._control = control
        self._previous: PendingHook | None = None

    def send(self, bucket: Bucket, storage: BucketStorage, *, is_last: bool) -> PendingHook:
        """Call the hook for a bucket; what it launches goes on when this returns."""
        hook, previous = self._hook, self._previous
        self._previous = None
        if previous is not None:
            # If it has failed, this is told later: the other processes, where it may have not, wait
            # for the next bucket.
            previous.settle()
        given = GradBucket(bucket, storage, is_last=is_last, in_memory_order=hook.is_power_sgd)
        future: object = _in_hook(given, lambda: hook.function(hook.state, given))
        if not isinstance(future, torch_internals.Future):
            raise TypeError(
                f"the communication hook {hook.name} must return a torch.futures.Future of the "
                f"new content of {given}, but returned a {type(future).__name__}; return "
                "work.get_future(), or put a tensor into a future with set_result"
            )
        begun = typing.cast("torch.futures.Future[Any]", future)
        pending = PendingHook(hook.name, given, begun, storage.flat, self._control)
        if hook.one_bucket_at_a_time and not is_last:
            self._previous = pending
        return pending


class PendingHook:
    """What a hook has begun for one bucket."""

    def __init__(
        self,
        name: str,
        bucket: GradBucket,
        future: torch.futures.Future[Any],
        flat: torch.Tensor,
        control: ProcessLink,
    ) -> None:
        self._what = f"the communication hook {name} for {bucket} in rank {control.rank}"
        self._bucket = bucket
        self._future = future
        self._flat = flat
        self._control = control
        self._timeout = control.timeout
        self._over = over = threading.Event()
        # A future's own wait has no timeout.
        future.add_done_callback(lambda _: over.set())

    def wait(self) -> torch.Tensor:
        """The new content of the bucket, ready on the current streams of this thread."""
        self.settle()
        # Returns at once, and orders the current streams of this thread behind the result.
        return self._accepted(_in_hook(self._bucket, self._future.wait))

    def settle(self) -> None:
        """Wait until there is a value or an error, which :meth:`wait` will tell."""
        # Whoever waits again, after a failure, does not wait for as long again.
        timeout, self._timeout = self._timeout, 0.0
        deadline = time.monotonic() + timeout
        while not self._over.wait(max(0.0, min(_SLICE, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{self._what} did not complete its future within {timeout:g} s; make sure "
                    "that every process runs the hook for the same buckets and that set_result or "
                    "set_exception is called in any case, or ask for a longer timeout"
                )
            failure = self._control.look()
            if failure is not None:
                raise CollectiveError(f"{self._what} was not waited for any more: {failure}")

    def _accepted(self, value: object) -> torch.Tensor:
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        flat = self._flat
        if isinstance(value, torch.Tensor) and flat.is_complex() and not value.is_complex():
            # The work of a collective gives complex numbers back as pairs of real ones.
            value = torch.view_as_complex(value) if value.shape == (*flat.shape, 2) else value
        if not isinstance(value, torch.Tensor) or _form(value) != _form(flat):
            raise ValueError(
                f"{self._what} must give a tensor like bucket.buffer(), {_content(flat)}, or a "
                f"list of one, but its future has {_content(value)}"
            )
        return value.contiguous() if value.dtype == flat.dtype else flat.copy_(value)


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    kind = tensor.is_floating_point(), tensor.is_complex()
    return kind, tensor.shape, tensor.device, tensor.layout


def _content(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{value.dtype} of shape {tuple(value.shape)} on {value.device}, {value.layout}"


def _in_hook(bucket: GradBucket, function: Callable[[], Any]) -> Any:
    """What a function of the user returns; an error of it says for which bucket."""
    try:
        return function()
    except BaseException as error:
        locate(error, f"in the communication hook for {bucket}")
        raise
