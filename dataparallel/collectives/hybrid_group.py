"""All replicas of all processes as a group."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dataparallel import torch_internals
from dataparallel.collectives.brought import Brought, Key, one_mode, ordered
from dataparallel.collectives.collective import AllToAll, Collective
from dataparallel.collectives.hybrid_joint import complete, wants_gradients
from dataparallel.collectives.hybrid_link import HybridLink, name_members
from dataparallel.collectives.hybrid_members import HybridMembers
from dataparallel.collectives.local_group import LocalGroup
from dataparallel.collectives.refusals import check_input, refuse_in_backward, refuse_in_replica
from dataparallel.threads.meeting import DEFAULT_TIMEOUT, Rendezvous, current_rendezvous
from dataparallel.torch_internals import untraced

R = TypeVar("R")
V = TypeVar("V")


class HybridGroup(LocalGroup):
    """The group of all replicas of all processes; pass ``"hybrid"`` for the default one.

    Members count from the replicas of the first process to those of the last. Processes may have
    different numbers of replicas, at each call. Outside of a replica, a process is one member.
    Without ``torch.distributed``, or with one process, it is a :class:`LocalGroup`.

    Every replica of every process calls the same collectives in the same order, in backward too.
    If they differ, all processes raise an error, see Note [Agreement before each collective].
    Threads that call collectives at the same time use a group each. All processes use their groups
    for the first time in the same order.

    Example::

        class Net(nn.Module):
            def forward(self, x):
                mean = collectives.all_reduce(x.mean(0), "avg", "hybrid")
                return x - mean

    Args:
        process_group: The processes that take part. Default: all.
        timeout: Seconds that a process waits for the other processes, and a replica for the other
            replicas. Default: the time limit of the process group; 300 without one.

    Raises:
        ValueError: ``timeout`` is not positive.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, timeout: float | None = None
    ) -> None:
        super().__init__(DEFAULT_TIMEOUT if timeout is None else timeout)
        self._process_group = process_group
        self._link = HybridLink(process_group, timeout)
        self._turns: weakref.WeakKeyDictionary[Rendezvous, Tensor] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> HybridGroup:
        # As a process group: modules that are copied go on over the same one.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self._process_group is not None:
            raise TypeError(
                "a HybridGroup over a process group of its own cannot be pickled, since that one "
                "cannot; make it in the process that loads, or use 'hybrid'"
            )
        return HybridGroup, (None, self._link.timeout)

    def close(self) -> None:
        """Release the process group, in all processes; the next collective makes a new one."""
        self._link.close()

    def has_other_processes(self) -> bool:
        """Whether there are other processes; asks nobody."""
        return not self._link.is_alone()

    @untraced
    def size(self) -> int:
        """How many members the group has. All members call it, because it is a collective."""
        return self.place()[1]

    @untraced
    def rank(self) -> int:
        """The number of this member, from 0. All members call it, because it is a collective."""
        return self.place()[0]

    @untraced
    def run(self, collective: Collective, tensor: Tensor) -> Tensor:
        """The result of this member; waits for the others, of all processes.

        Args:
            collective: What to compute.
            tensor: What this member gives.

        Returns:
            A new tensor on the device of ``tensor``.

        Raises:
            ValueError: The collective does not take such tensors.
            RuntimeError: Members came to different collectives, or with different tensors.
            TimeoutError: A replica of this process did not come.
            RendezvousError: A replica of this process failed, or returned without coming.
            CollectiveTimeout: Another process did not come in time; the message says which.
            CollectiveError: Another process failed.
            TypeError: ``tensor`` is no tensor.
            RuntimeError: Called in backward, under a transform or a trace, or in one of several
                replicas under activation checkpointing.
        """
        if self._link.is_alone():
            return super().run(collective, tensor)
        with self._link.in_step():
            check_input(collective.name, tensor)
        brought = Brought.here(collective, tensor)
        result = self._meet(collective.name, Key(collective, tensor), brought, self._everywhere)
        return result if torch.is_grad_enabled() or not result.requires_grad else result.detach()

    def _everywhere(self, brought: Sequence[Brought]) -> Sequence[Tensor]:
        """The results of all replicas of this process; one of them calls this for all."""
        link = self._link
        inputs = [each.tensor for each in brought]
        text = brought[0].collective.signature(inputs[0])
        rendezvous = current_rendezvous() if len(brought) > 1 else None
        with link.lock, one_mode(brought), ordered(brought) as results:
            turn = None if rendezvous is None else self._turns.get(rendezvous)
            agreement = link.agree(len(brought), text, wants=wants_gradients(inputs))
            members = HybridMembers(link.current(), agreement.counts)
            collective = _checked(link, members, brought)
            found, turn = complete(link, agreement, members, collective, inputs, turn)
            results += found
            if rendezvous is not None and turn is not None:
                self._turns[rendezvous] = turn
        return results

    @untraced
    def place(self) -> tuple[int, int]:
        """``rank()`` and ``size()``, with one collective for both."""
        if self._link.is_alone():
            return super().rank(), super().size()
        text = "the number of members"

        def places(nothing: Sequence[None]) -> list[tuple[int, int]]:
            with self._link.lock:
                counts = self._link.agree(len(nothing), text, wants=False).counts
                members = HybridMembers(self._link.current(), counts)
            return [(member, members.size) for member in members.indices]

        return self._meet(text, text, None, places)

    def _meet(
        self, name: str, key: Hashable, value: V, combine: Callable[[Sequence[V]], Sequence[R]]
    ) -> R:
        """Bring a value to the replicas of this process, one of which goes on for all."""
        rendezvous = current_rendezvous()
        if rendezvous is None or rendezvous.num_replicas == 1:
            with self._link.in_step():
                _refuse_transforms(name)
                if rendezvous is None:
                    refuse_in_backward(name)
            return combine([value])[0]
        ticket = _Ticket(value)

        def lead(tickets: list[_Ticket[V]]) -> Sequence[R]:
            return combine([each.use() for each in tickets])

        seconds = self._link.time_limit() or self.timeout
        try:
            refuse_in_replica(name)
            return rendezvous.exchange(key, ticket, lead, timeout=seconds)
        except BaseException:
            if not ticket.used:
                # Nobody goes on, so the other processes would wait in vain.
                self._link.close()
            raise


