"""The weights in a mean of the chunks of a batch, and of the batches of processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dataparallel as dp
from tests.cluster import Cluster
from tests.models import WRAPPERS, assert_all_close, grads_of, twins


class Labeled(nn.Module):
    """Makes its loss itself: the mean over the labels that are not -100."""

    def __init__(self, masks: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.masks = masks

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x)
        if self.masks:
            # Unlike torch's loss, this one has NaN for its gradient if no label counts.
            losses = F.cross_entropy(logits.transpose(1, 2), labels.clamp(0), reduction="none")
            counts = labels != -100
            return {"loss": (losses * counts).sum() / counts.sum()}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def num_labels(x: Tensor, labels: Tensor) -> Tensor:
    return (labels != -100).sum()


def labeled_batch(rank: int, lengths: list[int], device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return a sequence of 6 for each of ``lengths``, of which so many labels count."""
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(len(lengths), 6, 4, dtype=torch.double, generator=random)
    labels = torch.randint(0, 3, (len(lengths), 6), generator=random)
    for row, length in zip(labels, lengths, strict=True):
        row[length:] = -100
    return x.to(device), labels.to(device)


# --- chunks --------------------------------------------------------------------------------------


@pytest.mark.in_pairs
@pytest.mark.parametrize("masks", [False, True], ids=["ignore_index", "mask"])
@pytest.mark.parametrize("lengths", [[6, 5, 4, 0, 0, 0, 0], [3], [0, 0, 2, 6]])
@WRAPPERS
def test_a_function_weighs_chunks(
    slots: list[str], wrapper: Any, lengths: list[int], masks: bool
) -> None:
    bare, net = twins(lambda: Labeled(masks), slots[0])
    model = wrapper(net, slots[:3], scalars=num_labels)
    x, labels = labeled_batch(0, lengths, slots[0])
    outputs, expected = model(x, labels=labels), bare(x, labels)
    for found in (outputs, expected):
        found["loss"].backward()
    assert_all_close(outputs.values(), expected.values())
    assert_all_close(grads_of(model), grads_of(bare))
    none = labeled_batch(0, [0, 0], slots[0])
    assert model(*none)["loss"].isnan(), "as with the bare module, where no label counts"


