"""Processes that call each other, with our distributed autograd and with torch's."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.distributed.autograd
import torch.distributed.rpc as torch_rpc
from torch import Tensor

from dataparallel import distributed_autograd as ours
from dataparallel import torch_internals

Form = Literal["ours", "torch"]
Part = Literal["forward", "backward"]

#: Seconds that one call, and the end of all workers, may take.
_TIMEOUT = 120.0
#: What a call multiplies by: exact in float32, and 64 of them leave its range alone.
_FACTOR = 1.125


@dataclass(frozen=True)
class Chain:
    """Calls of the other workers in turn, each with what the last one returned."""

    calls: int
    elements: int

    @property
    def name(self) -> str:
        """What is shown."""
        kib = self.elements // 256
        return f"{self.calls} x {kib} KiB" if kib else f"{self.calls} calls"


@dataclass(frozen=True)
class Setting:
    """What is measured, and how often; the longest chain has so many repetitions."""

    chains: tuple[Chain, ...]
    rounds: int
    repetitions: int
    transport: str


@dataclass
class Measured:
    """Seconds of one chain, by form and part: for each round the median of its repetitions."""

    chain: Chain
    right: bool = True
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def note(self, right: bool) -> None:
        """Remember whether a gradient was right."""
        self.right &= right

    def ratios(self, part: Part) -> list[float]:
        """Ours / torch's, round by round: what slows a whole round cancels."""
        pairs = zip(self.seconds[f"ours {part}"], self.seconds[f"torch {part}"], strict=True)
        return [mine / theirs for mine, theirs in pairs]


@dataclass(frozen=True)
class Engine:
    """The functions of one of the two, by the same names for both."""

    context: Callable[[], Any]
    rpc_sync: Callable[..., Any]
    backward: Callable[..., None]
    get_gradients: Callable[[int], dict[Tensor, Tensor]]


# Its stubs do not export all of its functions.
_theirs: Any = torch.distributed.autograd
ENGINES: dict[Form, Engine] = {
    "ours": Engine(ours.context, ours.rpc_sync, ours.backward, ours.get_gradients),
    # Between processes that the benchmark has started.
    "torch": Engine(_theirs.context, torch_rpc.rpc_sync, _theirs.backward, _theirs.get_gradients),
}


def work(
    rank: int, world_size: int, meeting: str, setting: Setting, answer: Connection | None
) -> None:
    """Be one of the workers; the first one measures, and the others serve its calls."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {}
    if setting.transport != "default":
        options = torch_internals.rpc_transport(setting.transport)
    # Between processes that the benchmark has started.
    torch_rpc.init_rpc(  # type: ignore[no-untyped-call]
        f"worker{rank}",
        rank=rank,
        world_size=world_size,
        rpc_backend_options=torch_rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{meeting}", rpc_timeout=_TIMEOUT, **options
        ),
    )
    # Loads the extension, which may have to be compiled, before anybody waits for a call.
    ours.debug_info()
    if answer is not None:
        found = [Measured(chain) for chain in setting.chains]
        longest = max(chain.calls for chain in setting.chains)
        for number in range(-1, setting.rounds):
            for each in found:
                times = min(50, setting.repetitions * max(1, longest // (4 * each.chain.calls)))
                take_turns(each, world_size, times if number >= 0 else 2, keep=number >= 0)
        answer.send_bytes(json.dumps([dataclasses.asdict(each) for each in found]).encode())
    torch_rpc.shutdown(graceful=True, timeout=_TIMEOUT)


def take_turns(measured: Measured, world_size: int, times: int, keep: bool) -> None:
    """One round of a chain: ours and torch's in turn, and nobody always second.

    Args:
        measured: Of the chain; gets the medians, and whether all gradients were right.
        world_size: How many workers there are.
        times: Repetitions.
        keep: Whether the times count: not those of the first calls.
    """
    forms: list[Form] = ["ours", "torch"]
    seconds: dict[str, list[float]] = {}
    for _ in range(times):
        for form in forms:
            measured.note(_run_once(form, measured.chain, world_size, seconds))
        forms.reverse()
    for key, own in seconds.items() if keep else ():
        measured.seconds.setdefault(key, []).append(statistics.median(own))


def _run_once(form: Form, chain: Chain, world_size: int, seconds: dict[str, list[float]]) -> bool:
    """Whether the gradient is right, and the only one."""
    engine = ENGINES[form]
    x = torch.ones(chain.elements, requires_grad=True)
    # All elements differ, so that none can stand for another.
    weights = torch.arange(1.0, chain.elements + 1.0)
    with engine.context() as context_id:
        begin = time.perf_counter()
        y = x
        for index in range(chain.calls):
            y = engine.rpc_sync(f"worker{1 + index % (world_size - 1)}", torch.mul, (y, _FACTOR))
        middle = time.perf_counter()
        # The gradient of a sum would travel as one number that stands for all.
        loss = torch.dot(y, weights)
        start = time.perf_counter()
        engine.backward(context_id, [loss])
        end = time.perf_counter()
        gradients = engine.get_gradients(context_id)
    seconds.setdefault(f"{form} forward", []).append((middle - begin) / chain.calls)
    seconds.setdefault(f"{form} backward", []).append(end - start)
    # The messages that end a context must not become a part of the other's time.
    for rank in range(1, world_size):
        # Between processes that the benchmark has started.
        torch_rpc.rpc_sync(f"worker{rank}", int)
    expected = weights * _FACTOR**chain.calls
    found = gradients.get(x)
    return len(gradients) == 1 and found is not None and torch.allclose(found, expected)
