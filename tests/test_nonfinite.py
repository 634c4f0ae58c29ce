"""The guard against gradients that are not finite, in one process and over processes."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from dataparallel import current_replica, virtual
from dataparallel.parallel.distributed import DistributedDataParallel
from dataparallel.reducer.nonfinite import NonFiniteGradients
from dataparallel.virtual import counters
from tests.cluster import Cluster
from tests.faults.harness import Figures
from tests.process_groups import completed, keep_group

NAN, INF = float("nan"), float("inf")
LARGEST = torch.finfo(torch.float).max
SUM = "a sum of finite ones (too large for its dtype, or returned by a hook, or from elsewhere)"

VIEWS = pytest.mark.parametrize("view", [False, True], ids=["steal", "view"])
WORLDS = pytest.mark.parametrize("world", [1, 2])

# --- gradients that are spoiled on purpose ---------------------------------------------------


@dataclasses.dataclass
class Spoil:
    """A gradient to spoil: that of one parameter on one replica."""

    name: str
    value: float = NAN
    replica: int = 0


#: The gradients to spoil in the forwards that come now.
spoils: list[Spoil] = []


NAMES = ["a.weight", "a.bias", "b.weight", "b.bias", "scale"]


class Net(nn.Module):
    """Uses each parameter through something that can be spoiled."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        *layers, scale = map(self._used, NAMES)
        for weight, bias in (layers[:2], layers[2:]):
            x = nn.functional.linear(x, weight, bias).tanh()
        return x * scale

    def _used(self, name: str) -> Tensor:
        used, found = self.get_parameter(name) * 1, current_replica()
        replica = 0 if found is None else found.index
        for spoil in spoils:
            if (spoil.name, spoil.replica) == (name, replica):
                used.register_hook(_spoiler(spoil.value))
        return used


def _spoiler(value: float) -> Callable[[Tensor], Tensor]:
    def hook(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[-1] = value
        return grad

    return hook


def wrapped(slots: Sequence[str] = ("cpu",), **options: Any) -> DistributedDataParallel[Net]:
    torch.manual_seed(0)
    return DistributedDataParallel(Net().to(slots[0]), list(slots), **options)


def told(model: DistributedDataParallel[Any], backward: Callable[[], object]) -> str:
    """Return the message of a backward about gradients that are not finite; it leaves none."""
    with mock.patch.object(logging.getLogger("dataparallel"), "warning") as warning:
        try:
            backward()
            text = "".join(call.args[0] % call.args[1:] for call in warning.call_args_list)
        except NonFiniteGradients as error:
            assert isinstance(error, FloatingPointError)
            text = str(error)
    spoils.clear()
    assert [p.grad is None for p in model.parameters()] == [bool(text)] * len([*model.parameters()])
    return text


def trained(
    model: DistributedDataParallel[Net], *bad: Spoil, seed: int = 0, scale: float = 1.0
) -> str:
    """Return the message of a forward and backward in which something is spoiled."""
    spoils[:] = bad
    torch.manual_seed(seed)
    x = torch.randn(8, 4, device=model.module.scale.device)
    return told(model, lambda: (model(x).square().sum() * scale).backward())


def place(rank: int, world: int, replica: int = 0, slot: str = "cpu") -> str:
    """Return the name of a replica."""
    of_rank = f"rank {rank} of {world}, " if world > 1 else ""
    return f"{of_rank}replica {replica} ({slot})"


# --- injections ------------------------------------------------------------------------------


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """Return a copy of all that a step changes, as bytes."""
    tensors = list(model.state_dict().values())
    for state in optimizer.state.values():
        tensors += state.values()
    return torch.cat([tensor.detach().cpu().view(-1).view(torch.uint8) for tensor in tensors])


def _inject(
    rank: int, world: int, slots: list[str], times: int, options: dict[str, Any]
) -> tuple[int, int]:
    """Count the injections that changed a weight or the state, and those that were not named."""
    options = {"bucket_cap_mb": 1e-4, **options}
    model, plain = wrapped(slots, **options), wrapped(slots, **{**options, "nonfinite": "ignore"})
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, plain))
    plan = random.Random(5)
    contaminated = unnamed = 0
    for step in range(times):
        victim, value = plan.randrange(world), plan.choice([NAN, INF, -INF])
        spoil = Spoil(plan.choice(NAMES), value, plan.randrange(len(slots)))
        before = _state(model, optimizer)
        text = trained(model, *[spoil] * (rank == victim), seed=world * step + rank)
        optimizer.step()
        contaminated += not torch.equal(before, _state(model, optimizer))
        where = place(victim, world, spoil.replica, slots[spoil.replica])
        kind = "NaN" if value != value else "infinity"
        unnamed += f"not finite on {where}: {spoil.name} ({kind})." not in text
        # As if nothing had happened.
        for each, steps in ((model, optimizer), (plain, other)):
            steps.zero_grad()
            trained(each, seed=world * step + rank)
            steps.step()
            steps.zero_grad()
        contaminated += not torch.equal(_state(model, optimizer), _state(plain, other))
    assert model.num_skipped == (times if options["nonfinite"] == "skip" else 0)
    model.close()
    plain.close()
    return contaminated, unnamed


