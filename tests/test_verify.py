"""Models that differ between processes are refused, and replicas that differ in a bit are found."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeAlias
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from dataparallel import DistributedDataParallel
from dataparallel.comm.link import ProcessLink
from dataparallel.kernels import fingerprint
from dataparallel.reducer import verify
from dataparallel.reducer.verify import ReplicaMismatch, check_replicas
from tests.cluster import Cluster

# --- when a wrapper is made ---------------------------------------------------------------------


def net() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 3), nn.Linear(3, 3))


def with_layer(number: int, layer: nn.Module) -> Callable[[nn.Sequential], None]:
    return lambda model: model.__setitem__(number, layer)


def reordered(model: nn.Sequential) -> None:
    model._modules["2"], model._modules["1"] = model._modules.pop("2"), model._modules.pop("1")


_F = "float32 of shape"
#: The change to the model of some ranks, or the options there, and the message of all. There #
#: stands for ranks that were changed, and @ for the others.
CHANGES: list[tuple[Callable[[nn.Sequential], None] | dict[str, Any], str]] = [
    (
        with_layer(2, nn.Linear(3, 5)),
        f"'2.weight': {_F} (3, 3) in @; {_F} (5, 3) in #\n"
        f"  '2.bias': {_F} (3,) in @; {_F} (5,) in #\nBuild the same model in every process, conv",
    ),
    (
        reordered,
        "number 1 in the order of registration: '1.weight' in @; '2.weight' in #\n"
        "  number 2 in the order of registration: '1.bias' in @; '2.bias' in #\n",
    ),
    (
        with_layer(0, nn.Embedding(3, 4, sparse=True)),
        f"'0.weight': {_F} (3, 4) in @; {_F} (3, 4), with sparse gradients in #",
    ),
    ({"average": "none"}, "average: processes in @; none in #\nBuild"),
    ({"deterministic": True}, "deterministic: False in @; True in #"),
    ({"init_sync": False}, "init_sync: True in @; False in #"),
    ({"forward_sync_buffers": False}, "forward_sync_buffers: True in @; False in #"),
    ({"bucket_cap_mb": 1}, "bucket sizes in bytes: 8388608 in @; 1048576 in #"),
    ({"nonfinite": "skip"}, "nonfinite: ignore in @; skip in #"),
]


def _construct(rank: int, world_size: int, ranks: list[int], count: int) -> list[str]:
    """Return each change's message; afterwards, differences in strides that no element uses."""
    found: list[str] = []
    for change, _ in CHANGES * count:
        model = net()
        options = change if isinstance(change, dict) and rank in ranks else {}
        if not isinstance(change, dict) and rank in ranks:
            change(model)
        with pytest.raises(ValueError, match="different parameters, buffers or opti") as caught:
            DistributedDataParallel(model, ["cpu"], **options)
        found.append(str(caught.value))
    # A convolution with one input channel has them either way, and copying changes them.
    weight, empty = torch.zeros(8, 1, 3, 3), torch.zeros(0, 4, 3)
    if rank in ranks:
        weight = weight.to(memory_format=torch.channels_last).as_strided((8, 1, 3, 3), (9, 1, 3, 1))
        empty = torch.zeros(0, 3, 4).transpose(1, 2)
    DistributedDataParallel(nn.ParameterList([weight, empty]), ["cpu"], init_sync=False).close()
    return found


@pytest.mark.parametrize(
    ("ranks", "others", "changed"),
    [([2], "rank 0, rank 1", "rank 2"), ([1, 2], "rank 0", "rank 1, rank 2")],
)
def test_another_model_is_an_error_in_all_ranks(
    cluster: Cluster, repeats: Callable[..., int], ranks: list[int], others: str, changed: str
) -> None:
    count = repeats(quick=1, long=8)
    first, *rest = cluster.run(_construct, 3, ranks, count, timeout=120)
    assert rest == [first] * 2
    for text, (_, expected) in zip(first, CHANGES * count, strict=True):
        begin = "the processes have different parameters, buffers or options:\n  "
        assert text.startswith(begin + expected.replace("@", others).replace("#", changed))


# --- bit for bit, in one process -----------------------------------------------------------------


