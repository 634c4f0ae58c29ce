"""The facts that a reducer is told once: its wrapper's options, and its parameters."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from dataparallel.torch_internals import IGNORED_NAMES

if TYPE_CHECKING:
    from dataparallel.optim.in_backward import StepsInBackward
    from dataparallel.reducer.comm_hooks import ResolvedHook
    from dataparallel.reducer.nonfinite import NonFinitePolicy

#: ``"processes"``: the mean over the processes, as in torch. ``"samples"``: the mean weighted by
#: each process's number of samples, or by a weight that the user gives. ``"none"``: the sum.
AverageKind: TypeAlias = Literal["processes", "samples", "none"]

MIB = 2**20
#: As in torch: small, so that communication begins early.
FIRST_BUCKET_BYTES = MIB
#: As in torch.
BUCKET_BYTES = 25 * MIB
#: On the CPU what is sent early costs little, and gradients are packed while a cache has them.
CPU_BUCKET_BYTES = 8 * MIB
#: Without processes nothing is sent, and what a bucket holds is freed when it is summed: small
#: buckets keep less alive.
LOCAL_BUCKET_BYTES = 4 * MIB

_log = logging.getLogger("dataparallel")


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes with which replicas compute and send gradients.

    The module's own parameters and their gradients keep their dtype, so optimizers and checkpoints
    do not change. Only floating-point tensors are converted.

    Example::

        model = DistributedDataParallel(net, mixed_precision=MixedPrecision(torch.bfloat16))

    Args:
        param_dtype: The dtype of the replicas' parameters and inputs. Default: no change.
        reduce_dtype: The dtype of the gradients that the reducer sends. Default: ``param_dtype``.
        buffer_dtype: The dtype of buffers, which the constructor converts. Default: no change.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None

    @staticmethod
    def of(config: Any) -> MixedPrecision:
        """Read a configuration: None, one of this class, or torch's ``_MixedPrecision``."""
        if config is None:
            return MixedPrecision()
        reduced = config.reduce_dtype or config.param_dtype
        return MixedPrecision(config.param_dtype, reduced, config.buffer_dtype)

    def convert_buffers(self, module: nn.Module) -> None:
        """Convert the floating-point buffers of a module, in place."""
        for buffer in module.buffers() if self.buffer_dtype else ():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(self.buffer_dtype)

    def convert_input(self, value: Any) -> Any:
        """Return a leaf of a forward's arguments as the replicas get it; gradients flow back."""
        converts = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.param_dtype) if converts else value


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a wrapper for its reduction; see the arguments of the wrapper."""

    process_group: dist.ProcessGroup | None
    #: True if this process trains by itself on purpose, if there are others or not.
    separate: bool
    bucket_cap_mb: float | Sequence[float] | None
    find_unused_parameters: bool | None
    gradient_as_bucket_view: bool
    static_graph: bool
    #: Names of parameters that are reduced last.
    delayed: frozenset[str]
    average: AverageKind
    deterministic: bool
    timeout: float | None
    mixed_precision: MixedPrecision
    nonfinite: NonFinitePolicy
    #: True if the replicas are recorded in graphs of their devices.
    capture: bool = False
    #: True if the module is on the CPU.
    on_cpu: bool = False
    #: True if buffers are sent to other processes, and so must have the same shapes there.
    sends_buffers: bool = True
    #: True if they are sent before forwards; and true if all states are when the wrapper is made.
    forward_sync_buffers: bool = True
    init_sync: bool = True
    #: Takes the place of the all-reduce.
    hook: ResolvedHook | None = None
    #: The optimizers that take steps in backward.
    optimizers: StepsInBackward | None = None

    def __post_init__(self) -> None:
        caps = self.bucket_cap_mb
        sizes = caps if isinstance(caps, Sequence) else [caps or 0.0]
        if not sizes or min(sizes) < 0:
            raise ValueError(f"bucket_cap_mb is one size or several, in MiB, but got {caps!r}")
        if self.optimizers is not None and self.nonfinite.action != "ignore":
            raise ValueError(
                f"nonfinite={self.nonfinite.action!r} and optimizers in backward do not go "
                "together: some parameters have taken their step when a gradient is found that is "
                "not finite; leave nonfinite at 'ignore', or take the step after backward"
            )
        if self.hook is None:
            return
        if self.process_group is None:
            raise ValueError(
                "a communication hook reduces over processes, but there is no process group; call "
                "torch.distributed.init_process_group() before the module is wrapped"
            )
        if self.deterministic:
            raise ValueError(
                "deterministic=True makes the sum over processes in rank order, which a "
                "communication hook replaces; use one of them"
            )
        if self.hook.is_power_sgd and self.nonfinite.action == "skip":
            raise ValueError(
                "nonfinite='skip' does not go with PowerSGD: its state keeps a NaN, so all later "
                "steps would be skipped; pass nonfinite='raise', or use another hook"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        nonfinite, optimizers = copy.deepcopy((self.nonfinite, self.optimizers), memo)
        return replace(self, nonfinite=nonfinite, optimizers=optimizers)

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group not in (None, default_group()):
            _log.warning(
                "the pickle of a wrapper does not hold its process group: who loads it gets the "
                "default group, or calls update_process_group(group) of the wrapper"
            )
        return {**vars(self), "process_group": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        group = None if state["separate"] else default_group()
        vars(self).update(state, process_group=group)

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return 1 if self.process_group is None else dist.get_world_size(self.process_group)

    def bucket_bytes(self, *, sends: bool) -> int | tuple[int, ...]:
        """Return the limit of the buckets behind the first one, or a limit for each."""
        caps = self.bucket_cap_mb
        if caps is None:
            sent = CPU_BUCKET_BYTES if self.on_cpu else BUCKET_BYTES
            return sent if sends else LOCAL_BUCKET_BYTES
        return (
            tuple(int(cap * MIB) for cap in caps) if isinstance(caps, Sequence) else int(caps * MIB)
        )


def default_group() -> dist.ProcessGroup | None:
    """Return the default process group; None where there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def find_group(group: Any, mesh: Any = None) -> dist.ProcessGroup | None:
    """Return the given group, that of a mesh of one dimension, or the default one, if any."""
    if mesh is not None:
        if group is not None:
            raise ValueError("pass process_group or device_mesh, not both")
        group = mesh.get_group()
    if group is None or group is False:
        return default_group() if group is None else None
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "process_group is a torch.distributed.ProcessGroup of which this process is a member, "
            f"None for the default group, or False for none, but got {group!r}"
        )
    return group


