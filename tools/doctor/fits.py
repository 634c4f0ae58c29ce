"""The report of ``doctor --fits``: bytes per device of a module in training, mode by mode.

Nothing is allocated: the module is built on torch's meta device, and the optimizer steps there.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.text import Text
from torch import nn

import dataparallel
from dataparallel.tools.bench.runner import Report, new_table, publish
from dataparallel.tools.doctor.model_file import load

#: A mode is tight that leaves less than this part of a device for activations.
_TIGHT = 0.2
#: The pieces on their way with originals at home; simulated, at most that for layers of any size.
_PIECES = 2**28
_STYLES = {"fits": "green", "tight": "yellow", "does not fit": "bold red"}
_HOME, _SPREAD, _TORCH, _FSDP = "home", "spread", "torch DDP", "FSDP2"
_CODE = {
    _HOME: "model = dp.DistributedDataParallel(net)",
    _SPREAD: 'model = dp.DistributedDataParallel(net, originals="spread")',
}


@dataclass(frozen=True)
class Sizes:
    """Bytes of a module: those of all parameters, of trained ones and others.

    ``largest`` has those of the trained parameters, the largest first; ``block`` is the largest
    element of a list of modules, and ``rest`` all parameters outside of such lists.
    """

    parameters: int
    buffers: int
    trained: int
    state: int
    largest: tuple[int, ...]
    block: int
    rest: int
    count: int
    count_trained: int


@dataclass(frozen=True)
class Need:
    """Bytes that a mode needs on a device, beside activations.

    ``way`` are gradients and buckets on their way in backward, and ``more`` the temporaries of
    AdamW's step with ``foreach``, which treats all parameters of a device at once.
    """

    mode: str
    device: str
    parameters: int
    gradients: int
    state: int
    way: int
    more: int

    @property
    def total(self) -> int:
        """The sum beside activations."""
        return self.parameters + self.gradients + self.state + self.way

    def verdict(self, memory: int) -> str:
        """Tell if a device of so many bytes has room."""
        left = memory - self.total
        return "does not fit" if left < 0 else "tight" if left < _TIGHT * memory else "fits"


def run(arguments: argparse.Namespace) -> int:
    """Print the report; the exit status is 1 if neither home nor spread fits."""
    gpus, memory = _devices(arguments.gpus, arguments.memory)
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    sizes = measure(load(arguments.fits), arguments.optimizer, dtype)
    needs = list(needs_of(sizes, gpus))
    verdicts = verdicts_of(needs, memory)
    table = new_table(
        f"{arguments.fits} on {gpus} x {memory / 2**30:.1f} GiB, {arguments.optimizer}; GiB per "
        "device, computed",
        *("parameters", "gradients", "optimizer", "on their\nway", "sum", "left for\nactivations"),
        "",
    )
    for need in needs:
        verdict = need.verdict(memory)
        parts = (need.parameters, need.gradients, need.state, need.way, need.total)
        table.add_row(
            f"{need.mode}, {need.device}",
            *(_gib(part) for part in parts),
            _gib(memory - need.total),
            Text(verdict, style=_STYLES[verdict]),
        )
    told = (
        f"{sizes.count:,} parameters, {sizes.count_trained:,} trained: "
        f"{_gib(sizes.parameters)} GiB; buffers {_gib(sizes.buffers)} GiB"
    )
    notes = [
        "Activations are not counted. Parameters include buffers; tight: less than "
        f"{_TIGHT:.0%} are left.",
    ]
    advice = advise(needs, verdicts, memory)
    content = {"sizes": sizes, "memory": memory, "devices": gpus, "verdicts": verdicts}
    report = Report(
        [told, table, advice],
        notes,
        {**content, "needs": [dataclasses.asdict(need) for need in needs], "advice": advice},
        is_right=any(verdicts[mode] != "does not fit" for mode in _CODE),
    )
    shown = {**vars(arguments), "json": "-" if arguments.json else None}
    return publish(report, argparse.Namespace(**shown))


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


def _devices(gpus: int | None, memory: int | None) -> tuple[int, int]:
    """Return the number of devices and the memory of each, as given or as this machine has them."""
    found = dataparallel.accelerators() if gpus is None or memory is None else []
    if gpus is None:
        gpus = len(found)
    if memory is None:
        each = [
            int(torch.get_device_module(device).get_device_properties(device.index).total_memory)
            for device in found
        ]
        memory = min(each, default=0)
    if not gpus or not memory:
        raise ValueError(
            "this machine has no accelerators that could be counted; say which ones you mean, for "
            "example --gpus 4 --memory 24GiB"
        )
    return gpus, memory


# --- sizes ---------------------------------------------------------------------------------------


def measure(module: nn.Module, optimizer: str, dtype: torch.dtype | None = None) -> Sizes:
    """Return the bytes of a module and of the state that an optimizer keeps for it.

    Args:
        module: On any device; the meta device is enough.
        optimizer: One of torch.optim, perhaps with arguments: ``sgd:momentum=0.9``.
        dtype: That of floating-point parameters and buffers. None: as the module has them.
    """

    def size(tensor: torch.Tensor) -> int:
        kind = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        return tensor.numel() * kind.itemsize

    parameters = list(module.parameters())
    trained = [each for each in parameters if each.requires_grad]
    if not trained:
        raise ValueError("no parameter of the module requires grad, so nothing is trained")
    blocks = list(_blocks(module))
    inside = {id(each): each for block in blocks for each in block.parameters()}
    total = sum(map(size, parameters))
    return Sizes(
        parameters=total,
        buffers=sum(map(size, module.buffers())),
        trained=sum(map(size, trained)),
        state=_state_of(trained, optimizer, dtype),
        largest=tuple(sorted(map(size, trained), reverse=True)),
        block=max((sum(map(size, block.parameters())) for block in blocks), default=0),
        rest=total - sum(map(size, inside.values())),
        count=sum(each.numel() for each in parameters),
        count_trained=sum(each.numel() for each in trained),
    )


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the elements of the outermost lists of modules: those that FSDP2 gathers by turns."""
    for child in module.children():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            yield child
        else:
            yield from _blocks(child)


