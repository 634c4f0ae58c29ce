"""Every message that the guide on troubleshooting quotes is in a source of ours, or raised."""

from __future__ import annotations

import ast
import logging
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data.distributed import DistributedSampler

import dataparallel as dp
from dataparallel import collectives

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guides" / "troubleshooting.md"


def quoted() -> set[str]:
    """The messages in the first columns of the page's tables."""
    cells = re.findall(r"^\| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    codes = [code for cell in cells for code in re.findall(r"`([^`]*)`", cell)]
    return {code for code in codes if " " in code}


def pattern(message: str) -> str:
    return ".*".join(re.escape(part) for part in re.split(r"\.\.\.|\d+", message))


def texts() -> Iterator[str]:
    """The texts of our sources, with something in place of what they fill in."""
    for folder in ("dataparallel", "kernels", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
                    yield "...".join(map(str, parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


# --- what torch says, and what ours puts together ------------------------------------------------


class Returns(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(4, 3)

    def forward(self, *inputs: object, **named: object) -> object:
        return self.function(self, *inputs, **named)


class Own:
    """A class that nobody knows."""

    def __init__(self, tensor: Tensor | None = None) -> None:
        self.tensor = tensor


def write(net: Returns, x: Tensor, shared: Own) -> Tensor:
    shared.tensor = x
    return x


def index() -> int:
    replica = dp.current_replica()
    assert replica is not None
    return replica.index


def recomputed(net: Returns, x: Tensor) -> object:
    def part(part_x: Tensor) -> Tensor:
        return collectives.all_reduce(part_x, "sum", "local")

    return checkpoint(part, x.requires_grad_(), use_reentrant=False)


def scripted() -> nn.Module:
    with pytest.warns((DeprecationWarning, FutureWarning), match="is deprecated"):
        script: nn.Module = torch.jit.script(nn.Linear(4, 3))
    return script


def on_cpu(net: nn.Module) -> Any:
    return dp.DataParallel(net, ["cpu", "cpu"])


def on_virtual(net: nn.Module) -> Any:
    return dp.DataParallel(net, ["virtual:0", "virtual:1"])


RAISED: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "Default process group has not been initialized": lambda net, x: DistributedSampler([0]),  # type: ignore[arg-type]
    "Attempted to use an uninitialized parameter": lambda net, x: on_cpu(nn.LazyLinear(3))(x),
    "cannot replicate ... (RecursiveScriptModule)": lambda net, x: on_cpu(scripted())(x),
    "Expected all tensors to be on the same device": lambda net, x: nn.functional.mse_loss(
        on_virtual(net)(x), x[:, :3]
    ),
    "which is no container that can be split, but it holds a tensor": lambda net, x: on_cpu(
        Returns(lambda net, x, shared: x)
    )(x, Own(x)),
    "but the replicas have written tensors into it": lambda net, x: on_cpu(Returns(write))(
        x, Own()
    ),
    "grad can be implicitly created only for scalar outputs": lambda net, x: on_cpu(
        Returns(lambda net, x: net.layer(x).sum())
    )(x).backward(),
    "Expected more than 1 value per channel when training": lambda net, x: on_cpu(
        nn.BatchNorm1d(4)
    )(x[:2]),
    "Missing key(s) in state_dict": lambda net, x: net.load_state_dict(
        nn.DataParallel(net).state_dict()
    ),
    "device_ids is a list with one entry per replica": lambda net, x: dp.DataParallel(net, 2),  # type: ignore[arg-type]
    "tensors that are split must agree on the batch size": lambda net, x: on_cpu(
        Returns(lambda net, x, mask: x)
    )(x, x[:5]),
    "the replicas return different containers": lambda net, x: on_cpu(
        Returns(lambda net, x: (x,) if index() else x)
    )(x),
    "... cannot be put together": lambda net, x: on_cpu(
        Returns(lambda net, x: x[:, : 2 + index()])
    )(x),
    "over replicas was called in a part of the module under activation checkpointing": (
        lambda net, x: on_cpu(Returns(recomputed))(x)
    ),
    "KeyError: 'virtual'": lambda net, x: on_virtual(torch.compile(net))(x),  # type: ignore[arg-type]
}
INTERFACE = "Unable to find address for"


def test_every_quoted_message_is_ours_or_raised_below() -> None:
    ours = "\n".join(text.replace("\n", " ") for text in texts())
    others = {message for message in quoted() if not re.search(pattern(message), ours)}
    assert others <= {*RAISED, INTERFACE}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("message", RAISED)
def test_a_message_is_raised(message: str) -> None:
    with pytest.raises(Exception, match=pattern(message)):
        RAISED[message](nn.Linear(4, 3), torch.randn(6, 4))


def test_an_interface_that_does_not_exist(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(RuntimeError, match=INTERFACE):
        torch.distributed.init_process_group(
            "gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store"
        )


@pytest.mark.usefixtures("no_accelerator")
def test_a_machine_without_accelerators(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dataparallel"):
        dp.DataParallel(nn.Linear(4, 3))
    assert caplog.messages[0].startswith("no accelerator was found: one replica on the CPU")