class Divides(nn.Module):
    """Divides its loss by a number that it is given, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, num_items_in_batch: Any = None) -> Tensor:
        y = self.weight * x
        return y.mean() if num_items_in_batch is None else y.sum() / num_items_in_batch


@WRAPPERS
def test_a_loss_is_not_divided_twice(wrapper: Any) -> None:
    x = torch.arange(8.0)
    for divides in ("mean", lambda x, **others: len(x)):
        model = wrapper(Divides(), ["cpu", "cpu"], scalars=divides)
        with pytest.raises(
            ValueError, match=r"given num_items_in_batch.* not known here.* scalars='sum'"
        ):
            model(x, num_items_in_batch=8)
        torch.testing.assert_close(model(x), x.mean())
    for scalars in ("sum", lambda x, num_items_in_batch: None):
        model = wrapper(Divides(), ["cpu", "cpu"], scalars=scalars)
        model(x, num_items_in_batch=8).backward()
        torch.testing.assert_close(model.module.weight.grad, x.mean())


@pytest.mark.parametrize(
    ("scalars", "error", "match"),
    [
        (lambda x: x, TypeError, r"a weight is a number, but that of .*scalars= is not: .*element"),
        (lambda x: float("nan"), ValueError, "finite and not negative, but that of .* is nan"),
        (lambda x: None if x[0, 0] else 1, TypeError, "that of .*scalars= is not: .*NoneType"),
    ],
)
def test_weights_that_are_none(scalars: Any, error: type[Exception], match: str) -> None:
    x = torch.tensor([[0.0], [0.0], [1.0], [0.0]])
    model = dp.DistributedDataParallel(Divides(), ["cpu", "cpu"], scalars=scalars)
    with pytest.raises(error, match=match):
        model(x)
    model.scalars = "stack"
    model(x).sum().backward()
    assert model.module.weight.grad is not None


def test_a_gather_that_somebody_calls_is_not_told_of_weights() -> None:
    cases: tuple[tuple[Any, Any], ...] = ((len, [1, 2]), ("mean", [1, 2]), ("sum", 3))
    for scalars, expected in cases:
        model = dp.DataParallel(nn.Linear(1, 1), ["cpu"] * 2, scalars=scalars)
        assert model.gather([torch.tensor(1), torch.tensor(2)], "cpu").tolist() == expected


# --- processes -----------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0, dtype=torch.double))

    def forward(self, mask: Tensor, x: Tensor) -> Tensor:
        return x * self.weight * mask.mean()


def _counted(rank: int, world_size: int) -> None:
    batches = [torch.full((3, 2), 4.0).double(), torch.full((1, 2), 8.0).double()]
    # The mean over all samples of all processes.
    expected = torch.cat(batches).mean()
    mask, x = torch.ones(9), batches[rank]
    ways: list[tuple[dict[Any, Any], Callable[[Any], Tensor]]] = [
        ({"mask": None}, lambda model: model(mask, x).mean()),
        ({0: None, 1: 1}, lambda model: model(mask, x.t()).mean()),
        ({0: None}, lambda model: model.loss(nn.L1Loss(), (mask, x), torch.zeros_like(x))),
    ]
    for replicas in (1, 2):
        for in_dims, mean in ways:
            model = dp.DistributedDataParallel(
                Scaled(),
                ["cpu"] * replicas,
                average="samples",
                in_dims=in_dims,
                out_dims=in_dims.get(1),
                timeout=20.0,
            )
            mean(model).backward()
            grad = model.module.weight.grad
            torch.testing.assert_close(grad, expected, msg=f"{grad} for {in_dims}, {replicas}")
            model.close()


def _uncountable(rank: int, world_size: int) -> None:
    model = dp.DistributedDataParallel(Scaled(), ["cpu"], average="samples", timeout=20.0)
    mask, x = torch.ones(9), torch.full((3 - 2 * rank, 2), 4.0)
    with pytest.raises(ValueError, match=r"cannot be counted: .*batch size.*call set_weight"):
        model(mask, x)
    # A weight is for the next forward that is reduced.
    model.set_weight(3 - 2 * rank)
    with torch.no_grad():
        model(mask, x)
    model(mask, x * (1 + rank)).mean().backward()
    torch.testing.assert_close(model.module.weight.grad, torch.tensor(5.0).double())

    # And of the thread that has given it.
    model.module.weight.grad = None
    model.set_weight(3 - 2 * rank)
    if rank == 0:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(model, mask[:1], x[:1]).result()
    model(mask, x[:1] * (1 + rank)).mean().backward()
    torch.testing.assert_close(model.module.weight.grad, torch.tensor(5.0).double())

    twice = dp.DistributedDataParallel(
        Divides(), ["cpu"], average="samples", timeout=20.0, scalars=lambda x: None
    )
    with pytest.raises(ValueError, match=r"returned None, so that losses add up.*set_weight"):
        twice(torch.ones(3))
    with pytest.raises(ValueError, match=r"there is no tensor to split in the inputs \(float\)"):
        dp.DistributedDataParallel(Divides(), ["cpu"], average="samples")(1.0)


#: The number of labels in each sequence of each process; the last has none anywhere.
LENGTHS = ([[6, 1, 1], [2, 0]], [[5, 6, 1], [0, 0]], [[0], [0, 6, 1]])


def _labels(rank: int, world_size: int) -> None:
    for masks in (False, True):
        for replicas in (1, 2):
            bare, net = twins(functools.partial(Labeled, masks), "cpu")
            model = dp.DistributedDataParallel(
                net, ["cpu"] * replicas, average="samples", scalars=num_labels, timeout=20.0
            )
            for lengths in LENGTHS:
                batches = [labeled_batch(k, lengths[k]) for k in range(world_size)]
                bare(*map(torch.cat, zip(*batches, strict=True)))["loss"].backward()
                own = model(*batches[rank])["loss"]
                own.backward()
                assert_all_close(grads_of(net), grads_of(bare))
                # The returned loss of a process is about its own batch.
                torch.testing.assert_close(own, bare(*batches[rank])["loss"], equal_nan=True)
            model.close()


@pytest.mark.parametrize("what", [_counted, _uncountable, _labels])
def test_samples_of_processes(cluster: Cluster, what: Any) -> None:
    cluster.run(what, 2)
