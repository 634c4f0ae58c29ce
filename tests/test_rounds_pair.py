"""Ranks that leave out a step: the others drop it, too, and no gradient mixes two steps."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dataparallel as dp
from dataparallel.comm.errors import CollectiveError
from tests.cluster import Cluster
from tests.ddp_cases import FailInBackward, Net, batch, grads, two_layers, wrap
from tests.models import assert_all_close
from tests.process_groups import keep_group

STEPS = 7
#: The ranks that leave out each step.
ONE = {2: [1]}
LAST = {6: [1]}
FIRST = {0: [0]}
TWICE = {2: [1], 3: [1]}
MANY = {1: [0], 3: [1], 4: [1, 0], 5: [0]}
TEXT = r"(?s)rank {} .* left out the backward of a step.*rank 0: \d.*telling_failures.*no_sync"


def skip_in_loss(y: Tensor, fails: bool) -> Tensor:
    if fails:
        raise ArithmeticError("on purpose")
    return y.pow(2).sum()


def skip_in_backward(y: Tensor, fails: bool) -> Tensor:
    return skip_in_loss(
        FailInBackward.apply(y, ArithmeticError("on purpose") if fails else None), False
    )


SKIPS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "loss": skip_in_loss,
    "backward": skip_in_backward,
}


def data(rank: int, step: int) -> Tensor:
    return batch(seed=10 * step + rank, size=3 + rank)


def mean_of(step: int, world_size: int, average: str = "processes") -> list[Tensor | None]:
    """Return the gradients of a step in all ranks together."""
    bare = Net("cpu", two_layers)
    samples = sum(3.0 + rank for rank in range(world_size))
    for rank in range(world_size):
        share = {"processes": 1 / world_size, "samples": (3 + rank) / samples, "none": 1.0}
        (skip_in_loss(bare(data(rank, step)), False) * share[average]).backward()
    return grads(bare)


def leave_out(
    rank: int,
    world_size: int,
    replicas: int,
    how: str,
    faults: dict[int, list[int]],
    options: dict[str, Any],
    prepare: Callable[[Any], object] | None,
) -> None:
    keep_group()
    net, average = Net("cpu", two_layers), options.get("average", "processes")
    model = wrap(net, replicas, timeout=20.0, bucket_cap_mb=0.0002, **options)
    if prepare is not None:
        prepare(model)
    for step in range(STEPS):
        bad, before = faults.get(step, []), [torch.ones_like(p) for p in net.parameters()]
        for parameter, grad in zip(net.parameters(), before, strict=True):
            # A sum must not have something of the user's in it.
            parameter.grad = grad.clone() if bad and average != "none" else None
        expected: Any = contextlib.nullcontext()
        if rank in bad:
            expected = pytest.raises(ArithmeticError, match="on purpose")
        elif bad:
            expected = pytest.raises(CollectiveError, match=TEXT.format(bad))
        with expected as caught:
            SKIPS[how](model(data(rank, step)), rank in bad).backward()
        if rank not in bad and caught is not None:
            assert caught.value.failure.rank in bad
        right: Any = mean_of(step, world_size, average)
        if bad:
            right = before if average != "none" else [None] * len(before)
        assert_all_close(grads(net), right)
    model.check_replicas()
    model.close()


def hook(model: Any) -> None:
    model.register_comm_hook(None, "allreduce")


@pytest.mark.parametrize(
    ("world_size", "replicas", "faults", "options", "prepare", "how"),
    [
        (2, 1, MANY, {}, None, "loss"),
        (2, 1, MANY, {}, None, "backward"),
        (2, 1, FIRST, {"gradient_as_bucket_view": True}, None, "loss"),
        (2, 2, MANY, {"gradient_as_bucket_view": True}, None, "backward"),
        (2, 1, TWICE, {"average": "samples"}, None, "loss"),
        (3, 1, {1: [0, 2], 2: [1], 4: [2]}, {"average": "samples"}, None, "backward"),
        (3, 1, {1: [1], 2: [1, 0], 3: [2]}, {}, None, "loss"),
        (2, 2, ONE, {"average": "none", "deterministic": True}, None, "backward"),
        (2, 1, MANY, {"nonfinite": "skip"}, None, "loss"),
        (2, 1, ONE, {"nonfinite": "raise", "static_graph": True}, None, "backward"),
        (2, 1, MANY, {}, hook, "backward"),
        (2, 1, TWICE, {}, nn.Module.eval, "loss"),
        # It goes on to compare replicas.
        (2, 1, LAST, {}, None, "backward"),
    ],
)
def test_a_step_that_a_rank_leaves_out(
    cluster: Cluster,
    world_size: int,
    replicas: int,
    faults: dict[int, list[int]],
    options: dict[str, Any],
    prepare: Any,
    how: str,
) -> None:
    cluster.run(leave_out, world_size, replicas, how, faults, options, prepare)


def step_in_backward(rank: int, world_size: int) -> None:
    """Parameters of the process alone are not stepped either."""
    net = Net("cpu", two_layers)
    dp.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["scale"])
    model = wrap(net, 1, bucket_cap_mb=0.0002, timeout=20.0)
    model.step_in_backward(torch.optim.SGD, lr=0.1)
    for step in range(4):
        before = [p.detach().clone() for p in net.parameters()]
        expected: Any = contextlib.nullcontext()
        if step == 2:
            expected = pytest.raises(
                (ArithmeticError, CollectiveError), match=r"on purpose|left out"
            )
        with expected:
            skip_in_loss(model(data(rank, step)), step == 2 and rank == 0).backward()
        same = list(map(torch.equal, net.parameters(), before))
        # The third layer is not used.
        assert same == [step == 2] * 5 + [True] * 2


def test_no_optimizer_in_backward_steps(cluster: Cluster) -> None:
    cluster.run(step_in_backward, 2)


# --- buffers, which are sent before a forward ----------------------------------------------------


def with_buffers(rank: int, world_size: int, bad: int, evaluates: bool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()

    # All have the statistics of rank 0.
    net, bare = make(), make()
    model = wrap(net, 1, timeout=20.0)
    for step in range(6):
        net.zero_grad()
        bare.zero_grad()
        fails = step in (2, 3)
        expected: Any = contextlib.nullcontext()
        if fails:
            kind = ArithmeticError if rank == bad else CollectiveError
            expected = pytest.raises(kind, match=f"on purpose|rank {bad} .* left out the backward")
        with expected:
            skip_in_loss(model(data(rank, step)), fails and rank == bad).backward()
        if evaluates:
            with torch.no_grad():
                model(data(rank, step))
        if not fails:
            for each in range(world_size):
                (bare(data(each, step)).pow(2).sum() / world_size).backward()
            assert_all_close(grads(net), grads(bare))
    model.close()


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_module_with_buffers(cluster: Cluster, bad: int, evaluates: bool) -> None:
    cluster.run(with_buffers, 2, bad, evaluates, timeout=30.0)


# --- programs in which nothing is left out -------------------------------------------------------

#: Runs one step of a rank, with the wrapper or the bare module.
Program = Callable[[Any, int, int], object]


def different_numbers_of_forwards(model: Any, rank: int, step: int) -> None:
    outputs = [model(data(rank, step) * i) for i in range(1, 2 + (rank + step) % 3)]
    torch.stack(outputs).pow(2).sum().backward()


def losses_kept(model: Any, rank: int, step: int) -> None:
    losses = [model(data(rank, step) * i).pow(2).sum() for i in range(3)]
    for loss in losses if step % 2 else reversed(losses):
        loss.backward()


def twice_through_one_forward(model: Any, rank: int, step: int) -> None:
    y = model(data(rank, step))
    y.sum().backward(retain_graph=True)
    y.pow(2).sum().backward(retain_graph=step % 2 == 0)


def evaluation_of_one_rank(model: Any, rank: int, step: int) -> None:
    if rank == 0:
        model.eval()(data(rank, step))
        model.train()
    with torch.no_grad():
        for _ in range(rank):
            model(data(rank, step))
    model(data(rank, step)).pow(2).sum().backward()
    if rank == 1:
        model.eval()(data(rank, step))
        model.train()


def a_step_left_out_by_all(model: Any, rank: int, step: int) -> None:
    for _ in range(2):
        model(data(rank, step))
    with contextlib.suppress(ArithmeticError):
        skip_in_loss(model(data(rank, step)), True)
    different_numbers_of_forwards(model, rank, step)


def gradients_of_inputs(model: Any, rank: int, step: int) -> None:
    """As of an attack that goes on until it succeeds."""
    x = data(rank, step).requires_grad_()
    for _ in range(1 + (rank + step) % 2):
        (grad,) = torch.autograd.grad(model(x).sum(), x)
        x = (x + grad.sign()).detach().requires_grad_()
    model(x.detach()).pow(2).sum().backward()


def an_old_output_of_one_rank(model: Any, rank: int, step: int) -> None:
    """All have left its step out when one rank makes use of it."""
    x = data(rank, step).requires_grad_()
    old = model(x).sum()
    model(data(rank, step)).pow(2).sum().backward()
    if rank == 0:
        torch.autograd.grad(old, x)


def in_a_thread(model: Any, rank: int, step: int) -> None:
    if rank == 0:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(model, data(rank, step)).result()
    model(data(rank, step)).pow(2).sum().backward()


def accumulation(model: Any, rank: int, step: int) -> None:
    """A failure within no_sync() is this rank's own: its gradient lacks that part."""
    with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
        for part in range(3):
            fails = (part, rank) == (1, step % 2)
            with pytest.raises(ArithmeticError) if fails else contextlib.nullcontext():
                skip_in_backward(model(data(rank, step) * part), fails).backward()
    model(data(rank, step)).pow(2).sum().backward()


