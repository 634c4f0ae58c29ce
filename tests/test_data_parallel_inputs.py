"""Arguments and outputs of the wrapper: what is split, what goes whole, what is refused."""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from dataparallel import DataParallel, DistributedDataParallel, Replicate, data_parallel
from tests.models import Calls, assert_all_close, grads_of, twins

BOTH = [DataParallel, DistributedDataParallel]


class Masked(nn.Linear):
    """Takes a mask and a shift, for which a batch is none."""

    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        output = super().forward(x)
        output = output if mask is None else output * mask
        return output if shift is None else output + shift


@pytest.mark.parametrize("in_dims", [{"mask": None}, {1: None}, {"mask": None, "shift": None}, {}])
def test_arguments_that_go_whole_to_each_replica(slots: list[str], in_dims: Any) -> None:
    """The rule is for the module; targets of a loss are split, whatever their place or name is."""
    bare, inner = twins(Masked, slots[0])
    model = DataParallel(inner, slots, in_dims=in_dims)
    x, y = torch.randn(2, 6, 3, dtype=torch.double, device=slots[0]).unbind(0)
    mask = torch.rand(1, 3, dtype=torch.double, device=slots[0]).requires_grad_()
    given = mask if in_dims else Replicate(mask)
    criterion = nn.MSELoss()
    calls: list[tuple[Any, Any]] = [(x, (x,)), ((x, given), (x, mask))]
    if 1 not in in_dims:
        calls.append(({"x": x, "mask": given}, (x, mask)))
    for inputs, args in calls:
        expected, found = criterion(bare(*args), y), model.loss(criterion, inputs, y)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(model.loss(criterion, inputs, {"target": y}), expected)
        for loss in (expected, found):
            loss.backward()
    assert_all_close(grads_of(model), grads_of(bare))
    output, expected = model(x, given), bare(x, mask)
    torch.testing.assert_close(output, expected)
    grads = [torch.autograd.grad(each.square().sum(), mask) for each in (output, expected)]
    torch.testing.assert_close(*grads)


class Table(nn.Linear):
    """Looks at nested arguments of which some are marked."""

    def forward(self, x: Tensor, rest: Any, *, table: Tensor) -> Tensor:  # type: ignore[override]
        assert type(table) is type(rest["more"][0]) is Tensor
        assert rest["name"] == "digits" and rest["none"] is None and rest["pair"] == (1, [2])
        return super().forward(x) * table.sum(0) + rest["more"][0].sum()


def _loss(output: Tensor, target: Tensor, table: Tensor) -> Tensor:
    return (output * table.sum(0) - target).pow(2).mean()


@pytest.mark.parametrize("wrapper", BOTH)
@pytest.mark.parametrize(("count", "size"), [(1, 5), (2, 1), (3, 5)])
def test_no_replica_gets_to_see_a_marker(wrapper: Any, count: int, size: int) -> None:
    bare, inner = twins(lambda: Table(3, 3), "cpu")
    x, target = torch.randn(2, size, 3, dtype=torch.double).unbind(0)
    table, more = torch.randn(2, 4, 3, dtype=torch.double).requires_grad_().unbind(0)

    def results(model: Any, mark: Any) -> list[Tensor | None]:
        rest = {"more": [mark(more)], "name": mark("digits"), "none": mark(None)}
        rest["pair"] = mark((1, mark([2])))
        inputs = {"x": x, "rest": rest, "table": mark(table)}
        if model is bare:
            loss = _loss(bare(**inputs), target, table)
        else:
            loss = model.loss(_loss, inputs, (target, mark(table)), weight="samples")
        output = model(x, rest, table=mark(table))
        (output.pow(2).sum() + loss).backward(retain_graph=True)
        return [output, loss, *grads_of(model)]

    expected = results(bare, lambda value: value)
    assert_all_close(results(wrapper(inner, ["cpu"] * count), Replicate), expected)


class Own(DataParallel[nn.Module]):
    """A scatter of the user, which may leave the targets of a loss out."""

    is_whole = True

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        doubled = tuple(value * 2 for value in inputs)
        return super().scatter(doubled, kwargs if self.is_whole else {}, device_ids)


def test_targets_in_a_scatter_of_the_user() -> None:
    model = Own(Masked(), ["cpu", "cpu"], in_dims={1: None, 2: None})
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    expected = nn.functional.mse_loss(model.module(2 * x), y)
    torch.testing.assert_close(model.loss(nn.MSELoss(), x, y), expected)
    model.is_whole = False
    with pytest.raises(KeyError, match="targets of the loss"):
        model.loss(nn.MSELoss(), x, y)


