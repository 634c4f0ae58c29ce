"""A replica that runs out of memory hands a part of its chunk to the others."""

from __future__ import annotations

import collections
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dataparallel
from dataparallel import collectives
from dataparallel.extras.balancing import Balancer
from dataparallel.extras.balancing.memory import is_out_of_memory, replicas_named_by
from dataparallel.threads.timeline import Listener
from dataparallel.virtual import device_module as virtual
from dataparallel.virtual import set_memory_limit
from tests.cluster import Cluster

WRAPPERS = [dataparallel.DataParallel, dataparallel.DistributedDataParallel]


class Narrow(nn.Module):
    """Runs out of memory, in forward or backward, where a chunk is larger than it may be."""

    def __init__(self, most: dict[int, int], *, backward: bool = False) -> None:
        super().__init__()
        self.most = most
        self.backward = backward
        # Each replica would have a list of its own.
        self.calls = collections.deque[tuple[int, int]]()

    def forward(self, x: Tensor) -> Tensor:
        replica = dataparallel.current_replica()
        index = 0 if replica is None else replica.index
        self.calls.append((index, len(x)))
        if len(x) <= self.most.get(index, 1000):
            return x
        if not self.backward:
            raise torch.OutOfMemoryError("no memory is left")
        result: Tensor = _NoBackward.apply(x)
        return result


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.place = x.device
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise torch.OutOfMemoryError(f"{ctx.place} is out of memory.")


class Averaging(nn.Module):
    """Its buffers are written in place, replaced, and made."""

    written: Tensor
    replaced: Tensor
    made: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("made", None)

    def forward(self, x: Tensor) -> Tensor:
        self.written.mul_(0.5).add_(1)
        self.replaced = self.replaced * 0.5 + 1
        self.made = torch.ones_like(self.written) if self.made is None else self.made + 1
        return x


class Counting(nn.MSELoss):
    """A criterion with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        return super().forward(x, y)


def make_net(narrow: nn.Module) -> nn.Sequential:
    """Its forward writes buffers, draws random numbers, and then runs out of memory."""
    before = nn.Linear(6, 8), nn.BatchNorm1d(8), Averaging(), nn.Dropout(0.4)
    return nn.Sequential(*before, narrow, nn.Linear(8, 2))


def compute(
    model: Any, x: Tensor, y: Tensor, *, inside: bool, criterion: nn.Module | None = None
) -> Tensor:
    criterion = criterion or nn.MSELoss()
    if inside:
        return model.loss(criterion, x, y, weight="samples")  # type: ignore[no-any-return]
    return criterion(model(x), y)  # type: ignore[no-any-return]


def notes_of(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


def state_of(model: Any) -> list[Tensor]:
    """Return everything that a step leaves behind, and what the caller draws next."""
    found = [p.grad for p in model.parameters()] + list(model.buffers())
    return [t.cpu().clone() for t in found] + [torch.rand(2)]


@pytest.fixture(params=["cpu", "virtual"])
def pair(request: pytest.FixtureRequest) -> list[str]:
    return ["cpu", "cpu"] if request.param == "cpu" else ["virtual:0", "virtual:1"]


@pytest.fixture(autouse=True, scope="module")
def _little_garbage() -> Iterator[None]:
    """Memory is freed by a collection of garbage: not through all that pytest has loaded."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_limits() -> Iterator[None]:
    yield
    set_memory_limit(None, None)


@pytest.mark.parametrize(
    ("wrapper", "buffers", "inside"),
    [
        (dataparallel.DataParallel, "replica0", False),
        (dataparallel.DataParallel, "mean", True),
        (dataparallel.DataParallel, "sync", False),
        (dataparallel.DistributedDataParallel, "replica0", True),
        (dataparallel.DistributedDataParallel, "mean", False),
        (dataparallel.DistributedDataParallel, "sync", True),
    ],
)
def test_forward_as_if_nothing_had_happened(
    pair: list[str], wrapper: Any, buffers: str, inside: bool
) -> None:
    x, y = torch.randn(37, 6).to(pair[0]), torch.randn(37, 2).to(pair[0])
    narrow = Narrow({1: 10})
    net = make_net(narrow).to(pair[0])
    untroubled = make_net(nn.Identity()).to(pair[0])
    untroubled.load_state_dict(net.state_dict())

    def run(net: nn.Module, limits: Any) -> tuple[Balancer, list[Tensor]]:
        criterion = Counting().to(pair[0])
        model = wrapper(net, pair, buffers=buffers)
        model.timeline.subscribe(Listener(on_call=lambda sizes, trains: told.append(sizes)))
        with dataparallel.balance(model) as balancer:
            balancer.load_state_dict({"costs": None, "limits": limits})
            torch.manual_seed(3)
            result = compute(model, x, y, inside=inside, criterion=criterion)
            result.backward()
        return balancer, [result.detach(), criterion.get_buffer("calls"), *state_of(net)]

    told: list[Sequence[int]] = []
    balancer, found = run(net, [None, None])
    # 18, then 3/4 of it, then of that.
    assert [n for replica, n in narrow.calls if replica == 1] == [18, 13, 9]
    # Three attempts are one forward for those who listen.
    assert told == [(19, 18)]
    assert balancer.limits == (None, 9)
    assert [change.reason for change in balancer.history] == ["memory", "memory"]
    assert "replica 1 on " in balancer.history[0].why
    assert "ran out of memory with 18 samples" in balancer.history[0].why
    _, expected = run(untroubled, [None, 9])
    assert all(map(torch.equal, found, expected))


