"""What the tests of collectives over replicas have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dataparallel.collectives.local_group import LocalGroup
from dataparallel.collectives.operations import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
)
from dataparallel.threads.apply import apply_replicas, current_replica

#: A replica that waits this long fails the test.
GROUP = LocalGroup(30)

PLACES = {
    "cpu": ["cpu"] * 4,
    "distinct": [f"virtual:{i}" for i in range(4)],
    "repeated": ["virtual:1"] * 4,
    "mixed": ["virtual:0", "cpu", "virtual:1", "virtual:0"],
}


def index() -> int:
    """The replica in which a call runs."""
    replica = current_replica()
    assert replica is not None
    return replica.index


def each(slots: Sequence[str], call: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
    """The results of ``call``, in replica i with entry i of each column."""
    devices = [torch.device(slot) for slot in slots]
    calls = [lambda i=i: call(*[column[i] for column in columns]) for i in range(len(slots))]
    return apply_replicas(calls, devices)


def run(
    collective: Collective | Sequence[Collective], inputs: Sequence[Tensor], slots: Sequence[str]
) -> list[Tensor]:
    """The results of one collective, in replicas on the slots of their inputs."""
    wanted = list(collective) if isinstance(collective, Sequence) else [collective] * len(inputs)
    return each(slots, GROUP.run, wanted, inputs)


def exchanged(rows: Sequence[Sequence[int]]) -> list[AllToAll]:
    """Per member its all_to_all, where member i gives ``rows[i][j]`` rows to member j."""
    columns = list(zip(*rows, strict=True))
    return [
        AllToAll((tuple(gets),), (tuple(gives),)) for gets, gives in zip(columns, rows, strict=True)
    ]


_TERMS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "product": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
    "min": lambda stacked: stacked.amin(0),
    "max": lambda stacked: stacked.amax(0),
}


def expected(collective: Collective, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The same results by plain tensor math."""
    n = len(inputs)
    if isinstance(collective, AllGather):
        return [torch.cat(list(inputs), collective.dim)] * n
    if isinstance(collective, Gather):
        empty = inputs[0].narrow(collective.dim, 0, 0)
        full = torch.cat(list(inputs), collective.dim)
        return [full if i == collective.root else empty for i in range(n)]
    if isinstance(collective, Broadcast):
        return [inputs[collective.root]] * n
    if isinstance(collective, Scatter):
        return list(inputs[collective.root].tensor_split(n, collective.dim))
    if isinstance(collective, ReduceScatter):
        return list(_reduced(collective.op, inputs).tensor_split(n, collective.dim))
    if isinstance(collective, Reduce):
        total = _reduced(collective.op, inputs)
        return [total if i == collective.root else torch.zeros_like(total) for i in range(n)]
    assert isinstance(collective, AllReduce)
    return [_reduced(collective.op, inputs)] * n


def _reduced(op: str, inputs: Sequence[Tensor]) -> Tensor:
    if op in _TERMS:
        return _TERMS[op](torch.stack(list(inputs)))
    total = inputs[0].clone()
    for x in inputs[1:]:
        if op == "avg":
            total = total + x
        elif op == "band":
            total = total & x
        else:
            total = total | x if op == "bor" else total ^ x
    if op != "avg":
        return total
    inexact = total.is_floating_point() or total.is_complex()
    return total / len(inputs) if inexact else total.div(len(inputs), rounding_mode="trunc")
