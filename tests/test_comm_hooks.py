"""Communication hooks: what they get and may return, and training with torch's and with failing."""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType, HashStore
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
    register_ddp_comm_hook,
)
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

from dataparallel import DistributedDataParallel
from dataparallel.comm.errors import CollectiveError
from dataparallel.comm_hooks import allreduce_hook
from dataparallel.reducer.comm_hooks import GradBucket
from tests.cluster import Cluster
from tests.process_groups import completed, keep_group

Hook: TypeAlias = Callable[[Any, Any], Any]
Register: TypeAlias = Callable[[Any], object]
#: Torch's types lack some names.
OF_TORCH: Any = dist
F32, F64, C64 = torch.float32, torch.float64, torch.complex64


#: Makes three buckets of :func:`net`.
SMALL = 0.0001


class Net(nn.Module):
    """Linear layers and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.images, self.last = nn.Linear(12, 18), nn.Conv2d(2, 4, 2), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)).view(-1, 2, 3, 3)
        output: Tensor = self.last(torch.tanh(self.images(x)).flatten(1))
        return output


def net(layout: Any = torch.channels_last) -> Any:
    torch.manual_seed(1)
    module: Any = Net()
    return module.to(memory_format=layout)


def train(
    model: nn.Module, rank: int, steps: int = 6, *, step_here: bool = True, first: int = 0
) -> list[Tensor]:
    """Return the parameters and the last gradients after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x, y = torch.randn(8, 12, generator=generator), torch.randn(8, 3, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        if step_here:
            optimizer.step()
    own = list(model.parameters())
    return [p.detach().clone() for p in own] + [p.grad.clone() for p in own if p.grad is not None]


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    """This process is a group of its own: a hook has the last word on its gradients."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    keep_group()
    yield
    dist.destroy_process_group()


class Known(nn.Module):
    """Its gradients are the numbers from 1 on, times the input; one parameter has any layout."""

    def __init__(self, dtype: torch.dtype = F32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3, dtype=dtype))
        images = torch.zeros(2, 3, 2, 2, dtype=dtype).to(memory_format=torch.channels_last)
        self.images = nn.Parameter(images)
        self.turned = nn.Parameter(torch.zeros(4, 2, dtype=dtype).t())

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for parameter in self.parameters():
            numbers = torch.arange(1.0, parameter.numel() + 1, device=x.device)
            total = total + (parameter * numbers.view(parameter.shape)).sum() * x.sum()
        return total.real


def reduced(hook: object, dtype: torch.dtype = F32, **options: Any) -> dict[str, Tensor]:
    """Return the gradients that a hook has made of those of :class:`Known`."""
    model = DistributedDataParallel(Known(dtype), ["cpu"], **{"timeout": 5.0, **options})
    try:
        model.register_comm_hook(None if isinstance(hook, str) else 3.0, hook)
        model(torch.ones(1)).backward()
    finally:
        model.close()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(found: dict[str, Tensor], factor: complex = 1.0, dtype: torch.dtype = F32) -> None:
    """Check that these are the gradients of :class:`Known`, times a factor."""
    for name, parameter in Known().named_parameters():
        numbers = torch.arange(1.0, parameter.numel() + 1).view(parameter.shape)
        torch.testing.assert_close(found[name], (factor * numbers).to(dtype))
        assert found[name].stride() == parameter.stride()


# --- what works ------------------------------------------------------------------------------


class Doubles:
    def __call__(self, state: object, bucket: Any) -> Future[Tensor]:
        assert repr(bucket) == "bucket 0 (weight, images, turned)"
        return completed(bucket.buffer().mul_(2))


def writes_gradients(state: object, bucket: Any) -> Future[Tensor]:
    for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
        assert gradient.stride() == parameter.stride()
        gradient.mul_(2)
    return completed(bucket.buffer())


def sets_another_buffer(state: object, bucket: Any) -> Future[Tensor]:
    """The gradients follow it."""
    before = [gradient.clone() for gradient in bucket.gradients()]
    room = torch.empty(100, dtype=F64)[7:45]
    bucket.set_buffer(room.copy_(bucket.buffer()))
    assert bucket.buffer() is room
    for gradient, old in zip(bucket.gradients(), before, strict=True):
        assert gradient.dtype == F64
        assert torch.equal(gradient.float(), old)
        gradient.mul_(2)
    return completed(room)


def resizes(state: object, bucket: Any) -> Future[Tensor]:
    padded = bucket.buffer().resize_(64)
    return completed(padded.mul_(2).resize_(38))


def returning(change: Callable[[Tensor], object]) -> Hook:
    return lambda state, bucket: completed(change(bucket.buffer()))


VIEW = {"gradient_as_bucket_view": True}
#: Each doubles the gradients.
DOUBLING: list[tuple[Hook, dict[str, Any]]] = [
    (Doubles(), {}),
    (writes_gradients, {}),
    (sets_another_buffer, {}),
    (resizes, {}),
    (resizes, VIEW),
    (returning(lambda t: (t.mul_(2),)), {}),
    (returning(lambda t: 2 * t.half()), {}),
    (returning(lambda t: torch.stack([2 * t, t], 1)[:, 0]), {}),
    (returning(lambda t: torch.view_as_real(2 * t)), {"dtype": C64}),
]


@pytest.mark.parametrize(("hook", "options"), DOUBLING)
def test_hooks_of_users(hook: Hook, options: dict[str, Any]) -> None:
    check(reduced(hook, **options), 2, options.get("dtype", F32))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(["allreduce", "noop"], [F32, C64]),
        *itertools.product(["FP16_compress", "bf16_compress"], [F32, F64]),
    ],
)
def test_hooks_by_name(name: str, dtype: torch.dtype) -> None:
    check(reduced(name, dtype), dtype=dtype)


def test_a_future_is_completed_behind_the_work_on_its_stream() -> None:
    """The thread that waits must have its stream wait for that of the thread that computed."""
    device = torch.device("virtual", 0)

    def hook(state: object, bucket: Any) -> Future[Tensor]:
        future: Future[Tensor] = Future(devices=[device])

        def compute() -> None:
            with torch.Stream(device):
                future.set_result(torch.zeros_like(bucket.buffer()).add_(5))

        thread = threading.Thread(target=compute)
        thread.start()
        thread.join(10)
        return future

    model = DistributedDataParallel(nn.Linear(3, 1).to(device), [device])
    model.register_comm_hook(None, hook)
    side = torch.Stream(device)
    side.wait_stream(torch.accelerator.current_stream(device))
    with side:
        model(torch.ones(2, 3, device=device)).sum().backward()
        assert model.module.weight.grad is not None
        doubled = model.module.weight.grad * 2
    side.synchronize()
    assert doubled.tolist() == [[10.0] * 3]
    model.close()


# --- what is refused, and what fails ---------------------------------------------------------


class OwnError(Exception):
    pass


def one_argument(bucket: Any): ...  # type: ignore[no-untyped-def]


def annotated(bucket: Any, result: Any) -> Hook:
    """A hook that is annotated so."""

    def hook(state: object, bucket: Any) -> Any:
        return completed(bucket.buffer())

    hook.__annotations__ = {"bucket": bucket, "return": result}
    return hook


def raises(state: object, bucket: Any) -> Future[Tensor]:
    raise OwnError("no")


def divides(state: object, bucket: Any) -> Future[Any]:
    future: Future[Any] = completed(1).then(lambda done: done.value() / 0)
    return future


def sets_every_second(state: object, bucket: Any) -> object:
    bucket.set_buffer(torch.zeros(76)[::2])
    return bucket.gradients()


IN = r"in the communication hook for bucket 0 \(\w+, \w+, \w+\)"
HAS = r"real numbers of shape \(38,\) on cpu, torch.strided, .* but its future has"
ONCE: dict[str, Any] = {"timeout": 0.2}
REFUSED: list[tuple[object, dict[str, Any], type[Exception], str]] = [
    (3, {}, TypeError, r"no communication hook 3; pass a function hook\(state, bucket\)"),
    ("sum", {}, ValueError, r"no communication hook 'sum'; .* 'fp16_compress', 'noop'"),
    ("noop", {"deterministic": True}, ValueError, "deterministic=True .*; use one of them"),
    ("fp16_compress", {"dtype": C64}, TypeError, r"of 16 bits, but .* are torch\.complex64"),
    (one_argument, {}, TypeError, f"2 were given.*{IN}"),
    (raises, {}, OwnError, f"no.*{IN}"),
    (divides, {}, RuntimeError, f"ZeroDivisionError.*{IN}"),
    (lambda state, bucket: Future(), ONCE, TimeoutError, rf"hook \S+ over 1 processes did .*{IN}"),
    (lambda state, bucket: 3, {}, TypeError, f"must return a torch.futures.Future .* 3.*{IN}"),
    (annotated(int, Future[Tensor]), {}, ValueError, "bucket annotation should be dist.GradBucket"),
    (annotated(Any, int), {}, ValueError, r"return annotation should be torch.futures.Future\["),
    (sets_every_second, {}, ValueError, r"of stride \(2,\); pass a contiguous .* \(38,\)"),
    (returning(lambda t: t[:5]), {}, ValueError, rf"{HAS}.*real numbers of shape \(5,\) on cpu"),
    (returning(Tensor.int), {}, ValueError, f"{HAS}.*whole numbers"),
    (returning(lambda t: t.to(C64)), {}, ValueError, f"{HAS}.*complex numbers"),
    (returning(lambda t: t.to("virtual:1")), {}, ValueError, f"{HAS}.*on virtual:1"),
    (returning(Tensor.to_sparse), {}, ValueError, f"{HAS}.*on cpu, torch.sparse_coo"),
    (returning(lambda t: [t, t]), {}, ValueError, f"{HAS}.*a list"),
]


@pytest.mark.parametrize(("hook", "options", "kind", "message"), REFUSED)
def test_hooks_that_do_not_fit_are_refused(
    hook: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"(?s){message}"):
        reduced(hook, **options)


def test_a_second_hook_and_one_without_processes_are_refused() -> None:
    model = DistributedDataParallel(net(), ["cpu"])
    model.register_comm_hook(None, "noop")
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook(None, "noop")
    alone = DistributedDataParallel(net(), ["cpu", "cpu"], process_group=False)
    with pytest.raises(ValueError, match=r"no process group; call torch\.distributed\.init"):
        alone.register_comm_hook(None, "allreduce")


# --- several buckets -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "of", [OF_TORCH.GradBucket, GradBucket, "dist.GradBucket", "NotThere", Any]
)
@pytest.mark.parametrize("result", [Future, Future[Tensor], "Future[Tensor]", Any])
def test_annotations_of_a_hook(of: Any, result: Any) -> None:
    check(reduced(annotated(of, result)))


def marked(hook: Hook) -> Hook:
    hook.one_bucket_at_a_time = True  # type: ignore[attr-defined]
    return hook


@pytest.mark.parametrize(
    ("alone", "wrap"),
    [
        (False, default_hooks.fp16_compress_wrapper),
        (True, lambda hook: functools.partial(marked(hook))),
        (True, lambda hook: default_hooks.bf16_compress_wrapper(marked(hook))),
    ],
)
def test_when_a_hook_gets_the_next_bucket(alone: bool, wrap: Callable[[Hook], Hook]) -> None:
    log: list[str] = []
    has_last = threading.Event()

    def hook(state: object, bucket: Any) -> Future[Tensor]:
        log.append(f"begin {bucket.index()}")
        future: Future[Tensor] = Future()

        def finish() -> None:
            # Where the next bucket does not wait for this one, this one waits for all.
            has_last.wait(0.05 if alone else 20)
            log.append(f"end {bucket.index()}")
            future.set_result(bucket.buffer())

        threading.Thread(target=finish).start()
        if bucket.is_last():
            has_last.set()
        return future

    model = DistributedDataParallel(net(), ["cpu"], bucket_cap_mb=SMALL)
    model.register_comm_hook(None, wrap(hook))
    train(model, 0, 1)
    model.close()
    count = len(log) // 2
    assert count > 2
    begins, ends = ([f"{what} {i}" for i in range(count)] for what in ("begin", "end"))
    if alone:
        assert log == [text for pair in zip(begins, ends, strict=True) for text in pair]
    else:
        assert log[:count] == begins


def test_torchs_hooks_that_launch_from_callbacks_get_one_bucket_at_a_time() -> None:
    """Quantization gathers twice: the second time from a callback of the first."""
    model = DistributedDataParallel(net(), ["cpu"], bucket_cap_mb=SMALL)
    model.register_comm_hook(
        None, functools.partial(quantization_hooks.quantization_pertensor_hook)
    )
    assert model._hook is not None
    assert model._hook.one_bucket_at_a_time


# --- over processes: training is that of torch's wrapper -------------------------------------

#: Torch's types do not tell that this is the default group.
ALL: Any = None
BUILT_IN: Any = BuiltinCommHookType.__members__


def registers(hook: Any) -> Register:
    return lambda model: model.register_comm_hook(None, hook)


def power_sgd(hook: Any = powerSGD_hook.powerSGD_hook, **options: Any) -> Register:
    options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 3, **options}
    return lambda model: model.register_comm_hook(
        powerSGD_hook.PowerSGDState(None, **options), hook
    )


def local_sgd(model: Any) -> None:
    alone: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, 3)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)


def overlapped(model: Any) -> None:
    """An optimizer whose step follows the all-reduce of each bucket."""
    with warnings.catch_warnings():
        # Torch's functional optimizers are scripts, which are deprecated.
        warnings.simplefilter("ignore")
        import torch.distributed.algorithms._optimizer_overlap.optimizer_overlap as overlap

        optimizer = overlap._as_overlapped_optim(
            torch.optim.SGD, model.parameters(), 0.1, momentum=0.9
        )
    optimizer.register_ddp(model)


class Case(NamedTuple):
    """The registration of a hook with our wrapper, and with torch's if it differs."""

    ours: Register
    theirs: Register | None = None
    # Those of 16 bits round. If the sum of two replicas differs from the gradient of one in the
    # last bit, they may round to the next number.
    tolerance: float = 2e-5
    # With several buckets, torch's wrapper crashes.
    bucket_cap_mb: float = SMALL
    # Torch's bucket gives gradients in the order of memory, whatever the parameter's layout is, so
    # that optimizers mix up the channels there.
    layout: torch.memory_format = torch.channels_last


fp16_wrapper = default_hooks.fp16_compress_wrapper
# With full rank it is a mean.
FULL_RANK = power_sgd(
    matrix_approximation_rank=64, min_compression_rate=0.01, use_error_feedback=False
)
AS_TORCHS = {
    "noop": Case(registers(debugging_hooks.noop_hook)),
    "type": Case(lambda m: register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, m), None, 3e-3),
    "by a name": Case(
        registers("allreduce"), lambda m: m._register_builtin_comm_hook(BUILT_IN["ALLREDUCE"])
    ),
    "by torch's type": Case(registers(BUILT_IN["ALLREDUCE"]), lambda m: None),
    # Torch's asks for CUDA.
    "bf16": Case(registers("bf16_compress"), lambda m: None, 3e-2),
    "power_sgd": Case(power_sgd(), bucket_cap_mb=25),
    "power_sgd with several buckets": Case(FULL_RANK, lambda m: None, 1e-3),
    "fp16 of power_sgd": Case(power_sgd(fp16_wrapper(powerSGD_hook.powerSGD_hook)), None, 3e-3, 25),
    "local sgd": Case(local_sgd),
    "overlapped optimizer": Case(overlapped, layout=torch.contiguous_format),
    "overlapped optimizer in any layout": Case(overlapped, lambda m: None),
}


