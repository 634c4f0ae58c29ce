"""Losses of chunks, combined, against the criterion of torch on the whole batch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dataparallel.parallel.loss import Loss

CPU = torch.device("cpu")
CLASSES = 5


@dataclass
class Batch:
    """The output of a model and what the criterion takes beside it; dimension 0 is the batch."""

    output: Tensor
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def chunks(batch: Batch, sizes: list[int], axis: int = 0) -> Iterator[Batch]:
    start = 0
    for size in sizes:
        part = functools.partial(_narrow, start=start, size=size)
        yield Batch(
            batch.output.narrow(axis, start, size),
            tuple(part(value) for value in batch.args),
            {key: part(value) for key, value in batch.kwargs.items()},
        )
        start += size


def _narrow(value: Any, start: int, size: int) -> Any:
    return value.narrow(0, start, size) if isinstance(value, Tensor) and value.dim() else value


def combined(
    criterion: Callable[..., Any],
    batch: Batch,
    sizes: list[int],
    axis: int = 0,
) -> Tensor:
    prepared = Loss(criterion)
    parts = [
        prepared.local(criterion, part.output, part.args, part.kwargs, size)
        for size, part in zip(sizes, chunks(batch, sizes, axis), strict=True)
    ]
    return prepared.combine(parts, CPU)


def assert_same(
    criterion: Callable[..., Any], batch: Batch, sizes: list[int], axis: int = 0
) -> None:
    """Value and gradients of the combined loss are those of the criterion on the whole batch."""
    leaves = [
        value
        for value in (batch.output, *batch.args, *batch.kwargs.values())
        if isinstance(value, Tensor) and value.requires_grad
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = criterion(batch.output, *batch.args, **batch.kwargs)
    found = combined(criterion, batch, sizes, axis=axis)
    assert found.dtype == expected.dtype
    undefined = bool(expected.isnan().any())  # 0/0: nothing in the batch has weight
    if undefined:
        assert not found.isfinite().all()
    else:
        torch.testing.assert_close(found, expected)
    seed = torch.rand_like(expected)
    wanted = torch.autograd.grad(expected, leaves, seed)
    for grad, right in zip(torch.autograd.grad(found, leaves, seed), wanted, strict=True):
        if not (undefined and right.isnan().any()):
            torch.testing.assert_close(grad, right)


# --- a batch for each criterion --------------------------------------------------------------


def logits(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def unit(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64).mul(0.9).add(0.05)


def signs(*shape: int) -> Tensor:
    return torch.randint(0, 2, shape).double() * 2 - 1


def labels(*shape: int, ignored: int | None = None) -> Tensor:
    found = torch.randint(0, CLASSES, shape)
    if ignored is not None:
        found[torch.rand(shape) < 0.4] = ignored
    return found


def sequences(n: int) -> Batch:
    """Time first: the batch is dimension 1 of the output and 0 of everything else."""
    log_probs = logits(12, n, CLASSES).log_softmax(-1).detach().requires_grad_()
    targets = torch.randint(1, CLASSES, (n, 6))
    return Batch(
        log_probs,
        (targets, torch.randint(8, 13, (n,)), torch.randint(0, 5, (n,))),
    )


def many_labels(n: int) -> Tensor:
    rows = [torch.randperm(CLASSES) for _ in range(n)]
    found = torch.stack(rows) if rows else torch.zeros(0, CLASSES, dtype=torch.long)
    found[:, 2] = -1
    return found


def distance(left: Tensor, right: Tensor) -> Tensor:
    return (left - right).abs().amax(-1)


CLASS_WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)

Case = tuple[Callable[..., Callable[..., Any]], Callable[[int], Batch]]

CASES: dict[str, Case] = {
    "cross_entropy": (
        nn.CrossEntropyLoss,
        lambda n: Batch(logits(n, CLASSES), (labels(n, ignored=-100),)),
    ),
    "cross_entropy_weight": (
        functools.partial(
            nn.CrossEntropyLoss, weight=CLASS_WEIGHT, ignore_index=3, label_smoothing=0.2
        ),
        lambda n: Batch(logits(n, CLASSES, 3), (labels(n, 3, ignored=3),)),
    ),
    "cross_entropy_probabilities": (
        functools.partial(nn.CrossEntropyLoss, weight=CLASS_WEIGHT, label_smoothing=0.1),
        lambda n: Batch(logits(n, CLASSES, 2), (unit(n, CLASSES, 2),)),
    ),
    "nll": (
        functools.partial(nn.NLLLoss, weight=CLASS_WEIGHT),
        lambda n: Batch(logits(n, CLASSES, 2, 2), (labels(n, 2, 2, ignored=-100),)),
    ),
    "mse": (nn.MSELoss, lambda n: Batch(logits(n, 3), (logits(n, 3),))),
    "l1": (nn.L1Loss, lambda n: Batch(logits(n), (logits(n),))),
    "smooth_l1": (
        functools.partial(nn.SmoothL1Loss, beta=0.3),
        lambda n: Batch(logits(n, 2), (logits(n, 2),)),
    ),
    "huber": (
        functools.partial(nn.HuberLoss, delta=0.7),
        lambda n: Batch(logits(n, 2, 2), (logits(n, 2, 2),)),
    ),
    "bce": (
        functools.partial(nn.BCELoss, weight=unit(3)),
        lambda n: Batch(unit(n, 3).requires_grad_(), (unit(n, 3),)),
    ),
    "bce_with_logits": (
        functools.partial(nn.BCEWithLogitsLoss, weight=unit(1, 3), pos_weight=unit(3)),
        lambda n: Batch(logits(n, 3), (unit(n, 3),)),
    ),
    "kl_div": (nn.KLDivLoss, lambda n: Batch(logits(n, 3), (unit(n, 3),))),
    "kl_div_log_target": (
        functools.partial(nn.KLDivLoss, log_target=True),
        lambda n: Batch(logits(n, 3), (logits(n, 3),)),
    ),
    "poisson_nll": (
        functools.partial(nn.PoissonNLLLoss, full=True),
        lambda n: Batch(logits(n, 3), (unit(n, 3) * 4,)),
    ),
    "gaussian_nll": (
        functools.partial(nn.GaussianNLLLoss, full=True),
        lambda n: Batch(logits(n, 3), (logits(n, 3), unit(n).requires_grad_())),
    ),
    "gaussian_nll_one_variance": (
        nn.GaussianNLLLoss,
        lambda n: Batch(logits(n, 3), (logits(n, 3), 0.5)),
    ),
    "hinge_embedding": (nn.HingeEmbeddingLoss, lambda n: Batch(logits(n, 2), (signs(n, 2),))),
    "multilabel_margin": (
        nn.MultiLabelMarginLoss,
        lambda n: Batch(logits(n, CLASSES), (many_labels(n),)),
    ),
    "multilabel_soft_margin": (
        functools.partial(nn.MultiLabelSoftMarginLoss, weight=unit(3)),
        lambda n: Batch(logits(n, 2, 3), (unit(n, 2, 3),)),
    ),
    "multi_margin": (
        functools.partial(nn.MultiMarginLoss, p=2, weight=CLASS_WEIGHT),
        lambda n: Batch(logits(n, CLASSES), (labels(n),)),
    ),
    "cosine_embedding": (
        functools.partial(nn.CosineEmbeddingLoss, margin=0.1),
        lambda n: Batch(logits(n, 3), (logits(n, 3), signs(n))),
    ),
    "margin_ranking": (
        functools.partial(nn.MarginRankingLoss, margin=0.1),
        lambda n: Batch(logits(n, 2), (logits(n, 2), signs(n, 2))),
    ),
    "soft_margin": (nn.SoftMarginLoss, lambda n: Batch(logits(n, 2), (signs(n, 2),))),
    "triplet_margin": (
        functools.partial(nn.TripletMarginLoss, swap=True),
        lambda n: Batch(logits(n, 2, 3), (logits(n, 2, 3), logits(n, 2, 3))),
    ),
    "triplet_margin_with_distance": (
        functools.partial(nn.TripletMarginWithDistanceLoss, distance_function=distance),
        lambda n: Batch(logits(n, 3), (logits(n, 3), logits(n, 3))),
    ),
    "ctc": (functools.partial(nn.CTCLoss, zero_infinity=True), sequences),
    # The functions, with the settings that only they have.
    "F.cross_entropy": (
        lambda reduction: functools.partial(
            F.cross_entropy, weight=CLASS_WEIGHT, ignore_index=1, reduction=reduction
        ),
        lambda n: Batch(logits(n, CLASSES), kwargs={"target": labels(n)}),
    ),
    "F.mse_loss(weight)": (
        lambda reduction: functools.partial(F.mse_loss, reduction=reduction),
        lambda n: Batch(
            logits(n, 3), kwargs={"target": logits(n, 3), "weight": unit(n, 3).requires_grad_()}
        ),
    ),
    "F.binary_cross_entropy(weight)": (
        lambda reduction: functools.partial(F.binary_cross_entropy, reduction=reduction),
        lambda n: Batch(unit(n, 3).requires_grad_(), (unit(n, 3), unit(n, 1))),
    ),
}


def sizes_of(total: int, replicas: int) -> list[int]:
    cuts = sorted(int(cut) for cut in torch.randint(0, total + 1, (replicas - 1,)))
    return [end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True)]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=12, deadline=None)
@given(total=st.integers(1, 9), replicas=st.integers(1, 4), draw=st.integers(0, 2**31))
def test_parts_combine_to_the_loss_of_the_batch(
    name: str, reduction: str, total: int, replicas: int, draw: int
) -> None:
    torch.manual_seed(draw)
    make, batch_of = CASES[name]
    sizes = sizes_of(total, replicas)
    if name in ("multilabel_margin", "multi_margin", "ctc"):  # torch refuses an empty batch
        sizes = [size for size in sizes if size]
    axis = 1 if name == "ctc" else 0
    assert_same(make(reduction=reduction), batch_of(total), sizes, axis)


@pytest.mark.parametrize("log_target", [False, True])
def test_batchmean_divides_by_all_samples(log_target: bool) -> None:
    criterion = nn.KLDivLoss(reduction="batchmean", log_target=log_target)
    assert_same(criterion, Batch(logits(7, 2, 3), (unit(7, 2, 3),)), [4, 1, 2])
    with pytest.raises(ValueError, match="the batch is dimension 1"):
        Loss(criterion, dim=1)


def test_every_loss_module_of_torch_is_known_or_refused_by_name() -> None:
    public = {
        module
        for module in vars(nn).values()
        if isinstance(module, type)
        and issubclass(module, nn.modules.loss._Loss)
        and module is not nn.modules.loss._Loss
    }
    tested = {type(make(reduction="mean")) for make, _ in CASES.values()}
    public -= {nn.NLLLoss2d, getattr(nn, "LinearCrossEntropyLoss", None)}
    assert public <= tested
    with pytest.raises(ValueError, match="what AdaptiveLogSoftmaxWithLoss divides"):
        Loss(nn.AdaptiveLogSoftmaxWithLoss(4, 8, [2]))


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="torch is older than it")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear_cross_entropy(reduction: str) -> None:
    criterion = nn.LinearCrossEntropyLoss(
        3, CLASSES, dtype=torch.float64, weight=CLASS_WEIGHT, ignore_index=1, reduction=reduction
    )
    batch = Batch(logits(7, 3), (labels(7),))
    assert_same(criterion, batch, [3, 3, 1])
    weight = criterion.linear.weight
    (expected,) = torch.autograd.grad(criterion(batch.output, *batch.args).sum(), weight)
    (found,) = torch.autograd.grad(combined(criterion, batch, [3, 3, 1]).sum(), weight)
    torch.testing.assert_close(found, expected)


# --- chunks without anything to learn from ---------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, CLASS_WEIGHT])
def test_a_chunk_of_ignored_targets_leaves_no_trace(
    weight: Tensor | None, smoothing: float
) -> None:
    criterion = nn.CrossEntropyLoss(weight=weight, label_smoothing=smoothing)
    target = torch.tensor([-100, -100, -100, 1, 4, 0])
    batch = Batch(logits(6, CLASSES), (target,))
    assert_same(criterion, batch, [3, 2, 1])
    assert combined(criterion, batch, [3, 2, 1]).isfinite()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, CLASS_WEIGHT])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_batch_of_ignored_targets_gives_what_the_criterion_gives(
    reduction: str, weight: Tensor | None, smoothing: float
) -> None:
    criterion = nn.CrossEntropyLoss(weight, reduction=reduction, label_smoothing=smoothing)
    batch = Batch(logits(6, CLASSES), (torch.full((6,), -100),))
    assert_same(criterion, batch, [3, 3])
    (grad,) = torch.autograd.grad(combined(criterion, batch, [3, 3]), batch.output)
    assert not grad.any()


@pytest.mark.parametrize("criterion", [nn.MSELoss(), nn.MSELoss(reduction="sum")])
def test_an_empty_batch_gives_what_the_criterion_gives(criterion: nn.Module) -> None:
    assert_same(criterion, Batch(logits(0, 3), (logits(0, 3),)), [0])


# --- precision -------------------------------------------------------------------------------


def test_the_sum_of_a_half_precision_batch_does_not_overflow() -> None:
    output = torch.full((64, 4096), 3.0, dtype=torch.float16, requires_grad=True)
    batch = Batch(output, (torch.zeros_like(output),))
    found = combined(nn.MSELoss(), batch, [40, 24])
    assert found.dtype == torch.float16
    assert found == 9.0


def test_second_derivatives() -> None:
    def penalty(loss: Tensor, leaf: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        (again,) = torch.autograd.grad(grad.square().sum(), leaf)
        return again

    batch = Batch(logits(7, CLASSES), (labels(7, ignored=-100),))
    criterion = nn.CrossEntropyLoss(weight=CLASS_WEIGHT)
    expected = penalty(criterion(batch.output, *batch.args), batch.output)
    torch.testing.assert_close(penalty(combined(criterion, batch, [4, 3]), batch.output), expected)


# --- which criterion is meant ----------------------------------------------------------------


class Renamed(nn.CrossEntropyLoss):
    """Keeps torch's forward, so its denominator is known."""


class Called(nn.MSELoss):
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args) * 2


class Scaled(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target) * 2


def test_a_subclass_is_known_as_long_as_it_keeps_the_forward() -> None:
    batch = Batch(logits(7, CLASSES), (labels(7, ignored=-100),))
    assert_same(Renamed(), batch, [5, 2])
    for other in (Scaled(), Called()):
        name = type(other).__name__
        with pytest.raises(ValueError, match=f"what {name} divides its loss by is not known"):
            Loss(other)
    patched = nn.MSELoss()
    patched.forward = lambda input, target: input.sum()  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="what MSELoss divides its loss by is not known"):
        Loss(patched)


@pytest.mark.parametrize(
    "flags",
    [
        {"size_average": False},
        {"size_average": True},
        {"reduce": False},
        {"reduce": False, "size_average": False, "reduction": "sum"},
        {"reduce": True, "reduction": "sum"},
    ],
)
def test_a_module_with_deprecated_flags(flags: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = nn.MSELoss(**flags)
    assert_same(module, Batch(logits(5, 2), (logits(5, 2),)), [2, 3])
