"""A seed chooses in which order streams run, among the orders that the program allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from dataparallel.virtual import check_races, enable, pending, set_schedule, strict_mode
from dataparallel.virtual import device_module as virtual
from tests.virtual.oracle import run_python

SEEDS = range(40)


@pytest.fixture(autouse=True)
def _strict_without_checks() -> Iterator[None]:
    with strict_mode(), check_races(False):
        yield
        set_schedule(None)
        for index in range(4):
            virtual.synchronize(index)


def order_of(seed: int | None) -> int:
    """The order in which three streams append their digits, twice each, to one number."""
    set_schedule(None)
    x = torch.zeros((), dtype=torch.int64, device="virtual:0")
    digits = [torch.tensor(i, device="virtual:0") for i in (1, 2, 3)]
    virtual.synchronize(0)
    set_schedule(seed)
    streams = [torch.Stream("virtual:0") for _ in digits]
    for _ in range(2):
        for stream, digit in zip(streams, digits, strict=True):
            with stream:
                torch.add(digit, x, alpha=10, out=x)
    virtual.synchronize(0)
    return int(x.item())


def test_a_seed_gives_one_order_and_seeds_give_all() -> None:
    assert all(order_of(seed) == order_of(seed) for seed in SEEDS)
    # Six places for the digits, of which each has two; streams keep their own order.
    assert len({order_of(seed) for seed in range(3000)}) == 90
    assert order_of(None) == 112233


def test_streams_run_ahead_but_not_of_what_they_wait_for(stream: torch.Stream) -> None:
    seen = set()
    for seed in SEEDS:
        x = torch.ones(4, device="virtual:0")
        virtual.synchronize(0)
        set_schedule(seed)
        current = virtual.current_stream(0)
        for _ in range(3):
            x.add_(1)
            stream.wait_stream(current)
            with stream:
                x.mul_(2)
            current.wait_stream(stream)
        there = x.to("virtual:1")
        seen.add(pending())
        assert there.tolist() == [22.0] * 4
    assert min(seen) == 0 < max(seen)


def prefetch(waits: bool) -> float:
    """Training on batches that a side stream copies to the device."""
    current, copying = virtual.current_stream(0), torch.Stream("virtual:0")
    weight = torch.zeros(4, device="virtual:0")
    for i in range(30):
        with copying:
            batch = torch.full((4,), float(i)).pin_memory().to("virtual:0", non_blocking=True)
        if waits:
            current.wait_stream(copying)
        batch.record_stream(current)
        weight = weight + batch
    return weight.sum().item()


def evaluate(waits: bool) -> float:
    """A side stream of another device copies results that the caller's stream computes."""
    current, other = virtual.current_stream(0), torch.Stream("virtual:0")
    total = torch.zeros(4, device="virtual:1")
    for i in range(30):
        result = torch.full((4,), float(i), device="virtual:0")
        if waits:
            other.wait_stream(current)
        result.record_stream(other)
        with other:
            total = total + result.to("virtual:1")
        # The wait back orders memory, and not what was read before.
        current.wait_stream(other)
    virtual.synchronize(0)
    return total.sum().item()


@pytest.mark.parametrize("program", [prefetch, evaluate])
def test_most_seeds_show_a_wait_that_is_missing(program: Callable[[bool], float]) -> None:
    wrong = []
    for seed in SEEDS:
        set_schedule(seed)
        assert program(True) == 4 * sum(range(30))
        wrong.append(program(False) != 4 * sum(range(30)))
    assert sum(wrong) > len(SEEDS) / 2
    set_schedule(None)
    # The order without a seed may be a lucky one.
    assert program is prefetch or program(False) == 4 * sum(range(30))


def test_an_error_of_what_ran_ahead_comes_with_the_next_wait(stream: torch.Stream) -> None:
    table, index = torch.ones(3, 2, device="virtual:0"), torch.tensor([7], device="virtual:0")
    virtual.synchronize(0)
    for seed in SEEDS:
        set_schedule(seed)
        with stream:
            table.index_select(0, index)
            good = table + 1
        with pytest.raises(IndexError, match=r"(?s)out of range.*aten::index_select.*virtual:0"):
            stream.synchronize()
        stream.synchronize()
        assert good.sum().item() == 12


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        (-1, ValueError, "at least 0 and below .*got -1"),
        (1 << 64, ValueError, "at least 0 and below .*got 18446744073709551616"),
        (1.5, TypeError, "is an int or None, got 1.5"),
        (True, TypeError, "is an int or None, got True"),
    ],
)
def test_wrong_seeds(seed: int, error: type[Exception], message: str) -> None:
    for call in (set_schedule, lambda seed: enable(4, schedule=seed)):
        with pytest.raises(error, match=message):
            call(seed)


def test_seeds_of_the_environment_and_of_a_call() -> None:
    done = run_python(
        """
        import torch, dataparallel.virtual as virtual_devices
        virtual_devices.enable(1, races=False)
        def order():
            streams = [torch.Stream("virtual:0") for _ in range(2)]
            x, *digits = (torch.tensor(i).to("virtual:0") for i in range(3))
            for i in range(18):
                with streams[i % 2]:
                    torch.add(digits[i % 2], x, alpha=10, out=x)
            torch.virtual.synchronize()
            return x.item()
        orders = [order()]
        for seed in (7, 7, 9):
            virtual_devices.enable(1, schedule=seed)
            orders.append(order())
        virtual_devices.set_schedule(None)
        print(*orders, order())
        """,
        DATAPARALLEL_VIRTUAL_SCHEDULE="7",
    )
    first, second, third, other, plain = done.stdout.split()
    assert first == second == third and len({first, other, plain}) == 3
    assert plain == "1" * 9 + "2" * 9
