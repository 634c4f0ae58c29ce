"""A trial: replicas that hold the parameters of two blocks at a time. See docs/design/blocks.md.

It is for a ``nn.Sequential`` of blocks of one dtype, all trained, without buffers, on accelerators.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dataparallel import devices as _devices
from dataparallel.comm.routes import SumPlan, sum_flats
from dataparallel.torch_internals import address_of_storage, uses_of_storage

#: Seconds that the backward of a replica waits for that of the others.
_TIMEOUT = 60.0


class Freed(Tensor):
    """A parameter of a replica while its block is not there: a shape without memory."""

    of_parameter: str

    @staticmethod
    def of(name: str, like: Tensor, device: torch.device) -> Freed:
        """Return one that stands for a parameter on a device."""
        made: Freed = Tensor._make_wrapper_subclass(
            Freed, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        made.of_parameter = name
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise before a kernel runs."""
        freed = [each for each in torch.utils._pytree.tree_leaves(args) if isinstance(each, cls)]
        raise RuntimeError(
            f"{function} reads parameter {freed[0].of_parameter!r} of the replica on "
            f"{freed[0].device}, whose block is not gathered now: "
            "a parameter can be used in the forward of its block "
            "only. Pass what others need from it through the block's outputs"
        )


class Block:
    """The parameters of a block, as flat parts of equal size: one per device, on its owner."""

    def __init__(self, number: int, module: nn.Module, devices: Sequence[torch.device]) -> None:
        named = dict(module.named_parameters())
        self.number, self.names = number, list(named)
        self.shapes = [p.shape for p in named.values()]
        flat = torch.cat([p.detach().reshape(-1) for p in named.values()])
        self.size = flat.numel()
        self.part_size = -(-self.size // len(devices))
        whole = flat.new_zeros(self.part_size * len(devices))
        whole[: self.size] = flat
        parts = torch.split(whole, self.part_size)
        #: These the optimizer sees.
        self.parts = [
            nn.Parameter(torch.empty_like(part, device=device).copy_(part))
            for part, device in zip(parts, devices, strict=True)
        ]
        #: The flat gradients of replicas whose backward has come here, and when each was there.
        self.arrived: dict[int, tuple[Tensor, torch.Event]] = {}

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the parameters in a flat tensor; each has a version counter of its own."""
        made, offset = [], 0
        for shape in self.shapes:
            view = torch.empty(0, dtype=flat.dtype, device=flat.device)
            strides = torch.empty(shape, device="meta").stride()
            made.append(view.set_(flat.untyped_storage(), offset, shape, strides))
            offset += shape.numel()
        return made

    def versions(self) -> list[int]:
        """Return numbers that change with the values."""
        return [part._version for part in self.parts]


class Slot:
    """Memory of a replica for the values of one block."""

    def __init__(self) -> None:
        self.flat: Tensor | None = None
        self.block: Block | None = None
        self.arrived: torch.Event | None = None
        self.free: torch.Event | None = None

    def memory(self, size: int, like: Tensor, device: torch.device) -> Tensor:
        """Return memory that nobody reads later; what somebody still refers to stays his."""
        held = self.flat is not None and (
            uses_of_storage(address_of_storage(self.flat.untyped_storage())) > 2
        )
        if held or self.flat is None:
            # On the stream that computes, on which its last holder uses it.
            self.flat = torch.empty(size, dtype=like.dtype, device=device)
            self.free = _devices.record_event(_stream(device))
        return self.flat


class Replica:
    """The clone on one device: placeholders for parameters, and memory for two blocks."""

    def __init__(self, index: int, model: GatheredBlocks, net: nn.Sequential) -> None:
        self.index, self.model = index, model
        self.device = model.devices[index]
        self.modules = copy.deepcopy(net).to("meta")
        for k, module in enumerate(self.modules):
            for name, each in list(module.named_parameters()):
                owner, _, last = name.rpartition(".")
                of = Freed.of(f"{k}.{name}", each, self.device)
                module.get_submodule(owner)._parameters[last] = of  # type: ignore[assignment]
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)
        self.slots = [Slot(), Slot()]
        self._entering = torch.Stream(self.device)
        self._leaving = [torch.Stream(device) for device in model.devices]

    def forget(self) -> None:
        """Forget the values that are there."""
        for slot in self.slots:
            slot.block = None

    def gather(self, block: Block) -> Slot:
        """Let the values of a block come, on streams that do not compute, unless they are there."""
        for slot in self.slots:
            if slot.block is block:
                return slot
        slot = self.slots[0]
        if slot.block is not None:
            self.release(slot.block)
        # The other one is that of the block before.
        self.slots.reverse()
        flat = slot.memory(self.model.slot_size, block.parts[0], self.device)
        assert slot.free is not None
        self._entering.wait_event(slot.free)
        whole = flat[: block.part_size * len(block.parts)]
        targets = torch.split(whole, block.part_size)
        order = [(self.index + i) % len(targets) for i in range(len(targets))]
        for i in order:
            leaving = self._leaving[i] if i != self.index else self._entering
            leaving.wait_event(self.model.ready[i])
            with _devices.use_streams([leaving, self._entering]), torch.no_grad():
                targets[i].copy_(block.parts[i], non_blocking=True)
        slot.block, slot.arrived = block, _devices.record_event(self._entering)
        return slot

    def values(self, block: Block, following: int) -> Tensor:
        """Return the values of a block, in order with the current stream; prefetch another one."""
        slot = self.gather(block)
        assert slot.arrived is not None and slot.flat is not None
        _stream(self.device).wait_event(slot.arrived)
        if 0 <= following < len(self.model.blocks):
            # Not into the slot of this block.
            self.slots.sort(key=lambda each: each is slot)
            self.gather(self.model.blocks[following])
        return slot.flat

    def release(self, block: Block) -> None:
        """Let the memory of a block be free after what is queued on the current stream."""
        for slot in self.slots:
            if slot.block is block:
                slot.block, slot.free = None, _devices.record_event(_stream(self.device))

    def forward(self, x: Tensor) -> Tensor:
        """Run all blocks."""
        for block, module in zip(self.model.blocks, self.modules, strict=True):
            x = self._run(block, module, x)
        return x

    def _run(self, block: Block, module: nn.Module, x: Tensor) -> Tensor:
        flat = self.values(block, block.number + 1)
        address, versions = flat.untyped_storage().data_ptr(), block.versions()

        def pack(saved: Tensor) -> Any:
            if saved.device != self.device or saved.untyped_storage().data_ptr() != address:
                return saved
            return saved.dtype, saved.shape, saved.stride(), saved.storage_offset()

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            if block.versions() != versions:
                raise RuntimeError(
                    f"parameters of block {block.number} were changed between forward and "
                    "backward, which needs their values; step after backward"
                )
            dtype, *layout = saved
            whole = self.values(block, block.number - 1)
            return torch.empty(0, dtype=dtype, device=self.device).set_(
                whole.untyped_storage(), layout[2], layout[0], layout[1]
            )

        try:
            with saved_tensors_hooks(pack, unpack):
                apply: Any = _Gathered.apply
                values = apply(self.anchor, self, block, flat)
                named = dict(zip(block.names, values, strict=True))
                return torch.func.functional_call(module, named, (x,))  # type: ignore[no-any-return]
        finally:
            self.release(block)

    def reduce(self, block: Block, grads: Sequence[Tensor | None]) -> None:
        """Hand in the gradients of a block, and sum the own part of all replicas."""
        model, here = self.model, _stream(self.device)
        zeros = self.anchor.new_zeros
        flats = [
            zeros(shape.numel()) if grad is None else grad.reshape(-1)
            for grad, shape in zip(grads, block.shapes, strict=True)
        ]
        flat = torch.cat([*flats, zeros(block.part_size * len(block.parts) - block.size)])
        del grads, flats
        block.arrived[self.index] = flat, _devices.record_event(here)
        model.barrier.wait()
        rows = [block.arrived[i] for i in range(len(model.devices))]
        own = slice(self.index * block.part_size, (self.index + 1) * block.part_size)
        plan = SumPlan(flat.nbytes, model.devices, model.devices)
        (total,) = sum_flats(
            [[one[own]] for one, _ in rows], self.device, ready=[event for _, event in rows],
            plan=plan,
        )  # fmt: skip
        part = block.parts[self.index]
        part.grad = total if part.grad is None else part.grad.add_(total)
        plan.settle(map(_stream, model.devices), self.device)
        # Nobody's flat gradient goes before all have queued its reads.
        model.barrier.wait()
        block.arrived.pop(self.index)


class _Gathered(torch.autograd.Function):
    """The parameters of a block as results of a node, which does not keep them as leaves would."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, replica: Replica, block: Block, flat: Tensor) -> Any:
        ctx.replica, ctx.block = replica, block
        ctx.set_materialize_grads(False)
        return tuple(block.views(flat))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.replica.release(ctx.block)
        ctx.replica.reduce(ctx.block, grads)
        return None, None, None, None


class GatheredBlocks:
    """Trains a ``nn.Sequential`` of blocks, whose values are cut over all devices."""

    def __init__(self, net: nn.Sequential, devices: Sequence[str]) -> None:
        assert not list(net.buffers()), "the trial has no buffers"
        self.devices = [torch.device(device) for device in devices]
        self.blocks = [Block(k, module, self.devices) for k, module in enumerate(net)]
        self.slot_size = max(b.part_size for b in self.blocks) * len(self.devices)
        self.barrier = threading.Barrier(len(devices), timeout=_TIMEOUT)
        self.ready: list[torch.Event] = []
        self.replicas = [Replica(i, self, net) for i in range(len(devices))]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the flat parts, for an optimizer."""
        for block in self.blocks:
            yield from block.parts

    def state_dict(self) -> dict[str, Tensor]:
        """Return whole values on the host, with the names of the module."""
        state = {}
        for block in self.blocks:
            flat = torch.cat([part.detach().cpu() for part in block.parts])
            named = zip(block.names, block.views(flat), strict=True)
            state.update({f"{block.number}.{name}": value.clone() for name, value in named})
        return state

    def __call__(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        """Run the replicas, each on its chunk."""
        # After a step, or a forward or backward that has failed.
        self.barrier.reset()
        self.ready = [_devices.record_event(_stream(device)) for device in self.devices]
        for block in self.blocks:
            block.arrived.clear()
        for replica in self.replicas:
            replica.forget()
        return [r.forward(chunk) for r, chunk in zip(self.replicas, chunks, strict=True)]

    def backward(self, losses: Sequence[Tensor]) -> None:
        """Run the backward of all replicas in one call, a thread of autograd's for each device."""
        torch.autograd.backward(list(losses))


def _stream(device: torch.device) -> torch.Stream:
    stream = _devices.current_stream(device)
    assert stream is not None
    return stream