def test_transforms_are_refused_between_several_replicas(slots: list[str]) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(slots[0])
    model, one = DataParallel(module, slots), DataParallel(module, slots[:1])
    x, y = torch.randn(4, 3, device=slots[0]), torch.zeros(4, 4, device=slots[0])

    def grad_of(call: Any) -> Any:
        return torch.func.grad(lambda x: call(x).sum())

    calls: list[Callable[[], Any]] = [
        lambda: grad_of(model)(x),
        lambda: torch.func.vmap(model)(x[None]),
        lambda: grad_of(lambda x: model.loss(nn.MSELoss(), x, y))(x),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="with functorch transforms"):
            call()
        torch.testing.assert_close(model(x), module(x))
    # The advice of the guides works, and a single replica is the bare module.
    for allowed in (model.module, one):
        torch.testing.assert_close(grad_of(allowed)(x), grad_of(module)(x))


@pytest.mark.in_pairs
@pytest.mark.parametrize("where", ["input", "targets", "parameter", "attribute", "closure"])
@pytest.mark.parametrize(
    ("wrapper", "options", "count"),
    [
        (DataParallel, {}, 2),
        (DistributedDataParallel, {}, 2),
        (DistributedDataParallel, {"nonfinite": "raise"}, 1),
        (DistributedDataParallel, {}, 1),
    ],
)
def test_tangents_of_forward_mode_are_refused(
    where: str, wrapper: Any, options: dict[str, Any], count: int
) -> None:
    """Only where the module itself runs, they stay."""

    class Scaled(nn.Linear):
        scale: Tensor

        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return super().forward(x) * self.scale * held[0]

    calls: list[int] = []
    net, x, one = Scaled(3, 3), torch.randn(4, 3), torch.ones(())
    held, net.scale = [one], one
    model = wrapper(net, ["cpu"] * count, **options)
    with forward_ad.dual_level():
        # Tensors without tangents are no concern of it.
        torch.testing.assert_close(model(x), net(x))
        dual = forward_ad.make_dual(one, one)
        if where == "closure":
            held[0] = dual
        if where == "attribute":
            net.scale = dual
        if where == "parameter":
            weight = net.weight.detach()
            del net.weight
            net.weight = forward_ad.make_dual(weight, weight)
        batch = forward_ad.make_dual(x, x) if where in ("input", "targets") else x

        def call() -> Any:
            if where == "targets":
                return model.loss(nn.MSELoss(), x, batch)
            return model(batch)

        calls.clear()
        if count == 1 and not options:
            assert forward_ad.unpack_dual(call()).tangent is not None
            return
        # Nobody knows of a tensor from outside before.
        match = "jvp" if where == "closure" and wrapper is DataParallel else r"a tangent .*\.module"
        with pytest.raises(NotImplementedError, match=match):
            call()
        assert not calls or where == "closure"


def test_a_replica_may_write_into_its_chunk(slots: list[str]) -> None:
    """The caller's saved tensor for its own backward stays, while the bare module raises."""
    x = torch.randn(8, 3, device=slots[0], requires_grad=True)
    outputs = DataParallel(nn.ReLU(inplace=True), slots)(x.tanh()), x.tanh().relu()
    assert_all_close(*[(y, *torch.autograd.grad(y.sum(), x)) for y in outputs])


def test_inputs_that_cannot_be_split(slots: list[str]) -> None:
    model = DataParallel(Masked().to(slots[0]), slots, dim=1)
    for args, match in (((3, "text"), "no tensor"), ((torch.randn(4),), "dim 1 is out of range")):
        with pytest.raises(ValueError, match=match):
            model(*args)
    assert model(torch.ones(2, 4, 3)).shape == (2, 4, 3)


# --- outputs whose samples are not along `dim` ----------------------------------------------------


def lstm() -> nn.Module:
    return nn.LSTM(3, 5, num_layers=2, bidirectional=True, batch_first=True)


def results_of(module: nn.Module, *inputs: Any) -> list[Tensor | None]:
    """Outputs, and gradients of a loss on all of them."""
    module.zero_grad()
    outputs = [leaf for leaf in tree_leaves(module(*inputs)) if isinstance(leaf, Tensor)]
    total = [(out * torch.linspace(-1, 1, out.size(-1)).to(out)).sum() for out in outputs]
    torch.stack(total).sum().backward()
    return [*outputs, *grads_of(module)]


