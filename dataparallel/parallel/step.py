"""One forward of a wrapper as a straight function.

batch -> plan -> chunks -> clones -> worker threads -> commit -> cut -> gather, or the loss
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dataparallel import torch_internals
from dataparallel.batch.gather import Scalars, gather_result, has_scalars, join_scalars
from dataparallel.batch.scatter import TARGETS, Leaf, watch
from dataparallel.batch.tree import flatten
from dataparallel.errors import add_note, listed
from dataparallel.graph.cut import ReplicaInputs
from dataparallel.graph.functions import refuse_tangents
from dataparallel.parallel.buffers import runs_by_itself
from dataparallel.parallel.loss import Loss
from dataparallel.parallel.runner import Runner
from dataparallel.parallel.training import Training
from dataparallel.replicas.clones import (
    ModuleClones,
    Parts,
    Result,
    check_placement,
    left_elsewhere,
)
from dataparallel.threads.timeline import NO_SPAN, Phase, Timeline, mark_backward

if TYPE_CHECKING:
    from dataparallel.parallel.data_parallel import DataParallel


def _span(timeline: Timeline | None, phase: Phase) -> AbstractContextManager[object]:
    return NO_SPAN if timeline is None else timeline.span(phase)


class Chunks(NamedTuple):
    """The arguments of the replicas in one forward."""

    args: Sequence[Any]
    kwargs: Sequence[Mapping[str, Any]]
    #: Number of samples per replica.
    sizes: tuple[int, ...]
    #: The reason why the samples were not counted, if they could not be; each chunk counts 1 then.
    fault: str = ""
    #: Objects that all replicas get.
    shared: Sequence[Leaf] = ()


@dataclass(frozen=True)
class Call:
    """The facts that one forward gets besides its inputs."""

    #: The training of the wrapper; None without a reducer.
    training: Training | None = None
    #: The weight of this process in an average over samples; None adds up its chunks.
    weight: float | None = 1.0
    #: True if the backward is reduced over processes.
    synchronize: bool = True
    #: The loss that each replica computes from its output, if any.
    loss: Loss | None = None


def run(
    model: DataParallel[Any], call: Call, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run one forward; return the gathered outputs, or the loss of the batch."""
    try:
        if model._splitter is None:
            return _run(model, call, inputs, kwargs)
        criterion = None if call.loss is None else call.loss.module
        attempt = functools.partial(_run, model, call, inputs, kwargs)
        return model._splitter.attempt(attempt, (model.module, criterion), (inputs, kwargs))
    except RuntimeError as error:
        if "on the same device" in str(error):
            _explain(error, model)
        raise


def _explain(error: RuntimeError, model: DataParallel[Any]) -> None:
    """Add to torch's error on devices which tensors nobody has moved, if there are some."""
    left = left_elsewhere(model.module, model.device_ids[0])
    if left:
        add_note(
            error,
            f"these attributes hold tensors that are no parts of the module, so that no replica "
            f"has its own: {listed(left)}; register them as submodules, parameters or buffers "
            "(what is not trained with requires_grad_(False))",
        )


def _run(
    model: DataParallel[Any],
    call: Call,
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    is_first: bool = True,
) -> Any:
    """Run the part of a forward that is repeated if a replica has too little memory."""
    runner, loss, training = model._runner, call.loss, call.training
    # Without listeners nobody has to hear of phases.
    timeline = model.timeline if model.timeline.listeners else None
    if training is None:
        direct = len(runner.devices) == 1 and runs_by_itself(model.module)
    else:
        direct = training.direct
    if not direct and torch_internals.forward_mode_level() >= 0:
        module = model.module
        held = *module.parameters(), *module.buffers(), *Parts(module).loose_tensors()
        refuse_tangents((*flatten((inputs, kwargs))[0], *held))
    with _span(timeline, "scatter"), runner.quiet():
        chunks = model._split(inputs, kwargs)
    if is_first and timeline is not None:
        timeline.call(chunks.sizes)
    if direct and training is None:
        check_placement(model.module, runner.devices[0])
    if direct and loss is None:
        with _span(timeline, "forward"):
            output = model.module(*chunks.args[0], **chunks.kwargs[0])
        result = model._join([output])
    else:
        result = _run_replicas(model, call, chunks, timeline, direct=direct)
    if timeline is not None and (training is None or direct):
        # No cut tells of the backward.
        mark_backward(timeline, flatten(result)[0])
    return result


