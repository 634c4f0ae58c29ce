"""What a Balancer leaves to the run that goes on where its own has stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

from dataparallel.extras.balancing.chunk_shares import Cost

# Seconds: no time is measured that is further away, and what is computed from these stays finite.
_LEAST, _MOST = 1e-18, 1e18


class SavedState(NamedTuple):
    """By what batches are divided.

    Attributes:
        costs: Per replica; None for evenly.
        limits: Per replica how many samples it may get; None where nothing is known.
    """

    costs: tuple[Cost, ...] | None
    limits: tuple[int | None, ...]

    def to_dict(self) -> dict[str, Any]:
        """Lists, numbers and None only; see :meth:`from_dict`."""
        costs = None if self.costs is None else [list(cost) for cost in self.costs]
        return {"costs": costs, "limits": list(self.limits)}

    @staticmethod
    def from_dict(state: Mapping[str, Any], num_replicas: int) -> SavedState:
        """What :meth:`to_dict` has described.

        Args:
            state: The description.
            num_replicas: How many replicas there are.

        Raises:
            ValueError: It is of another number of replicas, or nothing of the kind.
        """
        try:
            costs, limits = state["costs"], list(state["limits"])
            pairs = None if costs is None else [tuple(pair) for pair in costs]
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"this is no state of a Balancer, which has 'costs' and 'limits': {state!r:.200}; "
                "load what state_dict() of a Balancer returned"
            ) from error
        numbers = {"limits": len(limits), **({} if pairs is None else {"costs": len(pairs)})}
        if set(numbers.values()) != {num_replicas}:
            of = " and ".join(f"{name} of {n}" for name, n in numbers.items())
            raise ValueError(
                f"the state has {of} replicas, but this wrapper has {num_replicas}; leave it out, "
                "and speeds are measured anew"
            )
        faults = [*_faults_of_costs(pairs or []), *_faults_of_limits(limits)]
        if faults:
            raise ValueError(
                f"this is no state of a Balancer: {'; '.join(faults)}; leave it out, and speeds "
                "are measured anew"
            )
        return SavedState(
            None if pairs is None else tuple(Cost(float(a), float(b)) for a, b in pairs),
            tuple(None if limit is None else int(limit) for limit in limits),
        )


def _faults_of_costs(pairs: Sequence[tuple[Any, ...]]) -> list[str]:
    faults = []
    for replica, pair in enumerate(pairs):
        name = f"the cost of replica {replica}"
        if len(pair) != 2 or not all(_is_number(part) for part in pair):
            faults.append(
                f"{name} is two numbers, fixed seconds and seconds per sample, but got {pair}"
            )
            continue
        fixed, per_sample = pair
        # Also false for NaN.
        if not 0 <= fixed <= _MOST:
            faults.append(f"{name} has fixed seconds from 0 to {_MOST:g}, but got {fixed}")
        if not _LEAST <= per_sample <= _MOST:
            faults.append(
                f"{name} has seconds per sample from {_LEAST:g} to {_MOST:g}, but got {per_sample}"
            )
    return faults


def _faults_of_limits(limits: Sequence[Any]) -> list[str]:
    return [
        f"the limit of replica {replica} is None or a number of samples, at least 1, but got "
        f"{limit!r}"
        for replica, limit in enumerate(limits)
        if limit is not None
        and (isinstance(limit, bool) or not isinstance(limit, Integral) or limit < 1)
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
