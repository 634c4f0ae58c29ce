"""Published speeds of torch DDP on several GPUs, beside what the simulation makes of them."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks import common
from dataparallel.tools.bench.runner import Report, new_table, publish
from dataparallel.tools.bench.simulate import machine as machines
from dataparallel.tools.bench.simulate import peers
from dataparallel.tools.bench.simulate.outcome import conclude
from dataparallel.tools.bench.simulate.player import Player
from dataparallel.tools.bench.simulate.record import GRADIENT, STEPS, StepTrace, Timing
from dataparallel.virtual import TraceEntry

#: A layer: the sizes of its parameters, and its share of the operations.
Layer = tuple[Sequence[int], float]

_EXAMPLES = "github.com/NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5"
_DLPERF = "github.com/Oneflow-Inc/DLPerf, PyTorch/resnet50v1.5, DALI, 48 workers"
_TRANSFORMERS = "huggingface.co/docs/transformers, Efficient Training on Multiple GPUs"


@dataclass(frozen=True)
class Case:
    """A published figure.

    Attributes:
        source: Where it is published.
        what: The model and the hardware.
        layers: The model, from the input to the output.
        seconds: A step with the figure to start from, published, too.
        gpus: How many took part.
        published: A step with them.
        machine: The file, and what is changed in it.
        peer: ``"torch-ddp"`` or ``"torch-dp"``.
    """

    source: str
    what: str
    layers: Sequence[Layer]
    seconds: float
    gpus: int
    published: float
    machine: machines.SimulatedMachine
    peer: str = "torch-ddp"


def resnet50() -> list[Layer]:
    """Return the layers of ResNet-50, each a convolution with its batch norm."""
    layers: list[Layer] = [([3 * 64 * 49, 64, 64], 3 * 64 * 49 * 112**2)]
    width, extent = 64, 56
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = 64 << stage
        for block in range(blocks):
            shrinks = stage > 0 and block == 0
            shapes = [(width * inner, extent), (9 * inner**2, extent // (1 + shrinks))]
            extent //= 1 + shrinks
            shapes.append((inner * 4 * inner, extent))
            if block == 0:
                shapes.append((width * 4 * inner, extent))
            outputs = (inner, inner, 4 * inner, 4 * inner)
            for (size, side), channels in zip(shapes, outputs, strict=False):
                layers.append(([size, channels, channels], size * side**2))
            width = 4 * inner
    return [*layers, ([2048 * 1000, 1000], 2048 * 1000)]


def gpt2() -> list[Layer]:
    """Return the layers of GPT-2 small; the embedding is also the last layer, so its gradient is
    complete at the very end of backward."""
    width, words = 768, 50257
    layers: list[Layer] = [([words * width, 1024 * width], 0.0)]
    for _ in range(12):
        for rows, columns in ((1, 3), (1, 1), (1, 4), (4, 1)):
            size = rows * columns * width**2
            layers.append(([size, columns * width], size))
    return [*layers, ([2 * width], words * width)]


def _cases() -> list[Case]:
    a100 = machines.load("a100-nvlink")
    v100 = dataclasses.replace(a100, memory_rate=0.8e12, ring=130e9)
    titan = dataclasses.replace(a100, memory_rate=0.6e12, ring=45e9)
    apart = dataclasses.replace(titan, ring=6e9)
    net, language = resnet50(), gpt2()
    step = 101.9 / 200
    return [
        Case(_EXAMPLES, "ResNet-50, TF32, A100", net, 256 / 938, 8, 8 * 256 / 7248, a100),
        Case(_DLPERF, "ResNet-50, fp32, V100", net, 128 / 350.66, 4, 4 * 128 / 1306.49, v100),
        Case(_DLPERF, "ResNet-50, fp32, V100", net, 128 / 350.66, 8, 8 * 128 / 2707.42, v100),
        Case(_TRANSFORMERS, "GPT-2, fp32, TITAN RTX, no peer access; from that with NVLink",
             language, step, 2, 131.4 / 200, apart),
        Case(_TRANSFORMERS, "GPT-2, fp32, TITAN RTX, nn.DataParallel; from DDP", language, step, 2,
             110.6 / 200, titan, "torch-dp"),
    ]  # fmt: skip


def trace_of(layers: Sequence[Layer]) -> StepTrace:
    """Return the trace of the bare module: a kernel per layer, and two more in backward."""
    sizes = [4 * size for own, _ in layers for size in own]
    first = [sum(len(own) for own, _ in layers[:i]) for i in range(len(layers))]

    def mark(name: str) -> TraceEntry:
        return TraceEntry("mark", name, -1, -1, 0, 0, 0, -1, -1, 0, False, 0, 0.0)

    def step() -> Iterator[TraceEntry]:
        kernel = mark("layer")._replace(kind="kernel", device=0, stream=0)
        yield mark("step")
        yield mark("forward")
        for _, operations in layers:
            yield kernel._replace(flops=math.ceil(operations))
        yield mark("backward")
        for i in reversed(range(len(layers))):
            own, operations = layers[i]
            yield kernel._replace(flops=2 * math.ceil(operations))
            yield from (mark(f"{GRADIENT}{first[i] + j}") for j in reversed(range(len(own))))
        yield mark("optimizer")
        size = sum(sizes)
        yield kernel._replace(read=2 * size, written=size, name="step")

    entries = [entry for _ in range(STEPS) for entry in step()]
    return StepTrace([*entries, mark("step")], sizes, [0])


def simulate(case: Case) -> float:
    """Return the simulated seconds of a step."""
    trace, machine = trace_of(case.layers), case.machine
    # The optimizer's part does not grow with the batch.
    rest = case.seconds - 3 * sum(trace.sizes) / machine.memory_rate
    timing = Timing.of(machine, trace, {"forward": rest / 3, "backward": rest * 2 / 3})
    makers = {"torch-ddp": peers.ddp_tasks, "torch-dp": peers.data_parallel_tasks}
    played = Player(machine).play(makers[case.peer](trace, timing, case.gpus))
    return conclude(case.peer, played, 1, [0]).seconds


def build_parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published",
        description="Published speeds of torch DDP on several GPUs, and simulated ones.",
        epilog="examples:\n"
        "  python -m benchmarks.published\n"
        "  python -m benchmarks.published --json errors.json\n"
        "  python -m benchmarks.published --json -\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file, too")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Simulate each published case, show the errors, and return the exit status."""
    table = new_table("ms per step", "GPUs", "from", "published", "simulated", "error")
    found = []
    for case in _cases():
        seconds = simulate(case)
        error = seconds / case.published - 1
        milli = [f"{each * 1e3:.1f}" for each in (case.seconds, case.published, seconds)]
        table.add_row(case.what, str(case.gpus), *milli, f"{error:+.1%}")
        figures = {"published": case.published, "simulated": seconds, "error": error}
        found.append({"what": case.what, "source": case.source, "gpus": case.gpus, **figures})
    sources = list(dict.fromkeys(case.source for case in _cases()))
    note = "from: the published step that gives the time of the kernels"
    return publish(Report([table], [note, *sources], {"cases": found}), arguments)


if __name__ == "__main__":
    raise SystemExit(common.main(build_parser(), run))
