"""Attributes that are set on a wrapper, deleted from it, and shown by it."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from tests.models import assert_all_close

WRAPPERS = [dp.DataParallel, dp.DistributedDataParallel]


class Net(nn.Module):
    """A module with attributes of all kinds, some of them under names of the wrappers."""

    gain: float = 2.0
    scale: Tensor
    offset: Any

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.shift = nn.Parameter(torch.zeros(3))
        self.register_buffer("scale", torch.ones(3))
        self.register_parameter("offset", None)
        self.temperature, self.calls = 1.0, 0
        self._limit = 9.0
        # The wrapper has these names, too.
        self.timeline = self.options = self._splitter = self._loaded = self.device_ids = "net's"

    @property
    def limit(self) -> float:
        return self._limit

    @limit.setter
    def limit(self, value: float) -> None:
        self._limit = value

    def bend(self, x: Tensor) -> Tensor:
        return x.tanh()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.bend(self.body(x))) / self.temperature
        y = (self.gain * y * self.scale + self.shift).clamp(max=self.limit)
        return y if self.offset is None else y + self.offset


@pytest.fixture(params=WRAPPERS, ids=["DataParallel", "DistributedDataParallel"])
def wrapper(request: pytest.FixtureRequest) -> Any:
    return request.param


def swap_head(model: Any) -> None:
    torch.manual_seed(4)
    model.head = nn.Linear(4, 3)


def add_to_attributes(model: Any) -> None:
    model.temperature += 1
    model.calls += 1


def delete_a_head(model: Any) -> None:
    del model.head
    swap_head(model)


def delete_others(model: Any) -> None:
    model.gain = 4.0
    model.temperature = 5.0
    del model.gain, model.shift
    model.shift = nn.Parameter(torch.ones(3))


STATEMENTS: dict[str, Callable[[Any], None]] = {
    "a module": swap_head,
    "a deleted module": delete_a_head,
    "a parameter": lambda model: setattr(model, "shift", nn.Parameter(torch.ones(3))),
    "a parameter that was None": lambda m: setattr(m, "offset", nn.Parameter(torch.ones(3))),
    "a parameter that is None now": lambda model: setattr(model, "offset", None),
    "a buffer": lambda model: setattr(model, "scale", torch.full((3,), 0.5)),
    "attributes": add_to_attributes,
    "deleted attributes": delete_others,
    "an attribute of the class": lambda model: setattr(model, "gain", 3.0),
    "a property": lambda model: setattr(model, "limit", 0.1),
    "a method": lambda model: setattr(model, "bend", torch.relu),
    "a new module": lambda model: setattr(model, "extra", nn.BatchNorm1d(2)),
    "a new parameter": lambda model: setattr(model, "extra", nn.Parameter(torch.ones(2))),
    "a new buffer": lambda model: setattr(model, "extra", nn.Buffer(torch.ones(2))),
}


def trained(model: Any, statement: Callable[[Any], None], x: Tensor) -> list[Any]:
    """Outputs of a training in whose middle something is set, and all that is left."""
    outputs = []
    for change in (lambda model: None, statement):
        change(model)
        torch.manual_seed(7)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            outputs.append(model(x))
            outputs[-1].square().sum().backward()
            optimizer.step()
    return [*outputs, model.state_dict(), [model.temperature, model.calls]]


@pytest.mark.parametrize(
    ("statement", "depth"),
    [pytest.param(each, 1 + i % 2, id=name) for i, (name, each) in enumerate(STATEMENTS.items())],
)
def test_what_is_set_is_set_on_the_module(
    wrapper: Any, depth: int, statement: Callable[[Any], None]
) -> None:
    net, bare = Net(), Net()
    model: Any = net
    for _ in range(depth):
        model = wrapper(model, ["cpu", "cpu"])
    x = torch.randn(6, 4)
    got, expected = trained(model, statement, x), trained(bare, statement, x)
    assert_all_close(got[:4], expected[:4])
    assert list(got[4]) == list(expected[4])
    assert_all_close(got[4].values(), expected[4].values())
    assert got[5] == expected[5]
    assert set(vars(net)) == set(vars(bare))
    # It loads its own state.
    model.load_state_dict(got[4])


# --- the wrapper's own ---------------------------------------------------------------------------


def test_the_names_of_the_wrapper_stay_its_own(wrapper: Any) -> None:
    net = Net()
    model = wrapper(net, ["cpu", "cpu"])
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    copies.append(torch.load(saved, weights_only=False))
    for each in (model, *copies):
        each.load_state_dict(net.state_dict())
        each.scalars, each.require_backward_grad_sync = "mean", True
        each.forward = each.forward
        each.note = "the user's"
        each(torch.randn(4, 4)).sum().backward()
        assert {vars(each.module)[n] for n in ("timeline", "options", "_splitter")} == {"net's"}
        assert each.module.device_ids == each.module._loaded == "net's"
        assert each.note == "the user's"
        assert not {"note", "scalars", "forward", "_runner"} & vars(each.module).keys()
        del each.note, each.forward
        assert not hasattr(each, "note")
        each.train(False)
        assert not each.training and not each.module.training
        each.module = other = Net()
        assert each.module is other


def test_what_cannot_be_set() -> None:
    model: Any = dp.DistributedDataParallel(Net(), ["cpu", "cpu"])
    with pytest.raises(AttributeError, match=r"has 'loss' itself.*: \.module\.loss = "):
        model.loss = nn.MSELoss()
    with pytest.raises(AttributeError, match="'average' is an option of DistributedDataParallel"):
        model.average = "samples"
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'nothing'"):
        del model.nothing
    assert not hasattr(model.module, "loss") and model.average == "processes"


class Sub(dp.DataParallel[Net]):
    """A wrapper of the user, with attributes of its own."""

    gain: float = 5.0

    def __init__(self, net: Net, name: str, value: object) -> None:
        self.early = 1
        super().__init__(net, ["cpu", "cpu"])
        self.late = 2
        setattr(self, name, value)


def test_a_subclass_with_a_constructor() -> None:
    model = Sub(Net(), "gain", 7.0)
    assert (model.early, model.late, model.gain, model.module.gain) == (1, 2, 7.0, 2.0)
    assert not {"early", "late", "gain"} & vars(model.module).keys()
    for name, value in {"temperature": 3.0, "head": nn.Linear(4, 3)}.items():
        net = Net()
        before = getattr(net, name)
        with pytest.raises(AttributeError, match=rf"{name}, or give the class Sub an attribute"):
            Sub(net, name, value)
        assert getattr(net, name) is before
    loss = Sub(Net(), "criterion", nn.MSELoss()).module.criterion
    assert isinstance(loss, nn.MSELoss)


# --- what is shown -------------------------------------------------------------------------------


def num_labels(labels: Tensor) -> int:
    return len(labels)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, "device_ids=[cpu, cpu]"),
        (
            {"buffers": "sync", "dim": 1, "in_dims": {"mask": None}, "scalars": num_labels},
            "device_ids=[cpu, cpu], dim=1, buffers='sync', scalars=num_labels, "
            "in_dims={'mask': None}",
        ),
        ({"output_device": "each"}, "device_ids=[cpu, cpu], output_device='each'"),
    ],
    ids=["defaults", "options", "output_device"],
)
def test_the_text_of_a_wrapper(wrapper: Any, options: dict[str, Any], shown: str) -> None:
    model = wrapper(nn.Linear(2, 1), ["cpu", "cpu"], **options)
    inner = "(module): Linear(in_features=2, out_features=1, bias=True)"
    assert repr(model) == f"{wrapper.__name__}(\n  {shown}\n  {inner}\n)"


def test_the_text_shows_options_of_the_reducer() -> None:
    model = dp.DistributedDataParallel(
        nn.Linear(2, 1),
        ["cpu"],
        process_group=False,
        bucket_cap_mb=3,
        nonfinite="skip",
        mixed_precision=dp.MixedPrecision(torch.bfloat16),
    )
    text = model.extra_repr()
    assert text.startswith(
        "device_ids=[cpu], process_group=False, bucket_cap_mb=3, mixed_precision="
    )
    assert text.endswith("), nonfinite='skip'")


# --- what is wrapped -----------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [*WRAPPERS, nn.DataParallel], ids=lambda kind: kind.__module__)
def test_a_wrapper_around_a_wrapper_is_warned_of(
    wrapper: Any, inner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    slots = ["virtual:0", "virtual:1"]
    first = inner(nn.Linear(2, 1).to(slots[0]), [0, 1] if inner is nn.DataParallel else slots)
    for wrapped in (nn.Sequential(first), first, first.module):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "dataparallel"):
            wrapper(wrapped, slots)
        warned = [record.getMessage() for record in caplog.records]
        assert len(warned) == (wrapped is first)
        assert all("wrap what is in it: .module" in text for text in warned)


@pytest.mark.parametrize(
    ("wrapped", "match"),
    [(Net, r"got the class Net; pass Net\(\.\.\.\)"), (torch.relu, "takes a torch.nn.Module, but")],
    ids=["a class", "a function"],
)
@pytest.mark.parametrize("devices", [None, ["cpu", "cpu"]])
def test_what_is_no_module(wrapper: Any, wrapped: Any, match: str, devices: Any) -> None:
    with pytest.raises(TypeError, match=match):
        wrapper(wrapped, devices)
