"""What becomes of gradients that are not finite: who decides, who is named, what happens.

Note [Who decides]
~~~~~~~~~~~~~~~~~~
NaN and infinity of any process are in a plain sum or average over all of them, and so is a sum that
overflows. So the results of a round decide, which are the same in every process: nobody has to be
asked. A communication hook may swallow a NaN, or give each process a result of its own, and what
stays in one process is in no sum. Then each process says in the collective that ends the round
whether something is not finite in what it has computed, or got from the hook. Either way the host
waits once for the devices, at the end of the round.

The gradients of each replica are looked at before they are added up, since sums in place destroy
the evidence: one norm for each, in the thread that has computed them. On an accelerator the norms
are read only if something was found, to name rank, replica and parameter. What a backward under
``no_sync()`` has left in ``.grad`` is a part of the round that reduces it: it is decided there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import torch

from dataparallel import torch_internals
from dataparallel.devices import is_accelerator
from dataparallel.errors import MOST, chosen, listed
from dataparallel.reducer.accumulated import Accumulated
from dataparallel.reducer.buckets import Buckets, MaybeTensor

if TYPE_CHECKING:
    from dataparallel.reducer.exchange import ReducerProcesses
    from dataparallel.reducer.round import Round

#: ``"ignore"``: nobody looks. ``"skip"``: the step is skipped in all processes. ``"raise"``: all
#: processes raise :class:`NonFiniteGradients`.
NonFiniteAction: TypeAlias = Literal["ignore", "skip", "raise"]

_log = logging.getLogger("dataparallel")

# The places of what is not finite, beside the replicas.
_SUM = "the sum"
_HOOK = "what a hook on a parameter has returned"
_COMM_HOOK = "what the communication hook has returned"
_UNREDUCED = "what .grad held from under no_sync()"
_BEFORE = "what .grad held before the backward"
_OUTSIDE = "what came from outside of the wrapper's forward"


class NonFiniteGradients(FloatingPointError):
    """Gradients are NaN or infinite. All processes raise it with the same text."""


@dataclass
class NonFinitePolicy:
    """What one wrapper does about gradients that are not finite; outlives its reducers."""

    action: NonFiniteAction = "ignore"
    #: How many backwards were skipped so far.
    num_skipped: int = 0

    @staticmethod
    def of(action: object) -> NonFinitePolicy:
        """The policy for what a user has passed; a ValueError if there is no such action."""
        return NonFinitePolicy(chosen("nonfinite", action, get_args(NonFiniteAction)))

    @property
    def looks(self) -> bool:
        """Whether gradients are looked at."""
        return self.action != "ignore"

    def refuse_steps_in_backward(self) -> None:
        """Raise a ValueError where gradients are looked at: optimizers step before that."""
        if self.looks:
            raise ValueError(
                f"nonfinite={self.action!r} and optimizers in backward do not go together: when a "
                "gradient is found that is not finite, other parameters have taken their step "
                "already; leave nonfinite at 'ignore', or take the step after backward"
            )

    def refuse_kept_nan(self, hook: str) -> None:
        """Raise a ValueError where training is to go on after a NaN, which a hook remembers."""
        if self.action == "skip":
            raise ValueError(
                f"nonfinite='skip' and the communication hook {hook} do not go together: it adds "
                "what it has rounded away to the next steps, so that after one NaN all of them "
                "would be skipped; leave nonfinite at 'ignore', pass 'raise', or use another hook, "
                "such as 'bf16_compress'"
            )

    def count_again_from(self, num_skipped: int) -> None:
        """Forget the steps that were skipped since there were so many: they are repeated."""
        self.num_skipped = num_skipped

    def act(self, text: str) -> None:
        """Do what the user wants with what was found where: log and count, or raise an error."""
        if self.action == "raise":
            raise NonFiniteGradients(
                f"{text}. No gradient of this step was kept, in no process, and .grad is None; all "
                "can go on with the next step"
            )
        self.num_skipped += 1
        _log.warning(
            "%s. The step is skipped: .grad is None in all processes (skipped so far: %d)",
            text,
            self.num_skipped,
        )


class _Look(NamedTuple):
    """Gradients of one place, and the largest element of each, which tells what is not finite."""

    place: str
    indices: list[int]
    largest: torch.Tensor

    def found(self) -> list[tuple[int, str]]:
        """The parameters with a gradient that is not finite, and of which kind; may wait."""
        return [
            (index, "NaN" if math.isnan(number) else "infinity")
            for index, number in zip(self.indices, self.largest.tolist(), strict=True)
            if not math.isfinite(number)
        ]


class Guard:
    """Looks for gradients that are not finite in the rounds of one reducer."""

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
        self._processes = processes
        self.use_devices(devices)
        #: Whether each process has to say what it found: its results may be others.
        self.votes = False
        self._looks: list[_Look] = []
        # Those of backwards under no_sync(), until the round that reduces what they have left.
        self._kept: list[_Look] = []

    def use_devices(self, devices: Sequence[torch.device]) -> None:
        """Name the replicas after other devices from now on."""
        self._places = [f"replica {i} ({device})" for i, device in enumerate(devices)]

    # --- in a round ------------------------------------------------------------------------------

    def begin(
        self,
        buckets: Buckets,
        accumulated: Accumulated,
        *,
        stays: bool,
        hooked: bool,
        local: bool,
    ) -> None:
        """Begin a round; if its gradients stay and others are added, a later one decides."""
        self._buckets = buckets
        self._accumulated = accumulated
        # In a context where nothing is to be reduced there is no later round.
        self._stays = stays and (accumulated.any or accumulated.home.context_id is None)
        self._hooked, self.votes = hooked, hooked or local
        self._looks = []
        if all([grad is None for grad in accumulated.home.read(self._originals)]):
            self._kept = []
        elif not stays and any(accumulated.sent()):
            held = [accumulated.unreduced(index) for index in range(len(self._originals))]
            self._look(_UNREDUCED if accumulated.any else _BEFORE, enumerate(held))

    def look(self, replica: int, bucket: int, grads: Sequence[MaybeTensor]) -> None:
        """Look at the gradients of a bucket of one replica, in any thread."""
        members = self._buckets.plan.buckets[bucket]
        self._look(self._places[replica], zip(members, grads, strict=True))

    def look_after_hook(self, index: int, grad: torch.Tensor) -> None:
        """Look at what hooks of the user have made of a sum over replicas: it is what counts."""
        self._look(_HOOK, [(index, grad)])

    def look_at_outside(self, index: int, grad: torch.Tensor) -> None:
        """Look at what a parameter has got from outside of the wrapper's forward."""
        self._look(_OUTSIDE, [(index, grad)])

    def look_at_flats(self, flats: Sequence[torch.Tensor]) -> None:
        """Look at reduced buckets, where processes have to say what they found."""
        for number, flat in enumerate(flats):
            bucket = self._buckets.all[number]
            storage = bucket.storage
            views = [flat.coalesce()] if storage is None else storage.layout.views_of(flat)
            place = _COMM_HOOK if self._hooked else _SUM
            self._look(place, zip(bucket.indices, views, strict=True))

    @torch.no_grad()
    def _look(self, place: str, members: Iterable[tuple[int, MaybeTensor]]) -> None:
        for device, (indices, grads) in _by_device(members).items():
            # On the CPU nobody waits for the answer, so what is finite needs no record. That a hook
            # was there has to be known.
            kept = is_accelerator(device) or place == _HOOK
            if kept or not math.isfinite(norms_of(grads).sum()):
                self._looks.append(_Look(place, indices, norms_of(grads, math.inf)))

    # --- at its end ------------------------------------------------------------------------------

    def found(self) -> bool:
        """Whether a gradient of this process is not finite, those of its buckets included."""
        return not _are_finite([look.largest for look in self._looks]) and bool(self._findings())

    def judge(self, found: bool, round_: Round) -> None:
        """End a round; drop its gradients in all processes if the vote or the results say so."""
        if self._stays:
            self._kept += self._looks
            return
        if not found and not self.votes:
            sums = self._spoiled_results(round_)
            self._looks += sums
            found = bool(sums)
        told = _told(self._findings()) if found else []
        self._kept = []
        if not found:
            return
        round_.withdraw()
        gathered = [told]
        if self._processes is not None:
            control = self._processes.control
            gathered = control.all_gather_json(told, what="which gradients are not finite")
        self.policy.act(_describe(gathered))

    @torch.no_grad()
    def _spoiled_results(self, round_: Round) -> list[_Look]:
        """The gradients of the round that are not finite; the host waits once if all are."""
        held = self._accumulated.home.read(self._originals)
        totals: list[tuple[int, MaybeTensor]] = []
        for index, (total, grad) in enumerate(zip(round_.result, held, strict=True)):
            if index in round_.in_place:
                total = grad
            elif total is not None and grad is not None and total.layout == grad.layout:
                total = grad.detach() + total
            if total is not None and total.is_sparse:
                # What a row got several times may be too large together.
                total = total.coalesce()
            totals.append((index, total))
        groups = _by_device(totals).values()
        if _are_finite([norms_of(grads) for _, grads in groups]):
            return []
        # Or only squares are infinite.
        looks = [_Look(_SUM, indices, norms_of(grads, math.inf)) for indices, grads in groups]
        return [look for look in looks if look.found()]

    def _findings(self) -> list[tuple[str, str]]:
        """The places of what is not finite in this process, and the parameters; may wait."""
        found = [(look.place, index, kind) for look in self._looks for index, kind in look.found()]
        held = {index for place, index, _ in found if place in (_UNREDUCED, _BEFORE)}
        hooked = {index for look in self._looks if look.place == _HOOK for index in look.indices}
        # What is in .grad may be known from when it came there.
        earlier = [(look.place, *each) for look in self._kept for each in look.found()]
        shown = [each for each in earlier if each[1] in held]
        known = {index for _, index, _ in shown}
        for place, index, kind in found:
            if place in (_UNREDUCED, _BEFORE):
                is_told = index in known
            elif place == _HOOK or place in self._places:
                # What was in .grad before may be in it; and hooks have the last word.
                is_told = index in held or (index in hooked and place != _HOOK)
            else:
                is_told = False
            if not is_told:
                shown.append((place, index, kind))
        return [(place, f"{self._names[index]} ({kind})") for place, index, kind in shown]


