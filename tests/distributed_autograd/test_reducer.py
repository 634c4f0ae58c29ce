"""A wrapper inside distributed autograd contexts: its gradients are reduced there."""

from __future__ import annotations

import contextlib
import contextvars
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as torch_rpc
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.distributed_autograd import backward, context, get_gradients, rpc_sync
from tests.distributed_autograd.rpc_workers import World
from tests.optimizer_cases import apply_torchs

WORDS, WIDTH, TRAINERS = 11, 6, 2
SERVER = "worker3"

Grads = list[Tensor | None]


class Net(nn.Module):
    """Two layers and a scale that are used, and one layer that is used if a test says so."""

    #: The next forward leaves this in the graph: its backward calls it.
    call: Callable[[], None] | None = None
    #: A tensor from outside.
    factor: Tensor | float = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(WIDTH, 8, dtype=torch.double)
        self.rare = nn.Linear(WIDTH, 8, dtype=torch.double)
        self.last = nn.Linear(8, 3, dtype=torch.double)
        self.scale = nn.Parameter(torch.tensor(1.3, dtype=torch.double))

    def forward(self, x: Tensor, use_rare: bool = True) -> Tensor:
        hidden = self.first(x).tanh()
        if use_rare:
            hidden = hidden + self.rare(x)
        if (call := Net.call) is not None:
            hidden.register_hook(lambda _: call())
        output: Tensor = self.last(hidden) * self.scale * Net.factor
        return output


NO_GRADS: Grads = [None] * 7


