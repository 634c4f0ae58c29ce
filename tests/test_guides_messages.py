"""Every message that the guide on troubleshooting quotes is in a source of ours, or raised."""

from __future__ import annotations

import ast
import logging
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data.distributed import DistributedSampler

import dataparallel as dp
from dataparallel import collectives
from tests.models import Calls

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guides" / "troubleshooting.md"


def quoted() -> set[str]:
    """Return the messages in the first columns of the page's tables."""
    cells = re.findall(r"^\| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    codes = [code for cell in cells for code in re.findall(r"`([^`]*)`", cell)]
    return {code for code in codes if " " in code}


def pattern(message: str) -> str:
    return ".*".join(re.escape(part) for part in re.split(r"\.\.\.|\d+", message))


def texts() -> Iterator[str]:
    """Yield the texts of our sources, with something in place of what they fill in."""
    for folder in ("dataparallel", "kernels", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
                    yield "...".join(map(str, parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


# --- what torch says, and what ours puts together ------------------------------------------------


def returns(function: Callable[..., object]) -> Calls:
    return Calls(function, layer=nn.Linear(4, 3))


class Own:
    """A class that nobody knows."""

    def __init__(self, tensor: Tensor | None = None) -> None:
        self.tensor = tensor


def write(net: Any, x: Tensor, shared: Own) -> Tensor:
    shared.tensor = x
    return x


def index() -> int:
    replica = dp.current_replica()
    assert replica is not None
    return replica.index


def recomputed(net: Any, x: Tensor) -> object:
    def part(part_x: Tensor) -> Tensor:
        return collectives.all_reduce(part_x, "sum", "local")

    return checkpoint(part, x.requires_grad_(), use_reentrant=False)


def scripted() -> nn.Module:
    with pytest.warns((DeprecationWarning, FutureWarning), match="is deprecated|is not supported"):
        script: nn.Module = torch.jit.script(nn.Linear(4, 3))
    return script


def on_cpu(net: nn.Module) -> Any:
    return dp.DataParallel(net, ["cpu", "cpu"])


def on_virtual(net: nn.Module) -> Any:
    return dp.DataParallel(net, ["virtual:0", "virtual:1"])


RAISED: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "Default process group has not been initialized": lambda net, x: DistributedSampler([0]),  # type: ignore[arg-type]
    "object is not subscriptable": lambda net, x: on_cpu(nn.Sequential(net))[0],
    "has no len()": lambda net, x: len(on_cpu(nn.Sequential(net))),
    "cannot replicate ... (RecursiveScriptModule)": lambda net, x: on_cpu(scripted())(x),
    "Expected all tensors to be on the same device": lambda net, x: nn.functional.mse_loss(
        on_virtual(net)(x), x[:, :3]
    ),
    "which is no container that can be split, but it holds a tensor": lambda net, x: on_cpu(
        returns(lambda net, x, shared: x)
    )(x, Own(x)),
    "but the replicas have written tensors into it": lambda net, x: on_cpu(returns(write))(
        x, Own()
    ),
    "grad can be implicitly created only for scalar outputs": lambda net, x: on_cpu(
        returns(lambda net, x: net.layer(x).sum())
    )(x).backward(),
    "Expected more than 1 value per channel when training": lambda net, x: on_cpu(
        nn.BatchNorm1d(4)
    )(x[:2]),
    "Missing key(s) in state_dict": lambda net, x: net.load_state_dict(
        nn.DataParallel(net).state_dict()
    ),
    "device_ids is a list with one entry per replica": lambda net, x: dp.DataParallel(net, 2),  # type: ignore[arg-type]
    "tensors that are split must agree on the batch size": lambda net, x: on_cpu(
        returns(lambda net, x, mask: x)
    )(x, x[:5]),
    "the replicas return different containers": lambda net, x: on_cpu(
        returns(lambda net, x: (x,) if index() else x)
    )(x),
    "... cannot be put together": lambda net, x: on_cpu(
        returns(lambda net, x: x[:, : 2 + index()])
    )(x),
    "over replicas was called in a part of the module under activation checkpointing": (
        lambda net, x: on_cpu(returns(recomputed))(x)
    ),
    "KeyError: 'virtual'": lambda net, x: on_virtual(torch.compile(net))(x),  # type: ignore[arg-type]
}
# Where Python takes the folder of the clone for the package.
CLONE = "module 'dataparallel' has no attribute"
INTERFACE = "Unable to find address for"


def test_every_quoted_message_is_ours_or_raised_below() -> None:
    ours = "\n".join(text.replace("\n", " ") for text in texts())
    others = {message for message in quoted() if not re.search(pattern(message), ours)}
    assert others <= {*RAISED, INTERFACE, CLONE}


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


def test_a_script_beside_the_clone(tmp_path: pathlib.Path) -> None:
    (tmp_path / "dataparallel" / "dataparallel").mkdir(parents=True)
    (tmp_path / "train.py").write_text("import dataparallel as dp\n\ndp.DataParallel\n")
    # -S as with an editable installation, whose finder comes after the script's folder.
    ran = subprocess.run(
        [sys.executable, "-S", "train.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert CLONE in ran.stderr


@pytest.mark.usefixtures("no_accelerator")
def test_a_machine_without_accelerators(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dataparallel"):
        dp.DataParallel(nn.Linear(4, 3))
    assert caplog.messages[0].startswith("no accelerator was found: one replica on the CPU")


# --- mistakes that no page quotes, since the error says what to do -------------------------------


class Distilled(nn.Module):
    """A module with a teacher that is no part of it."""

    def __init__(self, hide: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.student = nn.Linear(4, 3)
        self.student.__dict__["teacher"] = hide(nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        teacher: Any = self.student.teacher
        found = teacher[0](x) if isinstance(teacher, list) else teacher(x)
        output: Tensor = self.student(x) + found
        return output


def traced(model: nn.Module, x: Tensor) -> object:
    trace: Any = torch.jit.trace
    return trace(model, x)


FOLLOWED = (
    "was to be exported, traced or scripted, .* export the module, which has the weights: .module"
)
LEFT = (
    "these attributes hold tensors that are no parts of the module, so that no replica has its "
    "own: 'student.teacher' on cpu; register them as submodules"
)


@pytest.fixture(params=[dp.DataParallel, dp.DistributedDataParallel])
def wrapper(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_a_lazy_layer(wrapper: Any) -> None:
    net = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(affine=False))
    match = (
        r"uninitialized parameters or buffers, '0.weight', '0.bias', '1.running_mean' and 1 more"
    )
    with pytest.raises(ValueError, match=match):
        wrapper(net, ["cpu", "cpu"])(torch.randn(6, 4))
    net(torch.randn(6, 4))
    assert wrapper(net, ["cpu", "cpu"])(torch.randn(6, 4)).shape == (6, 3)


@pytest.mark.filterwarnings("ignore:`torch.jit.")
def test_a_wrapper_that_is_traced_scripted_or_exported(wrapper: Any) -> None:
    x = torch.randn(6, 4)
    for count in (1, 2):
        model = wrapper(nn.Linear(4, 3), ["cpu"] * count)
        with pytest.raises(RuntimeError, match=FOLLOWED):
            torch.export.export(model, (x,))
        with pytest.raises(RuntimeError, match=FOLLOWED):
            torch.jit.script(model)
        torch.testing.assert_close(torch.export.export(model.module, (x,)).module()(x), model(x))
    with pytest.raises(RuntimeError, match=FOLLOWED):
        traced(model, x)


