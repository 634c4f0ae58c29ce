"""Replicas that are not the same, bit for bit, are found and named."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from dataparallel.comm.processes import ProcessLink
from dataparallel.kernels import fingerprint
from dataparallel.reducer import consistency
from dataparallel.reducer.consistency import Mismatch, ReplicaMismatch, check_replicas
from tests.cluster import Cluster

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]


def tensors_of(device: str = "cpu") -> dict[str, Tensor]:
    """A weight, a bias, and the buffers of a batch norm."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(device)
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def shown(tensor: Tensor) -> str:
    (number,) = fingerprint([tensor.cpu()]).tolist()
    return f"fingerprint {number % 2**64:016x}"


def caught(call: Callable[[], None]) -> ReplicaMismatch:
    with pytest.raises(ReplicaMismatch, match=r"^the replicas are not the same; ") as info:
        call()
    return info.value


# --- in one process --------------------------------------------------------------------------


def test_equal_replicas_pass(slots: list[str]) -> None:
    first, *others = [tensors_of(slot) for slot in slots]
    check_replicas(first)
    check_replicas(first, others)
    check_replicas({}, [{}, {}])


def test_one_changed_element_is_found(slots: list[str]) -> None:
    first, *others = [tensors_of(slot) for slot in slots]
    others[1]["0.weight"].data[2, 1] += 0.5
    error = caught(lambda: check_replicas(first, others))
    changed = others[1]["0.weight"]
    assert error.mismatches == (
        Mismatch("0.weight", 0, 2, shown(changed), shown(first["0.weight"]), 0.5, 1),
    )
    assert str(error) == (
        "the replicas are not the same; 1 of 7 tensors differ:\n"
        f"  '0.weight': replica 2 has {shown(changed)}, replica 0 has {shown(first['0.weight'])}; "
        "the largest difference is 0.5, elements that differ: 1"
    )


def test_all_differences_are_found() -> None:
    first, *others = [tensors_of() for _ in range(3)]
    others[0]["1.num_batches_tracked"] += 4
    others[1]["1.num_batches_tracked"] += 5
    others[1]["0.bias"].data[:2] = torch.tensor([-1e30, 7])
    error = caught(lambda: check_replicas(first, others))
    found = [(m.name, m.replica, m.num_elements) for m in error.mismatches]
    assert found == [
        ("0.bias", 2, 2),
        ("1.num_batches_tracked", 1, 1),
        ("1.num_batches_tracked", 2, 1),
    ]
    assert [m.difference for m in error.mismatches] == [pytest.approx(1e30), 4, 5]
    assert "2 of 7 tensors differ" in str(error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_single_bit_of_any_dtype(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 0, 1, 1]).to(dtype)
    copy = values.to("virtual:2")
    check_replicas({"t": values}, [{"t": copy}])
    copy[3] = 0
    error = caught(lambda: check_replicas({"t": values}, [{"t": copy}]))
    (mismatch,) = error.mismatches
    assert (mismatch.difference, mismatch.num_elements) == (1, 1)


@pytest.mark.parametrize(
    ("ours", "theirs", "difference", "count"),
    [
        ([1.0, 0.0], [1.0, -0.0], 0, 1),
        ([float("nan"), float("inf")], [float("nan"), float("inf")], None, None),
        ([float("nan"), 3.0], [2.0, 3.5], float("nan"), 2),
        ([float("inf"), 3.0], [float("-inf"), 3.5], float("inf"), 2),
        ([1.0 + 1e-7], [1.0], pytest.approx(1.19e-7, rel=0.01), 1),
    ],
)
def test_special_values(
    ours: list[float], theirs: list[float], difference: Any, count: int | None
) -> None:
    pair = {"t": torch.tensor(ours)}, [{"t": torch.tensor(theirs)}]
    if count is None:
        check_replicas(*pair)
        return
    (mismatch,) = caught(lambda: check_replicas(*pair)).mismatches
    assert mismatch.difference is not None
    assert mismatch.difference == pytest.approx(difference, nan_ok=True)
    assert mismatch.num_elements == count


def test_kinds_of_nan_differ_in_bits_alone() -> None:
    bits = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32)
    first, second = bits.view(torch.float32).split(1)
    check_replicas({"t": first}, [{"t": first.clone()}])
    (mismatch,) = caught(lambda: check_replicas({"t": first}, [{"t": second}])).mismatches
    assert (mismatch.difference, mismatch.num_elements) == (0, 1)


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_tensors_with_no_or_one_element(shape: tuple[int, ...]) -> None:
    check_replicas({"t": torch.ones(shape)}, [{"t": torch.ones(shape)}])
    expected = (
        rf"'t': replica 1 has float64 of shape {re.escape(str(shape))}, replica 0 has float32"
    )
    with pytest.raises(ReplicaMismatch, match=expected):
        check_replicas({"t": torch.ones(shape)}, [{"t": torch.ones(shape).double()}])