PROGRAMS: list[Program] = [
    different_numbers_of_forwards,
    losses_kept,
    twice_through_one_forward,
    evaluation_of_one_rank,
    a_step_left_out_by_all,
    gradients_of_inputs,
    an_old_output_of_one_rank,
    in_a_thread,
    accumulation,
]


@contextlib.contextmanager
def nothing_logged() -> Iterator[None]:
    records: list[logging.LogRecord] = []
    handler: Any = logging.Handler()
    handler.emit = records.append
    log = logging.getLogger("dataparallel")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
    assert not [r.getMessage() for r in records if r.levelno >= logging.WARNING]


def run_program(rank: int, world_size: int, number: int, replicas: int) -> None:
    net = Net("cpu", two_layers)
    model, program = wrap(net, replicas, timeout=20.0), PROGRAMS[number]
    with nothing_logged():
        for step in range(5):
            net.zero_grad()
            program(model, rank, step)
            means: list[Any] = [0.0] * 7
            for each in range(world_size):
                bare = Net("cpu", two_layers)
                program(bare, each, step)
                means = [
                    mean if grad is None else mean + grad / world_size
                    for mean, grad in zip(means, grads(bare), strict=True)
                ]
            for found, mean in zip(grads(net), means, strict=True):
                torch.testing.assert_close(found, mean) if found is not None else None
        model.check_replicas()