@pytest.mark.in_pairs
@pytest.mark.parametrize("wrapper", BOTH)
@pytest.mark.parametrize("out_dims", [(0, 1), [0, (1, -2)], {1: 1}, {1: {0: 1, 1: 1}}])
def test_states_of_an_lstm(slots: list[str], wrapper: Any, out_dims: Any) -> None:
    bare, inner = twins(lstm, slots[0])
    model = wrapper(inner, slots[:3], in_dims={"hx": 1}, out_dims=out_dims)
    for batch in (7, 2, 0):
        states = torch.randn(2, 4, batch, 5, dtype=torch.double, device=slots[0]).unbind(0)
        x = torch.randn(batch, 4, 3, dtype=torch.double, device=slots[0])
        expected = results_of(bare, x, states)
        assert_all_close(results_of(model, x, states), expected)
        outputs = data_parallel(inner, (x, states), slots[:3], in_dims={1: 1}, out_dims=out_dims)
        assert_all_close(tree_leaves(outputs), expected[:3])
    model.close()


def turned(dims: list[int]) -> Calls:
    """A module that returns rows in many shapes, the samples along a dim that is given for each."""

    def forward(net: Any, x: Tensor) -> dict[str, Any]:
        rows = net.layer(x)
        turned = [rows[..., None].expand(-1, -1, 4).movedim(0, dim) for dim in dims]
        return {"turned": turned, "rows": (rows, rows * 2), "table": net.table, "name": "turned"}

    return Calls(forward, layer=nn.Linear(3, 2), table=nn.Parameter(torch.ones(2, 2)))


@given(
    dims=st.lists(st.integers(-3, 2), max_size=3),
    batch=st.integers(0, 9),
    count=st.integers(1, 4),
    wrapper=st.sampled_from(BOTH),
)
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_dims(slots: list[str], dims: list[int], batch: int, count: int, wrapper: Any) -> None:
    bare, inner = twins(lambda: turned(dims), slots[0])
    model = wrapper(inner, slots[:count], out_dims={"turned": dims, "table": None})
    x = torch.randn(batch, 3, dtype=torch.double, device=slots[0])
    assert_all_close(results_of(model, x), results_of(bare, x))
    assert model(x)["name"] == "turned"
    model.close()


def report_on(net: Any, x: Tensor) -> dict[str, Any]:
    return {"turned": x.T, "sum": x.sum(), "first": x[0].sum(), "count": len(x)}


def test_scalars_and_other_leaves(slots: list[str]) -> None:
    x = torch.arange(10.0, device=slots[0]).view(5, 2)
    out_dims = {"turned": 1, "first": None}
    report = DataParallel(Calls(report_on), slots, scalars="sum", out_dims=out_dims)(x)
    torch.testing.assert_close(report["turned"], x.T)
    assert (report["sum"].item(), report["first"].item(), report["count"]) == (45, 1, [2, 2, 1])
    report = DataParallel(Calls(report_on), slots, "cpu", out_dims={**out_dims, "count": None})(x)
    assert (report["sum"].tolist(), report["count"]) == ([6, 22, 17], 2)
    assert report["first"].device == torch.device("cpu")
    apart = DataParallel(Calls(report_on), slots, "each", out_dims={"no such": 1})(x)
    assert [tuple(each["turned"].shape) for each in apart] == [(2, 2), (2, 2), (2, 1)]


@pytest.mark.parametrize(
    ("out_dims", "message"),
    [
        ((0, (1, (1,))), r"says \(1,\) of outputs\[1\]\[1\], which is leaf; give"),
        ("rows", "out_dims says 'rows' of outputs, which is tuple"),
        ((0, 3), r"outputs\[1\]\[0\] cannot .* dim 3 is out of range .*\(4, 3, 5\).*out_dims"),
        ((1, 1), r"outputs\[0\] cannot .* \(2, 4, 10\) and .* \(3, 4, 10\); .*out_dims"),
    ],
)
def test_out_dims_is_checked(out_dims: Any, message: str) -> None:
    model = DataParallel(lstm(), ["cpu", "cpu"], out_dims=out_dims)
    with pytest.raises(ValueError, match=message):
        model(torch.randn(5, 4, 3))