def test_shapes_with_the_same_elements_differ() -> None:
    replicas = {"t": torch.ones(6)}, [{"t": torch.ones(2, 3)}]
    (mismatch,) = caught(lambda: check_replicas(*replicas)).mismatches
    assert mismatch == Mismatch("t", 0, 1, "float32 of shape (2, 3)", "float32 of shape (6,)")


def test_strides_do_not_count() -> None:
    values = torch.randn(2, 3, 4, 4)
    other = values.to(memory_format=torch.channels_last)
    assert other.stride() != values.stride()
    check_replicas({"t": values}, [{"t": other}])


def test_names_that_one_replica_has_alone() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    error = caught(lambda: check_replicas({"a": a, "b": b}, [{"a": a, "c": b}, {"a": a, "b": b}]))
    assert error.mismatches == (
        Mismatch("b", 0, 1, "no tensor of this name", "float32 of shape (3,)"),
        Mismatch("c", 0, 1, "float32 of shape (3,)", "no tensor of this name"),
    )


def test_shared_memory_is_not_read() -> None:
    first = tensors_of()
    with mock.patch.object(consistency, "fingerprint", wraps=fingerprint) as reading:
        check_replicas(first, [dict(first), {n: t.detach() for n, t in first.items()}])
        assert reading.call_count == 0
        # A part of the same memory is not the same tensor.
        twice = torch.arange(4.0)
        with pytest.raises(ReplicaMismatch, match="'t': replica 2 has fingerprint"):
            check_replicas({"t": twice[:2]}, [{"t": twice[:2]}, {"t": twice[::2]}])
        (call,) = reading.call_args_list
        assert len(call.args[0]) == 2


def test_a_lazy_conjugate_is_not_what_it_is_made_of() -> None:
    values = torch.randn(3, dtype=torch.complex64)
    with pytest.raises(ReplicaMismatch, match="elements that differ: 3"):
        check_replicas({"t": values}, [{"t": values.conj()}])


def test_each_device_is_read_once_for_all_tensors() -> None:
    replicas = [tensors_of(f"virtual:{i}") for i in range(4)]
    with mock.patch.object(consistency, "fingerprint", wraps=fingerprint) as reading:
        check_replicas(replicas[0], replicas[1:])
    assert [len(call.args[0]) for call in reading.call_args_list] == [7] * 4


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_what_cannot_be_compared_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def special() -> dict[str, Tensor]:
        return {
            "a": torch.ones(2),
            "sparse": torch.eye(2).to_sparse(),
            "rows": torch.eye(2).to_sparse_csr(),
            "meta": torch.empty(3, device="meta"),
            "lazy": nn.LazyLinear(3).weight,
        }

    with caplog.at_level(logging.WARNING, "dataparallel"):
        check_replicas(special(), [special()])
    assert caplog.messages == [
        "replicas are compared by dtype and shape alone in 'sparse' (sparse_coo float32 of shape "
        "(2, 2)), 'rows' (sparse_csr float32 of shape (2, 2)), 'meta' (meta float32 of shape "
        "(3,)) and 1 more"
    ]
    with pytest.raises(ReplicaMismatch, match="'sparse': replica 1 has float32 of shape"):
        check_replicas(special(), [special() | {"sparse": torch.eye(2)}])


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantize:DeprecationWarning")
def test_quantized_tensors_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    first, second = (
        torch.quantize_per_tensor(torch.ones(2), scale, 0, torch.qint8) for scale in (0.1, 0.2)
    )
    check_replicas({"q": first}, [{"q": second}])
    assert "'q' (quantized qint8 of shape (2,))" in caplog.text


def test_tensors_that_wrap_others() -> None:
    def wrapper(second: float) -> TwoTensor:
        return TwoTensor(torch.ones(2), torch.full((2,), second))

    check_replicas({"w": wrapper(3.0)}, [{"w": wrapper(3.0)}])
    (mismatch,) = caught(
        lambda: check_replicas({"w": wrapper(3.0)}, [{"w": wrapper(4.0)}])
    ).mismatches
    assert (mismatch.name, mismatch.difference) == ("w.b", 1)


def test_a_long_message_ends_and_the_exception_has_all() -> None:
    first = {f"t{i}": torch.zeros(1) for i in range(60)}
    other = {f"t{i}": torch.ones(1) for i in range(60)}
    error = caught(lambda: check_replicas(first, [other]))
    assert len(error.mismatches) == 60
    assert str(error).count("\n") == 4
    assert str(error).endswith("\n  and 57 more")


def test_the_error_survives_pickling() -> None:
    error = caught(lambda: check_replicas({"t": torch.ones(1)}, [{"t": torch.zeros(1)}]))
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert copy.mismatches == error.mismatches


def test_nothing_is_changed_and_nothing_recorded() -> None:
    first, second = tensors_of(), tensors_of("virtual:1")
    versions = [tensor._version for tensor in (*first.values(), *second.values())]
    check_replicas(first, [second])
    assert versions == [tensor._version for tensor in (*first.values(), *second.values())]


# --- over processes --------------------------------------------------------------------------