def test_a_device_whose_memory_is_full() -> None:
    net = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 1)).to("virtual:0")
    model = dataparallel.DataParallel(net, ["virtual:0", "virtual:1"])
    x = torch.randn(64, 8, device="virtual:0")
    with dataparallel.balance(model) as balancer:
        expected = model(x).detach()
        model(x)
        set_memory_limit("virtual:1", virtual.memory_allocated(1) + 100_000)
        assert torch.allclose(model(x), expected)
        limit = balancer.limits[1]
        assert balancer.limits[0] is None
        assert limit is not None and 0 < limit < 32
        attempts = len(balancer.history)
        model(x)
        assert len(balancer.history) == attempts, "the next forward knows the limit"


def test_no_room_anywhere(pair: list[str]) -> None:
    model = dataparallel.DataParallel(make_net(Narrow({0: 10, 1: 10})).to(pair[0]), pair)
    x = torch.randn(36, 6).to(pair[0])
    for _ in range(2):
        # If something was compiled before, replicas run the first calls in turn.
        model(x[:4])
    with dataparallel.balance(model) as balancer:
        with pytest.raises(torch.OutOfMemoryError, match="no memory is left") as caught:
            model(x)
        notes = "\n".join(notes_of(caught.value))
        assert "replica 0 on" in notes and "ran out of memory with 18 samples" in notes
        assert "(replica 0 at most 13, replica 1 at most 13); use a smaller batch" in notes
        assert len(model(x[:20])) == 20
        assert balancer.limits == (13, 13)
        balancer.lift_limits()
        assert balancer.sizes(36) == (18, 18)


def test_not_even_one_sample() -> None:
    model = dataparallel.DataParallel(Narrow({1: 0}), ["cpu", "cpu"])
    with dataparallel.balance(model) as balancer:
        for _ in range(2):
            with pytest.raises(
                torch.OutOfMemoryError, match="in replica 1 on device cpu"
            ) as caught:
                model(torch.randn(9, 6))
            note = "\n".join(notes_of(caught.value))
            assert "replica 1 on cpu ran out of memory with 1 samples" in note
            assert "not enough memory for a single sample" in note
        # Chunks were not what took the memory.
        assert balancer.limits == (None, None)
        assert balancer.sizes(9) == (5, 4)


def test_other_errors_are_left_alone() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("a mistake")

    model = dataparallel.DataParallel(Wrong(), ["cpu", "cpu"])
    with dataparallel.balance(model) as balancer:
        with pytest.raises(RuntimeError, match="a mistake"):
            model(torch.ones(4, 2))
        assert balancer.history == []


# --- backward ----------------------------------------------------------------------------------


def test_where_nothing_tells_which_replica_it_was_the_error_is_left_alone() -> None:
    # One call of autograd runs all CPU replicas.
    model = dataparallel.DataParallel(make_net(Narrow({1: 10}, backward=True)), ["cpu", "cpu"])
    x, y = torch.randn(24, 6), torch.randn(24, 2)
    with dataparallel.balance(model) as balancer:
        with pytest.raises(torch.OutOfMemoryError, match=r"^cpu is out of memory"):
            compute(model, x, y, inside=False).backward()
        assert balancer.limits == (None, None)


def test_the_error_of_a_backward_says_what_to_do(pair: list[str]) -> None:
    net = make_net(Narrow({1: 10}, backward=True)).to(pair[0])
    model = dataparallel.DistributedDataParallel(net, pair)
    x, y = torch.randn(24, 6).to(pair[0]), torch.randn(24, 2).to(pair[0])
    with dataparallel.balance(model) as balancer:
        with pytest.raises(torch.OutOfMemoryError, match="is out of memory") as caught:
            compute(model, x, y, inside=False).backward()
        (note,) = [note for note in notes_of(caught.value) if "Run the step again" in note]
        assert note.endswith(
            "ran out of memory in backward with 12 samples; its chunks are smaller from now on. "
            "Run the step again"
        )
        assert all(p.grad is None for p in net.parameters())
        compute(model, x, y, inside=False).backward()
        assert balancer.sizes(24) == (15, 9)


def test_a_step_that_cannot_succeed_says_so(pair: list[str]) -> None:
    net = make_net(Narrow({0: 5, 1: 5}, backward=True)).to(pair[0])
    model = dataparallel.DistributedDataParallel(net, pair)
    x, y = torch.randn(24, 6).to(pair[0]), torch.randn(24, 2).to(pair[0])
    with dataparallel.balance(model):
        # One replica or both may be known to have failed each time.
        for _ in range(8):
            with pytest.raises(torch.OutOfMemoryError, match="is out of memory") as caught:
                compute(model, x, y, inside=False).backward()
        assert "use a smaller batch" in "\n".join(notes_of(caught.value))


