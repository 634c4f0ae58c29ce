"""`python -m benchmarks.NAME`: what they conclude, and small runs of the real thing."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import collectives, common, kernel_cases, kernels, reducer
from benchmarks.common import compare
from benchmarks.kernel_cases import KernelCase
from benchmarks.kernels import Turn
from dataparallel import kernels as our_kernels
from dataparallel.kernels import backend
from dataparallel.tools.bench import runner
from dataparallel.tools.bench.harness import Contestant, Outcome, Spread
from tests.kernels.host_backend import HostBackend

CPU = torch.device("cpu")
MIB = 2**20
SHORT = ["--rounds", "1", "--steps", "2"]
NAMES = ("autograd", "collectives", "kernels", "reducer")


@pytest.fixture
def run_benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs one by its name and words; its exit status."""

    def call(name: str, *words: str) -> int:
        monkeypatch.setattr(sys, "argv", [name, *words])
        module = importlib.import_module(f"benchmarks.{name}")
        try:
            return common.main(module.build_parser(), module.run)
        except SystemExit as ended:
            return int(ended.code or 0)

    return call


@pytest.mark.parametrize("name", NAMES)
def test_examples_in_the_help_are_accepted(name: str) -> None:
    parser = importlib.import_module(f"benchmarks.{name}").build_parser()
    examples = parser.format_help().split("examples:\n")[1].splitlines()
    assert len(examples) > 3
    for example in examples:
        words = example.split()
        assert words[:3] == ["python", "-m", f"benchmarks.{name}"]
        parser.parse_args(words[3:])


# --- what they share ---------------------------------------------------------------------------


def test_words_that_stand_for_sizes_and_layouts() -> None:
    assert common.sizes("64MiB, 1KiB,512,1KiB,2B") == [2, 512, 2**10, 2**26]
    names = [common.size_name(size) for size in (12, 2**10, 1536, 2**28)]
    assert names == ["12 B", "1 KiB", "1536 B", "256 MiB"]
    assert reducer.layouts("1x2, 2x4,1x2") == ["1x2", "2x4"]
    assert reducer.places("2x2", "cpu") == [["cpu", "cpu"], ["cpu", "cpu"]]
    assert reducer.places("2x2", "gpu") == [["gpu:0", "gpu:1"], ["gpu:2", "gpu:3"]]
    wrong: list[tuple[Callable[[str], object], str]]
    wrong = [(common.sizes, text) for text in ("", "0", "1KB", "KiB", "-4", "1.5MiB")]
    wrong += [(reducer.layouts, text) for text in ("2", "0x1", "1x0", "1x2,", "axb", "1x100")]
    for read, text in wrong:
        with pytest.raises(argparse.ArgumentTypeError, match=r"is no (size|layout); say "):
            read(text)


def test_ours_is_compared_round_by_round_and_each_section_has_a_geometric_mean() -> None:
    line = compare("a", "1", {"ours": (1.0, 3.0), "torch": (2.0, 2.0), "none": (0.0, 1.0)}, True)
    assert line.seconds["ours"] == Spread(2.0, 1.0, 3.0)
    assert line.ratios == {"torch": Spread(1.0, 0.5, 1.5)}
    lines = [
        compare("a", "1", {"ours": (0.1, 0.4), "torch": (1.0, 1.0), "copy": (9.0, 9.0)}, True),
        compare("a", "2", {"ours": (0.4, 0.1), "torch": (1.0, 1.0)}, True),
        compare("b", "1", {"ours": (0.0, 1.0), "torch": (1.0, 1.0)}, True),
        compare("c", "1", {"ours": (1.0, 1.0)}, True),
    ]
    ((section, (peer, mean)),) = common.means(lines).items()
    assert (section, peer) == ("a", "torch")
    assert (mean.median, mean.low, mean.high) == pytest.approx((0.25, 0.1, 0.4))


