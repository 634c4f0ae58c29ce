"""What the examples share: options, progress, checkpoints."""

from __future__ import annotations

import argparse
import os
import pathlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import load, save
from torch import Tensor, nn

import dataparallel
from dataparallel.monitor import StepMonitor, StepRecord

console = Console(highlight=False, soft_wrap=True)


# --- options ---------------------------------------------------------------------------------


def option_parser(
    script: str,
    description: str,
    *,
    epochs: int,
    batch_size: int,
    lr: float,
    processes: bool = False,
) -> argparse.ArgumentParser:
    """A parser with the options that all examples have.

    Args:
        script: Name of the script, without ``.py``.
        description: Stands at the top of ``--help``.
        epochs: Default of ``--epochs``.
        batch_size: Default of ``--batch-size``.
        lr: Default of ``--lr``.
        processes: Whether the script can run under torchrun.
    """
    launcher = f"torchrun --nproc-per-node 2 examples/{script}.py"
    more = f"\n  {launcher}\n  {launcher} --devices cpu,cpu,cpu" if processes else ""
    parser = argparse.ArgumentParser(
        description=description,
        epilog=f"""examples:
  python examples/{script}.py
  python examples/{script}.py --devices cpu,cpu,cpu,cpu --epochs 2
  python examples/{script}.py --devices cuda:0,cuda:1 --batch-size 1024
  python examples/{script}.py --devices virtual:0,virtual:1   (accelerators in host memory)"""
        + more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--devices", default=None, metavar="LIST",
        help="one device per replica; default: all accelerators, of which each process of "
        "torchrun takes its part, else cpu,cpu")  # fmt: skip
    add("--epochs", type=_count, default=epochs, metavar="N", help=f"default: {epochs}")
    add("--batch-size", type=_count, default=batch_size, metavar="N",
        help=f"samples per step, over all replicas; default: {batch_size}")  # fmt: skip
    add("--lr", type=float, default=lr, metavar="X", help=f"peak learning rate; default: {lr}")
    add("--seed", type=int, default=0, metavar="N", help="default: 0")
    add("--output", type=pathlib.Path, default=pathlib.Path("out", script.removeprefix("train_")),
        metavar="DIR", help="where checkpoint and plot go; default: %(default)s")  # fmt: skip
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def choose_devices(names: str | None) -> list[str]:
    """The replicas' devices: those named, or this process's accelerators, or the CPU twice."""
    if names is not None:
        chosen = [name.strip() for name in names.split(",") if name.strip()]
        virtual = [name for name in chosen if name.startswith("virtual:")]
        if virtual:
            import dataparallel.virtual

            dataparallel.virtual.enable(1 + max(int(name.split(":")[1]) for name in virtual))
        return chosen
    return [str(device) for device in share_of_accelerators()] or ["cpu", "cpu"]


def share_of_accelerators() -> tuple[torch.device, ...]:
    """The accelerators of this process: all, or under torchrun its part of them.

    Where there are more processes than accelerators, they take them in turn.
    """
    devices = dataparallel.accelerators()
    if not devices or not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        return devices
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if size <= len(devices):
        begin, end = len(devices) * rank // size, len(devices) * (rank + 1) // size
    else:
        begin, end = rank % len(devices), rank % len(devices) + 1
        if rank == 0:
            console.print(
                f"{size} processes take {len(devices)} accelerators in turn; NCCL refuses to share "
                f"a GPU, so for GPUs start at most {len(devices)}"
            )
    # What is queued for no device in particular goes to the current one, which is the first of the
    # machine in every process.
    torch.accelerator.set_device_index(devices[begin].index)
    return devices[begin:end]


def join_processes() -> tuple[int, int]:
    """Rank of this process and number of processes, which torchrun sets; 0 and 1 without it."""
    if "WORLD_SIZE" not in os.environ:
        return 0, 1
    if not dist.is_initialized():
        dataparallel.init_process_group()
        if dist.get_rank() > 0:
            console.quiet = True
    return dist.get_rank(), dist.get_world_size()


