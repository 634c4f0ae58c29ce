"""Models that differ between processes are refused, and replicas that differ in a bit are found."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any
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

# --- when a wrapper is made ------------------------------------------------------------------


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2))


def resized(model: nn.Sequential) -> None:
    model[2] = nn.Linear(3, 5)


def restrided(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(torch.zeros(3, 3).t())


def converted(model: nn.Sequential) -> None:
    model[0].bfloat16()


def frozen(model: nn.Sequential) -> None:
    model[1].bias.requires_grad_(False)


def longer(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2))


def renamed(model: nn.Sequential) -> None:
    model._modules["last"] = model._modules.pop("2")


def reordered(model: nn.Sequential) -> None:
    model._modules["2"], model._modules["1"] = model._modules.pop("2"), model._modules.pop("1")


def sparse(model: nn.Sequential) -> None:
    model._modules["0"] = nn.Embedding(3, 4, sparse=True)
    model._modules["0"].bias = nn.Parameter(torch.zeros(3))


OTHER = "the processes have different parameters, buffers or options:"
REMEDY = "\nBuild the same model in every process, convert and freeze"

#: What is done to the model of some ranks, and what all of them say: # stands for ranks that were
#: changed, and @ for the others.
CHANGES: list[tuple[Callable[[nn.Sequential], None], str]] = [
    (
        resized,
        "\n  '2.weight': float32 of shape (2, 3) in @; float32 of shape (5, 3) in #\n"
        "  '2.bias': float32 of shape (2,) in @; float32 of shape (5,) in #" + REMEDY,
    ),
    (
        restrided,
        "\n  '1.weight': float32 of shape (3, 3) in @; "
        "float32 of shape (3, 3) with strides (1, 3) in #" + REMEDY,
    ),
    (
        converted,
        "\n  '0.weight': float32 of shape (3, 4) in @; bfloat16 of shape (3, 4) in #\n"
        "  '0.bias': float32 of shape (3,) in @; bfloat16 of shape (3,) in #" + REMEDY,
    ),
    (
        frozen,
        "\n  '1.bias': float32 of shape (3,) in @; float32 of shape (3,), frozen in #" + REMEDY,
    ),
    (longer, "\n  '3.weight': nothing in @; float32 of shape (2, 2) in #\n  '3.bias': "),
    (renamed, "\n  '2.weight': float32 of shape (2, 3) in @; nothing in #\n  '2.bias': "),
    (
        reordered,
        "\n  number 2 in the order of registration: '1.weight' in @; '2.weight' in #\n"
        "  number 3 in the order of registration: '1.bias' in @; '2.bias' in #\n",
    ),
]


def construct(rank: int, world_size: int, number: int, ranks: list[int]) -> str:
    model = net()
    if rank in ranks:
        CHANGES[number][0](model)
    with pytest.raises(ValueError, match="different parameters, buffers or options") as caught:
        DistributedDataParallel(model, ["cpu"], init_sync=False)
    return str(caught.value)


@pytest.mark.parametrize("number", range(len(CHANGES)), ids=lambda i: CHANGES[i][0].__name__)
@pytest.mark.parametrize(
    ("ranks", "others", "changed"),
    [([2], "rank 0, rank 1", "rank 2"), ([1, 2], "rank 0", "rank 1, rank 2")],
)
def test_another_model_is_an_error_in_all_ranks(
    cluster: Cluster, number: int, ranks: list[int], others: str, changed: str
) -> None:
    (text,) = set(cluster.run(construct, 3, number, ranks))
    assert text.startswith(OTHER + CHANGES[number][1].replace("@", others).replace("#", changed))


def with_options(rank: int, world_size: int, name: str, values: list[Any]) -> str:
    with pytest.raises(ValueError, match="different parameters, buffers or options:\n") as caught:
        DistributedDataParallel(net(), ["cpu"], **{name: values[rank]})
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("average", ["processes", "none"], "average: processes in rank 0; none in rank 1\nBuild"),
        ("deterministic", [False, True], "deterministic: False in rank 0; True in rank 1"),
        ("init_sync", [True, False], "init_sync: True in rank 0; False in rank 1"),
        ("forward_sync_buffers", [None, False], "forward_sync_buffers: True in rank 0; False in"),
        ("bucket_cap_mb", [25, 1], "bucket sizes in bytes: 26214400 in rank 0; 1048576 in rank 1"),
        ("nonfinite", ["skip", "ignore"], "nonfinite: skip in rank 0; ignore in rank 1"),
    ],
)
def test_other_options_are_an_error_in_all_ranks(
    cluster: Cluster, name: str, values: list[Any], says: str
) -> None:
    (text,) = set(cluster.run(with_options, 2, name, values))
    assert says in text


def expects_sparse(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError, match="different parameters, buffers or options:") as caught:
        DistributedDataParallel(nn.Embedding(3, 4, sparse=bool(rank)))
    return str(caught.value)


def test_sparse_gradients_in_one_process_alone(cluster: Cluster) -> None:
    (text,) = set(cluster.run(expects_sparse, 2))
    look = "float32 of shape (3, 4)"
    assert f"'weight': {look} in rank 0; {look}, with sparse gradients in rank 1" in text


def other_strides(rank: int, world_size: int) -> None:
    """A convolution with one input channel has them either way, and copying changes them."""
    weight, empty = torch.zeros(8, 1, 3, 3), torch.zeros(0, 4, 3)
    if rank:
        weight = weight.to(memory_format=torch.channels_last).as_strided((8, 1, 3, 3), (9, 1, 3, 1))
        empty = torch.zeros(0, 3, 4).transpose(1, 2)
    model = nn.ParameterList([weight, empty])
    assert (model[0].stride() == (9, 9, 3, 1)) == (rank == 0)
    DistributedDataParallel(model, ["cpu"], init_sync=False).close()


def test_strides_that_no_element_uses_do_not_count(cluster: Cluster) -> None:
    cluster.run(other_strides, 2)


# --- bit for bit, in one process -------------------------------------------------------------


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]


def tensors_of(device: str = "cpu") -> dict[str, Tensor]:
    """A weight, a bias, and the buffers of a batch norm."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(device)
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def shown(tensor: Tensor) -> str:
    (number,) = fingerprint([tensor.cpu()]).tolist()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} of shape {tuple(tensor.shape)}, fingerprint {number % 2**64:016x}"


