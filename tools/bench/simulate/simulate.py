"""The command ``bench simulate``: ours beside its peers on a machine that need not be here.

The package is traced on virtual devices in dry mode, and the trace is played. Torch DDP and
``torch.nn.DataParallel`` are played from the trace of the bare module, as their sources order
their communication. No time is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from dataparallel.tools.bench import runner
from dataparallel.tools.bench.simulate import machine as machines
from dataparallel.tools.bench.simulate import peers, profile, record
from dataparallel.tools.bench.simulate.outcome import StepOutcome, conclude, write_timeline
from dataparallel.tools.bench.simulate.player import Instruction, Played, Player
from dataparallel.tools.bench.simulate.profile import Profile
from dataparallel.tools.bench.simulate.record import Model, StepTrace, Timing

#: By name on the command line: what is shown, and how ours is recorded.
OURS = {
    "ddp": "our DistributedDataParallel",
    "captured": "the same, capture=True",
    "spread": "the same, originals='spread'",
    "dp": "our DataParallel",
}
PEERS = {"torch-ddp": "torch DDP", "torch-dp": "torch.nn.DataParallel", "bare": "bare, whole batch"}


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    model = Model.of_size(arguments.parameters, arguments.layers)
    if arguments.measure:
        profile.write(arguments.profile or "-", profile.measure(model, arguments.measure))
        return 0
    machine = machines.load(arguments.machine)
    if max(arguments.gpus) > machine.devices:
        raise ValueError(
            f"{machine.name} has {machine.devices} devices, but --gpus asks for "
            f"{max(arguments.gpus)}"
        )
    wanted = {"forward": arguments.forward_ms, "backward": arguments.backward_ms}
    if len([each for each in wanted.values() if each is None]) == 1:
        raise ValueError("--forward-ms and --backward-ms go together, give both or neither")
    if arguments.profile and arguments.forward_ms:
        raise ValueError("either --profile or --forward-ms and --backward-ms tell the times")
    measured = profile.read(arguments.profile, model) if arguments.profile else None
    names = arguments.contestants
    turns = 1 + len(arguments.gpus) * len(names)
    outcomes: dict[int, list[StepOutcome]] = {}
    timelines: dict[str, Played] = {}
    with runner.progress(turns) as tell:
        tell("the bare module is recorded", 1)
        bare = record.record(model, 1, "bare", arguments.optimizer)
        seconds = {phase: each / 1e3 for phase, each in wanted.items() if each is not None}
        timing = Timing.of(machine, bare, seconds)
        if measured is not None:
            timing = measured.timing(timing, bare)
        for gpus in arguments.gpus:
            for name in names:
                tell(f"{name} on {gpus} devices", 1)
                played, held = _play(name, model, bare, timing, gpus, arguments.optimizer)
                shown = conclude(name, played, len(held), held)
                outcomes.setdefault(gpus, []).append(shown)
                if gpus == max(arguments.gpus):
                    timelines[name] = played
    if arguments.trace:
        write_timeline(arguments.trace, timelines, f"simulated on {machine.name}, not measured")
    size, parts = sum(bare.sizes), list[Table | Text | str]()
    for gpus, own in outcomes.items():
        parts += [_table(gpus, own, machine, size), *_exposed(own)]
    return runner.publish(
        runner.Report(
            parts,
            _notes(timing, model, size, _origin(wanted, measured), arguments.optimizer),
            {"machine": machine, "parameter_bytes": size, "outcomes": outcomes, "simulated": True},
        ),
        arguments,
    )


def _play(
    name: str, model: Model, bare: StepTrace, timing: Timing, gpus: int, optimizer: str
) -> tuple[Played, Sequence[int]]:
    """Play one contestant; return that, and what each device held before."""
    if name in OURS:
        recording = record.record(model, gpus, name, optimizer)
        tasks, held = timing.tasks(recording.entries), recording.held
    else:
        makers: dict[str, Callable[[StepTrace, Timing, int], list[Instruction]]] = {
            "torch-ddp": peers.ddp_tasks,
            "torch-dp": peers.data_parallel_tasks,
            "bare": peers.bare_tasks,
        }
        tasks = makers[name](bare, timing, gpus)
        held = list(bare.held) * (gpus if name == "torch-dp" else 1)
    return Player(timing.machine).play(tasks), held


def _table(
    gpus: int, outcomes: Sequence[StepOutcome], machine: machines.SimulatedMachine, size: int
) -> Table:
    """Return one line per contestant."""
    title = f"A step on {gpus} devices of {machine.name}, SIMULATED"
    table = runner.new_table(
        title,
        *("ms", "/ torch\nDDP", "busy", "exposed\nfirst", "exposed\nothers", "idle"),
        *("sent\nfirst", "got\nfirst", "sent\nothers", "got\nothers", "MiB\nfirst", "MiB\nothers"),
        "staging",
    )
    reference = next((each for each in outcomes if each.name == "torch-ddp"), None)
    for each in outcomes:
        first = each.devices[0]
        milli = [first.busy, first.exposed, each.worst("exposed"), first.idle]
        ports = [first.sent, first.received, each.worst("sent"), each.worst("received")]
        bytes_held = [first.memory, each.worst("memory"), max(first.staging, each.worst("staging"))]
        has_memory = each.name not in ("torch-dp", "bare")
        table.add_row(
            OURS.get(each.name) or PEERS[each.name],
            runner.milli(each.seconds),
            f"{each.seconds / reference.seconds:.3f}" if reference else "",
            *map(runner.milli, milli),
            *(f"{port / size:.2f}" for port in ports),
            *(f"{held / 2**20:.0f}" if has_memory else "" for held in bytes_held),
        )
    return table


def _exposed(outcomes: Sequence[StepOutcome]) -> list[str]:
    """Say where each contestant of ours leaves bytes exposed: before kernels of which phase."""
    return [
        f"{OURS[each.name]}: exposed on {where} before "
        + ", ".join(f"{phase} {runner.milli(seconds)} ms" for phase, seconds in parts)
        for each in outcomes
        if each.name in OURS
        for where, device in (("the first device", each.devices[0]), ("the last", each.devices[-1]))
        if (parts := sorted(device.exposed_by_phase.items()))
    ]


def _origin(wanted: dict[str, Any], measured: Profile | None) -> str:
    """Say where the times of kernels and host come from."""
    if measured is not None:
        milli = [f"{each * 1e3:.3g}" for each in (measured.forward, measured.backward)]
        return (
            f"scaled to {' and '.join(milli)} ms, measured on {measured.device}; other kernels by "
            "their bytes; the host as measured there, but for copies and events"
        )
    by_bytes = "other kernels by their bytes, the host by stated costs"
    if all(wanted.values()):
        times = f"{wanted['forward']:g} and {wanted['backward']:g} ms"
        return f"scaled, so that the bare module takes {times}; {by_bytes}"
    return f"by the roofline of the machine's file; {by_bytes}"


def _notes(timing: Timing, model: Model, size: int, origin: str, optimizer: str) -> list[str]:
    machine = timing.machine
    return [
        f"simulated, not measured: a trace of virtual devices, played on the file {machine.name}",
        f"{model.layers} transformer layers of width {model.width}, {size / 2**20:.0f} MiB of "
        f"fp32 parameters, {optimizer}; each device has its own batch",
        f"products of matrices: {origin}",
        "busy: a kernel runs on the first device; exposed: none runs, and bytes are on their way; "
        "idle: neither",
        "sent, got: bytes between devices, in multiples of the parameters'; others: the most; "
        "staging: of streams for copies",
        *(f"{topic}: {source}" for topic, source in machine.sources.items()),
    ]