def words(step: int, rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(WORDS, (6,), generator=generator)


def fresh_table() -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(WORDS, WIDTH, dtype=torch.double, generator=generator).requires_grad_()


def vectors(step: int, rank: int = 0) -> Tensor:
    return fresh_table().detach()[words(step, rank)]


_table = fresh_table()


def look_up(indices: Tensor, sparse: bool = False) -> Tensor:
    """Look up indices in the worker's table for a trainer."""
    return nn.functional.embedding(indices, _table, sparse=sparse)


def table_gradient(context_id: int) -> Tensor:
    """Return the gradient that the worker with the table has in a context."""
    assert _table.grad is None
    return get_gradients(context_id)[_table].to_dense()


def wrap(net: nn.Module, replicas: int, **options: Any) -> Any:
    return dp.DistributedDataParallel(net, ["cpu"] * replicas, timeout=20.0, **options)


def grads(module: nn.Module) -> Grads:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def in_context(context_id: int, module: nn.Module) -> Grads:
    """Return the gradients of a module in a context."""
    found = get_gradients(context_id)
    return [found.get(parameter) for parameter in module.parameters()]


def expect(got: Sequence[Tensor | None], expected: Sequence[Tensor | None], where: object) -> None:
    torch.testing.assert_close(
        got, expected, rtol=0, atol=1e-6, check_device=False, msg=lambda text: f"{where}: {text}"
    )


# --- several trainers ----------------------------------------------------------------------------


def learn(
    net: nn.Module,
    step: int,
    scale: float = 1 / TRAINERS,
    ranks: Sequence[int] = range(TRAINERS),
    unused_in: Sequence[int] = (),
) -> Grads:
    """Return a module's gradients in one process with the batches of these trainers."""
    for rank in ranks:
        (net(vectors(step, rank), rank not in unused_in).pow(2).mean() * scale).backward()
    return grads(net)


def loss_of(model: nn.Module, rank: int, step: int, **kwargs: Any) -> Tensor:
    loss: Tensor = model(rpc_sync(SERVER, look_up, (words(step, rank),)), **kwargs).pow(2).mean()
    return loss


def check_step(
    rank: int, model: Any, net: nn.Module, step: int, expected: Grads, **kwargs: Any
) -> None:
    """A step in a context of its own has the expected gradients."""
    with context() as context_id:
        backward(context_id, [loss_of(model, rank, step, **kwargs)])
        expect(in_context(context_id, net), expected, step)


def as_trainer(rank: int, path: str, case: Callable[..., Any], args: Sequence[Any]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=TRAINERS)
    try:
        case(rank, *args)
    finally:
        dist.destroy_process_group()


def train(path: str, case: Callable[..., Any], args: Sequence[Any]) -> None:
    """Run ``case(rank, *args)`` on two workers, that are one process group."""
    other = torch_rpc.rpc_async("worker1", as_trainer, (1, path, case, args), timeout=60)
    as_trainer(0, path, case, args)
    other.wait()


def one_step_in_each_context(rank: int, replicas: int) -> None:
    """The trainers share their gradients, and the table has those of each."""
    for average in ("processes", "samples", "none"):
        net = Net()
        model = wrap(net, replicas, average=average, bucket_cap_mb=0.0001)
        for step in range(2):
            table = fresh_table()
            Net()(table[words(step, rank)]).pow(2).mean().backward()
            with context() as context_id:
                found = rpc_sync(SERVER, look_up, (words(step, rank), replicas == 1))
                backward(context_id, [model(found).pow(2).mean()])
                scale = 1.0 if average == "none" else 1 / TRAINERS
                expect(in_context(context_id, net), learn(Net(), step, scale), step)
                expect([rpc_sync(SERVER, table_gradient, (context_id,))], [table.grad], step)
        model.close()


#: True if a step is reduced over processes; and its context, or None for an ordinary backward.
STEPS: list[tuple[bool, int | None]] = [
    (True, None),
    (True, 0),
    (False, 0),
    (True, 0),
    (False, None),
    (False, 0),
    (False, 1),
    (True, 0),
    (True, 1),
    (True, None),
]


def each_context_accumulates_for_itself(rank: int, replicas: int, view: bool) -> None:
    net = Net()
    model = wrap(net, replicas, gradient_as_bucket_view=view, bucket_cap_mb=0.0001)
    # Contexts that are open beside each other, as those of several threads are.
    blocks = [(contextvars.copy_context(), context()) for _ in range(2)]
    ids = [variables.run(block.__enter__) for variables, block in blocks]
    bare: dict[int | None, Net] = {number: Net() for number in (None, 0, 1)}
    seen: dict[int | None, Grads] = dict.fromkeys(bare, NO_GRADS)
    for step, (reduced, number) in enumerate(STEPS):
        expected = learn(bare[number], step)
        with contextlib.nullcontext() if reduced else model.no_sync():
            loss = model(vectors(step, rank)).pow(2).mean()
            if number is None:
                loss.backward()
            else:
                backward(ids[number], [loss])
        for other in bare:
            got = grads(net) if other is None else in_context(ids[other], net)
            if other != number:
                expect(got, seen[other], f"{other} in step {step}, which is about {number}")
            elif reduced:
                expect(got, expected, f"step {step}")
            seen[other] = [None if grad is None else grad.clone() for grad in got]
    for variables, block in blocks:
        variables.run(block.__exit__, None, None, None)
    model.close()


def sums_are_not_accumulated(rank: int) -> None:
    net = Net()
    model = wrap(net, 1, average="none")
    for reduced in (False, True):
        with context() as context_id:
            with contextlib.nullcontext() if reduced else model.no_sync():
                backward(context_id, [loss_of(model, rank, 0)])
            with pytest.raises(RuntimeError, match="have changed since they were reduced"):
                backward(context_id, [loss_of(model, rank, 1)])
    check_step(rank, model, net, 2, learn(Net(), 2, 1.0))
    model.close()


def fail() -> None:
    raise ZeroDivisionError("on purpose")


#: In which trainers a step does not use all parameters; and what all raise, or None.
Steps = list[tuple[tuple[int, ...], str | None]]


def steps_in_contexts(rank: int, replicas: int, options: dict[str, Any], steps: Steps) -> None:
    """An error leaves nothing in the context, and the next step is right."""
    net = Net()
    model = wrap(net, replicas, bucket_cap_mb=0.0001, **options)
    for step, (unused_in, message) in enumerate(steps):
        use_rare = rank not in unused_in
        if message is None:
            expected = learn(Net(), step, unused_in=unused_in)
            check_step(rank, model, net, step, expected, use_rare=use_rare)
            continue
        with context() as context_id:
            Net.call = fail if message == FAILED and rank == 0 else None
            loss = loss_of(model, rank, step, use_rare=use_rare)
            Net.call = None
            with pytest.raises((ZeroDivisionError, RuntimeError), match=message):
                backward(context_id, [loss])
            assert in_context(context_id, net) == NO_GRADS
    model.close()


def triple(state: Any, bucket: Any) -> torch.futures.Future[Any]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: done.value()[0] * state)