@dataclass(frozen=True)
class TrainedParameters:
    """The parameters that require grad, each once, and what is known of each.

    Attributes:
        parameters, names: First those that are reduced over processes, then those that are not.
        indices: Their numbers among all parameters of the module.
        sparse: True for each parameter whose gradients will be sparse.
        num_reduced: How many are reduced over processes.
    """

    parameters: tuple[nn.Parameter, ...]
    names: tuple[str, ...]
    indices: tuple[int, ...]
    sparse: tuple[bool, ...]
    num_reduced: int


def trained_parameters(module: nn.Module) -> TrainedParameters:
    """Find the parameters of a module that a reducer is to have."""
    sparse = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
    }
    ignored = ignored_names(module)
    found = [(index, *named) for index, named in enumerate(module.named_parameters())]
    shared = [each for each in found if each[1] not in ignored]
    # All are frozen since the wrapper was made, as those of an average may be.
    reduced = [each for each in shared if each[2].requires_grad] or shared
    kept = [each for each in found if each[1] in ignored and each[2].requires_grad]
    chosen = [*reduced, *kept]
    return TrainedParameters(
        parameters=tuple(parameter for _, _, parameter in chosen),
        names=tuple(name for _, name, _ in chosen),
        indices=tuple(index for index, _, _ in chosen),
        sparse=tuple(id(parameter) in sparse for _, _, parameter in chosen),
        num_reduced=len(reduced),
    )


def ignored_names(module: nn.Module) -> set[str]:
    """Names of the parameters and buffers that each process keeps to itself.

    They are those that torch's ``_set_params_and_buffers_to_ignore_for_model`` has left in the
    module, with or without the dot that torch's recipe puts before names of the module itself.
    A tensor with several names is left out if all of them were given.
    """
    given = {name.removeprefix(".") for name in getattr(module, IGNORED_NAMES, ())}
    if not given:
        return given
    parameters = module.named_parameters(remove_duplicate=False)
    named = [*parameters, *module.named_buffers(remove_duplicate=False)]
    kept = {id(tensor) for name, tensor in named if name not in given}
    return {name for name, tensor in named if name in given and id(tensor) not in kept}


def shared_tensors(
    module: nn.Module, *, parameters: bool = True, buffers: bool = True
) -> dict[str, torch.Tensor]:
    """Return the common tensors of all processes, by name; modules may assign new ones."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters()) if parameters else {}
    found.update(module.named_buffers() if buffers else ())
    ignored = ignored_names(module)
    return {name: tensor for name, tensor in found.items() if name not in ignored}
