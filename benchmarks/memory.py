"""Peaks of memory with originals at home and spread, simulated on virtual devices."""

from __future__ import annotations

import argparse
import gc

import torch
from torch import nn

from benchmarks import common
from dataparallel import DistributedDataParallel, virtual
from dataparallel.reducer.options import OriginalsKind
from dataparallel.tools.arguments import count, counts
from dataparallel.tools.bench.runner import Report, new_table, publish

_MODES: tuple[OriginalsKind, ...] = ("home", "spread")


def build_parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory",
        description="Peaks of memory with originals at home and spread: allocations of virtual "
        "devices in dry mode, AdamW with foreach=False, layers with few activations.",
        epilog="examples:\n"
        "  python -m benchmarks.memory\n"
        "  python -m benchmarks.memory --layers 448 --devices 8\n"
        "  python -m benchmarks.memory --layers 32 --width 512 --json peaks.json\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--devices", type=counts, default=[2, 4, 8], metavar="LIST",
        help="numbers of devices; default: 2,4,8")  # fmt: skip
    add("--layers", type=counts, default=[64, 192, 448], metavar="LIST",
        help="numbers of layers; default: 64,192,448")  # fmt: skip
    add("--width", type=count, default=4096, metavar="N",
        help="inputs and outputs of a layer; default: 4096")  # fmt: skip
    add("--json", metavar="FILE", help="write the peaks to a file, too")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Train a few steps in each mode, show the peaks, and return the exit status."""
    if virtual.device_count() < max(arguments.devices):
        virtual.enable(max(arguments.devices))
    table = new_table("GiB per device", "first", "others, least", "most")
    found = []
    for layers in arguments.layers:
        for num_devices in arguments.devices:
            for mode in _MODES:
                peaks = peaks_of(num_devices, mode, layers, arguments.width)
                found.append(
                    {"layers": layers, "devices": num_devices, "mode": mode, "peaks": peaks}
                )
                first, *others = (peak / 2**30 for peak in peaks)
                cells = (first, min(others, default=0.0), max(others, default=0.0))
                name = f"{layers} layers, {num_devices} devices, {mode}"
                table.add_row(name, *(f"{each:.2f}" for each in cells))
    size = sum(p.nbytes for p in _model(1, arguments.width, "meta").parameters())
    note = f"simulated: allocations of virtual devices; a layer has {size / 2**20:.1f} MiB"
    return publish(Report([table], [note], {"peaks": found}), arguments)


def peaks_of(num_devices: int, mode: OriginalsKind, num_layers: int, width: int) -> list[int]:
    """Return the peak of three steps on each device, in bytes; nothing is computed."""
    gc.collect()
    devices = [f"virtual:{i}" for i in range(num_devices)]
    memory = torch.get_device_module("virtual")
    before = [memory.memory_allocated(device) for device in devices]
    with virtual.dry_mode(), virtual.check_races(False):
        net = _model(num_layers, width, devices[0])
        model = DistributedDataParallel(net, devices, originals=mode)
        optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
        x = torch.randn(num_devices, width, device=devices[0])
        for device in devices:
            memory.synchronize(device)
            memory.reset_peak_memory_stats(device)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        found = [memory.max_memory_allocated(device) for device in devices]
        model.close()
    return [peak - own for peak, own in zip(found, before, strict=True)]


def _model(num_layers: int, width: int, device: str) -> nn.Module:
    return nn.Sequential(*[nn.Linear(width, width, device=device) for _ in range(num_layers)])


if __name__ == "__main__":
    raise SystemExit(common.main(build_parser(), run))
