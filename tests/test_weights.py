"""What the chunks of a batch, and the batches of processes, count in a mean."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dataparallel as dp
from tests.cluster import Cluster
from tests.models import assert_all_close, grads_of, twins

WRAPPERS: tuple[Any, ...] = (dp.DataParallel, dp.DistributedDataParallel)


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
    """A sequence of 6 for each of ``lengths``, of which so many labels count."""
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(len(lengths), 6, 4, dtype=torch.double, generator=random)
    labels = torch.randint(0, 3, (len(lengths), 6), generator=random)
    for row, length in zip(labels, lengths, strict=True):
        row[length:] = -100
    return x.to(device), labels.to(device)


# --- chunks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("masks", [False, True], ids=["ignore_index", "mask"])
@pytest.mark.parametrize("lengths", [[6, 1, 2, 1, 0], [6, 5, 4, 0, 0, 0, 0], [3], [0, 0, 2, 6]])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_function_weighs_chunks(
    slots: list[str], wrapper: Any, lengths: list[int], masks: bool
) -> None:
    bare, net = twins(lambda: Labeled(masks), slots[0])
    model = wrapper(net, slots[:3], scalars=num_labels)
    x, labels = labeled_batch(0, lengths, slots[0])
    expected = bare(x, labels)
    outputs = model(x, labels=labels)
    expected["loss"].backward()
    outputs["loss"].backward()
    assert_all_close(outputs.values(), expected.values())
    assert_all_close(grads_of(net), grads_of(bare))


def test_where_no_label_counts_the_loss_is_that_of_the_bare_module(slots: list[str]) -> None:
    model = dp.DataParallel(Labeled().double().to(slots[0]), slots, scalars=num_labels)
    assert model(*labeled_batch(0, [0, 0], slots[0]))["loss"].isnan()


def test_a_weight_may_be_a_number_and_none_adds_up() -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor, divisor: float | None = None) -> Tensor:
            return x.mean() if divisor is None else x.sum() / divisor

    def weight(x: Tensor, divisor: float | None = None) -> float | None:
        return None if divisor is not None else float(x.numel())

    x = torch.randn(5, 2, dtype=torch.double)
    model = dp.DataParallel(Sum(), ["cpu", "cpu"], scalars=weight)
    torch.testing.assert_close(model(x), x.mean())
    torch.testing.assert_close(model(x, divisor=7.0), x.sum() / 7)


def test_a_function_is_kept_by_copies() -> None:
    bare, net = twins(Labeled, "cpu")
    batch = labeled_batch(0, [6, 1, 2])
    expected = bare(*batch)["loss"]
    for wrapper in WRAPPERS:
        model = wrapper(net, ["cpu", "cpu"], scalars=num_labels)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            torch.testing.assert_close(other(*batch)["loss"], expected)


class Twice(nn.Module):
    """Divides its loss by a number that it is given, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, num_items_in_batch: Any = None) -> Tensor:
        y = self.weight * x
        return y.mean() if num_items_in_batch is None else y.sum() / num_items_in_batch


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_loss_is_not_divided_twice(wrapper: Any) -> None:
    x = torch.arange(8.0)
    for divides in ("mean", lambda x, **others: len(x)):
        model = wrapper(Twice(), ["cpu", "cpu"], scalars=divides)
        with pytest.raises(ValueError, match=r"given num_items_in_batch.* such losses .* add up"):
            model(x, num_items_in_batch=8)
        torch.testing.assert_close(model(x), x.mean())

    def told(x: Tensor, num_items_in_batch: Any = None) -> int | None:
        return None if num_items_in_batch is not None else len(x)

    for scalars in ("sum", told):
        model = wrapper(Twice(), ["cpu", "cpu"], scalars=scalars)
        model(x, num_items_in_batch=8).backward()
        torch.testing.assert_close(model.module.weight.grad, x.mean())


@pytest.mark.parametrize(
    ("scalars", "error", "match"),
    [
        (lambda x: x, TypeError, r"a weight is a number, but that of .*scalars= is not: .*element"),
        (lambda x: -1, ValueError, "finite and not negative, but that of .* is -1.0"),
        (lambda x: float("nan"), ValueError, "finite and not negative, but that of .* is nan"),
        (
            lambda x: None if x[0, 0] else 1,
            TypeError,
            "a weight is a number, but that of .*scalars= is not: .*NoneType",
        ),
        (lambda: 1, TypeError, "takes 0 positional arguments but 1 was given"),
    ],
)
def test_weights_that_are_none(scalars: Any, error: type[Exception], match: str) -> None:
    x = torch.zeros(4, 3)
    x[2] = 1
    model = dp.DistributedDataParallel(nn.Linear(3, 2), ["cpu", "cpu"], scalars=scalars)
    with pytest.raises(error, match=match):
        model(x)
    model.scalars = "stack"
    model(x).sum().backward()
    assert model.module.weight.grad is not None


