"""Training over a process group for accelerators only: as the bare module on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import dataparallel as dp
from dataparallel import collectives
from dataparallel.reducer.verify import ReplicaMismatch
from dataparallel.virtual import counters, reset_counters, strict_mode
from tests.cluster import Cluster
from tests.device_only.cases import (
    STEPS,
    State,
    batch,
    check,
    make_net,
    mean_loss,
    optimizer_of,
    share,
    state_of,
    steps,
    train_bare,
    wrap,
)
from tests.test_vote import counted_waits

# --- modules -------------------------------------------------------------------------------------


class Words(nn.Module):
    """Its first gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 3, sparse=True)
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.words((3 * x.abs()).long() % 10).mean(1))
        return output


class Centered(nn.Module):
    """Takes the mean of the whole batch away, and multiplies by what an exchange brings."""

    def __init__(self, group: str | None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        mean, rows = hidden.mean(0), hidden
        if self.group is not None:
            mean = collectives.all_reduce(mean, "avg", self.group)
            rows = collectives.all_gather_tensor(hidden, 0, self.group)
        output: Tensor = self.last(hidden - mean) * (1 + rows.square().mean())
        return output


def make_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


# --- cases ---------------------------------------------------------------------------------------

Flags = Callable[[int, int], tuple[bool, ...]]


class Case(NamedTuple):
    """A way to train in all processes, and the same with the bare module."""

    options: dict[str, Any] | None = None
    make: Callable[[], nn.Module] = make_net
    #: Prepares the wrapper.
    prepare: Callable[[Any], object] = lambda model: None
    sizes: tuple[int, int] = (6, 6)
    #: By which the loss of the bare module is multiplied, for the whole batch or for each share.
    factor: float = 1.0
    by_share: bool = False
    make_bare: Callable[[], nn.Module] | None = None
    #: For step and rank, what the module gets beside the batch.
    flags: Flags = lambda step, rank: ()
    #: The steps of each rank, those that all skip, and those without a synchronization.
    batches: tuple[int, int] = (STEPS, STEPS)
    skipped: tuple[int, ...] = ()
    unsynchronized: tuple[int, ...] = ()
    tolerance: float | None = None
    strict: bool = False


def power_sgd() -> powerSGD_hook.PowerSGDState:
    # With full rank only rounding loses anything. The feedback of errors reads memory on a stream
    # for which it is not kept; under torch's wrapper it is not a number either.
    return powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=8,
        start_powerSGD_iter=2,
        min_compression_rate=0.1,
        use_error_feedback=False,
    )


def hook(tolerance: float, function: Any, group: bool = False) -> Case:
    def prepare(model: Any) -> None:
        model.register_comm_hook(dist.group.WORLD if group else None, function)

    return Case(prepare=prepare, tolerance=tolerance)


CASES: dict[str, Case] = {
    "plain": Case(),
    # Default streams defer, so that a wait that is missing shows.
    "strict": Case({"bucket_cap_mb": 0.0002}, strict=True),
    "samples": Case({"average": "samples"}, sizes=(7, 4)),
    # Each process has the mean over its samples, and the sum of two means is two means.
    "none": Case({"average": "none"}, factor=2.0),
    "deterministic": Case({"deterministic": True}),
    "views": Case({"gradient_as_bucket_view": True}),
    "static": Case({"static_graph": True}),
    "search": Case({"find_unused_parameters": True}),
    "sparse": Case(make=Words),
    "buffers": Case({"buffers": "sync"}, make_norm),
    "norm": Case(make=lambda: collectives.SyncBatchNorm.convert(make_norm()), make_bare=make_norm),
    "hybrid": Case(make=lambda: Centered("hybrid"), make_bare=lambda: Centered(None)),
    # In step 0 nobody uses the branch, in step 1 one process, and then both.
    "branches": Case(flags=lambda step, rank: (step > rank,), factor=0.5, by_share=True),
    "accumulation": Case(unsynchronized=(0, 2)),
    "not finite": Case(
        {"nonfinite": "skip"},
        flags=lambda step, rank: (True, (step, rank) == (1, 1)),
        skipped=(1,),
    ),
    "joined": Case(batches=(STEPS, STEPS - 2), factor=0.5, by_share=True),
    "hook": hook(1e-6, "allreduce"),
    "torch's hook": hook(1e-6, default_hooks.allreduce_hook),
    "hook of a group": hook(1e-6, default_hooks.allreduce_hook, group=True),
    "fp16": hook(1e-3, "fp16_compress"),
    "torch's fp16": hook(1e-3, default_hooks.fp16_compress_hook),
    "bf16": hook(1e-2, "bf16_compress"),
    "powerSGD": Case(
        prepare=lambda model: model.register_comm_hook(power_sgd(), powerSGD_hook.powerSGD_hook),
        tolerance=1e-5,
    ),
}

