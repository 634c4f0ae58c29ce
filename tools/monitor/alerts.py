"""The matters that need a user's look now: on the devices, and in the runs that are watched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dataparallel.monitor.findings import Finding, counted
from dataparallel.monitor.readings.nvml_query import XIDS
from dataparallel.monitor.readings.reading import DeviceReading
from dataparallel.monitor.run import RunInfo
from dataparallel.monitor.sample import Sample
from dataparallel.tools.monitor import units
from dataparallel.tools.monitor.history import History, Since, replicas_on
from dataparallel.tools.monitor.ranks import run_name

#: From here on a chip is hot, in degrees Celsius; most slow down a few degrees further up.
HOT = 85.0
#: A kernel that waits keeps a device busy, but draws little of the power that it may.
_BUSY, _LITTLE_POWER = 0.99, 0.35
_LONG = 10.0
#: The numbers that tell a part of a job from the others.
_PARTS = {"rank", "replica"}


def find_alerts(history: History, *, with_hints: bool = False) -> list[Finding]:
    """Return all errors and warnings, broken devices first. Called once per sample.

    Also what costs little, if it is wanted ``with_hints``.
    """
    sample = history.sample
    if sample is None:
        return []
    found: list[Finding] = []
    infos = [run.state.info for run in history.runs]
    for device, one in device_alerts(sample, infos, history.since):
        found.append(replace(one, about=device.device))
    states = [run.state for run in history.runs]
    for run in history.runs:
        if run.gone_for is not None:
            process, name = f"process {run.state.pid}", run_name(run.state, states)
            text = (
                f"{f'{name} ({process})' if name else f'the run of {process}'} has been gone for "
                f"{units.seconds_text(run.gone_for)}: it has ended or left its StepMonitor; what "
                "is shown of it is the last that it told"
            )
            # The end of a whole job is no fault.
            goes_on = run.state.job in history.changes
            one = Finding("run gone", text, "error" if goes_on else "info", about=name or process)
            found.append(one)
    for job, findings in history.changes.items():
        for one in findings:
            # A report of the same samples tells these, if they cost much.
            if one.severity != "info" or (with_hints and one.gain):
                parts = [f" {key} {one.numbers[key]:.0f}" for key in _PARTS & one.numbers.keys()]
                found.append(replace(one, about="".join([job, *sorted(parts)])))
    return sorted(found, key=lambda one: one.severity != "error")


def device_alerts(
    sample: Sample, infos: Sequence[RunInfo], since: Since
) -> Iterator[tuple[DeviceReading, Finding]]:
    """Yield the errors and warnings of a sample's devices; asked once per sample.

    ``infos`` are those of the runs that are watched.
    """
    busy = [one for one in sample.devices if (one.value("utilization") or 0.0) >= _BUSY]
    for device in sample.devices:
        if device.error is not None:
            text = f"{device.device} cannot be read: {device.error}"
            yield device, Finding("lost device", text, "error")
            continue
        own = [info for info in infos if replicas_on(device.device, device.uuid, info)]
        for one in _of_device(device, is_in_run=bool(own)):
            yield device, one
        # One that works alone waits for nobody: its kernels are small.
        together = any(info.world_size > 1 or len(set(info.devices)) > 1 for info in own)
        waits = together if own else len(busy) > 1
        seconds = since.seconds(
            f"busy waiting {device.identity}", waits and _draws_little(device), sample.elapsed
        )
        if seconds >= _LONG:
            power = units.watts_of_text(device.value("power"), device.value("power_limit"))
            text = (
                f"{device.device} is 100 % busy at {power} for {units.seconds_text(seconds)}: most "
                "likely it waits inside a collective; look for the device or process that is late"
            )
            yield device, Finding("busy waiting", text, "warning")


def _draws_little(device: DeviceReading) -> bool:
    """True if a device is busy and draws so little power as with a kernel that waits."""
    power, limit = device.value("power"), device.value("power_limit")
    if (device.value("utilization") or 0.0) < _BUSY or power is None or limit is None:
        return False
    return power < _LITTLE_POWER * limit


def _reported(device: DeviceReading) -> list[Finding]:
    """Return the faults that the device itself reports."""
    found = []
    last = device.value("last_xid")
    if last is not None:
        meaning = XIDS.get(int(last), "NVIDIA's list of XID errors tells what it is")
        text = (
            f"{device.device} has reported {counted(device.value('xid_errors') or 0, 'error')}, "
            f"the last of them XID {last:.0f}: {meaning}; `sudo dmesg` tells more"
        )
        found.append(Finding("device error", text, "warning"))
    if device.value("row_remapping_failed"):
        text = f"a row of the memory of {device.device} could not be replaced: have it replaced"
        found.append(Finding("memory errors", text, "error"))
    elif device.value("row_remapping_pending"):
        text = (
            f"rows of the memory of {device.device} wait to be replaced: reset it when it is idle "
            "(sudo nvidia-smi --gpu-reset)"
        )
        found.append(Finding("memory errors", text, "warning"))
    return found


def _of_device(device: DeviceReading, *, is_in_run: bool) -> list[Finding]:
    name = device.device
    found = []
    uncorrected = device.value("ecc_uncorrected_errors")
    if uncorrected:
        text = (
            f"{name} has {counted(uncorrected, 'uncorrected memory error')}: results may be "
            "wrong; reset the device, and have it replaced if there are more"
        )
        found.append(Finding("memory errors", text, "error"))
    found += _reported(device)
    temperature = device.value("temperature")
    heat = [f"{temperature:.0f} C"] if temperature is not None and temperature >= HOT else []
    if device.slowdowns:
        text = (
            f"{name} is slowed down ({', '.join([*device.slowdowns, *heat])}): look at its cooling "
            "and its power supply"
        )
        if is_in_run:
            text += "; dataparallel.balance gives it smaller chunks meanwhile"
        found.append(Finding("slowed device", text, "warning"))
    elif heat:
        text = f"{name} is hot ({heat[0]}): look at fans and air flow"
        found.append(Finding("hot device", text, "warning"))
    return found
