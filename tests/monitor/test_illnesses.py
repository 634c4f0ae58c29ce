"""Illnesses of runs, and what the monitor advises: runs that were made up, and small real ones.

A table of runs that were made up has the illnesses, and another one runs that have none.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset

import dataparallel.virtual
from dataparallel import DataParallel, DistributedDataParallel
from dataparallel.monitor import StepMonitor
from dataparallel.monitor.findings import Finding
from dataparallel.monitor.readings.reading import HostReading, ProcessReading
from dataparallel.monitor.record import Kind
from dataparallel.monitor.sample import Sample
from dataparallel.monitor.summary import Summary
from dataparallel.threads import PHASES, Phase
from dataparallel.tools.monitor.alerts import find_alerts
from dataparallel.tools.monitor.history import History
from dataparallel.tools.monitor.report import make_report
from tests.cluster import Cluster
from tests.monitor.cases import (
    BEGIN,
    GIB,
    PID,
    FakeRun,
    Seconds,
    history_of,
    make_info,
    recording,
    sample,
)

#: Findings that only one of these runs may have.
ILLNESSES = {
    *("oversubscribed", "wait policy", "input", "host-bound", "slow replica", "small buckets"),
    "memory pressure",
}

# --- runs that were made up ------------------------------------------------------------------

#: Steps of 100 ms in which nothing is wrong: of a plain loop, and of this package's wrapper.
LOOP: Seconds = {"input": 0.003, "forward": 0.030, "backward": 0.060, "optimizer": 0.007}
OURS: Seconds = {
    **LOOP,
    "scatter": 0.002,
    "backward": 0.050,
    "reduce local": 0.004,
    "reduce across processes": 0.004,
}
FOUR: Seconds = {phase: 4 * seconds for phase, seconds in LOOP.items()}
HOOKED: dict[str, Any] = {"buckets": 0, "is_hooked": True}
MANY_THREADS = {"num_threads": 16, "num_cpus": 4.0, "device": "cpu"}


def plus(seconds: Seconds, **more: float) -> Seconds:
    """Return phases of which some take longer; words are joined with underscores."""
    added = {name.replace("_", " "): length for name, length in more.items()}
    return {**seconds, **{p: seconds.get(p, 0.0) + added[p] for p in PHASES if p in added}}


class Made(NamedTuple):
    """A run that was made up: the replicas of each rank, and what it does besides."""

    ranks: Sequence[Sequence[Seconds]]
    about: Mapping[str, Any] = HOOKED
    #: Called with each rank at each of 30 looks, a second apart, behind ten steps.
    besides: Callable[[FakeRun, int], object] = lambda run, look: None
    #: From this look on it stands still, in these phases; the host has so much memory in use.
    stops: int = 99
    phases: Sequence[Phase] = ()
    memory: Callable[[int], float] = lambda look: 4.0

    def samples(self) -> list[Sample]:
        runs = []
        for rank, replicas in enumerate(self.ranks):
            info = make_info(
                len(replicas), **{"device": "cuda", "world_size": len(self.ranks), **self.about}
            )
            if self.about.get("device") == "cpu":
                info = dataclasses.replace(info, devices=("cpu",) * len(replicas))
            runs.append(FakeRun(info, pid=PID + rank, rank=rank))
        found = []
        for look in range(30):
            now: dict[str, Any] = {}
            states = []
            for rank, run in enumerate(runs):
                if look < self.stops:
                    run.steps(10, self.ranks[rank])
                    self.besides(run, look)
                else:
                    phase = self.phases[rank]
                    now = {"now": ((phase, float(look - self.stops)),) * len(self.ranks[rank])}
                states.append(run.state(BEGIN + look, **now))
            held = self.memory(look) * GIB
            one = dataclasses.replace(
                sample(float(look)),
                runs=tuple(states),
                host=HostReading(0.25, 8, held, 16 * GIB),
                processes=(ProcessReading("cpu", PID, host_memory=held),),
            )
            found.append(one)
        return found


def every(number: int, steps: int, seconds: Seconds, kind: Kind = "train") -> Any:
    """Let a run make other steps, too, once in so many looks."""

    def act(run: FakeRun, look: int) -> None:
        if look % number == number - 1:
            run.steps(steps, [seconds] * len(run.info.devices), kind=kind)

    return act


def save_in_rank_1(run: FakeRun, look: int) -> None:
    if run.pid > PID:
        run.steps(1, [plus(LOOP, pause=0.4)])


PAUSE = plus(LOOP, pause=1.5)
EVALUATE = every(5, 20, {"input": 0.01, "forward": 0.03}, "inference")
#: The run, the kind of the first advice, and how its text begins.
ILL: dict[str, tuple[Made, str, str]] = {
    "slow loader": (Made([[plus(LOOP, input=0.1)]]), "input", "52 % of each step passes before"),
    "slow loader, with evaluation": (
        Made([[plus(LOOP, input=0.1)]], besides=EVALUATE),
        "input",
        "52 % of each step passes before",
    ),
    "slow rank in forward": (
        Made([[plus(OURS, reduce_across_processes=0.08)], [plus(OURS, forward=0.08)]], {}),
        "slow rank",
        "Rank 1 is slow in 'forward'",
    ),
    "slow rank in forward, torch's wrapper": (
        Made([[plus(LOOP, backward=0.08)], [plus(LOOP, forward=0.08)]]),
        "slow rank",
        "Rank 1 is slow in 'forward'",
    ),
    "slow rank in input": (
        Made([[plus(OURS, reduce_across_processes=0.08)], [plus(OURS, input=0.08)]], {}),
        "slow rank",
        "Rank 1 is slow in 'input'",
    ),
    "slow rank in input, torch's wrapper": (
        Made([[plus(LOOP, backward=0.08)], [plus(LOOP, input=0.08)]]),
        "slow rank",
        "Rank 1 is slow in 'input'",
    ),
    "a rank that saves while the others wait": (
        Made(
            [[plus(LOOP, backward=0.04)], [LOOP]],
            besides=save_in_rank_1,
        ),
        "slow rank",
        "Rank 1 is slow in 'pause'",
    ),
    "oversubscribed threads": (
        Made([[LOOP]], {**HOOKED, **MANY_THREADS}),
        "oversubscribed",
        "16 threads compute on 4 processors",
    ),
    "optimizer that is not fused": (
        Made([[plus(LOOP, optimizer=0.08)]], {**HOOKED, "faster_option": "fused"}),
        "optimizer",
        "48 % of each step is the optimizer's. Give the optimizer fused=True",
    ),
    "long pauses": (
        Made([[LOOP]], besides=every(2, 1, PAUSE)),
        "pauses",
        "15 long pauses of 1.5 s, 42 % of the time, all between steps: checkpoint",
    ),
    "long pauses, with evaluation": (
        Made([[LOOP]], besides=lambda *at: [act(*at) for act in (every(2, 1, PAUSE), EVALUATE)]),
        "pauses",
        "15 long pauses of 1.5 s",
    ),
    "a slow replica": (
        Made([[OURS, plus(OURS, forward=0.05, backward=0.05)]], {}),
        "slow replica",
        "Replica 1 on cuda:1 takes",
    ),
    "a rank that hangs": (
        Made([[OURS]] * 2, {}, stops=9, phases=["reduce across processes", "forward"]),
        "hang",
        "Rank 1 has made no step for 21 s: it has been in 'forward' for 20 s",
    ),
    "a rank that hangs, torch's wrapper": (
        Made([[LOOP]] * 2, stops=9, phases=["backward", "backward"]),
        "hang",
        "Rank 0 has made no step for 21 s",
    ),
    "memory of the host": (
        Made([[LOOP]], memory=lambda look: 2 + look / 4),
        "host memory",
        "the processes of the runs take 15.0 GiB more of the host's memory each minute (94 %",
    ),
}
#: Runs of five kinds: a plain loop, torch's wrapper, ours, with evaluation, with accumulation.
HEALTHY: dict[str, Made] = {
    "a plain loop": Made([[LOOP]]),
    "a plain loop with a fused optimizer": Made([[plus(LOOP, optimizer=0.002)]]),
    "a plain loop that saves once": Made([[LOOP]], besides=every(20, 1, PAUSE)),
    "a plain loop with a step that takes long": Made(
        [[LOOP]], besides=every(20, 1, plus(LOOP, forward=3.0))
    ),
    "a plain loop that loads its data": Made([[LOOP]], memory=lambda look: min(9.0, 2.0 + look)),
    "a plain loop with steps of 30 s": Made(
        [[{phase: 300 * seconds for phase, seconds in LOOP.items()}]], stops=12, phases=["forward"]
    ),
    "torch's wrapper": Made([[LOOP]] * 4),
    "torch's wrapper, a little uneven": Made([[LOOP], [plus(LOOP, forward=0.002)]]),
    "torch's wrapper with evaluation": Made([[LOOP]] * 2, besides=EVALUATE),
    "ours on one device": Made([[OURS]], {}),
    "ours, two ranks of two replicas": Made([[OURS, plus(OURS, forward=0.001)]] * 2, {}),
    "ours with evaluation": Made([[OURS] * 2], {}, besides=EVALUATE),
    "evaluation that is slow": Made(
        [[LOOP]], besides=every(3, 20, {"input": 0.2, "forward": 0.1}, "inference")
    ),
    "accumulation": Made([[FOUR]]),
    "accumulation, torch's wrapper": Made([[FOUR]] * 2),
}


@pytest.mark.parametrize("case", ILL)
def test_an_illness_is_the_first_advice(case: str) -> None:
    made, kind, start = ILL[case]
    report = make_report(recording(made.samples()))
    assert (report.advice.kind, report.advice.text[: len(start)]) == (kind, start)
    if start.endswith("slow in 'input'"):
        # Once is enough.
        assert "input" not in {one.kind for job in report.jobs for one in job.findings}
    # Live the same is told, of the last seconds; a leak shows in a whole recording.
    live = [one for each in history_of(*made.samples()).changes.values() for one in each]
    assert kind in {one.kind for one in live} or kind == "host memory"


@pytest.mark.parametrize("case", HEALTHY)
def test_in_a_healthy_run_nothing_stands_out(case: str) -> None:
    samples = HEALTHY[case].samples()
    report = make_report(recording(samples))
    assert report.advice.text.removeprefix("All ranks: ").startswith("Nothing stands out")
    assert not [one.kind for job in report.jobs for one in job.findings if one.gain]
    assert not report.incidents
    history = History()
    for one in samples:
        history.add(one)
        assert not find_alerts(history)


# --- small real runs -------------------------------------------------------------------------


class Clock:
    """A clock on which time passes only as it is told, and 10 us at each look."""

    def __init__(self) -> None:
        self._looks, self.passed = itertools.count(step=10_000), 0

    def __call__(self) -> int:
        return next(self._looks) + self.passed

    def pass_by(self, seconds: float) -> None:
        self.passed += int(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all phases, so that no other work on the machine changes them."""
    made = Clock()
    monkeypatch.setattr(time, "perf_counter_ns", made)
    return made


