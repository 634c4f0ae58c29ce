"""What a soak test plans, reads and reports; and a short one."""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
from typing import Any

import pytest

from tests.faults import soak
from tests.faults.injector import Fault
from tests.faults.soak_journal import PACED, Journal, Summary
from tests.faults.soak_worker import Settings


def test_the_plan() -> None:
    plan = soak.make_plan(1000, 20, 3, networks=True)
    assert plan == soak.make_plan(1000, 20, 3, networks=True)
    kinds = collections.Counter(fault.kind for fault in plan)
    assert kinds == {"kill": 4, "raise": 4, "stop": 4, "loopback": 4, "exit": 4}
    steps = [fault.step for fault in plan]
    assert steps == sorted(steps)
    assert all(number * 50 <= step < (number + 1) * 50 for number, step in enumerate(steps))
    assert {fault.rank for fault in plan} == {0, 1}
    for fault in plan:
        assert (fault.seconds is not None) == (fault.kind in ("stop", "loopback"))
    assert "loopback" not in {fault.kind for fault in soak.make_plan(1000, 20, 3, networks=False)}


def test_settings_are_kept(tmp_path: pathlib.Path) -> None:
    settings = Settings(str(tmp_path), "m", 5, 0.1, plan=[Fault(1, 2, "stop", 3.0)])
    settings.write()
    assert Settings.read(str(tmp_path)) == settings


def write(folder: pathlib.Path, *lines: dict[str, Any]) -> None:
    with open(folder / "journal", "a") as file:
        for line in lines:
            file.write(json.dumps({"restart": 0, "rank": 0, **line}) + "\n")


def step(number: int, time: float) -> dict[str, Any]:
    return {"event": "step", "step": number, "time": time, "seconds": 1.0, "loss": 0.5 - number}


def lived_through(folder: pathlib.Path, digest: str, weights: str = "same") -> None:
    """Four steps, of which one is made twice, and a pause of three seconds."""
    write(folder, {"event": "start", "step": 0, "time": 10.0}, step(0, 11.0), step(1, 12.0))
    write(folder, {"event": "error", "step": 2, "time": 12.5, "kind": "E", "text": "t"})
    write(folder, {"event": "recovered", "step": 1, "time": 13.0, "rank": 1})
    write(folder, {"event": "recovered", "step": 1, "time": 13.0}, step(1, 15.0), step(2, 16.0))
    write(folder, {"event": "start", "step": 3, "time": 17.0, "restart": 1}, step(3, 18.0))
    end = {"event": "end", "step": 4, "time": 20.0}
    write(folder, {**end, "digest": digest, "parameters": weights, "rank": 1})
    write(folder, {**end, "digest": "first", "parameters": "same"})


def test_what_the_journal_says(tmp_path: pathlib.Path) -> None:
    for name in ("faults", "quiet", "other"):
        (tmp_path / name).mkdir()
        lived_through(tmp_path / name, "other" if name == "other" else "second")
    plan = [Fault(1, 2, "raise"), Fault(0, 3, "kill")]
    (tmp_path / "faults" / "happened").write_text("raise 1 2\nkill 0 3\n")
    found, quiet, other = (
        Journal(str(tmp_path / name)).summary(4) for name in ("faults", "quiet", "other")
    )
    assert (found.done, found.steps, found.seconds, found.typical) == (4, 4, 10.0, 1.0)
    assert (found.restarts, found.recoveries, found.lost) == (1, 1, (0, 1, 0))
    assert found.gaps == (3.0, 2.0)
    assert found.digests == ("first", "second")
    assert found.goodput == 0.4
    assert found.per_hour == 720
    assert found.has_same_end(quiet)
    assert not found.has_same_end(other)
    assert found.is_right(quiet, plan)
    assert not found.is_fast(), "the goodput is below what it has to be"
    options = argparse.Namespace(minutes=1, per_hour=150, pace=0.1, seed=0)
    text = found.report(quiet, plan, options)
    assert "| goodput | 40.0% | at least 80% | **no** |" in text
    assert "| faults that happened | 2 | all 2 planned | yes |" in text
    assert "| weights and statistics of both processes | first second |" in text
    assert "| weights of one process and of the other | same same | the same bits | yes |" in text
    lines = found.report(other, plan, options).splitlines()
    assert [line for line in lines if line.startswith("| weights") and "**no**" in line]


def test_processes_that_went_apart_in_the_same_way_with_and_without_faults(
    tmp_path: pathlib.Path,
) -> None:
    lived_through(tmp_path, "second", weights="others")
    found = Journal(str(tmp_path)).summary(4)
    assert not found.has_same_end(found)
    text = found.report(found, [], argparse.Namespace(minutes=1, per_hour=1, pace=0.1, seed=0))
    assert "| same others | the same bits | **no** |" in text


def test_the_time_of_a_step_is_that_without_faults(tmp_path: pathlib.Path) -> None:
    lived_through(tmp_path, "second")
    found = Journal(str(tmp_path), typical=0.5).summary(4)
    assert (found.typical, found.goodput) == (0.5, 0.2)
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    # Only the first ones keep the pace.
    for number in range(3 * PACED):
        write(quiet, {**step(number, 1.0), "seconds": 0.1 if number < PACED else 0.01})
    assert Journal(str(quiet)).summary(3 * PACED).typical == 0.1


@pytest.mark.parametrize(
    ("loss", "per_hour", "status"), [(1.0, 1000.0, 0), (1.0, 1.0, 2), (2.0, 1000.0, 1)]
)
def test_the_exit_status(
    loss: float, per_hour: float, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(settings: Settings, limit: float, **options: Any) -> Summary:
        disturbed = options.get("typical") is not None
        assert disturbed == bool(settings.plan) == bool(settings.memory)
        assert (settings.pace, settings.paced) == (0.1, None if disturbed else PACED)
        return Summary(
            steps=settings.steps,
            seconds=len(settings.plan) / per_hour * 3600,
            done=settings.steps,
            faults=tuple(map(str, settings.plan)),
            restarts=0,
            recoveries=0,
            lost=(),
            typical=1.0,
            loss=loss if disturbed else 1.0,
            digests=("a", "b"),
            parameters=("c", "c"),
            gaps=(),
        )

    monkeypatch.setattr(soak, "soak", train)
    assert soak.main(["--minutes", "1"]) == status


def test_a_line_that_is_not_complete(tmp_path: pathlib.Path) -> None:
    write(tmp_path, step(0, 1.0))
    journal = Journal(str(tmp_path))
    with open(tmp_path / "journal", "a") as file:
        whole = json.dumps({"restart": 0, "rank": 0, **step(1, 2.0)})
        file.write(whole[:20])
        file.flush()
        assert journal.summary(9).done == 1
        file.write(f"{whole[20:]}\n")
    assert journal.summary(9).done == 2


@pytest.mark.long_faults
def test_a_short_soak(tmp_path: pathlib.Path) -> None:
    result = tmp_path / "result.md"
    arguments = ["--minutes", "1", "--folder", str(tmp_path), "--write", str(result)]
    # Starting again takes too large a part of a minute for the goodput that is asked for.
    assert soak.main([*arguments, "--seed", "1"]) in (0, 2)
    text = result.read_text()
    assert "the same bits as without faults | yes |" in text
    assert "| faults that happened | 4 | all 4 planned | yes |" in text
