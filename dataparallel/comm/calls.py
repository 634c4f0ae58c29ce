"""What a process is about to do in a collective, and how processes differ in that."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dataparallel.comm.process_errors import name_ranks

# Longer lists of sizes are cut in messages.
_MOST_SIZES = 16


class Call(NamedTuple):
    """One collective, as one process calls it.

    Attributes:
        operation: Its name.
        option: With what it reduces, or from which member it comes; empty if it has neither.
        dtype: Of what this process gives; None if that is no tensor.
        shape: Of what this process gives; empty where members may have others.
        what: What it is about, the same in all members up to the first parenthesis.
        gives: For each member, how much this one sends there; empty where nobody chooses.
        gets: For each member, how much this one expects from there.
    """

    operation: str
    option: str
    dtype: torch.dtype | None
    shape: Sequence[int]
    what: str = ""
    gives: Sequence[int] = ()
    gets: Sequence[int] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            **self._asdict(),
            "dtype": "" if self.dtype is None else str(self.dtype).removeprefix("torch."),
            "shape": list(self.shape),
            "gives": list(self.gives),
            "gets": list(self.gets),
        }

    def key(self) -> str:
        """What must be the same in all members, on one line."""
        purpose = self.what.partition(" (")[0]
        return f"{self.operation}|{self.option}|{self.dtype}|{tuple(self.shape)}|{purpose}"


def digest(calls: Sequence[Call]) -> str:
    """A short text for calls one after the other; other calls have another one."""
    return hashlib.sha256("\n".join(call.key() for call in calls).encode()).hexdigest()[:16]


def digests(calls: Sequence[Call]) -> list[str]:
    """A short text for each call."""
    return [hashlib.sha256(call.key().encode()).hexdigest()[:8] for call in calls]


class Said(NamedTuple):
    """What one member says at a check.

    Attributes:
        sequence: The number of the collective that it is about to launch.
        call: That collective, as JSON holds it.
        history: A digest of those that it has launched since the last check.
        launches: Whether it launches without an answer.
    """

    sequence: int
    call: dict[str, Any]
    history: str
    launches: bool = False


_COMPARED = {
    "operation": "operations",
    "option": "options",
    "dtype": "dtypes",
    "shape": "shapes",
    "what": "orders",
}


def difference(said: Sequence[Said]) -> str | None:
    """In what the members differ: ``"shapes"``; None if they go together.

    Args:
        said: By member.
    """
    for field, title in _COMPARED.items():
        if len({_compared(one.call, field) for one in said}) > 1:
            return title
    for i, one in enumerate(said):
        for j, size in enumerate(one.call["gives"]):
            if j < len(said) and said[j].call["gets"][i : i + 1] != [size]:
                return "sizes"
    return None


def _compared(call: dict[str, Any], field: str) -> str:
    value = call[field]
    return value.partition(" (")[0] if field == "what" else str(value)


def describe(call: dict[str, Any]) -> str:
    """``all_reduce (sum) of bucket 0 (a .. b), float32 (4, 3)``."""
    text: str = call["operation"]
    if call["option"]:
        text += f" ({call['option']})"
    if call["what"]:
        text += f" of {call['what']}"
    if call["dtype"]:
        text += f", {call['dtype']} {tuple(call['shape'])}"
    if call["gives"] or call["gets"]:
        text += f", sends {_sizes(call['gives'])} and expects {_sizes(call['gets'])}"
    return text


def _sizes(sizes: Sequence[int]) -> str:
    more = ", ..." if len(sizes) > _MOST_SIZES else ""
    return f"[{', '.join(map(str, sizes[:_MOST_SIZES]))}{more}]"


def by_rank(texts: Sequence[str], ranks: Sequence[int]) -> str:
    """One line for each text, with the ranks that say it.

    Args:
        texts: By member.
        ranks: The number of each member in the default group.
    """
    who: dict[str, list[int]] = {}
    for text, rank in zip(texts, ranks, strict=True):
        who.setdefault(text, []).append(rank)
    return "".join(f"\n  {name_ranks(numbers)}: {text}" for text, numbers in who.items())
