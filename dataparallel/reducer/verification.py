"""Whether all replicas have the same parameters: in this process, and in all of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dataparallel.comm.processes import ProcessLink
from dataparallel.errors import lines, listed
from dataparallel.reducer.agreement import gather_if_different

#: What messages call the comparison across processes.
_WHAT = "the comparison of parameters"


@dataclass(frozen=True)
class _Description:
    """What must be the same for a parameter everywhere, so that its gradients can be added up."""

    name: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    layout: str
    dtype: str
    requires_grad: bool
    expects_sparse: bool


@dataclass(frozen=True)
class _Kind:
    """One property that is compared: what it is called, what counts, and what is shown."""

    title: str
    key: Callable[[_Description], Hashable]
    show: Callable[[_Description], str]


def _strides_that_count(entry: _Description) -> tuple[int, ...]:
    """Those of dimensions in which there is a second element to step to."""
    if 0 in entry.sizes:
        return ()
    pairs = zip(entry.sizes, entry.strides, strict=bool(entry.strides))
    return tuple(stride for size, stride in pairs if size > 1)


_KINDS = (
    _Kind("different sizes", lambda e: e.sizes, lambda e: str(e.sizes)),
    _Kind(
        "different strides",
        lambda e: (e.layout, _strides_that_count(e)),
        lambda e: str(e.strides) if e.strides or not e.sizes else e.layout,
    ),
    _Kind("different dtypes", lambda e: e.dtype, lambda e: e.dtype),
    _Kind("different requires_grad", lambda e: e.requires_grad, lambda e: str(e.requires_grad)),
    _Kind(
        "different kinds of gradients",
        lambda e: e.expects_sparse,
        lambda e: "sparse" if e.expects_sparse else "dense",
    ),
)


def verify_replicas(
    replicas: Sequence[Sequence[torch.Tensor]],
    names: Sequence[str],
    expect_sparse: Sequence[Sequence[bool]] | None = None,
) -> None:
    """Check that the parameters of the replicas of this process go together.

    Example::

        verify_replicas([[w0, b0], [w1, b1]], ["weight", "bias"])

    Args:
        replicas: Per replica, its parameters in one order.
        names: Names of the parameters of replica 0.
        expect_sparse: Per replica, whether the gradient of each parameter will be sparse. Default:
            none will be.

    Raises:
        ValueError: The numbers of parameters differ; or sizes; or strides (of dimensions with more
            than one element); or dtypes; or ``requires_grad``; or whether gradients will be sparse.
            The message has all faults of the first of these kinds.
    """
    sparse = expect_sparse or [[False] * len(replica) for replica in replicas]
    counts = [len(replica) for replica in replicas]
    expectations = [len(flags) for flags in sparse]
    for numbers, of_what in ((counts, "parameters"), (expectations, "expectations of gradients")):
        if any(number != counts[0] for number in numbers):
            raise ValueError(
                f"the replicas have different numbers of {of_what}: {_by_value('replica', numbers)}"
                f"; replica 0 has {counts[0]} parameters, and so must all"
            )
    entries = [
        _describe(replica, names, flags) for replica, flags in zip(replicas, sparse, strict=True)
    ]
    fault = _first_fault("replica", entries)
    if fault:
        raise ValueError(
            f"the parameters of the replicas have {fault}\nEvery replica must be an exact clone of "
            "replica 0; change the wrapped module, not one replica alone"
        )


def verify_across_processes(
    parameters: Sequence[torch.Tensor],
    names: Sequence[str],
    link: ProcessLink,
    expect_sparse: Sequence[bool] | None = None,
    *,
    nonfinite: str = "ignore",
) -> None:
    """Check that the parameters of all processes go together; every process calls this.

    If all is well, one small collective was needed. If not, every process raises the same error.
    Where parameters have other names but all else is equal, a warning tells it; an error, if they
    are the same names in another order.

    Example::

        verify_across_processes([weight, bias], ["weight", "bias"], link)

    Args:
        parameters: Those of replica 0.
        names: One per parameter.
        link: The processes to compare with.
        expect_sparse: Whether the gradient of each parameter will be sparse. Default: none will be.
        nonfinite: What becomes of gradients that are not finite. Default: nobody looks.

    Raises:
        ValueError: ``nonfinite`` differs; or the numbers of parameters; or sizes; or strides (of
            dimensions with more than one element); or dtypes; or ``requires_grad``; or whether
            gradients will be sparse; or the order of names. The message has all faults of the first
            of these kinds, with rank, name, and both sides.
    """
    if link.world_size == 1:
        return
    own = _describe(parameters, names, expect_sparse or [False] * len(parameters))
    keys = [[kind.key(entry) for kind in _KINDS] for entry in own]
    gathered = gather_if_different(
        [keys, list(names), nonfinite],
        link,
        details=[asdict(entry) for entry in own],
        what=_WHAT,
    )
    if gathered is None:
        return
    actions = [action for (_, _, action), _ in gathered]
    if len(set(actions)) > 1:
        raise ValueError(
            f"the processes have different values of nonfinite: {_by_value('rank', actions)}; they "
            "skip a step, or raise an error, together, so pass the same in every process"
        )
    _complain([[_read(fields) for fields in details] for _, details in gathered])


def _complain(entries: Sequence[Sequence[_Description]]) -> None:
    """Raise an error for the first kind of fault, or warn of names."""
    counts = [len(each) for each in entries]
    if len(set(counts)) > 1:
        raise ValueError(
            "the processes have different numbers of parameters: "
            f"{_by_value('rank', counts)}{_only_somewhere(entries)}; build the same model in every "
            "process"
        )
    fault = _first_fault("rank", entries)
    if fault:
        raise ValueError(
            f"the parameters of the processes have {fault}\nBuild the same model in every process, "
            "and convert and freeze its parameters there in the same way before you wrap it"
        )
    if len({frozenset(entry.name for entry in each) for each in entries}) == 1:
        raise ValueError(
            f"the processes have their parameters in different orders: {_renamed(entries)}; "
            "register them in the same order in every process"
        )
    warnings.warn(
        "parameters have other names in other processes, but the same sizes: "
        f"{_renamed(entries)}; their gradients are averaged as if they were the same. If that is "
        "not what you mean, build the same model in every process",
        stacklevel=3,
    )


# --- descriptions and their comparison -------------------------------------------------------


def _describe(
    parameters: Sequence[torch.Tensor], names: Sequence[str], expect_sparse: Sequence[bool]
) -> list[_Description]:
    return [
        _Description(
            name=name,
            sizes=tuple(parameter.shape),
            strides=parameter.stride() if parameter.layout == torch.strided else (),
            layout=str(parameter.layout),
            dtype=str(parameter.dtype),
            requires_grad=parameter.requires_grad,
            expects_sparse=bool(sparse),
        )
        for parameter, name, sparse in zip(parameters, names, expect_sparse, strict=True)
    ]


def _read(fields: dict[str, Any]) -> _Description:
    """What was a description before it became JSON, which has no tuples."""
    sizes, strides = tuple(fields["sizes"]), tuple(fields["strides"])
    return _Description(**fields | {"sizes": sizes, "strides": strides})


def _first_fault(place: str, entries: Sequence[Sequence[_Description]]) -> str | None:
    """Differences of the first kind of which there are any, one parameter on each line."""
    for kind in _KINDS:
        differences = []
        for sides in zip(*entries, strict=True):
            if len({kind.key(side) for side in sides}) > 1:
                shown = _by_value(place, [kind.show(side) for side in sides])
                differences.append(f"{_named(place, sides)}: {shown}")
        if differences:
            return f"{kind.title}:{lines(differences)}"
    return None


def _named(place: str, sides: Sequence[_Description]) -> str:
    """The name of a parameter, or all its names."""
    names = [side.name for side in sides]
    if len(set(names)) == 1:
        return repr(names[0])
    return f"({_by_value(place, [repr(name) for name in names])})"


def _renamed(entries: Sequence[Sequence[_Description]]) -> str:
    """The parameters that have another name somewhere, by their place."""
    renamed = [
        _named("rank", sides)
        for sides in zip(*entries, strict=True)
        if len({side.name for side in sides}) > 1
    ]
    return listed(renamed)


def _only_somewhere(entries: Sequence[Sequence[_Description]]) -> str:
    """The parameters that some processes have and others do not, by name."""
    names = [[entry.name for entry in each] for each in entries]
    everywhere = set.intersection(*map(set, names))
    once = dict.fromkeys(name for each in names for name in each if name not in everywhere)
    where = {name: [rank for rank, each in enumerate(names) if name in each] for name in once}
    return lines(f"{name!r} only in {_numbers('rank', ranks)}" for name, ranks in where.items())


def _by_value(place: str, values: Sequence[object]) -> str:
    """Values and where they are: ``4 in rank 0, 5 in ranks 1 and 2``."""
    where: dict[object, list[int]] = {}
    for number, value in enumerate(values):
        where.setdefault(value, []).append(number)
    return ", ".join(f"{value} in {_numbers(place, numbers)}" for value, numbers in where.items())


def _numbers(place: str, numbers: Sequence[int]) -> str:
    """Some ascending numbers of places: ``rank 1``, or ``ranks 1, 3 and 5 to 9``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    if numbers[1:]:
        place += "s"
    return (
        f"{place} {', '.join(parts[:-1])} and {parts[-1]}" if parts[1:] else f"{place} {parts[0]}"
    )
