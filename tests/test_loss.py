"""``model.loss``: the criterion in the replicas, against the criterion on the whole output."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dataparallel import DataParallel
from tests.models import Calls

CLASSES = 5
CLASS_WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)

Criterion = Callable[..., Any]


def apply(function: Callable[..., Any]) -> Calls:
    return Calls(lambda net, *args, **kwargs: function(*args, **kwargs))


def same(x: Any) -> Any:
    return x


def applied(function: Callable[..., Any], replicas: int) -> DataParallel[Calls]:
    return DataParallel(apply(function), ["cpu"] * replicas)


def assert_same(
    model: DataParallel[Any],
    criterion: Criterion,
    x: Any,
    targets: Any,
    *,
    again: bool = False,
    **options: Any,
) -> None:
    """Value, gradients and perhaps second derivatives are those on the whole output."""
    args, kwargs = (targets, {}) if isinstance(targets, tuple) else ((), targets)
    given = [x, *args, *kwargs.values(), *model.module.parameters()]
    if isinstance(criterion, nn.Module):
        given += criterion.parameters()
    wanted = [value for value in given if isinstance(value, Tensor) and value.requires_grad]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = criterion(model.module(x), *args, **kwargs)
    found = model.loss(criterion, x, targets, **options)
    # 0/0, where nothing in the batch has weight.
    undefined = bool(expected.isnan().any())
    assert not (undefined and found.isfinite().all())
    if not undefined:
        torch.testing.assert_close(found, expected)
    seed = torch.rand_like(expected)
    results = []
    for loss in (expected, found):
        grads = torch.autograd.grad(loss, wanted, seed, create_graph=again)
        results.append(list(grads))
        if again:
            penalty = torch.stack([grad.square().sum().cpu() for grad in grads]).sum()
            # The gradient of a bias may be zero by absence or by value.
            results[-1] += torch.autograd.grad(penalty, wanted, materialize_grads=True)
    for right, grad in zip(*results, strict=True):
        if not (undefined and right.isnan().any()):
            torch.testing.assert_close(grad, right)


# --- torch's own criteria --------------------------------------------------------------------


def logits(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def unit(*shape: int, learns: bool = False) -> Tensor:
    found = torch.rand(*shape, dtype=torch.float64).mul(0.9).add(0.05)
    return found.requires_grad_(learns)


def signs(*shape: int) -> Tensor:
    return torch.randint(0, 2, shape).double() * 2 - 1


def labels(*shape: int, low: int = 0, high: int = CLASSES, ignored: int | None = None) -> Tensor:
    found = torch.randint(low, high, shape)
    if ignored is not None:
        found[torch.rand(shape) < 0.4] = ignored
    return found


def log_probabilities(n: int) -> Tensor:
    return logits(n, 12, CLASSES).log_softmax(-1).detach().requires_grad_()


def many_labels(n: int) -> Tensor:
    found = torch.stack([torch.randperm(CLASSES) for _ in range(n)])
    found[:, 2] = -1
    return found


def distance(left: Tensor, right: Tensor) -> Tensor:
    return (left - right).abs().amax(-1)


def of(make: Callable[..., Tensor], *shape: int, **options: Any) -> Callable[[int], Tensor]:
    """Makes a batch of some samples."""
    return lambda n: make(n, *shape, **options)


weighted: dict[str, Any] = {"weight": CLASS_WEIGHT}
C = CLASSES

#: A criterion, its settings, the output, and the targets.
CASES: dict[str, tuple[Any, ...]] = {
    "cross_entropy": (nn.CrossEntropyLoss, {}, of(logits, C), of(labels, ignored=-100)),
    "cross_entropy_weight": (
        nn.CrossEntropyLoss,
        {**weighted, "ignore_index": 3, "label_smoothing": 0.2},
        of(logits, C, 3),
        of(labels, 3, ignored=3),
    ),
    "cross_entropy_probabilities": (
        nn.CrossEntropyLoss,
        {**weighted, "label_smoothing": 0.1},
        of(logits, C, 2),
        of(unit, C, 2),
    ),
    "nll": (nn.NLLLoss, weighted, of(logits, C, 2, 2), of(labels, 2, 2, ignored=-100)),
    "mse": (nn.MSELoss, {}, of(logits, 3), of(logits, 3)),
    "l1": (nn.L1Loss, {}, of(logits), of(logits)),
    "smooth_l1": (nn.SmoothL1Loss, {"beta": 0.3}, of(logits, 2), of(logits, 2)),
    "huber": (nn.HuberLoss, {"delta": 0.7}, of(logits, 2, 2), of(logits, 2, 2)),
    "bce": (nn.BCELoss, {"weight": unit(3)}, of(unit, 3, learns=True), of(unit, 3)),
    "bce_with_logits": (
        nn.BCEWithLogitsLoss,
        {"weight": unit(1, 3), "pos_weight": unit(3)},
        of(logits, 3),
        of(unit, 3),
    ),
    "kl_div": (nn.KLDivLoss, {"log_target": True}, of(logits, 3), of(logits, 3)),
    "poisson_nll": (nn.PoissonNLLLoss, {"full": True}, of(logits, 3), of(unit, 3)),
    "gaussian_nll": (nn.GaussianNLLLoss, {}, of(logits, 3), of(logits, 3), of(unit, learns=True)),
    "gaussian_nll_one_variance": (nn.GaussianNLLLoss, {}, of(logits, 3), of(logits, 3), 0.5),
    "hinge_embedding": (nn.HingeEmbeddingLoss, {}, of(logits, 2), of(signs, 2)),
    "multilabel_margin": (nn.MultiLabelMarginLoss, {}, of(logits, C), many_labels),
    "multilabel_soft_margin": (nn.MultiLabelSoftMarginLoss, {}, of(logits, 2, 3), of(unit, 2, 3)),
    "multi_margin": (nn.MultiMarginLoss, {**weighted, "p": 2}, of(logits, C), of(labels)),
    "cosine_embedding": (nn.CosineEmbeddingLoss, {}, of(logits, 3), of(logits, 3), of(signs)),
    "margin_ranking": (nn.MarginRankingLoss, {}, of(logits, 2), of(logits, 2), of(signs, 2)),
    "soft_margin": (nn.SoftMarginLoss, {}, of(logits, 2), of(signs, 2)),
    "triplet_margin": (nn.TripletMarginLoss, {"swap": True}, *[of(logits, 2, 3)] * 3),
    "triplet_margin_with_distance": (
        nn.TripletMarginWithDistanceLoss,
        {"distance_function": distance},
        of(logits, 3),
        {"positive": of(logits, 3), "negative": of(logits, 3)},
    ),
    "ctc": (
        nn.CTCLoss,
        {"zero_infinity": True},
        log_probabilities,
        of(labels, 6, low=1),
        of(labels, low=8, high=13),
        of(labels),
    ),
    # The functions, with the settings that only they have.
    "F.mse_loss(weight)": (
        F.mse_loss,
        {},
        of(logits, 3),
        {"target": of(logits, 3), "weight": of(unit, 3, learns=True)},
    ),
}
if hasattr(nn, "LinearCrossEntropyLoss"):
    criterion = functools.partial(nn.LinearCrossEntropyLoss, 3, C, dtype=torch.float64)
    table_options = {**weighted, "ignore_index": 1}
    CASES["linear_cross_entropy"] = (criterion, table_options, of(logits, 3), of(labels))
    CASES["linear_cross_entropy_weight"] = (criterion, weighted, of(logits, 3), of(labels))
    CASES["linear_cross_entropy_all"] = (criterion, {}, of(logits, 3), of(labels))


def made(name: str, reduction: str) -> Criterion:
    criterion, options, *_ = CASES[name]
    result: Criterion = functools.partial(criterion, **options, reduction=reduction)
    return result if name.startswith("F.") else result()


def batch(name: str, samples: int) -> tuple[Tensor, Any]:
    """Return the output and the targets."""
    x, *targets = CASES[name][2:]
    if isinstance(targets[0], dict):
        return x(samples), {key: make(samples) for key, make in targets[0].items()}
    return x(samples), tuple(make(samples) if callable(make) else make for make in targets)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=3, deadline=None)
@given(total=st.integers(1, 9), replicas=st.integers(2, 4), draw=st.integers(0, 2**31))
def test_criteria_of_torch(name: str, reduction: str, total: int, replicas: int, draw: int) -> None:
    torch.manual_seed(draw)
    # Time comes first in what the criterion gets; the batch does in everything else.
    time_first = name == "ctc"
    model = applied((lambda x: x.transpose(0, 1)) if time_first else same, replicas)
    assert_same(model, made(name, reduction), *batch(name, total))


def test_every_loss_module_of_torch_is_known_or_refused_by_name() -> None:
    public = {
        module
        for module in vars(nn).values()
        if isinstance(module, type) and issubclass(module, nn.modules.loss._Loss)
    }
    tested = {type(made(name, "mean")) for name in CASES}
    assert public - {nn.modules.loss._Loss, nn.NLLLoss2d} <= tested
    refused = nn.AdaptiveLogSoftmaxWithLoss(4, 8, [2])
    with pytest.raises(ValueError, match="what AdaptiveLogSoftmaxWithLoss divides"):
        applied(same, 2).loss(refused, torch.ones(2, 4), torch.ones(2).long())


def test_batchmean_divides_by_all_samples() -> None:
    criterion = nn.KLDivLoss(reduction="batchmean")
    assert_same(applied(same, 3), criterion, logits(7, 2, 3), (unit(7, 2, 3),))
    with pytest.raises(ValueError, match="the batch is dimension 1"):
        DataParallel(apply(same), ["cpu"], dim=1).loss(criterion, unit(2, 3), unit(2, 3))


def test_an_empty_batch() -> None:
    assert_same(applied(same, 2), nn.MSELoss(), logits(0, 3), (logits(0, 3),))


def test_the_sum_of_a_half_precision_batch_does_not_overflow() -> None:
    x = torch.full((64, 4096), 3.0, dtype=torch.float16)
    found = applied(same, 2).loss(nn.MSELoss(), x, torch.zeros_like(x))
    assert found.dtype == torch.float16
    assert found == 9.0


# --- criteria of the user's own --------------------------------------------------------------


class Renamed(nn.CrossEntropyLoss):
    """Keeps torch's forward, so its denominator is known."""


