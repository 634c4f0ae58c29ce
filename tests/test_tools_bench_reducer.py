"""`dataparallel bench reducer`: gradients, conclusions, and small runs of the real thing."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table

from dataparallel.tools import cli
from dataparallel.tools.bench import reducer_report, reducer_summary, seat
from dataparallel.tools.bench.contestants import Contestant, ReducerTask
from dataparallel.tools.bench.gradient_sets import GRADIENT_SETS, KnownGradients, known_gradient
from dataparallel.tools.bench.layout import Layout, layouts
from dataparallel.tools.bench.reducer_summary import OverlapRow, ReducerRow
from dataparallel.tools.bench.reduction import Reduction
from dataparallel.tools.bench.rounds import Outcome
from dataparallel.tools.bench.summary import Spread

# --- layouts -----------------------------------------------------------------------------------


def test_layouts_are_processes_times_replicas() -> None:
    assert layouts("1x2, 2x4,1x2") == [Layout(1, 2), Layout(2, 4)]
    assert str(Layout(2, 4)) == "2x4"
    for text in ("2", "0x1", "1x0", "1x2,", "axb", "1x100"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no layout; say processes x"):
            layouts(text)


def test_replicas_share_the_cpu_and_nothing_else() -> None:
    assert Layout(2, 2).places("cpu") == [["cpu", "cpu"], ["cpu", "cpu"]]
    assert Layout(2, 2).places("gpu") == [["gpu:0", "gpu:1"], ["gpu:2", "gpu:3"]]


# --- gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensors", "mebibytes"),
    [("small", 402, 3.19), ("large", 8, 32.0), ("mixed", 56, 16.07)],
)
def test_sets_have_the_sizes_they_are_known_by(name: str, tensors: int, mebibytes: float) -> None:
    chosen = GRADIENT_SETS[name]
    assert len(chosen.shapes) == tensors
    assert chosen.numbers * 4 / 2**20 == pytest.approx(mebibytes, abs=0.01)


def test_gradients_are_known_and_differ_between_replicas() -> None:
    model = KnownGradients([(2, 3), (4,)])
    samples = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    output = torch.cat([model(chunk) for chunk in samples.chunk(2)])
    assert output.shape == (4,)
    output.mean().backward()
    expected = (1.5**2 + 3.5**2) / 2
    assert known_gradient(samples, replicas=2) == pytest.approx(expected)
    assert known_gradient(samples, replicas=1) == pytest.approx(2.5**2)
    for weight in model.weights:
        torch.testing.assert_close(weight.grad, torch.full_like(weight, expected))


def test_gradients_arrive_one_by_one_the_last_first() -> None:
    model = KnownGradients([(2,)] * 5)
    arrived: list[int] = []
    for index, weight in enumerate(model.weights):
        weight.register_hook(lambda grad, index=index: arrived.append(index))
    model(torch.ones(2, 1)).mean().backward()
    assert arrived == [4, 3, 2, 1, 0]


@pytest.fixture
def reduction() -> Iterator[Callable[..., Reduction]]:
    threads = torch.get_num_threads()
    made: list[Reduction] = []

    def make(kind: Any, *devices: str) -> Reduction:
        task = ReducerTask(
            kind, devices, replicas=2, gradients=("small", "mixed"), bucket_cap_mb=1.0
        )
        made.append(Reduction(task))
        return made[-1]

    yield make
    for each in made:
        each.seat.leave(*each.models.values())
    torch.set_num_threads(threads)


def test_rounds_are_checked_against_known_gradients(reduction: Callable[..., Reduction]) -> None:
    for one in (reduction("bare", "cpu"), reduction("ours", "cpu", "cpu")):
        assert max(one.check(3)["gradient_errors"].values()) < reducer_summary.GRADIENT_TOLERANCE
        seconds = one.run(2)
        assert {name: len(each) for name, each in seconds.items()} == {"small": 2, "mixed": 2}
        list(one.modules["mixed"].parameters())[7].register_hook(lambda grad: grad * 1.001)
        errors = one.finish()["gradient_errors"]
        assert errors["small"] < reducer_summary.GRADIENT_TOLERANCE < errors["mixed"]


def test_a_gradient_that_is_missing_or_no_number_is_an_error(
    reduction: Callable[..., Reduction],
) -> None:
    one = reduction("bare", "cpu")
    weight = next(one.modules["small"].parameters())
    hook = weight.register_hook(lambda grad: grad * math.nan)
    assert math.isnan(one.check(2)["gradient_errors"]["small"])
    hook.remove()
    weight.requires_grad_(False)
    assert one.check(2)["gradient_errors"]["small"] == math.inf


# --- conclusions -------------------------------------------------------------------------------


def outcome(name: str, *backward: float, errors: tuple[float, ...] = (0.0,)) -> Outcome:
    said = [{"gradient_errors": {"small": error, "large": 1.0}} for error in errors]
    seconds = {"small": backward, "large": (9.0,) * len(backward)}
    return Outcome(Contestant(name, name, ()), said, seconds, said[:1])


def test_rounds_of_reduction_are_compared() -> None:
    outcomes = [outcome("ours", 1.0, 3.0), outcome("bare", 0.5, 0.5), outcome("ddp", 2.0, 2.0)]
    row = reducer_summary.summarize_reduction("small", "1x2", outcomes)
    assert row.ours == Spread(2.0, 1.0, 3.0)
    assert row.bare == Spread(0.5, 0.5, 0.5)
    assert row.ours_over_ddp == Spread(1.0, 0.5, 1.5)
    assert row.agrees
    alone = reducer_summary.summarize_reduction("small", "1x2", outcomes[:1])
    assert (alone.ddp, alone.bare, alone.ours_over_ddp) == (None, None, None)


@pytest.mark.parametrize("error", [1e-3, math.nan])
def test_a_wrong_gradient_in_any_process_is_seen(error: float) -> None:
    outcomes = [outcome("ours", 1.0), outcome("ddp", 1.0, errors=(0.0, error, 0.0))]
    assert not reducer_summary.summarize_reduction("small", "1x2", outcomes).agrees


def test_what_computation_does_not_hide_is_exposed() -> None:
    first = {"communication": 4.0, "computation": 10.0, "hidden": 3.0}
    others = {"communication": 6.0, "computation": 12.0, "hidden": 1.0}
    all_hidden = {"communication": 4.0, "computation": 10.0, "hidden": 4.001}
    finished = [{"statistics": [first, all_hidden]}, {"statistics": [others, all_hidden]}]
    who = Contestant("ddp", "torch DDP 2x1", ())
    row = reducer_summary.summarize_overlap("mlp", Outcome(who, [], {}, finished))
    assert row.communication == Spread(4.5, 4.0, 5.0)
    assert row.computation == Spread(10.5, 10.0, 11.0)
    assert row.hidden.low == 2.0
    assert row.exposed is not None
    assert dataclasses.astuple(row.exposed) == pytest.approx((0.3, 0.0, 0.6))
    silent = [{"statistics": [dict.fromkeys(first, 0.0)]}]
    assert reducer_summary.summarize_overlap("mlp", Outcome(who, [], {}, silent)).exposed is None


class Timed(torch.nn.Module):
    """Says what a DDP would."""

    def __init__(self, **data: int) -> None:
        super().__init__()
        self.data = data

    def _get_ddp_logging_data(self) -> dict[str, int]:
        return self.data


def test_timings_of_all_iterations_are_summed() -> None:
    model = Timed(
        iteration=3,
        avg_backward_comm_time=2_000_000_000,
        avg_backward_compute_time=4_000_000_000,
        avg_backward_compute_comm_overlap_time=1_000_000_000,
    )
    expected = {"iterations": 3, "communication": 6.0, "computation": 12.0, "hidden": 3.0}
    assert seat.communication(model) == pytest.approx(expected)
    # Ours may have timed fewer than it has seen. And before anything was timed:
    assert seat.communication(Timed(iteration=9, num_sampled=3))["iterations"] == 3
    assert seat.communication(Timed(iteration=0))["communication"] == 0.0


# --- tables ------------------------------------------------------------------------------------


def shown(table: Table) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "…" not in text
    return [line.split() for line in text.splitlines() if line.strip()]


def test_rounds_fit_into_80_columns() -> None:
    slow = Spread(1.1, 1.0, 1.2)
    rows = [
        ReducerRow("small", "2x4", slow, slow, slow, Spread(10.0, 9.0, 11.0), 0.0, True),
        ReducerRow("small", "1x1", slow, None, None, None, 1.0, False),
    ]
    *_, title, first, second = shown(reducer_report.build_rounds(rows))
    assert title == ["small"]
    times = ["1100", "1000..1200"]
    assert first == ["2x4", "✓", *times, *times, "10.00", "9.00..11.00", "1100"]
    assert second == ["1x1", "✗", *times]


def test_overlap_fits_into_80_columns() -> None:
    slow, share, none = Spread(1.1, 1.0, 1.2), Spread(0.25, 0.0, 1.0), Spread(0.0, 0.0, 0.0)
    rows = [
        OverlapRow("transformer", "ours", "our DDP 2x16", slow, slow, slow, share),
        OverlapRow("transformer", "ddp", "torch DDP 32x1", none, slow, none, None),
    ]
    *_, title, first, second = shown(reducer_report.build_overlap(rows))
    assert title == ["transformer"]
    times = ["1100", "1100", "1000..1200", "1100"]
    assert first == ["our", "DDP", "2x16", *times, "25%", "0%..100%"]
    assert second == ["torch", "DDP", "32x1", "1100", "0.00", "0.00..0.00", "0.00"]


# --- runs --------------------------------------------------------------------------------------

SMALL = ["bench", "reducer", "--gradients", "small", "--rounds", "1", "--steps", "2"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_small_run_beside_both_peers(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "results.json"
    words = ["--layouts", "2x1", "--overlap", "deep", "--json", str(target)]
    assert cli.main([*SMALL, *words]) == 0
    result = json.loads(target.read_text())
    assert result["setting"]["layouts"] == ["2x1"]
    (row,) = result["reductions"]
    assert row["agrees"]
    assert row["ours_over_ddp"]["median"] > 0.0
    contestants = [each["contestant"] for each in result["measured"]]
    names = ["our DDP 2x1", "bare module", "torch DDP 2x1"]
    assert contestants == [*names, names[0], names[2]]
    assert [len(each["checked"]) for each in result["measured"]] == [2, 1, 2, 2, 2]
    assert [each["title"] for each in result["overlaps"]] == [names[0], names[2]]
    for overlap in result["overlaps"]:
        computation, communication, hidden = (
            overlap[name]["median"] for name in ("computation", "communication", "hidden")
        )
        assert computation > 0.0
        assert 0.0 <= hidden <= communication * 1.001
        assert communication > 0.0
    text = capsys.readouterr().out
    assert "2x1 ✓" in text
    assert text.count("our DDP 2x1") == 1


def test_on_virtual_devices_the_peer_is_the_bare_module(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--layouts", "1x2", "--overlap", "none", "--device", "virtual"]
    assert cli.main([*SMALL, *words]) == 0
    assert "1x2 ✓" in capsys.readouterr().out
    assert cli.main([*SMALL, *words, "--peers", "ddp"]) == 2
    assert "compare with --peers bare" in capsys.readouterr().err


def test_examples_in_the_help_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    parser = cli.build_parser()
    with pytest.raises(SystemExit, match="0"):
        parser.parse_args(["bench", "reducer", "--help"])
    examples = capsys.readouterr().out.split("examples:\n")[1].splitlines()
    assert len(examples) == 5
    for example in examples:
        assert callable(parser.parse_args(example.split()[1:]).run)


def test_the_default_layouts_are_those_the_help_names(capsys: pytest.CaptureFixture[str]) -> None:
    default = ",".join(map(str, cli.build_parser().parse_args(["bench", "reducer"]).layouts))
    with pytest.raises(SystemExit, match="0"):
        cli.main(["bench", "reducer", "--help"])
    assert f"default: {default}" in " ".join(capsys.readouterr().out.split())
