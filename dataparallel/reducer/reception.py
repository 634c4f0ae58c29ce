"""The end of a round: what was late, what the other processes have, and who gets the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dataparallel.reducer.delivery import Delivery
from dataparallel.reducer.errors import OtherRanksFailed
from dataparallel.reducer.guard import Said
from dataparallel.reducer.local_sum import MaybeTensor
from dataparallel.reducer.replica_sums import ReplicaSums

if TYPE_CHECKING:
    from dataparallel.reducer.exchange import Exchange, Outcome
    from dataparallel.reducer.processes import ReducerProcesses


class Reception:
    """Delivers the results of one round.

    Args:
        delivery: Takes the results to the originals.
        replica_sums: What adds up the gradients of the replicas.
        sums: Per bucket, the sums of the replicas of this process; emptied.
        extra: What came after its bucket was taken, by the index of the parameter.
    """

    def __init__(
        self,
        delivery: Delivery,
        replica_sums: ReplicaSums,
        sums: list[list[MaybeTensor]],
        extra: dict[int, torch.Tensor],
    ) -> None:
        self._delivery = delivery
        self._replica_sums = replica_sums
        self._sums = sums
        #: What was late in some process.
        self.extra = extra

    def _say(self) -> Said:
        guard = self._replica_sums.guard
        return Said() if guard is None else guard.say()

    def keep(self) -> Said:
        """Deliver what this process has; returns what its guard says."""
        used = self._replica_sums.usage.used
        for number, sums in enumerate(self._sums):
            self._sums[number] = []
            self._delivery.keep(number, sums, used, self.extra)
        return self._say()

    def receive(self, exchange: Exchange, processes: ReducerProcesses) -> Outcome:
        """Wait for all buckets, and deliver them.

        Args:
            exchange: The exchange of the round.
            processes: The processes.

        Returns:
            What all processes say about the round.

        Raises:
            OtherRanksFailed: The backward of another process failed.
        """
        usage = self._replica_sums.usage
        flats, outcome = exchange.receive(
            unused=usage.num_unused,
            late=len(self.extra),
            said=self._say(),
            guard=self._replica_sums.guard,
        )
        if outcome.failed_ranks:
            reasons = exchange.failed.ask(outcome.failed_ranks) if exchange.failed else {}
            raise OtherRanksFailed(outcome.failed_ranks, reasons)
        used: Sequence[int] = [True] * len(usage.used)
        if outcome.num_unused:
            # What an unused one holds may be this process's own.
            sent = self._replica_sums.accumulated.sent()
            found = processes.used_anywhere([*usage.used, *sent])
            came, held = found[: len(sent)], found[len(sent) :]
            self._delivery.without_gradient = {i for i, use in enumerate(came) if not use}
            used = [use or hold for use, hold in zip(came, held, strict=True)]
        if outcome.num_late:
            originals = self._delivery.originals
            self.extra = processes.reduce_late(self.extra, originals, exchange.scale())
        for number, flat in enumerate(flats):
            own, self._sums[number] = self._sums[number], []
            self._delivery.receive(number, flat, own, used, self.extra)
        self._replica_sums.accumulated.after_synchronized()
        return outcome