@pytest.mark.parametrize("error", [0.0, 1.0, math.nan, math.inf])
def test_a_wrong_result_in_any_process_is_seen(error: float) -> None:
    right: list[dict[str, Any]] = [{"errors": {"x": 0.0, "y": 5.0}}, {"errors": {}}]
    wrong = [*right, {"errors": {"x": error}}]
    for checked, finished in ((right, wrong), (wrong, right)):
        outcome = Outcome(Contestant("ours", "ours", ()), checked, {}, finished)
        assert (common.error_of([outcome], "x") <= 0.5) == (error == 0.0)


@pytest.mark.parametrize(
    ("right", "bar", "status", "shown"),
    [
        (True, None, 0, "all_reduce: mean of ours / torch 0.500 (0.50..0.50)\n"),
        (True, 0.6, 0, "bar 0.60 met"),
        (True, 0.4, 1, "bar 0.40 missed"),
        (False, None, 1, "1 KiB ✗"),
    ],
)
def test_conclusions(
    right: bool, bar: float | None, status: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        compare("all_reduce", "1 KiB", {"ours": (1.0,), "torch": (2.0,), "copy": (4.0,)}, right),
        compare("hybrid", "64 MiB", {"ours": (1.0,), "torch": (2.0,)}, True),
    ]
    told = []
    for json_path in (None, "-"):
        arguments = argparse.Namespace(bar=bar, json=json_path, rounds=1)
        report = common.report("title", lines, arguments, ["a note"])
        assert runner.publish(report, arguments) == status
        told.append(capsys.readouterr().out)
    assert shown in told[0]
    words = [line.split() for line in told[0].splitlines()]
    assert ["64", "MiB", "✓", "1.00", "s", "1.00..1.00", "2.00", "s", "0.50", "0.50..0.50"] in words
    result = json.loads(told[1])
    assert [line["right"] for line in result["lines"]] == [right, True]
    assert result["missed"] == (["all_reduce", "hybrid"] if bar == 0.4 else [])


# --- reducer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "devices"), [("bare", ("cpu",)), ("ours", ("cpu", "cpu"))])
def test_rounds_are_checked_against_known_gradients(kind: Any, devices: tuple[str, ...]) -> None:
    threads = torch.get_num_threads()
    sets = ("small", "mixed")
    one = reducer.ReducerTask(kind, devices, replicas=2, gradients=sets).begin()
    assert max(one.check(3)["errors"].values()) < reducer.TOLERANCE
    assert {name: len(each) for name, each in one.run(2).items()} == dict.fromkeys(sets, 2)
    weights = list(one.modules["mixed"].parameters())
    hook = weights[7].register_hook(lambda grad: grad * 1.001)
    errors = one.check(1)["errors"]
    assert errors["small"] < reducer.TOLERANCE < errors["mixed"]
    hook.remove()
    weights[7].register_hook(lambda grad: grad * math.nan)
    assert math.isnan(one.check(2)["errors"]["mixed"])
    if kind == "bare":
        next(one.modules["small"].parameters()).requires_grad_(False)
        assert one.check(1)["errors"]["small"] == math.inf
    one.finish()
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_small_run_of_the_reducer(
    tmp_path: pathlib.Path, run_benchmark: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "results.json"
    words = ["--gradients", "small", "--layouts", "2x1", "--overlap", "deep"]
    assert run_benchmark("reducer", *words, *SHORT, "--json", str(target)) == 0
    small, *parts = json.loads(target.read_text())["lines"]
    assert small["right"] and list(small["seconds"]) == ["ours", "ddp", "bare"]
    assert [each["section"] for each in parts] == [f"deep: {part}" for part in reducer.PARTS]
    computation, communication, exposed = (each["seconds"] for each in parts)
    for who in ("ours", "ddp"):
        assert computation[who]["median"] > 0.0
        assert 0.0 <= exposed[who]["median"] <= communication[who]["median"] * 1.001
    assert "2x1 ✓" in capsys.readouterr().out


# --- collectives -------------------------------------------------------------------------------


def test_errors_of_results_are_seen() -> None:
    right, wrong = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])
    errors = [collectives.largest_error(x, right) for x in (right, wrong, wrong[:1])]
    assert errors == [0.0, 0.5, math.inf]
    assert math.isnan(collectives.largest_error(wrong * math.nan, right))
    arguments = argparse.Namespace(devices=["cpu"], sizes=[1024], operations=["all_reduce"])
    with pytest.raises(ValueError, match="needs two members or more, but got --devices cpu"):
        collectives.plan_members("local", arguments)