def _compare(rank: int, world_size: int, name: str) -> None:
    """With one replica and with two, the parameters and gradients of torch's wrapper."""
    keep_group()
    case = AS_TORCHS[name]

    def trained(wrapper: Any, register: Any, *args: Any, **options: Any) -> list[Tensor]:
        model = wrapper(net(case.layout), *args, bucket_cap_mb=case.bucket_cap_mb, **options)
        register(model)
        results = train(model, rank, step_here=register is not overlapped)
        if wrapper is not TorchsDDP:
            model.close()
        return results

    expected = trained(TorchsDDP, case.theirs or case.ours)
    for replicas in (1, 2):
        options = {"gradient_as_bucket_view": replicas > 1}
        got = trained(DistributedDataParallel, case.ours, ["cpu"] * replicas, **options)
        tolerance = case.tolerance if replicas > 1 or case.theirs is not None else 2e-5
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
        assert [t.stride() for t in got] == [t.stride() for t in expected]
        if name == "bf16":
            assert not torch.allclose(got[0], expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", AS_TORCHS)
def test_training_is_that_of_torch(cluster: Cluster, name: str) -> None:
    cluster.run(_compare, 2, name)


def halves(state: object, bucket: Any) -> Future[Tensor]:
    bucket.buffer().mul_(0.5)
    return allreduce_hook(ALL, bucket)


def _sparse(rank: int, world_size: int, replicas: int, average: Any, kind: str) -> None:
    """Sparse gradients, and dense ones behind them, against torch's wrapper."""
    keep_group()
    weight = (3 - rank) * world_size / 5 if average == "samples" else 1.0

    def hook(state: object, bucket: Any) -> Future[Tensor]:
        assert bucket.is_last() or bucket.index() < 2
        return halves(state, bucket) if kind == "own" else allreduce_hook(ALL, bucket)

    grads = []
    for wrapped in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.EmbeddingBag(6, 3, sparse=True), nn.Linear(3, 2))
        model: Any = TorchsDDP(net)
        if wrapped:
            model = DistributedDataParallel(net, ["cpu"] * replicas, average=average)
        # Torch refuses the annotation.
        model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
        for _ in range(2):
            net.zero_grad()
            x = torch.tensor([[0, rank + 1], [4, 4], [rank, 2]])[: 3 - rank]
            (model(x).pow(2).mean() * (1.0 if wrapped else weight)).backward()
        grads.append([p.grad.to_dense() for p in net.parameters() if p.grad is not None])
        assert next(net.parameters()).grad.is_sparse  # type: ignore[union-attr]
    torch.testing.assert_close(*grads)