#: What is written where: rank, replica, name, value.
Writes = list[tuple[int, int, str, float]]


def check(
    rank: int, world_size: int, num_replicas: list[int], writes: Writes
) -> tuple[str, tuple[Mismatch, ...], int]:
    """The message in a rank, what it found, and the number of collectives."""
    replicas = [tensors_of() for _ in range(num_replicas[rank])]
    for where, replica, name, value in writes:
        if where == rank:
            replicas[replica][name].data.view(-1)[0] = value
    link = ProcessLink(None, timeout=30, purpose="test")
    with mock.patch.object(link, "all_gather", wraps=link.all_gather) as gathers:
        try:
            check_replicas(replicas[0], replicas[1:], link)
        except ReplicaMismatch as error:
            return str(error), error.mismatches, gathers.call_count
    return "", (), gathers.call_count


def test_equal_processes_need_one_collective(cluster: Cluster) -> None:
    assert cluster.run(check, 3, [1, 2, 3], []) == [("", (), 1)] * 3


def test_a_process_with_other_values(cluster: Cluster) -> None:
    results = cluster.run(check, 3, [1, 1, 1], [(2, 0, "0.bias", 9.0)])
    assert len(set(results)) == 1
    message, mismatches, collectives = results[0]
    first, changed = tensors_of()["0.bias"], tensors_of()["0.bias"]
    changed.data[0] = 9.0
    assert mismatches == (Mismatch("0.bias", 2, 0, shown(changed), shown(first)),)
    assert message == (
        "the replicas are not the same; 1 of 7 tensors differ:\n"
        f"  '0.bias': replica 0 of rank 2 has {shown(changed)}, "
        f"replica 0 of rank 0 has {shown(first)}"
    )
    assert collectives == 3


def test_a_value_that_is_no_number(cluster: Cluster) -> None:
    results = cluster.run(check, 2, [2, 1], [(0, 1, "0.bias", float("nan"))])
    assert [str(mismatches[0].difference) for _, mismatches, _ in results] == ["nan"] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_replica_of_one_process_is_an_error_in_all(cluster: Cluster, rank: int) -> None:
    results = cluster.run(check, 2, [3, 3], [(rank, 2, "1.running_mean", 0.25)])
    assert len(set(results)) == 1
    message, (mismatch,), _ = results[0]
    assert (mismatch.rank, mismatch.replica, mismatch.difference) == (rank, 2, 0.25)
    assert f"replica 2 of rank {rank} has" in message
    assert f"replica 0 of rank {rank} has" in message


def test_the_same_fault_in_every_process(cluster: Cluster) -> None:
    """No process differs from another one, and yet all have to raise."""
    writes = [(0, 1, "0.bias", 9.0), (1, 1, "0.bias", 9.0)]
    results = cluster.run(check, 2, [2, 2], writes)
    assert len(set(results)) == 1
    assert [(m.rank, m.replica) for m in results[0][1]] == [(0, 1), (1, 1)]


def test_faults_everywhere_are_in_order(cluster: Cluster) -> None:
    writes = [(1, 0, "1.bias", 8.0), (2, 1, "0.weight", 9.0), (1, 0, "0.weight", 7.0)]
    results = cluster.run(check, 3, [1, 1, 2], writes)
    assert len(set(results)) == 1
    found = [(m.name, m.rank, m.replica) for m in results[0][1]]
    assert found == [("0.weight", 1, 0), ("0.weight", 2, 1), ("1.bias", 1, 0)]


def check_names(rank: int, world_size: int) -> list[Mismatch]:
    tensors = {"a": torch.ones(2), "bc"[rank]: torch.ones(3)}
    with pytest.raises(ReplicaMismatch, match=r"'b': .*\n.*'c': ") as info:
        check_replicas(tensors, [], ProcessLink(None, timeout=30, purpose="test"))
    return list(info.value.mismatches)


def test_processes_with_other_names(cluster: Cluster) -> None:
    look, missing = "float32 of shape (3,)", "no tensor of this name"
    expected = [Mismatch("b", 1, 0, missing, look), Mismatch("c", 1, 0, look, missing)]
    assert cluster.run(check_names, 2) == [expected] * 2


def check_devices(rank: int, world_size: int, change: bool) -> list[tuple[int, int]]:
    """Rank 0 on the CPU, rank 1 on two virtual devices."""
    replicas = [[tensors_of()], [tensors_of("virtual:0"), tensors_of("virtual:3")]][rank]
    if change:
        replicas[-1]["0.weight"].data.mul_(2)
    try:
        check_replicas(replicas[0], replicas[1:], ProcessLink(None, timeout=30, purpose="test"))
    except ReplicaMismatch as error:
        return [(m.rank, m.replica) for m in error.mismatches]
    return []


def test_processes_with_other_devices(cluster: Cluster) -> None:
    assert cluster.run(check_devices, 2, False, virtual=True) == [[], []]
    assert cluster.run(check_devices, 2, True, virtual=True) == [[(1, 0), (1, 1)]] * 2