class Scaled(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target) * 2


class Tempered(nn.Module):
    """A criterion that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output / self.temperature, target)


def masked(output: Any, target: Tensor) -> Tensor:
    losses: Tensor = (output["y"] if isinstance(output, dict) else output).square().mean(-1)
    return (losses * (target >= 0)).sum() / (target >= 0).sum()


def kept(output: Any, target: Tensor) -> Tensor:
    return (target >= 0).sum()


def test_a_subclass_is_known_as_long_as_it_keeps_the_forward() -> None:
    model, x, y = applied(same, 2), logits(7, CLASSES), labels(7, ignored=-100)
    known = Renamed(CLASS_WEIGHT)
    before = dict(vars(known))
    assert_same(model, known, x, (y,))
    assert vars(known) == before, "the user's criterion stays as it is"
    patched = nn.MSELoss()
    patched.forward = lambda input, target: input.sum()  # type: ignore[method-assign]
    for other in (Scaled(), patched):
        name = type(other).__name__
        with pytest.raises(ValueError, match=f"what {name} divides its loss by is not known"):
            model.loss(other, x, y)


def test_a_chunk_that_weighs_nothing_is_left_out() -> None:
    model, x = applied(same, 3), torch.randn(6, 3, dtype=torch.bfloat16, requires_grad=True)
    target = torch.tensor([-1, -1, 2, 3, -1, 0])
    assert_same(model, masked, x, (target,), weight=kept)
    with pytest.raises(ValueError, match="weight= is zero for every chunk"):
        model.loss(masked, x, torch.full((6,), -1), weight=kept)


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (None, ValueError, "what masked divides its loss by is not known"),
        (3, ValueError, "cannot be weighted with weight=3; pass weight="),
        (lambda output, target: -1, ValueError, "finite and not negative, but that of .* is -1.0"),
    ],
)
def test_weights_that_make_no_sense(weight: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        applied(same, 2).loss(masked, logits(4, 3), torch.arange(4), weight=weight)


# --- what is refused -------------------------------------------------------------------------


ONES = torch.ones(2)

#: The criterion, the output, the targets, and how it is refused.
REFUSED: list[tuple[Any, Any, Any, type[Exception], str]] = [
    (nn.MSELoss(), torch.ones(2, 1), ONES, ValueError, r"shape \(2, 1\) with every target"),
    (nn.MSELoss(), lambda x: x[0], torch.ones(()), ValueError, "it needs a batch"),
    (nn.TripletMarginLoss(), ONES, (ONES, ONES), ValueError, r"shape \(2,\): it needs a batch"),
    (nn.MultiLabelMarginLoss(), ONES, torch.tensor([0, 1]), ValueError, "it needs a batch"),
    (nn.CrossEntropyLoss(reduction="sum"), ONES, ONES, ValueError, "it needs a batch"),
    (nn.NLLLoss(), ONES, labels(2), ValueError, "(?s)For 1D input, 1D target must.*in replica 0"),
    (nn.MSELoss(), ONES, {"target": ONES, "reduction": "sum"}, TypeError, "unexpected keyword"),
    (F.mse_loss, ONES, (ONES, False), ValueError, "reduce= are not supported"),
    (F.mse_loss, ONES, {"target": ONES, "reduce": False}, ValueError, "use functools.partial"),
    (nn.MSELoss(), ONES, (), TypeError, "missing a required argument: 'target'"),
    (nn.MSELoss(), lambda x: {"y": x}, ONES, TypeError, "but the module returned dict"),
    (nn.MSELoss(reduction="avg"), ONES, ONES, ValueError, r"one of .*, but is 'avg'"),
    (functools.partial(F.mse_loss, ONES), ONES, (), ValueError, "mse_loss divides .* not known"),
]


@pytest.mark.parametrize(("criterion", "output", "targets", "error", "message"), REFUSED)
@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
def test_criteria_and_targets_that_nobody_can_divide_are_refused(
    criterion: Any, output: Any, targets: Any, error: type[Exception], message: str
) -> None:
    x, function = (output, same) if isinstance(output, Tensor) else (ONES, output)
    with pytest.raises(error, match=message):
        applied(function, 1).loss(criterion, x, targets)


def test_weights_and_results_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="MSELoss knows its denominator itself"):
        applied(same, 1).loss(nn.MSELoss(), ONES, ONES, weight="samples")
    with pytest.raises(TypeError, match=r"must return a 0-d tensor, but returned shape \(2,\)"):
        applied(same, 1).loss(same, ONES, (), weight="samples")


# --- in a model ------------------------------------------------------------------------------


def network(device: str) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    return net.to(device, torch.float64)


@pytest.mark.parametrize("samples", [3, 11])
def test_derivatives_over_devices(slots: list[str], samples: int) -> None:
    model = DataParallel(network(slots[0]), slots)
    x = torch.randn(samples, 3, dtype=torch.float64, device=slots[0])
    y = labels(samples, ignored=-1).to(slots[0])
    y[0] = 0
    weight = (CLASS_WEIGHT + 1).to(slots[0])
    known: list[Criterion] = [
        functools.partial(F.cross_entropy, weight=weight, ignore_index=-1),
        nn.CrossEntropyLoss(weight, ignore_index=-1, reduction="none"),
    ]
    for criterion in known:
        assert_same(model, criterion, x, (y,), again=True)
    assert_same(model, masked, x, (y,), again=True, weight=kept)
    tempered = Tempered().to(slots[0])
    assert_same(model, tempered, x, (y.clamp(0),), again=True, weight="samples")
    with pytest.raises(ValueError, match="what <lambda> divides its loss by is not known"):
        model.loss(lambda output, target: output.sum(), x, y)
    with torch.no_grad():
        assert not model.loss(known[0], x, y).requires_grad
    assert_same(model, known[0], x, (y,))


def test_a_class_in_place_of_a_criterion() -> None:
    model = DataParallel(nn.Linear(3, 2), ["cpu", "cpu"])
    with pytest.raises(TypeError, match=r"the class CrossEntropyLoss, .* pass CrossEntropyLoss\("):
        model.loss(nn.CrossEntropyLoss, torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))


def test_targets_whose_classes_weigh_nothing(slots: list[str]) -> None:
    weight = torch.ones(CLASSES, dtype=torch.float64)
    weight[0] = 0
    model = DataParallel(network(slots[0]), slots)
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.zeros(6, dtype=torch.int64)
    for smoothing in (0.0, 0.2):
        criterion = nn.CrossEntropyLoss(weight, label_smoothing=smoothing).to(slots[0])
        for target in (y, torch.full_like(y, -100)):
            found = model.loss(criterion, x.to(slots[0]), target.to(slots[0]))
            right = criterion(model.module(x.to(slots[0])), target.to(slots[0]))
            torch.testing.assert_close(found, right, equal_nan=True)


def test_the_loss_is_on_the_output_device(slots: list[str]) -> None:
    for where, expected in ((None, slots[0]), (slots[1], slots[1]), (-1, "cpu")):
        model = DataParallel(network(slots[0]), slots, output_device=where)
        x, y = torch.randn(9, 3, dtype=torch.float64, device=slots[0]), labels(9).to(slots[0])
        found = model.loss(F.cross_entropy, x, y)
        assert str(found.device) == expected
        torch.testing.assert_close(found.cpu(), F.cross_entropy(model.module(x), y).cpu())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dim", [1, -1])
def test_the_batch_in_another_dimension(slots: list[str], reduction: str, dim: int) -> None:
    model = DataParallel(apply(torch.sin), slots, dim=dim)
    x = torch.randn(5, 7, 6, dtype=torch.float64, device=slots[0], requires_grad=True)
    assert_same(model, nn.L1Loss(reduction=reduction), x, (torch.randn_like(x),))


def test_what_is_unpacked_and_what_is_one_argument() -> None:
    x = torch.ones(1)
    named = torch.return_types.max((x, x))
    for value, args, kwargs in (
        (x, (x,), {}),
        ((x, 2), (x, 2), {}),
        ({"target": x}, (), {"target": x}),
        ([x, x], ([x, x],), {}),
        (named, (named,), {}),
    ):
        forward = mock.Mock(return_value=x)
        applied(forward, 1).loss(nn.MSELoss(), value, x)
        forward.assert_called_once_with(*args, **kwargs)
