"""Reducing gradients, and its overlap with backward, beside torch DDP."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import common
from benchmarks.common import Line, compare
from dataparallel.tools.arguments import Parser, above_zero, names_in
from dataparallel.tools.bench import runner
from dataparallel.tools.bench.cases import CASES, criterion, whole_batch
from dataparallel.tools.bench.harness import Contestant, Outcome, Task, largest, plan_contestants
from dataparallel.tools.bench.seat import Seat

#: Shapes of parameters by name. Overhead per parameter; bytes; both, as a transformer has them.
GRADIENT_SETS: dict[str, tuple[tuple[int, ...], ...]] = {
    "small": ((64, 64), (64,)) * 201,
    "large": ((1024, 1024),) * 8,
    "mixed": ((768, 256), (768,), (256, 256), (256,), (256,), (1024, 256), (1024,)) * 8,
}
#: Largest relative error of a gradient's element that counts as rounding.
TOLERANCE = 1e-5
#: The parts of a backward in a wrapper's own timers. The computation is the first. The
#: communication goes from the first bucket's launch to the last one's end. The rest is the
#: communication that computation does not hide.
PARTS = ("computation", "communication", "exposed")

_LAYOUTS = "1x1,1x2,1x4,2x1,2x2,2x4"


# --- the command -------------------------------------------------------------------------------


def build_parser() -> Parser:
    """Return the options."""
    parser = common.new_parser(
        "reducer",
        "Time of reducing gradients, and its overlap with backward, beside torch DDP.",
        [
            "",
            "--gradients small --layouts 1x1,1x2 --overlap none",
            "--layouts 2x1 --overlap mlp,transformer --rounds 3",
            "--device virtual --layouts 1x2",
            "--bar 1.2 --json results.json",
        ],
    )
    add = parser.add_argument
    sets = list(GRADIENT_SETS)
    add("--gradients", type=names_in(sets), default=sets, metavar="LIST",
        help="sets of parameters: small (402), large (8 x 4 MiB), mixed; default: all")  # fmt: skip
    add("--layouts", type=layouts, default=layouts(_LAYOUTS), metavar="LIST",
        help="processes x replicas of ours; torch DDP gets one process per replica; "
        f"default: {_LAYOUTS}")  # fmt: skip
    add("--device", default="cpu", metavar="TYPE",
        help="all replicas on the CPU (default), or each on an own device of a type; torch DDP "
        "takes no part on virtual ones")  # fmt: skip
    add("--overlap", type=names_in(("none", *CASES)), default=["mlp"], metavar="LIST",
        help=f"models for the overlap: {','.join(CASES)}; or none; default: mlp")  # fmt: skip
    add("--bucket-cap-mb", type=above_zero, default=None, metavar="MIB",
        help="size limit of a bucket, ours and the peer's; default: each one's own")  # fmt: skip
    common.add_bar(parser)
    return parser


def layouts(text: str) -> list[str]:
    """Convert a list such as ``1x2,2x1`` from the command line."""
    found = [word.strip() for word in text.split(",")]
    for word in found:
        if not re.fullmatch(r"[1-9]\d?x[1-9]\d?", word):
            raise argparse.ArgumentTypeError(
                f"{word!r} is no layout; say processes x replicas, for example 1x2,2x1"
            )
    return list(dict.fromkeys(found))


def places(layout: str, device: str) -> list[list[str]]:
    """Return the device of each replica of each process; they share the CPU and nothing else."""
    processes, replicas = map(int, layout.split("x"))
    names = ["cpu" if device == "cpu" else f"{device}:{i}" for i in range(processes * replicas)]
    return [names[i : i + replicas] for i in range(0, len(names), replicas)]


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    plans = {layout: _plan(layout, arguments) for layout in arguments.layouts}
    return runner.run(arguments, plans, lambda measured: _conclude(measured, arguments))


def _plan(layout: str, arguments: argparse.Namespace) -> tuple[Contestant, ...]:
    models = tuple(name for name in arguments.overlap if name != "none")
    task = ReducerTask(
        "ours",
        (),
        gradients=tuple(arguments.gradients),
        # One replica in one process has nothing to reduce.
        models=models if layout != "1x1" else (),
        bucket_cap_mb=arguments.bucket_cap_mb,
    )
    peers = ["bare"] if arguments.device == "virtual" else ["ddp", "bare"]
    return plan_contestants(task, places(layout, arguments.device), peers)


def _conclude(
    measured: Mapping[str, Sequence[Outcome]], arguments: argparse.Namespace
) -> runner.Report:
    lines = [
        _line(phase, layout, outcomes)
        for layout, outcomes in measured.items()
        for phase in outcomes[0].seconds
    ]
    order = list(dict.fromkeys(line.section for line in lines))
    lines.sort(key=lambda line: order.index(line.section))
    notes = [
        f"PxR: P processes of R replicas; torch DDP: P*R processes; on {arguments.device}",
        "bare: one replica, no wrapper; torch DDP's gradients are views of buckets, ours are with "
        "several processes",
        "overlap, by the wrappers' own timers: communication from the first bucket's launch to the",
        "last one's end (in one process the sums over replicas); exposed: what computation does "
        "not hide",
    ]
    title = "reducing gradients: one backward of a model that computes next to nothing"
    return common.report(title, lines, arguments, notes)


def _line(phase: str, layout: str, outcomes: Sequence[Outcome]) -> Line:
    seconds = {one.contestant.name: one.seconds[phase] for one in outcomes if phase in one.seconds}
    known = phase in GRADIENT_SETS
    return compare(
        phase, layout, seconds, not known or common.error_of(outcomes, phase) <= TOLERANCE
    )


# --- a worker process --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReducerTask(Task):
    """The sets of gradients, and the models whose overlap is measured."""

    gradients: tuple[str, ...]
    models: tuple[str, ...] = ()
    bucket_cap_mb: float | None = None

    def begin(self) -> Reduction:
        """Make the object that measures, in the worker process."""
        return Reduction(self)


class KnownGradients(nn.Module):
    """A module that computes next to nothing: samples ``(N, 1)`` to ``(N,)``, with known gradients.

    Each parameter, which is zero, has a node of its own in the graph. So gradients arrive one by
    one, the last parameter's first, and each in memory of its own.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def forward(self, samples: Tensor) -> Tensor:
        scale = samples.mean()
        total = torch.stack([(weight * scale).sum() for weight in self.weights]).sum()
        return samples.squeeze(1) * total


