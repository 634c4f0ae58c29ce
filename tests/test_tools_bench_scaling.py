"""`dataparallel bench scaling`: the model, what it takes from measurements, and a small run."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataparallel.tools import cli
from dataparallel.tools.bench import runner, scaling
from dataparallel.tools.bench.costs import LARGE, SMALL
from dataparallel.tools.bench.harness import Contestant, Outcome
from dataparallel.tools.bench.projection import INSTANT, Bucket, Costs, Link, project

MIB = 2**20
#: Forward, backward, optimizer, Python's part; the package's own four; per byte; moved.
COSTS = Costs(
    *(10.0, 20.0, 2.0, 4.0),
    *(1.0, 3.0, 5.0, 0.5),
    *(0.01, 0.02),
    moved=1000,
    alone=[Bucket(400, 1.0)],
    across=[Bucket(100, 0.25), Bucket(300, 0.5)],
    cores=None,
)
SPEEDS = {"local": Link(100.0, 0.5), "processes": Link(200.0, 0.1)}


@pytest.mark.parametrize(
    ("size", "changes", "seconds", "limit"),
    [
        ((1, 1), {}, 1 + 10 + 20 + 2, "devices"),
        ((1, 1), {"interpreter": 9.0, "own": 30.0}, 30 + 10 + 20 + 2, "host"),
        # own, copies, forward, backward, the sum of the bucket, optimizer.
        ((1, 2), {}, 4.5 + 10.5 + 10 + 20 + 8.5 + 2, "devices"),
        # Five replicas wait for Python, which takes 20.
        ((1, 5), {}, 13.5 + 42 + 20 + 20 + 34 + 2, "link"),
        # The first bucket leaves at 5 and has come at 7.7, the other one takes 7.7 from 20 on.
        ((2, 1), {}, 7 + 10 + 27.7 + 2, "devices"),
        # Sums of 2.5 and 6.5; all is ready at 29, and the first bucket has long come.
        ((2, 2), {}, 10 + 10.5 + 10 + 29 + 7.7 + 2, "link"),
        # The first bucket is summed up at 7.5 and has come at 29.7, after all are ready.
        ((2, 2), {"processes": Link(5.0, 0.1)}, 10 + 10.5 + 10 + 29.7 + 66.2 + 2, "link"),
        # Replicas share memory and have a core each.
        ((1, 2), {"cores": 2}, 4.5 + 10 + 20 + 4 + 2, "devices"),
        # Two replicas per core.
        ((1, 4), {"cores": 2}, 10.5 + 20 + 40 + 12 + 2, "devices"),
        # No core is free, so that nothing overlaps; and with one more core.
        ((2, 1), {"cores": 1}, 7 + 10 + 20 + 2.7 + 7.7 + 2, "devices"),
        ((2, 1), {"cores": 2}, 7 + 10 + 27.7 + 2, "devices"),
    ],
)
def test_the_model_by_hand(
    size: tuple[int, int], changes: dict[str, Any], seconds: float, limit: str
) -> None:
    links = {place: changes.get(place, link) for place, link in SPEEDS.items()}
    own = dataclasses.replace(COSTS, **{k: v for k, v in changes.items() if k not in links})
    found = project(own, *size, links)
    assert (found.processes, found.replicas) == size
    assert found.seconds == pytest.approx(seconds) and found.limit == limit
    assert found.efficiency == pytest.approx((own.own + 32) / seconds)


costs = st.floats(0.001, 10.0)
links = st.builds(Link, st.floats(1.0, 1e4), costs)
buckets = st.lists(st.builds(Bucket, st.integers(1, 1000), st.floats(0.0, 1.0)), min_size=1)
numbers = [name for name, value in vars(COSTS).items() if isinstance(value, float)]
plans: dict[str, Any] = dict.fromkeys(["alone", "across"], buckets)
cores = st.sampled_from([None, 1, 2, 8])
measured = st.builds(
    Costs, moved=st.integers(0, 1000), cores=cores, **plans, **dict.fromkeys(numbers, costs)
)
few = st.integers(1, 9)


@given(measured, few, few, links, links, st.floats(1.0, 10.0))
def test_properties_of_the_model(
    own: Costs, processes: int, replicas: int, local: Link, between: Link, faster: float
) -> None:
    def seconds(local: Link, between: Link, overlaps: bool = True) -> float:
        speeds = {"local": local, "processes": between}
        return project(own, processes, replicas, speeds, overlaps=overlaps).seconds

    before = seconds(local, between)
    slack = 1e-9 * before
    # More bandwidth, or more overlap, never makes a step slower.
    assert seconds(Link(local.bandwidth * faster, local.latency), between) <= before + slack
    assert seconds(local, Link(between.bandwidth * faster, between.latency)) <= before + slack
    assert before <= seconds(local, between, overlaps=False) + slack
    # One process has no link to others; one replica, or replicas in one memory, no local one.
    if processes == 1:
        assert seconds(local, INSTANT) == before
    if replicas == 1 or own.cores:
        assert seconds(INSTANT, between) == before
    # Over links that take no time, without sums and the package's own costs, only compute is left.
    none: dict[str, Any] = {name: 0.0 for name in numbers if "own" in name or "byte" in name}
    ideal = dataclasses.replace(own, **none)
    found = project(ideal, processes, replicas, {"local": INSTANT, "processes": INSTANT})
    share = max(1.0, replicas / (own.cores or replicas))
    forward = max(own.forward * share, replicas * own.interpreter)
    assert found.seconds == pytest.approx(forward + own.backward * share + own.optimizer)
    assert found.limit != "link"


TOOK: dict[str, dict[str, float]] = {
    "alone": {
        **{"forward": 10, "backward": 20, "optimizer": 2, "interpreter": 40, "sum": 6, "pack": 3},
        **{"probe forward": 1, "probe 0": 5, "probe 1": 7, "probe 2": 12, "probe buckets": 13},
    },
    "between": {"small": 3 + SMALL, "large": 3 + LARGE, "probe 1": 10.5 + SMALL},
}


@pytest.mark.parametrize(
    ("words", "cores", "moved", "alone", "shown"),
    [
        ("", 2, 0, [3], "overlaps with backward if R < 2 cores"),
        ("--bucket-cap-mb 0.5", 2, 0, [2, 1], "replicas share memory, processes 12.5GB/s,10us"),
        ("--link local=3GB/s,0us --device 0", None, 3 * MIB + 100, [3], "local 3GB/s,0us, pro"),
        ("--link local=nvlink4 --device 0", None, 3 * MIB + 100, [3], "local 450GB/s,3us, pro"),
    ],
)
def test_costs_are_differences_of_what_was_measured(
    words: str,
    cores: int | None,
    moved: int,
    alone: list[int],
    shown: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = {"bytes": [2 * MIB, MIB], "ready": [0.25, 0.9], "batch": 100}

    def measure(case: str, contestants: Sequence[Contestant], *_: Any) -> list[Outcome]:
        rounds = [{name: (float(s),) for name, s in TOOK[c.name].items()} for c in contestants]
        return [Outcome(*each, []) for each in zip(contestants, [[told]] * 2, rounds, strict=True)]

    monkeypatch.setattr(runner, "measure", measure)
    monkeypatch.setattr(scaling, "usable_cores", lambda: 2)
    target = tmp_path / "results.json"
    words = f"bench scaling --cases mlp --json {target} {words}"
    assert cli.main(words.split()) == 0
    text = capsys.readouterr().out
    assert shown in text and "forward  = max(1e+04 * busy, R * 1e+04)" in text
    assert ", with MiB_k at when_k: 2 at 25%, 1 at 90%\n" in text
    (case,) = json.loads(target.read_text())["cases"]
    assert case["measured_link"] == {"bandwidth": 1.0, "latency": 1.5}
    found = case["costs"]
    assert (found["interpreter"], found["own"], found["own_replica"]) == (10.0, 2.0, 4.0)
    assert (found["own_process"], found["own_bucket"], found["cores"]) == (0.5, 1.0, cores)
    assert found["sum_per_byte"] == 2 * found["pack_per_byte"] == 6 / (3 * MIB)
    assert found["moved"] == moved
    assert [each["bytes"] / MIB for each in found["alone"]] == alone
    # The first bucket is full with 1 MiB, and has what comes first.
    assert found["across"] == [{"bytes": 2 * MIB, "ready": 0.25}, {"bytes": MIB, "ready": 0.9}]


@pytest.mark.usefixtures("forked_workers")
def test_a_small_run(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "_CHECKED", ((1, 1), (2, 1)))
    target = tmp_path / "results.json"
    words = "bench scaling --cases conv --samples 1 --rounds 1 --steps 1 --check --replicas 1,2"
    assert cli.main([*words.split(), "--processes", "1,64", "--json", str(target)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("conv, 1 samples per replica\nstep     = own + copies")
    assert text.count("64x2") == 1 and "error: projected / measured - 1" in text
    (case,) = json.loads(target.read_text())["cases"]
    sizes = [(each["processes"], each["replicas"]) for each in case["projections"]]
    assert sizes == [(1, 1), (1, 2), (64, 1), (64, 2)] and len(case["checks"]) == 2
    assert list(case["seconds"]) == ["alone", "between", "1x1", "2x1"]
    for check in case["checks"]:
        ratio = check["projection"]["seconds"] / check["measured"]["median"]
        assert check["error"] == pytest.approx(ratio - 1)
