"""Copies between each pair of devices: the right bytes, and how many of them per second."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence

import torch

from dataparallel import devices
from tests.gpu.report.subject import kind, spread, synchronize, table

_REPEATS = 5
Pair = tuple[str, str]


def main(given: argparse.Namespace) -> None:
    """Copy each ordered pair alone, each pair both ways, and all at once."""
    names = given.devices
    links = Links(names, 2**26 if kind(names) == "cuda" else 2**18)
    ordered = list(itertools.permutations(names, 2))
    alone = {pair: links.rate([pair]) for pair in ordered}
    both = {
        pair: links.rate([pair, pair[::-1]])
        for pair in ordered
        if names.index(pair[0]) < names.index(pair[1])
    }
    head = ["from", *(f"to {name}" for name in names)]
    rows = [[one, *("" if one == to else f"{alone[one, to]:.1f}" for to in names)] for one in names]
    table("Copies between devices, GB/s, each pair alone", head, rows)
    total = [
        ["one pair both ways, sum: median (min..max)", spread(list(both.values()), 1)],
        ["all pairs at once, sum", f"{links.rate(ordered):.1f}"],
    ]
    for (one, to), rate in both.items():
        print(f"{one} and {to}, both ways: {rate:.1f} GB/s")
    table("Copies at the same time, GB/s", ["copies", "GB/s"], total)
    if links.wrong:
        raise SystemExit(f"wrong bytes arrived: {', '.join(sorted(links.wrong))}")
    print(f"the right bytes arrived from each of {len(ordered)} ordered pairs in each way")


class Links:
    """Buffers for copies between devices, and the pairs of which wrong bytes arrived."""

    def __init__(self, names: Sequence[str], size: int) -> None:
        self._names, self._size = names, size
        # Multiples of an odd number: all are different, on each device other ones.
        counted = torch.arange(size // 4, dtype=torch.int32) * 40_503
        self._patterns = {name: counted + i for i, name in enumerate(names)}
        self._sources = {name: pattern.to(name) for name, pattern in self._patterns.items()}
        self._streams = {
            pair: torch.Stream(torch.device(pair[0])) for pair in itertools.permutations(names, 2)
        }
        self.wrong: set[str] = set()

    def rate(self, pairs: Sequence[Pair]) -> float:
        """Return 10^9 bytes per second of copies at the same time; check the bytes."""
        targets = [torch.zeros_like(self._sources[one], device=to) for one, to in pairs]
        self._copy(pairs, targets, 1)
        self._check(pairs, targets)
        begin = time.perf_counter()
        self._copy(pairs, targets, _REPEATS)
        seconds = time.perf_counter() - begin
        self._check(pairs, targets)
        return len(pairs) * _REPEATS * self._size / seconds / 1e9

    def _copy(self, pairs: Sequence[Pair], targets: Sequence[torch.Tensor], count: int) -> None:
        synchronize(self._names)
        for _ in range(count):
            for pair, target in zip(pairs, targets, strict=True):
                # A copy runs on the current stream of its source; each pair has one of its own.
                with devices.use_stream(self._streams[pair]):
                    target.copy_(self._sources[pair[0]], non_blocking=True)
        synchronize(self._names)

    def _check(self, pairs: Sequence[Pair], targets: Sequence[torch.Tensor]) -> None:
        for (one, to), target in zip(pairs, targets, strict=True):
            if not torch.equal(target.cpu(), self._patterns[one]):
                self.wrong.add(f"{one} to {to} ({len(pairs)} at once)")
            target.zero_()
