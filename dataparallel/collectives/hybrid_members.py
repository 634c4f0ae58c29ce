"""How pieces come from member to member where members are replicas of several processes.

Note [Pieces between processes]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
What has to go from the replicas of one process to those of another goes as one message. Reductions
are begun before: a process reduces what its own replicas have for a member, in replica order, and
the member reduces what comes from the processes, in rank order. So no result depends on timing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dataparallel.collectives.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Reduce,
    ReduceScatter,
)
from dataparallel.collectives.members import bring, spread
from dataparallel.collectives.reductions import mean_of, reduce_terms
from dataparallel.collectives.wires import Wire, plan_reduction
from dataparallel.comm.link import ProcessLink


class HybridMembers:
    """The replicas of all processes that came to one collective.

    Args:
        link: Between the processes.
        counts: How many replicas each process has, by rank.

    Attributes:
        link: As given.
        counts: As given.
        size: How many members there are in all.
        indices: Those of this process.
    """

    def __init__(self, link: ProcessLink, counts: Sequence[int]) -> None:
        self.link = link
        self.counts = tuple(counts)
        ends = list(itertools.accumulate(counts))
        self._of_rank = [range(end - n, end) for end, n in zip(ends, counts, strict=True)]
        self.size = ends[-1]
        self.indices = self._of_rank[link.rank]

    def compute(self, collective: Collective, inputs: Sequence[Tensor]) -> list[Tensor]:
        """See :class:`~dataparallel.collectives.members.Members`."""
        match collective:
            case AllReduce(op):
                return self._all_reduce(op, inputs)
            case Broadcast(root):
                return self._broadcast(root, inputs)
            case AllGather():
                return self._all_gather(collective, inputs)
            case Reduce(op, _) | ReduceScatter(op, _):
                return self._reduced(collective, op, inputs)
        return self._moved(collective, inputs)

    def _all_reduce(self, op: str, inputs: Sequence[Tensor]) -> list[Tensor]:
        total = _reduce(_begun(op), inputs, inputs[0].device)
        what = f"a reduction over {self.size} members"
        reduce_over(self.link, total, _begun(op), what)
        if op == "avg":
            mean_of(total, self.size)
        return spread(total, [x.device for x in inputs])

    def _broadcast(self, root: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        source = next(rank for rank, members in enumerate(self._of_rank) if root in members)
        if root in self.indices:
            value = _plain(inputs[root - self.indices.start].clone())
        else:
            value = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
        what = f"one of {self.size} members"
        self.link.broadcast(_bytes(value), source, what=what).wait()
        return spread(value, [x.device for x in inputs])

    def _all_gather(self, collective: Collective, inputs: Sequence[Tensor]) -> list[Tensor]:
        device = inputs[0].device
        # Equal sizes everywhere, as the backends want them.
        stacked = inputs[0].new_empty((max(self.counts), *inputs[0].shape))
        for row, x in zip(stacked, inputs, strict=False):
            row.copy_(bring(x, device))
        parts = _gather(self.link, stacked, f"{self.size} members")
        pieces = [
            row for part, n in zip(parts, self.counts, strict=True) for row in part[:n].unbind()
        ]
        return spread(
            collective.combine(pieces, self.indices[0], inputs[0]), [x.device for x in inputs]
        )

    def _reduced(
        self, collective: Reduce | ReduceScatter, op: str, inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        begun = _begun(op)

        def reduced_for(target: int) -> list[Tensor]:
            terms = [
                piece
                for x, source in zip(inputs, self.indices, strict=True)
                if (piece := collective.piece(x, source, target, self.size)) is not None
            ]
            return [_reduce(begun, terms, inputs[0].device)] if terms else []

        messages = [
            [part for target in members for part in reduced_for(target)]
            for members in self._of_rank
        ]
        shapes = [[part.shape for part in messages[self.link.rank]]] * len(messages)
        arrived = [iter(parts) for parts in self._exchange(collective, messages, shapes, inputs[0])]
        results = []
        for member, own in zip(self.indices, inputs, strict=True):
            if collective.piece(own, member, member, self.size) is None:
                results.append(torch.zeros_like(own, memory_format=torch.contiguous_format))
                continue
            total = reduce_terms(begun, [next(parts) for parts in arrived])
            results.append(bring(mean_of(total, self.size) if op == "avg" else total, own.device))
        return results

    def _moved(self, collective: Collective, inputs: Sequence[Tensor]) -> list[Tensor]:
        device = inputs[0].device
        messages = [
            [
                bring(piece, device)
                for (source, x), target in itertools.product(
                    zip(self.indices, inputs, strict=True), members
                )
                if (piece := collective.piece(x, source, target, self.size)) is not None
            ]
            for members in self._of_rank
        ]
        # What others send follows from the collective, and from the shapes here.
        routes = [
            [
                (target, piece.shape)
                for source, target in itertools.product(members, self.indices)
                if (piece := self._piece_of(collective, source, target, inputs[0])) is not None
            ]
            for members in self._of_rank
        ]
        shapes = [[shape for _, shape in expected] for expected in routes]
        pieces: dict[int, list[Tensor]] = {member: [] for member in self.indices}
        arrived = self._exchange(collective, messages, shapes, inputs[0])
        for expected, parts in zip(routes, arrived, strict=True):
            for (target, _), part in zip(expected, parts, strict=True):
                pieces[target].append(part)
        return [
            collective.combine([bring(p, own.device) for p in pieces[member]], member, own)
            for member, own in zip(self.indices, inputs, strict=True)
        ]

    def _piece_of(
        self, collective: Collective, source: int, target: int, own: Tensor
    ) -> Tensor | None:
        """What stands for a piece of another member's tensor: of the right shape."""
        shape = list(own.shape)
        if isinstance(collective, AllToAll):
            shape[0] = sum(collective.input_splits[source - collective.first])
        stand_in = own.new_empty(()).expand(shape)
        return collective.piece(stand_in, source, target, self.size)

    def _exchange(
        self,
        collective: Collective,
        messages: Sequence[Sequence[Tensor]],
        shapes: Sequence[Sequence[torch.Size]],
        like: Tensor,
    ) -> list[Sequence[Tensor]]:
        """Bring pieces to each process, and get those of each process for this one.

        Args:
            collective: For messages.
            messages: Per process, pieces on the device of ``like``.
            shapes: Per process, the shapes of what it sends.
            like: Has the dtype of all pieces, and is where they are wanted.
        """
        here = self.link.rank
        lengths = [[shape.numel() for shape in expected] for expected in shapes]
        lengths[here] = []
        away = [[] if rank == here else parts for rank, parts in enumerate(messages)]
        gives = [sum(part.numel() for part in parts) for parts in away]
        gets = [sum(each) for each in lengths]
        # Through the host where the backend does not take the device.
        place = like.device if like.device.type in self.link.backends else torch.device("cpu")
        sent = torch.empty(sum(gives), dtype=like.dtype, device=place)
        leaving = [part for parts in away for part in parts]
        ranges = torch.split(sent, [part.numel() for part in leaving])
        for target, part in zip(ranges, leaving, strict=True):
            target.view(part.shape).copy_(part)
        arrived = torch.empty(sum(gets), dtype=like.dtype, device=place)
        self._send(f"{collective.name} over {self.size} members", sent, arrived, gives, gets)
        found: list[Sequence[Tensor]] = []
        by_rank = torch.split(arrived.to(like.device), gets)
        for part, each, expected in zip(by_rank, lengths, shapes, strict=True):
            flat = torch.split(part, each) if each else ()
            found.append([one.view(shape) for one, shape in zip(flat, expected, strict=False)])
        found[here] = messages[here]
        return found

    def _send(
        self, what: str, sent: Tensor, arrived: Tensor, gives: Sequence[int], gets: Sequence[int]
    ) -> None:
        """Send each process as many elements as it expects; as bytes, which all backends take."""
        width = sent.element_size()
        gives, gets = [n * width for n in gives], [n * width for n in gets]
        packed, into = sent.view(torch.uint8), arrived.view(torch.uint8)
        self.link.run(
            "all_to_all",
            packed,
            lambda group: dist.all_to_all_single(into, packed, gets, gives, group, async_op=True),
            what=what,
        )


