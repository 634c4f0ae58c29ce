"""The names of torch's wrapper mean what they mean there, those of its logging data too."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.join import Joinable
from torch.distributed.device_mesh import init_device_mesh

import dataparallel as dp
from dataparallel.reducer.statistics import Statistics
from dataparallel.threads import Phase
from dataparallel.threads.timeline import Span, Timeline
from dataparallel.virtual import pending
from tests.cluster import Cluster
from tests.ddp_cases import Net, batch, one_layer, two_layers, wrap

#: Public names of torch's class and its objects that ours do not have.
NOT_HERE = {
    # A round ends within its backward, and one that failed is forgotten.
    *("finalize_backward", "require_manual_backward_finalization"),
    "should_finalize_after_backward",
    # Names about the making of its reducer, and names that nothing depends on here.
    *("bucket_bytes_cap", "bucket_bytes_cap_default", "bucket_bytes_cap_list", "logger"),
    *("broadcast_bucket_size", "is_multi_device_module", "batched_grad_copy", "device_type"),
    *("lazy_bucket_allocation", "skip_all_reduce_unused_params", "to_kwargs"),
    "use_side_stream_for_tensor_copies",
    # The module's own.
    *("named_module_buffers", "modules_buffers"),
}


def make_net() -> Net:
    return Net("cpu", two_layers)


def step(model: Any, *args: Any) -> None:
    model(batch(), *args).sum().backward()


def _has_not(names: set[str], owner: Any) -> set[str]:
    return {name for name in names if not name.startswith("_") and not hasattr(owner, name)}


def test_methods_and_arguments_of_torch_are_here() -> None:
    torchs = nn.parallel.DistributedDataParallel
    assert _has_not(set(vars(torchs)), dp.DistributedDataParallel) <= NOT_HERE
    theirs = list(inspect.signature(torchs).parameters)
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
    data = late._get_ddp_logging_data()
    assert data["has_error"] == 1 and "must come before the first backward" in data["error"]


def _hooks(rank: int, world_size: int) -> None:
    for kind in (BuiltinCommHookType.ALLREDUCE, BuiltinCommHookType.FP16_COMPRESS):
        models = [wrap(make_net(), replicas) for replicas in (0, 1)]
        for model in models:
            assert "comm_hook" not in model._get_ddp_logging_data()
            model._register_builtin_comm_hook(kind)
            with pytest.raises((RuntimeError, TypeError), match=r"only be called once|callable|3"):
                model.register_comm_hook(None, 3)
        theirs, ours = (model._get_ddp_logging_data() for model in models)
        assert ours["comm_hook"] == theirs["comm_hook"] == str(kind)
        assert ours["has_error"] == theirs["has_error"] == 1


def _mesh(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    theirs, ours = (wrap(make_net(), replicas, device_mesh=mesh) for replicas in (0, 1))
    assert ours.device_mesh is theirs.device_mesh is mesh
    assert ours.process_group is theirs.process_group
    assert copy.deepcopy(ours).device_mesh is None


@pytest.mark.parametrize("what", [_attributes, _static, _hooks, _mesh])
def test_they_have_the_values_of_torch(cluster: Cluster, what: Any) -> None:
    cluster.run(what, 2)


def test_the_wrappers_may_take_the_place_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For code that finds torch's classes by name; what is theirs by inheritance goes on."""
    torchs = nn.parallel.DistributedDataParallel, nn.DataParallel
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", dp.DistributedDataParallel)
    monkeypatch.setattr(nn.parallel, "DataParallel", dp.DataParallel)
    for wrapper in (nn.parallel.DistributedDataParallel, nn.parallel.DataParallel):
        net = make_net()
        wrapper_class: Any = wrapper
        dp.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            net, ["layers.0.bias"]
        )
        model = wrapper_class(net, ["cpu", "cpu"])
        assert isinstance(model, torchs[1]) and wrapper_class not in torchs
        for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            one.zero_grad()
            step(one)
            assert list(one.state_dict()) == list(net.state_dict())


