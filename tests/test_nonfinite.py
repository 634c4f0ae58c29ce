"""The guard against gradients that are not finite, in one process."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel.parallel.distributed import DistributedDataParallel
from dataparallel.reducer.nonfinite import NonFiniteGradients
from dataparallel.virtual import counters
from tests.nonfinite_cases import INF, NAN, Net, Spoil, make_net, same, spoils, state_of


@pytest.fixture(autouse=True)
def _unspoiled() -> Any:
    spoils.clear()
    yield
    spoils.clear()


def _make(
    slots: list[str], replicas: int, **options: Any
) -> tuple[DistributedDataParallel[Net], torch.optim.Optimizer]:
    net = make_net(slots[0])
    model = DistributedDataParallel(net, slots[:replicas], **options)
    return model, torch.optim.AdamW(net.parameters(), lr=0.1)


def _backward(model: nn.Module, seed: int = 0, device: str = "cpu", scale: float = 1.0) -> None:
    torch.manual_seed(seed)
    (model(torch.randn(8, 4, device=device)).square().sum() * scale).backward()


def test_hooks_that_run_after_accumulation_do_not_see_a_skipped_step() -> None:
    model, _ = _make(["cpu"] * 2, 2, nonfinite="skip")
    calls: list[torch.Tensor] = []
    next(model.module.parameters()).register_post_accumulate_grad_hook(calls.append)
    for scale, count in ((INF, 0), (1.0, 1)):
        model.zero_grad()
        _backward(model, scale=scale)
        assert len(calls) == count


@pytest.mark.parametrize("view", [False, True], ids=["steal", "view"])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("value", [NAN, -INF], ids=["nan", "-inf"])
def test_a_skipped_step_changes_nothing(
    slots: list[str],
    caplog: pytest.LogCaptureFixture,
    replicas: int,
    view: bool,
    value: float,
) -> None:
    model, optimizer = _make(slots, replicas, nonfinite="skip", gradient_as_bucket_view=view)
    bare = make_net(slots[0])
    reference = torch.optim.AdamW(bare.parameters(), lr=0.1)
    caplog.set_level(logging.WARNING, "dataparallel")
    names = [name for name, _ in bare.named_parameters()]
    for step in range(2 * len(names)):
        before = state_of(model.module, optimizer)
        if step % 2:
            spoils[:] = [Spoil(names[step // 2], value, replicas - 1)]
        _backward(model, step, slots[0])
        spoils.clear()
        if not step % 2:
            _backward(bare, step, slots[0])
            reference.step()
        optimizer.step()
        if step % 2:
            assert all(p.grad is None for p in model.parameters())
            assert same(before, state_of(model.module, optimizer))
            (record,) = caplog.records
            kind = "NaN" if value != value else "infinity"
            place = f"replica {replicas - 1} ({slots[replicas - 1]})"
            assert f"not finite on {place}: {names[step // 2]} ({kind})." in record.message
            caplog.clear()
        optimizer.zero_grad()
        reference.zero_grad()
    assert model.num_skipped == len(names)
    for ours, theirs in zip(model.module.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    model.close()


@pytest.mark.parametrize("view", [False, True], ids=["steal", "view"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_error_leaves_no_gradient(replicas: int, view: bool) -> None:
    options = {"nonfinite": "raise", "gradient_as_bucket_view": view}
    model, optimizer = _make(["cpu"] * 4, replicas, **options)
    for _ in range(2):
        spoils[:] = [Spoil("b.bias", INF), Spoil("scale", NAN)]
        before = state_of(model.module, optimizer)
        text = r"not finite on replica 0 \(cpu\): .*b.bias \(infinity\)"
        with pytest.raises(NonFiniteGradients, match=text) as caught:
            _backward(model)
        assert isinstance(caught.value, FloatingPointError)
        assert "scale (NaN)" in str(caught.value)
        optimizer.step()
        assert same(before, state_of(model.module, optimizer))
        spoils.clear()
        _backward(model)
        bare = make_net()
        bare.load_state_dict(model.module.state_dict())
        _backward(bare)
        for ours, theirs in zip(model.module.parameters(), bare.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        optimizer.zero_grad()
    assert model.num_skipped == 0
    model.close()


def test_nobody_looks_by_default() -> None:
    model, _ = _make(["cpu"] * 2, 2)
    spoils[:] = [Spoil("scale")]
    _backward(model)
    assert model.module.scale.grad is not None
    assert model.module.scale.grad.isnan()
    model.close()


@pytest.mark.parametrize("view", [False, True], ids=["steal", "view"])
def test_a_sum_that_overflows_is_found(caplog: pytest.LogCaptureFixture, view: bool) -> None:
    """Each replica's gradient is finite."""
    net = nn.Linear(1, 1, bias=False)
    options: dict[str, Any] = {"nonfinite": "skip", "gradient_as_bucket_view": view}
    model = DistributedDataParallel(net, ["cpu", "cpu"], **options)
    largest = torch.finfo(torch.float).max
    for part, skipped in ((0.4, 0), (0.9, 1), (0.4, 1)):
        model(torch.full((2, 1), largest * part)).sum().backward()
        assert model.num_skipped == skipped
        assert (net.weight.grad is None) == (part == 0.9)
        net.zero_grad()
    (record,) = caplog.records
    assert "not finite on a sum of finite ones (too large for its dtype, or ret" in record.message
    assert "from elsewhere): weight (infinity). The step is skipped" in record.message
    model.close()


