"""A check that all replicas are the same: when a wrapper is made, and bit for bit on request.

The check compares one text for each thing that must be the same. Processes compare a digest of all
texts, and exchange them only if there is a difference, so that all raise the same error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from dataparallel.comm.link import ProcessLink
from dataparallel.errors import lines, listed
from dataparallel.kernels.fingerprint import fingerprint
from dataparallel.reducer.options import Options
from dataparallel.reducer.parameters import TrainedParameters, shared_tensors
from dataparallel.torch_internals import is_wrapper

_Tensors: TypeAlias = Mapping[str, torch.Tensor]


class ReplicaMismatch(RuntimeError):
    """An error for replicas that are not the same but have to be."""


# --- the comparison --------------------------------------------------------------------------


def gather_if_different(value: Any, link: ProcessLink, *, what: str) -> list[Any] | None:
    """Return the values of all processes, out of JSON, if they are not all the same; else None.

    One collective of one number if they are; all processes get the same.
    """
    digest = hashlib.sha256(json.dumps(value).encode()).digest()
    number = torch.tensor([int.from_bytes(digest[:8], "little", signed=True)], dtype=torch.int64)
    numbers = {gathered.item() for gathered in link.all_gather(number, what=what)}
    return None if len(numbers) == 1 else link.all_gather_json(value, what=what)


def differences(tables: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """By name, what is not the same in all places: each value, and where it is."""
    found = {}
    for name in dict.fromkeys(name for table in tables.values() for name in table):
        places: dict[object, list[str]] = {}
        for place, table in tables.items():
            places.setdefault(table.get(name, "nothing"), []).append(place)
        if len(places) > 1:
            found[name] = "; ".join(f"{value} in {listed(at)}" for value, at in places.items())
    return found


# --- when a wrapper is made ------------------------------------------------------------------


def verify_across_processes(
    module: torch.nn.Module,
    trained: TrainedParameters,
    options: Options,
    link: ProcessLink,
    *,
    hooked: bool,
    num_owners: int,
) -> None:
    """Refuse other options, parameters or buffers in another process; every process calls this."""
    tensors = shared_tensors(module, buffers=options.sends_buffers)
    sparse = dict(zip(trained.names, trained.sparse, strict=True))
    own = {repr(name): _described(t, sparse.get(name, False)) for name, t in tensors.items()}
    own |= {
        "nonfinite": options.nonfinite,
        "communication hook": "registered" if hooked else "none",
        "init_sync": str(options.init_sync),
        "forward_sync_buffers": str(options.forward_sync_buffers),
        "average": options.average,
        "deterministic": str(options.deterministic),
        "devices over which originals are spread": str(num_owners),
        "bucket sizes in bytes": str(options.bucket_bytes()),
        "dtype that is sent": str(options.mixed_precision.reduce_dtype),
        "parameters that are reduced last": str(sorted(options.delayed)),
    }
    # In their order, which buckets follow from.
    gathered = gather_if_different(list(own.items()), link, what="the comparison of parameters")
    if gathered is None:
        return
    tables = {f"rank {rank}": dict(items) for rank, items in enumerate(gathered)}
    orders = {
        rank: {f"number {i} in the order of registration": name for i, name in enumerate(table)}
        for rank, table in tables.items()
    }
    found = differences(tables) or differences(orders)
    raise ValueError(
        "the processes have different parameters, buffers or options:"
        f"{lines(f'{name}: {text}' for name, text in found.items())}\nBuild the same model in "
        "every process, convert and freeze its parameters there in the same way before you wrap "
        "it, and pass the same options; or let each process keep its own tensor with "
        "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)"
    )


def _described(tensor: torch.Tensor, sparse: bool) -> str:
    """Describe the properties of a tensor that must be the same in all processes."""
    text = _look(tensor)
    if not isinstance(tensor, torch.nn.Parameter):
        return text
    if tensor.layout == torch.strided and not tensor.is_contiguous():
        # Those of dimensions in which there is a second element to step to.
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        text += f" with strides {tuple(stride for size, stride in pairs if size > 1)}"
    text += "" if tensor.requires_grad else ", frozen"
    return f"{text}, with sparse gradients" if sparse else text


def _look(tensor: torch.Tensor) -> str:
    """Describe a tensor apart from its values and its place in memory."""
    kinds = [tensor.dtype] if tensor.layout == torch.strided else [tensor.layout, tensor.dtype]
    names = [str(kind).removeprefix("torch.") for kind in kinds]
    return f"{' '.join(names)} of shape {tuple(tensor.shape)}"


# --- bit for bit -----------------------------------------------------------------------------


def check_replicas(
    tensors: _Tensors, replicas: Sequence[_Tensors] = (), link: ProcessLink | None = None
) -> None:
    """Compare parameters and buffers over replicas and processes, bit for bit.

    Nothing but fingerprints leaves a device or a process as long as all are the same. Every process
    calls this, and either all raise the same error or none does.
    """
    texts = described([parts_of(each) for each in (tensors, *replicas)])
    # If replicas are the same, processes may have different numbers of them.
    own = {str(number): each for number, each in enumerate(texts) if not number or each != texts[0]}
    gathered = [own]
    if link is not None:
        different = gather_if_different(own, link, what="check_replicas()")
        gathered = different or [own] * link.world_size
    found = differences(
        {
            f"replica {number}{'' if link is None else f' of rank {rank}'}": table
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
    """Return the tensors, or their inner ones if they are of a class that wraps others."""

    def parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if is_wrapper(tensor):
            for attribute in tensor.__tensor_flatten__()[0]:
                yield from parts(f"{name}.{attribute}", getattr(tensor, attribute))
        else:
            yield name, tensor

    return dict(part for whole in tensors.items() for part in parts(*whole))


def described(replicas: Sequence[_Tensors]) -> list[dict[str, str]]:
    """Per replica what each tensor is, with its fingerprint; a tensor of several is read once."""
    wanted: dict[torch.device, dict[int, torch.Tensor]] = {}
    for tensor in [tensor for each in replicas for tensor in each.values()]:
        wanted.setdefault(tensor.device, {})[id(tensor)] = tensor
    # All devices compute before the first is waited for.
    computed = [fingerprint(list(map(_dense, each.values()))) for each in wanted.values()]
    known = {
        key: f", fingerprint {number % 2**64:016x}"
        for tensors, numbers in zip(wanted.values(), computed, strict=True)
        for key, number in zip(tensors, numbers.tolist(), strict=True)
    }
    return [
        {name: _look(tensor) + known[id(tensor)] for name, tensor in each.items()}
        for each in replicas
    ]


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