#: The learned state, and for some steps, per parameter, if it had a gradient, and a sparse one.
Trained = tuple[State, dict[int, list[tuple[bool, bool]]]]


def seen_gradients(module: nn.Module) -> list[tuple[bool, bool]]:
    gradients = [parameter.grad for parameter in module.parameters()]
    return [(each is not None, each is not None and each.is_sparse) for each in gradients]


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return make()


def train_case(rank: int, replicas: int, case: Case, place: str) -> Trained:
    net, had = made(case.make), {}
    if place == "cpu":
        model: Any = dp.DistributedDataParallel(net, ["cpu"] * replicas, **(case.options or {}))
    else:
        model = wrap(net, rank, replicas, **(case.options or {}))
    case.prepare(model)
    optimizer = optimizer_of(model)
    here = next(model.parameters()).device
    joining = len({*case.batches}) > 1
    with model.join(step=optimizer.step) if joining else nullcontext():
        for step in range(case.batches[rank]):
            x, y = share(step, rank, case.sizes)
            with model.no_sync() if step in case.unsynchronized else nullcontext():
                mean_loss(model(x.to(here), *case.flags(step, rank)), y).backward()
            had[step] = seen_gradients(net)
            if step not in case.unsynchronized:
                optimizer.step()
                optimizer.zero_grad()
    model.check_replicas()
    result = state_of(model)
    model.close()
    return result, had


def train_bare_case(case: Case) -> Trained:
    net, had = made(case.make_bare or case.make), {}
    optimizer = optimizer_of(net)
    for step in range(STEPS):
        if step in case.skipped:
            continue
        shares = [(rank, *share(step, rank)) for rank in range(2) if step < case.batches[rank]]
        for rank, x, y in shares if case.by_share else [(0, *batch(step, sum(case.sizes)))]:
            (mean_loss(net(x, *case.flags(step, rank)), y) * case.factor).backward()
        had[step] = seen_gradients(net)
        if step not in case.unsynchronized:
            optimizer.step()
            optimizer.zero_grad()
    return state_of(net), had


def train_cases(
    rank: int, size: int, replicas: int, names: list[str], place: str
) -> dict[str, Trained]:
    found = {}
    for name in names:
        with strict_mode(CASES[name].strict):
            found[name] = train_case(rank, replicas, CASES[name], place)
    return found


ALL = list(CASES)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("backend", "place", "names"),
    [
        ("vccl", "virtual", ALL),
        ("cpu:gloo,virtual:vccl", "virtual", ["plain"]),
        # Replicas where the user's group takes no tensors.
        ("vccl", "cpu", ["plain", "buffers", "hybrid"]),
    ],
    ids=["all", "mixed", "cpu"],
)
def test_steps_are_those_of_the_bare_module(
    cluster: Cluster, backend: str, place: str, names: list[str], replicas: int
) -> None:
    args = (replicas, names, place)
    got = cluster.run(train_cases, 2, *args, virtual=True, backend=backend)
    for name in names:
        state, had = train_bare_case(CASES[name])
        states = [each[name][0] for each in got]
        tolerance = CASES[name].tolerance
        check(states, state, name, **({} if tolerance is None else {"rtol": 0, "atol": tolerance}))
        if "norm" not in name and name != "buffers":
            assert all(torch.equal(states[0][key], states[1][key]) for key in state), name
        for each in got:
            seen = each[name][1]
            assert all(seen[step] == had[step] for step in seen.keys() & had.keys()), name
            assert seen


#: For two forwards and backwards that use all parameters: the number of times that the host waits
#: for a device, and for each message of another rank. A vote is read in the forward after it; with
#: a hook, which may communicate itself, at the end of the round, too.
WAITS: dict[str, tuple[int, dict[str, int]]] = {
    "plain": (0, {"bucket": 2, "the vote": 2, "the begin": 2}),
    "samples": (0, {"bucket": 2, "the vote": 2, "the begin": 2}),
    "accumulation": (0, {"bucket": 1, "the vote": 1, "the begin": 1}),
    "not finite": (2, {"bucket": 2, "the vote": 2, "the begin": 2}),
    "fp16": (0, {"the vote": 4, "the begin": 2}),
}