@pytest.mark.usefixtures("forked_workers")
def test_a_small_run_of_all_collectives(
    run_benchmark: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--sizes", "4KiB,16KiB", *SHORT, "--forms", "local,process,hybrid"]
    words += ["--operations", ",".join(collectives.OPERATIONS), "--bar", "1e-9", "--json", "-"]
    assert run_benchmark("collectives", *words) == 1
    result = json.loads(capsys.readouterr().out)
    sections = ["local: all_reduce", *(f"process: {each}" for each in collectives.OPERATIONS)]
    sections.append("hybrid: all_reduce")
    assert [each["section"] for each in result["lines"][::2]] == sections == result["missed"]
    assert all(each["right"] for each in result["lines"])
    assert list(result["lines"][0]["ratios"]) == ["torch", "copy"]


# --- autograd ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_small_run_of_autograd(
    run_benchmark: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    # TCP: with shared memory, workers that wait would take the cores from other tests.
    words = ["--calls", "1", "2", "--kib", "64", "--transport", "uv", "--workers", "2", *SHORT]
    assert run_benchmark("autograd", *words, "--json", "-") == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    names = ["1 calls", "2 calls", "4 x 64 KiB"]
    assert [(each["section"], each["name"]) for each in lines] == [
        (f"2 workers: {part}", name) for part in ("backward", "call") for name in names
    ]
    assert all(each["right"] and each["ratios"]["torch"]["low"] > 0 for each in lines)
    assert run_benchmark("autograd", "--workers", "1", "2") == 2
    assert "--workers needs 2 or more, but got 1" in capsys.readouterr().err


# --- kernels -----------------------------------------------------------------------------------


def kernel_row(
    kernel: str = "reduce_add",
    variant: str = "2 inputs",
    size: int = 16 * MIB,
    launch: float | None = None,
    **seconds: float,
) -> kernels.Row:
    turns = {
        who: [Turn(own, launch, None if launch is None else who != "slow")]
        for who, own in {"ours": 1.0, "copy": 1.0, **seconds}.items()
    }
    return kernels.summarize(KernelCase(kernel, variant, "float32", size), turns, True)


def test_a_kernel_is_compared_with_the_copy_and_the_best_of_torch() -> None:
    row = kernel_row(copy=2.0, slow=4.0, fast=0.5, launch=3e-6)
    assert (row.moved, row.best, row.hidden) == (48 * MIB, "fast", True)
    assert {who: each.median for who, each in row.line.ratios.items()} == {"copy": 0.5, "best": 2.0}
    assert row.line.note == "0.0503 GB/s, fast, launch 3 3 µs"
    assert kernel_row(slow=4.0, launch=3e-6).hidden is False
    assert (kernel_row(slow=4.0).hidden, kernel_row(slow=4.0).launch) == (None, {})


def test_bars_are_those_of_large_cases_and_of_what_torch_has_no_operation_for() -> None:
    rows = [
        kernel_row(copy=0.95, torch=2.0),
        kernel_row("flatten", "4 tensors", copy=0.89, torch=0.5),
        # Not judged by the copy: too small, or not only moved. As fast is not faster.
        kernel_row(size=4 * MIB, copy=0.5, torch=1.0),
        kernel_row("fingerprint", "400 tensors", copy=0.5, torch=0.5),
    ]
    copy, best = kernels.judge(rows)
    assert (copy["cases"], copy["missed"]) == (2, ["flatten, 4 tensors, float32, 16 MiB"])
    assert copy["value"] == pytest.approx(1 / 0.89)
    assert (best["cases"], best["missed"]) == (2, ["reduce_add, 2 inputs, float32, 4 MiB"])
    told = kernels.bar_line(copy).plain
    assert told.endswith("(flatten, 4 tensors, float32, 16 MiB), 1 of 2 beyond it; bar 1.11 missed")
    copy, best = kernels.judge(rows[3:])
    assert (copy["cases"], best["cases"], copy["missed"]) == (0, 0, [])
    assert kernels.bar_line(best).plain.endswith("no case measured")


SMALL = ["--device", "cpu", "--sizes", "4KiB", "--dtypes", "float32", *SHORT]


def test_all_references_on_the_cpu(
    run_benchmark: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_benchmark("kernels", *SMALL, "--json", "-") == 0
    result = json.loads(capsys.readouterr().out)
    runs = "torch reference: no kernels on this device (cpu)"
    assert (result["runs"], result["bars"]) == (runs, [])
    rows = result["rows"]
    assert {each["case"]["kernel"] for each in rows} == set(kernel_cases.KERNELS)
    assert all(each["line"]["right"] and each["launch"] == {} for each in rows)
    names = {each["case"]["kernel"]: set(each["alternatives"]) for each in rows}
    assert names["reduce_add"] == {"stack", "foreach", "add_"}
    words = ["--kernels", "unflatten", "--device", "virtual:0", "--flush", "4KiB"]
    assert run_benchmark("kernels", *SMALL, *words) == 0
    assert ", launch " in capsys.readouterr().out


def test_kernels_are_named_and_judged(
    monkeypatch: pytest.MonkeyPatch,
    run_benchmark: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    bar = {"name": "share", "bar": 1.0, "cases": 1, "worst": "a", "value": 2.0, "missed": ["a"]}
    monkeypatch.setattr(kernels, "judge", lambda rows: [bar])
    host = HostBackend()
    with backend.registered([host]):
        assert run_benchmark("kernels", *SMALL, "--kernels", "reduce_add", "--check") == 1
        assert run_benchmark("kernels", *SMALL, "--kernels", "reduce_add") == 0
    assert {"reduce_add_f32_2", "reduce_add_f32_4", "reduce_add_f32_8"} == set(host.launches)
    text = capsys.readouterr().out
    assert "kernels, launched by HostBackend" in text
    assert "share: worst 2.000 (a), 1 of 1 beyond it; bar 1.00 missed" in text
    assert run_benchmark("kernels", *SMALL, "--check") == 2
    assert "--check judges kernels, but cpu has none" in capsys.readouterr().err
    assert run_benchmark("kernels", *SMALL, "--device", "gpu") == 2
    assert "'gpu' is not a device" in capsys.readouterr().err


@pytest.mark.parametrize("kernel", kernel_cases.KERNELS)
def test_kernels_agree_with_torch_and_a_wrong_result_is_seen(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = kernel_cases.plan_cases([kernel], ["float32", "bfloat16"], [4096])
    host = HostBackend()
    with backend.registered([host]):
        assert all(kernel_cases.calls_of(case, CPU)[1] for case in cases)
    assert len(host.launches) >= len(cases)
    function = getattr(our_kernels, kernel)

    def wrong(*given: Any, **named: Any) -> Any:
        result = function(*given, **named)
        written = given[1][-1] if kernel == "unflatten" else result
        written.view(-1)[-1].add_(1)
        return result

    monkeypatch.setattr(our_kernels, kernel, wrong)
    assert not any(kernel_cases.calls_of(case, CPU)[1] for case in cases)
