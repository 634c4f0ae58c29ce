"""State that torch keeps once for the process: replicas change it in turn, and set it back.

Replicas meet by chance in the middle of such changes. Here they wait there for each other, for no
longer than ``_WAIT``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel, DistributedDataParallel, current_replica
from dataparallel.collectives import functional
from dataparallel.threads import exclusive
from tests.models import Calls, compare, grads_of, twins

# Before any wrapper was used.
enter_dual_level, exit_dual_level = forward_ad.enter_dual_level, forward_ad.exit_dual_level
cached = parametrize.cached

_WAIT = 0.3
WRAPPERS = (DataParallel, DistributedDataParallel)
KINDS = (["cpu"] * 3, ["virtual:0", "virtual:1", "virtual:2"])
both = pytest.mark.parametrize("wrapper", WRAPPERS)
everywhere = pytest.mark.parametrize("devices", KINDS, ids=("cpu", "virtual"))


@pytest.fixture(autouse=True)
def _nothing_is_held() -> Iterator[None]:
    yield
    assert exclusive.lock._owner is None


@pytest.fixture
def short_turns() -> Iterator[None]:
    """Threads hand over the interpreter as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


class Meeting:
    """Has replica 0 enter a block first, and leave it while replica 1 is within, if it may be."""

    def __init__(self) -> None:
        self._tries, self._came, self._left = (threading.Event() for _ in range(3))

    def index(self) -> int:
        replica = current_replica()
        assert replica is not None
        return replica.index

    def before(self) -> None:
        if self.index() == 0:
            self._tries.set()
        else:
            assert self._tries.wait(20.0)
            # Replica 0 enters; with a lock it cannot yet.
            time.sleep(0.05)

    def within(self) -> None:
        if self.index() == 0:
            self._came.wait(_WAIT)
        else:
            self._came.set()
            self._left.wait(_WAIT)

    def after(self) -> None:
        if self.index() == 0:
            self._left.set()


# --- derivatives of forward mode -------------------------------------------------------------

Function = Callable[[Tensor], Any]


