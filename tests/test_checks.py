"""What processes are about to do is compared before they do it, in threads that stand for them."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from dataparallel.comm import checks as checks_module
from dataparallel.comm.calls import Call, Said, describe, difference
from dataparallel.comm.check_board import Board
from dataparallel.comm.checks import (
    CheckMode,
    CollectiveChecks,
    CollectiveMismatch,
    Sampling,
    checked_mode,
)

_names = itertools.count()


def call(what: str = "bucket 0", **changed: Any) -> Call:
    plain = Call("all_reduce", "sum", torch.float32, (4, 3), what)
    return plain._replace(**changed)


class Members:
    """The checks of several members, which share a store."""

    def __init__(self, size: int, mode: CheckMode = "always", timeout: float = 20.0) -> None:
        from torch._C._distributed_c10d import HashStore

        store = HashStore()
        store.set_timeout(timedelta(seconds=10))
        self.boards = [Board(store) for _ in range(size)]
        name = f"reducer/{next(_names)}"
        self.checks = [
            CollectiveChecks(name, board, range(size), rank, mode=mode, timeout=timeout)
            for rank, board in enumerate(self.boards)
        ]

    def before(self, calls: list[Call], delays: dict[int, float] | None = None) -> list[str]:
        """The error of each member, or nothing."""
        texts = [""] * len(calls)

        def run(rank: int) -> None:
            threading.Event().wait((delays or {}).get(rank, 0.0))
            try:
                self.checks[rank].before(calls[rank])
            except CollectiveMismatch as error:
                texts[rank] = str(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
        return texts

    def hear(self, rank: int) -> str:
        """The error that comes late."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                self.checks[rank].hear()
            except CollectiveMismatch as error:
                return str(error)
            threading.Event().wait(0.01)
        return ""


# --- what is compared ------------------------------------------------------------------------

OTHERS: list[tuple[str, Call]] = [
    ("operations", call(operation="broadcast", option="from 0")),
    ("options", call(option="max")),
    ("dtypes", call(dtype=torch.int32)),
    ("shapes", call(shape=(3, 4))),
    ("orders", call("bucket 1")),
]


@pytest.mark.parametrize(("kind", "other"), OTHERS, ids=[kind for kind, _ in OTHERS])
@pytest.mark.parametrize("size", [2, 4])
def test_all_members_get_the_same_error(kind: str, other: Call, size: int) -> None:
    members = Members(size)
    assert members.before([call()] * size) == [""] * size
    started = time.monotonic()
    texts = members.before([call()] * (size - 1) + [other])
    assert time.monotonic() - started < 1.0
    ranks = "rank 0" if size == 2 else "ranks 0, 1, 2"
    assert texts[0] == (
        f"the processes came with different {kind} to collective 2 for 'reducer', which was not "
        f"launched:\n  {ranks}: {describe(call().to_json())}\n  rank {size - 1}: "
        f"{describe(other.to_json())}\n{checks_module._USABLE}"
    )
    assert texts == texts[:1] * size
    assert members.before([call("bucket 1")] * size) == [""] * size


def test_names_of_parameters_may_differ() -> None:
    members = Members(2)
    calls = [call("bucket 0 (a.weight)"), call("bucket 0 (module.a.weight)")]
    assert members.before(calls) == ["", ""]


def test_sizes_for_each_member_go_together() -> None:
    def parcels(gives: list[int], gets: list[int]) -> dict[str, Any]:
        return call(operation="all_to_all", option="", gives=gives, gets=gets).to_json()

    fits = [Said(1, parcels([0, 5], [0, 2]), ""), Said(1, parcels([2, 3], [5, 3]), "")]
    assert difference(fits) is None
    assert difference([fits[0], Said(1, parcels([2, 3], [4, 3]), "")]) == "sizes"
    assert difference([fits[0], Said(1, parcels([1, 3], [5, 3]), "")]) == "sizes"


def test_swapped_collectives_of_one_shape_are_told() -> None:
    members = Members(2)
    first, second = members.before([call("bucket 0"), call("bucket 1")])
    assert first == second
    assert "different orders" in first


# --- when there are checks -------------------------------------------------------------------


def due(sampling: Sampling, number: int) -> list[int]:
    return [i for i in range(1, number + 1) if sampling.is_due()]


def test_the_first_collectives_are_checked_and_then_every_64th() -> None:
    assert due(Sampling("sampled"), 200) == [1, 2, 3, 64, 128, 192]
    assert due(Sampling("off"), 5) == []
    assert due(Sampling("always"), 5) == [1, 2, 3, 4, 5]


def test_all_collectives_of_a_step_are_checked() -> None:
    sampling = Sampling("sampled")
    assert due(sampling, 2) == [1, 2]
    found = []
    for step in range(1, 70):
        sampling.begin_step()
        found += [step] * len(due(sampling, 2))
    assert found == [1, 1, 2, 2, 3, 3, 64, 64]


