"""What one process knows of another one of its group."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from dataparallel.comm.failure import Failure
from dataparallel.comm.process_identity import ProcessIdentity

T = TypeVar("T")

#: Reads an entry of the store; None if there is none.
Read = Callable[[str], bytes | None]


@dataclass(frozen=True)
class Sign:
    """A sign of life, as it is in the store.

    Attributes:
        channel: What tells this channel of the process from those before and after it.
        since: When it was made, see :func:`~dataparallel.comm.process_identity.ticks`.
        beat: Another number in each sign.
        doing: Where the process waits; empty if it does not.
        told: How often the process has told something; the last is in an entry of its own.
        away: Whether no further sign will come for now, so that silence means nothing.
    """

    channel: str
    since: int
    beat: int
    doing: str
    told: int
    away: bool

    @classmethod
    def from_json(cls, text: bytes) -> Sign:
        """The sign.

        Raises:
            ValueError: It is none.
        """
        sign = _made(cls, json.loads(text))
        # It becomes a part of names in the store.
        if len(sign.channel) != 32 or not sign.channel.isalnum():
            raise ValueError(f"{sign.channel[:40]!r} is no channel of a sign of life")
        return sign


@dataclass(frozen=True)
class Told:
    """What a process told last.

    Attributes:
        number: How often it has told of a failure that ends waits.
        ends: Whether this one does.
        failure: What it told.
    """

    number: int
    ends: bool
    failure: Failure

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, text: bytes) -> Told:
        """What was told.

        Raises:
            ValueError: It is nothing of the kind.
        """
        fields = json.loads(text)
        inner = fields.get("failure") if isinstance(fields, dict) else None
        failure = _made(Failure, inner)
        return _made(cls, {**fields, "failure": failure})


class Peer:
    """Another process, as it shows in the store. See Note [Signs of life].

    Args:
        number: Its rank in the default group.
        mine: This process. Default: it is not known.
        fresh: Whether no group before this one has used the same part of the store.
    """

    def __init__(
        self, number: int, mine: ProcessIdentity | None = None, *, fresh: bool = False
    ) -> None:
        self._number = number
        self._mine = mine
        # See Note [Old failures].
        self._is_of_this_group = fresh
        self._expected: str | None = None
        self._sign: Sign | None = None
        self._identity: ProcessIdentity | None = None
        self._told: Told | None = None
        self._has_ended = False
        self._silence = 0.0

    def expect(self, channel: str, identity: dict[str, Any]) -> None:
        """Take nothing for a sign of life any more but those of this channel.

        Args:
            channel: As in :class:`Sign`.
            identity: The fields of its :class:`ProcessIdentity`.

        Raises:
            ValueError: These are not its fields.
        """
        found = _made(ProcessIdentity, identity)
        if self._sign is not None and self._sign.channel != channel:
            self._sign = self._told = None
        if self._expected != channel:
            self._has_ended, self._silence = False, 0.0
        self._expected, self._identity = channel, found
        self._is_of_this_group = True

    def hear(self, value: bytes | None, awake: float, read: Read) -> None:
        """Take what is in the store.

        Args:
            value: What the process wrote last; None if it has written nothing yet.
            awake: Seconds since the last time, as far as this process was awake.
            read: Reads what the sign refers to.

        Raises:
            ValueError: It is not what a process of this package writes.
        """
        self._silence += awake
        try:
            sign = None if value is None else Sign.from_json(value)
            if sign is not None and self._expected in (None, sign.channel):
                self._take(sign, read)
        finally:
            self._has_ended = self._identity is not None and self._identity.has_ended()

    def _take(self, sign: Sign, read: Read) -> None:
        before = self._sign
        other = before is None or before.channel != sign.channel
        if other:
            place = f"process/{sign.channel}"
            self._identity = _made(ProcessIdentity, json.loads(_found(read, place)))
            self._told = None
        if sign.told and (before is None or other or sign.told != before.told):
            self._told = Told.from_json(_found(read, f"told/{sign.channel}"))
        if sign.away or other or sign != before:
            self._silence = 0.0
        # Nobody writes for a group that is gone.
        self._is_of_this_group |= before is not None and sign != before
        self._sign = sign

    def failure(self, known: int) -> Failure | None:
        """Why the process can be expected no more; None if nothing speaks against it.

        Args:
            known: The number of what it told that is forgotten.
        """
        told, believed = self._told, self._is_of_this_group
        if believed and told is not None and told.ends and told.number > known:
            return told.failure
        if self._has_ended and (believed or self._ran_together()):
            return self._seen("ended", "has ended")
        return None

    def _ran_together(self) -> bool:
        """Whether it made its channel when this process was there already."""
        mine, sign = self._mine, self._sign
        return mine is not None and sign is not None and mine.was_there(sign.since)

    @property
    def told_number(self) -> int:
        """The number of the last failure that it told."""
        return 0 if self._told is None else self._told.number

    def last_told(self) -> Failure | None:
        """What it told last, of whatever consequence."""
        return None if self._told is None else self._told.failure

    def describe(self) -> str:
        """Where it is, or for how long it is silent; empty if it has written nothing yet."""
        if self._identity is None or self._sign is None:
            return ""
        if self._has_ended:
            return "ended"
        if self._silence > 2.0:
            return f"no sign of life for {self._silence:.1f} s"
        doing = self._sign.doing
        return f"alive, waiting in {doing}" if doing else "alive, not in a collective"

    def _seen(self, kind: Any, text: str) -> Failure:
        assert self._identity is not None
        doing = "" if self._sign is None else self._sign.doing
        return Failure(self._number, self._identity.host, self._identity.pid, kind, doing, text)


def _found(read: Read, key: str) -> bytes:
    found = read(key)
    if found is None:
        raise ValueError(f"a sign of life refers to {key!r}, which is not in the store")
    return found


def _made(kind: type[T], fields: Any) -> T:
    """An object of a dataclass. Who can reach the store can write to it: it may be anything."""
    kinds: dict[str, Any] = {"rank": int, "pid": int, "beat": int, "told": int, "number": int}
    kinds |= {"since": int, "away": bool, "ends": bool, "failure": Failure}
    described: Any = kind
    names = {field.name for field in dataclasses.fields(described)}
    if (
        not isinstance(fields, dict)
        or set(fields) != names
        or any(type(value) is not kinds.get(name, str) for name, value in fields.items())
    ):
        raise ValueError(
            f"the store has {str(fields)[:60]!r} where a sign of life should have "
            f"{', '.join(sorted(names))}"
        )
    return kind(**fields)
