"""Collectives over a process group: launched at once and waited for later, or traced.

Note [Eager and traced]
~~~~~~~~~~~~~~~~~~~~~~~
Usually a call launches its exchange (see ``exchange.py``) with ``torch.distributed``'s asynchronous
form, and returns a tensor that waits before its first use. Whoever waits does so in slices, sees
failures of other processes, and then does what remains, such as copying into another layout. The
waiting tensor has the work, and nobody else needs it: so torch's registry of works stays empty, and
a result that nobody wants goes with its work.

While calls are recorded or transformed, and for tensor subclasses, which have their memory
elsewhere, the exchange is done by torch's ``_c10d_functional`` operators. Compilers know these;
their waits last until the time limit of the group.

Note [What compilers remove]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Torch's compilers take one collective for two that are the same, and leave out one whose result has
no elements; then the other processes wait for it. So what is traced looks the same in all processes
wherever the collective does, and has a result: a gather brings everything to all, a scatter is a
broadcast, and a process that gets no rows sends one to itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dataparallel import torch_internals
from dataparallel.collectives.async_tensor import waiting
from dataparallel.collectives.checks import checks_of
from dataparallel.collectives.derivatives import Node, is_recorded, run_call
from dataparallel.collectives.exchange import Exchange, Layout, exchange_of
from dataparallel.collectives.groups import group_of
from dataparallel.collectives.operations import (
    AllGather,
    AllToAll,
    Broadcast,
    Collective,
    Gather,
    Scatter,
    dtype_name,
)
from dataparallel.comm.failures import SLICE, CollectiveFailure
from dataparallel.comm.link import wait_briefly
from dataparallel.devices import Stream, current_stream, use_stream
from dataparallel.graph.functions import apply_function

_HOST = torch.device("cpu")


@torch_internals.mark_constant
def place_in(name: str) -> tuple[int, int]:
    """Which process of the group of this name this is, and how many there are."""
    group = group_of(name)
    return group.rank(), group.size()


def run(collective: Collective, tensor: Tensor, name: str) -> Tensor:
    """The result of a collective, which may still be under way, over the group of that name."""
    rank, size = place_in(name)
    call = ProcessCall(name, collective.checked(tensor, size), rank, size)
    result, work = call.start(tensor)
    return result if work is None else waiting(result, work)


def is_traced(tensor: Tensor) -> bool:
    """Whether an operator must be seen by somebody; see Note [Eager and traced].

    True while torch compiles or exports, under fake, proxy and functional modes, and within the
    transforms of ``torch.func``.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return True
    if torch_internals.num_dispatch_modes():
        keys, find = torch_internals.TorchsModes, torch_internals.torchs_dispatch_mode
        if any(find(key) is not None for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)):
            return True
    if torch_internals.is_key_included(torch_internals.PRE_DISPATCH):
        return True
    if torch_internals.innermost_transform() is not None:
        return True
    return type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta


