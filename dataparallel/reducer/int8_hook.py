"""A communication hook that sends a byte per element, and later what rounding takes away.

Note [Two phases of a byte per element]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An all-reduce would add up numbers of 8 bits, which overflow. So each process becomes responsible
for one part of the bucket: it gets this part from all processes, adds the values up in float32 in
the order of ranks, and sends their mean to all. Both times a part is sent as int8 with a scale for
each block of 256 elements, and so parts begin at multiples of 256. All processes decompress the
same bytes, so that their results are the same bit for bit.

Rounding takes something away both times, and both times it is kept where that happens, and added
in the next step: of the whole bucket in each process, of the mean in the process that is
responsible. Errors belong to parameters: where buckets are made anew they begin at zero, because
they cannot be told apart by a number that several models use, and at another moment other
parameters have.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from dataparallel import kernels
from dataparallel.devices import accelerators
from dataparallel.reducer.grad_bucket import GradBucket
from dataparallel.reducer.hook_group import for_torch, not_in_group, world_size

# Parts begin at a block of kernels/compress.py.
_BLOCK = 256
# How backends say that they have no all_to_all, or none for this kind of device.
_UNSUPPORTED = re.compile(r"not (yet )?(support|implement)|unsupported", re.IGNORECASE)


class _Errors(NamedTuple):
    """What one process has not sent of a bucket yet.

    Attributes:
        layout: What has to be the same for the errors to be those of a bucket.
        bucket: Of the gradients of this process.
        part: Of the mean of the part for which this process is responsible.
    """

    layout: tuple[object, ...]
    bucket: torch.Tensor
    part: torch.Tensor


class Int8CompressState:
    """What :func:`int8_compress_hook` is called with, and what it keeps from step to step.

    One state may serve several models. The errors are kept for the parameters of a bucket, and
    freed with them; they begin at zero where buckets are made anew, as both wrappers do after the
    first step. They are not pickled, and neither is the process group: an unpickled state has no
    errors and the default group.

    Example::

        state = Int8CompressState(error_feedback=False)
        model.register_comm_hook(state, int8_compress_hook)

    Args:
        process_group: The processes. Default: the default group.
        error_feedback: Whether what rounding takes away is kept and added in the next step, which
            takes ``4 + 4 / P`` bytes per element with P processes. Without, many small gradients
            beside a large one in a block of 256 are lost for ever. Default: True.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, error_feedback: bool = True
    ) -> None:
        self.process_group = process_group
        self.error_feedback = error_feedback
        self._lock = threading.Lock()
        # From each parameter of a bucket to the errors of the bucket.
        self._errors: MutableMapping[torch.Tensor, _Errors] = WeakIdKeyDictionary()

    def reset(self) -> None:
        """Forget all errors, for example after the scale of the loss has changed."""
        with self._lock:
            self._errors.clear()

    def __getstate__(self) -> dict[str, bool]:
        return {"error_feedback": self.error_feedback}

    def __setstate__(self, state: dict[str, bool]) -> None:
        Int8CompressState.__init__(self, error_feedback=state["error_feedback"])

    def _errors_of(
        self, bucket: GradBucket, numbers: torch.Tensor, parts: _Parts
    ) -> _Errors | None:
        if not self.error_feedback:
            return None
        parameters = bucket.parameters()
        ids = tuple(map(id, parameters))
        layout = (ids, bucket.buffer().dtype, numbers.shape, numbers.device, parts)
        with self._lock:
            errors = self._errors.get(parameters[0])
            if errors is None or errors.layout != layout:
                part = numbers.new_zeros(parts.length(parts.rank))
                errors = _Errors(layout, torch.zeros_like(numbers), part)
                # Those of the buckets that the parameters were in before are freed by and by.
                for parameter in parameters:
                    self._errors[parameter] = errors
        return errors

    def _forget(self, bucket: GradBucket) -> None:
        with self._lock:
            for parameter in bucket.parameters():
                self._errors.pop(parameter, None)


