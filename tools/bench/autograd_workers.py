"""One of several processes that call each other, with our distributed autograd and with torch's."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.autograd
import torch.distributed.rpc as torch_rpc
from torch import Tensor

from dataparallel import distributed_autograd as ours
from dataparallel import torch_internals
from dataparallel.tools.bench.autograd_tasks import (
    FORMS,
    PARTS,
    AutogradTask,
    Case,
    Form,
    phase,
    plan_cases,
    repetitions,
    route,
)
from dataparallel.tools.bench.summary import largest

#: Seconds that one call, and the end of all workers, may take.
_TIMEOUT = 120.0
#: What a call multiplies by: exact in float32, and 64 of them leave its range alone.
_FACTOR = 1.125


@dataclass(frozen=True)
class _Engine:
    """The functions of one of the two, by the same names for both."""

    context: Callable[[], Any]
    rpc_sync: Callable[..., Any]
    backward: Callable[..., None]
    get_gradients: Callable[[int], dict[Tensor, Tensor]]


# Its stubs do not export all of its functions.
_theirs: Any = torch.distributed.autograd
_ENGINES: dict[Form, _Engine] = {
    "ours": _Engine(ours.context, ours.rpc_sync, ours.backward, ours.get_gradients),
    # unsafe-load: between processes that the benchmark has started
    "torch": _Engine(_theirs.context, torch_rpc.rpc_sync, _theirs.backward, _theirs.get_gradients),
}

_served: Counter[Form] = Counter()
_serving = threading.Lock()


def multiply(x: Tensor, form: Form, rest: list[int]) -> Tensor:
    """What a worker does when it is called.

    Args:
        x: What to multiply.
        form: Who called, and how the next one is called.
        rest: The ranks through which the product goes on before it returns.
    """
    with _serving:
        _served[form] += 1
    product = x * _FACTOR
    return _call(form, rest[0], product, rest[1:]) if rest else product


def _call(form: Form, rank: int, x: Tensor, rest: list[int]) -> Tensor:
    y: Tensor = _ENGINES[form].rpc_sync(f"worker{rank}", multiply, args=(x, form, rest))
    return y


def _settle() -> None:
    """Nothing: an answer shows that what was sent before has been served."""


class Workers:
    """One of the workers. The first one directs; the others serve its calls.

    Args:
        task: What to measure.
    """

    def __init__(self, task: AutogradTask) -> None:
        self.task = task
        self.cases = plan_cases(task)
        self.made: Counter[Form] = Counter()
        torch.set_num_threads(task.threads)
        options: dict[str, Any] = {}
        if task.transport != "default":
            options = torch_internals.rpc_transport(task.transport)
        # unsafe-load: between processes that the benchmark has started
        torch_rpc.init_rpc(  # type: ignore[no-untyped-call]
            f"worker{task.rank}",
            rank=task.rank,
            world_size=task.world_size,
            rpc_backend_options=torch_rpc.TensorPipeRpcBackendOptions(
                init_method=f"file://{task.meeting_point}", rpc_timeout=_TIMEOUT, **options
            ),
        )
        # Loads the extension, which may have to be compiled, before anybody waits for a call.
        ours.debug_info()

    def check(self, steps: int) -> dict[str, Any]:
        """Go through each case some times, and look at every element of the gradients.

        Returns:
            By form and case, the largest error of an element; nothing from those that serve.
        """
        errors: dict[str, float] = {}
        if self.task.rank == 0:
            for case in self.cases:
                expected = _expected_gradient(case)
                for form in FORMS:
                    found = [self._error(form, case, expected) for _ in range(steps)]
                    errors[phase(form, "backward", case.name)] = largest(found)
        return {"errors": errors}

    def _error(self, form: Form, case: Case, expected: Tensor) -> float:
        x = torch.ones(case.elements, requires_grad=True)
        gradients = self._repeat(form, case, x, {})
        found = gradients.get(x)
        if found is None or found.shape != x.shape or x.grad is not None or len(gradients) > 1:
            return math.inf
        return (found - expected).abs().max().item()

    def run(self, steps: int) -> dict[str, list[float]]:
        """Repeat; ours and torch's take turns.

        Args:
            steps: Of the longest chain; see :func:`repetitions`.

        Returns:
            By phase, seconds of each repetition; zeros from those that serve.
        """
        seconds: dict[str, list[float]] = {}
        for case in self.cases:
            times = repetitions(case, self.cases, steps)
            if self.task.rank == 0:
                seconds |= self._take_turns(case, times)
            else:
                seconds |= dict.fromkeys(_phases(case), [0.0] * times)
        return seconds

    def _take_turns(self, case: Case, times: int) -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {key: [] for key in _phases(case)}
        order = list(FORMS)
        for _ in range(times):
            for form in order:
                self._repeat(form, case, torch.ones(case.elements, requires_grad=True), seconds)
            # Nobody is always the one who comes after the other.
            order.reverse()
        return seconds

    def _repeat(
        self, form: Form, case: Case, x: Tensor, seconds: dict[str, list[float]]
    ) -> dict[Tensor, Tensor]:
        engine = _ENGINES[form]
        weights = _weights(case)
        ranks = route(case, self.task.world_size)
        self.made[form] += case.calls
        with engine.context() as context_id:
            begin = time.perf_counter()
            y = x
            if case.nested:
                y = _call(form, ranks[0], y, ranks[1:])
            else:
                for rank in ranks:
                    y = _call(form, rank, y, [])
            end = time.perf_counter()
            seconds.setdefault(phase(form, "forward", case.name), []).append(end - begin)
            # The gradient of a sum would travel as one number that stands for all.
            loss = torch.dot(y, weights)
            begin = time.perf_counter()
            engine.backward(context_id, [loss])
            end = time.perf_counter()
            seconds.setdefault(phase(form, "backward", case.name), []).append(end - begin)
            gradients = engine.get_gradients(context_id)
        # The messages that end a context must not become a part of the other's time.
        for rank in range(1, self.task.world_size):
            # unsafe-load: between processes that the benchmark has started
            torch_rpc.rpc_sync(f"worker{rank}", _settle)
        return gradients

    def finish(self) -> dict[str, Any]:
        """Check once more, and leave the other workers when all are done.

        Returns:
            What :meth:`check` returns, and the numbers of calls made and served, by form.
        """
        answer = self.check(1)
        torch_rpc.shutdown(graceful=True, timeout=_TIMEOUT)
        with _serving:
            counts = {form: _served[form] for form in FORMS}
        return {**answer, "made": {form: self.made[form] for form in FORMS}, "served": counts}


def _phases(case: Case) -> list[str]:
    return [phase(form, part, case.name) for form in FORMS for part in PARTS]


def _weights(case: Case) -> Tensor:
    # All elements differ, so that none can stand for another.
    return torch.arange(1.0, case.elements + 1.0)


def _expected_gradient(case: Case) -> Tensor:
    """The same products in one process, with ordinary autograd."""
    x = torch.ones(case.elements, requires_grad=True)
    y = x
    for _ in range(case.calls):
        y = y * _FACTOR
    (gradient,) = torch.autograd.grad(torch.dot(y, _weights(case)), x)
    return gradient