def reduce_over(link: ProcessLink, tensor: Tensor, op: str, what: str) -> None:
    """Replace a tensor, in every process of a link, by the reduction over all of them."""
    backend = link.backends.get(tensor.device.type) or link.backends.get("cpu")
    plan = plan_reduction(op, tensor, backend)
    if plan.gathered:
        tensor.copy_(reduce_terms(plan.op, _gather(link, tensor, what)))
    elif plan.wire == Wire(tensor.dtype) and not tensor.is_conj():
        link.all_reduce(tensor, op=plan.op, what=what).wait()
    else:
        sent = torch.empty(tensor.numel(), dtype=plan.wire.dtype, device=tensor.device)
        plan.wire.load(sent, tensor)
        link.all_reduce(sent, op=plan.op, what=what).wait()
        tensor.copy_(plan.wire.restore(sent, tensor))


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as what all backends take."""
    return tensor.view(-1).view(torch.uint8)


def _gather(link: ProcessLink, tensor: Tensor, what: str) -> list[Tensor]:
    """The tensors of all processes, by rank."""
    parts = link.all_gather(_bytes(_plain(tensor)), what=what)
    return [part.view(tensor.dtype).view(tensor.shape) for part in parts]


def _begun(op: str) -> str:
    """What a process computes of a reduction before others have their part in it."""
    return "sum" if op == "avg" else op


def _reduce(op: str, terms: Sequence[Tensor], device: torch.device) -> Tensor:
    """Terms of one process combined in their order, in new memory on a device."""
    return _plain(reduce_terms(op, [bring(term, device) for term in terms]))


def _plain(x: Tensor) -> Tensor:
    return x.resolve_conj().resolve_neg().contiguous()
