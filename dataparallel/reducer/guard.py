"""The guard of a reducer: are all gradients of a round finite, in all processes?

Note [Where gradients are looked at]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each replica's gradients are looked at when their bucket is taken: in the thread that has computed
them, while they are in its cache, and before they are added to others, so that it is known whose
they are. One pass for norms tells it. On an accelerator it is queued, and read at the end.

A sum of finite terms may be infinite. But no element of it is larger than the sum of the norms of
what is added up, so if that is far from the largest number of the dtype, nobody has to look at
sums. Each process says how far it may come, as a part of that number, and the parts are added up in
the collective that ends the round anyway, like the number of gradients that are not finite. Only if
they come to too much, results are looked at as well, and one more collective makes sure that all
processes come to the same decision. A communication hook may make anything of a bucket, so what it
has made is looked at before the end of the round. What backwards under ``no_sync()`` have left in
``.grad`` is looked at before the round that reduces it, since others than replicas may have added
to it.

Nothing is decided under ``no_sync()``, in one process as in several: what is found there counts
when a backward without it ends the step, unless the user has thrown the gradients away by then.

Only when something was found, a further exchange brings the names.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dataparallel.devices import is_accelerator
from dataparallel.reducer.accumulated import Accumulated
from dataparallel.reducer.buckets import Buckets, MaybeTensor
from dataparallel.reducer.gradient_norms import kind_of, kind_of_norm, norms_of
from dataparallel.reducer.nonfinite import SUM, Finding, NonFinitePolicy, describe, to_json

if TYPE_CHECKING:
    from dataparallel.reducer.exchange import Outcome, ReducerProcesses
    from dataparallel.reducer.round import Round

#: What stands for the largest number of a dtype where parts of it are added up: 2**20 processes may
#: say that much without an overflow of int64.
_WHOLE = 1 << 40
#: The other half is for the rounding of norms and sums.
_TOO_MUCH = _WHOLE // 2

_HOOK = "what a hook on a parameter has returned"
_COMM_HOOK = "what the communication hook has returned"
_UNREDUCED = "what .grad held from under no_sync()"
_BEFORE = "what .grad held before the backward"
_OUTSIDE = "what came from outside of the wrapper's forward"


class Said(NamedTuple):
    """What a process says about its gradients at the end of a round."""

    #: How many are not finite.
    num_nonfinite: int = 0
    #: How large sums may become, as a part of ``_WHOLE``.
    magnitude: int = 0


class _Look(NamedTuple):
    """Norms of gradients of one bucket that were not read yet."""

    place: str
    bucket: int
    indices: list[int]
    norms: torch.Tensor
    limit: float


class Guard:
    """Looks for gradients that are not finite. See Note [Where gradients are looked at].

    Args:
        policy: What the user wants.
        originals: The parameters that the optimizer has.
        names: Their names.
        devices: The device of each replica.
        processes: The other processes; None where there are none.
    """

    def __init__(
        self,
        policy: NonFinitePolicy,
        originals: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        devices: Sequence[torch.device],
        processes: ReducerProcesses | None,
    ) -> None:
        self.policy = policy
        self._originals = originals
        self._names = names
        self.use_devices(devices)
        self._processes = processes
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        #: What was found in this round.
        self.findings: list[Finding] = []
        #: Whether the gradients of the last round were dropped.
        self.dropped = False
        self._queued: list[_Look] = []
        self._parts: dict[int, float] = {}
        self._buckets: Buckets | Any = None
        self._limits: list[float] = []

    @staticmethod
    def of(
        policy: NonFinitePolicy,
        originals: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        devices: Sequence[torch.device],
        processes: ReducerProcesses | None,
    ) -> Guard | None:
        """A guard, or None where nobody wants to know."""
        return Guard(policy, originals, names, devices, processes) if policy.looks else None

    def use_devices(self, devices: Sequence[torch.device]) -> None:
        """Name the replicas after other devices from now on."""
        self._places = [f"replica {i} ({device})" for i, device in enumerate(devices)]

    # --- in a round ------------------------------------------------------------------------------

    def begin(self, buckets: Buckets, accumulated: Accumulated, *, stays: bool) -> None:
        """Begin a round.

        Args:
            buckets: Its buckets.
            accumulated: What ``.grad`` held before it.
            stays: Whether more is to be added to its gradients: it is decided about them later.
        """
        self._accumulated = accumulated
        # Nobody remembers findings in a context where nothing is to be reduced.
        self._stays = stays and (accumulated.any or accumulated.home.context_id is None)
        if buckets is not self._buckets:
            self._buckets = buckets
            self._limits = [self._limit_of(number) for number in range(len(buckets.plan))]
        self.findings, self._queued, self._parts = [], [], {}
        self.dropped = False
        if all([grad is None for grad in accumulated.home.read(self._originals)]):
            accumulated.magnitude = 0.0
        if accumulated.findings:
            # The user may have thrown away what a backward under no_sync() has left.
            held = accumulated.home.read([finding.parameter for finding in accumulated.findings])
            pairs = zip(accumulated.findings, held, strict=True)
            accumulated.findings = [f for f, g in pairs if g is not None and kind_of(g.detach())]
        if not stays and accumulated.sends:
            self._look_at_unreduced()

    @torch.no_grad()
    def _look_at_unreduced(self) -> None:
        """Look at what will be sent beside what replicas compute in this round."""
        known = {id(finding.parameter) for finding in self._accumulated.findings}
        for number, bucket in enumerate(self._buckets.plan.buckets):
            members = [index for index in bucket if id(self._originals[index]) not in known]
            grads = [self._accumulated.unreduced(index) for index in members]
            place = _UNREDUCED if self._accumulated.any else _BEFORE
            self._look(place, number, zip(members, grads, strict=True))

    @torch.no_grad()
    def look_at_outside(self, index: int, grad: torch.Tensor) -> None:
        """Look at what a parameter has got from outside of the wrapper's forward."""
        self._look(_OUTSIDE, self._buckets.plan.bucket_of(index), [(index, grad)])

    def _limit_of(self, number: int) -> float:
        dtypes = {self._originals[index].dtype for index in self._buckets.plan.buckets[number]}
        storage = self._buckets.storages[number]
        if storage is not None:
            dtypes.add(storage.flat.dtype)
        return min(map(_largest, dtypes))

    @torch.no_grad()
    def look(self, replica: int, bucket: int, grads: Sequence[MaybeTensor]) -> None:
        """Look at the gradients of a bucket of one replica; in any thread.

        Args:
            replica: Index of the replica.
            bucket: Number of the bucket.
            grads: One per parameter, None where there is none.
        """
        members = zip(self._buckets.plan.buckets[bucket], grads, strict=True)
        self._look(self._places[replica], bucket, members)

    def _look(self, place: str, bucket: int, members: Iterable[tuple[int, MaybeTensor]]) -> None:
        there = [(index, grad) for index, grad in members if grad is not None and grad.numel()]
        if not there:
            return
        indices, tensors = [index for index, _ in there], [grad for _, grad in there]
        norms = norms_of(tensors)
        limit = min(self._limits[bucket], _largest(tensors[0].dtype))
        if is_accelerator(norms.device):
            with self._lock:
                self._queued.append(_Look(place, bucket, indices, norms, limit))
            return
        total = float(torch.linalg.vector_norm(norms))
        if not math.isfinite(total):
            # Or only squares are infinite.
            self._find(place, zip(indices, map(kind_of, tensors), strict=True))
        self._add(bucket, total / limit)

    def _find(self, place: str, kinds: Iterable[tuple[int, str | None]]) -> None:
        found = [
            Finding(place, self._names[index], kind, self._originals[index])
            for index, kind in kinds
            if kind is not None
        ]
        with self._lock:
            self.findings += found

    def _add(self, bucket: int, part: float) -> None:
        with self._lock:
            self._parts[bucket] = self._parts.get(bucket, 0.0) + part

    @torch.no_grad()
    def look_after_hook(self, index: int, grad: torch.Tensor) -> None:
        """Look at what hooks of the user have made of a sum over replicas: it is what counts."""
        self._read()
        original = self._originals[index]
        with self._lock:
            self.findings = [
                f
                for f in self.findings
                if f.parameter is not original or f.place in (_UNREDUCED, _BEFORE)
            ]
        held = [*self.findings, *self._accumulated.findings]
        if not any(finding.parameter is original for finding in held):
            # What was in .grad before may be in it, and is no work of the hook.
            self._find(_HOOK, [(index, kind_of(grad))])
        bucket = self._buckets.plan.bucket_of(index)
        self._add(bucket, float(norms_of([grad])[0]) / self._limits[bucket])

    def look_at_flats(self, flats: Sequence[torch.Tensor]) -> None:
        """Look at what a communication hook has made of the buckets."""
        for number, flat in enumerate(flats):
            if flat.numel() and not bool(norms_of([flat]).isfinite()):
                storage = self._buckets.storages[number]
                views = [flat] if storage is None else storage.layout.views_of(flat)
                bucket = self._buckets.plan.buckets[number]
                self._find(_COMM_HOOK, zip(bucket, map(kind_of, views), strict=True))

    def _read(self) -> None:
        """Read norms that were queued; waits for the devices."""
        # Whoever returns knows that all is read, be it by another thread.
        with self._reading:
            with self._lock:
                queued, self._queued = self._queued, []
            for place, bucket, indices, norms, limit in queued:
                values = norms.tolist()
                self._find(place, zip(indices, map(kind_of_norm, values), strict=True))
                self._add(bucket, math.hypot(*values) / limit)

    # --- at its end ------------------------------------------------------------------------------

    def say(self) -> Said:
        """What the other processes are told, when everything of this process was looked at."""
        self._read()
        part = self._part()
        if not part < 1.0:
            part = 1.0
        number = len(self._accumulated.findings) + len(self.findings)
        return Said(number, math.ceil(part * _WHOLE))

    def _part(self) -> float:
        return max(self._parts.values(), default=0.0) + self._accumulated.magnitude

    def judge(self, said: Outcome | Said, round_: Round) -> None:
        """End a round; do what the user wants if gradients are not finite, in all processes.

        Args:
            said: What all processes have said.
            round_: The round, whose results are withdrawn then.

        Raises:
            NonFiniteGradients: That is what the user wants.
        """
        if self._stays:
            self._accumulated.findings = [*self._accumulated.findings, *self.findings]
        objection = None if self._stays else self._objection(said, round_)
        if objection is None:
            self._accumulated.magnitude = self._part()
            return
        self.dropped = True
        self._accumulated.findings, self._accumulated.magnitude = [], 0.0
        round_.withdraw()
        self.policy.act(objection)

    @torch.no_grad()
    def _objection(self, said: Outcome | Said, round_: Round) -> str | None:
        """What is wrong with the gradients, None if all are finite; the same everywhere."""
        found = said.num_nonfinite > 0
        if not found and said.magnitude >= _TOO_MUCH:
            found = self._results_are_infinite(round_)
        if not found:
            return None
        told = to_json([*self._accumulated.findings, *self.findings])
        if self._processes is None:
            return describe([told])
        what = "which gradients are not finite"
        return describe(self._processes.control.all_gather_json(told, what=what))

    def _results_are_infinite(self, round_: Round) -> bool:
        held = self._accumulated.home.read(self._originals)
        kinds = []
        for index, (result, grad) in enumerate(zip(round_.result, held, strict=True)):
            total = grad if result is None else result
            if result is not None and grad is not None and result.layout == grad.layout:
                total = grad.detach() + result
            kinds.append((index, None if total is None else kind_of(total.detach())))
        self._find(SUM, kinds)
        if self._processes is None:
            return bool(self.findings)
        # All have the same results, unless their processors round in different ways.
        found = torch.tensor([len(self.findings)])
        what = "whether sums of gradients are finite"
        self._processes.control.all_reduce(found, what=what).wait()
        return bool(found.item())


def _largest(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).max)