@pytest.mark.parametrize("number", range(len(PROGRAMS)), ids=lambda n: PROGRAMS[n].__name__)
def test_programs_that_leave_out_nothing(cluster: Cluster, number: int) -> None:
    cluster.run(run_program, 2, number, 1 + number % 2)


def critics(rank: int, world_size: int) -> None:
    """Several wrappers, of which one trains the other, and has several forwards in a step."""
    torch.manual_seed(0)
    nets = [nn.Linear(6, 6).double(), nn.Linear(6, 1).double()]
    generator, critic = (wrap(net, 1, timeout=20.0) for net in nets)
    bad = []
    for step in range(7):
        for net in nets:
            net.zero_grad()
        x = data(rank, step).requires_grad_()
        try:
            fake = generator(x)
            (critic(x).sum() - critic(fake.detach()).sum()).backward()
            torch.autograd.grad(critic(x).sum(), x, create_graph=step % 2 == 0)
            critic.zero_grad()
            skip_in_backward(critic(generator(x)), (rank, step) == (0, 2)).backward()
        except ArithmeticError:
            bad.append((step, "own"))
        except CollectiveError as error:
            found = re.search("left out the backward|has left it out", str(error))
            bad.append((step, found[0] if found else str(error)))
        else:
            seen = [torch.zeros(7), torch.zeros(7)]
            dist.all_gather(seen, torch.eye(7)[step])
            assert torch.equal(*seen)
    expected = "own" if rank == 0 else "left out the backward"
    # The generator's gradients were under way on rank 1.
    assert bad == [(2, expected), (3, "has left it out")]
    for model in (generator, critic):
        model.check_replicas()


def skipped_by(rank: int) -> Any:
    return pytest.raises(CollectiveError, match=TEXT.format(rank))