class _Parts(NamedTuple):
    """How a bucket of ``numel`` elements is divided; the last parts may be shorter, or empty."""

    numel: int
    world_size: int
    rank: int

    @property
    def most(self) -> int:
        """How many elements a part has, at most."""
        return -(-self.numel // (self.world_size * _BLOCK)) * _BLOCK

    @property
    def num_bytes(self) -> int:
        """How long a compressed part is; shorter ones are filled up, so that all are equal."""
        return kernels.compressed_size(self.most, torch.int8)

    def begin(self, rank: int) -> int:
        """Where the part of a rank begins."""
        return min(rank * self.most, self.numel)

    def length(self, rank: int) -> int:
        """How many elements the part of a rank has."""
        return self.begin(rank + 1) - self.begin(rank)

    def of(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of a rank."""
        return tensor[self.begin(rank) : self.begin(rank + 1)]

    def compressed(self, tensor: torch.Tensor, slot: int, rank: int) -> torch.Tensor:
        """Where, among compressed parts, the one is that has the size of a rank's part."""
        size = kernels.compressed_size(self.length(rank), torch.int8)
        return tensor[slot * self.num_bytes :][:size]


@for_torch
def int8_compress_hook(
    state: Int8CompressState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The mean over the processes, sent as int8: two bytes per element, in place of eight.

    The result is the same in all processes, bit for bit. See
    Note [Two phases of a byte per element]. Buckets that are not float32 are converted. A block of
    256 elements with one that is infinite or no number is NaN in the result. With one process
    nothing is sent, and nothing rounded. After a failure in the hook the errors of the bucket begin
    at zero; those of a backward that fails elsewhere go with its gradients.

    The second phase is launched from a callback of the first, so that the wrappers of this package
    give the hook one bucket at a time. ``torch.nn.parallel.DistributedDataParallel`` does not: with
    gloo it must have a single bucket there (``bucket_cap_mb`` larger than the module) and must not
    look for unused parameters, whose map it sends meanwhile; with NCCL, where callbacks run at once
    and in order, it may have several.

    Example::

        model.register_comm_hook(Int8CompressState(), int8_compress_hook)

    Args:
        state: The process group and the errors.
        bucket: What is averaged, in place.

    Returns:
        A future of ``bucket.buffer()``.

    Raises:
        TypeError: The gradient of the bucket is sparse, or ``state`` is of another type.
        ValueError: This process is not in the group.
    """
    if not isinstance(state, Int8CompressState):
        raise TypeError(
            f"int8_compress_hook needs an Int8CompressState, but got a {type(state).__name__}; "
            "register it as register_comm_hook(Int8CompressState(process_group), hook)"
        )
    buffer = bucket.buffer()
    if buffer.layout != torch.strided:
        raise TypeError(
            f"int8_compress_hook takes dense gradients, but that of bucket {bucket.index()} is "
            f"{buffer.layout}; use sparse=False in the embedding, or another hook"
        )
    size = world_size(state.process_group)
    if size == 1 or not buffer.numel():
        alone: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        alone.set_result(buffer)
        return alone
    return _Exchange(state, bucket, size).begin()


# See Note [Hooks that launch from callbacks].
int8_compress_hook.one_bucket_at_a_time = True  # type: ignore[attr-defined]


class _Exchange:
    """Both phases for one bucket.

    Args:
        state: What the hook was called with.
        bucket: What is averaged.
        size: How many processes there are.
    """

    def __init__(self, state: Int8CompressState, bucket: GradBucket, size: int) -> None:
        buffer = bucket.buffer()
        self._state = state
        self._group = state.process_group
        self._bucket = bucket
        self._buffer = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
        self._numbers = self._buffer.float()
        self._parts = _Parts(self._numbers.numel(), size, dist.get_rank(self._group))
        self._errors = state._errors_of(bucket, self._numbers, self._parts)
        devices = [str(device) for device in accelerators()]
        self._result: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[*devices])
        # A work keeps its memory until it is done, if something keeps the work.
        self._work: dist.Work | None = None

    def begin(self) -> torch.futures.Future[torch.Tensor]:
        """Send every process its part."""
        try:
            sent = self._parts_for_all()
            received, slots, work = self._send_to_all(sent)
            self._then(work, functools.partial(self._average, received, slots))
        except BaseException:
            self._state._forget(self._bucket)
            raise
        return self._result

    def _parts_for_all(self) -> torch.Tensor:
        parts = self._parts
        sent = self._empty(parts.world_size)
        for rank in range(parts.world_size):
            error = None if self._errors is None else parts.of(self._errors.bucket, rank)
            self._compress(parts.of(self._numbers, rank), 1 / parts.world_size, error, sent, rank)
        return sent

    def _compress(
        self,
        tensor: torch.Tensor,
        scale: float,
        error: torch.Tensor | None,
        sent: torch.Tensor,
        slot: int,
    ) -> None:
        """Write a part to its place, and zeros where it is shorter than others."""
        whole = sent[slot * self._parts.num_bytes :][: self._parts.num_bytes]
        size = kernels.compressed_size(tensor.numel(), torch.int8)
        kernels.compress(tensor, torch.int8, scale, error=error, out=whole[:size])
        whole[size:].zero_()

    def _send_to_all(
        self, sent: torch.Tensor
    ) -> tuple[torch.Tensor, Sequence[int], dist.Work | None]:
        """What there will be when the work is done, and the places of this process's parts."""
        parts = self._parts
        received = torch.empty_like(sent)
        try:
            work = dist.all_to_all_single(received, sent, group=self._group, async_op=True)
            return received, range(parts.world_size), work
        except RuntimeError as error:
            if not _UNSUPPORTED.search(str(error)):
                raise
        everything = self._empty(parts.world_size**2)
        work = _all_gather(everything, sent, self._group)
        return everything, range(parts.rank, parts.world_size**2, parts.world_size), work

    def _average(self, received: torch.Tensor, slots: Sequence[int]) -> None:
        """Add up this process's part, and send the mean to all."""
        sent = self._empty(1)
        failure = None
        try:
            self._compress_mean(received, slots, sent)
        except Exception as error:
            # The others wait for this part. They get NaN: with all bits set, scales are no numbers.
            failure = error
            sent.fill_(255)
        gathered = self._empty(self._parts.world_size)
        work = _all_gather(gathered, sent, self._group)
        self._then(work, functools.partial(self._unpack, gathered, failure))

    def _compress_mean(
        self, received: torch.Tensor, slots: Sequence[int], sent: torch.Tensor
    ) -> None:
        parts = self._parts
        mean = self._numbers.new_empty(parts.length(parts.rank))
        for rank, slot in enumerate(slots):
            part = parts.compressed(received, slot, parts.rank)
            kernels.decompress(part, mean, add=rank > 0)
        error = None if self._errors is None else self._errors.part
        self._compress(mean, 1.0, error, sent, 0)

    def _unpack(self, gathered: torch.Tensor, failure: Exception | None) -> None:
        """Put the means of all parts into the bucket."""
        if failure is not None:
            raise failure
        parts = self._parts
        for rank in range(parts.world_size):
            part = parts.compressed(gathered, rank, rank)
            # Not to the numbers: they may be memory of another stream than that of this callback.
            kernels.decompress(part, parts.of(self._buffer, rank))
        self._work = None
        self._result.set_result(self._bucket.buffer())

    def _then(self, work: dist.Work | None, step: Any) -> None:
        """Let a step follow a collective."""
        if work is None:
            raise not_in_group()
        self._work = work

        def follow(done: torch.futures.Future[Any]) -> None:
            with self._failing():
                done.value()
                step()

        work.get_future().add_done_callback(follow)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Give an error to whoever waits: who calls callbacks would only log it."""
        try:
            yield
        except BaseException as error:
            self._work = None
            self._state._forget(self._bucket)
            known = error if isinstance(error, Exception) else RuntimeError(repr(error))
            self._result.set_exception(known)  # type: ignore[arg-type]

    def _empty(self, slots: int) -> torch.Tensor:
        size = slots * self._parts.num_bytes
        return torch.empty(size, dtype=torch.uint8, device=self._numbers.device)


def _all_gather(
    out: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup | None
) -> dist.Work | None:
    # Newer versions have it under another name; there the old one warns.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(out, sent, group=group, async_op=True)
    return work
