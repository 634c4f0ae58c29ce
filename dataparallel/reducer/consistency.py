"""Whether all replicas are the same, bit for bit: those of this process, and those of all."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeAlias

import torch
from torch.nn.parameter import is_lazy

from dataparallel.comm.processes import ProcessLink
from dataparallel.errors import lines, listed
from dataparallel.kernels.bits import bits_of
from dataparallel.kernels.fingerprint import fingerprint
from dataparallel.reducer.agreement import gather_if_different
from dataparallel.torch_internals import is_wrapper

_log = logging.getLogger("dataparallel")

_Tensors: TypeAlias = Mapping[str, torch.Tensor]

#: What messages call the comparison across processes.
_WHAT = "check_replicas()"

_MISSING = "no tensor of this name"


@dataclass(frozen=True)
class Mismatch:
    """A tensor of one replica that is not what it should be.

    Attributes:
        name: Name of the tensor.
        rank: Rank of the process.
        replica: Index of the replica in that process. Replica 0 of another process is compared with
            replica 0 of rank 0, every other replica with replica 0 of its own process.
        found: The fingerprint of the tensor, or its dtype and shape if these differ already.
        expected: The same of what it was compared with.
        difference: Largest absolute difference of the values; None across processes, and where
            dtypes or shapes differ. It is 0.0 where only bits differ: the signs of zeros, or kinds
            of NaN.
        num_elements: How many elements differ; None where ``difference`` is.
    """

    name: str
    rank: int
    replica: int
    found: str
    expected: str
    difference: float | None = None
    num_elements: int | None = None


class ReplicaMismatch(RuntimeError):
    """Replicas are not the same where they have to be.

    Attributes:
        mismatches: What differs where, by tensor, then by rank and replica.
    """

    def __init__(self, message: str, mismatches: Sequence[Mismatch] = ()) -> None:
        super().__init__(message)
        self.mismatches = tuple(mismatches)


def check_replicas(
    tensors: _Tensors, replicas: Sequence[_Tensors] = (), link: ProcessLink | None = None
) -> None:
    """Compare parameters and buffers over replicas and processes, bit for bit.

    Nothing but fingerprints leaves a device or a process as long as all are the same. Every process
    calls this, and either all raise the same error or none does. Tensors in the memory of replica 0
    are not read twice. Sparse and quantized tensors and those without values (of the meta device,
    or not initialized yet) are compared by dtype and shape alone, and a log line names them.

    Example::

        check_replicas(dict(net.named_parameters()), [dict(replicas[1].named_parameters())])

    Args:
        tensors: Parameters and buffers of replica 0, by name.
        replicas: Those of the replicas 1, 2 and so on. Default: there are none.
        link: The processes to compare with. Default: this one alone.

    Raises:
        ReplicaMismatch: Something differs. The message names the first tensors that do, with
            replica, rank and both fingerprints, and the largest difference where both are in one
            process; ``mismatches`` has all of them.
    """
    several = link is not None and link.world_size > 1
    first = _contents(tensors)
    skipped = [
        f"{name!r} ({content.look})" for name, content in first.items() if content.tensor is None
    ]
    if skipped:
        _log.warning("replicas are compared by dtype and shape alone in %s", listed(skipped))
    others = [_contents(replica) for replica in replicas]
    _read(first, others, all_of_first=several)
    found = _compare_locally(link.rank if link is not None else 0, first, others)
    if link is not None and several:
        found = _compare_processes(first, found, link)
    if found:
        count = len({mismatch.name for mismatch in found})
        raise ReplicaMismatch(
            f"the replicas are not the same; {count} of {len(first)} tensors differ:"
            f"{lines(_line(mismatch, several) for mismatch in found)}",
            found,
        )


def _line(mismatch: Mismatch, several: bool) -> str:
    """A mismatch as a line of a message."""
    rank = mismatch.rank
    here, there = f" of rank {rank}", f" of rank {rank if mismatch.replica else 0}"
    line = (
        f"{mismatch.name!r}: replica {mismatch.replica}{here if several else ''} has "
        f"{mismatch.found}, replica 0{there if several else ''} has {mismatch.expected}"
    )
    if mismatch.difference is None:
        return line
    return (
        f"{line}; the largest difference is {mismatch.difference:.3g}, "
        f"elements that differ: {mismatch.num_elements}"
    )


# --- one process -----------------------------------------------------------------------------


@dataclass
class _Content:
    """What is known of a tensor.

    Attributes:
        look: What it is apart from its values.
        fingerprint: Set where it was needed.
        tensor: The tensor itself if it is in this process, and has values to be compared.
    """

    look: str
    fingerprint: int | None = None
    tensor: torch.Tensor | None = field(default=None, compare=False)

    def is_shared_with(self, other: _Content | None) -> bool:
        """Whether both are the same elements of the same memory, so that they cannot differ."""
        if self.tensor is None or other is None or other.tensor is None:
            return False
        return _memory(self.tensor) == _memory(other.tensor)


_Contents: TypeAlias = Mapping[str, _Content]


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    lazy = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride(), lazy


def _content(tensor: torch.Tensor) -> _Content:
    if is_lazy(tensor):
        return _Content("an uninitialized tensor")
    special = ""
    if tensor.is_meta:
        special = "meta "
    elif tensor.is_quantized:
        special = "quantized "
    elif tensor.layout != torch.strided:
        special = f"{str(tensor.layout).removeprefix('torch.')} "
    dtype = str(tensor.dtype).removeprefix("torch.")
    look = f"{special}{dtype} of shape {tuple(tensor.shape)}"
    return _Content(look, tensor=None if special else tensor.detach())


def _contents(tensors: _Tensors) -> dict[str, _Content]:
    return {
        name: _content(part)
        for whole, tensor in tensors.items()
        for name, part in _parts(whole, tensor)
    }


def _parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor itself, or those that it is made of if it is of a class that wraps others."""
    if not is_wrapper(tensor):
        yield name, tensor
        return
    attributes, _ = tensor.__tensor_flatten__()
    for attribute in attributes:
        yield from _parts(f"{name}.{attribute}", getattr(tensor, attribute))