def test_the_steps_after_a_difference_are_checked() -> None:
    sampling = Sampling("sampled")
    due(sampling, 10)
    sampling.after_difference()
    assert due(sampling, 10) == [1, 2, 3]


def test_a_mode_is_one_of_three() -> None:
    with pytest.raises(ValueError, match=r"'off', 'sampled' or 'always', but got 'on'"):
        checked_mode("on")


def test_a_difference_between_two_checks_is_told_at_the_next_one() -> None:
    members = Members(2, "sampled")
    for number in range(1, 64):
        calls = [call(f"bucket {number}")] * 2
        if number in (40, 41):
            calls[1] = call(f"bucket {81 - number}")
        assert members.before(calls) == ["", ""]
    first, second = members.before([call("bucket 64")] * 2)
    assert first == second
    assert first.startswith("the processes have run different collectives for 'reducer'")
    assert "collective 40 was:\n  rank 0: all_reduce (sum) of bucket 40, float32 (4, 3)" in first
    assert "rank 1: all_reduce (sum) of bucket 41, float32 (4, 3)\n" in first
    assert first.endswith(checks_module._USABLE)
    checked = []
    for _ in range(5):
        assert members.before([call("bucket 65")] * 2) == ["", ""]
        checked.append(members.checks[1].num_checks)
    assert checked == [5, 6, 7, 7, 7]


def test_one_that_ran_more_is_told() -> None:
    members = Members(2, "sampled")
    for number in range(1, 62):
        assert members.before([call(f"bucket {number}")] * 2) == ["", ""]
    for number in (62, 63):
        members.checks[0].before(call(f"bucket {number}"))
    members.checks[1].before(call("bucket 63"))
    # The second one is not at its 64th yet.
    first, _ = members.before([call("bucket 64")] * 2)
    assert first == ""
    with pytest.raises(CollectiveMismatch, match=r"collective 62 was:\n  rank 0: .* bucket 62,"):
        members.checks[1].before(call("bucket 65"))
    text = members.hear(0)
    assert "rank 1: all_reduce (sum) of bucket 63, float32 (4, 3)" in text
    assert text.endswith(checks_module._UNUSABLE)


# --- members that do not come together -------------------------------------------------------


@pytest.mark.parametrize("late", [0, 1])
def test_nobody_waits_long_for_one_that_comes_late(
    late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks_module, "PATIENCE", 0.05)
    members = Members(2)
    texts = members.before([call(), call(dtype=torch.float64)], {late: 0.6})
    # Who waited has launched without an answer; the other one has not.
    assert texts[1 - late] == ""
    assert "different dtypes" in texts[late]
    assert members.hear(1 - late) == texts[late]
    assert texts[late].endswith(checks_module._UNUSABLE)


def test_an_early_one_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_module, "PATIENCE", 0.05)
    members = Members(2)
    started = time.monotonic()
    for number in range(1, 51):
        members.checks[0].before(call(f"bucket {number}"))
    assert time.monotonic() - started < 5
    for number in range(1, 51):
        members.checks[1].before(call(f"bucket {number}"))
    assert members.before([call()] * 2) == ["", ""]
    members.checks[0].hear()
    assert not members.checks[0]._unanswered


def test_one_that_ran_ahead_has_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_module, "PATIENCE", 0.05)
    members = Members(2)
    for number in (1, 2, 3):
        members.checks[0].before(call(f"bucket {number}"))
    members.checks[1].before(call("bucket 1"))
    members.checks[1].before(call("bucket 2"))
    with pytest.raises(CollectiveMismatch, match="different orders to collective 3") as raised:
        members.checks[1].before(call("bucket 4"))
    assert not raised.value.usable
    assert members.hear(0) == str(raised.value)


def test_one_without_checks_ends_those_of_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checks_module, "PATIENCE", 0.05)
    members = Members(2, timeout=0.3)
    members.checks[0].before(call())
    deadline = time.monotonic() + 10
    while members.checks[0].mode != "off" and time.monotonic() < deadline:
        members.checks[0].hear()
    assert members.checks[0].mode == "off"
    assert "'reducer' are not checked any more" in caplog.text
    members.checks[0].before(call())


def test_whoever_waits_is_released() -> None:
    members = Members(2)

    def alive() -> None:
        raise ZeroDivisionError("rank 1 has ended")

    with pytest.raises(ZeroDivisionError, match="rank 1 has ended"):
        members.checks[0].before(call(), alive)


def until(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if condition():
            return True
        threading.Event().wait(0.01)
    return False


def test_the_thread_ends_when_nothing_is_left() -> None:
    members = Members(2)
    members.before([call()] * 2)
    assert until(lambda: all(board._thread is None for board in members.boards))
    members.checks[0].before(call(), lambda: members.checks[0].close())
    assert members.checks[0].mode == "off"
    assert until(lambda: members.boards[0]._thread is None)
