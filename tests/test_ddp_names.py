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
from tests.ddp_name_cases import make_net, step, wrap

#: Names of torch's class that ours does not have: how its reducer is made and driven. Some versions
#: of torch lack a few.
NOT_HERE = {
    "_build_debug_param_to_name_mapping": "builds the reducer",
    "_build_params_for_reducer": "builds the reducer",
    "_check_and_sync_module_buffers": "a part of its join hook",
    "_check_default_group": "a part of pickling",
    "_check_reducer_finalized": "a backward that failed is forgotten",
    "_check_manual_backward_finalization_supported": "a round ends within its backward",
    "_clear_grad_buffer": "delayed parameters are in buckets here",
    "_ddp_init_helper": "builds the reducer",
    "_delayed_all_reduce_hook": "delayed parameters are in buckets here",
    "_fire_reducer_autograd_hook": "replicas have parameters of their own in mixed precision",
    "_get_active_ddp_module": "torch's compiler asks its own class",
    "_get_parameters": "of the time of its replicas",
    "_inside_ddp_forward": "torch's compiler asks its own class",
    "_lazy_init": "optimizers in backward are found at construction",
    "_log_and_throw": "writes into its logger",
    "_match_all_reduce_for_bwd_pass": "a part of its join hook",
    "_match_unused_params_allreduce": "a part of its join hook",
    "_module_wait_for_copy_hook": "replicas have parameters of their own in mixed precision",
    "_passing_sync_batchnorm_handle": "refuses SyncBatchNorm on the CPU",
    "_post_forward": "there is one forward for all replicas",
    "_pre_forward": "there is one forward for all replicas",
    "_register_accum_grad_hook": "for its reducer in Python",
    "_register_fused_optim": "step_in_backward() takes an optimizer's steps",
    "_register_delay_all_reduce_hook": "delayed parameters are in buckets here",
    "_remove_autograd_hooks": "model.reducer.remove_hooks() does",
    "_root_copy_hook": "replicas have parameters of their own in mixed precision",
    "_run_ddp_forward": "there is one forward for all replicas",
    "_setup_in_backward_optimizers": "optimizers in backward are found at construction",
    "_assign_modules_buffers": "a part of how buffers are sent",
    "_check_comm_hook": "a part of registering a hook",
    "_check_global_requires_backward_grad_sync": "a part of its join hook",
    "_check_sync_bufs_post_fwd": "a part of how buffers are sent",
    "_check_sync_bufs_pre_fwd": "a part of how buffers are sent",
    "_default_broadcast_coalesced": "a part of how buffers are sent",
    "_distributed_broadcast_coalesced": "a part of how buffers are sent",
    "_get_data_parallel_params": "named_parameters() without parameters_to_ignore are they",
    "_register_buffer_comm_hook": "rank 0 sends its buffers",
    "_distributed_rank": "torch.distributed.get_rank(model.process_group) tells",
    "_find_common_rank": "a part of its join hook",
    "_set_ddp_sink_clone": "outputs are not copied",
    "_set_sparse_metadata": "which rows are sent is found out",
    "_sync_buffers": "a part of how buffers are sent",
    "_sync_final_model": "a part of its join hook",
    "_sync_module_buffers": "a part of how buffers are sent",
    "to_kwargs": "of the time of its replicas",
    "finalize_backward": "a round ends within its backward",
    "require_manual_backward_finalization": "a round ends within its backward",
    "should_finalize_after_backward": "a round ends within its backward",
}

