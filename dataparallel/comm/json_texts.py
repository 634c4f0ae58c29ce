"""JSON that comes from other processes, which may be of another version, or damaged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

#: Greatest length of the text of one process, in bytes. Plans of a model take far less.
MAX_SIZE = 256 << 20


def check_sizes(sizes: Sequence[int], what: str) -> None:
    """Refuse texts for which there would have to be more memory than for any real one.

    Args:
        sizes: How long the text of each rank is said to be, in bytes.
        what: What the texts are, for messages.

    Raises:
        ValueError: One is negative or too long; the same in all processes that know the sizes.
    """
    for rank, size in enumerate(sizes):
        if not 0 < size <= MAX_SIZE:
            raise ValueError(
                f"rank {rank} announces {what} of {size} bytes, but it may have 1 to {MAX_SIZE}; "
                "all processes have to run the same version of this package"
            )


def decode(parts: Sequence[torch.Tensor], what: str) -> list[Any]:
    """The values of texts, by rank.

    Args:
        parts: The text of each rank as bytes, a 1-d tensor of dtype uint8 on the host.
        what: What the texts are, for messages.

    Raises:
        ValueError: One is no JSON; the message says whose.
    """
    values = []
    for rank, part in enumerate(parts):
        text = bytes(part.tolist())
        try:
            values.append(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"rank {rank} sent {text[:60]!r} as {what}, which is no JSON ({error}); all "
                "processes have to run the same version of this package"
            ) from error
    return values