@pytest.mark.parametrize("view", [False, True], ids=["steal", "view"])
def test_sums_over_backwards_that_overflow_are_found(view: bool) -> None:
    net = nn.Linear(1, 1, bias=False)
    options: dict[str, Any] = {"nonfinite": "skip", "gradient_as_bucket_view": view}
    model = DistributedDataParallel(net, ["cpu"], **options)
    for _ in range(2):
        model(torch.full((1, 1), torch.finfo(torch.float).max * 0.7)).sum().backward()
    assert net.weight.grad is None
    assert model.num_skipped == 1
    model.close()


def test_gradients_whose_squares_overflow_are_finite() -> None:
    net = nn.Linear(2, 1, bias=False)
    model = DistributedDataParallel(net, ["cpu"], nonfinite="raise")
    model(torch.full((1, 2), 1e30)).sum().backward()
    assert net.weight.grad is not None
    torch.testing.assert_close(net.weight.grad, torch.full((1, 2), 1e30))
    model.close()


@pytest.mark.parametrize("accumulated", [False, True])
def test_earlier_gradients_are_dropped_too(accumulated: bool) -> None:
    model, _ = _make(["cpu"] * 2, 2, nonfinite="skip")
    if accumulated:
        _backward(model)
    spoils[:] = [Spoil("a.weight")]
    _backward(model)
    assert all(p.grad is None for p in model.parameters())
    spoils.clear()
    _backward(model)
    assert all(p.grad is not None for p in model.parameters())
    model.close()


