"""The treatment of buffers: those that replicas wrote, and those of several processes.

Before a forward the buffers of rank 0 replace those of all other processes. It is so in a forward
that follows one whose gradients are reduced, as in torch: between two optimizer steps nothing is
sent. Replicas of one process are another matter, see :data:`BufferPolicy`; they start from the
buffers that arrived.

An earlier forward may have saved a buffer for its backward. The arriving values are mostly the old
ones, so the version counter is left alone, as torch does it, and that backward is no error.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

import dataparallel.comm as comm
from dataparallel import devices, torch_internals
from dataparallel.comm.link import ProcessLink
from dataparallel.errors import listed
from dataparallel.reducer.parameters import shared_tensors
from dataparallel.reducer.verify import parts_of
from dataparallel.replicas.clones import Counterparts, ModuleClones, Parts
from dataparallel.torch_internals import BatchNorm, InstanceNorm, num_dispatch_modes

if TYPE_CHECKING:
    from dataparallel.collectives.groups import HybridGroup, LocalGroup

#: ``"replica0"``: those of replica 0 are kept, as in torch. ``"mean"``: floating-point buffers
#: become the mean over the replicas, weighted by samples. ``"sync"``: batch norm uses the
#: statistics of the whole batch, and instance norm tracks them, so that all replicas write the
#: same. Other buffers are those of replica 0. With each of them ``torch.nn.SyncBatchNorm``
#: uses the statistics of the whole batch.
BufferPolicy: TypeAlias = Literal["replica0", "mean", "sync"]

#: As in torch; more is sent in several messages.
MESSAGE_BYTES = 250 * 2**20

_log = logging.getLogger("dataparallel")
# Elements that are compared at once.
_PIECE = 2**22
# Numbers that are rounded, and where they are compared.
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_WIDE |= {t: t for t in (torch.float32, torch.float64, torch.complex64, torch.complex128)}
# Their writes differ by chunk, or are synchronized; the log tells of that in another way.
_OF_BATCH_NORMS = (BatchNorm.forward, nn.SyncBatchNorm.forward)


# --- replicas --------------------------------------------------------------------------------


def mean_buffer(samples: Sequence[int], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of a buffer, weighted by samples; that of replica 0 if it has none."""
    first, total = values[0], sum(samples)
    if not (total and _averages(first) and all(value.shape == first.shape for value in values)):
        return first
    shares = [v * (count / total) for v, count in zip(values, samples, strict=True)]
    return comm.reduce_add(shares, first.device)


