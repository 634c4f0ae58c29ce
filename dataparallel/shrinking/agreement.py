"""What processes agree on at the end of a step: whether all of them have done it.

Note [A step that fails in one process]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The others wait for it in the reduction of gradients. Where backward fails among the replicas, the
reducer tells them, and the round fails in all processes. Where the step fails elsewhere before its
last round has ended, a round is begun for no other purpose than to fail. At the end of each step
the processes count, with one small collective, in how many of them it has failed. If it has in one,
each says whether it can run the step again, and all do so, or none.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from dataparallel.comm.process_errors import CollectiveError, CollectiveTimeout
from dataparallel.distributed import DistributedDataParallel
from dataparallel.reducer.errors import OtherRanksFailed
from dataparallel.repeating.step import num_processes

_LOST_TOUCH = (CollectiveError, CollectiveTimeout)


class Verdict(NamedTuple):
    """What all processes together say about a step that has failed.

    Attributes:
        repeat: Whether all run it again.
        why: Why not, in words.
    """

    repeat: bool
    why: str = ""


class StepAgreement:
    """The agreement of the processes of one wrapper. See Note [A step that fails in one process].

    Args:
        model: The wrapper.
    """

    def __init__(self, model: DistributedDataParallel[Any]) -> None:
        # Whoever keeps this must not keep the model.
        self._reference = weakref.ref(model)
        #: How many rounds a step has, as the last one had.
        self._usual_rounds = 1
        self._failure: BaseException | None = None

    @property
    def _model(self) -> DistributedDataParallel[Any]:
        model = self._reference()
        assert model is not None, "a wrapper is alive in its step"
        return model

    def begin(self) -> None:
        """A step begins."""
        model = self._model
        several = num_processes(model) > 1
        self._joins = several and model._join_config.enable
        self._concerns_others = several and model.require_backward_grad_sync and not self._joins
        # In no_sync() the others know nothing of a step, but they do of these.
        self._exchanges_alone = (
            several and not self._concerns_others and model.will_sync_module_buffers()
        )
        self._syncs_buffers = model.require_forward_param_sync
        self._begin_attempt()

    def begin_again(self) -> None:
        """The step begins again."""
        if self._concerns_others:
            self._model.require_forward_param_sync = self._syncs_buffers
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self._failure = None
        self._first_round = self._model.reducer.num_rounds

    def round_failed(self, error: BaseException) -> None:
        """A round of the reducer has failed, in all processes."""
        self._failure = error

    def succeeded(self) -> Verdict | None:
        """This process has done the step; a verdict if another one has not.

        Raises:
            CollectiveError, CollectiveTimeout: The processes have lost touch.
        """
        if not self._concerns_others:
            return None
        self._usual_rounds = max(1, self._num_rounds())
        return self._settle(failed=False, can_repeat=True, why="")

    def failed(self, error: Exception, *, can_repeat: bool, why: str) -> Verdict:
        """This process has failed.

        Args:
            error: Why.
            can_repeat: Whether it can run the step again, as far as that is known here.
            why: Why not.
        """
        if self._joins:
            return Verdict(False, "within join() a step cannot be run again")
        if self._exchanges_alone:
            return Verdict(
                False,
                "the first forward of the step has had the buffers of rank 0, which it cannot have "
                "again within no_sync()",
            )
        if not self._concerns_others:
            return Verdict(can_repeat, why)
        if not isinstance(error, _LOST_TOUCH):
            if self._failure is None and self._num_rounds() < self._usual_rounds:
                self._fail_together(error)
            with contextlib.suppress(*_LOST_TOUCH):
                can_repeat = can_repeat or isinstance(error, OtherRanksFailed)
                verdict = self._settle(failed=True, can_repeat=can_repeat, why=why)
                assert verdict is not None
                return verdict
        return Verdict(False, "the processes have lost touch")

    def _num_rounds(self) -> int:
        return self._model.reducer.num_rounds - self._first_round

    def _fail_together(self, error: Exception) -> None:
        def fail() -> NoReturn:
            raise _Told from error

        with contextlib.suppress(_Told):
            self._model.reducer.reduce(fail)

    def _settle(self, *, failed: bool, can_repeat: bool, why: str) -> Verdict | None:
        processes, group = self._model._reduction.processes, self._model.process_group
        assert processes is not None and group is not None
        count = torch.tensor([int(failed)])
        processes.control.all_reduce(count, what="in how many ranks a step has failed").wait()
        if not count.item():
            return None
        answers = processes.control.all_gather_json(
            "" if can_repeat else why, what="whether a step that has failed can be run again"
        )
        reasons = [
            f"rank {dist.get_global_rank(group, rank)}: {answer}"
            for rank, answer in enumerate(answers)
            if answer
        ]
        return Verdict(not reasons, "; ".join(reasons))


class _Told(Exception):
    """Ends a round that was begun to tell other processes of a failure."""