# --- logging data --------------------------------------------------------------------------------

#: Entries about another way to reduce, with other names, or from os.environ.
_DIFFERENT = {
    # Torch's first plan is one bucket, since it does not look for unused parameters.
    "bucket_sizes",
    # On the CPU ours are smaller.
    "bucket_cap_bytes",
    "initial_bucket_size_limits",
    "gloo_num_threads",
    *("master_addr", "master_port", "torch_distributed_debug", "cuda_visible_devices"),
    *("gloo_device_transport", "gloo_socket_ifname"),
}


def _logging(rank: int, world_size: int, replicas: int) -> list[dict[str, Any]]:
    """Return the data at first, after each step, and after forwards that are no iteration."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Linear(64, 2)).double()
    model = wrap(net, replicas, find_unused_parameters=False)
    model._set_ddp_runtime_logging_sample_rate(4)
    found = [dict(model._get_ddp_logging_data())]
    for number in range(14):
        step(model)
        found.append(dict(model._get_ddp_logging_data()))
        if number % 5 == 0:
            with torch.no_grad():
                model(batch())
            with model.no_sync():
                step(model)
            found.append(dict(model._get_ddp_logging_data()))
    return found


def test_logging_data_has_the_entries_of_torch(cluster: Cluster) -> None:
    """With two replicas, the same iterations count."""
    theirs, of_two = cluster.run(_logging, 2, 0), cluster.run(_logging, 2, 2)
    for ours, two, others in zip(cluster.run(_logging, 2, 1), of_two, theirs, strict=True):
        for one in (ours, two):
            assert [each["iteration"] for each in one] == [each["iteration"] for each in others]
        for number in (0, 3):
            mine, other = ours[number], others[number]
            timed = {name for name in other if "time" in name}
            assert {n: mine.get(n) for n in other.keys() - timed - _DIFFERENT} == {
                n: other[n] for n in other.keys() - timed - _DIFFERENT
            }
            assert all(mine.get(name, -1) >= 0 for name in timed)
        last = ours[-1]
        assert last["num_buckets_reduced"] == 1 and last["dtypes"] == "double"
        assert min(last["forward_compute_time"], last["backward_compute_time"]) > 0
        assert 0 <= last["backward_compute_comm_overlap_time"] <= last["backward_comm_time"]
        order = ("forward_compute_time", "backward_compute_time", "backward_comm_time")
        begins = [last[f"{name}_start"] for name in order]
        assert begins == sorted(begins) and last["backward_comm_time_end"] > begins[-1]


def _unused(rank: int, world_size: int, replicas: int) -> list[Any]:
    """Return the logging data before and after a parameter without a gradient."""
    net = Net("cpu", lambda net, x, all: two_layers(net, x) if all else one_layer(net, x, 0))
    net.layers[2].requires_grad_(False)
    model = wrap(net, replicas, find_unused_parameters=False)
    step(model, True)
    before = model._get_ddp_logging_data()
    # Ours notices in the backward, torch's in the forward after that.
    prior = "Expected to have finished reduction in the prior iteration"
    with pytest.raises(RuntimeError, match=prior):
        for _ in range(2):
            step(model, False)
    after = model._get_ddp_logging_data()
    return [before.get("has_error"), after.get("has_error"), prior in after.get("error", "")]


def test_a_round_that_has_failed_is_an_error_in_logging_data(cluster: Cluster) -> None:
    assert cluster.run(_unused, 2, 2) == cluster.run(_unused, 2, 0)


def test_logging_data_without_processes() -> None:
    """And whether the graph is static, which nobody knows before the second step."""
    net = Net("cpu", one_layer)
    model = dp.DistributedDataParallel(net, ["cpu", "cpu"], find_unused_parameters=True)
    found = []
    for number in (0, 0, 1, 1):
        step(model, number)
        found.append(model._get_ddp_logging_data().get("can_set_static_graph"))
    assert found == [None, 1, 0, 0]
    data: dict[str, Any] = model.get_ddp_logging_data()
    assert (data["world_size"], data["rank"], data["num_sampled"]) == (1, 0, 4)
    assert data["forward_compute_time"] > 0 and not model.timeline.listeners
    with pytest.raises(ValueError, match="is sampled, or in more, but got 0"):
        model._set_ddp_runtime_logging_sample_rate(0)


# --- what is measured ----------------------------------------------------------------------------

#: Milliseconds: buckets are on their way for 9, of which backward takes 4.
SPANS: list[tuple[Phase, int, int]] = [
    ("forward", 0, 3),
    ("reduce local", 8, 9),
    ("backward", 4, 12),
    ("reduce across processes", 14, 17),
    ("reduce local", 12, 18),
]


def test_lengths_of_spans_and_their_means() -> None:
    timeline = Timeline([torch.device("cpu")])
    measured = Statistics(timeline)

    def iterate(factor: int, *, fails: bool = False) -> None:
        measured.begin()
        for phase, begin, end in SPANS[: 1 if fails else None]:
            span = Span(timeline, phase, (0,))
            span.begin, span.end = begin * factor * 10**6, end * factor * 10**6
            for listener in timeline.listeners:
                assert listener.on_span is not None
                listener.on_span(span)
        if fails:
            measured.abandon()
        else:
            measured.end()

    for factor in (1, 6):
        iterate(factor)
    found = measured.read()
    assert found["num_sampled"] == 2
    lengths = {"forward_compute": 3, "backward_compute": 8, "backward_comm": 9}
    for name, length in {**lengths, "backward_compute_comm_overlap": 4}.items():
        assert found[f"{name}_time"] == 6 * length * 10**6
        assert found[f"avg_{name}_time"] == 3.5 * length * 10**6
    # Both since the same moment.
    for name, first, last in (("backward_compute", 4, 12), ("backward_comm", 8, 17)):
        since = found["forward_compute_time_start"]
        assert abs(found[f"{name}_time_start"] - since - 6 * first * 10**6) < 10**6
        assert abs(found[f"{name}_time_end"] - since - 6 * last * 10**6) < 10**6
    # A failed iteration does not count, and nobody listens after it.
    iterate(100, fails=True)
    assert measured.read()["avg_forward_compute_time"] == 3.5 * 3 * 10**6
    assert not timeline.listeners
    # A forward without a backward counts when the next one begins.
    measured.begin()
    measured.begin()
    assert measured.read()["num_sampled"] == 3


def test_on_accelerators_events_tell_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's clock stands still, and the work happens later than it is queued."""
    monkeypatch.setattr("time.perf_counter_ns", lambda: 10**9)
    virtual = [torch.device("virtual", i) for i in range(2)]
    timeline = Timeline(virtual)
    measured = Statistics(timeline)
    streams = [torch.Stream(device) for device in virtual]

    def compute(device: int) -> None:
        tensor = torch.ones(100, 100, device=virtual[device])
        for _ in range(20):
            tensor = tensor @ tensor

    with streams[0], streams[1]:
        measured.begin()
        with timeline.span("forward"):
            compute(1)
        with timeline.span("backward"):
            compute(0)
            with timeline.span("reduce local", 1):
                pass
        measured.end()
        measured.begin()
        assert sum(map(pending, streams)) > 0, "measuring has waited for the device"
    found = measured.read()
    assert sum(map(pending, streams)) == 0
    # Each measure is that of the device that had something to do.
    assert found["forward_compute_time"] > 10_000
    assert found["backward_compute_time"] > 10_000
    assert found["backward_comm_time"] < found["backward_compute_time"]
    assert found["backward_compute_comm_overlap_time"] <= found["backward_comm_time"]
