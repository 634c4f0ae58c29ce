"""Whether all replicas are the same: when a wrapper is made, and bit for bit when a user asks.

What is compared is one text for each thing that must be the same. Processes compare a digest of all
texts, and exchange them only if there is a difference, so that all raise the same error.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from dataparallel.comm.link import ProcessLink
from dataparallel.errors import lines, listed
from dataparallel.kernels.fingerprint import fingerprint
from dataparallel.reducer.options import ReducerOptions, TrainedParameters
from dataparallel.torch_internals import is_wrapper

_log = logging.getLogger("dataparallel")

_Tensors: TypeAlias = Mapping[str, torch.Tensor]


class ReplicaMismatch(RuntimeError):
    """Replicas are not the same where they have to be."""


# --- the comparison --------------------------------------------------------------------------


def digest(value: Any) -> int:
    """A number for what JSON can hold, the same in every process, as Python's ``hash`` is not."""
    text = json.dumps(value)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def gather_if_different(value: Any, link: ProcessLink, *, what: str) -> list[Any] | None:
    """The values of all processes, out of JSON, if they are not all the same; else None.

    One collective of one number if they are; all processes get the same.
    """
    number = torch.tensor([digest(value)], dtype=torch.int64)
    numbers = {gathered.item() for gathered in link.all_gather(number, what=what)}
    return None if len(numbers) == 1 else link.all_gather_json(value, what=what)