def test_one_changed_element_is_found(slots: list[str]) -> None:
    first, *others = [tensors_of(slot) for slot in slots]
    check_replicas(first)
    check_replicas(first, others)
    others[1]["0.weight"].data[2, 1] += 0.5
    with pytest.raises(ReplicaMismatch) as caught:
        check_replicas(first, others)
    assert str(caught.value) == (
        "the replicas are not the same; 1 of 7 tensors differ:\n"
        f"  '0.weight': {shown(first['0.weight'])} in replica 0; "
        f"{shown(others[1]['0.weight'])} in replica 2"
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_single_bit_of_any_dtype(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 0, 1, 1]).to(dtype)
    copy = values.to("virtual:2")
    check_replicas({"t": values}, [{"t": copy}])
    copy[3] = 0
    with pytest.raises(ReplicaMismatch, match="1 of 1 tensors differ:\n  't': "):
        check_replicas({"t": values}, [{"t": copy}])


_NAN = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        (torch.ones(2, 3), torch.ones(2, 3), None),
        (torch.full((2,), torch.nan), torch.full((2,), torch.nan), None),
        (torch.ones(2, 3, 4, 4), torch.ones(2, 4, 4, 3).permute(0, 3, 1, 2), None),
        (torch.ones(0, 3), torch.ones(0, 3), None),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "fingerprint"),
        (_NAN[:1], _NAN[1:], "fingerprint"),
        (torch.ones(()), torch.ones(()).double(), r"float32 of .* 0; float64 of shape \(\), f"),
        (torch.ones(6), torch.ones(2, 3), r"shape \(6,\), fin\w+ \w+ in .*; .* \(2, 3\), finger"),
        (torch.tensor([1j]), torch.tensor([1j]).conj(), "fingerprint"),
    ],
)
def test_what_counts_as_a_difference(ours: Tensor, theirs: Tensor, says: str | None) -> None:
    if says is None:
        check_replicas({"t": ours}, [{"t": theirs}])
        return
    with pytest.raises(ReplicaMismatch, match=says):
        check_replicas({"t": ours}, [{"t": theirs}])


def test_names_that_one_replica_has_alone() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    look = r"float32 of shape \(3,\), fingerprint \w+"
    expected = rf"'b': {look} in replica 0; nothing in .* 1\n  'c': nothing in .* 0; {look} in rep"
    with pytest.raises(ReplicaMismatch, match=expected):
        check_replicas({"a": a, "b": b}, [{"a": a, "c": b}, {"a": a, "b": b}])


def test_a_tensor_of_several_replicas_is_read_once() -> None:
    first = tensors_of()
    with mock.patch.object(verify, "fingerprint", wraps=fingerprint) as reading:
        check_replicas(first, [dict(first)])
        (call,) = reading.call_args_list
        assert len(call.args[0]) == len(first)
        # A part of the same memory is not the same tensor.
        twice = torch.arange(4.0)
        with pytest.raises(ReplicaMismatch, match=r"'t': float32 .* in replica 0; .* in replica 2"):
            check_replicas({"t": twice[:2]}, [{"t": twice[:2]}, {"t": twice[::2]}])