class BufferWatch:
    """A watch that logs once which buffers of one module its replicas write differently.

    Many modules write through ``.data``, so values are compared: after the forwards 1, 2, 4, 8 and
    so on that train several replicas. No host waits for an accelerator: its answer is read after a
    later forward.
    """

    def __init__(self, policy: BufferPolicy) -> None:
        self._policy: BufferPolicy = policy
        self._num_forwards = 0
        self._told: set[str] = set()
        self._has_told_of_batch_norm = False
        # On their way from a device: whether the buffers of these names differ.
        self._answers: list[tuple[list[str], torch.Tensor, torch.Event]] = []

    def note_batch_norm(self, parts: Parts) -> None:
        """Several replicas begin a forward: tell of batch norm that is not synchronized."""
        if self._policy == "sync" or self._has_told_of_batch_norm:
            return
        named = zip(parts.names, parts.modules, strict=True)
        names = [repr(n) for n, m in named if m.training and type(m).forward is BatchNorm.forward]
        if names:
            self._has_told_of_batch_norm = True
            _log.warning(
                "batch norm (%s) normalizes the chunk of each replica by itself; pass "
                "buffers='sync' for the statistics of the whole batch, as without replicas",
                listed(names),
            )

    def look(self, clones: ModuleClones) -> None:
        """Follow a forward that has ended; what replicas wrote is where they wrote it."""
        if self._answers:
            answers, self._answers = self._answers, []
            for names, differs, event in answers:
                if event.query():
                    self._tell(clones.module, compress(names, differs.tolist()))
                else:
                    self._answers.append((names, differs, event))
        if clones.module.training and clones.num_replicas > 1:
            self._num_forwards += 1
            # Somebody else may count or follow what is done.
            if not (self._num_forwards & self._num_forwards - 1 or num_dispatch_modes()):
                self._compare(clones)

    @torch.no_grad()
    def _compare(self, clones: ModuleClones) -> None:
        by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
        for name, (first, *others) in self._watched(clones):
            if not devices.is_capturing(first.device):
                by_device.setdefault(first.device, {})[name] = _differ(first, others)
        for device, found in by_device.items():
            differs = torch.stack(list(found.values()))
            if devices.is_accelerator(device):
                self._answers.append((list(found), *devices.to_host_later(differs)))
            else:
                self._tell(clones.module, compress(found, differs.tolist()))

    def _watched(self, clones: ModuleClones) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Buffers that the policy may leave to replica 0, and nobody has told of."""
        for module, name, values in clones.buffers_now():
            if name in self._told or type(module).forward in _OF_BATCH_NORMS:
                continue
            kinds = {(v.dtype, v.shape) for v in values}
            averages = self._policy == "mean" and _averages(values[0])
            if len(kinds) > 1:
                self._tell(clones.module, [name])
            elif not averages and all(map(_is_plain, values)):
                yield name, values

    def _tell(self, module: nn.Module, differing: Iterable[str]) -> None:
        found = [name for name in differing if name not in self._told]
        if not found:
            return
        self._told.update(found)
        mean = "" if self._policy == "mean" else "pass buffers='mean' if a mean is right, or "
        _log.warning(
            "the forward of %s writes different values in each replica to the buffers %s; with "
            "buffers=%r the module keeps those of replica 0, which come from its chunk alone: "
            "%scompute them for the whole batch, as with dataparallel.collectives.all_reduce()",
            type(module).__name__,
            listed(map(repr, found)),
            self._policy,
            mean,
        )


def watch_of(module: nn.Module, policy: BufferPolicy) -> BufferWatch:
    """Return the watch over a module's buffers, which all of its wrappers share."""
    watches = _watches.setdefault(module, {})
    return watches.get(policy) or watches.setdefault(policy, BufferWatch(policy))


def _is_plain(buffer: torch.Tensor) -> bool:
    is_dense = buffer.layout == torch.strided and not (buffer.is_quantized or buffer.is_meta)
    return is_dense and buffer.numel() > 0 and not torch_internals.is_wrapper(buffer)