def count_waits(rank: int, size: int) -> dict[str, Any]:
    # Elsewhere the backend's thread may come to a bucket after the count.
    with strict_mode(False):
        return {name: count_waits_of(name, rank) for name in WAITS}


def count_waits_of(name: str, rank: int) -> tuple[int, dict[str, int]]:
    case = CASES[name]
    model = wrap(made(case.make), rank, 2, **(case.options or {}))
    case.prepare(model)
    optimizer = optimizer_of(model)
    x, y = (each.to(model.device_ids[0]) for each in share(0, rank, case.sizes))
    # In the first steps the host looks for writes that leave no trace.
    for _ in range(10):
        reset_counters()
        with counted_waits() as waits:
            with model.no_sync() if case.unsynchronized else nullcontext():
                mean_loss(model(x), y).backward()
            mean_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    # The backend's own thread, which stands for the queue of a device, waits for each bucket.
    own = 1 if case.unsynchronized else 2
    found = counters()["host_waits"] - own, dict(waits)
    model.close()
    return found


def test_a_step_waits_for_no_device_and_for_no_process_but_in_buckets(cluster: Cluster) -> None:
    for found in cluster.run(count_waits, 2, virtual=True, backend="vccl"):
        assert found == WAITS


def test_as_torchs_wrapper(cluster: Cluster) -> None:
    check(cluster.run(train_peer, 2, virtual=True, backend="vccl"), train_bare())


def train_peer(rank: int, size: int) -> State:
    here = torch.device("virtual", rank)
    model = nn.parallel.DistributedDataParallel(make_net().to(here))
    steps(model, rank)
    assert dist.get_backend() == "vccl"
    return state_of(model)


def differ(rank: int, size: int, replicas: int) -> str:
    model = wrap(make_net(), rank, replicas)
    model.check_replicas()
    if rank == 1:
        with torch.no_grad():
            model.module.last.bias[0] += 1
    try:
        model.check_replicas()
    except ReplicaMismatch as error:
        return str(error)
    return "no difference"


@pytest.mark.parametrize("replicas", [1, 2])
def test_differences_are_found(cluster: Cluster, replicas: int) -> None:
    for text in cluster.run(differ, 2, replicas, virtual=True, backend="vccl"):
        assert "'last.bias': " in text and "; float32 of shape" in text


# --- buffers of rank 0 ---------------------------------------------------------------------------


def train_norm(rank: int, size: int, replicas: int, policy: str) -> State:
    model = wrap(made(make_norm), rank, replicas, buffers=policy)
    steps(model, rank)
    # Brings buffers of rank 0 to all once more.
    model(share(0, rank)[0].to(model.device_ids[0]))
    return state_of(model)


def train_bare_norm(chunks: int, merged: int) -> State:
    """Return the same on the CPU in so many chunks; the statistics of the first few count."""
    net = made(make_norm)
    optimizer = optimizer_of(net)
    for number, step in enumerate((*range(STEPS), 0)):
        before = {name: value.clone() for name, value in net.named_buffers()}
        kept = []
        for x, y in zip(*(each.chunk(chunks) for each in batch(step)), strict=True):
            net.load_state_dict(before, strict=False)
            (mean_loss(net(x), y) / chunks).backward()
            kept.append({name: value.clone() for name, value in net.named_buffers()})
        for name, value in net.named_buffers():
            values = torch.stack([each[name] for each in kept[:merged]])
            value.copy_(values.mean(0) if value.is_floating_point() else values[0])
        if number < STEPS:
            optimizer.step()
            optimizer.zero_grad()
    return state_of(net)


@pytest.mark.parametrize("policy", ["replica0", "mean"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_buffers_of_rank_0(cluster: Cluster, policy: str, replicas: int) -> None:
    got = cluster.run(train_norm, 2, replicas, policy, virtual=True, backend="vccl")
    check(got[:1], train_bare_norm(2 * replicas, replicas if policy == "mean" else 1))
    # After the last broadcast rank 1 has computed with a batch of its own.
    assert not torch.equal(got[0]["1.running_mean"], got[1]["1.running_mean"])