# --- arguments and outputs that are no containers -------------------------------------------------


class Kept:
    def __init__(self, value: Any = None) -> None:
        self.value = value


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Color(enum.Enum):
    RED = 1


class Vocabulary:
    def __init__(self) -> None:
        self.words = {f"word {i}": i for i in range(50_000)}
        self.itself = self


class Gives(nn.Linear):
    """Returns, beside its output, what is made of it and the arguments; writes into a cache."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__(4, 4)
        # All replicas have this one; a list each would have for itself.
        self.make, self.seen = make, deque[Any]()

    def forward(self, x: Tensor, *others: Any, cache: Any = None) -> Any:
        self.seen.append(others)
        output = super().forward(x)
        if cache is not None:
            cache.value = output
        return {"x": output, "more": self.make(output, *others)}


#: Arguments that several replicas cannot have, and what the error says.
REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "cache": (Kept, r"cache'\] is a Kept, .*\(5, 4\).*use_cache=False.*Replicate"),
    "nested": (
        lambda x: types.SimpleNamespace(rows={"a": [Slots(x)]}),
        r"is a SimpleNamespace, .*register_pytree_node",
    ),
    "empty": (lambda x: Kept(), r"cache'\] is a Kept, .* written tensors into it"),
    "in a list": (lambda x: [Slots(x)], r"cache'\]\[0\] is a Slots"),
}


@pytest.mark.parametrize("wrapper", BOTH)
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_shared_wrongly_is_refused(wrapper: Any, name: str) -> None:
    net = Gives(lambda output: None)
    model, x = wrapper(net, ["cpu", "cpu"]), torch.randn(5, 4)
    make, message = REFUSED[name]
    error = RuntimeError if name == "empty" else TypeError
    with pytest.raises(error, match=message):
        model(x, cache=make(x))
    # Otherwise before anything runs.
    assert bool(net.seen) == (name == "empty")
    with pytest.raises(error, match=message):
        criterion: Any = lambda output, y: (output["x"] - y).pow(2).sum()  # noqa: E731
        model.loss(criterion, {"x": x, "cache": make(x)}, x, weight="samples")
    torch.testing.assert_close(model(x)["x"], net(x)["x"])
    # One replica alone gets it as the bare module would, and writes into it.
    cache = Kept()
    model(x[:1], cache=cache)
    torch.testing.assert_close(cache.value, net(x[:1])["x"])


@pytest.mark.parametrize("wrapper", BOTH)
def test_what_is_harmless_is_shared(wrapper: Any) -> None:
    x, table = torch.randn(5, 4), torch.randn(7, 4)
    others = (
        *("name", 3, 2.5, 1j, None, b"x", True, Color.RED, torch.float32, torch.device("cpu")),
        *(torch.Size([5]), print, lstm, slice(1), object(), range(3), Kept, iter([1])),
        *(types.SimpleNamespace(width=4), Vocabulary(), Kept(table), Kept(nn.Linear(5, 5))),
        *(nn.Linear(5, 5), torch.Generator()),
    )
    # A marked object is shared whatever it holds.
    kept = Kept(x)
    net = Gives(lambda output, *given: given)
    got = wrapper(net, ["cpu", "cpu"])(x, *others, Replicate(kept))
    assert len(net.seen) == 2
    for row in (*net.seen, got["more"]):
        assert all(mine is given for mine, given in zip(row, (*others, kept), strict=True))


@pytest.mark.parametrize("wrapper", BOTH)
@pytest.mark.parametrize(
    "make",
    [
        Kept,
        lambda x: {x, x + 1},
        lambda x: torch.distributions.Normal(x, 1.0),
        lambda x: Kept(x) if x.shape[0] == 3 else None,
    ],
    ids=["box", "set", "distribution", "one of two"],
)
def test_objects_that_are_returned_come_once_per_replica(wrapper: Any, make: Any) -> None:
    x, net = torch.randn(5, 4), Gives(make)
    got = wrapper(net, ["cpu", "cpu"])(x)
    torch.testing.assert_close(got["x"], net(x)["x"])
    assert [type(one) for one in got["more"]] == [type(make(x[:3])), type(make(x[3:]))]
    boxes = [one.value for one in got["more"] if isinstance(one, Kept)]
    assert_all_close(boxes, got["x"].split([3, 2])[: len(boxes)])
    assert type(wrapper(net, ["cpu"])(x)["more"]) is type(make(x))