def around_the_wrapper(rank: int, world_size: int) -> None:
    """In checkpoints, whose backward runs the forward again; and a second backward that fails."""
    net = Net("cpu", two_layers)
    model = wrap(net, 1, timeout=20.0)
    for step in range(6):
        net.zero_grad()
        x = data(rank, step).requires_grad_()
        y = checkpoint(model, x, use_reentrant=False)
        fails = step in (2, 3) and rank == 1
        expected: Any = contextlib.nullcontext()
        if step in (2, 3):
            expected = pytest.raises(ArithmeticError) if rank == 1 else skipped_by(1)
        with expected:
            skip_in_backward(y, fails).backward()
        if step not in (2, 3):
            assert_all_close(grads(net), mean_of(step, world_size))


def the_second_backward(rank: int, world_size: int) -> None:
    """Fails before it comes to the wrapper, where the first one came."""
    net = Net("cpu", two_layers)
    model = wrap(net, 1, timeout=20.0)
    for step in range(4):
        net.zero_grad()
        y = model(data(rank, step))
        y.sum().backward(retain_graph=True)
        net.zero_grad()
        expected: Any = contextlib.nullcontext()
        if step == 1:
            expected = pytest.raises(ArithmeticError) if rank == 0 else skipped_by(0)
        with expected:
            skip_in_backward(y, step == 1 and rank == 0).backward()
        if step != 1:
            assert_all_close(grads(net), mean_of(step, world_size))


def in_training_mode(rank: int, world_size: int) -> None:
    """A forward of one rank that nobody can tell from a step."""
    net = Net("cpu", two_layers)
    model = wrap(net, 1, timeout=20.0)
    for step in range(4 + rank):
        net.zero_grad()
        if (rank, step) == (0, 2):
            model(data(rank, 7))
        with skipped_by(0) if (rank, step) == (1, 2) else contextlib.nullcontext():
            skip_in_loss(model(data(rank, step)), False).backward()
        assert (net.scale.grad is None) == ((rank, step) == (1, 2))
    model.check_replicas()


def joined(rank: int, world_size: int) -> None:
    """Ranks with more batches than others; and steps behind the block."""
    net = Net("cpu", two_layers)
    model = wrap(net, 1, timeout=20.0)
    with model.join():
        for step in range(2 + 2 * rank):
            net.zero_grad()
            skip_in_loss(model(data(rank, step)), False).backward()
    for step in range(2):
        net.zero_grad()
        skip_in_loss(model(data(rank, step)), False).backward()
        assert_all_close(grads(net), mean_of(step, world_size))


def told(rank: int, world_size: int) -> None:
    """An error that leaves a block of telling failures is no failure of another rank's step."""
    net = Net("cpu", two_layers)
    model = wrap(net, 1, timeout=20.0)
    for step in range(5):
        net.zero_grad()
        expected = skipped_by(1) if (rank, step) == (0, 2) else contextlib.nullcontext()
        with expected, dp.telling_failures():
            loss = skip_in_loss(model(data(rank, step)), False)
            if (rank, step) == (1, 2):
                # As where the loss of one rank is not finite.
                continue
            loss.backward()
        if step != 2:
            assert_all_close(grads(net), mean_of(step, world_size))


@pytest.mark.parametrize(
    "what", [critics, around_the_wrapper, the_second_backward, in_training_mode, joined, told]
)
def test_steps_of_other_kinds(cluster: Cluster, what: Any) -> None:
    cluster.run(what, 2, timeout=30.0)


# --- where the host waits for nothing ------------------------------------------------------------


def on_accelerators(rank: int, world_size: int, voting: bool) -> None:
    """If all wait for the vote, as with a hook, they learn of it before they use a gradient."""
    net = Net(f"virtual:{rank}", two_layers)
    model = dp.DistributedDataParallel(net, [f"virtual:{rank}"], timeout=20.0)
    if voting:
        model.register_comm_hook(None, "allreduce")
    for step in range(7):
        net.zero_grad()
        fails = (rank, step) == (1, 3)
        expected: Any = contextlib.nullcontext()
        if fails:
            expected = pytest.raises(ArithmeticError)
        elif (rank, step) == (0, 3 if voting else 4):
            expected = skipped_by(1)
        with expected:
            x = data(rank, step).to(f"virtual:{rank}")
            skip_in_backward(model(x), fails).backward()
        if step != 3 and (voting or step != 4):
            assert_all_close(grads(net), mean_of(step, world_size))
    model.check_replicas()


@pytest.mark.parametrize("voting", [False, True])
def test_accelerators(cluster: Cluster, voting: bool) -> None:
    cluster.run(on_accelerators, 2, voting, virtual=True, backend="vccl")