def _told(findings: Iterable[tuple[str, str]]) -> list[Any]:
    """What one process tells the others: per place, names and how many there are."""
    by_place: dict[str, list[str]] = {}
    for place, text in findings:
        by_place.setdefault(place, []).append(text)
    return [[place, texts[:MOST], len(texts)] for place, texts in sorted(by_place.items())]


def _describe(told: Sequence[Sequence[Any]]) -> str:
    """What is not finite, from what each process has told, in the order of ranks."""
    places: list[str] = []
    sums: list[str] = []
    for rank, entries in enumerate(told):
        process = f"rank {rank} of {len(told)}, " if len(told) > 1 else ""
        for place, names, number in entries:
            text = listed(names, number=number)
            if place != _SUM:
                places.append(f"{process}{place}: {text}")
            elif text not in sums:
                sums.append(text)
    if places:
        return f"gradients are not finite on {'; on '.join(places)}"
    return (
        "sums of gradients are not finite, although each gradient is: they are too large for "
        f"their dtype, or .grad held something else before ({'; '.join(sums)})"
    )


# --- norms -----------------------------------------------------------------------------------


def norms_of(gradients: Sequence[torch.Tensor], order: float | None = None) -> torch.Tensor:
    """A norm of each gradient, in one tensor on their device, without waiting for it.

    It is finite only if the gradient is. That of order infinity is the largest element: NaN if
    there is one. Where no order is asked for, squares are added up on the CPU, which is faster, and
    may be infinite for finite numbers.
    """
    # The largest element of nothing is an error, and sparse gradients may have no rows.
    plain = [[part for part in _plain(grad) if part.numel()] for grad in gradients]
    flat = [part for parts in plain for part in parts]
    if not flat:
        return torch.zeros(len(plain), device=gradients[0].device)
    if order is None:
        order = math.inf if is_accelerator(flat[0].device) else 2
    wide = torch.float32 if order == 2 and flat[0].dtype.itemsize < 4 else None
    norms = torch_internals.foreach_norm(flat, order, wide)
    if all(len(parts) == 1 for parts in plain):
        return torch.stack(norms)
    left, zero = iter(norms), norms[0].new_zeros(())
    each = [[next(left) for _ in parts] or [zero] for parts in plain]
    return torch.stack([torch.stack(parts).max() for parts in each])


def _are_finite(norms: Sequence[torch.Tensor]) -> bool:
    """Whether all norms are, with one wait for all devices."""
    if not norms:
        return True
    together = torch.cat([each.to(norms[0].device, norms[0].dtype) for each in norms])
    return bool(together.isfinite().all())


def _by_device(
    members: Iterable[tuple[int, MaybeTensor]],
) -> dict[torch.device, tuple[list[int], list[torch.Tensor]]]:
    """The gradients that have elements, and the indices of their parameters."""
    groups: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}
    for index, grad in members:
        if grad is not None and grad.numel():
            indices, grads = groups.setdefault(grad.device, ([], []))
            indices.append(index)
            grads.append(grad.detach())
    return groups


def _plain(tensor: Any) -> Iterator[torch.Tensor]:
    """The strided tensors of real numbers that a gradient consists of."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if inner.is_floating_point() or inner.is_complex():
                yield from _plain(inner)
        return
    numbers = torch_internals.sparse_values(tensor) if tensor.is_sparse else tensor
    yield torch.view_as_real(numbers) if numbers.is_complex() else numbers