def _differ(first: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """True if numbers differ by more than the rounding of replicas with other numbers of threads.

    A piece at a time, so that it takes little memory.
    """
    # Not all others can be compared, but all have bytes.
    wide = _WIDE.get(first.dtype)
    found = torch.zeros((), dtype=torch.bool, device=first.device)
    for pieces in zip(
        *[torch.split(one.reshape(-1), _PIECE) for one in (first, *others)], strict=True
    ):
        flat = [piece.to(first.device) for piece in pieces]
        a, *rest = (one.to(wide) if wide else one.view(torch.uint8) for one in flat)
        for b in rest:
            unequal = a != b
            if wide:
                rounding = torch.finfo(first.dtype).eps ** 0.75 * a.abs().nan_to_num(0, 0, 0).amax()
                unequal &= ~((a - b).abs() <= rounding) & ~(a.isnan() & b.isnan())
            found |= unequal.any()
    return found


def _averages(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


_watches: weakref.WeakKeyDictionary[nn.Module, dict[BufferPolicy, BufferWatch]]
_watches = weakref.WeakKeyDictionary()


# --- statistics of the whole batch -----------------------------------------------------------


class Members:
    """With whom the norm layers in the replicas of a wrapper are synchronized.

    Args:
        policy: With ``"sync"`` all of them are; else those of ``torch.nn.SyncBatchNorm``.
        processes: Those of the wrapper. Default: this one.
        separate: True if this process trains alone, whatever the default process group is.
        timeout: Seconds that a process waits for the others. Default: as in its group.
    """

    def __init__(
        self,
        policy: BufferPolicy,
        processes: dist.ProcessGroup | None = None,
        *,
        separate: bool = False,
        timeout: float | None = None,
    ) -> None:
        self._policy, self._processes = policy, processes
        self._separate, self._timeout = separate, timeout
        # By process group; None is the default one, whenever it is made.
        self._groups: dict[dist.ProcessGroup | None, HybridGroup] = {}

    def of(self, layer: nn.Module) -> LocalGroup | None:
        """Return the group of a layer; None if the layer is not synchronized."""
        # Imported late: without it, no forward needs a collective.
        from dataparallel.collectives.groups import HybridGroup, LocalGroup

        if isinstance(layer, nn.SyncBatchNorm):
            processes, alone = layer.process_group or None, self._separate
        elif self._policy == "sync":
            processes, alone = self._processes, True
        else:
            return None
        if (processes is None and alone) or processes == dist.GroupMember.NON_GROUP_MEMBER:
            return LocalGroup()
        found = self._groups.get(processes)
        # If several threads come here at once, one of them wins.
        return found or self._groups.setdefault(processes, HybridGroup(processes, self._timeout))

    def dress(self, watch: BufferWatch, parts: Parts, replicas: Sequence[Counterparts]) -> None:
        """Let norm layers of clones do what their originals do with the whole batch."""
        kinds = set(map(type, parts.modules))
        if not any(issubclass(kind, (BatchNorm, InstanceNorm)) for kind in kinds):
            return
        if self._policy == "sync" or any(issubclass(kind, nn.SyncBatchNorm) for kind in kinds):
            from dataparallel.collectives.batch_norm import synchronize

            synchronize(self.of, parts, replicas)
        if len(replicas) > 1:
            watch.note_batch_norm(parts)

    def spans_processes(self, module: nn.Module) -> bool:
        """True if a forward that trains the module waits for other processes."""
        if self._policy == "sync" and self._processes is not None and self._processes.size() > 1:
            return True
        found = {self.of(part) for part in module.modules() if isinstance(part, nn.SyncBatchNorm)}
        return any(group in found and not group.is_alone() for group in self._groups.values())

    def close(self) -> None:
        """Give the process groups back, in all processes."""
        for group in self._groups.values():
            group.close()


def has_sync_batch_norm(module: nn.Module) -> bool:
    """True if a module has a ``torch.nn.SyncBatchNorm``."""
    return any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())


def runs_by_itself(module: nn.Module) -> bool:
    """True if a module needs no clone if there is one replica and nothing to reduce.

    With a process group torch's own synchronized batch norm refuses the CPU.
    """
    has_processes = dist.is_available() and dist.is_initialized()
    return not (has_processes and has_sync_batch_norm(module))


# --- processes -------------------------------------------------------------------------------


def send_states(module: nn.Module, source: int, link: ProcessLink, *, buffers: bool) -> None:
    """Let all processes have the parameters of one, and its buffers if wanted; a collective."""
    states = shared_tensors(module, buffers=buffers)
    broadcast(states, source, link, what=f"parameters and buffers of rank {source}")


def send_buffers(module: nn.Module, source: int, link: ProcessLink) -> None:
    """Let all processes have the buffers of one; a collective call."""
    buffers = shared_tensors(module, parameters=False)
    counted = tuple(b for b in buffers.values() if not b.is_inference())
    with torch_internals.keep_versions(counted):
        broadcast(buffers, source, link, what=f"buffers of rank {source}")


def broadcast(
    tensors: Mapping[str, torch.Tensor], source: int, link: ProcessLink, *, what: str
) -> None:
    """Replace tensors in all processes by those of one; a collective call.

    Tensors of any dtypes travel together, as bytes: one message for each device and 250 MiB.
    """
    messages: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
    sent = Counter[torch.device]()
    # Those of large elements first: each then begins at a multiple of its elements' size.
    for part in sorted(parts_of(tensors).values(), key=lambda part: -part.element_size()):
        sent[part.device] += part.nbytes
        if part.numel():
            message = (part.device, sent[part.device] // MESSAGE_BYTES)
            messages.setdefault(message, []).append(part.detach())
    # Made in inference mode the views could not be used outside of it.
    with torch.inference_mode(False), torch.no_grad():
        for parts in messages.values():
            sizes = [part.nbytes for part in parts]
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=parts[0].device)
            pieces = zip(torch.split(flat, sizes), parts, strict=True)
            views = [piece.view(part.dtype).view(part.shape) for piece, part in pieces]
            if link.rank == source:
                torch_internals.foreach_copy_(views, parts)
            link.broadcast(flat, source, what=what).wait()
            if link.rank != source:
                torch_internals.foreach_copy_(parts, views)
