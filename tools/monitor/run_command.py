"""The command `monitor run`: run a program as it is, record what its ranks do, and report on it."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
from rich.console import Console

from dataparallel.monitor.attach import Answers, ask
from dataparallel.tools.monitor.alarm import STATUS, Alarm, tell
from dataparallel.tools.monitor.opening import open_sampler
from dataparallel.tools.monitor.recorder import SampleRecorder
from dataparallel.tools.monitor.recording import read_recording
from dataparallel.tools.monitor.report import make_report
from dataparallel.tools.monitor.report_command import print_report
from dataparallel.tools.monitor.run_watch import RunWatch
from dataparallel.tools.monitor.signals import handled

#: Imported by each Python that the program starts, before the one that there may be otherwise.
_SITE = """import importlib.machinery, importlib.util, os, sys
here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
if spec is not None:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
try:
    from dataparallel.monitor import unmodified
except ImportError as error:
    print(f"dataparallel: {sys.executable} cannot be watched: {error}", file=sys.stderr)
else:
    unmodified.begin()
"""
#: The seconds that the answers of runs may take.
_TIMEOUT = 1.0


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return the exit status of the program."""
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    if not words:
        raise ValueError("there is no program to run: write it behind --, as in -- python train.py")
    alarm = Alarm(arguments)
    path = arguments.record or Path(time.strftime("monitor-%Y%m%d-%H%M%S.jsonl"))
    with tempfile.TemporaryDirectory(prefix="dataparallel-") as folder:
        Path(folder, "sitecustomize.py").write_text(_SITE, encoding="utf-8")
        # As a shell would find it, and with the terminal, which sends Ctrl-C to both.
        places = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        program = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": places})
        watch = RunWatch(lambda: _of(program.pid, ask(None, _TIMEOUT)))
        was_seen = False
        with (
            open_sampler(arguments, watch) as sampler,
            SampleRecorder(path, about={"interval": sampler.interval}, tell=tell) as recorder,
            # Ctrl-C has reached the program from the terminal; other ends are handed on.
            handled([signal.SIGINT], lambda *_: None),
            handled([signal.SIGTERM, signal.SIGHUP], lambda number, _: program.send_signal(number)),
        ):
            for sample in sampler.samples():
                if sample.runs or was_seen:
                    recorder.record(sample)
                    alarm.look(sample)
                was_seen = was_seen or bool(sample.runs)
                if program.poll() is not None:
                    break
    status = program.wait()
    if was_seen:
        print_report(make_report(read_recording(path)), Console(stderr=True))
        tell(recorder.summary())
    else:
        path.unlink(missing_ok=True)
        tell(
            "the program ran, but nothing of it was seen: it has made no step of an optimizer of "
            "torch that was there for a second, or its Python has no dataparallel, or was called "
            "with -E, -I or -S"
        )
    alarm.close()
    if alarm.was_raised and arguments.exit_code:
        status = status or STATUS
    return status if status >= 0 else 128 - status


def _of(pid: int, answers: Answers) -> Answers:
    """Return the answers of a program and of all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        program = psutil.Process(pid)
        own = {pid, *(child.pid for child in program.children(recursive=True))}
        return answers._replace(states=tuple(one for one in answers.states if one.pid in own))
    return Answers((), ())