def communication_hooks(rank: int) -> None:
    net = Net()
    model = wrap(net, 1, gradient_as_bucket_view=True, bucket_cap_mb=0.0001)
    model.register_comm_hook(3.0 / TRAINERS, triple)
    for step in range(2):
        check_step(rank, model, net, step, learn(Net(), step, 3.0 / TRAINERS))
    model.close()


def a_trainer_without_data_takes_part(rank: int) -> None:
    net = Net()
    model = wrap(net, 2, gradient_as_bucket_view=True)
    with model.join():
        for step in range(2 + 2 * rank):
            active = [0, 1] if step < 2 else [1]
            check_step(rank, model, net, step, learn(Net(), step, ranks=active))
    assert grads(net) == NO_GRADS
    model.close()


FAILED = "on purpose|rank 0 .* failed in backward"
CHANGED = "training graph has changed in this iteration"
VIEW = {"gradient_as_bucket_view": True}
UNUSED: Steps = [((), None), ((0,), None), ((0, 1), None), ((), None)]
FLAGS = [
    ({"find_unused_parameters": False}, "2 parameters got no"),
    ({"static_graph": True}, CHANGED),
]
TRAINERS_CASES: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    (one_step_in_each_context, (1,)),
    (one_step_in_each_context, (2,)),
    (each_context_accumulates_for_itself, (1, True)),
    (each_context_accumulates_for_itself, (2, False)),
    (sums_are_not_accumulated, ()),
    (steps_in_contexts, (2, VIEW, UNUSED)),
    (steps_in_contexts, (1, VIEW | {"find_unused_parameters": True}, UNUSED)),
    *((steps_in_contexts, (1, flag, [((), None), ((0, 1), e), ((), None)])) for flag, e in FLAGS),
    (steps_in_contexts, (1, VIEW, [((), None), ((), FAILED), ((), None)])),
    (steps_in_contexts, (2, {}, [((), None), ((), FAILED), ((), None)])),
    (communication_hooks, ()),
    (a_trainer_without_data_takes_part, ()),
]


@pytest.mark.parametrize(("case", "args"), TRAINERS_CASES)
def test_trainers(
    world: World, tmp_path: pathlib.Path, case: Callable[..., None], args: tuple[Any, ...]
) -> None:
    world.run(train, str(tmp_path / "trainers"), case, args)


# --- a single process: as the bare module outside of contexts ------------------------------------


PLACES = (["cpu"], ["cpu"] * 3, ["virtual:0"], ["virtual:1", "virtual:0"])


@pytest.mark.on_worker0
@pytest.mark.parametrize("view", [False, True, None])
@pytest.mark.parametrize("devices", PLACES, ids="-".join)
def test_gradients_of_parameters_and_inputs(devices: list[str], view: bool | None) -> None:
    """The wrapper is ``DistributedDataParallel``, or ``DataParallel`` if there is no ``view``."""
    net, bare = Net().to(devices[0]), Net()
    if view is None:
        model: Any = dp.DataParallel(net, devices)
    else:
        model = dp.DistributedDataParallel(net, devices, gradient_as_bucket_view=view)

    def loss_of(module: Any, scale: Tensor, x: Tensor) -> Tensor:
        """Use two forwards, and a parameter outside of them."""
        loss: Tensor = module(x).pow(2).sum() + module(x, use_rare=False).sin().sum()
        return loss + scale.sin()

    for step in range(2):
        bare.zero_grad()
        table = fresh_table()
        with context() as context_id:
            found = rpc_sync(SERVER, look_up, (words(step),)).to(devices[0])
            loss = loss_of(model, net.scale, found)
            # The second time over the graph that was kept.
            for retain_graph in (True, False):
                loss_of(bare, bare.scale, table[words(step)]).backward()
                backward(context_id, [loss], retain_graph)
                expect(in_context(context_id, net), grads(bare), step)
                expect([rpc_sync(SERVER, table_gradient, (context_id,))], [table.grad], step)
            # Nothing else is there: not the leaves of the replicas.
            assert len(get_gradients(context_id)) == len(NO_GRADS)
        assert grads(net) == NO_GRADS
    model.close()