@pytest.mark.in_pairs
@VIEWS
@pytest.mark.parametrize("action", ["skip", "raise"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_injections_in_one_process(
    slots: list[str], replicas: int, action: str, view: bool
) -> None:
    options = {"nonfinite": action, "gradient_as_bucket_view": view}
    assert _inject(0, 1, slots[:replicas], 8, options) == (0, 0)


@pytest.mark.parametrize(("action", "view"), [("skip", False), ("raise", True)])
def test_injections(
    cluster: Cluster, repeats: Callable[..., int], figures: Figures, action: str, view: bool
) -> None:
    times = repeats(quick=10, long=250)
    options = {"nonfinite": action, "gradient_as_bucket_view": view}
    limit = 60 if times == 10 else 600
    found = cluster.run(_inject, 2, ["cpu"] * 2, times, options, timeout=limit)
    for what, number in (
        ("contaminated weights", max(c for c, _ in found)),
        ("injections not named (rank, replica, parameter)", max(u for _, u in found)),
    ):
        case = f"{what}, {action}, {'views' if view else 'stolen'}"
        figures.record(case, number, "", 0, repeats=times)


# --- what is decided when, and what is named -------------------------------------------------


def _accumulate(rank: int, world: int, replicas: int, view: bool, action: str) -> None:
    options: dict[str, Any] = {"nonfinite": action, "gradient_as_bucket_view": view}
    model = wrapped(["cpu"] * replicas, **options)
    last = rank == world - 1
    bad = [Spoil("b.weight", replica=replicas - 1)] * last
    for zeroed in (False, True):
        with model.no_sync():
            trained(model)
            # Nobody else could know.
            assert trained(model, *bad) == ""
        if zeroed:
            model.zero_grad()
        text = trained(model)
        assert bool(text) != zeroed
        if text:
            assert f"{place(world - 1, world, replicas - 1)}: b.weight (NaN)" in text
        # Gradients from earlier backwards are dropped, too.
        assert trained(model, seed=1) == ""
        assert trained(model, *bad) != ""
    # Nothing is left of it for the next step.
    with model.no_sync():
        trained(model)
    assert trained(model) == ""
    model.close()


@WORLDS
@pytest.mark.parametrize(("replicas", "action", "view"), [(1, "skip", True), (2, "raise", False)])
def test_it_is_decided_at_the_end_of_a_step(
    cluster: Cluster, world: int, replicas: int, view: bool, action: str
) -> None:
    cluster.run(_accumulate, world, replicas, view, action)


@pytest.mark.parametrize(("to_none", "name"), [(True, "a.weight"), (False, "b.bias")])
def test_what_was_zeroed_is_not_named(to_none: bool, name: str) -> None:
    model = wrapped(["cpu"] * 2, nonfinite="skip")
    with model.no_sync():
        trained(model, Spoil("a.weight", replica=1))
    for parameter in model.parameters():
        parameter.grad = None if to_none else torch.zeros_like(parameter)
    assert f"not finite on replica 0 (cpu): {name} (NaN). The" in trained(model, Spoil(name))
    model.close()


def test_several_forwards_and_a_copy() -> None:
    model = wrapped(["cpu"] * 2, nonfinite="skip")
    copy: DistributedDataParallel[Net] = pickle.loads(pickle.dumps(model))
    for each in (model, copy, wrapped(["cpu"] * 2)):
        x = torch.randn(4, 4)
        backward = (each(x).sum() + each(x * NAN).sum()).backward
        # By default nobody looks.
        skips = int(each in (model, copy))
        assert bool(told(each, backward)) == each.num_skipped == skips
        each.close()


# --- sums, and kinds of gradients ------------------------------------------------------------


def _overflow(rank: int, world: int, replicas: int, options: dict[str, Any]) -> None:
    """Each replica's gradient is finite, and so is each process's."""
    net = nn.Linear(1, 1, bias=False)
    model = DistributedDataParallel(net, ["cpu"] * replicas, nonfinite="skip", **options)
    for part in (0.4, 0.9, 0.4):
        x = torch.full((replicas, 1), LARGEST * part)
        text = told(model, model(x).sum().backward)
        assert bool(text) == (part == 0.9)
        if text:
            assert f"{SUM}: weight (infinity). The step is skipped" in text
        net.zero_grad()
    model.close()


@WORLDS
@pytest.mark.parametrize("option", [{"gradient_as_bucket_view": True}, {"deterministic": True}])
def test_a_sum_that_overflows_is_found(
    cluster: Cluster, world: int, option: dict[str, bool]
) -> None:
    cluster.run(_overflow, world, 3 - world, {"average": "none", **option})


@pytest.mark.parametrize("replicas", [1, 2])
def test_sparse_gradients(replicas: int) -> None:
    net = nn.EmbeddingBag(6, 3, mode="sum", sparse=True)
    model = DistributedDataParallel(net, ["cpu"] * replicas, nonfinite="skip")
    x = torch.tensor([[0, 1], [2, 2]])
    assert told(model, model(x).sum().backward) == ""
    assert net.weight.grad is not None and net.weight.grad.is_sparse
    text = told(model, (model(x) * torch.tensor([[1.0], [NAN]])).sum().backward)
    assert f"replica {replicas - 1} (cpu): weight (NaN)" in text
    # Each of the values is small, but all of them belong to one row.
    for rows, found in ((100, False), (10_000, True)):
        loss = (model(torch.zeros(rows, 1, dtype=torch.long)) * 1e36).sum()
        assert bool(told(model, loss.backward)) == found
        net.zero_grad()
    # Without rows there is no largest element, and it is finite.
    empty = torch.zeros(0, 1, dtype=torch.long)
    assert told(model, model(empty).sum().backward) == ""
    model.close()


class Given(nn.Module):
    """Its gradients are what it is called with; beside a parameter of another dtype."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.given = nn.Parameter(torch.zeros(7, dtype=dtype, device=device))
        self.other = nn.Parameter(torch.zeros(2, dtype=torch.double, device=device))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.given * gradient).sum().real + self.other.sum().to(gradient.real.dtype)


DTYPES = [torch.half, torch.bfloat16, torch.float, torch.double, torch.cfloat]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_every_dtype_are_told_from_its_largest(
    slots: list[str], dtype: torch.dtype
) -> None:
    largest = torch.finfo(dtype).max if not dtype.is_complex else 1e18
    model = DistributedDataParallel(Given(dtype, slots[0]), slots[:1], nonfinite="raise")
    for value, kind in ((0.0, ""), (largest, ""), (NAN, "NaN"), (INF, "infinity")):
        gradient = torch.ones(7, dtype=dtype, device=slots[0])
        gradient[3] = value
        # Complex numbers are multiplied by parts, and infinity times zero is NaN.
        kind = "NaN" if kind and dtype.is_complex else kind
        model.zero_grad()
        text = told(model, model(gradient).backward)
        if value == largest and not dtype.is_complex:
            # Its square is too large, which does not matter; and so is the sum over two backwards.
            assert text == "" != told(model, model(gradient).backward)
        assert f"({slots[0]}): given ({kind}). No" in text if kind else text == ""
    model.close()


# --- hooks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_hooks_have_the_last_word(replicas: int) -> None:
    model = wrapped(["cpu"] * replicas, nonfinite="raise")
    bias, bad = model.module.b.bias, Spoil("b.bias", NAN, replicas - 1)
    handle = bias.register_hook(torch.nan_to_num)
    assert trained(model, bad) == ""
    handle.remove()
    bias.register_hook(lambda grad: grad / 0)
    assert f"{SUM}: b.bias (infinity). " in trained(model)
    model.close()


def test_hooks_after_a_backward_whose_gradients_were_dropped() -> None:
    model = wrapped(["cpu"] * 2, nonfinite="skip")
    before: list[Tensor] = []
    after: list[Tensor] = []
    model.module.scale.register_hook(before.append)
    model.module.scale.register_post_accumulate_grad_hook(after.append)
    for scale, counts in ((INF, (1, 0)), (1.0, (2, 1))):
        model.zero_grad()
        trained(model, scale=scale)
        assert (len(before), len(after)) == counts
    model.module(torch.ones(2, 4)).sum().backward()
    assert len(before) == 3
    model.close()


# --- what is refused, and what it costs --------------------------------------------------------


def test_steps_in_backward_and_weights_that_are_not_finite_are_refused() -> None:
    model = wrapped(nonfinite="skip")
    with pytest.raises(ValueError, match="nonfinite='skip' and optimizers in backward do not go"):
        model.step_in_backward(torch.optim.SGD, lr=0.1)
    assert trained(model) == ""
    model.close()
    model = wrapped(average="samples")
    for weight in (INF, NAN, -1.0):
        text = f"finite and not negative, but that of .* is {weight}"
        with pytest.raises(ValueError, match=text):
            model.set_weight(weight)
    model.close()


@pytest.mark.parametrize("action", ["ignore", "skip"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_host_waits_once_in_a_step(replicas: int, action: str) -> None:
    """To know that all gradients are finite, it has to."""
    model = wrapped([f"virtual:{i}" for i in range(replicas)], nonfinite=action)
    waits = []
    for _ in range(6):
        model.zero_grad()
        loss = model(torch.randn(8, 4, device="virtual:0")).square().sum()
        before = counters()["host_waits"]
        loss.backward()
        waits.append(counters()["host_waits"] - before)
    assert waits[2:] == [int(action == "skip")] * 4
    model.close()


# --- over processes --------------------------------------------------------------------------


def what_others_add_under_no_sync(rank: int, world: int, view: bool) -> None:
    net = nn.Linear(3, 1)
    model = DistributedDataParallel(net, ["cpu"], nonfinite="raise", gradient_as_bucket_view=view)
    x = torch.ones(2, 3)
    text = "finite on rank 1 of 2, what .grad held before the backward: weight (NaN). No"
    for _ in range(2):
        with model.no_sync():
            (model(x).sum() + net.weight.sum() * (NAN if rank else 1.0)).backward()
        assert text in told(model, lambda: model(x).sum().backward())
    model.close()


def the_same_text_with_all_of_them(rank: int, world: int) -> None:
    model = wrapped(nonfinite="raise")
    text = trained(model, Spoil("a.bias", NAN if rank else INF), Spoil("scale"))
    texts: list[Any] = [None] * world
    dist.all_gather_object(texts, text)
    assert texts == [text] * world
    for part in (f"on {place(0, 2)}: ", "a.bias (infinity)", "scale (NaN)", f"on {place(1, 2)}: "):
        assert part in text
    model.close()


def joined(rank: int, world: int) -> None:
    model = wrapped(nonfinite="skip")
    with model.join():
        for step in range(2 + 2 * rank):
            text = trained(model, *[Spoil("scale")] * (rank and step % 2), seed=step)
            assert bool(text) == step % 2
            model.zero_grad()
    assert model.num_skipped == 2
    model.close()


def parameters_that_stay_local(rank: int, world: int, action: str) -> None:
    net = Net()
    net._ddp_params_and_buffers_to_ignore = ["a.weight"]  # type: ignore[assignment]
    model: Any = DistributedDataParallel(net, ["cpu"], nonfinite=action)  # type: ignore[arg-type]
    bad = [Spoil("a.weight")] * rank
    text = f"{place(1, 2)}: a.weight"
    assert text in trained(model, *bad)
    with model.no_sync():
        trained(model, *bad)
    assert text in trained(model)
    assert trained(model) == ""
    model.close()


def no_further_collective(rank: int, world: int) -> None:
    """As long as nothing is found."""
    found = []
    for action in ("ignore", "skip"):
        model = wrapped(nonfinite=action)
        processes = model._training.processes
        assert processes is not None
        for step in range(3):
            if step == 2:
                with model.no_sync():
                    trained(model)
            trained(model)
            found.append(sum((processes.control.launched + processes.buckets.launched).values()))
        model.close()
    assert found[:3] == found[3:]


def _times(state: float, bucket: Any) -> torch.futures.Future[Tensor]:
    return completed((bucket if isinstance(bucket, Tensor) else bucket.buffer()) * state)


def _swallow(state: float, bucket: Any) -> torch.futures.Future[Tensor]:
    return completed(bucket.buffer().nan_to_num_() * state)


def a_communication_hook(rank: int, world: int, name: str) -> None:
    keep_group()
    model = wrapped(nonfinite="skip", bucket_cap_mb=1e-4)
    for hook in (powerSGD_hook, fp16_compress_wrapper(powerSGD_hook)):
        with pytest.raises(ValueError, match="nonfinite='skip' does not go with PowerSGD"):
            model.register_comm_hook(PowerSGDState(None), hook)
    hooks: dict[str, tuple[Any, Any]] = {
        "torch's": (None, "fp16_compress"),
        "swallows a NaN": (1.0, _swallow),
        "infinite in one process": (INF if rank else 1.0, _times),
    }
    model.register_comm_hook(*hooks[name])
    bad = [Spoil("b.weight")] * rank
    if name == "infinite in one process":
        # The other one has to know.
        assert f"not finite on rank 1 of 2, {SUM}" in trained(model)
        return model.close()
    assert f"on {place(1, 2)}: b.weight (NaN)" in trained(model, *bad)
    assert trained(model, seed=rank) == ""
    if name == "torch's":
        # Not too large for float32, but for what is sent.
        assert f"on rank 0 of 2, {SUM}" in trained(model, scale=1e6)
        # A gradient that comes after its bucket was sent does not go through the hook.
        outside = model.module.b.weight.sum() * (NAN if rank else 1.0)
        model.zero_grad()
        assert told(model, (model(torch.randn(6, 4)).square().sum() + outside).backward)
    return model.close()


PROCESSES: list[tuple[Any, ...]] = [
    (what_others_add_under_no_sync, False),
    (what_others_add_under_no_sync, True),
    (the_same_text_with_all_of_them,),
    (joined,),
    (parameters_that_stay_local, "skip"),
    (parameters_that_stay_local, "raise"),
    (no_further_collective,),
    (a_communication_hook, "torch's"),
    (a_communication_hook, "swallows a NaN"),
    (a_communication_hook, "infinite in one process"),
]


@pytest.mark.parametrize("case", PROCESSES, ids=lambda case: f"{case[0].__name__}{case[1:]}")
def test_over_processes(cluster: Cluster, case: tuple[Any, ...]) -> None:
    cluster.run(case[0], 2, *case[1:])


def _train_on_devices(rank: int, world: int, num_devices: int) -> list[Tensor]:
    module = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(5)]).to("virtual:0")
    places = [f"virtual:{i}" for i in range(num_devices)]
    generator = torch.Generator().manual_seed(rank)
    with virtual.strict_mode(), virtual.check_races():
        # One gradient per bucket: then the sum is written over it, not over a copy.
        model = DistributedDataParallel(module, places, bucket_cap_mb=1e-4, nonfinite="skip")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(4):
            x = torch.randn(6, 8, generator=generator).to("virtual:0")
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        result = [parameter.detach().cpu() for parameter in module.parameters()]
    model.close()
    return result


@pytest.mark.parametrize("num_devices", [2, 3])
def test_replicas_are_looked_at_before_sums_are_written_over_them(
    cluster: Cluster, num_devices: int
) -> None:
    first, second = cluster.run(_train_on_devices, 2, num_devices, virtual=True)
    assert all(map(torch.equal, first, second))
