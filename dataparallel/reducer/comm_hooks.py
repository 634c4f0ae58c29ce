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

import contextlib
import functools
import inspect
import threading
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

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

        Raises:
            TypeError: It is not a tensor.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"bucket {self.index()} cannot have a buffer of type {type(tensor).__name__}; "
                f"pass a tensor with {self._first.numel()} elements"
            )
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """One view of the buffer per parameter, in the parameter's shape and layout.

        Raises:
            ValueError: The buffer was replaced by one from which they cannot be cut.
        """
        given, needed = self._buffer, sum(view.numel() for view in self._views)
        if given.dim() != 1 or given.numel() < needed or not given.is_contiguous():
            raise ValueError(
                f"the buffer of bucket {self.index()} was replaced by one of shape "
                f"{tuple(given.shape)} and stride {given.stride()}, but its gradients have {needed}"
                f" elements; pass a contiguous tensor of shape ({needed},) to set_buffer before "
                "asking for gradients"
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
        return (
            f"GradBucket(index={self.index()}, numel={self._first.numel()}, "
            f"dtype={self._buffer.dtype}, names={self.names()})"
        )


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
        TypeError: It is not callable, or not with a state and a bucket.
        ValueError: There is no hook of that name.
    """
    if isinstance(hook, str) or type(hook).__name__ == "BuiltinCommHookType":
        key = hook if isinstance(hook, str) else str(getattr(hook, "name", hook))
        if key.lower() not in BUILTIN:
            raise ValueError(
                f"there is no communication hook {hook!r}; pass a function hook(state, bucket) or "
                f"one of {', '.join(map(repr, BUILTIN))}"
            )
        return ResolvedHook(BUILTIN[key.lower()], state, str(hook))
    check_hook(hook)
    parts = _parts(hook)
    modules = {getattr(part, "__module__", None) for part in (*parts, type(state))}
    asks = any(getattr(part, "one_bucket_at_a_time", False) for part in parts)
    return ResolvedHook(
        typing.cast(CommHook, hook),
        state,
        _name_of(hook),
        one_bucket_at_a_time=asks or not modules.isdisjoint(_LAUNCH_FROM_CALLBACKS),
        is_power_sgd=_POWER_SGD in modules,
    )


def check_hook(hook: object) -> None:
    """Refuse what cannot be called as a communication hook; see :func:`resolve_hook`."""
    if not callable(hook):
        raise TypeError(
            f"a communication hook must be callable as hook(state, bucket), but got {hook!r} of "
            f"type {type(hook).__name__}; pass a function, or the name of a built-in hook: "
            f"{', '.join(map(repr, BUILTIN))}"
        )
    try:
        signature = inspect.signature(hook)
    except (ValueError, TypeError):
        # A function of an extension may have none; then the first call shows what it takes.
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"the communication hook {_name_of(hook)}{signature} is called as hook(state, bucket), "
            f"with two positional arguments: {error}; bind the others with functools.partial"
        ) from None


def _name_of(hook: object) -> str:
    """What logs and messages call a hook: its qualified name, or its class."""
    inner = hook.func if isinstance(hook, functools.partial) else hook
    return str(getattr(inner, "__qualname__", None) or type(inner).__qualname__)


def _parts(hook: Any) -> list[object]:
    """A hook, what it is in a partial, and what torch's wrappers of hooks close over."""
    parts = [hook, hook.func if isinstance(hook, functools.partial) else hook]
    if str(getattr(parts[1], "__module__", "")).startswith(_TORCHS):
        cells = getattr(parts[1], "__closure__", None) or ()
        parts += [part for cell in cells for part in _parts(cell.cell_contents)]
    return parts


# --- the hooks by name -----------------------------------------------------------------------


def _mean(
    process_group: dist.ProcessGroup | None, bucket: GradBucket, dtype: torch.dtype | None = None
) -> torch.futures.Future[torch.Tensor]:
    """Begin to average a bucket in place, sent as ``dtype``."""
    alone = process_group is None and not dist.is_initialized()
    size = 1 if alone else dist.get_world_size(process_group)
    if size < 1:
        raise ValueError(
            "this process is not in the group of the communication hook; register the hook with a "
            "group that has all processes of the wrapper"
        )
    buffer = bucket.buffer()
    numbers = torch.view_as_real(buffer) if dtype and buffer.is_complex() else buffer
    # Divided before it is rounded and added up, so that what is too large for the dtype, but not
    # when it is divided, does not become infinite. On a GPU ``out`` saves a pass over memory: torch
    # rounds the products as it writes them.
    if dtype is None:
        sent = numbers.div_(size)
    else:
        sent = torch.empty_like(numbers, dtype=dtype)
        torch.mul(numbers.float(), 1 / size, out=sent)

    def finish(done: torch.futures.Future[Any]) -> torch.Tensor:
        # Raises what went wrong. The value itself is a list, and real where the tensor is complex.
        done.value()
        if sent is not numbers:
            numbers.copy_(sent)
        return buffer

    if alone:
        return noop_hook(None, bucket).then(finish)
    work = dist.all_reduce(sent, group=process_group, async_op=True)
    assert work is not None
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(finish)
    return future


def allreduce_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The mean over the processes, as without a hook.

    Args:
        process_group: The processes. Default: the default group.
        bucket: What is averaged, in place.
    """
    return _mean(process_group, bucket)


def fp16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The mean over the processes, sent as ``torch.float16``.

    Args:
        process_group: The processes. Default: the default group.
        bucket: What is averaged, in place.
    """
    return _mean(process_group, bucket, torch.float16)


def bf16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The mean over the processes, sent as ``torch.bfloat16``.

    Args:
        process_group: The processes. Default: the default group.
        bucket: What is averaged, in place.
    """
    return _mean(process_group, bucket, torch.bfloat16)


def noop_hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Every process keeps what it has: shows what communication costs, and trains wrongly.

    Args:
        _: Not used.
        bucket: What is kept.
    """
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


BUILTIN: dict[str, CommHook] = {
    "allreduce": allreduce_hook,
    "bf16_compress": bf16_compress_hook,
    "fp16_compress": fp16_compress_hook,
    "noop": noop_hook,
}
for _hook in BUILTIN.values():
    # Torch's wrapper compares annotations with ``dist.GradBucket``, and takes hooks without any.
    _hook.__annotations__.clear()


# --- a hook that runs ------------------------------------------------------------------------


class HookSender:
    """Reduces the buckets of one round through a communication hook."""

    def __init__(self, hook: ResolvedHook, control: ProcessLink) -> None:
        self._hook = hook
        self._control = control
        self._previous: PendingHook | None = None

    @property
    def name(self) -> str:
        """That of the hook."""
        return self._hook.name

    def send(self, bucket: Bucket, storage: BucketStorage, *, is_last: bool) -> PendingHook:
        """Call the hook for a bucket; what it launches goes on when this returns."""
        hook, previous = self._hook, self._previous
        self._previous = None
        if previous is not None:
            # If it has failed, this is told later: the other processes, where it may have not, wait
            # for the next bucket.
            previous.settle()
        given = GradBucket(bucket, storage, is_last=is_last, in_memory_order=hook.is_power_sgd)
        with _located(given):
            future: object = hook.function(hook.state, given)
        if not isinstance(future, torch_internals.Future):
            raise TypeError(
                f"the communication hook {hook.name} must return a torch.futures.Future of the "
                f"bucket's new content, but returned {_what(future)} for {_label(given)}; return "
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
        self._name = name
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
        with _located(self._bucket):
            # Returns at once, and orders the current streams of this thread behind the result.
            value = self._future.wait()
        return self._accepted(value)

    def settle(self) -> None:
        """Wait until there is a value or an error, which :meth:`wait` will tell."""
        # Whoever waits again, after a failure, does not wait for as long again.
        timeout, self._timeout = self._timeout, 0.0
        deadline = time.monotonic() + timeout
        while not self._over.wait(max(0.0, min(_SLICE, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"the communication hook {self._name} did not finish {_label(self._bucket)} "
                    f"within {timeout:g} s{_rank()}, for which the backward waits: nobody has "
                    "completed its future; make sure that every process runs the hook for the same "
                    "buckets and that set_result or set_exception is called in any case, or ask "
                    "for a longer timeout"
                )
            failure = self._control.look()
            if failure is not None:
                raise CollectiveError(
                    f"the communication hook {self._name} was not waited for any more, for "
                    f"{_label(self._bucket)}{_rank()}: {failure}"
                )

    def _accepted(self, value: object) -> torch.Tensor:
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"the future of the communication hook {self._name} must have a tensor, or a list "
                f"of one, but has {_what(value)} for {_label(self._bucket)}"
            )
        flat = self._flat
        if flat.is_complex() and value.dtype == flat.dtype.to_real() and value.shape[1:] == (2,):
            # The work of a collective gives complex numbers back as pairs of real ones.
            value = torch.view_as_complex(value)
        if _form(value) != _form(flat):
            raise ValueError(
                f"the communication hook {self._name} returned a tensor of {_content(value)}, but "
                f"{_label(self._bucket)} has {_content(flat)}; return a tensor like bucket.buffer()"
            )
        return value.contiguous() if value.dtype == flat.dtype else flat.copy_(value)


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    kind = tensor.is_floating_point(), tensor.is_complex()
    return kind, tensor.shape, tensor.device, tensor.layout


def _content(tensor: torch.Tensor) -> str:
    sparse = "" if tensor.layout == torch.strided else f", {tensor.layout}"
    return f"shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}{sparse}"


@contextlib.contextmanager
def _located(bucket: GradBucket) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        locate(error, f"in the communication hook for {_label(bucket)}")
        raise


def _label(bucket: GradBucket) -> str:
    return f"bucket {bucket.index()} ({describe_names(bucket.names())})"


def _rank() -> str:
    if not dist.is_available() or not dist.is_initialized():
        return ""
    return f" in rank {dist.get_rank()} of {dist.get_world_size()}"


def _what(value: object) -> str:
    if isinstance(value, (list, tuple)):
        kinds = ", ".join(sorted({type(entry).__name__ for entry in value}))
        return f"a {type(value).__name__} of {len(value)} ({kinds or 'empty'})"
    return "None" if value is None else f"a {type(value).__name__}"