class Busy(nn.Module):
    """Its forward takes 10 ms of a clock, of all replicas at the same time."""

    def __init__(self, clock: Clock, num_replicas: int = 1) -> None:
        super().__init__()
        self.linear, self.pass_by = nn.Linear(64, 64), clock.pass_by
        self.wait = threading.Barrier(num_replicas).wait

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.wait() == 0:
            self.pass_by(0.01)
        self.wait()
        out: torch.Tensor = self.linear(x)
        return out


class Slow(nn.Module):
    """Its second replica takes so many times as long as the first one, on any machine."""

    #: When the first one began; of all replicas.
    begun = 0.0

    def __init__(self, times: float) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(64, 64), times
        self.wait = threading.Barrier(2).wait

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        began, replica = time.perf_counter(), dataparallel.current_replica()
        assert replica is not None
        out: torch.Tensor = self.linear(x)
        if replica.index == 0:
            Slow.begun = began
            time.sleep(0.02)
        self.wait()
        if replica.index == 1:
            now = time.perf_counter()
            time.sleep(max(0.0, self.times * (now - Slow.begun) - (now - began)))
        return out


class Batches(Dataset[torch.Tensor]):
    def __init__(self, seconds: float, clock: Clock) -> None:
        self.seconds, self.clock = seconds, clock

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.pass_by(self.seconds)
        return torch.ones(64)


