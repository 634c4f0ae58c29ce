"""The guard against gradients that are not finite, over processes."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from dataparallel.comm.failures import CollectiveError
from dataparallel.parallel.distributed import DistributedDataParallel
from dataparallel.reducer.nonfinite import NonFiniteGradients
from tests.cluster import Cluster
from tests.comm_hook_cases import keep_group
from tests.faults.harness import Figures
from tests.nonfinite_cases import INF, NAN, Spoil, make_net, same, spoils, state_of

_NAMES = [name for name, _ in make_net().named_parameters()]


def _backward(model: nn.Module, rank: int, step: int) -> None:
    torch.manual_seed(10 * step + rank)
    model(torch.randn(6, 4)).square().sum().backward()


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("dataparallel").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text."""
        self.texts.append(record.getMessage())

    def take(self) -> list[str]:
        """What was logged since the last call."""
        texts, self.texts = self.texts, []
        return texts

    def close(self) -> None:
        """Listen no more."""
        logging.getLogger("dataparallel").removeHandler(self)
        super().close()


# --- 1000 injections -----------------------------------------------------------------------------


def _inject(rank: int, world_size: int, times: int, options: dict[str, Any]) -> tuple[int, int]:
    """How many injections changed a weight or the state, and how many were not named."""
    replicas = options.pop("replicas")
    model = DistributedDataParallel(make_net(), ["cpu"] * replicas, bucket_cap_mb=1e-4, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan, log = random.Random(5), _Log()
    contaminated = unnamed = 0
    for step in range(times):
        victim, value = plan.randrange(world_size), plan.choice([NAN, INF, -INF])
        spoil = Spoil(plan.choice(_NAMES), value, plan.randrange(replicas))
        spoils[:] = [spoil] if rank == victim else []
        before = state_of(model.module, optimizer)
        text = ""
        try:
            _backward(model, rank, step)
        except NonFiniteGradients as error:
            text = str(error)
        optimizer.step()
        contaminated += not same(before, state_of(model.module, optimizer))
        text = "".join([text, *log.take()])
        unnamed += (
            re.search(
                rf"rank {victim} of {world_size}, replica {spoil.replica} \(cpu\): "
                rf"{re.escape(spoil.name)} \((NaN|infinity)\)",
                text,
            )
            is None
        )
        if step % 5 == 0:
            spoils.clear()
            optimizer.zero_grad()
            _backward(model, rank, step)
            optimizer.step()
            contaminated += not all(bool(p.isfinite().all()) for p in model.parameters())
            contaminated += any(p.grad is None for p in model.parameters())
        optimizer.zero_grad()
    assert model.num_skipped == (times if options["nonfinite"] == "skip" else 0)
    spoils.clear()
    log.close()
    model.close()
    return contaminated, unnamed


@pytest.mark.parametrize("view", [False, True], ids=["steal", "view"])
@pytest.mark.parametrize("action", ["skip", "raise"])
def test_injections(
    cluster: Cluster, repeats: Callable[..., int], figures: Figures, action: str, view: bool
) -> None:
    times = repeats(quick=10, long=250)
    options = {"nonfinite": action, "gradient_as_bucket_view": view, "replicas": 2}
    found = cluster.run(_inject, 2, times, options, timeout=60 if times == 10 else 600)
    for what, number in (
        ("contaminated weights", max(c for c, _ in found)),
        ("injections not named (rank, replica, parameter)", max(u for _, u in found)),
    ):
        figures.record(
            goal=10,
            what=f"{what}, {action}, {'views' if view else 'stolen'}",
            value=number,
            unit="",
            limit=0,
            repeats=times,
            baseline="all weights NaN, on all ranks",
        )


# --- what it goes together with ------------------------------------------------------------------


def _texts(rank: int, world_size: int) -> list[str]:
    model = DistributedDataParallel(make_net(), ["cpu"], nonfinite="raise")
    found = []
    for step in range(3):
        spoils[:] = [Spoil("a.bias", NAN if rank else INF)] if step != 1 else []
        try:
            _backward(model, rank, step)
        except NonFiniteGradients as error:
            found.append(str(error))
            assert all(p.grad is None for p in model.parameters())
    spoils.clear()
    model.close()
    return found


def test_all_raise_the_same_text(cluster: Cluster) -> None:
    first, second = cluster.run(_texts, 2)
    assert first == second
    assert len(first) == 2
    assert "on rank 0 of 2, replica 0 (cpu): a.bias (infinity); on rank 1 of 2" in first[0]


def _hook(state: float, bucket: Any) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result((bucket if isinstance(bucket, Tensor) else bucket.buffer()) * state)
    return future


def _hooks(rank: int, world_size: int) -> None:
    keep_group()
    log = _Log()
    model = DistributedDataParallel(make_net(), ["cpu"], nonfinite="skip")
    model.register_comm_hook(None, "fp16_compress")
    spoils[:] = [Spoil("b.weight")] * rank
    _backward(model, rank, 0)
    assert "on rank 1 of 2, replica 0 (cpu): b.weight (NaN)" in "".join(log.take())
    spoils.clear()
    _backward(model, rank, 1)
    assert (model.num_skipped, log.take()) == (1, [])
    # Not too large for float32, but for what is sent.
    (model(torch.ones(2, 4)).sum() * 1e6).backward()
    assert model.num_skipped == 2
    assert "on rank 0 of 2, a sum of finite ones" in "".join(log.take())
    model.close()
    # Only in one process: the others have to know.
    model = DistributedDataParallel(make_net(), ["cpu"], nonfinite="skip")
    model.register_comm_hook(INF if rank else 1.0, _hook)
    _backward(model, rank, 0)
    assert all(p.grad is None for p in model.parameters())
    assert "not finite on rank 1 of 2, a sum of finite ones" in "".join(log.take())
    log.close()
    model.close()


def test_communication_hooks(cluster: Cluster) -> None:
    cluster.run(_hooks, 2)


def _swallowing(rank: int, world_size: int) -> None:
    """A hook that makes numbers of what is none."""
    log = _Log()
    model = DistributedDataParallel(make_net(), ["cpu"], nonfinite="skip")
    model.register_comm_hook(None, lambda state, bucket: _hook(1.0, bucket.buffer().nan_to_num_()))
    spoils[:] = [Spoil("b.weight")] * rank
    _backward(model, rank, 0)
    assert model.num_skipped == 1
    assert "on rank 1 of 2, replica 0 (cpu): b.weight (NaN)." in "".join(log.take())
    spoils.clear()
    _backward(model, rank, 1)
    assert model.num_skipped == 1
    log.close()
    model.close()


def _keeping(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(make_net(), ["cpu"], nonfinite="skip")
    for hook in (powerSGD_hook, fp16_compress_wrapper(powerSGD_hook)):
        with pytest.raises(ValueError, match="nonfinite='skip' does not go with PowerSGD"):
            model.register_comm_hook(PowerSGDState(None), hook)
    model.close()


def test_a_hook_that_keeps_a_nan_is_refused(cluster: Cluster) -> None:
    cluster.run(_keeping, 2)


def test_a_hook_that_swallows_what_it_got(cluster: Cluster) -> None:
    cluster.run(_swallowing, 2)


def _late(rank: int, world_size: int) -> None:
    """A gradient that comes after its bucket was sent does not go through the hook."""
    model = DistributedDataParallel(make_net(), ["cpu"], nonfinite="skip", bucket_cap_mb=1e-4)
    model.register_comm_hook(None, "allreduce")
    _backward(model, rank, 0)
    model.zero_grad()
    outside = model.module.c.weight.sum() * (NAN if rank else 1.0)
    (model(torch.randn(6, 4)).square().sum() + outside).backward()
    assert model.num_skipped == 1
    assert all(p.grad is None for p in model.parameters())
    model.close()


def test_a_late_gradient_beside_a_hook(cluster: Cluster) -> None:
    cluster.run(_late, 2)


def _accumulate(rank: int, world_size: int, view: bool) -> None:
    model = DistributedDataParallel(
        make_net(), ["cpu"] * 2, nonfinite="skip", gradient_as_bucket_view=view
    )
    log = _Log()
    for zeroed in (False, True):
        spoils[:] = [Spoil("c.weight", replica=1)] * rank
        with model.no_sync():
            _backward(model, rank, 0)
        assert log.take() == [], "nobody else could know"
        spoils.clear()
        if zeroed:
            model.zero_grad()
        _backward(model, rank, 1)
        # Nothing is left of it for the next step.
        assert (model.module.scale.grad is None) == (not zeroed)
        assert model.num_skipped == 1
        if not zeroed:
            assert "on rank 1 of 2, replica 1 (cpu): c.weight (NaN)" in "".join(log.take())
        model.zero_grad()
    with model.no_sync():
        _backward(model, rank, 2)
    _backward(model, rank, 3)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model.num_skipped == 1
    log.close()
    model.close()


@pytest.mark.parametrize("view", [False, True], ids=["steal", "view"])
def test_what_no_sync_leaves(cluster: Cluster, view: bool) -> None:
    cluster.run(_accumulate, 2, view)


def _outside(rank: int, world_size: int, view: bool) -> None:
    net = nn.Linear(3, 1)
    model = DistributedDataParallel(net, ["cpu"], nonfinite="raise", gradient_as_bucket_view=view)
    x = torch.ones(2, 3)
    for _ in range(2):
        with model.no_sync():
            (model(x).sum() + net.weight.sum() * (NAN if rank else 1.0)).backward()
        text = r"finite on rank 1 of 2, what .grad held before the backward: weight \(NaN\)\. No"
        with pytest.raises(NonFiniteGradients, match=text):
            model(x).sum().backward()
        assert net.weight.grad is None
    model.close()


@pytest.mark.parametrize("view", [False, True], ids=["steal", "view"])
def test_what_others_add_under_no_sync(cluster: Cluster, view: bool) -> None:
    cluster.run(_outside, 2, view)


def _overflow(rank: int, world_size: int, deterministic: bool) -> int:
    net = nn.Linear(1, 1, bias=False)
    options: dict[str, Any] = {"average": "none", "deterministic": deterministic}
    model = DistributedDataParallel(net, ["cpu"], nonfinite="skip", **options)
    log = _Log()
    for part in (0.3, 0.7, 0.3):
        model(torch.full((1, 1), torch.finfo(torch.float).max * part)).sum().backward()
        assert (net.weight.grad is None) == (part == 0.7)
        net.zero_grad()
    assert "on rank 0 of 2, a sum of finite ones" in "".join(log.take())
    log.close()
    model.close()
    return model.num_skipped


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_sum_over_processes_that_overflows(cluster: Cluster, deterministic: bool) -> None:
    assert cluster.run(_overflow, 2, deterministic) == [1, 1]


def _join(rank: int, world_size: int) -> int:
    model = DistributedDataParallel(make_net(), ["cpu"], nonfinite="skip")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(2 + 2 * rank):
            spoils[:] = [Spoil("scale")] * (rank and step % 2)
            _backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
    spoils.clear()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    model.close()
    return model.num_skipped


def test_join(cluster: Cluster) -> None:
    assert cluster.run(_join, 2) == [2, 2]


def _ignored(rank: int, world_size: int, action: Any) -> None:
    net = make_net()
    net._ddp_params_and_buffers_to_ignore = ["a.weight"]  # type: ignore[assignment]
    model = DistributedDataParallel(net, ["cpu"], nonfinite=action)
    for earlier in (False, True):
        spoils[:] = [Spoil("a.weight")] * rank
        if earlier:
            with model.no_sync():
                _backward(model, rank, 0)
            spoils.clear()
        if action == "skip":
            _backward(model, rank, 0)
        else:
            text = r"rank 1 of 2, replica 0 \(cpu\): a.weight"
            with pytest.raises(NonFiniteGradients, match=text):
                _backward(model, rank, 0)
        assert all(p.grad is None for p in model.parameters())
        spoils.clear()
        _backward(model, rank, 0)
        assert all(p.grad is not None for p in model.parameters())
        model.zero_grad()
    model.close()


@pytest.mark.parametrize("action", ["skip", "raise"])
def test_parameters_that_stay_local(cluster: Cluster, action: str) -> None:
    cluster.run(_ignored, 2, action)


# --- costs ---------------------------------------------------------------------------------------


def _launched(rank: int, world_size: int, action: Any) -> list[int]:
    model = DistributedDataParallel(make_net(), ["cpu"], nonfinite=action)
    processes = model._training.processes
    assert processes is not None
    counts = []
    for step in range(3):
        before = sum((processes.control.launched + processes.buckets.launched).values())
        if step == 2:
            with model.no_sync():
                _backward(model, rank, step)
        _backward(model, rank, step)
        counts.append(
            sum((processes.control.launched + processes.buckets.launched).values()) - before
        )
    model.close()
    return counts


def test_no_further_collective(cluster: Cluster) -> None:
    """As long as nothing is found."""
    assert cluster.run(_launched, 2, "skip") == cluster.run(_launched, 2, "ignore")


# --- failures of other ranks ---------------------------------------------------------------------


def _fails(rank: int, world_size: int) -> None:
    net = make_net()
    model = DistributedDataParallel(net, ["cpu"])
    for step in range(3):
        output = model(torch.ones(2, 4)).sum()
        if rank == step % 2:
            handle = net.b.weight.register_hook(_refuse)
            with pytest.raises(ValueError, match="a hook says no"):
                output.backward()
            handle.remove()
        else:
            other = step % 2
            text = (
                rf"(?s)rank {other} \(.* failed in backward: ValueError: a hook says no.*in _refuse"
            )
            with pytest.raises(CollectiveError, match=text) as caught:
                output.backward()
            failure = caught.value.failure
            assert failure is not None and failure.rank == other
        net.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    model.close()


def _refuse(grad: Tensor) -> Tensor:
    raise ValueError("a hook says no")


def test_the_others_learn_that_a_hook_failed_in_backward(cluster: Cluster) -> None:
    cluster.run(_fails, 2)
