"""What the logging data of a reducer look like."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

from dataparallel.reducer.logging_data import LoggingData, environment
from dataparallel.reducer.statistics import Timings
from tests.cluster import Cluster

MS = 1_000_000


def example(**changes: Any) -> LoggingData:
    data = LoggingData(
        module_name="Sequential",
        world_size=2,
        rank=1,
        num_replicas=2,
        backend_name="gloo",
        devices=("cuda:0", "cuda:3"),
        output_device="cuda:0",
        find_unused_parameters=None,
        bucket_cap_bytes=(26214400,),
        dtypes=("float32", "float64"),
        num_parameter_tensors=6,
        total_parameter_size_bytes=15012,
        bucket_sizes=(1000, 14012),
        prev_iteration_grad_ready_order_indices=(5, 4, 3, 2, 1, 0),
        timings=Timings(iteration=4, num_sampled=4, avg_forward_compute_time=2 * MS),
        environment={"master_port": "29500"},
    )
    return dataclasses.replace(data, **changes)


def test_the_flat_dictionary() -> None:
    found = example().as_dict()
    expected: dict[str, object] = {
        "module_name": "Sequential",
        "world_size": 2,
        "rank": 1,
        "num_replicas": 2,
        "devices": "cuda:0, cuda:3",
        "device_ids": "0, 3",
        "output_device": 0,
        "broadcast_buffers": 1,
        "find_unused_parameters": 0,
        "bucket_cap_bytes": 26214400,
        "dtypes": "double, float",
        "bucket_sizes": "1000, 14012",
        "has_rebuilt_buckets": 0,
        "prev_iteration_grad_ready_order_indices": "5, 4, 3, 2, 1, 0",
        "iteration": 4,
        "avg_forward_compute_time": 2 * MS,
        "backward_comm_time": 0,
        "master_port": "29500",
    }
    assert {name: found.get(name) for name in expected} == expected
    assert all(type(value) in (int, str) for value in found.values())
    absent = {"rebuilt_bucket_sizes", "comm_hook", "can_set_static_graph", "error", "has_error"}
    assert not absent & set(found)


def test_what_is_only_sometimes_in_the_dictionary() -> None:
    found = example(
        devices=("cpu", "cpu"),
        output_device="cpu",
        find_unused_parameters=True,
        bucket_cap_bytes=(10, 20),
        has_rebuilt_buckets=True,
        rebuilt_per_bucket_param_indices=((5, 4), (3, 2, 1, 0)),
        can_set_static_graph=False,
        comm_hook="noop_hook",
        error="lost",
    ).as_dict()
    assert found["device_ids"] == ""
    assert found["output_device"] == -1
    assert found["find_unused_parameters"] == 1
    assert found["bucket_cap_bytes"] == "10, 20"
    assert found["has_rebuilt_buckets"] == 1
    assert found["rebuilt_per_bucket_param_indices"] == "5 4, 3 2 1 0"
    assert found["can_set_static_graph"] == 0
    assert found["comm_hook"] == "noop_hook"
    assert (found["has_error"], found["error"]) == (1, "lost")


def test_json() -> None:
    read = json.loads(example().to_json())
    assert read["bucket_sizes"] == [1000, 14012]
    assert read["can_set_static_graph"] is None
    assert read["timings"]["avg_forward_compute_time"] == 2 * MS
    assert set(read) == {field.name for field in dataclasses.fields(LoggingData)}
    assert example().to_json(indent=2).count("\n") > 30


def test_the_record_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'rank'"):
        example().rank = 3  # type: ignore[misc]


def test_the_report() -> None:
    times = Timings(4, 4, avg_backward_comm_time=3 * MS, avg_backward_compute_comm_overlap_time=MS)
    text = str(example(comm_hook="noop_hook", join_uneven_inputs=True, timings=times))
    assert "rank 1 of 2, 2 replicas, Sequential, iteration 4" in text
    assert "communication 3.00 ms, of which hidden 1.00 ms" in text
    assert "communication hook: noop_hook\nuneven inputs are joined" in text
    assert "hook" not in str(example())


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1234")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    found = environment("gloo")
    assert found["master_port"] == "1234"
    assert found["master_addr"] == "N/A"
    assert "gloo_socket_ifname" in found
    assert "nccl_debug" in environment("nccl")
    assert not any(name.startswith(("gloo", "nccl")) for name in environment(""))


def torchs_logging_data(rank: int, world_size: int) -> dict[str, Any]:
    model = TorchsDDP(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
    data: dict[str, Any] = model._get_ddp_logging_data()
    return data


def test_the_dictionary_has_what_torchs_has(cluster: Cluster) -> None:
    theirs = cluster.run(torchs_logging_data, 2)[1]
    timings = Timings(
        **{
            field.name: theirs[field.name]
            for field in dataclasses.fields(Timings)
            if field.name in theirs
        }
    )
    ours = example(
        num_replicas=1,
        devices=("cpu",),
        output_device="cpu",
        dtypes=("float32",),
        num_parameter_tensors=4,
        total_parameter_size_bytes=4 * 26,
        bucket_sizes=(104,),
        has_rebuilt_buckets=True,
        rebuilt_bucket_sizes=(104,),
        rebuilt_per_bucket_param_indices=((3, 2, 1, 0),),
        prev_iteration_grad_ready_order_indices=(3, 2, 1, 0),
        num_buckets_reduced=1,
        timings=timings,
        environment={name: theirs[name] for name in environment("gloo")},
    ).as_dict()
    # What torch alone can tell: the threads of its process group.
    assert set(theirs) - set(ours) == {"gloo_num_threads"}
    different = {name for name in theirs if name in ours and ours[name] != theirs[name]}
    assert not different