def of_dual_level(function: Function, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = function(forward_ad.make_dual(x, torch.ones_like(x)))
        tangent = forward_ad.unpack_dual(dual).tangent
    return x.new_zeros(()) if tangent is None else tangent


def of_names(function: Function, x: Tensor) -> Tensor:
    enter_dual_level()
    try:
        dual = function(forward_ad.make_dual(x, torch.ones_like(x)))
        tangent = forward_ad.unpack_dual(dual).tangent
    finally:
        exit_dual_level()
    return x.new_zeros(()) if tangent is None else tangent


def of_jvp(function: Function, x: Tensor) -> Any:
    return sum(torch.func.jvp(function, (x,), (torch.ones_like(x),)))


def of_jacfwd(function: Function, x: Tensor) -> Any:
    return torch.func.vmap(torch.func.jacfwd(function))(x).sum(2)


def of_hessian(function: Function, x: Tensor) -> Any:
    def scalar(row: Tensor) -> Any:
        return function(row).sum()

    return torch.func.vmap(torch.func.hessian(scalar))(x).sum(2)


DERIVATIVES = (of_dual_level, of_names, of_jvp, of_jacfwd, of_hessian)
derivatives = pytest.mark.parametrize("derivative", DERIVATIVES)


class Derived(nn.Module):
    def __init__(self, derivative: Callable[[Function, Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.derivative = derivative
        self.meeting: Meeting | None = None

    def inner(self, x: Tensor) -> Tensor:
        if self.meeting is not None:
            self.meeting.within()
        return torch.tanh(self.layer(x))

    def forward(self, x: Tensor) -> Any:
        if self.meeting is None:
            return self.derivative(self.inner, x)
        self.meeting.before()
        result = self.derivative(self.inner, x)
        self.meeting.after()
        return result


@pytest.mark.in_pairs
@both
@everywhere
@derivatives
def test_derivatives_in_forward_are_those_of_the_bare_module(
    wrapper: Any, devices: list[str], derivative: Any, short_turns: None
) -> None:
    net, bare = twins(lambda: Derived(derivative), devices[0])
    model = wrapper(net, devices)
    for _ in range(4):
        compare(model, bare, torch.randn(9, 4, dtype=torch.double, device=devices[0]))


@derivatives
def test_replicas_that_would_meet_within_a_level_do_not(derivative: Any) -> None:
    net, bare = twins(lambda: Derived(derivative), "cpu")
    x = torch.randn(8, 4, dtype=torch.double)
    expected = bare(x)
    net.meeting = Meeting()  # type: ignore[assignment]
    torch.testing.assert_close(DataParallel(net, ["cpu"] * 2)(x), expected)


class Again(Derived):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


@both
@everywhere
def test_derivatives_that_a_checkpoint_computes_again(
    wrapper: Any, devices: list[str], short_turns: None
) -> None:
    net, bare = twins(lambda: Again(of_dual_level), devices[0])
    model = wrapper(net, devices)
    for _ in range(3):
        compare(model, bare, torch.randn(9, 4, dtype=torch.double, device=devices[0]))


def test_several_threads_that_call_wrappers_share_the_level(short_turns: None) -> None:
    net, bare = twins(lambda: Derived(of_jvp), "cpu")
    models = [DataParallel(net, ["cpu"] * 2) for _ in range(3)]
    x = torch.randn(8, 4, dtype=torch.double)
    expected = bare(x)
    results: list[Tensor] = []

    def call(model: nn.Module) -> None:
        results.extend(model(x) for _ in range(5))

    threads = [threading.Thread(target=call, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 15
    for result in results:
        torch.testing.assert_close(result, expected)


# --- flags -----------------------------------------------------------------------------------


@contextlib.contextmanager
def as_default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def assigned() -> Iterator[None]:
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextlib.contextmanager
def without_fast_path() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def priorities() -> Any:
    return torch._C._get_sdp_priority_order()


Flag = tuple[Callable[[], AbstractContextManager[Any]], Callable[[], Any]]
IN_ORDER = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
FLAGS: dict[str, Flag] = {
    "sdpa": (lambda: sdpa_kernel(SDPBackend.MATH), torch.backends.cuda.flash_sdp_enabled),
    "sdpa_order": (lambda: sdpa_kernel(IN_ORDER, set_priority=True), priorities),
    "dtype": (lambda: as_default(torch.double), torch.get_default_dtype),
    "deterministic": (deterministic, torch.are_deterministic_algorithms_enabled),
    "anomaly": (torch.autograd.detect_anomaly, torch.is_anomaly_enabled),
    "cudnn": (
        lambda: torch.backends.cudnn.flags(enabled=False, benchmark=True),
        lambda: (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark),
    ),
    "mkldnn": (
        lambda: torch.backends.mkldnn.flags(enabled=False),
        lambda: torch.backends.mkldnn.enabled,
    ),
    "assigned": (assigned, lambda: torch.backends.cudnn.benchmark),
    "fast_path": (without_fast_path, torch.backends.mha.get_fastpath_enabled),
}
flags = pytest.mark.parametrize("flag", FLAGS.values(), ids=FLAGS)


class Flagged(nn.Module):
    """Sees a flag outside and inside of a block that changes it; replica 2 has no block."""

    def __init__(self, flag: Flag) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.block, self.read = flag
        self.meeting = Meeting()
        # All replicas have this one; a list each would have for itself.
        self.seen: deque[Any] = deque([None] * 3)

    def forward(self, x: Tensor) -> Tensor:
        self.meeting.before()
        seen, index = [self.read()], self.meeting.index()
        if index < 2:
            with self.block():
                self.meeting.within()
                seen.append(self.read())
                x = self.layer(x)
            self.meeting.after()
        seen.append(self.read())
        self.seen[index] = seen
        return x


@flags
@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:TF32 acceleration")
def test_a_flag_holds_where_it_is_set_and_nowhere_else(flag: Flag) -> None:
    block, read = flag
    before = read()
    with block():
        changed = read()
    assert changed != before
    net = Flagged(flag)
    DataParallel(net, ["cpu"] * 3)(torch.randn(6, 4)).sum().backward()
    assert list(net.seen) == [
        [before, changed, before],
        [before, changed, before],
        [before, before],
    ]
    assert read() == before


def fail_in_replica_1(net: Any, x: Tensor) -> Any:
    with sdpa_kernel(SDPBackend.MATH):
        replica = current_replica()
        if replica is not None and replica.index == 1:
            net.fail()
        return net.layer(x)


def give_up() -> None:
    raise ValueError("of no use")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100):
        time.sleep(0.1)


@pytest.mark.parametrize(("fail", "kind"), [(give_up, ValueError), (interrupt, KeyboardInterrupt)])
def test_a_replica_that_fails_lets_others_go_on(fail: Any, kind: type[BaseException]) -> None:
    net = Calls(fail_in_replica_1, layer=nn.Linear(4, 4), fail=fail)
    model, x = DataParallel(net, ["cpu"] * 3), torch.randn(6, 4)
    with pytest.raises(kind, match=None if fail is interrupt else "of no use"):
        model(x)
    assert torch.backends.cuda.flash_sdp_enabled()
    vars(net)["fail"] = list
    torch.testing.assert_close(model(x), net(x))


def set_a_flag(net: Any, x: Tensor) -> Any:
    torch.use_deterministic_algorithms(True)
    return net.layer(x)


def test_what_a_replica_does_not_set_back_stays() -> None:
    net = Calls(set_a_flag, layer=nn.Linear(4, 4))
    model, x = DataParallel(net, ["cpu"] * 3), torch.randn(6, 4)
    try:
        for _ in range(3):
            model(x)
            assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def add_up(net: Any, x: Tensor) -> Any:
    with sdpa_kernel(SDPBackend.MATH):
        return functional.all_reduce(net.layer(x), "sum", "local")


def test_a_replica_cannot_wait_for_others_that_wait_for_it() -> None:
    model = DataParallel(Calls(add_up, layer=nn.Linear(4, 4)), ["cpu"] * 2)
    text = r"(?s)needs the other replicas, but this one has changed .*sdpa_kernel.*in replica"
    with pytest.raises(RuntimeError, match=text):
        model(torch.randn(4, 4))


def wrap_again(net: Any, x: Tensor) -> Any:
    """Call a wrapper of its own, in which replicas change the same flag."""
    inner = DataParallel(Derived(of_jvp).double(), ["cpu"] * 2)
    inner.module.layer = net.inner
    with sdpa_kernel(SDPBackend.MATH):
        within = inner(x)
    return within + inner(x)


def test_wrappers_in_replicas(short_turns: None) -> None:
    torch.manual_seed(1)
    net = Calls(wrap_again, inner=nn.Linear(4, 4)).double()
    x = torch.randn(8, 4, dtype=torch.double)
    expected = net(x)
    torch.testing.assert_close(DataParallel(net, ["cpu"] * 2)(x), expected)


def attend(net: Any, x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        query = net.layer(x)[:, None, None]
        attended: Tensor = nn.functional.scaled_dot_product_attention(query, query, query)
        return attended


def attend_again(net: Any, x: Tensor) -> Any:
    """Run a block again in backward, which changes the switches of attention."""
    return checkpoint(attend, net, x, use_reentrant=False)


@both
@everywhere
def test_flags_that_a_checkpoint_sets_again(
    wrapper: Any, devices: list[str], short_turns: None
) -> None:
    net, bare = twins(lambda: Calls(attend_again, layer=nn.Linear(4, 4)), devices[0])
    model = wrapper(net, devices)
    for _ in range(5):
        compare(model, bare, torch.randn(9, 4, dtype=torch.double, device=devices[0]))
        assert torch.backends.cuda.flash_sdp_enabled()


# --- parametrizations ------------------------------------------------------------------------


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: deque[torch.device] = deque()

    def forward(self, weight: Tensor) -> Tensor:
        self.calls.append(weight.device)
        return torch.tanh(weight)


class Recurrent(nn.Module):
    """Uses a weight several times, within ``cached()`` and outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.counted = Counted()
        parametrize.register_parametrization(self.layer, "weight", self.counted)
        self.meeting: Meeting | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.meeting is not None:
            self.meeting.before()
        with cached():
            x = self.layer(x)
            if self.meeting is not None:
                self.meeting.within()
            for _ in range(3):
                x = torch.tanh(self.layer(x))
        return x


@both
@everywhere
def test_each_replica_keeps_its_own_parametrized_weights(
    wrapper: Any, devices: list[str], short_turns: None
) -> None:
    net, bare = twins(Recurrent, devices[0])
    model = wrapper(net, devices)
    for _ in range(5):
        net.counted.calls.clear()  # type: ignore[operator, union-attr]
        compare(model, bare, torch.randn(9, 4, dtype=torch.double, device=devices[0]))
        assert sorted(map(str, net.counted.calls)) == devices  # type: ignore[arg-type, union-attr]


@both
def test_replicas_that_meet_within_cached(wrapper: Any) -> None:
    devices = ["virtual:0", "virtual:1"]
    net, bare = twins(Recurrent, devices[0])
    x = torch.randn(4, 4, dtype=torch.double, device=devices[0])
    expected = bare(x)
    net.meeting = Meeting()  # type: ignore[assignment]
    torch.testing.assert_close(wrapper(net, devices)(x), expected)


@pytest.mark.parametrize("devices", [["cpu"], *KINDS], ids=("one", "cpu", "virtual"))
def test_cached_around_two_forwards_of_a_wrapper(devices: list[str]) -> None:
    net, bare = twins(Recurrent, devices[0])
    model = DistributedDataParallel(net, devices, nonfinite="raise")
    x = torch.randn(9, 4, dtype=torch.double, device=devices[0])
    for each in (bare, model):
        for _ in range(2):
            with cached():
                (each(x).sum() + each(-x).pow(2).sum()).backward()
    for got, expected in zip(grads_of(net), grads_of(bare), strict=True):
        torch.testing.assert_close(got, expected)
    # Torch's own way of leaving.
    assert not parametrize._cache_enabled
