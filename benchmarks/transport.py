"""Bytes and copies between devices in one step, counted on virtual devices."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import torch
from torch import nn

from benchmarks import common
from dataparallel import DataParallel, DistributedDataParallel, virtual
from dataparallel.tools.arguments import count, counts
from dataparallel.tools.bench.runner import Report, new_table, publish


def build_parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transport",
        description="Bytes and copies between devices in one step, counted on virtual devices.",
        epilog="examples:\n"
        "  python -m benchmarks.transport\n"
        "  python -m benchmarks.transport --devices 8 --layers 24\n"
        "  python -m benchmarks.transport --width 64 --json counts.json\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--devices", type=counts, default=[2, 4, 8], metavar="LIST",
        help="numbers of devices; default: 2,4,8")  # fmt: skip
    add("--layers", type=count, default=12, metavar="N",
        help="layers of the transformer, with 12 parameters each; default: 12")  # fmt: skip
    add("--width", type=count, default=256, metavar="N",
        help="its width, a multiple of 4; default: 256")  # fmt: skip
    add("--json", metavar="FILE", help="write the counts to a file, too")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Count, show bytes in multiples of those of the parameters, and return the exit status."""
    if virtual.device_count() < max(arguments.devices):
        virtual.enable(max(arguments.devices))
    table = new_table("One step", "copies", "out of the first", "into it", "out of others", "in")
    found = []
    for wrapper in (DistributedDataParallel, DataParallel):
        for num_devices in arguments.devices:
            counted = count_step(wrapper, num_devices, arguments.layers, arguments.width)
            found.append({"wrapper": wrapper.__name__, "devices": num_devices, **counted})
            name = f"{wrapper.__name__}, {num_devices} devices"
            table.add_row(name, *(f"{value:.4g}" for value in counted.values()))
    size = sum(p.nbytes for p in _model(arguments.layers, arguments.width).parameters())
    note = f"bytes in multiples of the {size / 2**20:.0f} MiB of the parameters; others: the most"
    return publish(Report([table], [note], {"counts": found}), arguments)


def count_step(wrapper: Any, num_devices: int, num_layers: int, width: int) -> dict[str, float]:
    """Count the copies between devices in one step, and the bytes of the busiest ports."""
    module = _model(num_layers, width).to("virtual:0")
    size = sum(parameter.nbytes for parameter in module.parameters())
    model = wrapper(module, [f"virtual:{i}" for i in range(num_devices)])
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    batch = torch.randn(num_devices, 2, width, device="virtual:0")
    for _ in range(4):
        virtual.reset_counters()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    leaving, entering = Counter[int](), Counter[int]()
    for (source, destination), num_bytes in virtual.routes().items():
        leaving[source] += num_bytes
        entering[destination] += num_bytes
    others = range(1, num_devices)
    return {
        "copies": virtual.counters()["copies_device_to_device"],
        "out of the first": leaving[0] / size,
        "into the first": entering[0] / size,
        "out of others": max((leaving[i] for i in others), default=0) / size,
        "into others": max((entering[i] for i in others), default=0) / size,
    }


def _model(num_layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
        for _ in range(num_layers)
    ]
    return nn.Sequential(*layers)


if __name__ == "__main__":
    raise SystemExit(common.main(build_parser(), run))