@pytest.mark.in_pairs
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("average", ["processes", "samples"])
@pytest.mark.parametrize("kind", ["allreduce", "own"])
def test_sparse_gradients_go_through_a_hook(
    cluster: Cluster, replicas: int, average: str, kind: str
) -> None:
    cluster.run(_sparse, 2, replicas, average, kind)


# --- over processes: hooks that fail ---------------------------------------------------------


def fails_later(state: object, bucket: Any) -> Future[Tensor]:
    reduced: Any = allreduce_hook(ALL, bucket)
    future: Future[Tensor] = reduced.then(lambda done: raises(state, bucket))
    return future


def never_completes(state: object, bucket: Any) -> Future[Tensor]:
    return Future()


FAILURES: dict[str, tuple[Hook, type[Exception], str]] = {
    "raises": (raises, OwnError, "no\nin the communication hook for bucket {} ("),
    "fails later": (fails_later, RuntimeError, "OwnError: no"),
    "never completes": (never_completes, TimeoutError, "the future of the communication hook "),
    "returns less": (returning(lambda t: t[1:]), ValueError, "bucket {} ("),
}


def _recovers(
    rank: int, world_size: int, name: str, replicas: int, ranks: tuple[int, ...], index: int
) -> str:
    """A hook fails once, in the second step, in one bucket and on some ranks."""
    keep_group()
    failure, kind, _ = FAILURES[name]
    fails = False

    def hook(state: None, bucket: Any) -> Future[Tensor]:
        nonlocal fails
        if fails and bucket.index() == index:
            fails = False
            future: Future[Tensor] = failure(state, bucket)
            return future
        return allreduce_hook(ALL, bucket)

    # Else longer than the test may take.
    timeout = 0.5 if "never" in name else 90.0
    model = DistributedDataParallel(net(), ["cpu"] * replicas, bucket_cap_mb=SMALL, timeout=timeout)
    model.register_comm_hook(None, hook)
    theirs = TorchsDDP(net())
    train(model, rank, 1)
    train(theirs, rank, 1)
    fails = rank in ranks
    with pytest.raises(kind if fails else RuntimeError) as caught:
        train(model, rank, 1, first=1)
    results = [train(each, rank, 2, first=2) for each in (model, theirs)]
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-5)
    model.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "replicas", "ranks", "index"),
    [
        ("raises", 1, (0, 1), 1),
        ("fails later", 2, (0, 1), 1),
        ("never completes", 2, (0, 1), 1),
        ("returns less", 2, (0, 1), 1),
        # The last bucket is sent nevertheless, since the others wait for it.
        ("raises", 2, (1,), 0),
        ("raises", 2, (1,), 2),
    ],
)
def test_the_step_after_a_failure_is_right(
    cluster: Cluster, name: str, replicas: int, ranks: tuple[int, ...], index: int
) -> None:
    for rank, text in enumerate(cluster.run(_recovers, 2, name, replicas, ranks, index)):
        assert (FAILURES[name][2].format(index) if rank in ranks else "rank 1") in text


