"""A call of a communication hook, what it has begun, and how that is awaited."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dataparallel import torch_internals
from dataparallel.comm.process_errors import CollectiveError
from dataparallel.errors import locate
from dataparallel.reducer.debug import describe_names
from dataparallel.reducer.grad_bucket import GradBucket
from dataparallel.reducer.hooks import ResolvedHook
from dataparallel.reducer.storage import BucketStorage

# Seconds between two looks at the other processes.
_SLICE = 0.1


def run_hook(
    hook: ResolvedHook, bucket: GradBucket, failed: Callable[[], object] = lambda: None
) -> PendingHook:
    """Call a hook for a bucket; what it launches goes on when this returns.

    Example::

        pending = run_hook(resolve_hook("allreduce"), bucket)
        result = pending.wait(60.0, "the end of backward")

    Args:
        hook: A hook that was accepted.
        bucket: A bucket that no hook has had: the hook may put another buffer into it.
        failed: Tells which process has failed, so that nobody waits for it. Default: none has.

    Returns:
        What the hook has begun.

    Raises:
        TypeError: The hook returned something other than a future.
        BaseException: What the hook raised, with the bucket and its parameters added.
    """
    bucket.in_memory_order = hook.in_memory_order
    original = bucket.buffer()
    wanted = _Content.of(original)
    with _located(bucket):
        future: object = hook.function(hook.state, bucket)
    if not isinstance(future, torch_internals.Future):
        raise TypeError(
            f"the communication hook {hook.name} must return a torch.futures.Future of the "
            f"bucket's new content, but returned {_what(future)} for {_label(bucket)}; "
            f"{_remedy(future)}"
        )
    returned = typing.cast("torch.futures.Future[Any]", future)
    return PendingHook(hook.name, bucket, returned, original, wanted, failed)


class _Content(NamedTuple):
    """What the result of a hook is compared with."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Content:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.layout)

    def __str__(self) -> str:
        sparse = "" if self.layout == torch.strided else f", {self.layout}"
        return f"shape {self.shape}, {self.dtype} on {self.device}{sparse}"


class PendingHook:
    """What a hook has begun for one bucket. Made by :func:`run_hook`."""

    def __init__(
        self,
        name: str,
        bucket: GradBucket,
        future: torch.futures.Future[Any],
        original: torch.Tensor,
        wanted: _Content,
        failed: Callable[[], object],
    ) -> None:
        self._name = name
        self._bucket = bucket
        self._future = future
        self._original = original
        self._wanted = wanted
        self._failed = failed
        self._over = threading.Event()
        # A future's own wait has no timeout.
        future.add_done_callback(functools.partial(_set, self._over))

    def done(self) -> bool:
        """Whether the future has a value or an error."""
        return self._over.is_set()

    def wait(self, timeout: float, what: str) -> torch.Tensor:
        """The new content of the bucket. May be called several times.

        Args:
            timeout: Seconds to wait, at most.
            what: What waits, for the message.

        Returns:
            A tensor like the buffer that the hook got, ready on the current streams of this
            thread. It is the buffer itself if the hook's result had another precision.

        Raises:
            TimeoutError: The future was not completed in time.
            TypeError: Its value is not a tensor.
            ValueError: The tensor is not like the buffer.
            BaseException: The error of the future, with the bucket and its parameters added.
        """
        self.settle(timeout, what)
        with _located(self._bucket):
            # Returns at once, and orders the current streams of this thread behind the result.
            value = self._future.wait()
        return self._accepted(value)

    def settle(self, timeout: float, what: str) -> None:
        """Wait until there is a value or an error, which :meth:`wait` will tell.

        Args:
            timeout: Seconds to wait, at most.
            what: What waits, for the message.

        Raises:
            TimeoutError: The future was not completed in time.
            CollectiveError: Another process has failed.
        """
        deadline = time.monotonic() + timeout
        while not self._over.wait(max(0.0, min(_SLICE, deadline - time.monotonic()))):
            failure = self._failed()
            if failure is not None:
                raise CollectiveError(
                    f"the communication hook {self._name} was not waited for any more, for "
                    f"{_label(self._bucket)}{_rank()}: {failure}"
                )
            if time.monotonic() < deadline:
                continue
            raise TimeoutError(
                f"the communication hook {self._name} did not finish {_label(self._bucket)} "
                f"within {timeout:g} s{_rank()}, for which {what} waits: nobody has completed its "
                "future; make sure that every process runs the hook for the same buckets and that "
                "set_result or set_exception is called in any case, or ask for a longer timeout"
            )

    def _accepted(self, value: object) -> torch.Tensor:
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"the future of the communication hook {self._name} must have a tensor, or a list "
                f"of one, but has {_what(value)} for {_label(self._bucket)}"
            )
        wanted = self._wanted
        if wanted.dtype.is_complex and value.dtype == wanted.dtype.to_real():
            # The work of a collective gives complex numbers back as pairs of real ones.
            value = torch.view_as_complex(value) if value.shape[1:] == (2,) else value
        got = _Content.of(value)
        if got == wanted:
            return value.contiguous()
        same_kind = (got.dtype.is_floating_point, got.dtype.is_complex) == (
            wanted.dtype.is_floating_point,
            wanted.dtype.is_complex,
        )
        if not same_kind or got._replace(dtype=wanted.dtype) != wanted:
            raise ValueError(
                f"the communication hook {self._name} returned a tensor of {got}, but "
                f"{_label(self._bucket)} has {wanted}; return a tensor like bucket.buffer()"
            )
        return self._original.copy_(value)


