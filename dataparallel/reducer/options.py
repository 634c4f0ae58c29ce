"""The options of a wrapper for the reduction of its gradients: values alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dataparallel.reducer.parameters import MixedPrecision

#: ``"processes"``: the mean over the processes, as in torch. ``"samples"``: the mean weighted by
#: each process's number of samples, or by a weight that the user gives. ``"none"``: the sum.
AverageKind: TypeAlias = Literal["processes", "samples", "none"]
#: ``"ignore"``: nobody looks. ``"skip"``: the step is skipped in all processes. ``"raise"``: all
#: processes raise :class:`~dataparallel.reducer.nonfinite.NonFiniteGradients`.
NonFiniteAction: TypeAlias = Literal["ignore", "skip", "raise"]

#: ``"home"``: the parameters of the module are on the first device. ``"spread"``: each is on one of
#: all devices, with its gradient and the state of its optimizer.
OriginalsKind: TypeAlias = Literal["home", "spread"]

MIB = 2**20
#: As in torch.
BUCKET_BYTES = 25 * MIB
#: On the CPU what is sent early costs little, and gradients are packed while a cache has them.
CPU_BUCKET_BYTES = 8 * MIB


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a wrapper for its reduction; see the arguments of the wrapper."""

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
    nonfinite: NonFiniteAction
    #: Where the parameters of the module are.
    originals: OriginalsKind = "home"
    #: True if the replicas are recorded in graphs of their devices.
    capture: bool = False
    #: True if the module is on the CPU.
    on_cpu: bool = False
    #: True if buffers are sent to other processes, and so must have the same shapes there.
    sends_buffers: bool = True
    #: True if they are sent before forwards; and true if all states are when the wrapper is made.
    forward_sync_buffers: bool = True
    init_sync: bool = True

    @property
    def spreads(self) -> bool:
        """True if the originals are on all devices."""
        return self.originals == "spread"

    def __post_init__(self) -> None:
        caps = self.bucket_cap_mb
        sizes = caps if isinstance(caps, Sequence) else [caps or 0.0]
        if not sizes or min(sizes) < 0:
            raise ValueError(f"bucket_cap_mb is one size or several, in MiB, but got {caps!r}")

    def allow_steps_in_backward(self) -> None:
        """Raise an error if optimizers cannot take their steps in backward."""
        if self.nonfinite != "ignore":
            raise ValueError(
                f"nonfinite={self.nonfinite!r} and optimizers in backward do not go "
                "together: some parameters have taken their step when a gradient is found that is "
                "not finite; leave nonfinite at 'ignore', or take the step after backward"
            )

    def bucket_bytes(self, local: int | None = None) -> int | tuple[int, ...]:
        """Return the limit of the buckets behind the first one, or a limit for each.

        ``local`` is that of buckets which no other process gets, if nobody has set one.
        """
        caps = self.bucket_cap_mb
        if caps is None:
            sent = CPU_BUCKET_BYTES if self.on_cpu else BUCKET_BYTES
            return sent if local is None else local
        return (
            tuple(int(cap * MIB) for cap in caps) if isinstance(caps, Sequence) else int(caps * MIB)
        )