#: The same for the attributes of its objects.
NO_ATTRIBUTE = {
    "_accum_grad_hooks": "for its reducer in Python",
    "_bucket_config": "how its reducer is made",
    "broadcast_bucket_size": "nothing depends on it",
    "_ddp_sink_clone": "outputs are not copied",
    "_delay_grad_buffer": "delayed parameters are in buckets here",
    "_delay_grad_views": "delayed parameters are in buckets here",
    "_lazy_init_ran": "nothing is left for the first forward",
    "_require_manual_backward_finalization": "a round ends within its backward",
    "_use_python_reducer": "there is no such reducer",
    "bucket_bytes_cap": "options of the reducer tell",
    "bucket_bytes_cap_default": "options of the reducer tell",
    "bucket_bytes_cap_list": "options of the reducer tell",
    "_delay_all_reduce_params": "delayed parameters are in buckets here",
    "_delay_all_reduce_all_params": "delayed parameters are in buckets here",
    "is_multi_device_module": "nothing depends on it",
    "device_type": "model.device tells",
    "named_module_buffers": "the module's own are read at each forward",
    "modules_buffers": "the module's own are read at each forward",
    "_comm_hooks": "model.options.hook tells",
    "_module_parameters": "the module's own",
    "_divide_by_initial_world_size": "a part of its join hook",
    "_has_rebuilt_buckets": "a part of its reducer",
    "batched_grad_copy": "nothing depends on it",
    "lazy_bucket_allocation": "nothing depends on it",
    "logger": "logging data are read through the wrapper",
    "skip_all_reduce_unused_params": "nothing depends on it",
    "use_side_stream_for_tensor_copies": "copies have a stream of their own",
}


# --- which names there are -------------------------------------------------------------------


def _has_not(names: set[str], owner: Any) -> set[str]:
    plain = {name for name in names if not name.startswith("__") and name != "_abc_impl"}
    return {name for name in plain if not hasattr(owner, name)}


def test_every_method_of_torch_is_here_or_has_a_reason_not_to_be() -> None:
    theirs = set(vars(nn.parallel.DistributedDataParallel)) - {"_active_ddp_module"}
    assert _has_not(theirs, dp.DistributedDataParallel) == theirs & set(NOT_HERE)


def test_arguments_of_torch_are_here_and_have_their_places() -> None:
    theirs = list(inspect.signature(nn.parallel.DistributedDataParallel).parameters)
    ours = list(inspect.signature(dp.DistributedDataParallel).parameters)
    assert ours[: len(theirs)] == theirs


def _attributes(rank: int, world_size: int) -> tuple[set[str], set[str]]:
    theirs, ours = wrap(0), wrap(1)
    for model in (ours, theirs):
        step(model)
    bare = set(vars(nn.Module()))
    names = set(vars(theirs)) - bare
    return _has_not(names, ours), names & set(NO_ATTRIBUTE)


def test_every_attribute_of_torch_is_here_or_has_a_reason_not_to_be(cluster: Cluster) -> None:
    missing, known = cluster.run(_attributes, 1)[0]
    assert missing == known


# --- what they mean --------------------------------------------------------------------------


def _described(rank: int, world_size: int, replicas: int) -> dict[str, Any]:
    model = wrap(replicas, bucket_cap_mb=1)
    return {
        "device": model.device,
        "require_forward_param_sync": model.require_forward_param_sync,
        "parameters_to_ignore": model.parameters_to_ignore,
        "join_device": model.join_device,
        "_join_config": model._join_config,
        "is_joinable": isinstance(model, Joinable),
    }


def test_attributes_have_the_values_of_torch(cluster: Cluster) -> None:
    for ours, theirs in zip(
        cluster.run(_described, 2, 2), cluster.run(_described, 2, 0), strict=True
    ):
        for name, value in theirs.items():
            assert ours[name] == value, name


def _static(rank: int, world_size: int) -> bool:
    model = wrap(1)
    model._set_static_graph()
    step(model, rank)
    # Said again, it is no error.
    model._set_static_graph()
    frozen = bool(model.reducer.options.static_graph and model.static_graph)
    late = wrap(1)
    step(late, rank)
    with pytest.raises(RuntimeError, match="must come before the first backward, but there were 1"):
        late._set_static_graph()
    return frozen


def test_static_graph_is_set_before_the_first_backward(cluster: Cluster) -> None:
    assert cluster.run(_static, 2) == [True, True]


def test_parameters_that_are_left_to_each_process() -> None:
    net = make_net()
    ours = dp.DistributedDataParallel
    ours._set_params_and_buffers_to_ignore_for_model(net, ["0.weight", "1.running_var"])
    model = ours(net, ["cpu", "cpu"])
    assert model.parameters_to_ignore == {"0.weight", "1.running_var"}


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
        dp.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["1.bias"])
        model = wrapper_class(net, ["cpu", "cpu"])
        assert isinstance(model, nn.DataParallel) and isinstance(model, torchs[1])
        for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            one.zero_grad()
            assert all(gradient.isfinite().all() for gradient in step(one))
            assert list(one.state_dict()) == list(net.state_dict())
