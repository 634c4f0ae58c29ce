"""Whether all processes have the same, and what each has if not."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from dataparallel.comm.processes import ProcessLink


def digest(value: Any) -> int:
    """A number from -2**63 to 2**63 - 1 for what JSON can hold; other values have other numbers.

    It is the same in every process, which Python's ``hash`` is not.

    Example::

        digest(["weight", [3, 4]]) == digest(["weight", [3, 4]])
    """
    text = json.dumps(value)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def gather_if_different(
    value: Any, link: ProcessLink, *, details: Any = None, what: str
) -> list[tuple[Any, Any]] | None:
    """The values and details of all processes if the values are not all the same, else None.

    One collective of one number; those that carry the rest follow only where they are needed. All
    processes get the same.

    Example::

        gathered = gather_if_different(options, link, what="the comparison of options")

    Args:
        value: What is compared, as JSON can hold it.
        link: The processes.
        details: What the others need to know besides, if there is a difference. Default: nothing.
        what: What messages call this.

    Returns:
        A pair for each process in the order of ranks, as it comes out of JSON; or None.
    """
    number = torch.tensor([digest(value)], dtype=torch.int64)
    numbers = [gathered.item() for gathered in link.all_gather(number, what=what)]
    if len(set(numbers)) == 1:
        return None
    return [(each, more) for each, more in link.all_gather_json([value, details], what=what)]
