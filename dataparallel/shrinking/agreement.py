"""What processes agree on at the end of a step: whether all of them have done it.

Note [A step that fails in one process]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The others wait for it in the reduction of gradients, or they have done their step; it cannot know
which, since a step may have any number of rounds. Where backward fails among the replicas, the
reducer tells them, and the round fails in all processes. Where the step fails elsewhere, one more
round is begun, for no other purpose than to fail.

At the end of a step, or after its failure, each process says whether it has failed and how many
rounds it has had, over a link of its own: a process that fails says so before it begins that last
round. Those that are in a round fail with it; those that have done their step see that they have
had a round less than another, and take part in it. Then all have had the same rounds. Each says
whether it can run the step again, and all do so, or none.

Buffers of rank 0 that a step begins with are sent before it, since a forward may not be reached.
Who cannot take part, or has lost touch, breaks all links, as an error in a forward does: nobody
waits for it, and all make new ones.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from dataparallel.comm.process_errors import CollectiveError, CollectiveTimeout
from dataparallel.comm.processes import ProcessLink
from dataparallel.distributed import DistributedDataParallel
from dataparallel.reducer.errors import OtherRanksFailed
from dataparallel.repeating.step import num_processes
from dataparallel.shrinking.device_loss import first_line

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
        self._link: ProcessLink | None = None
        #: How many rounds had ended when the last failed of which all processes know.
        self._failed_at = -1

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
        self._failed_at = -1
        if self._concerns_others:
            self._open(model)
            self._sync_buffers(model)

    def _open(self, model: DistributedDataParallel[Any]) -> None:
        """Make the link where there is none, or where the processes have lost touch."""
        processes = model._reduction.processes
        assert processes is not None
        if self._link is None or processes.is_broken:
            self.close()
            # What it carries is always of the same shape.
            self._link = ProcessLink(
                model.process_group, timeout=model.timeout, purpose="steps", checks="off"
            )
        if not processes.is_broken:
            processes.companion = self._link

    def close(self) -> None:
        """Give the link back."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def begin_again(self) -> None:
        """The step begins again."""
        self._failed_at = -1
        if self._concerns_others:
            self._model.require_forward_param_sync = self._syncs_buffers
            self._sync_buffers(self._model)

    @staticmethod
    def _sync_buffers(model: DistributedDataParallel[Any]) -> None:
        """Do what the first forward would do: a process that fails before it takes part, too."""
        processes = model._reduction.processes
        is_open = processes is not None and not (processes.is_broken or model._closed)
        if is_open and model._check_sync_bufs_pre_fwd():
            model._sync_buffers()
            model.require_forward_param_sync = False

    def round_failed(self, told: bool) -> None:
        """A round of the reducer has failed.

        Args:
            told: Whether the other processes know.
        """
        if told:
            self._failed_at = self._model.reducer.num_ended

    def succeeded(self) -> Verdict | None:
        """This process has done the step; a verdict if another one has not.

        Raises:
            CollectiveError, CollectiveTimeout: The processes have lost touch.
        """
        if not self._concerns_others:
            return None
        return self._settle(None, can_repeat=True, why="")

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
        if isinstance(error, _LOST_TOUCH):
            self.lose_touch(error)
        else:
            with contextlib.suppress(*_LOST_TOUCH):
                can_repeat = can_repeat or isinstance(error, OtherRanksFailed)
                verdict = self._settle(error, can_repeat=can_repeat, why=why)
                assert verdict is not None
                return verdict
        return Verdict(False, "the processes have lost touch")

    def lose_touch(self, error: Exception) -> None:
        """This process takes no part in the agreement; all of them make their links anew."""
        processes = self._model._reduction.processes
        if self._concerns_others and processes is not None:
            self._model.require_forward_param_sync = True
            processes.tell(error, "a step")

    def _settle(self, error: Exception | None, *, can_repeat: bool, why: str) -> Verdict | None:
        try:
            return self._agree(error, can_repeat=can_repeat, why=why)
        except _LOST_TOUCH as lost:
            self.lose_touch(lost)
            raise

    def _agree(self, error: Exception | None, *, can_repeat: bool, why: str) -> Verdict | None:
        link, group = self._link, self._model.process_group
        assert link is not None and group is not None
        ended = self._model.reducer.num_ended
        rounds = ended + int(error is not None and self._failed_at != ended)
        most = torch.tensor([int(error is not None), rounds])
        pending = link.all_reduce(most, op="max", what="whether a step has failed")
        self._fail_rounds(rounds, error)
        pending.wait()
        if not most[0]:
            return None
        # As after a forward, whether there was one here or not.
        self._model.require_forward_param_sync = True
        self._fail_rounds(int(most[1]), error)
        answers = link.all_gather_json(
            "" if can_repeat else why, what="whether a step that has failed can be run again"
        )
        reasons = [
            f"rank {dist.get_global_rank(group, rank)}: {answer}"
            for rank, answer in enumerate(answers)
            if answer
        ]
        return Verdict(not reasons, "; ".join(reasons))

    def _fail_rounds(self, number: int, error: Exception | None) -> None:
        """Have so many rounds, as another process has; all that are missing fail."""
        why = "in another process" if error is None else first_line(error)

        def fail() -> NoReturn:
            raise StepFailed(why)

        reducer = self._model.reducer
        while reducer.num_ended < number:
            with contextlib.suppress(StepFailed):
                reducer.reduce(fail)


class StepFailed(Exception):
    """Ends a round that was begun to tell other processes of a failure."""
