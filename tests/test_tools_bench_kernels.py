"""`dataparallel bench kernels`: bytes, timing, conclusions, and small runs of the real thing."""

from __future__ import annotations

import functools
import io
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table

from dataparallel.tools.bench import (
    kernels_cases,
    kernels_plot,
    kernels_report,
    kernels_summary,
    kernels_timing,
)
from dataparallel.tools.bench.kernels_cases import KernelCase
from dataparallel.tools.bench.kernels_summary import KernelRow, KernelVerdict
from dataparallel.tools.bench.kernels_timing import Contestant, Stopwatch, Turn
from dataparallel.tools.bench.summary import Spread

CPU = torch.device("cpu")
MIB = 2**20

# --- plan and bytes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "variant", "dtype", "moved"),
    [
        ("reduce_add", "2 inputs", "float32", 3 * MIB),
        ("reduce_add", "8 inputs", "bfloat16", 9 * MIB),
        ("flatten", "400 tensors", "float32", 2 * MIB),
        ("unflatten", "4 tensors", "bfloat16", 2 * MIB),
        ("fingerprint", "400 tensors", "float32", MIB),
    ],
)
def test_bytes_that_a_call_must_move(kernel: str, variant: str, dtype: str, moved: int) -> None:
    assert kernels_cases.moved(KernelCase(kernel, variant, dtype, MIB)) == moved


def test_all_variants_are_planned() -> None:
    names, dtypes = ["reduce_add", "flatten"], ["float32", "bfloat16"]
    cases = kernels_cases.plan_cases(names, dtypes, [4096, MIB])
    assert [(each.variant, each.dtype) for each in cases if each.size == MIB] == [
        *((f"{count} inputs", "float32") for count in (2, 4, 8)),
        *((f"{count} inputs", "bfloat16") for count in (2, 4, 8)),
        ("400 tensors", "float32"),
        ("4 tensors", "float32"),
        ("400 tensors", "bfloat16"),
        ("4 tensors", "bfloat16"),
    ]
    assert [each.size for each in cases[:2]] == [4096, MIB]
    assert cases[0].name == "reduce_add, 2 inputs, float32"
    with pytest.raises(ValueError, match="2048 bytes, too few for 400 tensors; the least is 4096"):
        kernels_cases.plan_cases(names, dtypes, [MIB, 2048])


def test_many_tensors_have_the_sizes_of_a_transformer() -> None:
    # 33 layers of width d and 4 tensors more: 12 d² + 13 d each.
    sizes = kernels_cases.tensor_sizes(4 * MIB, 400)
    assert (len(sizes), sum(sizes)) == (400, 4 * MIB)
    assert all(size % 16 == 0 for size in sizes)
    width = 102.0
    expected = [w * width**p for w, p in ((1, 1), (1, 1), (3, 2), (3, 1), (1, 2), (1, 1))]
    assert sizes[:6] == pytest.approx(expected, abs=16 + 0.02 * max(expected))
    assert statistics.median(sizes) < 1000 < max(sizes)
    for numel in (1024, 2**14, 10**6 + 1):
        some = kernels_cases.tensor_sizes(numel, 400)
        assert (len(some), sum(some), min(some) >= 1) == (400, numel, True)
    assert kernels_cases.tensor_sizes(1001, 4) == [250, 250, 251, 250]


# --- timing ------------------------------------------------------------------------------------


def test_sets_of_buffers_are_larger_than_caches_and_not_too_many() -> None:
    assert [kernels_timing.num_sets(size, 100) for size in (1, 10, 30, 99, 1000)] == [
        64,
        10,
        4,
        2,
        2,
    ]
    assert [kernels_timing.num_calls(seconds) for seconds in (0.0, 1e-6, 0.0005, 1.0)] == [
        50,
        50,
        10,
        3,
    ]


def test_contestants_take_turns_and_go_round_their_buffers() -> None:
    said: list[str] = []

    def calls(name: str, sets: int) -> Contestant:
        return Contestant([functools.partial(said.append, f"{name}{i}") for i in range(sets)])

    contestants = {"a": calls("a", 3), "b": calls("b", 2)}
    rounds: list[int] = []
    stopwatch = Stopwatch(CPU)
    turns = kernels_timing.measure_turns(contestants, stopwatch, 2, 2, rounds.append)
    warm_up = ["a0", "a1", "a2", "a0", "a1", "a2", "b0", "b1", "b0", "b1", "b0"]
    assert said == [*warm_up, "a0", "a1", "b1", "b0", "a2", "a0", "b1", "b0"]
    assert rounds == [0, 1]
    assert [(name, len(own)) for name, own in turns.items()] == [("a", 2), ("b", 2)]
    assert all(turn.launch is None and turn.seconds > 0 for turn in turns["a"])


