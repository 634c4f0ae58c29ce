"""The replicas of one process as a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dataparallel.collectives.brought import Brought, Key, one_mode, ordered
from dataparallel.collectives.collective import Collective
from dataparallel.collectives.division import Division, is_worth_dividing
from dataparallel.collectives.joint import run_jointly
from dataparallel.collectives.members import LocalMembers
from dataparallel.collectives.refusals import check_input, refuse_in_backward, refuse_in_replica
from dataparallel.threads.apply import current_replica
from dataparallel.threads.meeting import DEFAULT_TIMEOUT, Rendezvous, current_rendezvous
from dataparallel.torch_internals import untraced


class LocalGroup:
    """The group of the replicas of this process; pass ``"local"`` for the default one.

    In the forward of a module that runs in replicas, its members are the replicas of that call.
    Anywhere else it has one member. All members call the same collectives in the same order.

    A collective waits for all replicas. So it returns the result as a plain tensor (on an
    accelerator: in the order of the current stream).

    Example::

        class Net(nn.Module):
            def forward(self, x):
                mean = collectives.all_reduce(x.mean(0), "avg", "local")
                return x - mean

    Args:
        timeout: Seconds that a replica waits for the others. Default: 300.

    Raises:
        ValueError: ``timeout`` is not positive.
    """

    def __init__(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        if timeout <= 0:
            raise ValueError(f"timeout is a positive number of seconds, but got {timeout}")
        self.timeout = timeout

    def __repr__(self) -> str:
        return f"{type(self).__name__}(timeout={self.timeout:g})"

    def size(self) -> int:
        """How many members the group has here."""
        replica = current_replica()
        return 1 if replica is None else replica.num_replicas

    def rank(self) -> int:
        """The number of this member, from 0."""
        replica = current_replica()
        return 0 if replica is None else replica.index

    def place(self) -> tuple[int, int]:
        """``rank()`` and ``size()``."""
        return self.rank(), self.size()

    @untraced
    def run(self, collective: Collective, tensor: Tensor) -> Tensor:
        """The result of this member; waits for the others.

        Args:
            collective: What to compute.
            tensor: What this member gives.

        Returns:
            A new tensor on the device of ``tensor``.

        Raises:
            TypeError: ``tensor`` is no tensor.
            ValueError: The collective does not take such tensors.
            RuntimeError: Replicas came to different collectives, or with different tensors.
            TimeoutError: A replica did not come; the message says which.
            RendezvousError: A replica failed, or returned without coming.
            RuntimeError: Called under activation checkpointing, in backward, or under a functorch
                transform or ``torch.jit.trace`` within a replica.
        """
        check_input(collective.name, tensor)
        rendezvous = current_rendezvous()
        if rendezvous is None or rendezvous.num_replicas == 1:
            if rendezvous is None:
                refuse_in_backward(collective.name)
            # Plain operations, which any transform can follow.
            collective = collective.checked(tensor, 1)
            return LocalMembers(1).result(collective.agree([collective]), [tensor], 0)
        refuse_in_replica(collective.name)
        # Where a fault is found by the replica that makes it, its error names this replica.
        collective = collective.checked(tensor, rendezvous.num_replicas)
        key = Key(collective, tensor)
        outcome = rendezvous.exchange(
            key,
            Brought.here(collective, tensor),
            self._results_or_share,
            timeout=self.timeout,
        )
        result = self._share(outcome, rendezvous, key) if isinstance(outcome, _Shared) else outcome
        return result if torch.is_grad_enabled() or not result.requires_grad else result.detach()

    @staticmethod
    def _results_or_share(brought: Sequence[Brought]) -> Sequence[Tensor | _Shared]:
        # Decided here, where all tensors are known, so that all members do the same.
        inputs = [each.tensor for each in brought]
        wanted = [each.collective for each in brought]
        collective = wanted[0].agree(wanted)
        if is_worth_dividing(inputs):
            with one_mode(brought):
                division = Division(collective, inputs)
            return [_Shared(division, brought)] * len(brought)
        with one_mode(brought), ordered(brought) as results:
            results += run_jointly(LocalMembers(len(brought)), collective, inputs)
        return results

    def _share(self, shared: _Shared, rendezvous: Rendezvous, key: Key) -> Tensor:
        """The result of this member, where the work is divided between the replicas."""
        division = shared.division
        with one_mode(shared.brought), torch.no_grad():
            begun = division.begin(LocalGroup.rank(self))

        def connect(results: Sequence[Tensor]) -> Sequence[Tensor]:
            inputs = [each.tensor for each in shared.brought]
            with one_mode(shared.brought):
                return run_jointly(division.members, division.collective, inputs, results)

        # After this nobody reads the inputs any more, and each replica may write to its own.
        result = rendezvous.exchange(("results", key), begun, connect, timeout=self.timeout)
        with torch.no_grad():
            division.complete(result.detach())
        return result


class _Shared(NamedTuple):
    division: Division
    brought: Sequence[Brought]
