"""Reducing gradients, in a backward that computes next to nothing, beside torch DDP."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks import common
from dataparallel.tools.arguments import count, counts, names_in
from dataparallel.tools.bench import runner
from dataparallel.tools.bench.cases import TrainCase
from dataparallel.tools.bench.harness import Contestant, plan_contestants
from dataparallel.tools.bench.results import summarize
from dataparallel.tools.bench.trainer import TrainTask

#: Shapes of parameters by name. Overhead per parameter; bytes; both, as a transformer has them.
GRADIENT_SETS: dict[str, tuple[tuple[int, ...], ...]] = {
    "small": ((64, 64), (64,)) * 201,
    "large": ((1024, 1024),) * 8,
    "mixed": ((768, 256), (768,), (256, 256), (256,), (256,), (1024, 256), (1024,)) * 8,
}


def build_parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = common.new_parser(
        "reducer",
        "Time of reducing gradients on the CPU, beside torch DDP.",
        ["", "--gradients small --replicas 1,2", "--processes 2 --replicas 1 --json results.json"],
    )
    add = parser.add_argument
    sets = list(GRADIENT_SETS)
    add("--gradients", type=names_in(sets), default=sets, metavar="LIST",
        help="sets of parameters: small (402), large (8 x 4 MiB), mixed; default: all")  # fmt: skip
    add("--replicas", type=counts, default=[1, 2, 4], metavar="LIST",
        help="of each process of ours; torch DDP gets one process per replica; "
        "default: 1,2,4")  # fmt: skip
    add("--processes", type=count, default=1, metavar="P", help="of ours; default: 1")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    plans = {f"{arguments.processes}x{n}": _plan(n, arguments) for n in arguments.replicas}
    title = "reducing gradients: one backward of a model that computes next to nothing"
    notes = ["PxR: P processes of R replicas; torch DDP: P*R processes; bare: one, no wrapper"]

    def conclude(measured: runner.Measured) -> runner.Report:
        lines = []
        for name in arguments.gradients:
            for layout, outcomes in measured.items():
                rows = summarize(outcomes, name, "backward wall")
                seconds = {row.contestant: row.rounds["backward wall"] for row in rows}
                lines.append(common.compare(name, layout, seconds, all(row.agrees for row in rows)))
        return common.report(title, lines, arguments, notes)

    return runner.run(arguments, plans, conclude)


def _plan(replicas: int, arguments: argparse.Namespace) -> tuple[Contestant, ...]:
    number = arguments.processes * replicas
    task = ReducerTask("ours", (), cases=tuple(arguments.gradients), batch=number)
    return plan_contestants(task, [["cpu"] * replicas] * arguments.processes, ["ddp", "bare"])


class ReducerTask(TrainTask):
    """A task whose models are sets of gradients; each replica has one sample, all differ."""

    def case(self, name: str) -> TrainCase:
        """Return the set of gradients of that name."""
        return TrainCase(self.batch, lambda: Parameters(GRADIENT_SETS[name]), _samples, _loss, 0.0)


class Parameters(nn.Module):
    """Parameters that are zero, each with a node of its own: ``(N,)`` samples to ``(N,)``.

    Gradients arrive one by one, the last parameter's first, and each in memory of its own.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def forward(self, samples: Tensor) -> Tensor:
        scale = samples.mean()
        return samples * torch.stack([(weight * scale).sum() for weight in self.weights]).sum()


def _samples(number: int) -> tuple[Tensor, Tensor]:
    return torch.arange(1.0, number + 1.0), torch.ones(number)


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets)


if __name__ == "__main__":
    raise SystemExit(common.main(build_parser(), run))
