"""What one process knows of another one of its group."""

from __future__ import annotations

import dataclasses
import json
from types import NoneType
from typing import Any

from dataparallel.comm.failure import Failure
from dataparallel.comm.process_identity import ProcessIdentity


class Peer:
    """Another process, as it shows in the store. See Note [Signs of life].

    Args:
        number: Its rank in the default group.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._identity: ProcessIdentity | None = None
        self._beat = -1
        self._doing = ""
        self._told: dict[str, Any] | None = None
        self._has_ended = False
        self._silence = 0.0

    def hear(self, value: bytes | None, awake: float) -> None:
        """Take what is in the store.

        Args:
            value: What the process wrote last; None if it has written nothing yet.
            awake: Seconds since the last time, as far as this process was awake.

        Raises:
            ValueError: It is not what a process of this package writes.
        """
        if value is None:
            # It has no part in this yet, and cannot be missed.
            return
        fields = json.loads(value)
        _check(fields)
        identity = ProcessIdentity(**fields["process"])
        if (fields["beat"], identity) == (self._beat, self._identity):
            self._silence += awake
        else:
            self._silence = 0.0
        self._beat, self._identity = fields["beat"], identity
        self._doing, self._told = fields["doing"], fields["told"]
        self._has_ended = identity.has_ended()

    def failure(self, known: int, patience: float = float("inf")) -> Failure | None:
        """Why the process can be expected no more; None if nothing speaks against it.

        Args:
            known: The number of what it told that is forgotten.
            patience: Seconds without a sign of life after which it counts as lost.
        """
        if self._told is not None and self._told["ends"] and self._told["number"] > known:
            return Failure(**self._told["failure"])
        if self._has_ended:
            return self._seen("ended", "has ended")
        if self._silence > patience:
            text = f"has given no sign of life for {self._silence:.1f} s"
            return self._seen("silent", f"{text}: it is stopped, hangs, or is cut off")
        return None

    @property
    def told_number(self) -> int:
        """The number of the last failure that it told."""
        return 0 if self._told is None else int(self._told["number"])

    def last_told(self) -> Failure | None:
        """What it told last, of whatever consequence."""
        return None if self._told is None else Failure(**self._told["failure"])

    def describe(self) -> str:
        """Where it is, or for how long it is silent; empty if it has written nothing yet."""
        if self._identity is None:
            return ""
        if self._silence > 2.0:
            return f"no sign of life for {self._silence:.1f} s"
        return f"alive, waiting in {self._doing}" if self._doing else "alive, not in a collective"

    def _seen(self, kind: Any, text: str) -> Failure:
        assert self._identity is not None
        return Failure(
            self._number, self._identity.host, self._identity.pid, kind, self._doing, text
        )


def _check(fields: Any) -> None:
    """Who can reach the store can write to it, so what is there may be anything."""
    kinds: dict[str, Any] = {"beat": int, "doing": str, "process": dict, "told": (dict, NoneType)}
    told = fields.get("told") if isinstance(fields, dict) else None
    is_sign = isinstance(fields, dict) and all(
        isinstance(fields.get(name), kind) for name, kind in kinds.items()
    )
    if is_sign and told is not None:
        is_sign = isinstance(told.get("number"), int) and isinstance(told.get("ends"), bool)
        is_sign = is_sign and isinstance(told.get("failure"), dict)
    places: list[tuple[type, Any]] = [(ProcessIdentity, fields["process"])] if is_sign else []
    places += [(Failure, told["failure"])] if is_sign and told is not None else []
    if not is_sign or not all(_fits(kind, values) for kind, values in places):
        raise ValueError(f"the store has {str(fields)[:60]!r} where a sign of life should be")


def _fits(kind: type, values: dict[str, Any]) -> bool:
    """Whether an object can be made of the values: they have its names and simple types."""
    names = {field.name for field in dataclasses.fields(kind)}
    numbers = {"rank", "pid"}
    return set(values) == names and all(
        type(value) is (int if name in numbers else str) for name, value in values.items()
    )
