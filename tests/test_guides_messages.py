"""Every message that the guide on troubleshooting quotes is raised, and some more."""

from __future__ import annotations

import logging
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from torch.utils.data.distributed import DistributedSampler

import dataparallel as dp
from dataparallel import collectives, virtual
from dataparallel.monitor.findings import Part, add_up, find_changes
from tests.cluster import Cluster
from tests.monitor.cases import Seconds, make_info, make_steps

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guides" / "troubleshooting.md"
CPUS = ["cpu", "cpu"]


def quoted() -> set[str]:
    """The messages in the first columns of the page's tables."""
    cells = re.findall(r"^\| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    codes = [code for cell in cells for code in re.findall(r"`([^`]*)`", cell)]
    return {code for code in codes if " " in code}


def pattern(message: str) -> str:
    return ".*".join(re.escape(part) for part in message.split("..."))


def x() -> Tensor:
    return torch.randn(6, 4)


class Returns(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(4, 3)

    def forward(self, *inputs: object, **named: object) -> object:
        return self.function(self, *inputs, **named)


def call(function: Callable[..., object], *inputs: object, **options: object) -> object:
    """What two replicas of a module with this forward make of some inputs."""
    wrapper: nn.Module = dp.DataParallel(Returns(function), CPUS, **options)  # type: ignore[arg-type]
    return wrapper(*inputs)


class Own:
    """A class that nobody knows."""

    def __init__(self, tensor: Tensor | None = None) -> None:
        self.tensor = tensor


def write(net: Returns, x: Tensor, shared: Own) -> Tensor:
    shared.tensor = x
    return x


def differ(net: Returns, x: Tensor) -> object:
    return (x,) if current() else x


def shapes(net: Returns, x: Tensor) -> Tensor:
    return torch.ones(len(x), 2 + current())


def current() -> int:
    replica = dp.current_replica()
    assert replica is not None
    return replica.index


def step_under_no_grad(net: Returns, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.layer.bias.add_(1)
    return x


def counted(net: Returns, x: Tensor, num_items_in_batch: int) -> Tensor:
    return x.mean()


def recomputed(net: Returns, x: Tensor) -> object:
    def part(part_x: Tensor) -> Tensor:
        return collectives.all_reduce(part_x, "sum", "local")

    return checkpoint(part, x.requires_grad_(), use_reentrant=False)


def late_group() -> None:
    model = dp.DistributedDataParallel(nn.Linear(4, 3), CPUS)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model(x())
    finally:
        dist.destroy_process_group()


def masked() -> None:
    attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    dp.DataParallel(attention, CPUS)(torch.randn(6, 5, 4), src_mask=torch.zeros(5, 5))


def fill_memory() -> None:
    virtual.set_memory_limit("virtual:1", 1000)
    try:
        dp.DataParallel(nn.Linear(4, 300), [0, 1])(x())
    finally:
        virtual.set_memory_limit("virtual:1", None)


def scripted() -> nn.Module:
    with pytest.warns((DeprecationWarning, FutureWarning), match="is deprecated"):
        script: nn.Module = torch.jit.script(nn.Linear(4, 3))
    return script


def of_virtual(net: nn.Module) -> nn.Module:
    return dp.DataParallel(net, ["virtual:0", "virtual:1"])


CASES: dict[str, Callable[[], object]] = {
    "this process is one of 2, but the wrapper has no group": late_group,
    "Default process group has not been initialized": lambda: DistributedSampler(range(4)),  # type: ignore[arg-type]
    "device_ids is a list with one entry per replica": lambda: dp.DataParallel(
        nn.Linear(4, 3),
        2,  # type: ignore[arg-type]
    ),
    "Attempted to use an uninitialized parameter": lambda: dp.DataParallel(nn.LazyLinear(3), CPUS)(
        x()
    ),
    "cannot replicate ... (RecursiveScriptModule)": lambda: dp.DataParallel(scripted(), CPUS)(x()),
    "Expected all tensors to be on the same device": lambda: nn.functional.cross_entropy(
        of_virtual(nn.Linear(4, 3))(x()), torch.zeros(6, dtype=torch.long)
    ),
    "tensors that are split must agree on the batch size": masked,
    "is a PackedSequence, which interleaves the samples and cannot be split": lambda: call(
        lambda net, packed: packed, nn.utils.rnn.pack_sequence([torch.randn(3, 4)] * 2)
    ),
    "which is no container that can be split, but it holds a tensor": lambda: call(
        lambda net, x, shared: x, x(), Own(x())
    ),
    "but the replicas have written tensors into it": lambda: call(write, x(), Own()),
    "grad can be implicitly created only for scalar outputs": lambda: torch.autograd.backward(
        call(lambda net, x: net.layer(x).sum(), x())  # type: ignore[arg-type]
    ),
    "the forward was given num_items_in_batch": lambda: dp.DataParallel(
        Returns(counted), CPUS, scalars="mean"
    )(x(), num_items_in_batch=6),
    "the replicas return different containers": lambda: call(differ, x()),
    "... cannot be put together": lambda: call(shapes, x()),
    "Expected more than 1 value per channel when training": lambda: dp.DataParallel(
        nn.BatchNorm1d(4), CPUS
    )(x()[:2]),
    "the forward changed parameters in place": lambda: call(step_under_no_grad, x()),
    "over replicas was called in a part of the module under activation checkpointing": lambda: call(
        recomputed, x()
    ),
    "In order to use an autograd.Function with functorch transforms": lambda: torch.func.vmap(
        dp.DataParallel(nn.Linear(4, 3), CPUS)
    )(x().unsqueeze(0)),
    "The stateless API can't be used with nn.DataParallel module": lambda: (
        torch.func.functional_call(dp.DataParallel(nn.Linear(4, 3), CPUS), {}, (x(),))
    ),
    "Missing key(s) in state_dict": lambda: nn.Linear(4, 3).load_state_dict(
        nn.DataParallel(nn.Linear(4, 3)).state_dict()
    ),
    "out of memory": fill_memory,
    "KeyError: 'virtual'": lambda: of_virtual(torch.compile(nn.Linear(4, 3)))(x()),  # type: ignore[arg-type]
}

LAUNCHED = "this process is one of 2, but the wrapper has no group"

#: Messages with a test of their own below.
BELOW = {
    LAUNCHED,
    "this machine has none",
    "no accelerator was found: one replica on the CPU",
    "there is no C++ compiler (c++, g++ or clang++) on the PATH",
    "would not be reduced over the processes",
    "rank 1 did not come",
    "Unable to find address for",
    "The step is small for",
}


def test_every_quoted_message_is_raised_somewhere() -> None:
    assert quoted() <= {*CASES, *BELOW}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("message", CASES)
def test_a_message_is_raised(message: str) -> None:
    with pytest.raises(Exception, match=pattern(message)):
        CASES[message]()


def test_a_launched_process_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=pattern(LAUNCHED)):
        dp.DistributedDataParallel(nn.Linear(4, 3), CPUS)


@pytest.mark.usefixtures("no_accelerator")
def test_a_machine_without_accelerators(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="this machine has none"):
        dp.DataParallel(nn.Linear(4, 3), [0])
    with caplog.at_level(logging.WARNING, "dataparallel"):
        dp.DataParallel(nn.Linear(4, 3))
    assert caplog.messages[0].startswith("no accelerator was found: one replica on the CPU")


def test_virtual_devices_without_a_compiler(tmp_path: pathlib.Path) -> None:
    program = "import dataparallel.virtual as virtual; virtual.enable(2)"
    without = {"PATH": str(tmp_path), "DATAPARALLEL_CACHE_DIR": str(tmp_path)}
    environment = {key: value for key, value in os.environ.items() if key != "CXX"}
    environment.pop("DATAPARALLEL_VIRTUAL_DEVICES", None)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | without,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "there is no C++ compiler (c++, g++ or clang++) on the PATH" in done.stderr


def test_a_rank_that_is_missing(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TimeoutError, match="rank 1 did not come"):
        dp.init_process_group(
            rank=0, world_size=2, init_method=f"file://{tmp_path}/store", timeout=0.5
        )


def connect_by_a_missing_interface(rank: int, world_size: int, place: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "no-such-interface"
    try:
        with pytest.raises(RuntimeError, match="Unable to find address for"):
            dp.init_process_group(rank=rank, world_size=world_size, init_method=place, timeout=20)
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def test_an_interface_that_does_not_exist(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    place = f"file://{tmp_path}/store"
    cluster.run(connect_by_a_missing_interface, 2, place, init_group=False)


def gradients_of_parameters(rank: int, world_size: int) -> None:
    model = dp.DistributedDataParallel(nn.Linear(4, 3), CPUS)
    with pytest.raises(RuntimeError, match="would not be reduced over the processes"):
        torch.autograd.grad(model(x()).sum(), list(model.parameters()))
    model.close()


def test_gradients_that_would_not_be_reduced(cluster: Cluster) -> None:
    cluster.run(gradients_of_parameters, 2)


def test_advice_for_a_small_step() -> None:
    seconds: Seconds = {"forward": 0.4, "backward": 0.6, "scatter": 0.6, "gather": 0.3, "idle": 1.5}
    info = make_info(2)
    steps = [Part.of(step) for step in make_steps(3, [seconds, seconds])]
    advice = find_changes(add_up(steps, info), info, None)[0]
    assert advice.text.startswith("The step is small for 2 replicas: ")
