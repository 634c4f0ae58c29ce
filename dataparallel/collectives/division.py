"""How replicas on the CPU share the work of a collective of large tensors.

Note [Divided work]
~~~~~~~~~~~~~~~~~~~
Small results are computed for all by one replica, which is sooner done than divided. Of large
tensors in host memory each replica computes its own result, all at the same time. A reduction that
all get would then read all tensors once per replica; from three replicas on each reduces a part for
all instead, and then takes a copy of the whole. The order of a sum is that of the replicas in any
case, and all get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dataparallel.collectives.collective import AllReduce, Collective
from dataparallel.collectives.fresh_memory import fresh_like
from dataparallel.collectives.members import LocalMembers
from dataparallel.collectives.reductions import reduce_terms
from dataparallel.devices import is_accelerator

# Bytes from which work is divided.
_LARGE = 256 * 1024


def is_worth_dividing(inputs: Sequence[Tensor]) -> bool:
    """Whether the members should divide the work.

    Args:
        inputs: One tensor per member.
    """
    if any(is_accelerator(x.device) for x in inputs):
        return False
    return max(x.numel() * x.element_size() for x in inputs) >= _LARGE


class Division:
    """The work of one collective, divided. See Note [Divided work].

    Example::

        division = Division(collective, inputs)     # by one replica, when all have come
        result = division.begin(index)              # by each replica
        ...                                         # all replicas meet
        division.complete(result)                   # by each replica; nobody reads the inputs

    Args:
        collective: What to compute, with dimensions counted from the front.
        inputs: One tensor per member. Gradients are not recorded.
    """

    def __init__(self, collective: Collective, inputs: Sequence[Tensor]) -> None:
        self.collective = collective
        self.members = LocalMembers(len(inputs))
        self._inputs = [x.detach() for x in inputs]
        self._total: Tensor | None = None
        if isinstance(collective, AllReduce) and len(inputs) > 2 and self._are_alike():
            self._total = fresh_like(self._inputs[0])

    def begin(self, member: int) -> Tensor:
        """Do what has to read the inputs.

        Returns:
            The result of the member in new memory, right once :meth:`complete` has been called.
        """
        if not isinstance(self.collective, AllReduce):
            return self.members.result(self.collective, self._inputs, member)
        result = fresh_like(self._inputs[0])
        if self._total is None:
            return reduce_terms(self.collective.op, self._inputs, out=result)
        size = self.members.size
        parts = [x.view(-1).tensor_split(size)[member] for x in self._inputs]
        reduce_terms(self.collective.op, parts, out=self._total.view(-1).tensor_split(size)[member])
        return result

    def complete(self, result: Tensor) -> None:
        """Do what has to wait until all have begun.

        Args:
            result: What :meth:`begin` returned.
        """
        if self._total is not None:
            result.copy_(self._total)

    def _are_alike(self) -> bool:
        return all(x.is_contiguous() and not x.is_conj() and not x.is_neg() for x in self._inputs)
