"""Replicas that do not go together are refused before anything is added up."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dataparallel.comm.processes import ProcessLink
from dataparallel.reducer import verification
from dataparallel.reducer.agreement import digest, gather_if_different
from dataparallel.reducer.verification import verify_across_processes, verify_replicas
from tests.cluster import Cluster

NAMES = ["0.weight", "0.bias", "1.weight"]


def replica(device: str = "cpu") -> list[Tensor]:
    shapes = [(3, 4), (4,), (2, 3, 1, 5)]
    return [torch.zeros(shape, device=device, requires_grad=True) for shape in shapes]


# --- in one process --------------------------------------------------------------------------


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_clones_go_together(num_replicas: int, slots: list[str]) -> None:
    replicas = [replica(slot) for slot in slots[:num_replicas]]
    verify_replicas(replicas, NAMES)
    verify_replicas(replicas, NAMES, [[True, False, False]] * num_replicas)


def resized(parameters: list[Tensor]) -> None:
    parameters[0] = torch.zeros(4, 3, requires_grad=True)
    parameters[2] = torch.zeros(2, 3, requires_grad=True)


def restrided(parameters: list[Tensor]) -> None:
    parameters[0] = torch.zeros(4, 3).t().requires_grad_()


def converted(parameters: list[Tensor]) -> None:
    parameters[0] = parameters[0].detach().bfloat16().requires_grad_()
    parameters[1] = parameters[1].detach().double().requires_grad_()


def frozen(parameters: list[Tensor]) -> None:
    parameters[1].requires_grad_(False)


def made_sparse(parameters: list[Tensor]) -> None:
    parameters[1] = torch.zeros(4).to_sparse().requires_grad_()


#: What is done to some replicas, and all faults as the message has them: @ stands for the replicas
#: or ranks that were changed, # for the others.
CHANGES: list[tuple[Callable[[list[Tensor]], None], str]] = [
    (
        resized,
        "have different sizes:\n"
        "  '0.weight': (3, 4) in #, (4, 3) in @\n"
        "  '1.weight': (2, 3, 1, 5) in #, (2, 3) in @\n",
    ),
    (restrided, "have different strides:\n  '0.weight': (4, 1) in #, (1, 3) in @\n"),
    (made_sparse, "have different strides:\n  '0.bias': (1,) in #, torch.sparse_coo in @\n"),
    (
        converted,
        "have different dtypes:\n"
        "  '0.weight': torch.float32 in #, torch.bfloat16 in @\n"
        "  '0.bias': torch.float32 in #, torch.float64 in @\n",
    ),
    (frozen, "have different requires_grad:\n  '0.bias': True in #, False in @\n"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
@pytest.mark.parametrize(
    ("which", "others", "changed"),
    [
        ([1], "replicas 0, 2 and 3", "replica 1"),
        ([2], "replicas 0, 1 and 3", "replica 2"),
        ([1, 3], "replicas 0 and 2", "replicas 1 and 3"),
        ([1, 2, 3], "replica 0", "replicas 1 to 3"),
    ],
)
def test_a_replica_that_was_changed(
    change: Callable[[list[Tensor]], None],
    message: str,
    which: list[int],
    others: str,
    changed: str,
) -> None:
    replicas = [replica() for _ in range(4)]
    for number in which:
        change(replicas[number])
    expected = "the parameters of the replicas " + message.replace("#", others)
    expected = re.escape(expected.replace("@", changed)) + "Every replica must be an exact clone"
    with pytest.raises(ValueError, match=expected):
        verify_replicas(replicas, NAMES)


def test_three_different_replicas() -> None:
    replicas = [[torch.zeros(size)] for size in (1, 2, 3, 2)]
    expected = r"'w': \(1,\) in replica 0, \(2,\) in replicas 1 and 3, \(3,\) in replica 2\n"
    with pytest.raises(ValueError, match=expected):
        verify_replicas(replicas, ["w"])


def test_replicas_with_other_numbers_of_parameters() -> None:
    replicas = [replica(), replica()[:2], replica()]
    expected = (
        r"different numbers of parameters: 3 in replicas 0 and 2, 2 in replica 1; replica 0 has 3 "
        r"parameters, and so must all"
    )
    with pytest.raises(ValueError, match=expected):
        verify_replicas(replicas, NAMES)


def test_replicas_that_expect_other_gradients() -> None:
    sparse = [[True, False, False], [True, True, False]]
    expected = r"different kinds of gradients:\n  '0.bias': dense in replica 0, sparse in replica 1"
    with pytest.raises(ValueError, match=expected):
        verify_replicas([replica(), replica()], NAMES, sparse)
    with pytest.raises(ValueError, match=r"numbers of expectations .* 3 in replica 0, 2 in repl"):
        verify_replicas([replica(), replica()], NAMES, [[True, False, False], [True, False]])
    with pytest.raises(ValueError, match=r"2 in replicas 0 and 1; replica 0 has 3 parameters"):
        verify_replicas([replica(), replica()], NAMES, [[True, False]] * 2)


def test_strides_that_no_element_uses_do_not_count() -> None:
    """A convolution with one input channel has them either way, and copying changes them."""
    weight = torch.zeros(8, 1, 3, 3)
    other = weight.to(memory_format=torch.channels_last).as_strided((8, 1, 3, 3), (9, 1, 3, 1))
    assert weight.stride() != other.stride()
    verify_replicas([[weight], [other]], ["w"])
    empty = torch.zeros(0, 4, 3), torch.zeros(0, 3, 4).transpose(1, 2)
    assert empty[0].stride() != empty[1].stride()
    verify_replicas([[each] for each in empty], ["w"])
    with pytest.raises(ValueError, match="different strides"):
        verify_replicas([[torch.zeros(2, 4)], [torch.zeros(4, 2).t()]], ["w"])


def test_a_layout_counts_where_no_stride_does() -> None:
    expected = r"'w': \(1,\) in replica 0, torch.sparse_coo in replica 1\n"
    with pytest.raises(ValueError, match=expected):
        verify_replicas([[torch.zeros(1)], [torch.zeros(1).to_sparse()]], ["w"])


@given(st.sets(st.integers(0, 30), min_size=1))
def test_numbers_in_messages(numbers: set[int]) -> None:
    """What is written is understood as what was meant."""
    text = verification._numbers("rank", sorted(numbers))
    place, rest = text.split(" ", 1)
    assert place == ("rank" if len(numbers) == 1 else "ranks")
    read: set[int] = set()
    for part in re.split(", | and ", rest):
        first, _, last = part.partition(" to ")
        read.update(range(int(first), int(last or first) + 1))
    assert read == numbers


# --- over processes --------------------------------------------------------------------------


def connected() -> ProcessLink:
    return ProcessLink(None, timeout=30, purpose="test")


def counted(link: ProcessLink) -> mock._patch[Any]:
    return mock.patch.object(link, "all_gather", wraps=link.all_gather)


def message_of(call: Callable[[], object]) -> str:
    """What a call complains of."""
    try:
        call()
    except (ValueError, UserWarning) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def verify(
    rank: int, world_size: int, changes: dict[int, Callable[[list[Tensor]], None]]
) -> tuple[str, int]:
    """The message in a rank, and how many collectives it took."""
    parameters = replica()
    if rank in changes:
        changes[rank](parameters)
    link = connected()
    with counted(link) as gathers:
        names = [*NAMES, "2.weight"][: len(parameters)]
        message = message_of(lambda: verify_across_processes(parameters, names, link))
    return message, gathers.call_count


def test_processes_that_go_together_need_one_collective(cluster: Cluster) -> None:
    assert cluster.run(verify, 3, {}) == [("", 1)] * 3


@pytest.mark.parametrize(("change", "message"), CHANGES)
@pytest.mark.parametrize(
    ("which", "others", "changed"),
    [
        ([2], "ranks 0 and 1", "rank 2"),
        ([1, 2], "rank 0", "ranks 1 and 2"),
        ([0], "ranks 1 and 2", "rank 0"),
    ],
)
def test_a_process_with_other_parameters(
    cluster: Cluster,
    change: Callable[[list[Tensor]], None],
    message: str,
    which: list[int],
    others: str,
    changed: str,
) -> None:
    results = cluster.run(verify, 3, dict.fromkeys(which, change))
    assert [count for _, count in results] == [3] * 3
    found = {text for text, _ in results}
    assert len(found) == 1, "all ranks raise the same"
    if 0 in which:
        # What rank 0 has comes first.
        message = re.sub(r": (\S.*) in #, (.*) in @", r": \2 in @, \1 in #", message)
    expected = message.replace("#", others).replace("@", changed)
    (text,) = found
    assert text.startswith(f"ValueError: the parameters of the processes {expected}")
    assert "Build the same model in every process" in text


def longer(parameters: list[Tensor]) -> None:
    parameters.append(torch.zeros(3, requires_grad=True))


def test_processes_with_other_numbers_of_parameters(cluster: Cluster) -> None:
    results = cluster.run(verify, 3, {1: longer, 2: longer})
    expected = (
        "ValueError: the processes have different numbers of parameters: 3 in rank 0, 4 in ranks 1 "
        "and 2\n  '2.weight' only in ranks 1 and 2; build the same model in every process"
    )
    assert results == [(expected, 3)] * 3


def test_the_number_comes_before_the_sizes(cluster: Cluster) -> None:
    results = cluster.run(verify, 2, {0: longer, 1: resized})
    assert all("different numbers of parameters" in text for text, _ in results)


def verify_names(rank: int, world_size: int, names: list[list[str]], rank_resized: int) -> str:
    parameters = [
        torch.zeros(2 + (rank == rank_resized)),
        *(torch.zeros(2) for _ in names[rank][1:]),
    ]
    return message_of(lambda: verify_across_processes(parameters, names[rank], connected()))


def test_other_names_are_a_warning(cluster: Cluster) -> None:
    results = cluster.run(verify_names, 2, [["a", "b", "c"], ["b", "d", "c"]], -1)
    expected = (
        "UserWarning: parameters have other names in other processes, but the same sizes: "
        "('a' in rank 0, 'b' in rank 1), ('b' in rank 0, 'd' in rank 1); their gradients are"
    )
    assert len(set(results)) == 1
    assert results[0].startswith(expected)


def test_another_order_of_the_same_names_is_an_error(cluster: Cluster) -> None:
    results = cluster.run(verify_names, 2, [["a", "b", "c"], ["b", "a", "c"]], -1)
    expected = (
        "ValueError: the processes have their parameters in different orders: "
        "('a' in rank 0, 'b' in rank 1), ('b' in rank 0, 'a' in rank 1); register them in the same"
    )
    assert len(set(results)) == 1
    assert results[0].startswith(expected)


def test_many_other_names_are_counted(cluster: Cluster) -> None:
    names = [[f"{prefix}.{i}" for i in range(9)] for prefix in ("a", "b")]
    results = cluster.run(verify_names, 2, names, -1)
    assert "('a.2' in rank 0, 'b.2' in rank 1) and 6 more; their" in results[0]
    assert "a.3" not in results[0]


def test_other_names_are_shown_with_a_fault(cluster: Cluster) -> None:
    results = cluster.run(verify_names, 2, [["weight", "c"], ["_orig_mod.weight", "c"]], 1)
    expected = "('weight' in rank 0, '_orig_mod.weight' in rank 1): (2,) in rank 0, (3,) in rank 1"
    assert all(expected in text for text in results)


def verify_sparse(rank: int, world_size: int, sparse: list[list[bool]]) -> str:
    return message_of(
        lambda: verify_across_processes(replica(), NAMES, connected(), sparse[rank]),
    )


def test_processes_that_expect_other_gradients(cluster: Cluster) -> None:
    sparse = [[False, False, True], [True, False, False]]
    expected = (
        "different kinds of gradients:\n  '0.weight': dense in rank 0, sparse in rank 1\n"
        "  '1.weight': sparse in rank 0, dense in rank 1\n"
    )
    assert all(expected in text for text in cluster.run(verify_sparse, 2, sparse))
    assert cluster.run(verify_sparse, 2, [sparse[0]] * 2) == ["", ""]


def test_one_process_needs_no_collective(cluster: Cluster) -> None:
    assert cluster.run(verify, 1, {}) == [("", 0)]


# --- the exchange ----------------------------------------------------------------------------


def exchange(rank: int, world_size: int, values: list[Any], details: list[Any]) -> Any:
    return gather_if_different(values[rank], connected(), details=details[rank], what="a test")


def test_details_are_exchanged_where_values_differ(cluster: Cluster) -> None:
    details = [None, "päß\0\0", {"x" * 99: [1, None]}]
    assert cluster.run(exchange, 3, [[5, "a"]] * 3, details) == [None] * 3
    values = [[5, "a"], [5, "a"], [5, "b"]]
    assert (
        cluster.run(exchange, 3, values, details) == [list(zip(values, details, strict=True))] * 3
    )


def test_a_digest_is_the_same_everywhere() -> None:
    # SHA-256 of the text null begins with these bytes.
    assert digest(None) == int.from_bytes(bytes.fromhex("74234e98afe7498f"), "little", signed=True)
    assert digest(["weight", (3, 4)]) == digest(["weight", [3, 4]]) != digest(["weight", [4, 3]])
    assert all(-(2**63) <= digest(i) < 2**63 for i in range(100))
