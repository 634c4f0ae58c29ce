"""The handling of gradients that are not finite: who decides, who is named, what happens.

A plain sum or average over all processes has the NaN and infinity of any of them, as does a sum
that overflows. So the results of a round decide, which are the same in every process. A
communication hook may swallow a NaN, or give each process a result of its own, and what stays in
one process is in no sum. Then each process says in the vote of the round whether something is not
finite in what it has sent or received. Either way the host waits once for the devices, at the end
of the round. The round that reduces the gradients of ``no_sync()`` decides about them.

The gradients of each replica are looked at before sums in place destroy the evidence. The look is
one norm for each, which the host reads on an accelerator only after it has found something.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dataparallel import torch_internals
from dataparallel.devices import is_accelerator
from dataparallel.errors import listed
from dataparallel.graph.originals import IN_GRAD, GradientHome
from dataparallel.reducer.buckets import Bucket, MaybeTensor
from dataparallel.reducer.options import NonFiniteAction
from dataparallel.reducer.processes import ReducerProcesses

_log = logging.getLogger("dataparallel")

# The place of non-finite gradients that no replica had.
_SUM = "a sum of finite ones (too large for its dtype, or returned by a hook, or from elsewhere)"


class NonFiniteGradients(FloatingPointError):
    """An error for NaN or infinite gradients, which all processes raise with the same text."""


@dataclass
class SkippedSteps:
    """A count of the backwards that a wrapper has skipped; outlives its reducers."""

    count: int = 0

    def add(self) -> int:
        """Count one more; returns how many there are then."""
        self.count += 1
        return self.count


class Guard:
    """A search for gradients that are not finite in the rounds of one reducer."""

    def __init__(
        self,
        action: NonFiniteAction,
        originals: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        processes: ReducerProcesses | None,
        skipped: SkippedSteps,
    ) -> None:
        self._action, self._skipped = action, skipped
        self._originals = originals
        self._names = names
        self._processes = processes
        #: True if each process has to say what it found: its results may be others.
        self.votes = False
        # True if gradients stay in this process, and a later round decides about them.
        self._stays = False
        # Where the round leaves gradients.
        self._home = IN_GRAD
        # Looks at replicas, under no_sync() until the round that reduces their gradients.
        self._evidence: list[_Look] = []
        # Looks at the tensors that this process sends and receives, if it has to say. Parameters
        # that stay here are not sent.
        self._own: list[_Look] = []

    def begin(self, home: GradientHome, *, stays: bool, votes: bool) -> None:
        """Begin a round; if its gradients stay and others are added, a later one decides."""
        self._home, self._stays, self.votes = home, stays, votes
        held = home.read(self._originals)
        if all([grad is None for grad in held]):
            self._evidence.clear()
        place = "what .grad held before the backward"
        self._own = [] if stays else _looks(enumerate(held), place)
        self._evidence += self._own

    def look_at_replica(self, replica: int, bucket: Bucket, grads: Sequence[MaybeTensor]) -> None:
        """Look at gradients of one replica."""
        place = f"replica {replica} ({bucket.leaves[replica][0].device})"
        self._evidence.extend(_looks(zip(bucket.indices, grads, strict=True), place))

    def look_at_sent(self, members: Iterable[tuple[int, MaybeTensor]]) -> None:
        """Look at what this process has computed, where it has to say whether it is finite."""
        if self.votes:
            self._own += _looks(members)

    def look_at_received(self, buckets: Sequence[Bucket], flats: Sequence[torch.Tensor]) -> None:
        """Look at reduced buckets, where processes have to say whether these are finite."""
        for bucket, flat in zip(buckets, flats, strict=False) if self.votes else ():
            storage = bucket.storage
            views = [flat.coalesce()] if storage is None else storage.layout.views_of(flat)
            self._own += _looks(zip(bucket.indices, views, strict=True))

    def found(self) -> bool:
        """True if something that this process sends or has received is not finite."""
        return not _are_finite(self._own)

    def judge(self, found: bool) -> dict[str, str] | None:
        """Return the verdict on a round whose results are delivered: None if it stands.

        Else all processes drop its gradients, as the vote has ``found`` or the results say; the
        verdict is by place which gradients are not finite in this process, for :meth:`announce`.
        """
        if self._stays:
            return None
        evidence, self._evidence = self._evidence, []
        looks = self._own
        if not self.votes:
            held = self._home.read(self._originals)
            # Entries of a row that a sparse gradient has several times may be too large together.
            plain = [g.coalesce() if g is not None and g.is_sparse else g for g in held]
            looks = _looks(enumerate(plain))
            found = not _are_finite(looks)
        if not found:
            return None
        kinds = {index: kind for look in looks for index, kind in look.found()}
        # A hook of the user may have repaired others.
        return self._named([*evidence, *looks], kinds)

    def announce(self, own: dict[str, str]) -> None:
        """Tell of gradients that all processes have dropped: log and count, or raise an error."""
        gathered = [own]
        if self._processes is not None:
            control = self._processes.control
            gathered = control.all_gather_json(own, what="which gradients are not finite")
        text = _describe(gathered)
        if self._action == "raise":
            raise NonFiniteGradients(
                f"{text}. No gradient of this step was kept, in no process, and .grad is None; all "
                "can go on with the next step"
            )
        _log.warning(
            "%s. The step is skipped: .grad is None in all processes (skipped so far: %d)",
            text,
            self._skipped.add(),
        )

    def _named(self, looks: Sequence[_Look], indices: Collection[int]) -> dict[str, str]:
        """By place, which of some gradients were not finite there."""
        found: dict[str, list[str]] = {}
        for look in looks:
            for index, kind in look.found():
                if index in indices:
                    found.setdefault(look.place, []).append(f"{self._names[index]} ({kind})")
        return {place: listed(dict.fromkeys(names)) for place, names in sorted(found.items())}


def _describe(told: Sequence[dict[str, str]]) -> str:
    """Describe the gradients that are not finite, from each process's findings, by rank."""
    found = [(rank, *one) for rank, each in enumerate(told) for one in each.items()]
    # A value in a sum came from a replica, if a replica had it.
    named = [one for one in found if one[1] != _SUM] or found
    of_rank = f"rank {{}} of {len(told)}, " if len(told) > 1 else ""
    texts = (f"on {of_rank.format(rank)}{place}: {names}" for rank, place, names in named)
    return f"gradients are not finite {listed(texts, '; ')}"


