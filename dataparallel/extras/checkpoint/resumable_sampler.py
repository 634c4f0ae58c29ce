"""A sampler of batches that goes on in the middle of an epoch, with any number of processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from dataparallel.threads.random import mixed_seed

T = TypeVar("T")


class ResumableSampler(Sampler[list[int]]):
    """Batches of indices in an order that depends on the seed and the epoch alone.

    The processes divide each batch, so any number of them trains on the same batches. The position
    counts the batches that :meth:`over` gave out, not those that the workers of a ``DataLoader``
    have prefetched.

    Example::

        sampler = ResumableSampler(dataset, batch_size=64)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
        for epoch in range(sampler.epoch, 10):
            for x, y in sampler.over(loader):           # from where it was, at first
                ...
                checkpoint.save("run", model, optimizer, sampler=sampler, step=step)

    Args:
        dataset: Anything with a length, or that length.
        batch_size: How many samples a batch has, over all processes together.
        shuffle: True for samples in random order. Default: True.
        seed: The seed of the order. Default: 0.
        drop_last: True to leave out an incomplete last batch. Default: False. If that batch has
            fewer samples than there are processes, samples from the beginning of the epoch fill it
            up. So each process has one.
        rank, num_processes: This process and how many there are. Default: those of
            ``torch.distributed``, and 0 and 1 without it.

    Attributes:
        epoch: The epoch that is under way, or comes next.

    Raises:
        ValueError: A batch has fewer samples than there are processes.
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        num_processes: int | None = None,
    ) -> None:
        there_are = dist.is_available() and dist.is_initialized()
        if rank is None:
            rank = dist.get_rank() if there_are else 0
        if num_processes is None:
            num_processes = dist.get_world_size() if there_are else 1
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        self.batch_size, self.drop_last = batch_size, drop_last
        self.shuffle, self.seed = shuffle, seed
        self.rank, self.num_processes = rank, num_processes
        self.epoch = 0
        # Samples of this epoch that the training has got, over all processes.
        self._taken = 0
        self._is_counted = True
        if not 0 <= rank < num_processes <= batch_size:
            raise ValueError(
                f"rank {rank} of {num_processes} processes has no part of a batch of {batch_size} "
                "samples; batch_size is that of all processes together"
            )

    def __len__(self) -> int:
        """Return the number of batches that are left in this epoch."""
        left = self.length - self._taken
        return left // self.batch_size if self.drop_last else -(-left // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of this process, from the position on; for a ``DataLoader``."""
        self._is_counted = False
        order = self._order()
        for start in range(self._taken, self.length, self.batch_size):
            batch = order[start : start + self.batch_size]
            if len(batch) < self.batch_size and self.drop_last:
                return
            if len(batch) < self.num_processes:
                batch = (batch + order * self.num_processes)[: self.num_processes]
            # The shares of the processes differ by one sample at most.
            size, more = divmod(len(batch), self.num_processes)
            begin = self.rank * size + min(self.rank, more)
            yield batch[begin : begin + size + (self.rank < more)]

    def over(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate over the rest of this epoch, and count the batches.

        The seed that a ``DataLoader`` draws for its workers depends on the position here, and
        torch's own generator stays as it is. Random numbers of workers are not saved.

        Args:
            loader: A loader with this sampler as its ``batch_sampler``, or the sampler itself.
        """
        state = torch.default_generator.get_state()
        seed = mixed_seed(mixed_seed(self.seed + 1, self.epoch), self._taken)
        torch.default_generator.manual_seed(seed)
        try:
            iterator = iter(loader)
        finally:
            torch.default_generator.set_state(state)
        self._is_counted = True
        for batch in iterator:
            self._is_counted = True
            self._taken = min(self._taken + self.batch_size, self.length)
            yield batch
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self.epoch, self._taken, self._is_counted = epoch, 0, True

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what the order depends on.

        Raises:
            RuntimeError: Batches were taken that :meth:`over` did not count.
        """
        if not self._is_counted:
            raise RuntimeError(
                "the position in the epoch is not known, since the loader was iterated directly; "
                "write `for batch in sampler.over(loader)`"
            )
        order = {"length": self.length, "seed": self.seed, "shuffle": self.shuffle}
        return {"epoch": self.epoch, "taken": self._taken, **order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position; the number of processes and the batch size may be others.

        Raises:
            ValueError: The order is another one.
        """
        for name in ("length", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the position is in an order with {name}={state[name]!r}, but this sampler "
                    f"has {name}={getattr(self, name)!r}; make it as it was, or leave it out of "
                    "the load to begin a new epoch"
                )
        self.set_epoch(state["epoch"])
        self._taken = state["taken"]

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.length))
        # Spread, so that neighboring seeds and epochs have nothing in common.
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch))
        order: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return order