@pytest.mark.parametrize(
    "hide",
    [lambda net: net, lambda net: [net], lambda net: lambda x: net(x), lambda net: net.forward],
    ids=["a module", "a list", "a function", "a method"],
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_teacher_that_is_no_part_of_the_module(
    wrapper: Any, hide: Callable[[nn.Module], Any], count: int
) -> None:
    model = wrapper(Distilled(hide), ["virtual:0", "virtual:1"][:count])
    with pytest.raises(RuntimeError, match="on the same device") as caught:
        model(torch.randn(6, 4))
    assert any(LEFT in note for note in vars(caught.value)["__notes__"])
    net = Distilled(hide)
    del net.student.teacher
    net.student.teacher = nn.Linear(4, 3)
    assert wrapper(net, ["virtual:0", "virtual:1"][:count])(torch.randn(6, 4)).shape == (6, 3)


def test_an_error_of_devices_that_no_attribute_explains() -> None:
    model = on_virtual(returns(lambda net, x: net.layer(x) + torch.ones(3)))
    with pytest.raises(RuntimeError, match="on the same device") as caught:
        model(torch.randn(6, 4))
    assert not any("these attributes" in note for note in vars(caught.value)["__notes__"])


def test_losses_that_come_as_a_vector(wrapper: Any, caplog: pytest.LogCaptureFixture) -> None:
    for options, told in (({}, 1), ({"scalars": "mean"}, 0)):
        model = wrapper(
            returns(lambda net, x: {"loss": net.layer(x).sum()}), ["cpu"] * 2, **options
        )
        caplog.clear()
        for _ in range(2):
            model(torch.randn(6, 4))
        found = [
            text for text in caplog.messages if "a vector with one element per replica" in text
        ]
        assert len(found) == told and all('scalars="mean"' in text for text in found)


def test_a_function_of_scalars_without_its_labels(wrapper: Any) -> None:
    net = returns(lambda net, x, labels=None: net.layer(x).sum())
    model = wrapper(net, ["cpu", "cpu"], scalars=lambda x, labels: len(labels))
    with pytest.raises(TypeError, match=r"argument: 'labels'\nin the function of scalars=, which"):
        model(torch.randn(6, 4))
