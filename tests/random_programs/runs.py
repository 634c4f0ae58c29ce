"""Runs a random program with a wrapper, and keeps what can be seen after each step."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import dataparallel as dp
from tests.random_programs.program import RATES, Program

Wrap = Callable[[nn.Module], nn.Module]

#: The values after a step, each by its name.
Seen = dict[str, Any]


@dataclass
class Run:
    """The results of a run: after each step that did not raise, and the error of the next one."""

    seen: list[Seen] = field(default_factory=list)
    error: str | None = None


class Twice(torch.autograd.Function):
    """A function of a user."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Broken(torch.autograd.Function):
    """A function whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("a backward that fails on purpose")


class Halved(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


@dataclass
class Pair:
    """An argument that is a dataclass."""

    x: Tensor
    factor: int


@dataclass
class Out:
    """An output that is one."""

    h: Tensor


class Averaged(nn.Module):
    """The work of a wrapper, in the plainest way.

    After each backward through an output whose forward was not in `no_sync`, changed gradients
    become the means over the ranks. These are the gradients that any rank has changed since the
    last such backward. Nothing changes after a backward that changes no gradient in any rank. Hooks
    after accumulation run in all ranks for a parameter that any rank has used.
    """

    def __init__(self, module: nn.Module, group: Any) -> None:
        super().__init__()
        self.module = module
        self._group = group
        self._syncs = self._due = True
        self._trained = [p for p in module.parameters() if p.requires_grad]
        # As they were after the last reduction, and before the backward that runs.
        self._reduced = self._before = self._states()
        self._queued = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._due:
            for buffer in self.module.buffers():
                dist.broadcast(buffer.data, 0, group=self._group)
        self._due = self._syncs and torch.is_grad_enabled()
        output = self.module(*args, **kwargs)
        if self._due:
            values = _parts(output)
            for tensor in values if isinstance(values, tuple) else (values,):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._queue)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def _queue(self, gradient: Tensor | None) -> None:
        if not self._queued:
            self._queued = True
            self._before = self._states()
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        self._queued = False
        counts = [_changes(before, self._states()) for before in (self._before, self._reduced)]
        anywhere = torch.tensor(counts)
        dist.all_reduce(anywhere, group=self._group)
        if not anywhere[0].any():
            return
        for parameter, changes in zip(self._trained, anywhere[1].tolist(), strict=True):
            if changes:
                total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                total = total.detach().clone()
                dist.all_reduce(total, group=self._group)
                total /= dist.get_world_size(self._group)
                if parameter.grad is None:
                    parameter.grad = total
                else:
                    parameter.grad.copy_(total)
        for parameter, here, there in zip(self._trained, counts[0], anywhere[0], strict=True):
            if there and not here:
                # It has a gradient now, of which the engine has not told.
                for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                    hook(parameter)
        self._reduced = self._states()

    def _states(self) -> list[tuple[Tensor | None, int]]:
        """Return the gradients, not their ids: another tensor might get one; and their versions."""
        grads = [parameter.grad for parameter in self._trained]
        return [(grad, 0 if grad is None else grad._version) for grad in grads]


def _changes(
    before: list[tuple[Tensor | None, int]], after: list[tuple[Tensor | None, int]]
) -> list[int]:
    """1 for each gradient that is there and has changed, else 0."""
    pairs = zip(before, after, strict=True)
    return [
        int(new[0] is not None and (new[0] is not old[0] or new[1] != old[1])) for old, new in pairs
    ]


def run(program: Program, wrap: Wrap, rank: int, device: str = "cpu") -> Run:
    """Run a program with the wrapper that ``wrap`` makes of its module."""
    result = Run()
    with warnings.catch_warnings():
        # Torch warns of checkpoints without gradients.
        warnings.simplefilter("ignore")
        try:
            state = _State(program, rank, device)
            state.begin(wrap)
            result.seen.append(state.see())
            for number, step in enumerate(program.steps):
                exec(compile(step, f"step {number}", "exec"), state.names)
                result.seen.append(state.see())
        except Exception as error:
            result.error = f"{type(error).__name__}: {error}"
    return result


class _State:
    """The names that a program uses, and what is seen of them."""

    def __init__(self, program: Program, rank: int, device: str) -> None:
        self._program = program
        self._rank = rank
        self._device = device
        self._counts: Counter[int] = Counter()
        self._recorded: list[Any] = []
        # The part of the current step that raises in this rank; "" for none.
        self._broken = ""
        self.names: dict[str, Any] = {
            "torch": torch,
            "nn": nn,
            "F": F,
            "attend": F.scaled_dot_product_attention,
            "checkpoint": checkpoint,
            "jvp": torch.func.jvp,
            "parametrize": parametrize,
            "sdpa_kernel": sdpa_kernel,
            "SDPBackend": SDPBackend,
            **{each.__name__: each for each in (Halved, Out, Pair, Twice)},
            "rank": rank,
            "S": program.scale(),
            "kept": [],
            "batch": self._batch,
            "parts": _parts,
            "record": self._record,
            "count": self._count,
            "no_sync": self._no_sync,
            "loss_of": self._loss_of,
            "fails": self._fails,
            "inside": self._inside,
            "at_loss": self._at_loss,
            "tidy": self._tidy,
            "trained": self._trained,
        }

    def begin(self, wrap: Wrap) -> None:
        program, names = self._program, self.names
        exec(compile(program.net(), "net", "exec"), names)
        with torch.device(self._device):
            net, encoder = names["Net"](), nn.Linear(program.width, program.width)
        names["net"] = self._filled(net, 1000)
        names["encoder"] = self._filled(encoder, 2000)
        names["weight"] = self._random((program.width,), 3000, self._device)
        for line in program.before:
            exec(line, names)
        names["m"] = wrap(names["net"])
        trained = [*names["net"].parameters(), *names["encoder"].parameters()]
        if program.sharded and isinstance(names["m"], dp.DataParallel):
            sharded = dp.ShardedOptimizer(torch.optim.SGD, names["m"], params=trained, **RATES)
            names["optimizer"] = sharded
        else:
            names["optimizer"] = torch.optim.SGD(trained, **RATES)
        for line in program.setup:
            exec(line, names)

    def see(self) -> Seen:
        """Copies of all that can be compared."""
        net, encoder = self.names["net"], self.names["encoder"]
        seen: Seen = {}
        for name, parameter in net.named_parameters():
            seen[f"value of {name}"] = _copy(parameter)
            seen[f"grad of {name}"] = _copy(parameter.grad)
        for name, buffer in net.named_buffers():
            seen[f"buffer {name}"] = _copy(buffer)
        for name, parameter in encoder.named_parameters():
            # Ranks need not agree on these.
            seen[f"encoder's {name}"] = _copy(parameter)
            seen[f"encoder's gradient of {name}"] = _copy(parameter.grad)
        for number, value in enumerate(self._recorded):
            seen[f"recorded {number}"] = _copy(value)
        for number, count in self._counts.items():
            seen[f"calls of hook {number}"] = count
        seen["flags of the process"] = process_flags()
        self._recorded.clear()
        return seen

    def _random(self, shape: tuple[int, ...], number: int, device: str) -> Tensor:
        generator = torch.Generator().manual_seed(self._program.seed * 10_000 + number)
        if self._program.exact:
            values = torch.randint(-1, 2, shape, generator=generator).double()
        else:
            values = torch.rand(shape, generator=generator, dtype=torch.double) - 0.5
        return values.to(device)

    def _filled(self, module: nn.Module, number: int) -> nn.Module:
        module = module.to(torch.double)
        with torch.no_grad():
            for index, parameter in enumerate(module.parameters()):
                parameter.copy_(self._random(tuple(parameter.shape), number + index, self._device))
        return module

    def _batch(self, number: int, rows: int) -> Tensor:
        shape = (*([2] if self._program.time_first else []), rows, self._program.width)
        return self._random(shape, 10 * number + self._rank, self._device)

    def _record(self, *values: Any) -> None:
        # Copied at once: it may be changed later in the step.
        self._recorded += [_copy(value) for value in values]

    def _count(self, number: int) -> Callable[[Any], None]:
        def hook(value: Any) -> None:
            self._counts[number] += 1

        return hook

    def _no_sync(self) -> Any:
        model = self.names["m"]
        return model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()

    def _loss_of(self, criterion: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        model = self.names["m"]
        if hasattr(model, "loss"):
            loss: Tensor = model.loss(criterion, x, y)
            return loss
        result: Tensor = criterion(model(x), y)
        return result

    def _fails(self, step: Callable[[], None], where: str, rank: int, *, tells: bool) -> None:
        """Make a step that raises in one rank; the others get an error, and nothing is applied."""
        model = self.names["m"]
        raised = not isinstance(model, dp.DataParallel)
        if not raised:
            self._broken = where if rank == self._rank else ""
            try:
                with dp.telling_failures() if tells else contextlib.nullcontext():
                    step()
            except Exception:
                raised = True
            self._broken = ""
        self._record(raised)

    def _inside(self, h: Tensor) -> Tensor:
        if self._broken == "forward":
            raise ArithmeticError("a forward that fails on purpose")
        broken: Tensor = Broken.apply(h) if self._broken == "graph" else h
        return broken

    def _at_loss(self, loss: Tensor) -> Tensor:
        broken: Tensor = Broken.apply(loss) if self._broken == "loss" else loss
        return broken

    @torch.no_grad()
    def _tidy(self) -> None:
        """After a step of an optimizer, small whole numbers again."""
        if self._program.exact:
            for module in (self.names["net"], self.names["encoder"]):
                for parameter in module.parameters():
                    parameter.copy_(torch.remainder(parameter.floor(), 3) - 1)

    def _trained(self) -> list[Tensor]:
        return [p for p in self.names["net"].parameters() if p.requires_grad]


def process_flags() -> tuple[Any, ...]:
    """State of the process that forwards set and restore."""
    cuda = torch.backends.cuda
    return torch.get_default_dtype(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()


def _parts(output: Any) -> Any:
    if isinstance(output, Out):
        return output.h
    return output["h"] if isinstance(output, dict) else output


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return [_copy(one) for one in value]
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
