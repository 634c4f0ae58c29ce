"""What a user should look at: found in the samples, with what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dataparallel.monitor.advice import AdviceKind
from dataparallel.threads.timeline import Phase
from dataparallel.tools.monitor import units
from dataparallel.tools.monitor.history import History
from dataparallel.tools.monitor.reading import DeviceReading
from dataparallel.tools.monitor.run_history import RunHistory
from dataparallel.tools.monitor.run_summary import summarize_periods

#: From here on a chip is hot, in degrees Celsius; most slow down a few degrees further up.
HOT = 85.0
#: Memory is nearly full from here on.
NEARLY_FULL = 0.95
#: A kernel that waits keeps a device busy, but draws little of the power that it may.
_LITTLE_POWER = 0.35
_LONG = 10.0
_MUCH_WAITING = 0.15
_MUCH_INPUT = 0.20
#: What to do about a replica that the others wait for, by the kind of the advice.
_REMEDIES: dict[AdviceKind, str] = {
    "slow replica": "dataparallel.balance(model) gives it a smaller chunk",
    "slowed device": "its device is slowed down; remove the cause, or dataparallel.balance(model) "
    "gives it a smaller chunk",
    "uneven split": "it gets more samples; use a batch that divides by the number of replicas",
}


@dataclass(frozen=True)
class Alert:
    """Something to look at.

    Attributes:
        severity: ``"error"`` if something is broken, else ``"warning"``.
        text: What it is, and what to do.
    """

    severity: Literal["error", "warning"]
    text: str


def find_alerts(history: History) -> list[Alert]:
    """All that there is to look at, what is broken first. Called once per sample."""
    sample = history.sample
    if sample is None:
        return []
    found = []
    for device in sample.devices:
        if device.error is not None:
            found.append(Alert("error", f"{device.device} cannot be read: {device.error}"))
        else:
            found.extend(_of_device(device, history))
    found.extend(_of_run(history.run, _slowed(sample.devices, history.run)))
    return sorted(found, key=lambda alert: alert.severity != "error")


# --- devices -------------------------------------------------------------------------------------


def _of_device(device: DeviceReading, history: History) -> list[Alert]:
    name = device.device
    found = []
    uncorrected = device.value("ecc_uncorrected")
    if uncorrected:
        found.append(
            Alert(
                "error",
                f"{name} has {uncorrected:.0f} memory errors that were not corrected: results may "
                "be wrong; reset the device, and have it replaced if there are more",
            )
        )
    if device.throttle:
        remedy = "look at its cooling and its power limit"
        if _is_in_run(device, history.run):
            remedy += "; dataparallel.balance gives it smaller chunks meanwhile"
        found.append(
            Alert("warning", f"{name} is slowed down ({', '.join(device.throttle)}): {remedy}")
        )
    temperature = device.value("temperature")
    if temperature is not None and temperature >= HOT:
        found.append(
            Alert("warning", f"{name} is hot ({temperature:.0f} C): look at fans and air flow")
        )
    used, total = device.value("memory_used"), device.value("memory_total")
    if used is not None and total and used / total > NEARLY_FULL:
        found.append(
            Alert(
                "warning",
                f"the memory of {name} is nearly full ({units.percent_text(used / total)}): a "
                "little more, and it runs out; make the batch smaller, or checkpoint activations",
            )
        )
    found.extend(_busy_waiting(device, history))
    return found


def _busy_waiting(device: DeviceReading, history: History) -> list[Alert]:
    utilization, power = device.value("utilization"), device.value("power")
    limit = device.value("power_limit")
    waits = (
        utilization is not None
        and utilization >= 0.99
        and power is not None
        and limit is not None
        and power < _LITTLE_POWER * limit
    )
    seconds = history.held(f"busy waiting {device.device}", waits)
    if seconds < _LONG:
        return []
    return [
        Alert(
            "warning",
            f"{device.device} is 100 % busy at {units.watts_of_text(power, limit)} for "
            f"{units.seconds_text(seconds)}: most likely it waits inside a collective; look for "
            "the device or process that is late",
        )
    ]


def _slowed(devices: Sequence[DeviceReading], run: RunHistory) -> dict[str, str]:
    """Why devices of the run are slowed down, by the names that the run gives them."""
    if run.state is None:
        return {}
    info, found = run.state.info, {}
    for device in devices:
        if not device.throttle:
            continue
        for name, uuid in zip(info.devices, info.uuids, strict=True):
            if device.uuid == uuid if uuid is not None and device.uuid else device.device == name:
                found[name] = ", ".join(device.throttle)
    return found


def _is_in_run(device: DeviceReading, run: RunHistory) -> bool:
    state = run.state
    return state is not None and (
        device.device in state.info.devices
        or (device.uuid is not None and device.uuid in state.info.uuids)
    )


# --- the run -------------------------------------------------------------------------------------


def _of_run(run: RunHistory, slowed: Mapping[str, str]) -> list[Alert]:
    state = run.state
    if state is None:
        return []
    if run.gone_for is not None:
        return [
            Alert(
                "error",
                f"the run of process {state.pid} is gone since {units.seconds_text(run.gone_for)}: "
                "it has ended, or left its StepMonitor; what is shown of it is the last that it "
                "told",
            )
        ]
    return [*_stuck(run), *_straggler(run, slowed), *_loader(run)]


def _stuck(run: RunHistory) -> list[Alert]:
    state = run.state
    assert state is not None
    stuck: dict[tuple[Phase, str], list[str]] = {}
    for index, (phase, seconds) in enumerate(state.now):
        if seconds > _LONG:
            stuck.setdefault((phase, units.seconds_text(seconds)), []).append(str(index))
    found = []
    for (phase, duration), indices in stuck.items():
        who = "replica {} has" if len(indices) == 1 else "replicas {} have"
        text = f"{who.format(', '.join(indices))} been in '{phase}' for {duration}"
        if phase == "reduce across processes":
            text += ": another process is late or gone; look at what that one does"
        elif phase in ("idle", "input"):
            text += ": no step is under way; the run loads data, evaluates or saves, or has stopped"
        found.append(Alert("warning", text))
    return found


def _straggler(run: RunHistory, slowed: Mapping[str, str]) -> list[Alert]:
    """Told if it is also what the report of the same samples would have changed first."""
    period = run.period
    if period is None or not period.states[-1].num_steps:
        return []
    summary = summarize_periods([period], slowed)
    straggler, kind = summary.straggler, summary.advice.kind
    if straggler is None or not summary.step_seconds:
        return []
    if kind == "moving straggler":
        waiting = straggler.waste / summary.step_seconds
        text = (
            f"some replica holds up the others {units.percent_text(waiting)} of the time, but each "
            "time another one: look for samples that cost unequally much, and for other work on "
            "the host"
        )
    elif kind in _REMEDIES:
        slow = summary.replicas[straggler.index]
        # What another one waits for besides, such as the optimizer, is not this one's fault.
        waits = {
            one.index: min(slow.compute - one.compute, one.seconds.get("idle", 0.0))
            for one in summary.replicas
            if one.index != slow.index and one.compute > 0
        }
        index = max(waits, key=waits.__getitem__)
        waiting = waits[index] / summary.step_seconds
        text = (
            f"replica {slow.index} on {slow.device} holds up the others: replica {index} waits "
            f"{units.percent_text(waiting)} of the time for it; {_REMEDIES[kind]}"
        )
    else:
        return []
    return [Alert("warning", text)] if waiting > _MUCH_WAITING else []


def _loader(run: RunHistory) -> list[Alert]:
    shares = [share.get("input", 0.0) for share in run.shares]
    share = sum(shares) / len(shares) if shares else 0.0
    if share <= _MUCH_INPUT:
        return []
    return [
        Alert(
            "warning",
            f"the loader takes {units.percent_text(share)} of each step: give it more workers "
            "(num_workers), pinned memory, or less to do",
        )
    ]
