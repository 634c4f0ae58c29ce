"""How many samples of a batch each device slot gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from torch import nn

from dataparallel.comm.local import chunk_lengths

T = TypeVar("T")

#: Decides from a batch size and the number of slots how many samples each of them gets.
ChunkSizesOf: TypeAlias = Callable[[int, int], Sequence[int]]


class BatchSplitter(Protocol):
    """What decides for a wrapper how its batches are split; see :mod:`dataparallel.balancing`."""

    def chunk_sizes(self, batch_size: int, num_slots: int) -> Sequence[int]:
        """How many samples each slot gets."""

    def attempt(self, call: Callable[[], T], modules: Sequence[nn.Module | None], inputs: Any) -> T:
        """Run a forward, once more with other chunks if there was too little memory.

        Args:
            call: Splits the batch and runs the replicas.
            modules: The originals whose buffers it may write.
            inputs: What it splits, in any containers.
        """

    @property
    def is_repeating(self) -> bool:
        """Whether the forward under way is not the first attempt."""


def settle(
    batch_size: int | None, num_slots: int, given: Sequence[int] | ChunkSizesOf | None
) -> tuple[int, ...]:
    """The sizes of the chunks, for as many slots as take part.

    Example::

        settle(10, 2, None)          # (5, 5)
        settle(10, 2, (7, 3))        # (7, 3)

    Args:
        batch_size: Number of samples; ``None`` where no tensor is split.
        num_slots: How many device slots there are.
        given: Sizes, or a function that decides them. Default: as ``torch.chunk`` divides.

    Returns:
        At least one size.

    Raises:
        ValueError: The sizes given do not go with the batch or the slots.
    """
    if callable(given):
        if batch_size is None:
            return (1,)
        chosen = tuple(given(batch_size, num_slots))
        given = chosen + (0,) * (num_slots - len(chosen))
    if given is None:
        return (1,) if batch_size is None else chunk_lengths(batch_size, num_slots)
    sizes = tuple(given)
    faults = []
    if len(sizes) != num_slots:
        faults.append(
            f"chunk_sizes has {len(sizes)} entries but there are {num_slots} device slots"
        )
    if any(size < 0 for size in sizes):
        faults.append(f"chunk_sizes has negative entries: {sizes}")
    if batch_size is not None and sum(sizes) != batch_size:
        faults.append(f"chunk_sizes add up to {sum(sizes)} but the batch has {batch_size} samples")
    while len(sizes) > 1 and sizes[-1] == 0:
        sizes = sizes[:-1]
    if len(sizes) > 1 and 0 in sizes:
        faults.append(
            f"chunk_sizes {tuple(given)} leave out slot {sizes.index(0)} in the middle; reorder "
            "the devices so that zeros come last"
        )
    if faults:
        raise ValueError("; ".join(faults))
    return sizes
