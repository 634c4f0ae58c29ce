"""From the options of a command to the sampler that it uses."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from dataparallel.monitor.attach import Answers, runs
from dataparallel.monitor.readings.cpu import CpuSource
from dataparallel.monitor.readings.host import HostReader
from dataparallel.monitor.readings.nvml import NvmlSource
from dataparallel.monitor.readings.processors import BusyShare
from dataparallel.monitor.readings.source import Source
from dataparallel.monitor.sampler import Sampler
from dataparallel.monitor.selection import Selection
from dataparallel.tools.monitor.replay import Replay
from dataparallel.tools.monitor.run_watch import RunWatch, watch_runs

SOURCES = ("auto", "nvml", "cpu")


def open_sampler(arguments: argparse.Namespace, watch: RunWatch | None = None) -> Sampler:
    """Return the sampler that the options of ``command.add_sampler_options`` ask for.

    It attaches to the runs of ``watch``. Default: those that ``--attach`` names.

    Raises:
        ValueError: There is no such source, file, run or device.
        RuntimeError: NVIDIA's driver is asked for, and does not answer.
    """
    sampler = _open(arguments, watch)
    try:
        sampler.choose(Selection(arguments.only, only_visible=arguments.only_visible))
    except ValueError:
        sampler.close()
        raise
    return sampler


def _open(arguments: argparse.Namespace, given: RunWatch | None) -> Sampler:
    if arguments.source not in SOURCES:
        return _open_replay(arguments)
    is_attached = given is not None or arguments.attach is not None
    watch = given or RunWatch(lambda: Answers((), ()))
    if arguments.attach is not None:
        watch = watch_runs(arguments.attach)
    busy = BusyShare()
    sources: list[Source] = []
    if arguments.source in ("auto", "nvml"):
        nvml = NvmlSource(names=watch.device_names)
        if arguments.source == "nvml":
            _require_devices(nvml)
        sources.append(nvml)
    if arguments.source in ("auto", "cpu"):
        sources.append(CpuSource(lambda: watch.pids, busy=busy))
    hints = () if is_attached else _runs_to_watch()
    sampler = Sampler(
        sources,
        interval=arguments.interval,
        host=HostReader(watch.names, busy=busy).read,
        runs=watch,
        notes=watch.notes if is_attached else lambda: hints,
        is_over=watch.is_over,
    )
    # For `top --once`, which shows the second of two samples, the first one does as well.
    if not getattr(arguments, "once", False):
        sampler.warm_up()
    return sampler


def _open_replay(arguments: argparse.Namespace) -> Sampler:
    path = Path(arguments.source)
    if not path.exists():
        raise ValueError(
            f"{arguments.source!r} is neither a source nor a recording: there are the sources "
            f"{', '.join(SOURCES)}, and no such file"
        )
    if arguments.attach is not None:
        raise ValueError(
            f"{path} is played back, so there is no run to attach to; leave out --attach, what was "
            "recorded of the run is shown anyway"
        )
    return Replay(path, speed=arguments.speed)


def _require_devices(source: NvmlSource) -> None:
    reading = source.read()
    if not reading.devices:
        source.close()
        why = "; ".join(reading.notes) or "NVIDIA's driver knows no device"
        raise RuntimeError(f"there is nothing to read with --source nvml: {why}")


def _runs_to_watch() -> tuple[str, ...]:
    with contextlib.suppress(OSError):
        found = runs()
        if found:
            listed = ", ".join(map(str, found))
            return (f"to see the phases of replicas, add --attach auto; these are runs: {listed}",)
    return ()
