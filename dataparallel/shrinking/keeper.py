"""Keep a wrapper training when a device is lost.

Note [A device that is lost]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Whatever a forward or a step raises, each device is asked whether it still works; error messages are
not looked at. A replica on a device that does not is dropped, see Note [Other replicas]. In forward
nothing has left the replicas yet: what they have changed meanwhile is brought back, buffers and
the states of the generators, and the forward runs again on the devices that are left, without other
processes noticing; except where that is not so, see Note [What cannot be run again]. In backward
the graph is gone, and gradients are half done: those of the round are dropped in all processes, and
the step has to be run again, by ``ReplicaKeeper.step`` or by whoever called it.

Replica 0 has the originals, and the state of the optimizer is on its device. If that is lost they
are lost, and training goes on from a checkpoint; so it does if a shard of an optimizer is lost.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from dataparallel.data_parallel import DataParallel
from dataparallel.distributed import DistributedDataParallel
from dataparallel.error_location import add_note
from dataparallel.repeating.obstacles import Obstacles
from dataparallel.repeating.rollback import RollbackPool
from dataparallel.repeating.step import StepRollback, obstacles_of, refuse_steps_in_backward
from dataparallel.shrinking.agreement import StepAgreement
from dataparallel.shrinking.device_loss import DeviceLost, first_line, is_lost, wait_for
from dataparallel.shrinking.lost_replica import LostReplica, devices_of, drop_lost, names_of

T = TypeVar("T")

_REMEDY = "go on from the last checkpoint"
# The keepers within whose forward this code runs; replicas' threads see it, too.
_inside: ContextVar[tuple[object, ...]] = ContextVar("kept_forwards", default=())


def survive_device_loss(
    model: DataParallel[Any], *, is_lost: Callable[[torch.device], bool] = is_lost
) -> ReplicaKeeper:
    """Let a wrapper go on with the devices that are left when one is lost.

    The replica on it is dropped, the others take its samples, and results stay exact. It can be
    added back with ``model.add_replica``. See Note [A device that is lost].

    Example::

        model = dataparallel.DataParallel(net, ["cpu", "cpu"])
        optimizer = torch.optim.AdamW(model.parameters())
        with dataparallel.survive_device_loss(model) as keeper:
            for x, y in loader:
                optimizer.zero_grad()
                keeper.step(lambda: criterion(model(x), y).backward())
                optimizer.step()
        print(keeper.history)

    With several processes each of them calls it. Keep what it returns outside of the module and the
    wrapper; it cannot be copied or pickled.

    Args:
        model: The wrapper.
        is_lost: Tells whether a device no longer works. Default:
            :func:`dataparallel.shrinking.device_loss.is_lost`, which lets it add two numbers.

    Returns:
        What keeps the wrapper training, until its ``close()`` or the end of its ``with`` block.

    Raises:
        TypeError: ``model`` is no wrapper of this package, or ``is_lost`` cannot be called.
        RuntimeError: The wrapper has a keeper already.
    """
    return ReplicaKeeper(model, is_lost=is_lost)


class ReplicaKeeper:
    """Drops replicas whose device is lost; see :func:`survive_device_loss`.

    Attributes:
        history: Each :class:`~dataparallel.shrinking.LostReplica`, in order.
    """

    def __init__(
        self, model: DataParallel[Any], *, is_lost: Callable[[torch.device], bool] = is_lost
    ) -> None:
        _check(model, is_lost)
        self._model = weakref.ref(model)
        self._timeline = model.timeline
        self._is_lost = is_lost
        self.history: list[LostReplica] = []
        self._lock = threading.Lock()
        self._rollbacks = RollbackPool(model.timeline.devices)
        self._agreement: StepAgreement | None = None
        self._in_step = False
        self._closed = False
        self._timeline.follow_devices(self._on_devices)
        model._keeper = self

    # --- forward ---------------------------------------------------------------------------------

    def attempt(self, call: Callable[[], T], modules: Sequence[nn.Module | None], inputs: Any) -> T:
        """What the wrapper runs its forwards through. See Note [A device that is lost]."""
        inside = _inside.get()
        if self in inside:
            # The outer forward is run again as a whole.
            return call()
        model = self._alive()
        if isinstance(model, DistributedDataParallel):
            model.reducer.at_failure = self._on_failed_round
        obstacles = obstacles_of(model, modules, inputs, _REMEDY)
        token = _inside.set((*inside, self))
        try:
            return self._repeated(call, () if obstacles.is_certain else modules, model, obstacles)
        finally:
            _inside.reset(token)

    def _repeated(
        self,
        call: Callable[[], T],
        modules: Sequence[nn.Module | None],
        model: DataParallel[Any],
        obstacles: Obstacles,
    ) -> T:
        weight = getattr(model._engine, "weight", None)
        with contextlib.ExitStack() as stack:
            with self._explaining(model):
                rollback = stack.enter_context(self._rollbacks.taken(modules))
            while True:
                before = model.timeline.devices
                try:
                    return call()
                except Exception as error:
                    lost = self._drop_lost(model, error)
                    if model.timeline.devices == before:
                        raise
                    obstacle = obstacles.found()
                    if obstacle:
                        raise DeviceLost(
                            f"{names_of(lost)}. {obstacle}", devices_of(lost)
                        ) from error
                # Only here the exception is gone, and what its traceback held.
                with self._explaining(model):
                    rollback.undo()
                if hasattr(model._engine, "weight"):
                    model._engine.weight = weight

    # --- what is lost ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _explaining(self, model: DataParallel[Any]) -> Iterator[None]:
        """For what needs the first device only: if it is lost, the error says what that means."""
        try:
            yield
        except RuntimeError as error:
            self._drop_lost(model, error)
            raise

    def _drop_lost(self, model: DataParallel[Any], error: BaseException) -> list[LostReplica]:
        with self._lock:
            found = drop_lost(model, self._is_lost, error)
            self.history += found
        return found

    def _on_devices(self, kept: Sequence[int | None]) -> None:
        self._rollbacks.use_devices(self._timeline.devices)

    # --- backward --------------------------------------------------------------------------------

    def _on_failed_round(self, error: BaseException, told: bool) -> None:
        """The reducer has dropped the gradients of a round."""
        if self._in_step and self._agreement is not None:
            self._agreement.round_failed(told)
            return
        model = self._model()
        devices = () if model is None else model.timeline.devices
        lost = [f"replica {i} on {d}" for i, d in enumerate(devices) if self._is_lost(d)]
        if lost:
            add_note(
                error,
                f"the device of {' and of '.join(lost)} is lost. The gradients of this round were "
                "dropped in all processes: run the step again, in all of them, as "
                "ReplicaKeeper.step does. The next forward drops the replica",
            )

    def step(
        self,
        closure: Callable[[], T],
        parameters: Iterable[torch.Tensor] | None = None,
        modules: Iterable[nn.Module] = (),
    ) -> T:
        """Compute gradients, again on the devices that are left if one is lost.

        With several processes all of them call it, and run the step again together. It waits for
        the devices, so that a failure is noticed before the optimizer uses what was computed.

        Example::

            def gradients():
                loss = criterion(model(x), y)
                loss.backward()
                return loss.detach()

            loss = keeper.step(gradients)
            optimizer.step()

        Args:
            closure: Forward and backward, without the step of an optimizer. It may be called
                several times; gradients, buffers and generators are then as they were before. It
                must not write its inputs in place, and with several processes it must not call
                collectives of its own.
            parameters: All tensors that it gives gradients. Default: the wrapper's parameters.
            modules: Further modules whose buffers it may write, such as a criterion. Default: none.

        Returns:
            What ``closure`` returns.

        Raises:
            DeviceLost: Training cannot go on without the device, or the step cannot be run again.
            RuntimeError: Optimizers step in backward, or the keeper was closed.
            BaseException: What ``closure`` raises, if no device was lost.
        """
        model = self._alive()
        if self._closed:
            raise RuntimeError(
                "this ReplicaKeeper was closed; make another with dataparallel.survive_device_loss"
            )
        if self._in_step:
            raise RuntimeError(
                "a step of this ReplicaKeeper is under way, in another thread or around this one; "
                "one step ends before the next begins"
            )
        refuse_steps_in_backward(model)
        with self._explaining(model):
            state = StepRollback(model, parameters, modules)
        self._in_step = True
        try:
            return self._repeated_step(closure, model, state)
        finally:
            self._in_step = False

    def _repeated_step(
        self, closure: Callable[[], T], model: DataParallel[Any], state: StepRollback
    ) -> T:
        agreement = self._begin_agreement(model)
        while True:
            before = model.timeline.devices
            try:
                result = closure()
                wait_for(model.timeline.devices)
            except Exception as error:
                self._prepare_repeat(model, error, before)
            else:
                if self._is_done():
                    return result
            with self._explaining(model):
                state.undo()
            if agreement is not None:
                agreement.begin_again()

    def _begin_agreement(self, model: DataParallel[Any]) -> StepAgreement | None:
        if not isinstance(model, DistributedDataParallel):
            return None
        if self._agreement is None:
            self._agreement = StepAgreement(model)
        self._agreement.begin()
        return self._agreement

    def _is_done(self) -> bool:
        """Whether all processes have done the step."""
        verdict = None if self._agreement is None else self._agreement.succeeded()
        if verdict is None:
            return True
        if not verdict.repeat:
            raise RuntimeError(
                f"the step has failed in another process, and cannot be run again: {verdict.why}"
            )
        return False

    def _prepare_repeat(
        self, model: DataParallel[Any], error: Exception, before: Sequence[torch.device]
    ) -> None:
        """Return where the step can be run again; raise what the caller gets where not."""
        why: Exception = error
        lost: list[LostReplica] = []
        try:
            lost = self._drop_lost(model, error)
        except DeviceLost as final:
            why = final
        can_repeat = model.timeline.devices != tuple(before) and not isinstance(why, DeviceLost)
        # Without its first device this process can take part in no round, and after a forward that
        # cannot be run again the others are not where they would listen.
        tells = not isinstance(error, DeviceLost) and not self._is_home_lost(why, before)
        if self._agreement is not None and tells:
            verdict = self._agreement.failed(error, can_repeat=can_repeat, why=first_line(why))
            if verdict.repeat:
                return
            if can_repeat:
                raise DeviceLost(
                    f"{names_of(lost)}. The step cannot be run again: {verdict.why}",
                    devices_of(lost),
                ) from error
            if verdict.why and why is error:
                add_note(error, f"the step is not run again: {verdict.why}")
        elif self._agreement is not None:
            self._agreement.lose_touch(why)
        elif can_repeat:
            return
        _raise(why)

    @staticmethod
    def _is_home_lost(why: Exception, devices: Sequence[torch.device]) -> bool:
        return isinstance(why, DeviceLost) and devices[0] in why.devices

    # --- life ------------------------------------------------------------------------------------

    def _alive(self) -> DataParallel[Any]:
        model = self._model()
        if model is None:
            raise RuntimeError("the wrapper of this ReplicaKeeper is gone")
        return model

    def close(self) -> None:
        """Stop; an error of a device is raised as it is. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._timeline.leave_devices(self._on_devices)
        if self._agreement is not None:
            self._agreement.close()
        model = self._model()
        if model is not None and model._keeper is self:
            model._keeper = None
            if isinstance(model, DistributedDataParallel):
                model.reducer.at_failure = _nothing

    def __enter__(self) -> ReplicaKeeper:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ReplicaKeeper belongs to one wrapper, and can be neither copied nor pickled: keep "
            "it outside of the module and the wrapper, and make another with "
            "dataparallel.survive_device_loss"
        )


def _nothing(error: BaseException, told: bool) -> None:
    """What is done about a failed round where there is no keeper."""


def _raise(error: Exception) -> NoReturn:
    try:
        raise error
    finally:
        # The traceback holds this frame, which would hold the error.
        del error


def _check(model: object, is_lost: object) -> None:
    if not isinstance(model, DataParallel):
        raise TypeError(
            f"a wrapper of this package survives the loss of a device, but got "
            f"{type(model).__name__}; wrap the module in dataparallel.DataParallel or "
            "DistributedDataParallel"
        )
    if not callable(is_lost):
        raise TypeError(
            f"is_lost tells of a device whether it no longer works, a function, but got {is_lost!r}"
        )
    if model._keeper is not None:
        raise RuntimeError("the wrapper has a ReplicaKeeper already; close it, or go on with it")
