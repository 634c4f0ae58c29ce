"""The part of a round between processes: buckets are sent in order, and received.

Note [Order of collectives]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Processes must launch the same collectives in the same order. Buckets may become ready in different
threads; they are summed and launched by their numbers, by one thread at a time. The vote goes
through a group of its own, so it cannot be mistaken for a bucket.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import torch

from dataparallel.comm.link import ProcessLink
from dataparallel.graph.cut import Forward
from dataparallel.reducer.buckets import Bucket, Gradients, MaybeTensor
from dataparallel.reducer.options import Options
from dataparallel.reducer.processes import ReducerProcesses
from dataparallel.reducer.vote import Agreement


class Transfer:
    """The collectives of one round. See Note [Order of collectives]."""

    def __init__(
        self,
        processes: ReducerProcesses,
        buckets: Sequence[Bucket],
        options: Options,
        *,
        forwards: Sequence[Forward] = (),
        weight: float = 1.0,
    ) -> None:
        self.processes = processes
        self._buckets = buckets
        self._options = options
        self._weight = weight
        self._hook = processes.hook
        #: True if no rank may end the round without the vote; the same in all ranks.
        self.must_wait = processes.hook is not None or not buckets
        #: True if the host waits for the buckets; the same in all ranks.
        self.blocks = all(processes.buckets.blocks(bucket.home) for bucket in buckets)
        #: The number of the bucket that leaves when the whole backward has ended.
        self.last = max(len(buckets) - 1, 0)
        # A function for each bucket that was sent, which waits for it and returns the result.
        self._sent: list[Callable[[], torch.Tensor]] = []
        self._forwards = forwards
        #: Launched now, and waited for before the first bucket where weights count.
        self.agreement = Agreement(processes, forwards, weight)

    @functools.cached_property
    def _share(self) -> float:
        """The part of this process in the average; may have to wait."""
        if self._options.average == "none":
            return 1.0
        if self._options.average == "samples" and (total := self.agreement.total_weight()) > 0:
            return self._weight / total
        # With "samples", no process has any: their gradients are zeros, or the user's own affair.
        return 1.0 / self.processes.num_active

    # --- sent ------------------------------------------------------------------------------------

    def send(self, bucket: Bucket, sums: Gradients) -> None:
        """Launch the next bucket, with the sums over the replicas of this process."""
        # A communication hook divides by the number of processes.
        times = 1 if self._hook is None else self.processes.world_size
        self._sent.append(self._launch(bucket, bucket.load(sums, self._share * times)))

    def _launch(self, bucket: Bucket, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        link = self.processes.buckets
        if self._hook is not None:
            if self._hook.one_bucket_at_a_time and self._sent:
                # An error is told later: the others, where there may be none, wait for this bucket.
                with contextlib.suppress(Exception):
                    self._sent[-1]()
            is_last = bucket.number == self.last
            begun = self._hook.call(bucket, flat, link, is_last=is_last)
            self.processes.count_hook_call()
            return begun
        if self._options.deterministic and bucket.storage is not None:
            return functools.partial(_sum_in_order, link, flat, bucket.name)
        pending = link.all_reduce(flat, what=bucket.name)

        def wait() -> torch.Tensor:
            pending.wait()
            return flat

        return wait

    def again(self) -> Transfer:
        """Return the same for the next round of the others, which have dropped this one."""
        return Transfer(
            self.processes,
            self._buckets,
            self._options,
            forwards=self._forwards,
            weight=self._weight,
        )

    # --- received --------------------------------------------------------------------------------

    def receive(self) -> list[torch.Tensor]:
        """Return all buckets, reduced."""
        return [wait() for wait in self._sent]

    def reduce_late(self, index: int, own: MaybeTensor, original: torch.Tensor) -> torch.Tensor:
        """Reduce a gradient that came after its bucket was sent, in some process."""
        total = torch.zeros_like(original, requires_grad=False)
        if own is not None and self._share:
            total.add_(own, alpha=self._share)
        what = f"late gradients of parameter {index}"
        self.processes.buckets.all_reduce(total, what=what).wait()
        return total

    # --- or failed -------------------------------------------------------------------------------

    def abandon(self, error: BaseException) -> None:
        """End a round that has failed. See Note [Failures of a round]."""
        all_sent = len(self._sent) == len(self._buckets)
        try:
            if self._hook is not None and isinstance(error, Exception):
                self._send_zeros()
        finally:
            after = ", after its last bucket was sent" if all_sent else ""
            self.processes.report(error, f"backward{after}")

    def _send_zeros(self) -> None:
        """Send the rest of what the others wait for, and wait: the next round uses the memory."""
        for bucket in self._buckets[len(self._sent) :]:
            self._sent.append(self._launch(bucket, bucket.load([], 0.0)))
        for wait in self._sent:
            with contextlib.suppress(Exception):
                wait()


def _sum_in_order(link: ProcessLink, flat: torch.Tensor, what: str) -> torch.Tensor:
    first, *others = link.all_gather(flat, what=what)
    flat.copy_(first)
    for part in others:
        flat.add_(part)
    return flat