def test_each_device_is_read_once_for_all_tensors() -> None:
    replicas = [tensors_of(f"virtual:{i}") for i in range(4)]
    with mock.patch.object(verify, "fingerprint", wraps=fingerprint) as reading:
        check_replicas(replicas[0], replicas[1:])
    assert [len(call.args[0]) for call in reading.call_args_list] == [7] * 4


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("convert", [Tensor.to_sparse, Tensor.to_sparse_csr])
def test_sparse_tensors(convert: Callable[[Tensor], Tensor]) -> None:
    values = torch.eye(2)
    check_replicas({"t": convert(values)}, [{"t": convert(values)}])
    for other in (values, convert(values * 2)):
        with pytest.raises(ReplicaMismatch, match=r"'t': sparse_\w+ float32 .* 0; .*float32 of sh"):
            check_replicas({"t": convert(values)}, [{"t": other}])


def test_tensors_without_values_are_refused() -> None:
    meta = {"t": torch.empty(3, device="meta")}
    with pytest.raises(ValueError, match="must be strided and have values in memory, but tensor 0"):
        check_replicas(meta, [meta])


def test_tensors_that_wrap_others() -> None:
    def wrapper(second: float) -> TwoTensor:
        return TwoTensor(torch.ones(2), torch.full((2,), second))

    check_replicas({"w": wrapper(3.0)}, [{"w": wrapper(3.0)}])
    with pytest.raises(ReplicaMismatch, match=r"differ:\n  'w.b': .*"):
        check_replicas({"w": wrapper(3.0)}, [{"w": wrapper(4.0)}])


def test_nothing_is_changed_and_nothing_recorded() -> None:
    first, second = tensors_of(), tensors_of("virtual:1")
    versions = [tensor._version for tensor in (*first.values(), *second.values())]
    check_replicas(first, [second])
    assert versions == [tensor._version for tensor in (*first.values(), *second.values())]


# --- bit for bit, over processes -------------------------------------------------------------

#: What is written where: rank, replica, name, value.
Writes = list[tuple[int, int, str, float]]


def check(rank: int, world_size: int, devices: list[list[str]], writes: Writes) -> tuple[str, int]:
    """The message in a rank, and the number of collectives."""
    replicas = [tensors_of(device) for device in devices[rank]]
    for where, replica, name, value in writes:
        if where == rank:
            replicas[replica][name].data.view(-1)[0] = value
    link = ProcessLink(None, timeout=30, purpose="test")
    with mock.patch.object(link, "all_gather", wraps=link.all_gather) as gathers:
        try:
            check_replicas(replicas[0], replicas[1:], link)
        except ReplicaMismatch as error:
            return str(error), gathers.call_count
    return "", gathers.call_count


HOST = ["cpu"] * 3


def test_equal_processes_need_one_collective(cluster: Cluster) -> None:
    devices = [["cpu"], ["virtual:0", "virtual:3"], HOST]
    assert cluster.run(check, 3, devices, [], virtual=True) == [("", 1)] * 3


FIRST = "replica 0 of rank 0, replica 0 of rank 1"


@pytest.mark.parametrize(
    ("writes", "places"),
    [
        ([(2, 0)], (f"{FIRST}, replica 1 of rank 2 and 1 more", "replica 0 of rank 2")),
        ([(0, 2)], (f"{FIRST}, replica 0 of rank 2", "replica 2 of rank 0")),
        (
            # No process differs from another one, and yet all have to raise.
            [(0, 1), (1, 1), (2, 1)],
            (
                f"{FIRST}, replica 0 of rank 2",
                "replica 1 of rank 0, replica 1 of rank 1, replica 1 of rank 2",
            ),
        ),
    ],
)
def test_a_difference_anywhere_is_an_error_in_all(
    cluster: Cluster, writes: list[tuple[int, int]], places: tuple[str, str]
) -> None:
    changed = tensors_of()["0.bias"]
    with torch.no_grad():
        changed[0] = 9.0
    everywhere = [(rank, replica, "0.bias", 9.0) for rank, replica in writes]
    ((text, _),) = set(cluster.run(check, 3, [HOST] * 3, everywhere))
    expected = f"{shown(tensors_of()['0.bias'])} in {places[0]}; {shown(changed)} in {places[1]}"
    text_of_all = f"the replicas are not the same; 1 of 7 tensors differ:\n  '0.bias': {expected}"
    assert text == text_of_all


def wrapped(rank: int, world_size: int) -> list[str]:
    """What ``check_replicas`` of a wrapper says before and after a buffer was changed."""
    norm = nn.BatchNorm1d(4)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), norm), ["cpu", "cpu"])
    found = []
    for value in (0.0, float(rank)):
        assert norm.running_mean is not None
        norm.running_mean.fill_(value)
        try:
            model.check_replicas()
            found.append("")
        except ReplicaMismatch as error:
            found.append(str(error))
    model.close()
    return found


def test_a_wrapper_compares_buffers_of_processes(cluster: Cluster) -> None:
    first, second = cluster.run(wrapped, 2)
    assert first == second
    assert first[0] == "" and "'1.running_mean': float32 of shape (4,), fingerprint" in first[1]