def _fails_for_good(rank: int, world_size: int, kind: type[BaseException]) -> list[str]:
    """Return the end of each of three steps, if a hook fails on rank 1 in the first."""
    keep_group()
    step = 0

    def hook(state: None, bucket: Any) -> Future[Tensor]:
        if rank == 1 and step == 0:
            raise kind("no")
        return allreduce_hook(ALL, bucket)

    model = DistributedDataParallel(nn.Linear(3, 2, bias=False), ["cpu"], timeout=90.0)
    model.register_comm_hook(None, hook)
    found = []
    for step in range(3):
        if step == 2:
            # A group that is made anew is not forgotten.
            model.close()
        model.zero_grad()
        # Before the time limit of a collective, and of the hook. Results would be those of
        # different steps.
        with pytest.raises((Exception, KeyboardInterrupt)) as caught:
            model(torch.full((1, 3), 10.0**step)).sum().backward()
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    model.close()
    # The links of others are groups of their own.
    other = DistributedDataParallel(nn.Linear(1, 1, bias=False), ["cpu"], timeout=30.0)
    other(torch.tensor([[rank + 1.0]])).sum().backward()
    assert next(each.grad for each in other.parameters()).tolist() == [[1.5]]  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("kind", [OwnError, KeyboardInterrupt])