def test_options_that_are_none() -> None:
    for wrapper in WRAPPERS:
        with pytest.raises(ValueError, match="or a function that gives a chunk's weight, but got"):
            wrapper(nn.Linear(1, 1), ["cpu", "cpu"], scalars="median")


@pytest.mark.parametrize(("scalars", "expected"), [(len, [1, 2]), ("mean", [1, 2]), ("sum", 3)])
def test_a_gather_that_is_called_is_not_told_of_weights(scalars: Any, expected: Any) -> None:
    model = dp.DataParallel(nn.Linear(1, 1), ["cpu", "cpu"], scalars=scalars)
    assert model.gather([torch.tensor(1), torch.tensor(2)], "cpu").tolist() == expected


# --- processes -----------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0, dtype=torch.double))

    def forward(self, mask: Tensor, x: Tensor, *, other: Tensor | None = None) -> Tensor:
        y = x * self.weight * mask.mean()
        return y if other is None else y.flatten()


#: For each case: ``in_dims``, and the mean of the outputs for a batch.
COUNTED: dict[str, tuple[dict[Any, Any], Callable[[Any, Tensor], Tensor]]] = {
    "mask first": ({0: None}, lambda model, x: model(torch.ones(9), x).mean()),
    "mask by name": ({"mask": None}, lambda model, x: model(torch.ones(9), x).mean()),
    "other dim": (
        {0: None, 1: 1, "other": None},
        lambda model, x: model(torch.ones(9), x.t(), other=torch.ones(5, 5)).mean(),
    ),
    "keywords": (
        {"mask": None, "other": None},
        lambda model, x: model(x=x, mask=torch.ones(9), other=torch.ones(7, 2)).mean(),
    ),
    "loss": (
        {0: None},
        lambda model, x: model.loss(nn.L1Loss(), (torch.ones(9), x), torch.zeros_like(x)),
    ),
}


def _counted(rank: int, world_size: int) -> None:
    batches = [torch.full((3, 2), 4.0), torch.full((1, 2), 8.0)]
    for replicas in (1, 2):
        for name, (in_dims, mean) in COUNTED.items():
            model = dp.DistributedDataParallel(
                Scaled(), ["cpu"] * replicas, average="samples", in_dims=in_dims, timeout=20.0
            )
            mean(model, batches[rank].double()).backward()
            grad = model.module.weight.grad
            # Of the mean over all samples of all processes.
            torch.testing.assert_close(
                grad, torch.cat(batches).double().mean(), msg=f"{grad} for {name}, {replicas}"
            )
            model.close()


def test_samples_are_counted_by_the_plan(cluster: Cluster) -> None:
    cluster.run(_counted, 2)


def _uncountable(rank: int, world_size: int) -> None:
    model = dp.DistributedDataParallel(Scaled(), ["cpu"], average="samples", timeout=20.0)
    mask, x = torch.ones(9), torch.full((3 - 2 * rank, 2), 4.0)
    with pytest.raises(ValueError, match=r"cannot be counted: .*batch size.*call set_weight"):
        model(mask, x)
    with torch.no_grad(), model.no_sync():
        model(mask, x)
    model.set_weight(3 - 2 * rank)
    model(mask, x * (1 + rank)).mean().backward()
    torch.testing.assert_close(model.module.weight.grad, torch.tensor(5.0).double())

    twice = dp.DistributedDataParallel(
        Twice(), ["cpu"], average="samples", timeout=20.0, scalars=lambda x: None
    )
    with pytest.raises(ValueError, match=r"returned None, so that losses add up.*set_weight"):
        twice(torch.ones(3))
    twice.set_weight(1.0)
    twice(torch.ones(3)).backward()
    with pytest.raises(ValueError, match=r"there is no tensor to split in the inputs \(float\)"):
        dp.DistributedDataParallel(Twice(), ["cpu"], average="samples")(1.0)


def test_samples_that_cannot_be_counted(cluster: Cluster) -> None:
    cluster.run(_uncountable, 2)


#: Of how many labels each sequence of each process has, the last has none anywhere.
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
                whole = [torch.cat(parts) for parts in zip(*batches, strict=True)]
                bare(*whole)["loss"].backward()
                own = model(*batches[rank])["loss"]
                own.backward()
                where = f"{replicas} replicas, {lengths}, masks={masks}"
                for mine, expected in zip(grads_of(net), grads_of(bare), strict=True):
                    torch.testing.assert_close(mine, expected, msg=f"gradients with {where}")
                # What a process returns is about its own batch.
                torch.testing.assert_close(
                    own, bare(*batches[rank])["loss"], equal_nan=True, msg=f"loss with {where}"
                )
            model.close()


def test_labels_are_counted_over_processes(cluster: Cluster) -> None:
    cluster.run(_labels, 2)
