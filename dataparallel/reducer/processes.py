"""The processes as one reducer sees them: its groups, and what is agreed over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dataparallel.comm.failure_channel import channel_of
from dataparallel.comm.late_failures import late_failures
from dataparallel.comm.process_group import parent_group, shared_store, timeout_of
from dataparallel.comm.processes import ProcessLink
from dataparallel.reducer.average import AverageKind, scale_of
from dataparallel.reducer.buckets import Bucket
from dataparallel.reducer.exchange import AllReduce, Exchange, OrderedSum, Sender
from dataparallel.reducer.failed_rounds import FailedRounds
from dataparallel.reducer.verify import digest

# Of how many buckets messages show the sizes.
_MOST_BUCKETS = 6


class ReducerProcesses:
    """The links of one reducer: one for buckets, one for what is said about rounds.

    They are made at :meth:`connect`, or when one is first asked for; all processes come to it.

    Args:
        group: The user's process group.
        timeout: Seconds to wait for other processes. None: the time limit of the group.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float | None) -> None:
        parent = parent_group(group)
        self._group = group
        self._links: tuple[ProcessLink, ProcessLink] | None = None
        self.timeout = timeout_of(parent) if timeout is None else timeout
        self.rank = parent.rank()
        self.world_size = parent.size()
        self._verify: Callable[[ProcessLink], None] = lambda control: None
        self._num_active: Callable[[], int] | None = None
        # A communication hook divides by the number of processes; so much more it gets.
        self._times = 1
        self._store = shared_store(parent)
        #: Collectives that have failed when nobody waited any more.
        self.late = late_failures(channel_of(parent, self._store))
        self._failed: FailedRounds | None = None
        self._plan: tuple[Any, str] = ((), "")
        self._was_interrupted = False

    def verify_with(self, verify: Callable[[ProcessLink], None]) -> None:
        """Let a function compare what the processes reduce when they are connected."""
        self._verify = verify

    def count_active(self, count: Callable[[], int] | None) -> None:
        """Let a function tell how many processes have data; None where all have."""
        self._num_active = count

    def connect(self) -> tuple[ProcessLink, ProcessLink]:
        """Make the links where there are none yet; a collective call then."""
        if self._links is None:
            buckets = ProcessLink(self._group, timeout=self.timeout, purpose="gradients")
            control = None
            try:
                control = ProcessLink(self._group, timeout=self.timeout, purpose="control")
                self._verify(control)
            except BaseException:
                buckets.close()
                if control is not None:
                    control.close()
                raise
            self._failed = FailedRounds(self._store, control.name, self.rank)
            self._links = buckets, control
        return self._links

    @property
    def buckets(self) -> ProcessLink:
        """The link for what is reduced."""
        return self.connect()[0]

    @property
    def control(self) -> ProcessLink:
        """The link for what is said about rounds."""
        return self.connect()[1]

    def exchange(
        self,
        buckets: Sequence[Bucket],
        average: AverageKind,
        *,
        weight: float,
        sender: Sender | None,
        deterministic: bool,
    ) -> Exchange:
        """The exchange of one round.

        Args:
            buckets: What is reduced.
            average: The way of averaging.
            weight: The weight of this process in an average over samples.
            sender: A communication hook, if there is one.
            deterministic: Whether sums are made in rank order.
        """
        hook: str | None = getattr(sender, "name", None)
        self.connect()
        assert self._failed is not None
        self._failed.begin()
        try:
            self._begin_step(buckets, (average, deterministic, hook))
        except BaseException as error:
            if not isinstance(error, Exception):
                self.interrupted(error)
            raise
        sum_over = OrderedSum if deterministic else AllReduce
        self._times = 1 if sender is None else self.world_size
        return Exchange(
            buckets,
            sender or sum_over(self.buckets, [bucket.name for bucket in buckets]),
            self.buckets,
            self.control,
            self._scale(average, weight),
            self._failed,
            self.interrupted,
            self.get_stuck,
        )

    def _begin_step(
        self,
        buckets: Sequence[Bucket],
        options: tuple[str, bool, str | None],
    ) -> None:
        """See that all processes are about to reduce the same buckets in the same way.

        Raises:
            CollectiveMismatch: They are not.
        """
        key = [id(bucket) for bucket in buckets], options
        if key != self._plan[0]:
            self._plan = key, _describe(buckets, *options)
        self.control.checks.begin_step()
        # Over the group of the buffers, too: one process may be in a forward instead.
        self.buckets.checks.begin_step(self._plan[1])

    def _scale(self, average: AverageKind, weight: float) -> Callable[[], float]:
        # Asked for in the round: while some have joined, the answer has to come from the others.
        num_active = self._num_active or (lambda: self.world_size)
        times = self._times
        if average != "samples":
            return lambda: scale_of(average, num_active(), weight=1, total=1) * times
        # Launched now and waited for before the first bucket.
        total = torch.tensor([weight], dtype=torch.float64)
        pending = self.control.all_reduce(total, what="the weights of a round")

        def scale() -> float:
            pending.wait()
            return scale_of(average, num_active(), weight=weight, total=float(total.item())) * times

        return scale

    def used_anywhere(self, used: Sequence[int]) -> list[bool]:
        """Per parameter, whether any process has a gradient."""
        counts = torch.tensor(list(used), dtype=torch.int32)
        self.control.all_reduce(counts, what="the map of used parameters").wait()
        return [count > 0 for count in counts.tolist()]

    def reduce_late(
        self, extra: dict[int, torch.Tensor], originals: Sequence[torch.Tensor], scale: float
    ) -> dict[int, torch.Tensor]:
        """Reduce gradients that came after their bucket was sent, in some process.

        Args:
            extra: What came late in this process, by the index of the parameter.
            originals: All parameters.
            scale: What the buckets of the round were multiplied by.

        Returns:
            What came late in all of them, by the index.
        """
        mine = [index in extra for index in range(len(originals))]
        late = [index for index, found in enumerate(self.used_anywhere(mine)) if found]
        result: dict[int, torch.Tensor] = {}
        for index in late:
            total = torch.zeros_like(originals[index], requires_grad=False)
            if index in extra and scale:
                total.add_(extra[index], alpha=scale / self._times)
            self.buckets.all_reduce(total, what=f"late gradients of parameter {index}").wait()
            result[index] = total
        return result

    def order_of_rank_0(self, order: Sequence[int]) -> list[int]:
        """What rank 0 gave for ``order``, on all ranks."""
        tensor = torch.tensor(list(order))
        self.control.broadcast(tensor, 0, what="the order in which gradients arrive").wait()
        return [int(index) for index in tensor.tolist()]

    @property
    def is_broken(self) -> bool:
        """Whether a link is broken; all processes then make new ones at their next forward."""
        broken = any(link.broken is not None for link in self._links or ())
        return broken or self._was_interrupted

    def interrupted(self, error: BaseException) -> None:
        """Use the links, and what is in flight, no more; the others get to know.

        Args:
            error: What has interrupted this process, mostly a KeyboardInterrupt.
        """
        # First: telling may be interrupted, too.
        self._was_interrupted = True
        if self._links is not None:
            self._links[1].tell(error, "backward")

    def get_stuck(self, reason: str) -> None:
        """No step can be reduced any more, with whatever links; the others get to know.

        Args:
            reason: Why.
        """
        self.control.tell(RuntimeError(reason), "backward", kind="stuck")

    @property
    def stuck(self) -> str:
        """Why no step can be reduced any more; empty if one can."""
        failures = [link.failure for link in self._links or ()]
        return next((str(f) for f in failures if f is not None and f.kind == "stuck"), "")

    def close(self) -> None:
        """Give the groups back."""
        for link in self._links or ():
            link.close()


def _describe(
    reduced: Sequence[Bucket], average: str, deterministic: bool, hook: str | None
) -> str:
    """What must be the same in all processes for a round, on one line."""
    buckets = [
        "sparse" if b.storage is None else f"{b.storage.flat.numel()} {b.storage.flat.dtype}"
        for b in reduced
    ]
    shown = ", ".join(buckets[:_MOST_BUCKETS]).replace("torch.", "")
    more = f" and {len(buckets) - _MOST_BUCKETS} more" if buckets[_MOST_BUCKETS:] else ""
    how = f"average={average!r}, deterministic={deterministic}"
    ways = f"{how}, {f'the hook {hook}' if hook else 'no hook'}"
    return f"{len(buckets)} buckets of {shown}{more} ({digest(buckets):x}), {ways}"