def test_a_hook_that_sends_no_zeros_either(cluster: Cluster, kind: type[BaseException]) -> None:
    """Rank 0 has begun a collective, and rank 1 has none for it: nothing may be matched with it."""
    first, second = cluster.run(_fails_for_good, 2, kind)
    for text in (*first[1:], *second[1:]):
        assert text.startswith("CollectiveError: the communication hooks have not run equally ofte")
        assert "(rank 0: 1; rank 1: 0)" in text and "; start all processes again" in text
    assert "CollectiveError" in first[0] and "rank 1" in first[0]
    assert f"{kind.__name__}: no" in first[0] and f"{kind.__name__}: no" in second[0]


def _raises_before_it_goes_on(rank: int, world_size: int) -> None:
    """Rank 1 has gone, with all its connections, before rank 0 looks who has failed."""
    keep_group()
    gone = Future[Tensor]()

    def hook(state: None, bucket: Any) -> Future[Tensor]:
        if rank == 1:
            raise OwnError("no")
        # As gloo's future, when the connection is closed.
        error: Any = RuntimeError("Connection closed by peer")
        gone.set_exception(error)
        return gone

    model = DistributedDataParallel(nn.Linear(1, 1), ["cpu"], timeout=20.0)
    model.register_comm_hook(None, hook)
    model(torch.ones(1, 1))
    loss = model(torch.ones(1, 1)).sum()
    if rank == 1:
        with pytest.raises(OwnError, match="no"):
            loss.backward()
    dist.barrier()
    if rank == 0:
        with pytest.raises(CollectiveError, match=r"given up .*: rank 1 .*OwnError: no"):
            loss.backward()


def test_the_rank_whose_hook_raised_is_named(cluster: Cluster) -> None:
    cluster.run(_raises_before_it_goes_on, 2)