def test_only_slow_references_are_not_all_called_beforehand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels_timing, "_WARM_UP", 0.0)
    called: list[int] = []
    for name, expected in (("cpu", [0]), ("virtual:0", [0, 1, 2])):
        contestant = Contestant([functools.partial(called.append, i) for i in range(3)])
        Stopwatch(torch.device(name), filler=1).warm_up(contestant)
        assert called == expected
        called.clear()


def test_on_an_accelerator_events_tell_the_time_and_the_host_its_own() -> None:
    device = torch.device("virtual:0")
    buffer = torch.zeros(1000, device=device)
    contestant = Contestant([lambda: buffer.add_(1)])
    turn = Stopwatch(device, filler=1024).turn(contestant, 5)
    assert turn.seconds > 0
    assert turn.launch is not None and turn.launch > 0
    assert turn.behind is not None
    # Where a turn was repeated, it was with all of its calls.
    assert buffer[0].item() % 5 == 0


@pytest.mark.parametrize(("busy_with", "expected"), [(8, [8]), (32, [8, 16, 32]), (1000, None)])
def test_a_device_that_had_to_wait_gets_more_to_do_in_front(
    busy_with: int, expected: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def queue(self: Stopwatch, calls: Sequence[object], num_fillers: int) -> Turn:
        tried.append(num_fillers)
        return Turn(1.0, 1.0, num_fillers >= busy_with)

    monkeypatch.setattr(Stopwatch, "_queue", queue)
    contestant = Contestant([lambda: None])
    turn = Stopwatch(torch.device("virtual:0"), filler=1).turn(contestant, 3)
    assert tried == (expected or [8, 16, 32, 64, 128])
    assert turn.behind is (expected is not None)
    # The next turn begins with what was enough.
    Stopwatch(torch.device("virtual:0"), filler=1).turn(contestant, 3)
    assert tried[len(expected or range(5)) :] == [min(busy_with, 128)]


# --- conclusions -------------------------------------------------------------------------------


def turns(*seconds: float, launch: float | None = None, behind: bool | None = None) -> list[Turn]:
    return [Turn(each, launch, behind) for each in seconds]


def row(
    kernel: str = "reduce_add",
    variant: str = "2 inputs",
    size: int = 16 * MIB,
    *,
    ours: tuple[float, ...] = (1.0, 2.0, 4.0),
    copy: tuple[float, ...] = (1.0, 1.0, 2.0),
    launch: float | None = None,
    behind: bool | None = None,
    agrees: bool = True,
    **others: tuple[float, ...],
) -> KernelRow:
    measured = {"ours": ours, "copy": copy, **others}
    return kernels_summary.summarize(
        KernelCase(kernel, variant, "float32", size),
        {name: turns(*own, launch=launch, behind=behind) for name, own in measured.items()},
        agrees=agrees,
    )


def test_rates_and_ratios_are_taken_round_by_round() -> None:
    found = row(slow=(4.0, 4.0, 4.0), fast=(0.5, 2.0, 2.0))
    assert found.moved == 48 * MIB
    assert found.seconds == Spread(2.0, 1.0, 4.0)
    assert found.rate == Spread(24 * MIB, 12 * MIB, 48 * MIB)
    assert found.copy_rate == Spread(48 * MIB, 24 * MIB, 48 * MIB)
    assert found.share == Spread(0.5, 0.5, 1.0)
    assert [each.name for each in found.alternatives] == ["fast", "slow"]
    assert found.best is not None
    assert found.best.seconds == Spread(2.0, 0.5, 2.0)
    assert found.best.ratio == Spread(2.0, 1.0, 2.0)
    assert (found.launch, found.best.launch, found.hidden) == (None, None, None)
    assert row().best is None


def test_launches_are_kept_apart() -> None:
    found = row(launch=3e-6, behind=True, torch=(1.0, 1.0, 1.0))
    assert found.launch == Spread(3e-6, 3e-6, 3e-6)
    assert found.hidden is True
    full, empty = (turns(1.0, launch=1.0, behind=behind) for behind in (True, False))
    case = KernelCase("reduce_add", "2 inputs", "float32", MIB)
    for own, torchs in ((full, empty), (empty, full)):
        mixed = {"ours": own, "copy": full, "torch": torchs}
        found = kernels_summary.summarize(case, mixed, agrees=True)
        assert found.best is not None
        assert (found.hidden, found.best.hidden) == (own is full, torchs is full)
    assert kernels_summary.slower_launches([found, row(), row(torch=(1.0, 1.0, 1.0))]) == (0, 1)
    slow = kernels_summary.summarize(
        case, {"ours": turns(1.0, launch=2.0), "copy": full, "torch": full}, agrees=True
    )
    assert kernels_summary.slower_launches([found, slow]) == (1, 2)


def test_bars_are_those_of_large_cases_and_of_what_torch_has_no_operation_for() -> None:
    fast, slow = (0.5, 0.5, 0.5), (2.0, 2.0, 2.0)
    one = (1.0, 1.0, 1.0)
    rows = [
        row(ours=one, copy=(0.95, 0.95, 0.95), torch=slow),
        row("flatten", "4 tensors", ours=one, copy=(0.89, 0.9, 0.89), torch=fast),
        row("unflatten", "4 tensors", ours=one, copy=one, torch=fast),
        # Not judged by the copy: too small, or not only moved.
        row(size=4 * MIB, ours=one, copy=fast, torch=one),
        row("fingerprint", "400 tensors", ours=one, copy=fast, torch=fast),
        row("flatten", "400 tensors", ours=one, copy=one),
    ]
    share, time = kernels_summary.judge(rows)
    assert (share.cases, share.bar, share.met) == (4, 0.9, False)
    assert share.value == pytest.approx(0.89)
    assert share.worst == "flatten, 4 tensors, float32, 16 MiB"
    assert share.missed == (share.worst,)
    # As fast is not faster.
    assert (time.cases, time.bar, time.value, time.met) == (2, 1.0, 1.0, False)
    assert time.missed == (time.worst,) == ("reduce_add, 2 inputs, float32, 4 MiB",)
    share, time = kernels_summary.judge([rows[0]])
    assert (share.value, share.met, time.value, time.met) == (0.95, True, 0.5, True)
    share, time = kernels_summary.judge([rows[4]])
    assert (share.value, share.met, time.cases, time.met) == (None, None, 0, None)


# --- tables and pictures -----------------------------------------------------------------------


def shown(table: Table) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "…" not in text
    return [line.split() for line in text.splitlines() if line.strip()]


def test_a_kernel_fits_into_80_columns() -> None:
    taken: dict[str, Any] = {"ours": (1e-4, 2e-4, 4e-4), "copy": (1e-4, 1e-4, 2e-4)}
    other = (5e-5, 5e-5, 5e-5)
    rows = [
        row("reduce_add", "2 inputs", 256 * MIB, launch=1.2e-3, reference=other, **taken),
        row("reduce_add", "2 inputs", MIB, launch=5.24e-6, agrees=False, **taken),
    ]
    *_, first, second = shown(kernels_report.build_kernel(rows, "reduce_add, float32\nkernels"))
    share = ["0.50", "0.50..1.00"]
    best = ["4.00", "2.00..8.00", "reference"]
    assert first == ["256", "MiB", "✓", "4027", *share, *best, "1200", "1200"]
    assert second == ["1", "MiB", "✗", "15.7", *share, "5.2"]
    rates = [kernels_report.rate(each * 1e9) for each in (0.0123, 1.234, 12.34, 4321.0)]
    assert rates == ["0.012", "1.23", "12.3", "4321"]


def test_a_verdict_is_a_sentence() -> None:
    missed = KernelVerdict("share", 3, ("a", "b"), "a", 0.8501, 0.9)
    text = str(kernels_report.verdict_line(missed))
    assert text == "share: worst 0.850 (a)  bar 0.90, 3 cases: missed by 2"
    met = KernelVerdict("share", 3, (), "a", 0.95, 0.9)
    assert str(kernels_report.verdict_line(met)).endswith("3 cases: met")
    none = KernelVerdict("share", 0, (), "", None, 0.9)
    assert str(kernels_report.verdict_line(none)) == "share: no case measured"


def test_the_roof_is_the_copy_of_each_number_of_bytes() -> None:
    rows = [
        row(size=2 * MIB, copy=(2.0,) * 3),
        row("flatten", "4 tensors", 3 * MIB, copy=(1.0,) * 3),
        row("unflatten", "4 tensors", 3 * MIB, copy=(3.0,) * 3),
        row(size=MIB, copy=(0.5,) * 3),
    ]
    assert list(kernels_plot.roof(rows).items()) == [(3 * MIB, 6 * MIB), (6 * MIB, 3 * MIB)]
    assert kernels_plot.ticks_between(5, 17) == [4, 8, 16, 32]
    assert kernels_plot.ticks_between(8, 8) == [8]
    assert kernels_plot.ticks_between(1, 2**20) == [2**power for power in range(0, 21, 3)]


def test_a_picture_shows_every_kernel(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "rates.svg"
    rows = [row(size=MIB), row(), row("flatten", "4 tensors")]
    kernels_plot.check_plot(str(target))
    kernels_plot.write_plot(str(target), rows, "a device")
    text = target.read_text()
    for words in ("a device", "reduce_add", "flatten", "2 inputs, float32", "copy"):
        assert f"<!-- {words} -->" in text
    with pytest.raises(ValueError, match=r"rates.table has no ending of a picture; take one of"):
        kernels_plot.check_plot(str(tmp_path / "rates.table"))
    with pytest.raises(ValueError, match="in a folder that does not exist; make it first"):
        kernels_plot.check_plot(str(tmp_path / "none" / "rates.png"))