def tensors_of(device: str = "cpu") -> dict[str, Tensor]:
    """Return a weight, a bias, and the buffers of a batch norm."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(device)
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def shown(tensor: Tensor) -> str:
    (number,) = fingerprint([tensor.cpu()]).tolist()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} of shape {tuple(tensor.shape)}, fingerprint {number % 2**64:016x}"


def test_one_changed_element_is_found(slots: list[str]) -> None:
    first, *others = [tensors_of(slot) for slot in slots]
    every = [tensor for each in (first, *others) for tensor in each.values()]
    versions = [tensor._version for tensor in every]
    check_replicas(first)
    with mock.patch.object(verify, "fingerprint", wraps=fingerprint) as reading:
        check_replicas(first, [*others, dict(first)])
    # All tensors of a device in one call, and each once.
    devices = len(set(slots))
    assert [len(call.args[0]) for call in reading.call_args_list] == [28 // devices] * devices
    assert versions == [tensor._version for tensor in every]
    others[1]["0.weight"].data[2, 1] += 0.5
    with pytest.raises(ReplicaMismatch) as caught:
        check_replicas(first, others)
    assert str(caught.value) == (
        "the replicas are not the same; 1 of 7 tensors differ:\n"
        f"  '0.weight': {shown(first['0.weight'])} in replica 0; "
        f"{shown(others[1]['0.weight'])} in replica 2"
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_memory_that_was_replaced_is_no_difference(slots: list[str]) -> None:
    module = nn.Linear(3, 2)
    model = DistributedDataParallel(module, slots)
    x = torch.randn(6, 3, device=model.device)
    model(x)
    module.weight.data = torch.ones_like(module.weight)
    model.check_replicas()
    torch.testing.assert_close(model(x), module(x))


def two(second: float) -> TwoTensor:
    return TwoTensor(torch.ones(2), torch.full((2,), second))


_EYE = torch.eye(2)
_SPARSE = r"'t': sparse_\w+ float32 .* 0; .*float32 of sh"


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        (torch.ones(2, 3), torch.ones(2, 3), None),
        (torch.ones(2, 3, 4, 4), torch.ones(2, 4, 4, 3).permute(0, 3, 1, 2), None),
        (two(3.0), two(3.0), None),
        (two(3.0), two(4.0), r"differ:\n  't.b': .*"),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "fingerprint"),
        (torch.ones(()), torch.ones(()).double(), r"float32 of .* 0; float64 of shape \(\), f"),
        (torch.ones(6), torch.ones(2, 3), r"shape \(6,\), fin\w+ \w+ in .*; .* \(2, 3\), finger"),
        (_EYE.to_sparse(), _EYE.to_sparse(), None),
        (_EYE.to_sparse(), _EYE, _SPARSE),
        (_EYE.to_sparse(), _EYE.to_sparse() * 2, _SPARSE),
    ],
)
def test_what_counts_as_a_difference(ours: Tensor, theirs: Tensor, says: str | None) -> None:
    if says is None:
        check_replicas({"t": ours}, [{"t": theirs}])
        return
    with pytest.raises(ReplicaMismatch, match=says):
        check_replicas({"t": ours}, [{"t": theirs}])


def test_names_that_one_replica_has_alone_and_tensors_without_values() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    look = r"float32 of shape \(3,\), fingerprint \w+"
    expected = rf"'b': {look} in replica 0; nothing in .* 1\n  'c': nothing in .* 0; {look} in rep"
    with pytest.raises(ReplicaMismatch, match=expected):
        check_replicas({"a": a, "b": b}, [{"a": a, "c": b}, {"a": a, "b": b}])
    meta = {"t": torch.empty(3, device="meta")}
    with pytest.raises(ValueError, match="must be strided and have values in memory, but tensor 0"):
        check_replicas(meta, [meta])


# --- bit for bit, over processes -----------------------------------------------------------------

#: The places at which the bias is written: ranks and replicas.
Writes: TypeAlias = list[tuple[int, int]]


def _check(rank: int, world_size: int, devices: list[list[str]], writes: Writes) -> tuple[str, int]:
    """Return the message in a rank, and the number of collectives."""
    replicas = [tensors_of(device) for device in devices[rank]]
    for where, replica in writes:
        if where == rank:
            replicas[replica]["0.bias"].data[0] = 9.0
    link = ProcessLink(None, timeout=30, purpose="test")
    with mock.patch.object(link, "all_gather", wraps=link.all_gather) as gathers:
        try:
            check_replicas(replicas[0], replicas[1:], link)
        except ReplicaMismatch as error:
            return str(error), gathers.call_count
    return "", gathers.call_count


HOST = ["cpu"] * 3


def test_a_difference_anywhere_is_an_error_in_all(cluster: Cluster) -> None:
    devices = [["cpu"], ["virtual:0", "virtual:3"], HOST]
    assert cluster.run(_check, 3, devices, [], virtual=True) == [("", 1)] * 3
    own = tensors_of()["0.bias"]
    changed = own.detach().clone()
    changed[0] = 9.0
    first = "replica 0 of rank 0, replica 0 of rank 1"
    found: list[tuple[Writes, str, str]] = [
        ([(2, 0)], f"{first}, replica 1 of rank 2 and 1 more", "replica 0 of rank 2"),
        # No process differs from another one, and yet all have to raise.
        (
            [(0, 1), (1, 1), (2, 1)],
            f"{first}, replica 0 of rank 2",
            "replica 1 of rank 0, replica 1 of rank 1, replica 1 of rank 2",
        ),
    ]
    for writes, others, places in found:
        ((text, _),) = set(cluster.run(_check, 3, [HOST] * 3, writes))
        expected = f"{shown(own)} in {others}; {shown(changed)} in {places}"
        assert text.endswith(f"; 1 of 7 tensors differ:\n  '0.bias': {expected}")


def _wrapped(rank: int, world_size: int) -> None:
    norm = nn.BatchNorm1d(4)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), norm), ["cpu", "cpu"])
    model.check_replicas()
    assert norm.running_mean is not None
    norm.running_mean.fill_(float(rank))
    with pytest.raises(ReplicaMismatch, match=r"'1.running_mean': float32 of shape \(4,\), f"):
        model.check_replicas()
    model.close()


def test_a_wrapper_compares_buffers_of_processes(cluster: Cluster) -> None:
    cluster.run(_wrapped, 2)
