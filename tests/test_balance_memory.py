"""A replica that runs out of memory hands a part of its chunk to the others."""

from __future__ import annotations

import collections
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel
from dataparallel.devices import is_out_of_memory
from dataparallel.extras.balancing.memory import replicas_named_by
from dataparallel.virtual import device_module as virtual
from dataparallel.virtual import set_memory_limit
from tests.cluster import Cluster
from tests.free_threading import settle

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


def make_net(narrow: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), narrow, nn.Linear(8, 2))


def compute(model: Any, x: Tensor, y: Tensor, *, inside: bool) -> Tensor:
    if inside:
        return model.loss(nn.MSELoss(), x, y)  # type: ignore[no-any-return]
    return nn.functional.mse_loss(model(x), y)


def notes_of(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


@pytest.fixture(params=["cpu", "virtual"])
def pair(request: pytest.FixtureRequest) -> list[str]:
    return ["cpu", "cpu"] if request.param == "cpu" else ["virtual:0", "virtual:1"]


@pytest.fixture(autouse=True)
def _no_limits() -> Iterator[None]:
    yield
    set_memory_limit(None, None)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_next_forward_has_a_smaller_chunk(pair: list[str], wrapper: Any, inside: bool) -> None:
    x, y = torch.randn(37, 6).to(pair[0]), torch.randn(37, 2).to(pair[0])
    narrow = Narrow({1: 10})
    net = make_net(narrow).to(pair[0])
    model = wrapper(net, pair)
    with dataparallel.balance(model) as balancer:
        for samples in (18, 13):
            with pytest.raises(torch.OutOfMemoryError, match="no memory is left") as caught:
                compute(model, x, y, inside=inside)
            (note,) = [note for note in notes_of(caught.value) if "Run the step again" in note]
            assert "replica 1 on " in note and f"ran out of memory with {samples} samples" in note
        compute(model, x, y, inside=inside).backward()
    # 18, then 3/4 of it, then of that.
    assert [n for replica, n in narrow.calls if replica == 1] == [18, 13, 9]
    assert balancer.limits == (None, 9)
    assert [change.reason for change in balancer.history] == ["memory", "memory"]
    assert "ran out of memory with 18 samples" in balancer.history[0].why
    found = [p.grad for p in net.parameters()]
    model.zero_grad()
    with dataparallel.balance(model) as another:
        another.load_state_dict({"costs": None, "limits": [None, 9]})
        compute(model, x, y, inside=inside).backward()
    torch.testing.assert_close(found, [p.grad for p in net.parameters()])


def test_a_device_whose_memory_is_full() -> None:
    net = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 1)).to("virtual:0")
    model = dataparallel.DataParallel(net, ["virtual:0", "virtual:1"])
    x = torch.randn(64, 8, device="virtual:0")
    with dataparallel.balance(model) as balancer:
        expected = model(x).detach()
        model(x)
        settle()
        set_memory_limit("virtual:1", virtual.memory_allocated(1) + 100_000)
        for _ in range(20):
            try:
                assert torch.allclose(model(x), expected)
                break
            except torch.OutOfMemoryError:
                gc.collect()
        limit = balancer.limits[1]
        assert balancer.limits[0] is None
        assert limit is not None and 0 < limit < 32
        changes = len(balancer.history)
        model(x)
        assert len(balancer.history) == changes, "the next forward knows the limit"


def test_no_room_anywhere(pair: list[str]) -> None:
    model = dataparallel.DataParallel(make_net(Narrow({0: 10, 1: 10})).to(pair[0]), pair)
    x = torch.randn(36, 6).to(pair[0])
    for _ in range(2):
        # If something was compiled before, replicas run the first calls in turn.
        model(x[:4])
    with dataparallel.balance(model) as balancer:
        # The other replica may not have run out of memory yet.
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match="no memory is left") as caught:
                model(x)
        notes = "\n".join(notes_of(caught.value))
        assert "ran out of memory with" in notes
        assert "(replica 0 at most 13, replica 1 at most 13); use a smaller batch" in notes
        assert len(model(x[:20])) == 20
        assert balancer.limits == (13, 13)
        balancer.lift_limits()
        assert balancer.sizes(36) == (18, 18)


def test_not_even_one_sample() -> None:
    model = dataparallel.DataParallel(Narrow({1: 0}), ["cpu", "cpu"])
    with dataparallel.balance(model) as balancer:
        # Chunks of 4, 3, 2 and 1.
        for samples in (4, 3, 2, 1, 1):
            with pytest.raises(torch.OutOfMemoryError, match="replica 1 on device cpu") as caught:
                model(torch.randn(9, 6))
            note = "\n".join(notes_of(caught.value))
            assert f"replica 1 on cpu ran out of memory with {samples} samples" in note
            assert ("not enough memory for a single sample" in note) == (samples == 1)
        assert balancer.limits == (None, 1)


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


# --- processes -----------------------------------------------------------------------------------


def _full_in_process_1(rank: int, world_size: int, backward: bool) -> tuple[str, list[Any]]:
    torch.manual_seed(0)
    narrow = Narrow({1: 2} if rank == 1 else {}, backward=backward)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), narrow, nn.Linear(4, 2))
    model = dataparallel.DistributedDataParallel(net, ["cpu", "cpu"], timeout=10.0)
    x, failed = torch.randn(8, 3), ""
    with dataparallel.balance(model):
        try:
            model(x).square().sum().backward()
        except RuntimeError as error:
            failed = "\n".join([type(error).__name__, str(error), *notes_of(error)])
        assert all(p.grad is None for p in net.parameters())
        narrow.most.clear()
        model(x).square().sum().backward()
    return failed, [p.grad for p in net.parameters()]


@pytest.mark.parametrize("backward", [False, True])
def test_all_processes_learn_that_a_step_failed(cluster: Cluster, backward: bool) -> None:
    (failed, first), (full, second) = cluster.run(_full_in_process_1, 2, backward)
    assert "rank 1" in failed
    assert f"ran out of memory {'in backward ' * backward}with 4 samples" in full
    torch.testing.assert_close(first, second)
