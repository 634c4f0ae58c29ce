"""The command `monitor record`: write samples into a file."""

from __future__ import annotations

import argparse
import signal

from dataparallel.monitor.sampler import Sampler
from dataparallel.tools.monitor.alarm import STATUS, Alarm, tell
from dataparallel.tools.monitor.opening import SOURCES, open_sampler
from dataparallel.tools.monitor.recorder import SampleRecorder
from dataparallel.tools.monitor.signals import handled


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    if arguments.source not in SOURCES:
        raise ValueError(
            f"`record` takes readings from {', '.join(SOURCES)}, but got --source "
            f"{arguments.source}; to have a recording twice, copy its files"
        )
    alarm = Alarm(arguments)
    with open_sampler(arguments) as sampler:
        recorder = SampleRecorder(
            arguments.file,
            max_bytes=arguments.max_size,
            keep=arguments.keep,
            about={"interval": sampler.interval, "source": arguments.source},
            tell=tell,
        )

        def stop(number: int, frame: object) -> None:
            # Between two samples; a second Ctrl-C ends it at once.
            sampler.stop()
            signal.signal(signal.SIGINT, signal.default_int_handler)

        with recorder, handled([signal.SIGINT, signal.SIGTERM], stop):
            if arguments.duration is None:
                tell(f"recording to {arguments.file}; Ctrl-C ends it")
            why = _record(sampler, recorder, alarm, arguments.duration)
        print(f"{recorder.summary()}; {why}")
    alarm.close()
    if recorder.num_lost:
        return 1
    return STATUS if alarm.was_raised and arguments.exit_code else 0


def _record(
    sampler: Sampler, recorder: SampleRecorder, alarm: Alarm, duration: float | None
) -> str:
    """Record until there is a reason to end, and return it in words."""
    told: set[str] = set()
    for sample in sampler.samples():
        for note in sample.notes:
            if note not in told:
                told.add(note)
                tell(note)
        recorder.record(sample)
        alarm.look(sample)
        # Half of an interval, since no sample comes at its time exactly.
        if duration is not None and sample.elapsed + sampler.interval / 2 > duration:
            return "the time is over"
        if sampler.is_over():
            return "the process of the run has ended"
    return "it was stopped"