@pytest.mark.parametrize("view", [False, True], ids=["steal", "view"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_it_is_decided_at_the_end_of_a_step(
    caplog: pytest.LogCaptureFixture, replicas: int, view: bool
) -> None:
    """What ``no_sync()`` leaves is a part of the step, with other processes or without."""
    options = {"nonfinite": "skip", "gradient_as_bucket_view": view}
    model, _ = _make(["cpu"] * 2, replicas, **options)
    for zeroed in (False, True):
        with model.no_sync():
            _backward(model)
            spoils[:] = [Spoil("a.weight", NAN, replicas - 1)]
            _backward(model)
        spoils.clear()
        assert (model.num_skipped, caplog.records) == (0, [])
        if zeroed:
            model.zero_grad()
        _backward(model)
        assert all((p.grad is None) != zeroed for p in model.parameters())
        assert model.num_skipped == (not zeroed)
        if not zeroed:
            assert f"replica {replicas - 1} (cpu): a.weight (NaN)" in caplog.messages[0]
        model.zero_grad()
        model.options.nonfinite.num_skipped = 0
        caplog.clear()
    model.close()


@pytest.mark.parametrize(("to_none", "name"), [(True, "a.weight"), (False, "b.bias")])
def test_what_was_zeroed_is_not_named(
    caplog: pytest.LogCaptureFixture, to_none: bool, name: str
) -> None:
    model, _ = _make(["cpu"] * 2, 2, nonfinite="skip")
    spoils[:] = [Spoil("a.weight", NAN, 1)]
    with model.no_sync():
        _backward(model)
    for parameter in model.parameters():
        parameter.grad = None if to_none else torch.zeros_like(parameter)
    spoils[:] = [Spoil(name, NAN, 0)]
    _backward(model)
    assert f"not finite on replica 0 (cpu): {name} (NaN). The" in caplog.messages[0]
    model.close()


def test_the_end_of_a_step_raises() -> None:
    model, _ = _make(["cpu"] * 2, 2, nonfinite="raise")
    spoils[:] = [Spoil("a.weight")]
    with model.no_sync():
        _backward(model)
    spoils.clear()
    with pytest.raises(NonFiniteGradients, match=r"replica 0 \(cpu\): a.weight \(NaN\)"):
        _backward(model)
    _backward(model)
    assert all(p.grad is not None for p in model.parameters())
    model.close()


def test_statistics_can_be_put_back() -> None:
    """A step that is skipped has changed what forward changes; see docs."""
    norm = nn.BatchNorm1d(4)
    net = nn.Sequential(nn.Linear(3, 4), norm)
    model = DistributedDataParallel(net, ["cpu"] * 2, nonfinite="skip")
    kept = {name: buffer.clone() for name, buffer in net.named_buffers()}
    model(torch.full((4, 3), NAN)).sum().backward()
    assert model.num_skipped == 1
    assert norm.running_mean is not None
    assert norm.running_mean.isnan().all()
    for name, buffer in net.named_buffers():
        buffer.copy_(kept[name])
    model(torch.randn(4, 3)).sum().backward()
    assert model.eval()(torch.randn(4, 3)).isfinite().all()
    model.close()


def test_a_hook_runs_again_after_a_backward_that_failed() -> None:
    net = nn.Linear(2, 1)
    model = DistributedDataParallel(net, ["cpu"] * 2, nonfinite="raise")
    calls: list[torch.Tensor] = []
    net.weight.register_hook(calls.append)
    with pytest.raises(NonFiniteGradients):
        model(torch.full((2, 2), NAN)).sum().backward()
    assert len(calls) == 1
    net(torch.ones(2, 2)).sum().backward()
    assert len(calls) == 2
    model(torch.ones(2, 2)).sum().backward()
    assert len(calls) == 3
    model.close()


@pytest.mark.parametrize("replicas", [1, 2])
def test_hooks_have_the_last_word(replicas: int) -> None:
    model, _ = _make(["cpu"] * 2, replicas, nonfinite="raise")
    bias = model.module.b.bias
    handle = bias.register_hook(torch.nan_to_num)
    spoils[:] = [Spoil("b.bias", NAN, replicas - 1)]
    _backward(model)
    assert bias.grad is not None
    assert bias.grad.isfinite().all()
    spoils.clear()
    handle.remove()
    bias.register_hook(lambda grad: grad / 0)
    with pytest.raises(NonFiniteGradients, match=r"from elsewhere\): b.bias \(infinity\)\. "):
        _backward(model)
    model.close()


@pytest.mark.parametrize("replicas", [1, 2])
def test_sparse_gradients(replicas: int) -> None:
    net = nn.EmbeddingBag(6, 3, mode="sum", sparse=True)
    model = DistributedDataParallel(net, ["cpu"] * replicas, nonfinite="raise")
    x = torch.tensor([[0, 1], [2, 2]])
    model(x).sum().backward()
    assert net.weight.grad is not None
    assert net.weight.grad.is_sparse
    with pytest.raises(NonFiniteGradients, match=rf"replica {replicas - 1} .*weight \(NaN\)"):
        (model(x) * torch.tensor([[1.0], [NAN]])).sum().backward()
    assert net.weight.grad is None
    model.close()


def test_a_sparse_gradient_without_rows() -> None:
    """It has no largest element, and is finite."""
    net = nn.ModuleList([nn.Embedding(4, 2, sparse=True) for _ in range(2)])
    net.forward = lambda first, second: net[0](first).sum() + net[1](second).sum()
    model = DistributedDataParallel(net, ["cpu"], nonfinite="raise")
    empty, full = torch.zeros(0, dtype=torch.long), torch.zeros(2, dtype=torch.long)
    model(empty, full).backward()
    assert [each.weight.grad is not None for each in net] == [True, True]
    with pytest.raises(NonFiniteGradients, match=r"\(cpu\): 1.weight \(NaN\)\. No"):
        (model(empty, full) * NAN).backward()
    model.close()


@pytest.mark.parametrize("replicas", [1, 2])
def test_sparse_gradients_whose_sum_overflows(replicas: int) -> None:
    """Each of the values is small, but all of them belong to one row."""
    net = nn.Embedding(4, 2, sparse=True)
    model = DistributedDataParallel(net, ["cpu"] * replicas, nonfinite="skip")
    for number, skipped in ((100, 0), (10_000, 1)):
        (model(torch.zeros(number, dtype=torch.long)) * 1e36).sum().backward()
        assert model.num_skipped == skipped
        assert (net.weight.grad is None) == bool(skipped)
        net.zero_grad()
    model.close()


def test_several_forwards_and_a_copy() -> None:
    model, _ = _make(["cpu"] * 2, 2, nonfinite="skip")
    copy: DistributedDataParallel[Net] = pickle.loads(pickle.dumps(model))
    for each in (model, copy):
        x = torch.randn(4, 4)
        (each(x).sum() + each(x * NAN).sum()).backward()
        assert each.num_skipped == 1
        assert all(p.grad is None for p in each.parameters())
        each.close()


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="nonfinite must be 'ignore', 'skip' or 'raise', but got"):
        DistributedDataParallel(nn.Linear(1, 1), ["cpu"], nonfinite="stop")  # type: ignore[arg-type]
    model = DistributedDataParallel(nn.Linear(1, 1), ["cpu"], nonfinite="skip")
    with pytest.raises(ValueError, match="nonfinite='skip' and optimizers in backward do not go"):
        model.step_in_backward(torch.optim.SGD, lr=0.1)
    model(torch.ones(1, 1)).sum().backward()
    model.close()
    model = DistributedDataParallel(nn.Linear(1, 1), ["cpu"], average="samples")
    for weight in (INF, NAN, -1.0):
        with pytest.raises(
            ValueError, match=f"finite and not negative, but that of .* is {weight}"
        ):
            model.set_weight(weight)
    model.close()


class Given(nn.Module):
    """Its gradients are what it is called with; beside a parameter of another dtype."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.given = nn.Parameter(torch.zeros(7, dtype=dtype, device=device))
        self.other = nn.Parameter(torch.zeros(2, dtype=torch.double, device=device))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.given * gradient).sum().real + self.other.sum().to(gradient.real.dtype)


@pytest.mark.parametrize(
    "dtype", [torch.half, torch.bfloat16, torch.float, torch.double, torch.cfloat]
)
def test_kinds(slots: list[str], dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max if not dtype.is_complex else 1e18
    model = DistributedDataParallel(Given(dtype, slots[0]), slots[:1], nonfinite="raise")
    for value, kind in ((0.0, None), (largest, None), (NAN, "NaN"), (INF, "infinity")):
        gradient = torch.ones(7, dtype=dtype, device=slots[0])
        gradient[3] = value
        # Complex numbers are multiplied by parts, and infinity times zero is NaN.
        kind = "NaN" if kind and dtype.is_complex else kind
        model.zero_grad()
        backward = model(gradient).backward
        if kind is None:
            backward()
        else:
            with pytest.raises(NonFiniteGradients, match=rf"\): given \({kind}\)\. No"):
                backward()
        assert (model.module.other.grad is None) == (kind is not None)
    model.close()


@pytest.mark.parametrize("action", ["ignore", "skip"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_host_waits_once_in_a_step(replicas: int, action: Any) -> None:
    """To know that all gradients are finite, it has to."""
    slots = [f"virtual:{i}" for i in range(replicas)]
    model, optimizer = _make(slots, replicas, nonfinite=action)
    waits = []
    for step in range(6):
        optimizer.zero_grad()
        torch.manual_seed(step)
        loss = model(torch.randn(8, 4, device="virtual:0")).square().sum()
        before = counters()["host_waits"]
        loss.backward()
        waits.append(counters()["host_waits"] - before)
    assert waits[2:] == [int(action == "skip")] * 4
    model.close()
