"""Launches each kernel on small tensors, as it takes part in no other work: for a sanitizer."""

from __future__ import annotations

import argparse

import torch

from dataparallel.kernels.backend import backend_of
from tests.gpu.kernel_cases import CASES

#: Elements, and how many of them lie before an aligned address: less than a block has threads, more
#: than one block, and neither divisible by anything.
CALLS = ((33, 0), (33, 1), (4101, 0), (4101, 3))


def main() -> None:
    """Say which kernels ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    device = torch.device(parser.parse_args().device)
    assert backend_of(device) is not None, f"no kernels on {device}"
    for case in CASES:
        for size, offset in CALLS:
            for result in case(device, size, offset):
                result.cpu()
        print(case.__name__, flush=True)


if __name__ == "__main__":
    main()
