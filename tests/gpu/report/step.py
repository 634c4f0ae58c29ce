"""One step on all devices: the share of it in which a device only communicates, and memory."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import dataparallel as dp
from tests.gpu.report.speed import batch, build, trainer
from tests.gpu.report.subject import kind, synchronize, table

#: The names of copies and collectives on GPUs, and of operators of the host that stand in.
_MOVES = {True: ("memcpy", "nccl"), False: ("copy_",)}
_PEAKS = ("allocated_bytes", "active_bytes", "reserved_bytes")

Span = tuple[float, float]


def main(given: argparse.Namespace) -> None:
    """Measure steps of the model of 300 M parameters, as they are and recorded in graphs."""
    names = given.devices
    millions = 300 if kind(names) == "cuda" else 25
    rows = []
    for title, options in (("eager", {}), ("capture=True", {"capture": True})):
        found, peaks = _measure(names, millions, **options)
        rows += [[title, name, *found[name], *peaks[name]] for name in names]
    head = ["step", "device", "ms", "computes", "only communicates", "idle"]
    head += ["allocated, MiB", "active", "reserved", "num_alloc_retries"]
    table(f"One step, {millions} M parameters, float32: shares and peaks", head, rows)


def _measure(
    names: Sequence[str], millions: int, **options: Any
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return by device the shares of a step, and the peaks."""
    modules: Any = {name: torch.get_device_module(torch.device(name)) for name in names}
    for name, module in modules.items():
        module.empty_cache()
        module.reset_peak_memory_stats(name)
    net = build(millions, torch.device(names[0]), torch.float32)
    model = dp.DistributedDataParallel(net, list(names), **options)
    run = trainer(model, batch(net, len(names)))
    for _ in range(6):
        run()
    synchronize(names)
    activities = [ProfilerActivity.CPU]
    if kind(names) == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # Torch 2.11 warns if events are not kept, which makes no difference in one cycle.
    with profile(activities=activities, acc_events=True) as profiled:
        run()
        synchronize(names)
    model.close()
    shares = _shares(names, list(profiled.events() or ()))
    peaks = {}
    for name, module in modules.items():
        stats = module.memory_stats(name)
        sizes = [f"{stats.get(f'{peak}.all.peak', 0) / 2**20:.0f}" for peak in _PEAKS]
        peaks[name] = [*sizes, str(stats.get("num_alloc_retries", 0))]
    return shares, peaks


def _shares(names: Sequence[str], events: Sequence[Any]) -> dict[str, list[str]]:
    """Divide the time of the step; virtual devices have no events, so the host's stand in."""
    on_gpus = kind(names) == "cuda"
    begin = min((event.time_range.start for event in events), default=0.0)
    end = max((event.time_range.end for event in events), default=0.0)
    found = {}
    for name in names:
        moves: list[Span] = []
        computes: list[Span] = []
        for event in events:
            if on_gpus and (
                event.device_type.name != "CUDA"
                or event.device_index != torch.device(name).index
                # A copy of a range of the host's, not a kernel.
                or getattr(event, "is_user_annotation", False)
            ):
                continue
            is_move = any(word in event.name.lower() for word in _MOVES[on_gpus])
            span = (event.time_range.start, event.time_range.end)
            (moves if is_move else computes).append(span)
        busy, whole = covered(computes), covered([*moves, *computes])
        length = max(end - begin, 1e-9)
        parts = (busy, whole - busy, length - whole)
        found[name] = [f"{length / 1e3:.2f}", *(f"{part / length:.0%}" for part in parts)]
    return found


def covered(spans: Iterable[Span]) -> float:
    """Return the length of the union of some spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
