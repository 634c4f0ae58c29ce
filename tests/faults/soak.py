"""Trains for half an hour while something goes wrong every few seconds.

``python -m tests.faults.soak --minutes 30`` starts a training of two processes by torchrun, lets
them be killed, stopped and cut off, and raise, and shows how it gets on. Nobody helps it. Before,
the same training runs without faults: the weights of both must be the same, bit for bit, and its
first steps tell how long a step takes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from tests.faults import partition
from tests.faults.injector import Fault, Kind
from tests.faults.soak_journal import PACED, Journal, Summary
from tests.faults.soak_worker import Settings

PROCESSES = 2

#: Share of the time that is planned for steps; the rest is for what faults cost.
_SHARE = 0.85

#: Seconds between two lines of progress.
_REPORT = 10.0

_ROOT = pathlib.Path(__file__).parents[2]


def make_plan(steps: int, count: int, seed: int, *, networks: bool) -> list[Fault]:
    """Faults of all kinds in turn, at random steps of equal parts of the training.

    Args:
        steps: How many steps the training has.
        count: How many faults.
        seed: Of the random places.
        networks: Whether the network can be cut.
    """
    draw = random.Random(seed)
    kinds: list[Kind] = ["kill", "raise", "stop", "exit"]
    if networks:
        kinds.insert(3, "loopback")
    plan = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        step = (number * steps + draw.randrange(max(1, steps - steps // 4))) // count
        # Shorter than the time limit of a wait: whoever is stopped comes back.
        seconds = draw.uniform(1.0, 8.0) if kind in ("stop", "loopback") else None
        plan.append(Fault(draw.randrange(PROCESSES), step, kind, seconds))
    return plan


def command(folder: str, *, networks: bool) -> list[str]:
    """What starts the training, in a network of its own if there are any."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={PROCESSES}"]
    torchrun += ["--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    torchrun += ["--max-restarts=1000000", "--monitor-interval=0.1"]
    torchrun += ["-m", "tests.faults.soak_worker", folder]
    if not networks:
        return torchrun
    return ["unshare", "-rn", "sh", "-c", 'ip link set dev lo up; exec "$@"', "sh", *torchrun]


@contextlib.contextmanager
def training(settings: Settings, *, networks: bool) -> Iterator[subprocess.Popen[bytes]]:
    """A training under way; all its processes are ended in any case."""
    settings.write()
    environment = dict(os.environ, OMP_NUM_THREADS="1", RES_OPTIONS="timeout:1 attempts:1")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), *sys.path]))
    with open(pathlib.Path(settings.folder, "log"), "wb") as log:
        process = subprocess.Popen(
            command(settings.folder, networks=networks),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            cwd=_ROOT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        _kill_workers(settings.folder)


def _kill_workers(folder: str) -> None:
    """End processes that torchrun has left; each is in a session of its own."""
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"tests.faults.soak_worker" in words and folder.encode() in words:
                os.kill(int(entry.name), signal.SIGKILL)


def watch(process: subprocess.Popen[bytes], journal: Journal, limit: float, steps: int) -> None:
    """Show how the training gets on, until it has ended."""
    begin = last = time.monotonic()
    while process.poll() is None:
        time.sleep(0.2)
        now = time.monotonic()
        if now - begin > limit:
            raise TimeoutError(f"the training has not ended after {limit:.0f} s")
        if now - last >= _REPORT:
            last = now
            print(f"{now - begin:5.0f} s  {journal.summary(steps).line()}", flush=True)
    if process.returncode:
        raise RuntimeError(f"torchrun ended with exit code {process.returncode}")


def soak(
    settings: Settings, limit: float, *, networks: bool, typical: float | None = None
) -> Summary:
    """One training with what is planned; returns what happened."""
    journal = Journal(settings.folder, typical)
    with training(settings, networks=networks) as process:
        try:
            watch(process, journal, limit, settings.steps)
        except (TimeoutError, RuntimeError):
            log = pathlib.Path(settings.folder, "log").read_text(errors="replace")
            print(f"--- the end of {settings.folder}/log\n{log[-6000:]}", file=sys.stderr)
            raise
    return journal.summary(settings.steps)


def run(options: argparse.Namespace) -> int:
    """The training without faults, the soak, and the comparison.

    Returns:
        0 if all is well, 1 if something is wrong, 2 if it was only too slow.
    """
    reason = partition.obstacle()
    networks = reason is None
    if reason:
        print(f"without partitions: {reason}")
    steps = max(10, int(options.minutes * 60 * _SHARE / options.pace))
    count = max(4, round(options.minutes / 60 * options.per_hour))
    plan = make_plan(steps, count, options.seed, networks=networks)
    with contextlib.ExitStack() as stack:
        folder = options.folder or stack.enter_context(tempfile.TemporaryDirectory())
        # Where there is no folder in memory, another one does, and takes longer.
        shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
        memory = tempfile.mkdtemp(prefix="soak-", dir=shared)
        stack.callback(shutil.rmtree, memory, ignore_errors=True)
        faulty, quiet = (os.path.join(folder, name) for name in ("faults", "quiet"))
        for name in (faulty, quiet):
            os.makedirs(name)
        outside = partition.network() if networks else ""
        settings = Settings(faulty, memory, steps, options.pace, outside=outside, plan=plan)
        limit = 60 * (2 * options.minutes + 3)
        print(f"{steps} steps without faults, the first {PACED} at the pace", flush=True)
        undisturbed = Settings(quiet, "", steps, options.pace, paced=PACED)
        reference = soak(undisturbed, limit, networks=False)
        print(f"{count} faults in {steps} steps of at least {options.pace} s", flush=True)
        summary = soak(settings, limit, networks=networks, typical=reference.typical)
    text = summary.report(reference, plan, options)
    print(text)
    if options.write:
        options.write.write_text(text)
    if not summary.is_right(reference, plan):
        return 1
    return 0 if summary.is_fast() else 2


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default: 30)")
    parser.add_argument("--per-hour", type=float, default=150.0, help="faults per hour")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds of a step (default: 0.1)")
    parser.add_argument("--seed", type=int, default=0, help="of the places of the faults")
    parser.add_argument("--folder", help="keep the files here (default: a temporary folder)")
    parser.add_argument("--write", type=pathlib.Path, help="write the result to this file")
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    # Ended by force, it still ends the training.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
