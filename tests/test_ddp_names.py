"""The names of torch's wrapper: ours has them, and they mean what they mean there."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
from torch import nn
from torch.distributed.algorithms.join import Joinable

import dataparallel as dp
from tests.cluster import Cluster
from tests.ddp_cases import Net, batch, two_layers, wrap

#: Public names of torch's class and its objects that ours do not have.
NOT_HERE = {
    # A round ends within its backward, and one that failed is forgotten.
    *("finalize_backward", "require_manual_backward_finalization"),
    "should_finalize_after_backward",
    # How its reducer is made, and what nothing depends on here.
    *("bucket_bytes_cap", "bucket_bytes_cap_default", "bucket_bytes_cap_list", "logger"),
    *("broadcast_bucket_size", "is_multi_device_module", "batched_grad_copy", "device_type"),
    *("lazy_bucket_allocation", "skip_all_reduce_unused_params", "to_kwargs"),
    "use_side_stream_for_tensor_copies",
    # The module's own.
    *("named_module_buffers", "modules_buffers"),
}


def make_net() -> Net:
    return Net("cpu", two_layers)


def step(model: Any) -> None:
    model(batch()).sum().backward()


def _has_not(names: set[str], owner: Any) -> set[str]:
    return {name for name in names if not name.startswith("_") and not hasattr(owner, name)}


def test_every_method_of_torch_is_here_or_has_a_reason_not_to_be() -> None:
    theirs = set(vars(nn.parallel.DistributedDataParallel))
    assert _has_not(theirs, dp.DistributedDataParallel) <= NOT_HERE


def test_arguments_of_torch_are_here_and_have_their_places() -> None:
    theirs = list(inspect.signature(nn.parallel.DistributedDataParallel).parameters)
    ours = list(inspect.signature(dp.DistributedDataParallel).parameters)
    assert ours[: len(theirs)] == theirs


def _attributes(rank: int, world_size: int) -> None:
    theirs, ours = wrap(make_net(), 0), wrap(make_net(), 2)
    for model in (ours, theirs):
        step(model)
    names = set(vars(theirs)) - set(vars(nn.Module()))
    assert _has_not(names, ours) <= NOT_HERE
    for name in ("device", "require_forward_param_sync", "parameters_to_ignore", "join_device"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours._join_config == theirs._join_config and isinstance(ours, Joinable)


def test_attributes_have_the_values_of_torch(cluster: Cluster) -> None:
    cluster.run(_attributes, 2)


def _static(rank: int, world_size: int) -> None:
    model = wrap(make_net(), 1)
    model._set_static_graph()
    step(model)
    # Said again, it is no error.
    model._set_static_graph()
    assert model.reducer.options.static_graph and model.static_graph
    late = wrap(make_net(), 1)
    step(late)
    with pytest.raises(RuntimeError, match="must come before the first backward, but there were 1"):
        late._set_static_graph()


def test_static_graph_is_set_before_the_first_backward(cluster: Cluster) -> None:
    cluster.run(_static, 2)


def test_the_wrappers_may_take_the_place_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For code that finds torch's classes by name; what is theirs by inheritance goes on."""
    torchs = nn.parallel.DistributedDataParallel, nn.DataParallel
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", dp.DistributedDataParallel)
    monkeypatch.setattr(nn.parallel, "DataParallel", dp.DataParallel)
    monkeypatch.setattr(nn, "DataParallel", dp.DataParallel)
    for wrapper in (nn.parallel.DistributedDataParallel, nn.parallel.DataParallel, nn.DataParallel):
        net = make_net()
        wrapper_class: Any = wrapper
        assert wrapper_class not in torchs
        dp.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            net, ["layers.0.bias"]
        )
        model = wrapper_class(net, ["cpu", "cpu"])
        assert isinstance(model, nn.DataParallel) and isinstance(model, torchs[1])
        for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            one.zero_grad()
            step(one)
            assert list(one.state_dict()) == list(net.state_dict())
