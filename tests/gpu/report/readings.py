"""Reads the devices beside ``nvidia-smi`` while they work, and writes both down."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib

from dataparallel.tools.monitor.sources.nvml import NvmlSource
from tests.gpu.nvidia_smi import compare, work

#: Clocks, power and heat may change in a second; not in each of these.
_TRIES = 3


def main() -> None:
    """Write the pairs of the first try in which all agree, or of the last one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True)
    output = pathlib.Path(parser.parse_args().output)
    source = NvmlSource()
    for _ in range(_TRIES):
        work(1.5)
        pairs = compare(source.read)
        if all(pair.agrees for pair in pairs):
            break
    source.close()
    rows = [{**dataclasses.asdict(pair), "agrees": pair.agrees} for pair in pairs]
    output.write_text(json.dumps(rows), encoding="utf-8")
    for pair in pairs:
        if not pair.agrees:
            print(pair)


if __name__ == "__main__":
    main()
