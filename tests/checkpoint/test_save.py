"""Saving while the training goes on, failures of it, and which values come back as they were."""

from __future__ import annotations

import collections
import logging
import math
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from dataparallel import checkpoint
from dataparallel.virtual import strict_mode
from tests.checkpoint.helpers import complete, folder


class Gate:
    """Holds writers up until it is opened: each file is synchronized with the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        fsync = os.fsync

        def held(fd: int) -> None:
            self.reached.set()
            assert self.opened.wait(30)
            fsync(fd)

        monkeypatch.setattr(os, "fsync", held)


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)


def ended(saving: checkpoint.Saving) -> None:
    """Wait for the end of a save without being told how it went."""
    deadline = time.monotonic() + 30
    while not saving.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert saving.done()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


# --- while the training goes on ------------------------------------------------------------------


def test_what_a_device_still_computes_is_saved(tmp_path: pathlib.Path) -> None:
    with strict_mode():
        weight = torch.ones(4, device="virtual:1") * 3
        checkpoint.save(tmp_path, step=1, user=weight, asynchronous=True).wait(30)
        torch.accelerator.synchronize(1)
    assert checkpoint.load(tmp_path).user.tolist() == [3.0] * 4


@pytest.mark.parametrize("device", ["cpu", "virtual:1"])
def test_what_changes_later_is_not_saved(device: str, gate: Gate, tmp_path: pathlib.Path) -> None:
    net = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    expected = net.weight.detach().clone()
    data = {"history": [1, 2]}
    saving = checkpoint.save(tmp_path, net, optimizer, step=1, user=data, asynchronous=True)
    assert gate.reached.wait(30) and not saving.done()
    for _ in range(3):
        net(torch.ones(2, 4, device=device)).sum().backward()
        optimizer.step()
    data["history"].append(3)
    with pytest.raises(TimeoutError, match=r"goes on after 0\.01 s"):
        saving.wait(0.01)
    gate.opened.set()
    assert saving.wait(30) == 0 and saving.done()
    loaded = checkpoint.load(tmp_path, net, optimizer)
    assert torch.equal(net.weight, expected) and not optimizer.state_dict()["state"]
    assert loaded.user == {"history": [1, 2]}


def test_memory_is_used_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, made = nn.Linear(64, 64), []
    empty: Callable[..., Any] = torch.empty_like

    def counted(*args: Any, **options: Any) -> Any:
        made.append(args)
        return empty(*args, **options)

    counts = []
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty_like", counted)
        for step in range(3):
            made.clear()
            checkpoint.save(tmp_path, net, step=step, asynchronous=True).wait(30)
            counts.append(len(made))
    assert counts[0] > 0 and counts[1:] == [0, 0]


def test_one_generation_at_a_time(gate: Gate, tmp_path: pathlib.Path) -> None:
    first = checkpoint.save(tmp_path, step=1, asynchronous=True)
    assert gate.reached.wait(30)
    threading.Timer(0.1, gate.opened.set).start()
    second = checkpoint.save(tmp_path, step=2, asynchronous=True)
    assert first.done() and (first.wait(), second.wait(30)) == (0, 1)


# --- failures ------------------------------------------------------------------------------------


def test_the_next_save_tells_of_a_failure_in_the_background(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # An error that somebody has seen is not told again.
    with monkeypatch.context() as patched:
        fill_the_disk(patched)
        saving = checkpoint.save(tmp_path, step=1, asynchronous=True)
        for _ in range(2):
            with pytest.raises(checkpoint.CheckpointError, match="No space left"):
                saving.wait(30)
    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR, "dataparallel"):
        fill_the_disk(patched)
        saving = checkpoint.save(tmp_path, step=1, asynchronous=True)
        ended(saving)
    assert "No space left" in caplog.text
    with pytest.raises(checkpoint.CheckpointError, match=r"an earlier save failed.*No space left"):
        checkpoint.save(tmp_path, step=2, asynchronous=True)
    # The failure is told once.
    checkpoint.save(tmp_path, step=3, asynchronous=True).wait(30)
    assert complete(tmp_path) == [True]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sampler": [1]}, TypeError, "sampler is a list, which has neither"),
        ({"keep": 0}, ValueError, "keep is at least 1, but got 0"),
        ({"states": {"rng": nn.Linear(1, 1)}}, ValueError, "states has the name 'rng'"),
        ({"model": nn.LazyLinear(2)}, TypeError, "UninitializedParameter that is not dense or has"),
    ],
)
def test_arguments_that_cannot_be_saved_are_refused(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(error, match=message):
        checkpoint.save(tmp_path, step=1, **options)
    assert not complete(tmp_path)


# --- the end --------------------------------------------------------------------


def test_closed_means_released(tmp_path: pathlib.Path) -> None:
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for step in range(20):
        checkpoint.save(tmp_path, step=step, asynchronous=True)
        checkpoint.close()
        checkpoint.load(tmp_path)
    deadline = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= files


# --- values ---------------------------------------------------------------------------------------

VALUES: list[Any] = [
    *(None, True, 0, -(2**63), 2**200, 1.5, -0.0, 5e-324, math.nan, -math.inf, "ä\0"),
    *((), (1, (2, [3])), [], {}, {"a": None}, {3: 1, None: 2, (1, 2): 3, 1.5: 4, True: 5}),
    *({"$": "tensor", "name": "x"}, {"$": 1}, {1, 2, "x"}, frozenset({(1, 2)}), b"a\0\xff"),
    *(1 - 2j, torch.Size([2, 3]), torch.float8_e4m3fn, torch.device("cuda:1")),
    *(collections.OrderedDict(b=1, a=2), collections.Counter({5: 2, 1: 1})),
    *(numpy.float64(0.1), numpy.int8(-3), numpy.array(5), numpy.arange(6.0).reshape(2, 3).T),
    *(torch.randn(2, 3), torch.randn(2, 3).t(), torch.randn(4, 6)[::2, ::3]),
    *(torch.ones(1).expand(4), torch.tensor(2.5), torch.empty(0, 3), torch.randn(3)[1:]),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.randn(3, dtype=torch.complex64).conj(),
    torch.randn(3, dtype=torch.complex64).conj().imag,
    torch.randn(2, 2, dtype=torch.complex128).t(),
    torch.randn(5, 1).to(torch.float8_e5m2fnuz),
    torch.tensor(2**64 - 1, dtype=torch.uint64),
    torch.empty(2, 0, dtype=torch.complex128),
    torch.tensor([math.nan, -0.0, math.inf], dtype=torch.bfloat16),
    # Names that collide in a file.
    {"a": {"b": torch.zeros(2)}, "a.b": torch.ones(2)},
]


def form(value: Any) -> Any:
    """Return a value as what is compared by ``==``: with its type, its order and its bits."""
    if isinstance(value, Tensor):
        plain = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        bits = (torch.view_as_real(plain) if plain.is_complex() else plain).view(torch.uint8)
        return type(value), value.dtype, value.shape, bits.tolist()
    if isinstance(value, numpy.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, dict):
        return type(value), [(form(key), form(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [form(each) for each in value]
    return type(value), value if isinstance(value, (set, frozenset)) else repr(value)


def test_values_come_back(tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path, step=1, user=VALUES)
    for got, expected in zip(checkpoint.load(tmp_path).user, VALUES, strict=True):
        assert form(got) == form(expected)


def test_one_tensor_is_saved_once_and_is_one_again(tmp_path: pathlib.Path) -> None:
    weight = torch.randn(5000)
    checkpoint.save(tmp_path, step=1, user={"a": weight, "b": [weight], "c": weight.clone()})
    got = checkpoint.load(tmp_path).user
    assert got["a"] is got["b"][0] and got["a"] is not got["c"]
    (file,) = folder(tmp_path, 0).glob("*.safetensors")
    assert 2 <= file.stat().st_size / weight.nbytes < 3


class Own(dict):  # type: ignore[type-arg]
    """A dict that may do anything."""


def nested_tensor(layout: torch.layout) -> Tensor:
    parts = [torch.ones(1), torch.ones(2)]
    return torch.nested.nested_tensor(parts, layout=layout)


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_cannot_be_saved_is_named(asynchronous: bool, tmp_path: pathlib.Path) -> None:
    refused: list[tuple[Any, str]] = [
        ({"deep": [1, {"er": object()}]}, r"user\.deep\.1\.er is a builtins\.object"),
        ({"d": Own()}, r"user\.d is a .*Own"),
        ({"f": lambda: 1}, r"user\.f is a builtins\.function"),
        ({"a": numpy.array(["x"])}, r"user\.a is a numpy\.ndarray"),
        ({"d": collections.defaultdict(int)}, r"user\.d is a collections\.defaultdict"),
        ({(object(),): 1}, r"user\.0\.0\.0 is a builtins\.object"),
        ({"t": torch.empty(2, device="meta")}, r"user\.t is a Tensor that is not dense or"),
        ({"s": torch.eye(2).to_sparse()}, r"user\.s is a Tensor that is not dense"),
        ({"n": nested_tensor(torch.strided)}, r"user\.n is a Tensor that is not dense"),
        ({"n": nested_tensor(torch.jagged)}, r"user\.n is a NestedTensor that is not"),
        (endless(), "recursion"),
    ]
    for value, message in refused:
        with pytest.raises((TypeError, RecursionError), match=message):
            checkpoint.save(tmp_path, step=1, user=value, asynchronous=asynchronous)
    # Not a second time.
    checkpoint.save(tmp_path, step=2, asynchronous=asynchronous).wait(30)