def known_gradient(samples: Tensor, replicas: int) -> float:
    """Every element of every gradient of the mean output over all samples, ``(N, 1)``."""
    means = torch.stack([chunk.mean() for chunk in samples.chunk(replicas)])
    return means.square().mean().item()


class Reduction:
    """Models whose backward is nearly all reduction, and others, made ready for measuring.

    Each replica gets one sample of the former, and each another, so that their gradients differ.
    """

    def __init__(self, task: ReducerTask) -> None:
        self.task = task
        self.seat = Seat(task)
        whole = torch.arange(1.0, task.replicas + 1.0).unsqueeze(1)
        # The bare module sees all samples at once.
        self.expected = known_gradient(whole, 1 if task.kind == "bare" else task.replicas)
        self.samples = self.seat.part(whole)
        self.modules = {
            name: KnownGradients(GRADIENT_SETS[name]).to(self.seat.device)
            for name in task.gradients
        }
        self.models = {
            name: self.seat.wrap(module, task.bucket_cap_mb)
            for name, module in self.modules.items()
        }
        # The bare module has no communication.
        of_overlap = () if task.kind == "bare" else task.models
        self.overlaps = {name: self._new_overlap(name) for name in of_overlap}

    def _new_overlap(self, name: str) -> tuple[nn.Module, Tensor, Tensor]:
        torch.manual_seed(0)
        inputs, targets = CASES[name].data(whole_batch(name, self.task.replicas))
        module = CASES[name].build().to(self.seat.device)
        model = self.seat.wrap(module, self.task.bucket_cap_mb)
        # By default a DDP times every hundredth iteration after the first ten.
        model._set_ddp_runtime_logging_sample_rate(1)
        return model, self.seat.part(inputs), self.seat.part(targets)

    def check(self, steps: int) -> dict[str, Any]:
        """By set, the largest relative error of an element of a gradient in some rounds."""
        errors = {
            name: largest([self._error_of_one_round(name) for _ in range(steps)])
            for name in self.models
        }
        for name in self.overlaps:
            self._train(name, steps)
        return {"errors": errors}

    def _error_of_one_round(self, name: str) -> float:
        self._round(name)
        errors = []
        for parameter in self.modules[name].parameters():
            if parameter.grad is None:
                return float("inf")
            errors.append((parameter.grad - self.expected).abs().max())
        return torch.stack(errors).max().item() / self.expected

    def run(self, steps: int) -> dict[str, list[float]]:
        """By set, seconds of each backward; by model and part, the mean over its backwards."""
        seconds = {name: [self._round(name) for _ in range(steps)] for name in self.models}
        for name, (model, *_) in self.overlaps.items():
            before = communication(model)
            self._train(name, steps)
            after = communication(model)
            times = after["iterations"] - before["iterations"]
            for part in PARTS:
                seconds[f"{name}: {part}"] = [max(0.0, after[part] - before[part]) / times]
        return seconds

    def _train(self, name: str, steps: int) -> None:
        model, inputs, targets = self.overlaps[name]
        for _ in range(steps):
            model.zero_grad()
            criterion(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        self.seat.synchronize()

    def _round(self, name: str) -> float:
        model = self.models[name]
        model.zero_grad()
        output = model(self.samples).mean()
        self.seat.synchronize()
        # Else the time in which one process waits for another's forward would count.
        self.seat.barrier()
        begin = time.perf_counter()
        output.backward()
        self.seat.synchronize()
        return time.perf_counter() - begin

    def finish(self) -> dict[str, Any]:
        """Check once more, and leave the contestant."""
        answer = self.check(1)
        self.seat.leave(*self.models.values(), *(model for model, *_ in self.overlaps.values()))
        return answer


def communication(model: nn.Module) -> dict[str, float]:
    """Sums over all iterations that a DDP, ours or torch's, has timed, in seconds; and how many."""
    data = model._get_ddp_logging_data()  # type: ignore[operator]
    # torch has timed all iterations but the one that has not been followed by a forward.
    times = data.get("num_sampled", data["iteration"])
    computation, sent, hidden = (
        data.get(f"avg_backward_{key}_time", 0) * 1e-9 * times
        for key in ("compute", "comm", "compute_comm_overlap")
    )
    figures = (computation, sent, sent - hidden)
    return {"iterations": times, **dict(zip(PARTS, figures, strict=True))}


if __name__ == "__main__":
    raise SystemExit(common.main(build_parser(), run))
