"""What parts run in processes of their own, beside tests and benchmarks."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time
from collections.abc import Sequence

import torch

from dataparallel.kernels import compiler
from dataparallel.kernels.backend import backend_of
from tests.gpu.kernel_cases import CASES

#: Elements, and how many of them lie before an aligned address: less than a block has threads, more
#: than one block, and neither divisible by anything.
CALLS = ((33, 0), (33, 1), (4101, 0), (4101, 3))

#: Clocks, power and heat may change in a second; not in each of these.
_TRIES = 3


def build(devices: Sequence[str]) -> None:
    """Compile what else would be compiled on first use, so that it counts to no other part.

    Virtual devices are compiled when the package is imported, if the environment asks for some.
    """
    for name in devices:
        device = torch.device(name)
        begin = time.monotonic()
        backend = backend_of(device)
        if backend is None:
            print(f"{name}: no kernels, torch's operations take their place")
            continue
        for source in compiler.source_names():
            backend.load(device, source)
        print(f"{name}: kernels in {time.monotonic() - begin:.1f} s ({type(backend).__name__})")


def launch_every_kernel(name: str) -> None:
    """Launch each kernel on small tensors, as it takes part in no other work: for a sanitizer."""
    device = torch.device(name)
    assert backend_of(device) is not None, f"no kernels on {device}"
    for case in CASES:
        for size, offset in CALLS:
            for result in case(device, size, offset):
                result.cpu()
        print(case.__name__, flush=True)


def read_beside_nvidia_smi(output: pathlib.Path) -> None:
    """Read the devices while they work; write the first pairs that all agree, or the last."""
    # The others need nothing of the monitor, and so not what it needs.
    from dataparallel.tools.monitor.sources import nvml
    from tests.gpu import nvidia_smi

    source = nvml.NvmlSource()
    for _ in range(_TRIES):
        nvidia_smi.work(1.5)
        pairs = nvidia_smi.compare(source.read)
        if all(pair.agrees for pair in pairs):
            break
    source.close()
    rows = [{**dataclasses.asdict(pair), "agrees": pair.agrees} for pair in pairs]
    output.write_text(json.dumps(rows), encoding="utf-8")
    for pair in pairs:
        if not pair.agrees:
            print(pair)


def main() -> None:
    """Run one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("build", "kernels", "readings"))
    parser.add_argument("where", help="devices, one device, or the file for the readings")
    arguments = parser.parse_args()
    if arguments.what == "build":
        build(arguments.where.split(","))
    elif arguments.what == "kernels":
        launch_every_kernel(arguments.where)
    else:
        read_beside_nvidia_smi(pathlib.Path(arguments.where))


if __name__ == "__main__":
    main()
