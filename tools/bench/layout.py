"""How replicas are divided among processes."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """A number of processes with as many replicas each.

    Attributes:
        processes: How many.
        replicas: Of each process.
    """

    processes: int
    replicas: int

    def __str__(self) -> str:
        return f"{self.processes}x{self.replicas}"

    @property
    def total(self) -> int:
        """Number of replicas of all processes."""
        return self.processes * self.replicas

    def places(self, device: str) -> list[list[str]]:
        """The device of each replica of each process.

        Example::

            Layout(2, 2).places("cpu")       # [["cpu", "cpu"], ["cpu", "cpu"]]
            Layout(1, 2).places("virtual")   # [["virtual:0", "virtual:1"]]

        Args:
            device: A type of device. The replicas share the CPU; of accelerators each has its own.
        """
        # Not by a torch.device: virtual ones are made known in the workers only.
        shared = device == "cpu"
        names = [device if shared else f"{device}:{index}" for index in range(self.total)]
        return [names[i : i + self.replicas] for i in range(0, self.total, self.replicas)]


def layouts(text: str) -> list[Layout]:
    """Convert a list such as ``1x2,2x1`` from the command line."""
    found = []
    for word in text.split(","):
        numbers = re.fullmatch(r"([1-9]\d?)x([1-9]\d?)", word.strip())
        if not numbers:
            raise argparse.ArgumentTypeError(
                f"{word!r} is no layout; say processes x replicas, for example 1x2,2x1"
            )
        found.append(Layout(int(numbers[1]), int(numbers[2])))
    return list(dict.fromkeys(found))
