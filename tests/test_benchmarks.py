"""`python -m benchmarks.NAME`: what they conclude, and small runs of the real thing."""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import common, kernel_cases, kernels, pool
from benchmarks.common import Line, compare
from benchmarks.kernel_cases import KernelCase
from dataparallel import Pool
from dataparallel import kernels as our_kernels
from dataparallel.kernels import backend
from dataparallel.tools.bench import runner
from dataparallel.tools.bench.harness import Contestant, Outcome, Spread
from tests import forkserver
from tests.free_threading import LATER
from tests.kernels.host_backend import HostBackend

SHORT = ["--rounds", "1", "--steps", "2"]


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


@pytest.mark.parametrize(
    "name", ["autograd", "kernels", "memory", "pool", "published", "reducer", "transport"]
)
def test_examples_in_the_help_are_accepted(name: str) -> None:
    parser = importlib.import_module(f"benchmarks.{name}").build_parser()
    examples = parser.format_help().split("examples:\n")[1].splitlines()
    assert len(examples) >= 3
    for example in examples:
        words = example.split()
        assert words[:3] == ["python", "-m", f"benchmarks.{name}"]
        parser.parse_args(words[3:])


def outcome(seconds: dict[str, Any], *wrong: tuple[str, str]) -> Outcome:
    said: list[dict[str, Any]] = [{"wrong": []}, {"wrong": [list(case) for case in wrong]}]
    return Outcome(Contestant("all", "all", ()), said, seconds, [])


