"""Criteria at the boundary: the user's own, clones of modules, and what is refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataparallel.parallel.loss import Loss, Part, Weight, arguments

CPU = torch.device("cpu")
CLASSES = 5
CLASS_WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)


def logits(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def labels(*shape: int) -> Tensor:
    return torch.randint(0, CLASSES, shape)


def combined(
    criterion: Callable[..., Any],
    output: Tensor,
    args: tuple[Tensor, ...],
    sizes: list[int],
    weight: Weight | None = None,
) -> Tensor:
    prepared = Loss(criterion, weight)
    chunks = [torch.split(value, sizes) for value in (output, *args)]
    parts = [
        prepared.local(prepared.criterion, chunk[0], chunk[1:], {}, size)
        for size, chunk in zip(sizes, zip(*chunks, strict=True), strict=True)
    ]
    return prepared.combine(parts, CPU)


def test_the_users_criterion_is_not_changed() -> None:
    criterion = nn.CrossEntropyLoss(weight=CLASS_WEIGHT)
    before = copy.deepcopy(vars(criterion))
    combined(criterion, logits(4, CLASSES), (labels(4),), [2, 2])
    after = vars(criterion)
    assert criterion.reduction == "mean"
    assert before.keys() == after.keys()
    assert criterion.weight is CLASS_WEIGHT


def test_a_clone_of_the_criterion_computes_the_part() -> None:
    clone = nn.CrossEntropyLoss(weight=CLASS_WEIGHT * 2)
    prepared = Loss(nn.CrossEntropyLoss(weight=CLASS_WEIGHT))
    assert isinstance(prepared.module, nn.CrossEntropyLoss)
    assert Loss(F.mse_loss).module is None
    output, target = logits(4, CLASSES), torch.tensor([0, 1, 3, 4])
    part = prepared.local(clone, output, (target,), {}, 4)
    assert part.denominator == 2 * CLASS_WEIGHT[target].sum()
    torch.testing.assert_close(part.numerator, clone(output, target) * part.denominator)


def test_keyword_tensors_of_a_function_follow_the_chunk_to_its_device() -> None:
    function = functools.partial(F.cross_entropy, weight=CLASS_WEIGHT)
    device = torch.device("virtual:1")
    output, target = logits(4, CLASSES), labels(4)
    part = Loss(function).local(function, output.to(device), (target.to(device),), {}, 4)
    assert part.numerator.device == device
    assert isinstance(part.denominator, Tensor)
    assert part.denominator.device == device
    loss = Loss(function).combine([part], CPU)
    torch.testing.assert_close(loss, function(output, target))


# --- criteria of the user's own --------------------------------------------------------------


def masked_mean(output: Tensor, target: Tensor) -> Tensor:
    kept = target >= 0
    return (output.square().sum(-1) * kept).sum() / kept.sum()


def kept(output: Tensor, target: Tensor) -> Tensor:
    return (target >= 0).sum()


def test_an_unknown_mean_is_weighted_by_samples() -> None:
    def mean_of_squares(output: Tensor) -> Tensor:
        return output.square().mean()

    output = logits(7, 3)
    loss = combined(mean_of_squares, output, (), [4, 0, 3], "samples")
    torch.testing.assert_close(loss, mean_of_squares(output))


def test_an_unknown_mean_is_weighted_by_the_callers_denominator() -> None:
    target = torch.tensor([-1, -1, 2, 3, -1, 0])
    output = logits(6, 3)
    loss = combined(masked_mean, output, (target,), [2, 3, 1], kept)
    expected = masked_mean(output, target)
    torch.testing.assert_close(loss, expected)
    (found,) = torch.autograd.grad(loss, output)
    (right,) = torch.autograd.grad(expected, output)
    torch.testing.assert_close(found, right)


def test_a_chunk_that_is_left_out_does_not_widen_the_loss() -> None:
    output = torch.randn(4, 3, dtype=torch.bfloat16)
    target = torch.tensor([-1, -1, 1, 2])
    loss = combined(masked_mean, output, (target,), [2, 2], kept)
    assert loss.dtype == torch.bfloat16
    torch.testing.assert_close(loss, masked_mean(output, target))


def test_unreduced_losses_are_concatenated_along_the_batch() -> None:
    output, target = logits(2, 3, 7), logits(2, 3, 7)
    criterion = nn.MSELoss(reduction="none")
    for dim in (2, -1):
        prepared = Loss(criterion, dim=dim)
        parts = [
            prepared.local(prepared.criterion, y, (t,), {}, y.size(-1))
            for y, t in zip(output.tensor_split([4], -1), target.tensor_split([4], -1), strict=True)
        ]
        torch.testing.assert_close(prepared.combine(parts, CPU), criterion(output, target))


def test_a_batch_that_weighs_nothing_has_no_loss() -> None:
    target = torch.full((4,), -1)
    with pytest.raises(ValueError, match="weight= is zero for every chunk"):
        combined(masked_mean, logits(4, 3), (target,), [2, 2], kept)


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (None, ValueError, "what masked_mean divides its loss by is not known"),
        (3, ValueError, "cannot be weighted with weight=3; pass weight="),
        (lambda output, target: -1, ValueError, "finite and not negative, but that of .* is -1.0"),
        (
            lambda output, target: float("nan"),
            ValueError,
            "finite and not negative, but that of .* is nan",
        ),
        (
            lambda output, target: target,
            TypeError,
            "a weight is a number, but that of weight= is not: .*element",
        ),
    ],
)
def test_weights_that_make_no_sense(weight: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        combined(masked_mean, logits(4, 3), (torch.arange(4),), [2, 2], weight)


# --- what is refused -------------------------------------------------------------------------


def first_part(criterion: Callable[..., Any], *args: Any, **kwargs: Any) -> Part:
    prepared = Loss(criterion)
    return prepared.local(prepared.criterion, args[0], args[1:], kwargs, 2)


@pytest.mark.parametrize(
    ("criterion", "args", "kwargs", "error", "message"),
    [
        (nn.MSELoss(), (logits(2, 1), logits(2)), {}, ValueError, r"shape \(2, 1\) with every"),
        (nn.MSELoss(), (logits(1)[0], logits(2)), {}, ValueError, r"shape \(\) with every target"),
        (nn.MSELoss(), (logits(1)[0], logits(1)[0]), {}, ValueError, "it needs a batch dimension"),
        (
            nn.TripletMarginLoss(),
            (logits(3),) * 3,
            {},
            ValueError,
            r"has shape \(3,\): it needs a b",
        ),
        (nn.CosineEmbeddingLoss(), (logits(2),) * 2 + (logits(1)[0],), {}, ValueError, "it needs"),
        (nn.MultiLabelMarginLoss(), (logits(2), torch.tensor([0, 1])), {}, ValueError, "it needs"),
        (nn.MultiLabelSoftMarginLoss(), (logits(2), logits(2)), {}, ValueError, "it needs a batch"),
        (nn.CrossEntropyLoss(reduction="sum"), (logits(2), logits(2)), {}, ValueError, "it needs"),
        (nn.NLLLoss(), (logits(2), labels(2)), {}, ValueError, "For 1D input, 1D target must"),
        (
            nn.BCELoss(weight=torch.ones(4, 1)),
            (torch.rand(2, 3), torch.rand(2, 3)),
            {},
            RuntimeError,
            "broadcast a dimension of length 4",
        ),
        (F.mse_loss, (logits(2), logits(2)), {"reduction": "sum"}, TypeError, "multiple values"),
        (
            nn.MSELoss(),
            (logits(2), logits(2)),
            {"reduction": "sum"},
            TypeError,
            "unexpected keyword",
        ),
        (F.mse_loss, (logits(2), logits(2), False), {}, ValueError, "reduce= are not supported"),
        (
            F.mse_loss,
            (logits(2), logits(2)),
            {"reduce": False},
            ValueError,
            "use functools.partial",
        ),
        (
            functools.partial(F.mse_loss, size_average=False),
            (logits(2), logits(2)),
            {},
            ValueError,
            "and size_average= and reduce= are not supported",
        ),
        (
            nn.BCEWithLogitsLoss(weight=torch.ones(4, 1), reduction="sum"),
            (torch.rand(1, 3), torch.rand(1, 3)),
            {},
            RuntimeError,
            "doesn't match the broadcast shape",
        ),
        (nn.MSELoss(), (logits(2),), {}, TypeError, "missing a required argument: 'target'"),
        (nn.MSELoss(), ({"logits": 1}, 2), {}, TypeError, "but the module returned dict"),
    ],
)
@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
def test_shapes_and_types_that_cannot_be_divided(
    criterion: Any, args: Any, kwargs: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        first_part(criterion, *args, **kwargs)


def test_criteria_that_cannot_be_prepared() -> None:
    with pytest.raises(ValueError, match="what str divides its loss by is not known"):
        Loss("mse")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="MSELoss knows its denominator itself"):
        Loss(nn.MSELoss(), weight="samples")
    with pytest.raises(ValueError, match=r"one of .*, but is 'avg'"):
        Loss(nn.MSELoss(reduction="avg"))
    with pytest.raises(ValueError, match="is not known"):
        Loss(functools.partial(F.mse_loss, logits(2)))
    with pytest.raises(TypeError, match=r"must return a 0-d tensor, but returned shape \(2,\)"):
        combined(lambda output: output, logits(2), (), [2], "samples")


def test_what_is_unpacked_and_what_is_one_argument() -> None:
    x = torch.ones(1)
    assert arguments(x) == ((x,), {})
    assert arguments((x, 2)) == ((x, 2), {})
    assert arguments({"target": x}) == ((), {"target": x})
    assert arguments([x, x]) == (([x, x],), {})
    named = torch.return_types.max((x, x))
    assert arguments(named) == ((named,), {})