def differences(tables: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """By name, what is not the same in all places: each value, and where it is.

    Args:
        tables: Per place, such as ``"rank 0"``, what it has, by name.
    """
    found = {}
    for name in dict.fromkeys(name for table in tables.values() for name in table):
        sides = _sides({place: table.get(name, "nothing") for place, table in tables.items()})
        if len(sides) > 1:
            found[name] = "; ".join(sides)
    return found


def _sides(values: Mapping[str, object]) -> list[str]:
    """For each value the places that have it: ``3 in rank 0, rank 2``."""
    places: dict[object, list[str]] = {}
    for place, value in values.items():
        places.setdefault(value, []).append(place)
    return [f"{value} in {listed(where)}" for value, where in places.items()]


def _shown(found: Mapping[str, str]) -> str:
    return lines(f"{name}: {text}" for name, text in found.items())


# --- when a wrapper is made ------------------------------------------------------------------


def verify_across_processes(
    trained: TrainedParameters, link: ProcessLink, *, options: ReducerOptions, nonfinite: str
) -> None:
    """Refuse other options, or other parameters, in another process; every process calls this.

    Buckets follow from both. Other names are a warning; the same names in another order are an
    error.
    """
    if link.world_size == 1:
        return
    count = trained.num_reduced
    own = [
        {
            "nonfinite": nonfinite,
            "average": options.average,
            "deterministic": options.deterministic,
            "bucket sizes in bytes": str(options.bucket_bytes(sends=True)),
            "dtype that is sent": str(options.reduce_dtype),
            "parameters that are reduced last": str(sorted(options.delayed)),
        },
        list(map(repr, trained.names[:count])),
        list(map(_parameter, trained.parameters[:count], trained.sparse)),
    ]
    gathered = gather_if_different(own, link, what="the comparison of parameters")
    if gathered is None:
        return
    ranks = {f"rank {rank}": entry for rank, entry in enumerate(gathered)}
    found = differences({rank: entry[0] for rank, entry in ranks.items()})
    if found:
        raise ValueError(
            f"the wrappers of the processes have different options:{_shown(found)}\nPass the same "
            "options in every process"
        )
    _compare_parameters(
        {rank: dict(zip(names, looks, strict=True)) for rank, (_, names, looks) in ranks.items()}
    )


def _compare_parameters(tables: Mapping[str, Mapping[str, str]]) -> None:
    """Raise an error, or warn, for what each rank has by name; there is a difference."""
    counts = _sides({rank: len(table) for rank, table in tables.items()})
    if len(counts) > 1:
        raise ValueError(
            f"the processes have different numbers of parameters: {'; '.join(counts)}"
            f"{_shown(differences(tables))}\nBuild the same model in every process"
        )
    # By their places, since a name may be another one elsewhere.
    rows = [dict(zip(tables, row, strict=True)) for row in zip(*tables.values(), strict=True)]
    renamed = {
        i: f"({'; '.join(_sides(row))})" for i, row in enumerate(rows) if len({*row.values()}) > 1
    }
    labels = [renamed.get(i, name) for i, name in enumerate(next(iter(tables.values())))]
    found = differences(
        {rank: dict(zip(labels, table.values(), strict=True)) for rank, table in tables.items()}
    )
    if found:
        raise ValueError(
            f"the parameters of the processes differ:{_shown(found)}\nBuild the same model in "
            "every process, and convert and freeze its parameters there in the same way before you "
            "wrap it"
        )
    if len(set(map(frozenset, tables.values()))) == 1:
        raise ValueError(
            "the processes have their parameters in different orders: "
            f"{listed(renamed.values())}; register them in the same order in every process"
        )
    warnings.warn(
        "parameters have other names in other processes, but the same sizes: "
        f"{listed(renamed.values())}; their gradients are averaged as if they were the same. If "
        "that is not what you mean, build the same model in every process",
        stacklevel=4,
    )


def _look(tensor: torch.Tensor) -> str:
    """What a tensor is apart from its values and its place in memory."""
    if is_lazy(tensor):
        return "an uninitialized tensor"
    dtype = str(tensor.dtype).removeprefix("torch.")
    special = "" if _kind(tensor) == "strided" else f"{_kind(tensor)} "
    return f"{special}{dtype} of shape {tuple(tensor.shape)}"


def _kind(tensor: torch.Tensor) -> str:
    if tensor.is_meta or tensor.is_quantized:
        return "meta" if tensor.is_meta else "quantized"
    return str(tensor.layout).removeprefix("torch.")


def _parameter(tensor: torch.Tensor, sparse: bool) -> str:
    """What must be the same for a parameter everywhere, so that its gradients can be added up."""
    text = _look(tensor)
    if tensor.layout == torch.strided and not tensor.is_contiguous():
        # Those of dimensions in which there is a second element to step to.
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        text += f" with strides {tuple(stride for size, stride in pairs if size > 1)}"
    text += "" if tensor.requires_grad else ", frozen"
    return f"{text}, with sparse gradients" if sparse else text


# --- bit for bit -----------------------------------------------------------------------------


def check_replicas(
    tensors: _Tensors, replicas: Sequence[_Tensors] = (), link: ProcessLink | None = None
) -> None:
    """Compare parameters and buffers over replicas and processes, bit for bit.

    Nothing but fingerprints leaves a device or a process as long as all are the same. Every process
    calls this, and either all raise the same error or none does. Tensors in the memory of replica 0
    are not read twice. Sparse and quantized tensors and those without values (of the meta device,
    or not initialized yet) are compared by dtype and shape alone, and a log line names them.

    Args:
        tensors: Parameters and buffers of replica 0, by name.
        replicas: Those of the replicas 1, 2 and so on. Default: there are none.
        link: The processes to compare with. Default: this one alone.

    Raises:
        ReplicaMismatch: Something differs. The message names the first tensors that do, with
            replica, rank and both fingerprints.
    """
    several = link is not None and link.world_size > 1
    texts = _texts([parts_of(each) for each in (tensors, *replicas)], several)
    # Where replicas are the same, processes may have different numbers of them.
    own = {str(number): each for number, each in enumerate(texts) if not number or each != texts[0]}
    gathered = [own]
    if link is not None and several:
        different = gather_if_different(own, link, what="check_replicas()")
        gathered = [own] * link.world_size if different is None else different
    found = differences(
        {
            f"replica {number}{f' of rank {rank}' if several else ''}": table
            for rank, each in enumerate(gathered)
            for number, table in each.items()
        }
    )
    if found:
        raise ReplicaMismatch(
            f"the replicas are not the same; {len(found)} of {len(texts[0])} tensors differ:"
            f"{lines(f'{name!r}: {text}' for name, text in found.items())}"
        )


def parts_of(tensors: _Tensors) -> dict[str, torch.Tensor]:
    """The tensors, or those that they are made of if they are of a class that wraps others."""

    def parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if is_wrapper(tensor):
            for attribute in tensor.__tensor_flatten__()[0]:
                yield from parts(f"{name}.{attribute}", getattr(tensor, attribute))
        else:
            yield name, tensor

    return dict(part for whole in tensors.items() for part in parts(*whole))


def _texts(replicas: Sequence[_Tensors], all_of_first: bool) -> list[dict[str, str]]:
    """Per replica what each tensor is, with its fingerprint if that is needed."""
    texts = [{name: _look(tensor) for name, tensor in each.items()} for each in replicas]
    first = {name: tensor for name, tensor in replicas[0].items() if _has_values(tensor)}
    skipped = [f"{name!r} ({look})" for name, look in texts[0].items() if name not in first]
    if skipped:
        _log.warning("replicas are compared by dtype and shape alone in %s", listed(skipped))
    wanted: dict[torch.device, list[tuple[int, str, torch.Tensor]]] = {}
    shared: list[tuple[int, str]] = []
    apart: set[str] = set()
    for number, each in list(enumerate(replicas))[1:]:
        for name, tensor in each.items():
            if not _has_values(tensor):
                continue
            if name in first and _memory(tensor) == _memory(first[name]):
                shared.append((number, name))
            else:
                apart.add(name)
                wanted.setdefault(tensor.device, []).append((number, name, tensor))
    for name, tensor in first.items():
        if all_of_first or name in apart:
            wanted.setdefault(tensor.device, []).append((0, name, tensor))
    # All devices compute before the first is waited for.
    computed = [fingerprint([tensor.detach() for _, _, tensor in each]) for each in wanted.values()]
    for read, numbers in zip(wanted.values(), computed, strict=True):
        for (replica, name, _), number in zip(read, numbers.tolist(), strict=True):
            texts[replica][name] += f", fingerprint {number % 2**64:016x}"
    for number, name in shared:
        texts[number][name] = texts[0][name]
    return texts


def _has_values(tensor: torch.Tensor) -> bool:
    return not is_lazy(tensor) and _kind(tensor) == "strided"


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    lazy = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride(), lazy