# --- which gradients are finite --------------------------------------------------------------


class _Look(NamedTuple):
    """The largest elements of some gradients, which are finite only if these are."""

    place: str
    indices: list[int]
    largest: torch.Tensor

    def found(self) -> list[tuple[int, str]]:
        """Return the parameters with a gradient that is not finite, and of which kind; may wait."""
        return [
            (index, "NaN" if math.isnan(number) else "infinity")
            for index, number in zip(self.indices, self.largest.tolist(), strict=True)
            if not math.isfinite(number)
        ]


@torch.no_grad()
def _looks(members: Iterable[tuple[int, MaybeTensor]], place: str = _SUM) -> list[_Look]:
    """Look at gradients, each with the index of its parameter, without waiting for a device."""
    groups: dict[tuple[object, ...], tuple[list[int], list[torch.Tensor]]] = {}
    for index, grad in members:
        part = None if grad is None else _real(grad.detach())
        if part is not None and part.numel():
            indices, parts = groups.setdefault((part.device, part.dtype), ([], []))
            indices.append(index)
            parts.append(part)
    return [
        _Look(place, indices, torch.stack(torch_internals.foreach_norm(parts, math.inf)))
        for indices, parts in groups.values()
        if is_accelerator(parts[0].device) or not _are_small(parts)
    ]


def _are_small(parts: Sequence[torch.Tensor]) -> bool:
    """True if squares on the CPU are finite, which is faster to see there than the largest."""
    wide = torch.float32 if parts[0].dtype.itemsize < 4 else None
    norms = torch_internals.foreach_norm(parts, 2, wide)
    return math.isfinite(torch.stack(norms).sum())


def _are_finite(looks: Sequence[_Look]) -> bool:
    """True if all gradients are, with one wait for all devices."""
    if not looks:
        return True
    first = looks[0].largest
    together = torch.cat([look.largest.to(first.device, first.dtype) for look in looks])
    return bool(together.isfinite().all())


def _real(grad: torch.Tensor) -> torch.Tensor:
    """Return the strided tensor of real numbers that holds those of a gradient."""
    numbers = torch_internals.sparse_values(grad) if grad.is_sparse else grad
    return torch.view_as_real(numbers) if numbers.is_complex() else numbers