# --- what counts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), False),
        (None, False),
    ],
)
def test_what_is_a_lack_of_memory(error: BaseException | None, counts: bool) -> None:
    assert is_out_of_memory(error) is counts


def test_the_device_in_the_text() -> None:
    devices = [torch.device("virtual", i) for i in (0, 1, 1)]
    named: Callable[[str], list[int]] = lambda text: replicas_named_by(  # noqa: E731
        RuntimeError(text), devices
    )
    assert named("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 1 has a total") == [1, 2]
    assert named("virtual:0 is out of memory. Tried") == [0]
    assert named("virtual:3 is out of memory. Tried") == []
    assert named("something\nvirtual:0") == []


# --- what must not be run again ------------------------------------------------------------------


class _Meeting(nn.Module):
    """A collective of processes, in the first replica of each."""

    def forward(self, x: Tensor) -> Tensor:
        replica = dataparallel.current_replica()
        if replica is None or replica.index == 0:
            dist.all_reduce(torch.ones(1))
        return x


def _full_in_process_1(rank: int, world_size: int, where: str) -> tuple[str, Any, list[Any]]:
    torch.manual_seed(0)
    narrow = Narrow({1: 2} if rank == 1 else {}, backward=where == "backward")
    layers = {"batch norm": nn.BatchNorm1d(4), "collective": _Meeting()}
    net = nn.Sequential(nn.Linear(3, 4), layers.get(where, nn.Tanh()), narrow, nn.Linear(4, 2))
    collectives.SyncBatchNorm.convert(net)
    model = dataparallel.DistributedDataParallel(net, ["cpu", "cpu"], timeout=10.0)
    x, failed = torch.randn(8, 3), ""
    with dataparallel.balance(model) as balancer:
        try:
            model(x).square().sum().backward()
        except RuntimeError as error:
            failed = "\n".join([type(error).__name__, str(error), *notes_of(error)])
        limits, calls = balancer.state_dict()["limits"], len(narrow.calls)
        if where == "backward":
            assert all(p.grad is None for p in net.parameters())
            narrow.most.clear()
            model(x).square().sum().backward()
    return failed, (limits, calls), [p.grad for p in net.parameters()]


def test_other_processes_notice_nothing_of_a_forward_that_is_run_again(cluster: Cluster) -> None:
    (failed, _, first), (full, state, second) = cluster.run(_full_in_process_1, 2, "forward")
    # In process 1 replica 1 gets 4 samples, 3, and 2.
    assert failed == full == "" and state == ([None, 2], 6)
    torch.testing.assert_close(first, second)


def test_all_processes_learn_that_a_backward_failed(cluster: Cluster) -> None:
    (failed, _, first), (full, _, second) = cluster.run(_full_in_process_1, 2, "backward")
    assert "rank 1" in failed
    assert "ran out of memory in backward with 4 samples" in full
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("where", ["batch norm", "collective"])
def test_other_processes_are_ahead(cluster: Cluster, where: str) -> None:
    (failed, _, _), (full, state, _) = cluster.run(_full_in_process_1, 2, where)
    assert failed.startswith("CollectiveError")
    assert full.startswith("OutOfMemoryError") and "ran out of memory with 4 samples" in full
    assert "The forward has called collectives of several processes, which the others" in full
    # One attempt of two replicas.
    assert state == ([None, 3], 2)


class _Doubling(nn.Module):
    """Writes an input in place, and then runs out of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.narrow = Narrow({1: 6})

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        replica = dataparallel.current_replica()
        if replica is None or replica.index == 0:
            scale.mul_(2)
        result: Tensor = self.narrow(self.layer(x) * scale)
        return result


@pytest.mark.parametrize("inside", [False, True])
def test_an_input_that_was_written_in_place(inside: bool) -> None:
    net = _Doubling()
    model = dataparallel.DataParallel(net, ["virtual:0", "virtual:1"], in_dims={"scale": None})
    net.to("virtual:0")
    x, y = torch.ones(16, 4, device="virtual:0"), torch.ones(16, 4, device="virtual:0")

    def compute(scale: Tensor) -> Tensor:
        if inside:
            result: Tensor = model.loss(nn.MSELoss(), (x, scale), y)
            return result
        return nn.functional.mse_loss(model(x, scale), y)

    with dataparallel.balance(model) as balancer:
        scale = torch.ones(4, device="virtual:0")
        with pytest.raises(torch.OutOfMemoryError, match="no memory is left") as caught:
            compute(scale)
        assert scale.tolist() == [2.0] * 4, "one attempt"
        note = "\n".join(notes_of(caught.value))
        assert "The forward has written inputs in place (of shape (4,)), so it cannot be" in note
        assert balancer.limits == (None, 6)
        compute(torch.ones(4, device="virtual:0"))
        assert balancer.sizes(16) == (10, 6)


def test_inputs_of_inference_mode_have_no_version() -> None:
    model = dataparallel.DataParallel(Narrow({1: 6}), ["cpu", "cpu"])
    with dataparallel.balance(model), torch.inference_mode():
        x = torch.randn(16, 4)
        assert torch.equal(model(x), x)
