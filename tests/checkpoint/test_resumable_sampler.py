"""Every sample once in an epoch, wherever it was interrupted and with however many processes."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

from dataparallel import checkpoint
from dataparallel.extras.checkpoint import ResumableSampler


def samplers(num_processes: int, length: int = 50, **options: Any) -> list[ResumableSampler]:
    return [
        ResumableSampler(length, 8, rank=rank, num_processes=num_processes, **options)
        for rank in range(num_processes)
    ]


def take(each: list[ResumableSampler], count: int) -> list[list[int]]:
    """Return the next batches of all processes, with an end of an epoch in between or not."""
    batches: list[list[int]] = []
    while len(batches) < count:
        parts = [sampler.over(sampler) for sampler in each]
        for shares in zip(*parts, strict=False):
            sizes = [len(share) for share in shares]
            assert max(sizes) <= min(sizes) + 1
            batches.append([index for share in shares for index in share])
            if len(batches) == count:
                break
        else:
            for part in parts:
                assert next(part, None) is None
    return batches


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 40),
    stop=st.integers(0, 12),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
def test_the_batches_do_not_depend_on_interruptions_and_processes(
    length: int, stop: int, before: int, after: int, drop_last: bool, shuffle: bool
) -> None:
    options = {"length": length, "drop_last": drop_last and length >= 8, "shuffle": shuffle}
    expected = [set(batch) for batch in take(samplers(1, **options), 15)]
    old, new = samplers(before, **options), samplers(after, **options)
    got = take(old, stop)
    for sampler in new:
        sampler.load_state_dict(old[0].state_dict())
    got += take(new, 15 - stop)
    least = max(before, after)
    for ours, theirs in zip(got, expected, strict=True):
        # A batch that is smaller than the number of processes is filled up.
        assert set(ours) == theirs or (len(theirs) < least and set(ours) >= theirs)
        assert len(ours) == len(theirs) or len(theirs) < len(ours) <= least


def test_an_epoch_has_every_sample_once_in_its_own_order() -> None:
    sampler = ResumableSampler(50, 8)
    epochs = []
    for epoch in range(3):
        assert (sampler.epoch, len(sampler)) == (epoch, 7)
        epochs.append([index for batch in sampler.over(sampler) for index in batch])
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    other = ResumableSampler(50, 8, seed=1 << 33)
    assert [index for batch in other.over(other) for index in batch] != epochs[0]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_what_workers_fetch_ahead_does_not_count(num_workers: int, tmp_path: pathlib.Path) -> None:
    data = TensorDataset(torch.arange(48))

    def make() -> tuple[ResumableSampler, Any]:
        sampler = ResumableSampler(data, 8)
        return sampler, DataLoader(data, batch_sampler=sampler, num_workers=num_workers)

    sampler, loader = make()
    seen: list[tuple[list[int], float]] = []
    for count, (batch,) in enumerate(sampler.over(loader)):
        # As dropout would; what the loader draws for itself must not shift it.
        seen.append((batch.tolist(), float(torch.rand(()))))
        if count == 2:
            checkpoint.save(tmp_path, sampler=sampler, step=count)
    again, its_loader = make()
    checkpoint.load(tmp_path, sampler=again)
    rest = [(b.tolist(), float(torch.rand(()))) for (b,) in again.over(its_loader)]
    assert rest == seen[3:] and len(seen) == 6
    assert again.epoch == 1


def test_a_position_that_is_not_known(tmp_path: pathlib.Path) -> None:
    sampler = ResumableSampler(20, 4)
    next(iter(sampler))
    with pytest.raises(RuntimeError, match=r"write `for batch in sampler\.over\(loader\)`"):
        checkpoint.save(tmp_path, sampler=sampler, step=1)
    sampler.set_epoch(1)
    checkpoint.save(tmp_path, sampler=sampler, step=1)


def test_another_order(tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path, sampler=ResumableSampler(20, 4), step=1)
    for other, message in (
        (ResumableSampler(21, 4), "length=20, but this sampler has length=21"),
        (ResumableSampler(20, 4, seed=3), "seed=0, but this sampler has seed=3"),
        (ResumableSampler(20, 4, shuffle=False), "shuffle=True, but .* shuffle=False"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match=message):
            checkpoint.load(tmp_path, sampler=other)
        assert other.epoch == 0
    # Another size of batches goes on at the same sample.
    other = ResumableSampler(20, 5)
    checkpoint.load(tmp_path, sampler=other)


@pytest.mark.parametrize(("rank", "num_processes"), [(0, 9), (2, 2)])
def test_ranks_without_a_part_of_a_batch_are_refused(rank: int, num_processes: int) -> None:
    message = f"rank {rank} of {num_processes} processes has no part of a batch of 8"
    with pytest.raises(ValueError, match=message):
        ResumableSampler(20, 8, rank=rank, num_processes=num_processes)


def test_torchs_samplers(tmp_path: pathlib.Path) -> None:
    data = range(10)
    spread: Any = DistributedSampler(TensorDataset(torch.arange(10)), num_replicas=2, rank=0)
    spread.set_epoch(4)
    expected = list(spread)
    checkpoint.save(tmp_path, sampler=spread, step=0)
    spread.set_epoch(0)
    checkpoint.load(tmp_path, sampler=spread)
    assert spread.epoch == 4 and list(spread) == expected
    drawn = RandomSampler(data, generator=torch.Generator().manual_seed(1))
    checkpoint.save(tmp_path, sampler=drawn, step=0)
    order = list(drawn)
    checkpoint.load(tmp_path, sampler=drawn)
    assert list(drawn) == order
