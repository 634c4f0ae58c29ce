"""A training under torchrun to which things happen; run as a script it is one of its processes.

It does what a user's script would: it makes the process group, loads what was saved, trains, and
saves. After an error it loads again, in the same process; if that fails too, it ends, and torchrun
starts all processes anew. Its events go into a journal in its folder, a JSON object per line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dataparallel as dp
from dataparallel import checkpoint
from dataparallel.comm.errors import CollectiveError, CollectiveTimeout
from dataparallel.extras.checkpoint import CheckpointError

ROOT = pathlib.Path(__file__).parents[2]
# Seconds until a process that waits for more of them gives up.
_LONGEST_WAIT = 300.0


class InjectedError(RuntimeError):
    """The exception of the fault "raise"."""


#: The errors after which the training goes on, in the same process.
SURVIVED = (CollectiveError, CollectiveTimeout, CheckpointError, InjectedError)


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, once: what it is, in which rank, at which step.

    Attributes:
        kind: "raise", "exit", "kill" (SIGKILL), or "stop" (SIGSTOP).
        seconds: How long a stop lasts.
    """

    rank: int
    step: int
    kind: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} {self.rank} {self.step}"

    def happen(self) -> None:
        """Let it happen."""
        if self.kind == "raise":
            raise InjectedError(f"injected in rank {self.rank} at step {self.step}")
        if self.kind == "exit":
            os._exit(1)
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "stop":
            again = f"sleep {self.seconds}; kill -CONT {os.getpid()}"
            quiet: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            subprocess.run(["setsid", "--fork", "sh", "-c", again], check=True, **quiet)
            os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True)
class Settings:
    """The settings of a training.

    Attributes:
        folder: The place of everything that stays: the journal, the generations on the disk.
        steps: How many steps the training has.
        plan: The faults of the run.
        memory: The place of every step's save: a folder in memory. Default: nowhere.
        pace: Seconds that a step takes at least; the processor waits, as for an accelerator.
        disk_every: Steps between two generations on the disk.
        timeout: Seconds that a process waits for the others.
        needed: With fewer processes the second half is not begun; torchrun ends the wait.
    """

    folder: str
    steps: int
    plan: list[Fault] = field(default_factory=list)
    memory: str = ""
    pace: float = 0.0
    disk_every: int = 3
    timeout: float = 20.0
    needed: int = 1