def test_ours_is_compared_round_by_round_and_each_section_has_a_geometric_mean(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cases = {("a", "1"): (2.0, 4.0), ("b", "1"): (1.0, 1.0), ("a", "2"): (0.5, 1.0)}
    seconds: dict[str, Any] = {common.phase("ours", *case): own for case, own in cases.items()}
    seconds |= {common.phase("torch", *case): (1.0, 1.0) for case in cases}
    arguments = argparse.Namespace(json=None, rounds=2)
    for wrong, status in ([], 0), ([("b", "1")], 1):
        lines = common.lines_of([outcome(seconds, *wrong)])
        assert lines[0].seconds["ours"] == lines[0].ratios["torch"] == Spread(3.0, 2.0, 4.0)
        assert [line.right for line in lines] == [True, not wrong, True]
        report = common.report("title", lines, arguments, ["a note"])
        assert runner.publish(report, arguments) == status
        text = capsys.readouterr().out
        assert "a: mean of ours / torch 1.500 (1.00..2.00)\n" in text
        words = [line.split() for line in text.splitlines()]
        assert ["2", "✓", "750", "ms", "500..1000", "1.00", "s", "0.75", "0.50..1.00"] in words
        assert (["1", "✗"] in [each[:2] for each in words]) == bool(wrong)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_small_run_of_the_reducer(
    run_benchmark: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--gradients", "small,mixed", "--processes", "2", "--replicas", "1,2"]
    assert run_benchmark("reducer", *words, *SHORT, "--json", "-") == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    names = [(each["section"], each["name"]) for each in lines]
    assert names == [(one, layout) for one in ("small", "mixed") for layout in ("2x1", "2x2")]
    assert all(each["right"] and [*each["seconds"]] == ["ours", "ddp", "bare"] for each in lines)


@pytest.mark.slow
def test_a_small_run_of_autograd(
    run_benchmark: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    # TCP: with shared memory, workers that wait would take the cores from other tests.
    words = ["--calls", "1,2", "--kib", "64", "--transport", "uv", *SHORT]
    assert run_benchmark("autograd", *words, "--json", "-") == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    assert {(each["section"], each["name"]) for each in lines} == {
        (part, name)
        for part in ("backward", "call")
        for name in ("1 calls", "2 calls", "4 x 64 KiB")
    }
    assert all(each["right"] and each["ratios"]["torch"]["low"] > 0 for each in lines)
    assert run_benchmark("autograd", "--workers", "1") == 2
    assert "--workers needs 2 or more, but got 1" in capsys.readouterr().err


# --- kernels -----------------------------------------------------------------------------------


def kernel_line(case: KernelCase, **seconds: float) -> Line:
    return kernels.line_of(case, {who: (own,) for who, own in seconds.items()}, True)


def test_a_kernel_is_compared_with_the_copy_and_the_best_of_torch() -> None:
    case = KernelCase("flatten", 4, "float32", 16 * 1024)
    launch = {f"launch {who}": 3e-6 for who in ("ours", "fast", "slow")}
    line = kernel_line(case, ours=1.0, copy=2.0, slow=4.0, fast=0.5, **launch)
    assert {who: each.median for who, each in line.ratios.items()} == {"copy": 0.5, "best": 2.0}
    assert line.note == "0.0336 GB/s, fast, launch 3 3 µs"


def test_bars_are_those_of_large_cases_and_of_what_torch_has_no_operation_for() -> None:
    cases = {
        KernelCase("flatten", 4, "float32", 16 * 1024): compare_with(copy=0.89, best=0.5),
        # Not judged by the copy: too small, or not only copied. As fast is not faster.
        KernelCase("unflatten", 400, "float32", 1024): compare_with(copy=0.5, best=1.0),
        KernelCase("fingerprint", 400, "float32", 16 * 1024): compare_with(copy=0.5, best=0.5),
    }
    assert kernels.judge(cases) == [
        "ours / copy, from 16 MiB: worst 1.124 (flatten, 4 tensors, float32, 16 MiB), "
        "1 of 1 beyond it; bar 1.11 missed",
        "ours / best of torch, every size: worst 1.000 (unflatten, 400 tensors, float32, 1 MiB), "
        "1 of 1 beyond it; bar 1.00 missed",
    ]
    assert [line.split(": ")[1] for line in kernels.judge({})] == ["no case measured"] * 2


def compare_with(**seconds: float) -> Line:
    return compare(
        "a", "b", {"ours": (1.0,), **{who: (own,) for who, own in seconds.items()}}, True
    )


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("device", ["cpu", "virtual:0"])
def test_a_small_run_of_all_references(
    device: str, run_benchmark: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", device, "--kib", "4", "--dtypes", "float32", "--flush-mib", "1", *SHORT]
    assert run_benchmark("kernels", *words) == 0
    text = capsys.readouterr().out
    assert f"torch's references, not kernels; {device}" in text
    assert text.count("4 KiB ✓") == 2 * len(kernel_cases.KERNELS)
    assert (", launch " in text) == (device != "cpu") and "bar" not in text
    assert run_benchmark("kernels", "--device", "gpu") == 2
    assert "'gpu' is not a device" in capsys.readouterr().err


@pytest.mark.parametrize("kernel", kernel_cases.KERNELS)
def test_kernels_agree_with_torch_and_a_wrong_result_is_seen(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = kernel_cases.plan_cases([kernel], ["float32", "bfloat16"], [4])
    task = kernels.KernelsTask("ours", ("cpu",), cases=tuple(cases), flush=1)
    host = HostBackend()
    with backend.registered([host]):
        assert task.begin().check(1) == {"wrong": [], "backend": "HostBackend"}
    assert len(host.launches) >= len(cases)
    function = getattr(our_kernels, kernel)

    def wrong(*given: Any, **named: Any) -> Any:
        result = function(*given, **named)
        written = given[1][-1] if kernel == "unflatten" else result
        written.view(-1)[-1].add_(1)
        return result

    monkeypatch.setattr(our_kernels, kernel, wrong)
    assert len(task.begin().check(1)["wrong"]) == len(cases)


def test_transport_counts_what_the_ports_carry(
    run_benchmark: Callable[..., int], tmp_path: pathlib.Path
) -> None:
    written = tmp_path / "counts.json"
    assert (
        run_benchmark("transport", "--devices", "3", "--layers", "2", "--json", str(written)) == 0
    )
    counts = json.loads(written.read_text())["counts"]
    assert [each["wrapper"] for each in counts] == ["DistributedDataParallel", "DataParallel"]
    for each in counts:
        assert each["out of the first"] == pytest.approx(2, rel=0.01)
        assert each["into the first"] == pytest.approx(1, rel=0.01)
        assert 1 < each["into others"] < 2.5


def test_memory_has_the_peaks_of_both_modes(
    run_benchmark: Callable[..., int], tmp_path: pathlib.Path
) -> None:
    written = tmp_path / "peaks.json"
    words = ["--devices", "4", "--layers", "64", "--width", "2048", "--json", str(written)]
    assert run_benchmark("memory", *words) == 0
    home, spread = json.loads(written.read_text())["peaks"]
    size = 64 * 2049 * 2048 * 4
    assert [each["mode"] for each in (home, spread)] == ["home", "spread"]
    assert 4 < home["peaks"][0] / size < 4.3 + LATER and 2 < max(home["peaks"][1:]) / size < 2.3
    assert len(spread["peaks"]) == 4 and max(spread["peaks"]) / size < 2


def test_published_figures_are_simulated_within_their_errors(
    run_benchmark: Callable[..., int], tmp_path: pathlib.Path
) -> None:
    """All are within 20 percent, and none is slower than published."""
    from benchmarks.published import resnet50

    file = tmp_path / "published.json"
    assert run_benchmark("published", "--json", str(file)) == 0
    errors = [case["error"] for case in json.loads(file.read_text())["cases"]]
    assert len(errors) == 5
    assert all(-0.2 < error <= 0 for error in errors)
    # As torchvision counts.
    assert sum(sum(own) for own, _ in resnet50()) == 25_557_032


# --- the pool ----------------------------------------------------------------------------------


def test_a_small_run_of_the_pool(
    run_benchmark: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rounds", "1", "--items", "6", "--calls", "100", "--json", "-"]
    assert run_benchmark("pool", *words) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    assert [each["section"] for each in lines] == (
        [pool.UNEQUAL] * 4 + [pool.OVERHEAD] * 3 + [pool.SMALL] * 3 + [pool.REQUESTS] * 2
    )
    assert all(each["right"] for each in lines)
    peers = [[*each["ratios"]] for each in lines]
    assert peers[0] == ["halves", "in step", "threads", "processes"]
    assert peers[4:8] == [["threads", "processes"], ["threads"], ["threads", "processes"], ["bare"]]


def test_wrong_outputs_of_a_pool_are_seen(
    run_benchmark: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[Line] = []

    def judge(found: list[Line]) -> list[str]:
        lines.extend(found)
        return []

    monkeypatch.setattr(pool, "_context", forkserver.context())
    monkeypatch.setattr(pool, "_overhead", lambda *given: {})
    monkeypatch.setattr(pool, "_requests", lambda *given: {})
    monkeypatch.setattr(pool, "_unequal", lambda *given: {})
    monkeypatch.setattr(pool, "judge", judge)
    monkeypatch.setattr(Pool, "map", lambda own, items: iter([items[0]] * len(items)))
    assert run_benchmark("pool", "--rounds", "1", "--items", "3") == 1
    assert [line.right for line in lines] == [False] * 3


def pool_line(section: str, name: str, **seconds: float) -> Line:
    return compare(section, name, {who: (own,) for who, own in seconds.items()}, True)


def test_the_bars_of_a_pool() -> None:
    """A static split is judged in the order that is not made for it."""
    unequal = [
        pool_line(pool.UNEQUAL, f"wait, {pool.SHUFFLED}", ours=1.0, halves=0.5, **{"in step": 1.5}),
        pool_line(pool.UNEQUAL, f"wait, {pool.SORTED}", ours=1.0, halves=1.2, **{"in step": 0.5}),
    ]
    others = [
        pool_line(pool.OVERHEAD, "map", ours=1e-4, threads=1e-5),
        pool_line(pool.OVERHEAD, "submit", ours=2e-4, threads=1e-5),
        pool_line(pool.REQUESTS, "50 per second", ours=0.030, limit=0.025),
        pool_line(pool.REQUESTS, "200 per second", ours=0.020, limit=0.025),
    ]
    assert pool.judge([*unequal, *others]) == [
        "throughput / static split: worst 1.20 (halves, wait, shorter first); bar 1.15 met",
        "overhead per item: worst 200 µs (submit), 5,000 items per second; bar 150 µs missed",
        "p99 of requests / (max_wait and one batch): worst 1.20 (50 per second); bar 1.00 missed",
    ]
