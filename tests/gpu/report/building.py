"""Compiles what else would be compiled on first use, so that it counts to no other part.

Virtual devices are compiled when the package is imported, if the environment asks for some.
"""

from __future__ import annotations

import argparse
import time

import torch

from dataparallel.kernels import compiler
from dataparallel.kernels.backend import backend_of


def main() -> None:
    """Say for each thing how long it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", required=True)
    names = parser.parse_args().devices.split(",")
    for name in names:
        device = torch.device(name)
        begin = time.monotonic()
        backend = backend_of(device)
        if backend is None:
            print(f"{name}: no kernels, torch's operations take their place")
            continue
        for source in compiler.source_names():
            backend.load(device, source)
        print(f"{name}: kernels in {time.monotonic() - begin:.1f} s ({type(backend).__name__})")


if __name__ == "__main__":
    main()