def journal(folder: str | pathlib.Path) -> list[dict[str, Any]]:
    """Return the lines that the processes have written so far, also while they write."""
    path = pathlib.Path(folder, "journal")
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Training:
    """The training of one process, and what happens to it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._rank = dist.get_rank()
        self._disk = os.path.join(settings.folder, "saved")
        torch.manual_seed(0)
        # Its dropout and its statistics have to go on where they were, too.
        layers = nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2)
        net = nn.Sequential(*layers, nn.Linear(128, 8))
        self._model = dp.DistributedDataParallel(net, ["cpu", "cpu"], timeout=settings.timeout)
        torch.manual_seed(1 + self._rank)
        self._optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, settings.steps)
        self._state = self._model, self._optimizer, schedule

    def run(self) -> None:
        """Train up to the last step, whatever happens."""
        settings = self._settings
        step = self._load("start")
        failed = -1
        while step < settings.steps:
            if step == settings.steps // 2 and dist.get_world_size() < settings.needed:
                time.sleep(_LONGEST_WAIT)
            begin = time.monotonic()
            try:
                with dp.telling_failures():
                    self._step(step)
                    self._save(step + 1)
            except SURVIVED as error:
                self._note("error", step=step, text=f"{type(error).__name__}: {error}"[:2000])
                if step == failed:
                    # An error that returns is left to torchrun, as is an error in a load.
                    raise
                failed = step
                step = self._load("recovered")
                continue
            time.sleep(max(0.0, settings.pace - (time.monotonic() - begin)))
            if self._rank == 0:
                self._note("step", step=step)
            step += 1
        state = b"".join(each.numpy().tobytes() for each in self._model.state_dict().values())
        self._note("end", step=step, digest=hashlib.sha256(state).hexdigest())
        checkpoint.close()

    def _step(self, step: int) -> None:
        """A fault happens before the forward, in the backward, or after the step."""
        place = step % 3
        if place == 0:
            self._inject(step)
        generator = torch.Generator().manual_seed(1000 * step + self._rank)
        x = torch.randn(32, 32, generator=generator)
        output = self._model(x)
        if place == 1:
            output.register_hook(lambda grad: self._inject(step))
        self._optimizer.zero_grad()
        nn.functional.mse_loss(output, x[:, :8].sin()).backward()
        self._optimizer.step()
        self._state[2].step()
        if place == 2:
            self._inject(step)

    def _inject(self, step: int) -> None:
        """Let happen what is planned and has not happened yet, in a process of before."""
        happened = pathlib.Path(self._settings.folder, "happened")
        done = happened.read_text().splitlines() if happened.exists() else []
        for fault in self._settings.plan:
            if (fault.rank, fault.step) == (self._rank, step) and str(fault) not in done:
                with open(happened, "ab", buffering=0) as file:
                    file.write(f"{fault}\n".encode())
                fault.happen()

    def _save(self, step: int) -> None:
        settings = self._settings
        options: dict[str, Any] = {"step": step, "keep": 2, "timeout": settings.timeout}
        if settings.memory:
            checkpoint.save(settings.memory, *self._state, **options)
        if step % settings.disk_every == 0:
            beside = bool(settings.memory)
            checkpoint.save(self._disk, *self._state, **options, asynchronous=beside)

    def _load(self, event: str) -> int:
        settings = self._settings
        with contextlib.suppress(*SURVIVED):
            checkpoint.close()
        for place in filter(None, [settings.memory, self._disk]):
            # In memory is the newest, if anything is.
            options: dict[str, Any] = {"missing_ok": True, "timeout": settings.timeout}
            found = checkpoint.load(place, *self._state, **options)
            if found.number is not None:
                break
        self._note(event, step=found.step)
        return found.step

    def _note(self, event: str, **fields: Any) -> None:
        """Write a line into the journal, which outlives the process."""
        restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        line = {"event": event, "rank": self._rank, "restart": restart, "time": time.time()}
        with open(pathlib.Path(self._settings.folder, "journal"), "ab", buffering=0) as file:
            file.write(json.dumps(line | fields).encode() + b"\n")


def train(rank: int, world_size: int, settings: Settings) -> None:
    """The training in a process that has a group already, without faults."""
    Training(settings).run()


@contextlib.contextmanager
def started(
    command: Sequence[str], log: pathlib.Path, cwd: pathlib.Path = ROOT, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A command under way, which is ended; torchrun, when it is told to, ends its processes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), *sys.path]))
    # The processes are not to be told what this one has found out.
    environment.pop("GLOO_SOCKET_IFNAME", None)
    quiet: Any = {"stdin": subprocess.DEVNULL, "start_new_session": True}
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment | variables, cwd=cwd, **quiet
        )
    try:
        yield process
    finally:
        # It waits for half a minute for a process that is stopped.
        for number, seconds in ((signal.SIGTERM, 40), (signal.SIGKILL, 5)):
            if process.poll() is None:
                os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)


def torchrun(settings: Settings, *options: str) -> list[str]:
    """Return the command that starts a training."""
    module = ["-m", "tests.faults.training", json.dumps(asdict(settings))]
    return [sys.executable, "-m", "torch.distributed.run", *options, *module]


def main() -> None:
    """Train; the argument is what the settings are."""
    torch.set_num_threads(1)
    fields = json.loads(sys.argv[1])
    settings = Settings(**{**fields, "plan": [Fault(**each) for each in fields["plan"]]})
    dp.init_process_group("gloo", timeout=settings.timeout)
    Training(settings).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