@pytest.mark.on_worker0
@pytest.mark.parametrize(("replicas", "view"), [(1, True), (2, False)])
def test_hooks_on_tensors(replicas: int, view: bool) -> None:
    """On parameters, one of which is used in one step."""
    net, bare = Net(), Net()
    model = wrap(net, replicas, gradient_as_bucket_view=view)
    seen: dict[nn.Module, list[float]] = {net: [], bare: []}
    for module in (net, bare):

        def triples(grad: Tensor, kept: list[float] = seen[module]) -> Tensor:
            kept.append(round(float(grad.sum()), 6))
            return grad * 3

        for parameter in (module.scale, module.rare.weight):
            register: Any = parameter.register_hook
            register(triples)
    for step in range(3):
        bare.zero_grad()
        bare(vectors(step), use_rare=step == 1).pow(2).sum().backward()
        with context() as context_id:
            backward(context_id, [model(vectors(step), use_rare=step == 1).pow(2).sum()])
            expect(in_context(context_id, net), grads(bare), step)
    assert sorted(seen[net]) == sorted(seen[bare])
    model.close()


class Caller(nn.Module):
    """Looks words up on another worker in its forward, or in a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, indices: Tensor, calls: str = "none") -> Tensor:
        found = fresh_table().detach()[indices]
        if calls != "none":
            found = rpc_sync(SERVER, look_up, (indices,))
        output: Tensor = self.net(found.detach() if calls == "detached" else found)
        return output


@pytest.mark.on_worker0
@pytest.mark.parametrize(("replicas", "nonfinite"), [(1, "raise"), (3, "skip")])
def test_calls_in_forward_are_refused(replicas: int, nonfinite: str) -> None:
    refused = r"calls other workers in its forward.*outside of the wrapper.*\.module"
    module, bare = Caller(), Caller()
    model = wrap(module, replicas, nonfinite=nonfinite)
    bare(words(0)).pow(2).mean().backward()
    with context() as context_id:
        with pytest.raises(RuntimeError, match=refused):
            model(words(0), calls="all")
        # The wrapper goes on, in the same context, too.
        backward(context_id, [model(words(0)).pow(2).mean()])
        expect(in_context(context_id, module), grads(bare), "the module")
    with context() as context_id:
        # A part that needs no gradient of another worker is right.
        backward(context_id, [model(words(0), calls="detached").pow(2).mean()])
        expect(in_context(context_id, module), grads(bare), "the module")
        assert not rpc_sync(SERVER, get_gradients, (context_id,))
        Net.factor = rpc_sync(SERVER, look_up, (words(1),)).mean()
        if replicas > 1:
            with pytest.raises(RuntimeError, match="results of such calls that are not among its"):
                model(words(0))
    Net.factor = 1.0
    model.close()


@pytest.mark.on_worker0
def test_one_replica_in_one_process_is_the_bare_module() -> None:
    module, table, bare = Caller(), fresh_table(), Net()
    model = wrap(module, 1)
    bare(table[words(0)]).pow(2).mean().backward()
    with context() as context_id:
        backward(context_id, [model(words(0), calls="all").pow(2).mean()])
        expect(in_context(context_id, module), grads(bare), "the module")
        expect([rpc_sync(SERVER, table_gradient, (context_id,))], [table.grad], "the table")
    model.close()


@pytest.mark.on_worker0
def test_an_optimizer_in_backward_is_refused() -> None:
    net = Net()
    apply_torchs(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    model = wrap(net, 2)
    before = [p.detach().clone() for p in net.parameters()]
    with context() as context_id:
        with pytest.raises(RuntimeError, match="distributed autograd "):
            backward(context_id, [model(vectors(0)).sum()])
        assert in_context(context_id, net) == NO_GRADS
    assert all(map(torch.equal, before, net.parameters()))
    model(vectors(0)).sum().backward()
    assert not any(map(torch.equal, before[:2], net.parameters()))
    model.close()


@pytest.mark.on_worker0
def test_gradients_that_are_not_finite_leave_nothing() -> None:
    model = wrap(nn.Linear(3, 1), 2, nonfinite="skip")
    with context() as context_id:
        with model.no_sync():
            spoiled = model(torch.full((2, 3), float("nan"))).sum()
        backward(context_id, [spoiled])
        backward(context_id, [model(torch.ones(2, 3)).sum()])
        found = get_gradients(context_id)
        assert all(bool(grad.isfinite().all()) for grad in found.values())
    assert model.num_skipped == 1
    model.close()
