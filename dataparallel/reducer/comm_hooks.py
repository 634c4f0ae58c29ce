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
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from dataparallel import torch_internals
from dataparallel.comm.failures import CollectiveError
from dataparallel.comm.link import ProcessLink
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
        self, bucket: Bucket, storage: BucketStorage, *, is_last: bool, in_memory_order: bool
    ) -> None:
        self._bucket = bucket
        self._views = storage.views
        # A hook may resize what it gets. Another tensor over the same storage keeps the owner's
        # own one in shape, and the views remain valid: they look the memory up in the storage.
        self._buffer = storage.flat.view(storage.flat.shape)
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
            ValueError: The buffer was replaced by one that is not contiguous.
        """
        sizes = [view.numel() for view in self._views]
        if not self._buffer.is_contiguous():
            raise ValueError(
                f"the buffer of {self} was replaced by one of stride {self._buffer.stride()}; pass "
                f"a contiguous tensor of shape ({sum(sizes)},) to set_buffer"
            )
        # A hook may have resized it.
        parts = torch.split(self._buffer[: sum(sizes)], sizes)
        if self._in_memory_order:
            return [part.view(view.shape) for part, view in zip(parts, self._views, strict=True)]
        return [
            part.as_strided(view.shape, view.stride())
            for part, view in zip(parts, self._views, strict=True)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the bucket, in the order of :meth:`gradients`: the originals."""
        return list(self._bucket.originals)

    def names(self) -> list[str]:
        """The names of the parameters, in the order of :meth:`parameters`."""
        return list(self._bucket.names)

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
        self._timeout = control.timeout
        inner: Any = getattr(hook.function, "func", hook.function)
        self._is_for_real_numbers = inner in (
            default_hooks.fp16_compress_hook,
            default_hooks.bf16_compress_hook,
        )
        # Waits for the last bucket, where the hook gets one at a time.
        self._settle_previous: Callable[[], None] | None = None

    def send(
        self, bucket: Bucket, storage: BucketStorage, *, is_last: bool
    ) -> Callable[[], torch.Tensor]:
        """Call the hook for a bucket; what is returned waits for the bucket's new content."""
        hook, settle_previous = self._hook, self._settle_previous
        self._settle_previous = None
        if settle_previous is not None:
            # If it has failed, this is told later: the other processes, where it may have not, wait
            # for this bucket.
            settle_previous()
        given = GradBucket(bucket, storage, is_last=is_last, in_memory_order=hook.is_power_sgd)
        if storage.flat.is_complex() and self._is_for_real_numbers:
            raise TypeError(
                f"the communication hook {hook.name} sends real numbers of 16 bits, but the "
                f"gradients of {given} are {storage.flat.dtype}, whose imaginary parts it would "
                "drop; use 'allreduce', or a hook that sends view_as_real()"
            )
        future: Any = _in_hook(given, functools.partial(hook.function, hook.state, given))
        if not isinstance(future, torch_internals.Future):
            raise TypeError(
                f"the communication hook {hook.name} must return a torch.futures.Future of the "
                f"new content of {given}, but returned a {type(future).__name__}; return "
                "work.get_future(), or put a tensor into a future with set_result"
            )
        over = threading.Event()
        # A future's own wait has no timeout.
        future.add_done_callback(lambda _: over.set())
        settle = functools.partial(self._settle, over, given)
        if hook.one_bucket_at_a_time:
            self._settle_previous = settle

        def wait() -> torch.Tensor:
            settle()
            # Returns at once, and orders the current streams of this thread behind the result.
            return self._accepted(_in_hook(given, future.wait), given, storage.flat)

        return wait

    def _settle(self, over: threading.Event, bucket: GradBucket) -> None:
        """Wait until there is a value or an error."""
        what = f"the communication hook {self.name} for {bucket} in rank {self._control.rank}"
        deadline = time.monotonic() + self._timeout
        while not over.wait(max(0.0, min(_SLICE, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                timeout, self._timeout = self._timeout, 0.0
                raise TimeoutError(
                    f"{what} did not complete its future within {timeout:g} s; make sure that "
                    "every process runs the hook for the same buckets and that set_result or "
                    "set_exception is called in any case, or ask for a longer timeout"
                )
            failure = self._control.look()
            if failure is not None:
                raise CollectiveError(f"{what} was not waited for any more: {failure}")

    def _accepted(self, value: Any, bucket: GradBucket, flat: torch.Tensor) -> torch.Tensor:
        """The value of a future, as the bucket's new content."""
        if isinstance(value, (list, tuple)) and len(value) == 1:
            (value,) = value
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and flat.is_complex() and value.shape == (*flat.shape, 2):
            # The work of a collective gives complex numbers back as pairs of real ones.
            value = torch.view_as_complex(value)
        if not is_tensor or _form(value) != _form(flat):
            raise ValueError(
                f"the communication hook {self.name} must give a tensor like bucket.buffer(), "
                f"{_content(flat)}, or a list of one, but the future of {bucket} has "
                f"{_content(value) if is_tensor else f'a {type(value).__name__}'}"
            )
        return value.contiguous() if value.dtype == flat.dtype else flat.copy_(value)


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    kind = tensor.is_floating_point(), tensor.is_complex()
    return kind, tensor.shape, tensor.device, tensor.layout


def _content(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}, {tensor.layout}"


def _in_hook(bucket: GradBucket, function: Callable[[], Any]) -> Any:
    """What a function of the user returns; an error of it says for which bucket."""
    try:
        return function()
    except BaseException as error:
        locate(error, f"in the communication hook for {bucket}")
        raise