def _set(over: threading.Event, _: object) -> None:
    over.set()


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


def _remedy(returned: object) -> str:
    if isinstance(returned, torch.Tensor):
        return "put it into a future: future = torch.futures.Future(); future.set_result(tensor)"
    if callable(getattr(returned, "get_future", None)):
        return "return work.get_future()"
    return "return the future of the collective, work.get_future()"


# --- the hook as what reduces buckets --------------------------------------------------------


class HookSender:
    """Reduces buckets through a communication hook.

    Args:
        hook: The hook.
        parameters: Per bucket, its parameters: the originals.
        names: Per bucket, their names.
        timeout: Seconds to wait for the hook, at most.
        failed: Tells which process has failed. Default: none has.
    """

    def __init__(
        self,
        hook: ResolvedHook,
        parameters: Sequence[Sequence[torch.Tensor]],
        names: Sequence[Sequence[str]],
        timeout: float,
        failed: Callable[[], object] = lambda: None,
    ) -> None:
        self._hook = hook
        self._failed = failed
        self._parameters = parameters
        self._names = names
        self._timeout = timeout
        self._previous: _Sent | None = None
        self._broken: str | None = None

    @property
    def name(self) -> str:
        """That of the hook."""
        return self._hook.name

    def break_off(self, bucket: int, error: Exception) -> str | None:
        """Send nothing any more: a bucket for which others wait could not be sent."""
        self._broken = self._broken or (
            f"the communication hook {self.name} failed twice for bucket {bucket}, for which the "
            f"other processes have begun collectives ({type(error).__name__}: "
            f"{str(error).splitlines()[0]})"
        )
        return self._broken

    def send(self, bucket: int, storage: BucketStorage, is_last: bool) -> _Sent:
        """Call the hook for a bucket.

        Args:
            bucket: Number of the bucket; 0 begins a new round.
            storage: Its flat tensor and views.
            is_last: Whether no bucket comes after it in this round.
        """
        if self._broken is not None:
            raise RuntimeError(self._broken)
        previous, self._previous = self._previous, None
        if bucket and previous is not None:
            # See Note [Hooks that launch from callbacks]. If it has failed, this is told later: the
            # other processes, where it may have not, wait for the next bucket.
            previous.settle()
        given = GradBucket(
            bucket,
            storage.flat,
            storage.views,
            self._parameters[bucket],
            self._names[bucket],
            is_last=is_last,
        )
        sent = _Sent(run_hook(self._hook, given, self._failed), self._timeout)
        if self._hook.one_bucket_at_a_time and not is_last:
            self._previous = sent
        return sent


class _Sent:
    def __init__(self, pending: PendingHook, timeout: float) -> None:
        self._pending = pending
        self._timeout = timeout

    def wait(self) -> torch.Tensor:
        return self._pending.wait(self._remaining(), "the backward")

    def settle(self) -> None:
        """Wait for the end, be it an error."""
        self._pending.settle(self._remaining(), "the backward")

    def _remaining(self) -> float:
        # Whoever waits again, after a failure, does not wait for as long again.
        timeout, self._timeout = self._timeout, 0.0
        return timeout