@dataclass
class _Ticket(Generic[V]):
    value: V
    used: bool = False

    def use(self) -> V:
        self.used = True
        return self.value


def _refuse_transforms(name: str) -> None:
    if torch_internals.transforms_active() or torch_internals.tracing_state() is not None:
        raise RuntimeError(
            f"{name} over replicas of several processes was called under a torch.func transform or "
            "torch.jit.trace, which cannot follow tensors of other processes; call it outside of "
            "the transformed function"
        )


def _checked(link: HybridLink, members: HybridMembers, brought: Sequence[Brought]) -> Collective:
    """What all want together. Raises, if it does, in all processes."""
    collective, tensor = brought[0].collective, brought[0].tensor
    if isinstance(collective, AllToAll):
        return _agree_on_splits(link, members, brought)
    # All that is looked at here, the processes have agreed on.
    return collective.checked(tensor, members.size)


def _agree_on_splits(
    link: HybridLink, members: HybridMembers, brought: Sequence[Brought]
) -> AllToAll:
    """The split sizes of all members, which each process knows in part."""
    size = members.size
    # Per replica: what it gets from each member, what it gives to each, and whether it is right.
    shape = (max(members.counts), 2 * size + 1)
    table = torch.zeros(shape, dtype=torch.int64, device="cpu")
    faults = {}
    for row, member, each in zip(table, members.indices, brought, strict=False):
        try:
            checked = each.collective.checked(each.tensor, size)
        except ValueError as error:
            faults[member] = f"member {member}: {error}"
        else:
            assert isinstance(checked, AllToAll)
            splits = [*checked.output_splits[0], *checked.input_splits[0]]
            row.copy_(torch.tensor([*splits, 1], device="cpu"))
    what = "the split sizes of all_to_all_single"
    with link.in_step():
        tables = members.link.all_gather(table, what=what)
        parts = zip(tables, members.counts, strict=True)
        rows = [row for part, count in parts for row in part[:count].tolist()]
        wrong = not all(row[-1] for row in rows)
        texts = members.link.all_gather_json(list(faults.values()), what=what) if wrong else []
    names = name_members(members.counts, dist.get_process_group_ranks(members.link.group))
    legend = f"the members are {', '.join(names)}"
    if wrong:
        raise ValueError("; ".join([*itertools.chain.from_iterable(texts), legend]))
    gets = tuple(tuple(row[:size]) for row in rows)
    gives = tuple(tuple(row[size:-1]) for row in rows)
    together = AllToAll(gets, gives)
    try:
        together.check_pairs()
    except ValueError as error:
        raise ValueError(f"{error}; {legend}") from error
    return together