def _run_replicas(
    model: DataParallel[Any], call: Call, chunks: Chunks, timeline: Timeline | None, *, direct: bool
) -> Any:
    """Run the chunks through the replicas, and join their outputs."""
    runner, loss, training = model._runner, call.loss, call.training
    with _span(timeline, "scatter"):
        rule = model.scalars if loss is None else "stack"
        weigh = functools.partial(join_scalars, rule, *chunks[:4], weighs=call.weight is None)
        # Its function is not for outputs without scalars. It may wait for the device, so that it
        # comes before the forward where such a call has had scalars.
        kind = len(chunks.args[0]), *chunks.kwargs[0]
        waits = callable(rule) and call.weight is not None
        joining = None if waits and kind not in model._notes.with_scalars else weigh()
        args, kwargs, given = chunks.args, chunks.kwargs, None
        if training is not None:
            args, kwargs, given = training.begin(args, kwargs)
        replicas: Sequence[Any] = [model.module]
        if not direct:
            replicas = model.replicate(model.module, model.device_ids[: len(args)])
        called = replicas
        if training is not None and training.recorder is not None:
            named = _without_targets(kwargs)
            called = training.recorder.replace(training.clones, replicas, args, named)
    guarded = watch(chunks.shared) if chunks.shared else contextlib.nullcontext()
    with contextlib.ExitStack() as stack:
        used = [stack.enter_context(runner.using(replicas))]
        if loss is None:
            forward = functools.partial(model.parallel_apply, called, args, kwargs)
        else:
            criteria = _criteria(runner, loss, len(args))
            used.append(stack.enter_context(runner.using(criteria)))
            each = zip(called, criteria, args, kwargs, chunks.sizes, strict=True)
            calls = [functools.partial(loss, model.timeline, *one) for one in each]
            forward = functools.partial(runner.run, calls)
        with guarded:
            outputs = forward()
        clones, assigned = list(filter(None, used)), False
        for one in clones:
            assigned |= runner.check(one, chunks.sizes)
        with _span(timeline, "gather"):
            found = _results(clones, given or ()) if assigned else []
            if joining is None and has_scalars((outputs[0], [one.tensors[0] for one in found])):
                model._notes.with_scalars.add(kind)
                joining = weigh()
            scalars, counts = joining or ("stack", chunks.sizes)
            if found:
                outputs = _beside(outputs, found)
            if training is not None and given is not None:
                weight = float(sum(counts)) if call.weight is None else call.weight
                outputs = training.end(given, outputs, weight=weight, synchronize=call.synchronize)
            results: dict[int, torch.Tensor] = {}
            if found:
                known = (scalars, counts) if loss is None else None
                outputs, results = _join_results(model, chunks, found, outputs, known)
            for one in clones:
                one.commit(results)
            if loss is not None:
                return loss.combine(outputs, _place_of_loss(model))
            with runner.quiet():
                return model._join(outputs, scalars, counts, None if chunks.fault else chunks.sizes)


def _criteria(runner: Runner, loss: Loss, count: int) -> Sequence[Any]:
    """Return the criterion of each replica; a clone if it is a module."""
    if loss.module is None or count == 1:
        return [loss.criterion] * count
    return runner.lend(loss.module, count)


def _place_of_loss(model: DataParallel[Any]) -> Any:
    return model.device_ids[0] if model.output_device == "each" else model.output_device


# --- results in attributes -----------------------------------------------------------------------


def _results(clones: Sequence[ModuleClones], given: Sequence[ReplicaInputs]) -> list[Result]:
    """Return the tensors that the forward has left in attributes of modules."""
    leaves = {id(leaf) for one in given for leaf in one.leaves}
    return [result for one in clones for result in one.results(leaves)]


def _beside(outputs: Sequence[Any], found: Sequence[Result]) -> list[Any]:
    """Per replica its output, and for each result a list with its tensor, if it has one."""
    return [(o, *[result.tensors[i : i + 1] for result in found]) for i, o in enumerate(outputs)]


def _join_results(
    model: DataParallel[Any],
    chunks: Chunks,
    found: Sequence[Result],
    rows: Sequence[Any],
    joining: tuple[Scalars, Sequence[float]] | None,
) -> tuple[list[Any], dict[int, torch.Tensor]]:
    """Return the outputs, and the modules' results by the ids of the tensors of replica 0.

    ``rows`` are what :func:`_beside` has made, as the cut has returned them; ``joining`` tells what
    becomes of 0-d outputs, and what each chunk counts, where that is known.
    """
    outputs, *columns = map(list, zip(*rows, strict=True))
    joined = [[tensor for part in column for tensor in part] for column in columns]
    if len(model.device_ids) == 1:
        tensors = [column[0] for column in joined]
    else:
        scalars, counts = joining or ("stack", chunks.sizes)
        if joining is None and has_scalars(joined):
            kwargs = _without_targets(chunks.kwargs)
            scalars, counts = join_scalars(
                model.scalars, chunks.args, kwargs, chunks.sizes, weighs=False
            )
        with model._runner.quiet():
            tensors = [
                gather_result(one.path, column, model.dim, chunks.sizes, scalars, counts)
                for one, column in zip(found, joined, strict=True)
            ]
    firsts = [id(one.tensors[0]) for one in found]
    return outputs, dict(zip(firsts, tensors, strict=True))


def _without_targets(kwargs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the keyword arguments of the module alone; the targets are the criterion's."""
    return [{k: v for k, v in one.items() if k != TARGETS} for one in kwargs]