# --- progress --------------------------------------------------------------------------------


class ReplicaClock:
    """Seconds that each replica spent in its last forward.

    Args:
        module: The module that is wrapped; its hooks run once per replica.
    """

    def __init__(self, module: nn.Module) -> None:
        self.seconds: dict[int, float] = {}
        self._begin = threading.local()
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._begin.time = time.perf_counter()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        replica = dataparallel.current_replica()
        index = replica.index if replica else 0
        self.seconds[index] = time.perf_counter() - self._begin.time

    def __getstate__(self) -> dict[str, Any]:
        # The hooks are copied along with the module, and what is thread-local cannot be.
        return {"seconds": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.seconds = state["seconds"]
        self._begin = threading.local()


class TrainingProgress:
    """A progress bar with epoch, loss, samples per second and the time of each replica.

    Use it as a context manager around the training loop.

    Args:
        epochs: Number of epochs.
        steps_per_epoch: Training steps in each.
        clock: Measures the replicas.
    """

    def __init__(self, epochs: int, steps_per_epoch: int, clock: ReplicaClock) -> None:
        self.losses: list[float] = []
        self._epochs, self._steps_per_epoch = epochs, steps_per_epoch
        self._clock = clock
        self._recent: deque[tuple[float, int]] = deque(maxlen=20)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[rates]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task(
            f"epoch 1/{epochs}", total=epochs * steps_per_epoch, rates=""
        )

    def __enter__(self) -> TrainingProgress:
        self._progress.start()
        self._recent.append((time.perf_counter(), 0))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def step(self, loss: Tensor, samples: int) -> None:
        """Count a training step."""
        self.losses.append(loss.item())
        self._recent.append((time.perf_counter(), samples))
        epoch = min(self._epochs, 1 + len(self.losses) // self._steps_per_epoch)
        self._progress.update(
            self._task,
            advance=1,
            description=f"epoch {epoch}/{self._epochs}",
            rates=f"loss {loss.item():.3f}  {self.samples_per_second():,.0f} samples/s  "
            f"forward {self._replicas()} ms",
        )

    def samples_per_second(self) -> float:
        """Over the last steps."""
        (begin, _), (end, _) = self._recent[0], self._recent[-1]
        return sum(samples for _, samples in list(self._recent)[1:]) / (end - begin)

    def _replicas(self) -> str:
        seconds = [self._clock.seconds[i] for i in sorted(self._clock.seconds)]
        shown = " | ".join(f"{each * 1e3:.1f}" for each in seconds[:4])
        return shown + (" | ..." if len(seconds) > 4 else "")


# --- checkpoints -----------------------------------------------------------------------------


def typical_step(monitor: StepMonitor) -> StepRecord:
    """The training step of median length."""
    steps = sorted(
        (step for step in monitor.steps if step.kind == "train"), key=lambda step: step.seconds
    )
    return steps[len(steps) // 2]


def save_checkpoint(path: pathlib.Path, model: nn.Module) -> None:
    """Write the weights, so that at no time there is half a file under this name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}
    temporary = path.with_name(path.name + ".part")
    with open(temporary, "wb") as file:
        file.write(save(state))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_checkpoint(path: pathlib.Path, module: nn.Module) -> None:
    """Load the weights into ``module``, on the device where it is."""
    module.load_state_dict(load(path.read_bytes()))


def describe_run(module: nn.Module, devices: Sequence[str], num_processes: int = 1) -> None:
    """Print what is trained where; under torchrun each process says it of itself."""
    parameters = sum(parameter.numel() for parameter in module.parameters())
    rank = f"rank {dist.get_rank()} of {num_processes}: " if num_processes > 1 else ""
    where = f"one replica on each of: {', '.join(devices)}"
    print(f"{rank}{parameters:,} parameters, {where}", flush=True)
