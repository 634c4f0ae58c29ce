"""`dataparallel bench autograd`: what it concludes, and a small run of the real thing."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.rpc
from rich.console import Console
from torch import Tensor

from dataparallel.tools import cli
from dataparallel.tools.bench import autograd, autograd_workers
from dataparallel.tools.bench.autograd_workers import Chain, Engine, Form, Measured, Setting

SECONDS = {
    "ours forward": [4.0, 8.0],
    "torch forward": [2.0, 2.0],
    "ours backward": [0.001, 0.003],
    "torch backward": [0.002, 0.002],
}


def shown(measured: dict[int, list[Measured]]) -> str:
    stream = io.StringIO()
    Console(file=stream, width=80).print(autograd.build_table(measured))
    return stream.getvalue()


def test_ours_is_compared_with_torchs_round_by_round() -> None:
    measured = Measured(Chain(64, 4), True, SECONDS)
    assert measured.ratios("backward") == [0.5, 1.5]
    text = shown({4: [measured, Measured(Chain(4, 2**18), False, SECONDS)]})
    assert "…" not in text
    *_, first, second = [line.split() for line in text.splitlines() if line.strip()]
    figures = ["2.00", "2.00", "1.00", "0.50..1.50", "3.00", "2.00..4.00"]
    assert first == ["64", "calls", "✓", *figures]
    assert second == ["4", "x", "1024", "KiB", "✗", *figures]


class Local:
    """Calls and a backward in this process, with ordinary autograd and an error at the end."""

    def __init__(self, form: Form, told: list[str], spoil: Callable[[Tensor], Any]) -> None:
        self.form, self.told, self.spoil = form, told, spoil
        self.leaf = torch.empty(0)
        self.gradients: dict[Tensor, Tensor] = {}

    @contextlib.contextmanager
    def context(self) -> Iterator[int]:
        self.told.append(self.form)
        yield 7

    def rpc_sync(self, to: str, function: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
        self.told.append(to)
        self.leaf = args[0] if args[0].is_leaf else self.leaf
        return function(*args)

    def backward(self, context_id: int, roots: list[Tensor]) -> None:
        (gradient,) = torch.autograd.grad(roots[0], self.leaf)
        self.gradients = self.spoil(gradient) or {self.leaf: gradient}

    def get_gradients(self, context_id: int) -> dict[Tensor, Tensor]:
        return self.gradients


def change_one(gradient: Tensor) -> None:
    gradient[-1] += 1


def flip(gradient: Tensor) -> None:
    gradient.copy_(gradient.flip(0))


def spoil_all(gradient: Tensor) -> None:
    gradient.fill_(float("nan"))


@pytest.mark.parametrize("wrong", ["ours", "torch"])
@pytest.mark.parametrize(
    ("spoil", "right"),
    [
        (lambda gradient: None, True),
        (change_one, False),
        (flip, False),
        (spoil_all, False),
        (lambda gradient: {torch.ones(1): gradient}, False),
    ],
    ids=["right", "one element", "order", "nan", "another leaf"],
)
def test_a_wrong_gradient_is_seen_and_both_take_turns(
    spoil: Callable[[Tensor], Any], right: bool, wrong: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    for form in autograd_workers.ENGINES:
        one = Local(form, told, spoil if form == wrong else lambda gradient: None)
        engine = Engine(one.context, one.rpc_sync, one.backward, one.get_gradients)
        monkeypatch.setitem(autograd_workers.ENGINES, form, engine)
    monkeypatch.setattr(torch.distributed.rpc, "rpc_sync", lambda to, function: None)
    measured = Measured(Chain(3, 4))
    autograd_workers.take_turns(measured, 3, 2, keep=True)
    assert measured.right == right
    assert {key: len(own) for key, own in measured.seconds.items()} == dict.fromkeys(SECONDS, 1)
    calls = ["worker1", "worker2", "worker1"]
    order = ["ours", *calls, "torch", *calls, "torch", *calls, "ours", *calls]
    assert told == order


# TCP: with shared memory, workers that wait would take the cores from other tests.
SMALL = ["bench", "autograd", "--calls", "1,2", "--kib", "64", "--transport", "uv"]


@pytest.mark.slow
def test_a_small_run(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "results.json"
    assert cli.main([*SMALL, "--workers", "2", "--quick", "--json", str(target)]) == 0
    result = json.loads(target.read_text())
    assert result["setting"]["rounds"] == 3
    names = ["1 calls", "2 calls", "4 x 64 KiB"]
    rows = [(each["workers"], each["chain"], each["right"]) for each in result["rows"]]
    assert rows == [(2, name, True) for name in names]
    for each in result["rows"]:
        assert {len(own) for own in each["seconds"].values()} == {3}
        assert all(second > 0.0 for own in each["seconds"].values() for second in own)
    assert "  4 x 64 KiB ✓" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "rounds", "message"),
    [
        ([], 0, 11, ""),
        (["--quick"], 0, 3, ""),
        (["--quick", "--rounds", "4"], 0, 4, ""),
        (["--calls", "3"], 1, 11, ""),
        (["--workers", "1,2"], 2, 0, "--workers needs 2 or more, but got 1"),
    ],
)
def test_usage(
    words: list[str],
    status: int,
    rounds: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A chain of three calls stands for a wrong result, which is a negative one."""

    def measure(workers: int, setting: Setting) -> list[Measured]:
        return [Measured(chain, chain.calls != 3, SECONDS) for chain in setting.chains]

    monkeypatch.setattr(autograd, "measure", measure)
    assert cli.main(["bench", "autograd", *words, "--json", "-"]) == status
    printed = capsys.readouterr()
    assert message in printed.err
    if status < 2:
        result = json.loads(printed.out)
        assert result["setting"]["rounds"] == rounds
        assert {each["workers"] for each in result["rows"]} == {2, 4}


def test_examples_in_the_help_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    parser = cli.build_parser()
    with pytest.raises(SystemExit, match="0"):
        parser.parse_args(["bench", "autograd", "--help"])
    examples = capsys.readouterr().out.split("examples:\n")[1].splitlines()
    assert len(examples) == 4
    for example in examples:
        assert callable(parser.parse_args(example.split()[1:]).run)
