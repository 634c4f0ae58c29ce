"""Who writes what when several processes save one generation.

Note [What is saved once, and what by each process]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Processes that train together have the same parameters and the same state of the optimizer, and each
has random numbers of its own. Which is which is found out, not assumed: processes compare digests
of each part of their state. A part that is equal in all is saved once, its tensors spread evenly
over the files of the processes. Of any other part each process saves what it has itself; tensors in
it that are equal in all are saved once even so. So buffers that differ, and parameters that are
left to each process, come back as they were, and nothing is mixed from several processes.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dataparallel.extras.checkpoint.parts import RNG
from dataparallel.extras.checkpoint.peers import Peers
from dataparallel.extras.checkpoint.strict_json import encode
from dataparallel.extras.checkpoint.values import JSON, references
from dataparallel.optim.sharded import plan_shards

# Tensors of a part that differs are compared one by one from this size on, in bytes.
_COMPARED = 2**16


class Layout(NamedTuple):
    """What one process writes.

    Attributes:
        kinds: Per part ``"shared"``, if it is the same in all processes, or ``"own"``.
        trees: The parts that this process writes.
        tensors: The tensors that this process writes.
    """

    kinds: dict[str, str]
    trees: dict[str, JSON]
    tensors: dict[str, Tensor]


def digests(trees: Mapping[str, JSON], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What tells the parts of this process from those of others, to be exchanged.

    Args:
        trees: The parts.
        tensors: Their tensors, on the CPU.

    Returns:
        ``{"parts": one text per part, "tensors": one text per tensor}``. Random numbers are no
        part: they are each process's own in any case.
    """
    hashes = {name: _hash(tensor) for name, tensor in tensors.items()}
    parts = {}
    for part, tree in trees.items():
        if part == RNG:
            continue
        digest = hashlib.sha256(encode(tree))
        for name in sorted(references(tree)):
            digest.update(f"{name}\0{hashes[name]}\0".encode())
        parts[part] = digest.hexdigest()
    return {"parts": parts, "tensors": hashes}


def plan(
    trees: Mapping[str, JSON],
    tensors: Mapping[str, Tensor],
    peers: Peers,
    own: Mapping[str, Any] | None,
    others: Sequence[Mapping[str, str]],
) -> Layout:
    """Decide what this process writes; a collective call.

    Args:
        trees: The parts of this process.
        tensors: Their tensors.
        peers: The processes.
        own: What :func:`digests` returned here; None if there is one process.
        others: Its ``"parts"`` from all processes, by rank.
    """
    if own is None:
        return Layout(dict.fromkeys(trees, "shared"), dict(trees), dict(tensors))
    same = {
        part
        for part, digest in own["parts"].items()
        if all(each.get(part) == digest for each in others)
    }
    shared = set().union(*(references(trees[part]) for part in same))
    compared = {
        name: own["tensors"][name]
        for name, tensor in tensors.items()
        if name not in shared and tensor.nbytes >= _COMPARED
    }
    # Whether this is necessary is known to all: it depends on what all have.
    if any(each != others[0] for each in others):
        lists = peers.share("the comparison of tensors", lambda: compared)
        shared |= {
            name
            for name, digest in compared.items()
            if all(each.get(name) == digest for each in lists)
        }
    names = sorted(shared)
    writers = plan_shards([tensors[name].nbytes for name in names], peers.world_size)
    mine = {name for name, writer in zip(names, writers, strict=True) if writer == peers.rank}
    return Layout(
        {part: "shared" if part in same else "own" for part in trees},
        {part: tree for part, tree in trees.items() if part not in same or peers.rank == 0},
        {name: t for name, t in tensors.items() if name in mine or name not in shared},
    )


def _hash(tensor: Tensor) -> str:
    """A digest of type, shape and bits. It is read without the interpreter's lock."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.numel():
        data = tensor.detach().reshape(-1).view(torch.uint8)
        # Its memory, without a copy and without NumPy.
        digest.update((ctypes.c_char * data.numel()).from_address(data.data_ptr()))
    return digest.hexdigest()