@dataclass(frozen=True)
class ProcessCall:
    """A collective of the processes of a group; see :class:`~derivatives.Call`."""

    name: str
    collective: Collective
    rank: int
    size: int

    @property
    def indices(self) -> Sequence[int]:
        """This process."""
        return [self.rank]

    def compute(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The result, by operators. See Note [What compilers remove]."""
        collective, x = self.collective, inputs[0]
        if isinstance(collective, Gather):
            (whole,) = self._replaced(AllGather(collective.dim)).compute(inputs)
            here = self.rank == collective.root
            return [whole if here else whole.narrow(collective.dim, 0, 0).contiguous()]
        if isinstance(collective, Scatter):
            (whole,) = self._replaced(Broadcast(collective.root)).compute(inputs)
            return [whole.chunk(self.size, collective.dim)[self.rank].contiguous()]
        if isinstance(collective, AllToAll) and _gets_nothing(collective):
            (gets,), (gives,) = collective.output_splits, collective.input_splits
            before = sum(gives[: self.rank])
            extra = [x[:before], x.new_zeros(1, *x.shape[1:]), x[before:]]
            one_more = AllToAll((self._with_own(gets),), (self._with_own(gives),))
            (row,) = self._replaced(one_more).compute([torch.cat(extra)])
            return [row[:0]]
        return self._exchange(x).traced(self.name)

    def _with_own(self, splits: Sequence[int]) -> tuple[int, ...]:
        return tuple(rows + int(member == self.rank) for member, rows in enumerate(splits))

    def _replaced(self, collective: Collective) -> ProcessCall:
        return ProcessCall(self.name, collective, self.rank, self.size)

    def run(self, collective: Collective, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Another collective of the same processes, waited for."""
        result, work = self._replaced(collective).start(tensors[0])
        if work is not None:
            work.wait()
        return [result]

    def start(self, tensor: Tensor) -> tuple[Tensor, ProcessWork | None]:
        """The result, differentiable, and the work that writes it; None if it is traced."""
        if not is_traced(tensor):
            result, work = self._launch(tensor.detach())
            if is_recorded(tensor):
                (result,) = apply_function(Node, self, [result], None, tensor)
            return result, work
        if not torch.compiler.is_compiling() and (
            is_recorded(tensor) or torch_internals.innermost_transform() is not None
        ):
            # Within a transform a tensor does not tell what the ones around it record.
            return apply_function(Node, self, None, None, tensor)[0], None
        return run_call(self, [tensor])[0], None

    def _launch(self, tensor: Tensor) -> tuple[Tensor, ProcessWork]:
        group, collective = group_of(self.name), self.collective
        checks_of(group).before(collective, tensor)
        exchange = self._exchange(tensor)
        place = _place(group, tensor.device)
        sent = exchange.sent.to(place)
        arrived = exchange.arriving(sent)
        shape = collective.shape(tensor, self.rank, self.size)
        if exchange.in_place and place == tensor.device:
            # Not as a view: autograd would take what the backend does for a change of the result.
            result = arrived.view(tensor.dtype).view(shape).data
        else:
            result = tensor.new_empty(shape)

        def finish() -> None:
            (found,) = exchange.finish(arrived.to(tensor.device))
            if found.data_ptr() != result.data_ptr():
                result.copy_(found)

        where = f"{collective.name} of a tensor {tuple(tensor.shape)} of {dtype_name(tensor)}"
        return result, ProcessWork(group, where, exchange, sent, arrived, tensor.device, finish)

    def _exchange(self, tensor: Tensor) -> Exchange:
        return exchange_of(self.collective, [tensor], Layout((1,) * self.size, self.rank))


def _place(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where the backend of a group can read and write for a tensor on ``device``."""
    taken = [each.type for each in torch_internals.group_devices(group)]
    if device.type in taken:
        return device
    if _HOST.type in taken:
        return _HOST
    raise ValueError(
        f"the process group {group.group_name!r} has backends for {', '.join(taken)}, but the "
        f"tensor is on {device}; move it there, or make the group with one for the cpu, as in "
        "init_process_group('cpu:gloo,cuda:nccl')"
    )


class ProcessWork:
    """A collective of a process group, from its launch to its result.

    Any threads may wait for it. The backend ends what takes longer than the time limit of the
    group. Memory of an accelerator belongs to the stream on which it was allocated, so what remains
    to be done is queued on the stream of the launch, and other streams wait for that one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        where: str,
        exchange: Exchange,
        sent: Tensor,
        arrived: Tensor,
        device: torch.device,
        finish: Callable[[], None],
    ) -> None:
        self._checks = checks_of(group)
        self._where = f"{where} (collective {self._checks.number}) for "
        self._where += repr(f"process group {group.group_name}")
        self._sent_on, self._device = sent.device, device
        self._stream: Stream | None = current_stream(device)
        # Holds what the backend reads and writes.
        self._finish: Callable[[], None] | None = finish
        # Who has failed before may go on nevertheless, and is expected here.
        self._generation = self._checks.failures.generation
        self._started = time.monotonic()
        self._turn = threading.Lock()
        self._error: Exception | None = None
        # On an accelerator: when the result is there, and the streams that wait for that.
        self._event: torch.Event | None = None
        self._ordered: set[Stream] = set()
        self._work: dist.Work | None = None
        if exchange.primitive != "nothing":
            try:
                self._work = exchange.start(sent, arrived, group)
            except RuntimeError as error:
                raise self._explained(str(error)) from error

    @property
    def completed(self) -> bool:
        """Whether it is waited for, without an error, and this thread can use the result."""
        if self._finish is not None or self._error is not None:
            return False
        if self._event is None or current_stream(self._device) in self._ordered:
            return True
        return self._event.query()

    def wait(self) -> None:
        """Wait for the result, the host or the current stream; raise what failed at every call."""
        if self._finish is not None:
            with self._turn:
                if self._finish is not None and self._error is None:
                    self._complete(self._finish)
        if self._error is not None:
            raise self._error.with_traceback(None)
        stream = current_stream(self._device)
        if self._event is not None and stream is not None and stream not in self._ordered:
            stream.wait_event(self._event)
            self._ordered.add(stream)

    def _complete(self, finish: Callable[[], None]) -> None:
        stream = self._stream
        try:
            # The launch was before the result had a history: what is still written is no change.
            with use_stream(stream), torch_internals.below_versions():
                self._wait_for_backend()
                # Not twice: an interrupted one has changed what it starts from.
                self._error = RuntimeError(f"{self._where} was interrupted; its result is lost")
                finish()
                self._error = None
                if stream is not None:
                    self._event = stream.record_event()
            self._finish = self._work = None
        except Exception as error:
            self._error = error

    def _wait_for_backend(self) -> None:
        failures = self._checks.failures
        try:
            while self._work is not None and not wait_briefly(self._work, self._sent_on, SLICE):
                if self._generation in failures.ends or failures.while_waiting() is not None:
                    error = self._explained(None)
                    self._checks.give_up(error)
                    raise error
        except CollectiveFailure:
            raise
        except RuntimeError as error:
            raise self._explained(str(error)) from error

    def _explained(self, reason: str | None) -> CollectiveFailure:
        failures = self._checks.failures
        return failures.explain(self._where, self._started, self._generation, reason)


def _gets_nothing(collective: AllToAll) -> bool:
    # The compiler's own test, which asks for no number that only the run knows.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return all(statically_known_true(rows == 0) for rows in collective.output_splits[0])