def _read(first: _Contents, others: Sequence[_Contents], *, all_of_first: bool) -> None:
    """Take the fingerprints that are needed: all devices first, and then wait for them."""
    apart = [
        (name, content)
        for other in others
        for name, content in other.items()
        if not content.is_shared_with(first.get(name))
    ]
    names = {name for name, _ in apart}
    wanted = [content for name, content in first.items() if all_of_first or name in names]
    needed: dict[torch.device, list[tuple[_Content, torch.Tensor]]] = {}
    for content in (*wanted, *(content for _, content in apart)):
        if content.tensor is not None:
            needed.setdefault(content.tensor.device, []).append((content, content.tensor))
    computed = [fingerprint([tensor for _, tensor in pairs]) for pairs in needed.values()]
    for pairs, numbers in zip(needed.values(), computed, strict=True):
        for (content, _), number in zip(pairs, numbers.tolist(), strict=True):
            content.fingerprint = number


def _compare_locally(rank: int, first: _Contents, others: Sequence[_Contents]) -> list[Mismatch]:
    found: list[Mismatch] = []
    for name in dict.fromkeys([*first, *(name for other in others for name in other)]):
        expected = first.get(name)
        for replica, other in enumerate(others, start=1):
            content = other.get(name)
            sides = None
            if content is None or not content.is_shared_with(expected):
                sides = _differing(content, expected)
            if sides is not None:
                found.append(Mismatch(name, rank, replica, *sides, *_difference(content, expected)))
    return found


def _differing(found: _Content | None, expected: _Content | None) -> tuple[str, str] | None:
    """Both sides as a message shows them, or None where they are the same."""
    if found == expected:
        return None
    if found is None or expected is None or found.look != expected.look:
        shown = [_MISSING if side is None else side.look for side in (found, expected)]
    else:
        shown = [
            f"fingerprint {(side.fingerprint or 0) % 2**64:016x}" for side in (found, expected)
        ]
    return shown[0], shown[1]


def _difference(
    found: _Content | None, expected: _Content | None
) -> tuple[float | None, int | None]:
    """The largest absolute difference, and how many elements differ, where looks do not."""
    if found is None or expected is None or found.look != expected.look:
        return None, None
    assert found.tensor is not None and expected.tensor is not None
    ours, theirs = found.tensor.cpu(), expected.tensor.cpu()
    changed = bits_of(ours) != bits_of(theirs)
    if ours.is_complex():
        changed = changed.any(-1)
    wide = torch.complex128 if ours.is_complex() else torch.float64
    a, b = ours[changed].to(wide), theirs[changed].to(wide)
    # Of values that are equal or no numbers, only zeros and NaN can differ in bits.
    gaps = (a - b).abs().masked_fill(a.isnan() & b.isnan(), 0)
    return gaps.max().item(), int(changed.sum())


# --- all processes ---------------------------------------------------------------------------


def _compare_processes(
    first: _Contents, found: Sequence[Mismatch], link: ProcessLink
) -> list[Mismatch]:
    """What was found in any process, and what differs between their replicas 0; in all alike."""
    table = {name: (content.look, content.fingerprint) for name, content in first.items()}
    # A process that found something has a rank, and so is like no other one: all learn of it.
    finder = link.rank if found else None
    details = [asdict(mismatch) for mismatch in found]
    gathered = gather_if_different([table, finder], link, details=details, what=_WHAT)
    if gathered is None:
        return []
    everywhere = [Mismatch(**fields) for _, details in gathered for fields in details]
    tables = [
        {name: _Content(look, number) for name, (look, number) in table.items()}
        for (table, _), _ in gathered
    ]
    names = list(dict.fromkeys(name for each in tables for name in each))
    for name in names:
        for rank, each in enumerate(tables):
            sides = _differing(each.get(name), tables[0].get(name))
            if sides is not None:
                everywhere.append(Mismatch(name, rank, 0, *sides))
    order = {name: position for position, name in enumerate(names)}
    last = len(names)
    return sorted(everywhere, key=lambda m: (order.get(m.name, last), m.name, m.rank, m.replica))
