"""The names of torch's wrapper for logging data, with torch's entries."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

import dataparallel as dp
from tests.cluster import Cluster
from tests.ddp_name_cases import step, wrap


def _logging(rank: int, world_size: int, replicas: int) -> tuple[dict[str, Any], dict[str, Any]]:
    model = wrap(replicas, find_unused_parameters=False)
    model._set_ddp_runtime_logging_sample_rate(2)
    first = dict(model._get_ddp_logging_data())
    for _ in range(3):
        step(model, rank)
    return first, dict(model._get_ddp_logging_data())


#: What is about another way to reduce, what is called otherwise, and what os.environ tells.
_DIFFERENT = {
    # Torch's first plan is one bucket, since it does not look for unused parameters.
    "bucket_sizes",
    "initial_bucket_size_limits",
    "gloo_num_threads",
    "dtypes",
    *("master_addr", "master_port", "torch_distributed_debug", "cuda_visible_devices"),
    *("gloo_device_transport", "gloo_socket_ifname"),
}


def test_logging_data_has_the_entries_of_torch(cluster: Cluster) -> None:
    for ours, theirs in zip(cluster.run(_logging, 2, 1), cluster.run(_logging, 2, 0), strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            timed = {name for name in other if "time" in name}
            assert {n: mine.get(n) for n in other.keys() - timed - _DIFFERENT} == {
                n: other[n] for n in other.keys() - timed - _DIFFERENT
            }
            assert all(mine.get(name, -1) >= 0 for name in timed)
        after = ours[1]
        assert after["forward_compute_time"] > 0 and after["backward_compute_time"] > 0
        assert after["iteration"] == 2 and after["num_buckets_reduced"] == 1
        assert after["dtypes"] == "float32"


def _iterations(rank: int, world_size: int, replicas: int) -> list[Any]:
    """What is called the iteration after each step, and after forwards that are no iteration."""
    model = wrap(replicas)
    model._set_ddp_runtime_logging_sample_rate(4)
    found = []
    for number in range(14):
        step(model, rank)
        found.append(model._get_ddp_logging_data()["iteration"])
        if number % 5 == 0:
            with torch.no_grad():
                model(torch.randn(4, 3))
            with model.no_sync():
                step(model, rank)
            found.append(model._get_ddp_logging_data()["iteration"])
    return found


@pytest.mark.parametrize("replicas", [1, 2])
def test_iterations_are_counted_as_torch_does(cluster: Cluster, replicas: int) -> None:
    assert cluster.run(_iterations, 2, replicas) == cluster.run(_iterations, 2, 0)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.first(x) + self.second(x) if both else self.first(x)  # type: ignore[no-any-return]


def _unused(rank: int, world_size: int, ours: bool) -> list[Any]:
    """The logging data before and after a parameter has had no gradient, against what was said."""
    options: dict[str, Any] = {"device_ids": ["cpu", "cpu"]} if ours else {}
    wrapper: Any = dp.DistributedDataParallel if ours else TorchsDDP
    model = wrapper(Branch(), find_unused_parameters=False, **options)
    x = torch.randn(4, 3)
    model(x, True).sum().backward()
    before = model._get_ddp_logging_data()
    # Ours notices in the backward, torch's in the forward after that.
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior"):
        for _ in range(2):
            model(x, False).sum().backward()
    after = model._get_ddp_logging_data()
    prior = "Expected to have finished reduction in the prior iteration"
    return [before.get("has_error"), after.get("has_error"), prior in after.get("error", "")]


def test_a_round_that_has_failed_is_an_error_in_logging_data(cluster: Cluster) -> None:
    assert cluster.run(_unused, 2, True) == cluster.run(_unused, 2, False)


def _hooked(rank: int, world_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    model = wrap(2)
    model.register_comm_hook(None, "allreduce")
    with model.join():
        for _ in range(2):
            step(model, rank)
    return model.get_ddp_logging_data(), copy.deepcopy(model).get_ddp_logging_data()


def test_what_became_of_a_wrapper_is_not_copied(cluster: Cluster) -> None:
    for rank, (data, of_copy) in enumerate(cluster.run(_hooked, 2)):
        assert (data["rank"], data["world_size"], data["num_replicas"]) == (rank, 2, 2)
        assert data["comm_hook"] == "allreduce_hook" and data["join_uneven_inputs"] == 1
        assert data["has_rebuilt_buckets"] == 1 and data["rebuilt_per_bucket_param_indices"]
        assert data["unused_parameter_size"] == 0
        assert of_copy["has_rebuilt_buckets"] == 0 and "num_buckets_reduced" not in of_copy


def test_logging_data_without_processes() -> None:
    model = wrap(2)
    model.module[2].bias.requires_grad_()
    x = torch.randn(4, 3)
    model(x).sum().backward()
    data = model.get_ddp_logging_data()
    assert (data["world_size"], data["rank"]) == (1, 0)
    assert data["forward_compute_time"] > 0 and data["num_sampled"] == 1
    with torch.no_grad():
        model(x)
    # Only what trains is an iteration, as in torch.
    model(x).sum().backward()
    assert model.get_ddp_logging_data()["num_sampled"] == 2
    model.close()