def _state_of(trained: Sequence[torch.Tensor], optimizer: str, dtype: torch.dtype | None) -> int:
    """Return the bytes of an optimizer's state after a step, which it makes on the meta device."""
    copies = []
    for each in trained:
        kind = dtype if dtype and each.is_floating_point() else each.dtype
        copies.append(nn.Parameter(torch.empty(each.shape, dtype=kind, device="meta")))
        copies[-1].grad = torch.empty_like(copies[-1])
    found, options = _optimizer_named(optimizer)
    try:
        made = found(copies, **options)
        made.step()
    except Exception as error:
        raise ValueError(
            f"the state of {optimizer} cannot be counted: {type(error).__name__}: {error}; take an "
            "optimizer with a state of that size, such as adamw or sgd"
        ) from error
    states = (value for state in made.state.values() for value in state.values())
    return sum(value.nbytes for value in states if isinstance(value, torch.Tensor))


def _optimizer_named(text: str) -> tuple[Any, dict[str, Any]]:
    """Return a class of torch.optim and the arguments for it, as ``sgd:momentum=0.9`` has them."""
    name, _, rest = text.partition(":")
    known = {
        each.lower(): value
        for each, value in vars(torch.optim).items()
        if inspect.isclass(value) and value is not torch.optim.Optimizer
    }
    if name.lower() not in known:
        raise ValueError(f"torch.optim has no {name!r}, but: {', '.join(sorted(known))}")
    found = known[name.lower()]
    options = {"foreach": False} if "foreach" in inspect.signature(found).parameters else {}
    try:
        for pair in filter(None, rest.split(",")):
            key, value = pair.split("=")
            options[key.strip()] = ast.literal_eval(value.strip())
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"{rest!r} are no arguments; write sgd:momentum=0.9") from error
    return found, options


# --- modes ---------------------------------------------------------------------------------------


def needs_of(sizes: Sizes, gpus: int) -> Iterator[Need]:
    """Yield the needs of each mode, on the first device and on others where these differ."""
    held, trained, state = sizes.parameters + sizes.buffers, sizes.trained, sizes.state
    step = 2 * sizes.largest[0]
    few = min(trained // 10, _PIECES) if gpus > 1 else 0
    yield Need(_HOME, "first", held, trained, state, max(few, step), trained)
    if gpus > 1:
        yield Need(_HOME, "others", held, trained, 0, few, 0)
    # A parameter has one owner, so the share of a device is at least the largest one.
    share = max(trained // gpus, sizes.largest[0])
    owned = state * share // trained
    # Gradients that the reducer sends at a time, and those that wait; simulated, at most so much.
    pieces = trained // 16 + sum(sizes.largest[: gpus + 5]) if gpus > 1 else 0
    yield Need(_SPREAD, "each", held, share, owned, max(pieces, step), share)
    yield Need(_TORCH, "each", held, trained, state, trained + step, trained)
    part = -(-sizes.parameters // gpus) + sizes.buffers
    gathered = sizes.rest + 2 * sizes.block if gpus > 1 else 0
    yield Need(
        _FSDP, "each", part, trained // gpus, state // gpus, max(gathered, step // gpus),
        trained // gpus,
    )  # fmt: skip


def verdicts_of(needs: Sequence[Need], memory: int) -> dict[str, str]:
    """Return the worst verdict of each mode over its devices."""
    order = list(_STYLES)
    found: dict[str, str] = {}
    for need in needs:
        verdict = need.verdict(memory)
        found[need.mode] = max(found.get(need.mode, verdict), verdict, key=order.index)
    return found


def advise(needs: Sequence[Need], verdicts: dict[str, str], memory: int) -> str:
    """Return the mode to choose, with its line of code."""
    for wanted in ("fits", "tight"):
        for mode, code in _CODE.items():
            if verdicts[mode] != wanted:
                continue
            own = [need for need in needs if need.mode == mode]
            others = [need for need in own if need.total - need.way + need.more > memory]
            hint = (
                "; foreach=False for the optimizer, whose default needs "
                f"{_gib(max(need.more for need in others))} GiB more while it steps"
                if others
                else ""
            )
            small = "; tight: begin with a small batch" if wanted == "tight" else ""
            return f"Choose {mode}: {code}{hint}{small}"
    also = "" if verdicts[_FSDP] == "does not fit" else "FSDP2 (torch's fully_shard), "
    return f"No mode of dataparallel fits. Take {also}more devices, or --dtype bfloat16"
