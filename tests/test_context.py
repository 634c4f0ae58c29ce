"""Every thread-local setting of the caller holds in the replicas, and only during the call.

Only activation checkpoints around a wrapper hold in the caller alone.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import BaseTorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dataparallel import DataParallel, torch_internals
from dataparallel.threads.apply import apply_replicas, parallel_apply
from dataparallel.threads.workers import WorkerPools
from tests.models import WRAPPERS, assert_all_close, compare, grads_of, twins

CPU = torch.device("cpu")
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="default")
# Torch declares what it keeps to itself in one release and not in another.
untyped: Any = torch._C


@contextlib.contextmanager
def switched(on: Callable[[], object], off: Callable[[], object]) -> Iterator[None]:
    on()
    yield
    off()


def autocast_seen() -> Any:
    product = torch.ones(2, 2) @ torch.ones(2, 2)
    kinds = ("cpu", "cuda")
    return (
        product.dtype,
        [torch.is_autocast_enabled(kind) for kind in kinds],
        [torch.get_autocast_dtype(kind) for kind in kinds],
        torch.is_autocast_cache_enabled(),
    )


def modes_seen() -> Any:
    return (
        [type(mode).__name__ for mode in torch_internals.function_modes()],
        [type(mode).__name__ for mode in torch_internals.dispatch_modes()],
    )


def identity(x: Tensor) -> Tensor:
    return x


Setting = tuple[Callable[[], AbstractContextManager[Any]], Callable[[], Any]]

SETTINGS: dict[str, Setting] = {
    "no_grad": (torch.no_grad, torch.is_grad_enabled),
    "inference_mode": (torch.inference_mode, torch.is_inference_mode_enabled),
    "inference_then_grad": (
        lambda: torch.inference_mode(True),
        lambda: (torch.ones(1) + 1).is_inference(),
    ),
    "forward_ad_off": (
        lambda: torch.autograd.forward_ad._set_fwd_grad_enabled(False),
        torch._C._is_fwd_grad_enabled,
    ),
    "bfloat16": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), autocast_seen),
    "uncached": (
        lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
        autocast_seen,
    ),
    "with_device": (lambda: torch.device("meta"), lambda: torch.ones(1).device),
    "set_default_device": (
        lambda: switched(
            lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)
        ),
        lambda: torch.ones(1).device,
    ),
    "saved_tensor_hooks": (
        lambda: torch.autograd.graph.saved_tensors_hooks(identity, identity),
        lambda: torch_internals.top_saved_tensors_hooks(True),
    ),
    "hooks_disabled": (
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        torch_internals.saved_tensors_hooks_refusal,
    ),
    "single_threaded_backward": (
        lambda: torch.autograd.set_multithreading_enabled(False),
        torch._C._is_multithreading_enabled,
    ),
    "view_replay": (
        lambda: torch.autograd.grad_mode._force_original_view_tracking(True),
        torch._C._is_view_replay_enabled,
    ),
    "contextvar": (
        lambda: switched(lambda: variable.set("caller"), lambda: variable.set("default")),
        variable.get,
    ),
    "dispatch_mode": (BaseTorchDispatchMode, modes_seen),
    "function_mode": (BaseTorchFunctionMode, modes_seen),
    "function_disabled": (
        torch._C.DisableTorchFunction,
        lambda: int(untyped._get_torch_function_state()),
    ),
    "flush_denormal": (
        lambda: switched(
            lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)
        ),
        lambda: (torch.full((1,), 1e-310, dtype=torch.float64) * 1).item(),
    ),
    "anomaly": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_the_caller_holds_in_every_replica_and_not_after(name: str) -> None:
    setting, seen = SETTINGS[name]
    before = seen()
    with setting():
        expected = seen()
        during = apply_replicas([seen] * 3, [CPU] * 3)
    assert expected != before, "the setting changes nothing, so the test would show nothing"
    assert during == [expected] * 3
    assert apply_replicas([seen] * 3, [CPU] * 3) == [before] * 3


def test_a_setting_left_on_by_a_replica_is_gone_at_the_next_call() -> None:
    def leak() -> str:
        seen = variable.get()
        variable.set("changed")
        torch._C._set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        return seen

    for _ in range(2):
        assert apply_replicas([leak] * 2, [CPU] * 2) == ["default"] * 2
    seen = apply_replicas([lambda: (torch.is_grad_enabled(), autocast_seen())] * 2, [CPU] * 2)
    assert seen == [(True, autocast_seen())] * 2
    assert torch.is_grad_enabled() and variable.get() == "default"


def test_a_thread_is_as_before_once_a_replica_has_ended() -> None:
    def here() -> tuple[Any, ...]:
        depth = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), depth

    pools = WorkerPools()
    with torch.no_grad(), torch.autocast("cpu"):
        assert apply_replicas([here] * 2, [CPU] * 2, pools) == [(False, True, 2)] * 2
    assert pools.run([here] * 2, str) == [(True, False, 1)] * 2
    pools.close()


def test_casts_of_autocast_live_as_long_as_the_block_of_the_caller() -> None:
    linear = nn.Linear(4, 4)
    x = torch.ones(1, 4)

    def block() -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear(x)

    def cast_of_weight() -> Any:
        return block().grad_fn.next_functions[2][0].next_functions[0][0]

    for value in (1.0, 2.0):
        with torch.no_grad():
            linear.weight.fill_(value)
            linear.bias.zero_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first = cast_of_weight()
            assert apply_replicas([block] * 2, [CPU] * 2)[1][0, 0].item() == 4 * value
            assert cast_of_weight() is first


def test_a_default_device_equal_to_the_first_device_follows_the_replica() -> None:
    devices = [torch.device(f"virtual:{i}") for i in range(3)]
    others = [devices[1]] * 3, [CPU] * 3
    for chosen, expected in zip(
        ("virtual:0", "virtual", "virtual:1", "cpu"), (devices, devices, *others), strict=True
    ):
        with torch.device(chosen):
            seen = apply_replicas([lambda: torch.ones(1).device] * 3, devices)
        assert seen == expected


def test_streams_of_the_caller_and_the_device_of_the_replica_are_current() -> None:
    devices = [torch.device(f"virtual:{i}") for i in (2, 0)]
    module = torch.get_device_module("virtual")
    streams = [torch.Stream(device) for device in devices]

    def current() -> Any:
        return module.current_device(), [module.current_stream(device) for device in devices]

    before, default = current()
    with streams[0], streams[1]:
        seen = apply_replicas([current] * 2, devices)
    assert seen == [(2, streams), (0, streams)]
    assert apply_replicas([current] * 2, devices) == [(2, default), (0, default)]
    assert module.current_device() == before


def test_replicas_run_in_the_calling_thread_under_transforms() -> None:
    def thread(x: Tensor) -> Tensor:
        assert threading.current_thread() is threading.main_thread()
        return x.sin()

    def pair(x: Tensor) -> Tensor:
        first, second = parallel_apply([thread, thread], [x, 2 * x])
        total: Tensor = (first + second).sum()
        return total

    x = torch.randn(5, 3)
    per_sample = torch.func.vmap(torch.func.grad(pair))(x)
    torch.testing.assert_close(per_sample, x.cos() + 2 * (2 * x).cos())


# --- activation checkpoints: their hooks are not carried --------------------------------------


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Sigmoid())


#: One that records the results of operations, by their order too; on devices copies are among them.
SELECTIVE = functools.partial(
    create_selective_checkpoint_contexts,
    [torch.ops.aten.mm.default, torch.ops.aten.addmm.default],
)
KINDS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": SELECTIVE},
}


VIRTUAL = [f"virtual:{i}" for i in range(3)]


@pytest.mark.parametrize("samples", [7, 1])
@pytest.mark.parametrize(
    ("kind", "slots"),
    [
        *((kind, ["cpu"] * 3) for kind in KINDS),
        *((kind, VIRTUAL) for kind in KINDS if kind != "selective"),
    ],
)
def test_checkpoint_around_the_wrapper(kind: str, slots: list[str], samples: int) -> None:
    """Replicas save at the same time, and a checkpoint tells saved tensors apart by their order.

    Layers of the caller around the wrapper are recomputed, and so the wrapper runs again too.
    """
    bare, inner = twins(layers, slots[0])
    model = DataParallel(inner, slots)
    around, between = twins(layers, slots[0])
    x = torch.randn(samples, 6, dtype=torch.double, device=slots[0], requires_grad=True)
    around(bare(around(x))).square().sum().backward()
    expected = [x.grad, *grads_of(bare), *grads_of(around)]
    for _ in range(6):
        for module in (model, between):
            module.zero_grad()
        x.grad = None
        call: Any = nn.Sequential(between, model, between)
        checkpoint(call, x, **KINDS[kind]).square().sum().backward()
        assert_all_close([x.grad, *grads_of(model), *grads_of(between)], expected)


def test_checkpoint_around_the_wrapper_keeps_what_the_replicas_save(slots: list[str]) -> None:
    calls: list[int] = []
    net = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid()).to(slots[0])
    net.register_forward_hook(lambda module, args, output: calls.append(len(output)))
    x = torch.randn(8, 3, device=slots[0], requires_grad=True)
    for reentrant, times in ((False, 4), (True, 8)):
        calls.clear()
        checkpoint(DataParallel(net, slots), x, use_reentrant=reentrant).sum().backward()
        assert calls == [2] * times


@WRAPPERS
@pytest.mark.parametrize("slots", [["cpu"] * 2, ["virtual:0", "virtual:1"]], ids=str)
def test_after_an_error_within_checkpoints(wrapper: Callable[..., Any], slots: list[str]) -> None:
    """torch's hooks stay in the thread that met the error until somebody leaves the checkpoint."""

    class Failing(nn.Linear):
        fails = True

        def body(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            if self.fails:
                raise ValueError("of the body")
            return torch.relu(y) * y

        def outer(self, x: Tensor) -> Any:
            try:
                return x + checkpoint(self.body, x, use_reentrant=False)
            except ValueError as error:
                raise KeyError("of the outer body") from error

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.outer, x, use_reentrant=False)

    net, bare = twins(lambda: Failing(3, 3), slots[0])
    model = wrapper(net, slots)
    x = torch.randn(4, 3, dtype=torch.double, device=slots[0])
    with pytest.raises(KeyError, match="of the outer body"):
        model(x)
    net.fails = bare.fails = False  # type: ignore[assignment]
    compare(model, bare, x)


def test_threads_of_the_callers_operations_end_before_replicas_run() -> None:
    """In a process of its own: other tests may have brought threads, or an OpenMP, of their own."""
    code = """
        import os, psutil, torch
        from dataparallel import DataParallel
        from dataparallel.threads.context import pauses
        torch.set_num_threads(2)
        cpu = torch.device("cpu")
        threads = lambda: {each.id for each in psutil.Process().threads()}
        model, x = DataParallel(torch.nn.Linear(3, 3), ["cpu"] * 2), torch.randn(4, 3)
        model(x)
        without = threads()
        torch.ones(1 << 20).exp_()
        spinning = threads() - without
        model(x)
        ends = bool(pauses((cpu, cpu), os.getpid()))
        assert bool(spinning - threads()) == ends, (ends, spinning)
        assert pauses((cpu,), os.getpid()) == pauses((cpu, cpu), -1) == []
        # Those that are told to be passive may stay.
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        pauses.cache_clear()
        assert pauses((cpu, cpu), os.getpid()) == []
    """
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    subprocess.run(command, check=True, timeout=100, env=environment)
