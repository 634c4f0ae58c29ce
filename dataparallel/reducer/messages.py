"""What the reducer says when a backward cannot be reduced, with names and remedies."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from dataparallel.errors import MOST, describe_names, listed

PRIOR_NOT_FINISHED = (
    "Expected to have finished reduction in the prior iteration before starting a new one: another "
    "backward of the same wrapper is running, in another thread or from within a hook; let one end "
    "before the next begins"
)

FAILED_MEANWHILE = "another part of this backward failed, so its gradients were dropped"


FAILED_OUTSIDE = "the backward failed in a part of the graph outside of the wrapper's forward"


def changed_in_sum(names: Sequence[str]) -> str:
    """Nobody knows how much of some gradients is reduced already."""
    return (
        "the gradients of these parameters have changed since they were reduced: "
        f"{describe_names(names)}. With average='none' the processes' gradients are added up, and "
        "nobody could tell what was changed outside of the wrapper's backward from what is reduced "
        "already. Zero the gradients before the next backward, or use average='processes'"
    )


def outside_of_a_round(names: Sequence[str], index: int) -> str:
    """A replica's parameter got a gradient that was not asked for through the wrapper's outputs."""
    return (
        f"the parameter {names[index]!r} of a replica got a gradient outside of the wrapper's "
        "backward, so it would not be reduced. Outputs are probably kept in objects of a type in "
        "which tensors cannot be found; return tensors, containers or dataclasses, or register the "
        "type with torch.utils._pytree"
    )


def marked_twice(names: Sequence[str]) -> str:
    """Parameters got gradients again after they were ready."""
    return (
        f"Expected to mark a variable ready only once, but these parameters got a gradient several "
        f"times in one backward: {describe_names(names)}. A re-entrant checkpoint that is used "
        "several times does so; leave find_unused_parameters at None, which handles it, pass "
        "static_graph=True if the graph never changes, or checkpoint with use_reentrant=False"
    )


def unused(names: Sequence[str]) -> str:
    """Parameters got no gradient although all should."""
    return (
        "Expected to have finished reduction in the prior iteration before starting a new one: "
        f"{len(names)} parameters got no gradient in this backward although "
        f"find_unused_parameters=False says that all of them would: {describe_names(names)}. Leave "
        "find_unused_parameters at None, which handles it, or make sure that all outputs of "
        "forward take part in the loss"
    )


def graph_changed(names: Sequence[str]) -> str:
    """Other parameters are used than in the first backward."""
    return (
        "Your training graph has changed in this iteration, although static_graph=True says that "
        f"it never does: whether these parameters get a gradient differs from the first iteration: "
        f"{describe_names(names)}. Leave static_graph at False"
    )


def others_failed(ranks: Sequence[int], reasons: Mapping[int, tuple[str, str]]) -> str:
    """The backward of other processes failed, each maybe with a message and a traceback."""
    which = listed(map(str, ranks))
    told = listed((f"rank {rank}: {message}" for rank, (message, _) in reasons.items()), "; ")
    traces = "".join(
        f"\nTraceback of rank {rank}:\n{trace.rstrip()}\n"
        for rank, (_, trace) in itertools.islice(reasons.items(), MOST)
    )
    return (
        f"the backward of rank {which} failed, so no gradient of this step was reduced and .grad "
        "is as it was before; its own error says why. All ranks can go on with the next step"
        f"{f' ({told})' if told else ''}{traces}"
    )


def late_in_step(names: Sequence[str]) -> str:
    """Gradients came after the optimizer's step of their bucket."""
    return (
        f"these parameters got a gradient after the optimizer had taken their step in backward: "
        f"{describe_names(names)}. Take the step after backward, or checkpoint with "
        "use_reentrant=False"
    )