def train(
    model: nn.Module, batches: Iterable[torch.Tensor] | None = None, steps: int = 6
) -> Summary:
    optimizer = SGD(model.parameters(), 0.001)
    batches = [torch.ones(8, 64)] * steps if batches is None else batches
    with StepMonitor(model, publish=False) as monitor:
        for batch in batches:
            model(batch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return monitor.summary()


def told(summary: Summary) -> dict[str, Finding]:
    """Return the costly findings: on a busy machine a little of anything may be found."""
    much = [one for one in summary.findings if one.severity == "warning"]
    return {one.kind: one for one in much if one.kind in ILLNESSES}


@pytest.fixture
def num_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets the number of torch's threads; one for each test to begin with."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_more_threads_than_processors(
    num_threads: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus = len(os.sched_getaffinity(0))
    assert "oversubscribed" not in told(train(Busy(clock)))
    num_threads(4 * cpus)
    found = told(train(Busy(clock)))
    assert found["oversubscribed"].gain > 0.3
    assert f"{4 * cpus} threads compute on" in found["oversubscribed"].text
    assert "OMP_NUM_THREADS" in found["oversubscribed"].text
    assert "replica" not in found["oversubscribed"].text
    assert "OMP_WAIT_POLICY" not in found["oversubscribed"].text
    num_threads(1)
    many = told(train(DataParallel(Busy(clock, cpus + 1), ["cpu"] * (cpus + 1))))["oversubscribed"]
    assert f"at most {cpus} replica" in many.text and "OMP_NUM_THREADS" not in many.text
    num_threads(4 * cpus)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "Take OMP_WAIT_POLICY=active away" in told(train(Busy(clock)))["oversubscribed"].text


def threads_of_rank(rank: int, world_size: int) -> list[dict[str, Finding]]:
    """With as many threads as there are processors for all, and with its share of them."""
    before, clock = torch.get_num_threads(), Clock()
    cpus = len(os.sched_getaffinity(0))
    found = []
    try:
        for number in (cpus, max(1, cpus // world_size)):
            torch.set_num_threads(number)
            model = DistributedDataParallel(nn.Sequential(Busy(clock), nn.Linear(64, 3)))
            with (
                mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(world_size)),
                mock.patch.object(time, "perf_counter_ns", clock),
            ):
                found.append({one.kind: one for one in train(model).findings})
    finally:
        torch.set_num_threads(before)
    return found


def test_more_threads_in_all_processes_than_processors(cluster: Cluster) -> None:
    cpus = len(os.sched_getaffinity(0))
    for much, few in cluster.run(threads_of_rank, 2):
        assert f"{2 * cpus} threads (2 processes with {cpus} each)" in much["oversubscribed"].text
        assert "oversubscribed" not in few


def test_threads_that_wait_busily(
    num_threads: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    model = DataParallel(Busy(clock), ["cpu"])
    assert "wait policy" not in told(train(model))
    found = told(train(DataParallel(Busy(clock, 2), ["cpu", "cpu"])))
    if "oversubscribed" not in found:
        assert "OMP_WAIT_POLICY=passive" in found["wait policy"].text
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert "wait policy" not in told(train(DataParallel(Busy(clock, 2), ["cpu", "cpu"])))


def gain(summary: Summary, kind: str) -> float:
    return next((one.gain for one in summary.findings if one.kind == kind), 0.0)


def test_a_loader_that_is_late(clock: Clock) -> None:
    late, in_time = (
        train(Busy(clock), DataLoader(Batches(each, clock), batch_size=1)) for each in (0.1, 0.0)
    )
    assert late.advice.kind == "input" and "num_workers" in late.advice.text
    assert str(late).startswith("Change first: ")
    assert gain(in_time, "input") < gain(late, "input") / 2


@pytest.mark.parametrize(
    ("every", "kind", "other"), [(20, "pauses", "input"), (3, "input", "pauses")]
)
def test_a_long_gap_is_a_pause_if_it_is_rare(
    every: int, kind: str, other: str, clock: Clock
) -> None:
    """As a checkpoint is; a loader that is late makes every batch or every few late."""

    def batches() -> Iterator[torch.Tensor]:
        for step in range(70):
            # Short gaps as on a busy machine do not hide the long ones.
            clock.pass_by(0.003 * (step % 4 == 0) + 0.3 * (step % every == every - 1))
            yield torch.ones(8, 64)

    summary = train(nn.Linear(64, 64), batches())
    assert summary.advice.kind == kind and gain(summary, kind) > 10 * gain(summary, other)
    assert (summary.time_shares.get("pauses", 0.0) > 0.8) == (kind == "pauses")
    # The table has the same shares as the advice.
    (replica,) = summary.replicas
    phase: Phase = "pause" if kind == "pauses" else "input"
    assert replica.shares[phase] == pytest.approx(summary.advice.gain, abs=0.02)


def test_a_replica_that_is_slow(num_threads: Any) -> None:
    slow, even = (train(DataParallel(Slow(n), ["cpu", "cpu"]), steps=8) for n in (5, 1))
    assert slow.advice.kind == "slow replica" and "balance" in slow.advice.text
    assert gain(even, "slow replica") < gain(slow, "slow replica") / 2


def many_layers(rank: int, world_size: int) -> list[dict[str, Finding]]:
    """Gradients of many small layers, in a bucket each and in few."""
    torch.manual_seed(0)
    found = []
    for cap in (0.001, None):
        net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
        model = DistributedDataParallel(net, bucket_cap_mb=cap)
        train(model)
        found.append({one.kind: one for one in train(model).findings})
    return found


def test_buckets_that_are_small(cluster: Cluster) -> None:
    for small, usual in cluster.run(many_layers, 2):
        text = small["small buckets"].text
        assert "in 16 buckets of about 16.2 KiB" in text and "bucket_cap_mb" in text
        assert "small buckets" not in usual


class Waiting(nn.Module):
    """The host is never ahead of the device by more than an operator, or it is."""

    def __init__(self, waits: bool) -> None:
        super().__init__()
        self.linear, self.waits = nn.Linear(64, 64), waits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            began = time.perf_counter()
            x = self.linear(x)
            if self.waits:
                torch.accelerator.synchronize(x.device)
                # The device has nothing to do meanwhile, however busy the machine is.
                time.sleep(max(0.005, 3 * (time.perf_counter() - began)))
        return x


def infer(model: nn.Module) -> dict[str, Finding]:
    model.to("virtual:0")
    batch = torch.ones(256, 64, device="virtual:0")
    with StepMonitor(model, publish=False) as monitor, torch.no_grad():
        for _ in range(6):
            model(batch)
    return told(monitor.summary())


def on_strict_devices(rank: int, world_size: int) -> list[dict[str, Finding]]:
    with dataparallel.virtual.strict_mode():
        found = [infer(Waiting(True)), infer(Waiting(False))]
    # If the host computes, the device is never behind.
    return [*found, infer(Waiting(True))]


def test_a_device_that_waits_for_the_host(cluster: Cluster) -> None:
    ((waits, runs_behind, computes),) = cluster.run(
        on_strict_devices, 1, virtual=True, init_group=False
    )
    assert "torch.compile" in waits["host-bound"].text
    assert 0.15 < waits["host-bound"].gain <= 0.5
    assert "host-bound" not in {*runs_behind, *computes}


def with_little_memory(rank: int, world_size: int) -> list[dict[str, Finding]]:
    device = "virtual:2"
    model = nn.Linear(64, 64, device=device)
    batches = [torch.ones(5000, 64, device=device)] * 6
    found = [told(train(model, batches))]
    peak = torch.accelerator.max_memory_allocated(device)
    dataparallel.virtual.set_memory_limit(device, int(1.05 * peak))
    try:
        found.append(told(train(model, batches)))
    finally:
        dataparallel.virtual.set_memory_limit(device, None)
    return found


def test_memory_that_is_nearly_full(cluster: Cluster) -> None:
    ((enough, little),) = cluster.run(with_little_memory, 1, virtual=True, init_group=False)
    assert "memory pressure" not in enough
    assert "95 % of the memory of virtual:2" in little["memory pressure"].text
