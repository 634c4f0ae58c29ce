"""Originals on all devices: training is that of the bare module, with less memory on each."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import logging
import pathlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dataparallel as dp
from dataparallel import checkpoint, virtual
from dataparallel.reducer import round as round_
from dataparallel.virtual import device_module
from tests.cluster import Cluster
from tests.free_threading import LATER
from tests.models import assert_all_close

DEVICES = [f"virtual:{i}" for i in range(4)]
WIDTH = 24


class Net(nn.Module):
    """Layers with a tie, a buffer, a frozen part, and two parameters in one memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.norm(torch.tanh(self.first(x)))
        x = torch.tanh(self.second(x)) + self.frozen(x)
        return self.last(torch.tanh(self.tied(x)))


def batch(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(12, WIDTH, generator=generator)
    return x, torch.randint(5, (12,), generator=generator)


def wrap(net: nn.Module, num_devices: int, **options: Any) -> Any:
    return dp.DistributedDataParallel(net, DEVICES[:num_devices], originals="spread", **options)


def places(module: nn.Module) -> set[str]:
    return {str(p.device) for p in module.parameters() if p.requires_grad}


def values(module: nn.Module) -> list[Tensor]:
    """Return copies of the parameters on the host."""
    return [p.detach().cpu().clone() for p in module.parameters()]


def assert_close(ours: Any, theirs: Any) -> None:
    """Compare lists of tensors, or the parameters of modules."""
    both = [values(one) if isinstance(one, nn.Module) else one for one in (ours, theirs)]
    assert_all_close(*both, rtol=1e-4, atol=1e-5)


def losses(model: Any, net: nn.Module, optimizer: Any, step: int) -> Tensor:
    x, y = batch(step)
    home = "cpu" if model is net else DEVICES[0]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x.to(home)), y.to(home))
    loss.backward()
    return loss.detach()


# --- optimizers ----------------------------------------------------------------------------------


class Momentum(torch.optim.Optimizer):
    """Keeps numbers in its state and in lists there: where the parameter is, or elsewhere."""

    def __init__(self, parameters: Any, place: str | None = None) -> None:
        super().__init__(parameters, {"place": place})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, grad = self.state[p], p.grad.to(group["place"] or p.device)
                if not state:
                    state.update(norm=torch.zeros((), device=grad.device), sums=[grad.clone()])
                state["norm"].add_(grad.norm())
                state["sums"][0].add_(grad)
                assert state["sums"][0].device == grad.device
                p.sub_((0.01 * state["sums"][0] / (1 + state["norm"])).to(p.device))


ADAMW: dict[str, Any] = {"lr": 0.01}
OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, ADAMW),
    (torch.optim.AdamW, {**ADAMW, "foreach": False}),
    (torch.optim.AdamW, {**ADAMW, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adagrad, {"lr": 0.01}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9}),
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.Adafactor, {"lr": 0.01}),
    (torch.optim.Rprop, {"lr": 0.01}),
]


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("kind", "arguments"), OPTIMIZERS, ids=lambda each: getattr(each, "__name__", str(each))
)
def test_an_optimizer_with_a_state_goes_on(
    kind: Any, arguments: dict[str, Any], num_devices: int
) -> None:
    """It was made before the wrapper, and has made a step; then schedules and clipping."""
    net = Net().eval()
    bare = copy.deepcopy(net)
    ours, plain = (kind([p for p in n.parameters()], **arguments) for n in (net, bare))
    for module, optimizer in ((net, ours), (bare, plain)):
        losses(module, module, optimizer, 0)
        optimizer.step()
    model = wrap(net, num_devices)
    assert len(places(net)) == num_devices
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2) for each in (ours, plain)]
    for step in range(1, 5):
        pairs = zip((model, bare), (net, bare), (ours, plain), schedules, strict=True)
        seen = []
        for wrapper, module, optimizer, schedule in pairs:
            loss = losses(wrapper, module, optimizer, step)
            norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            seen.append([loss.cpu(), norm.cpu(), *values(module)])
        assert_close(*seen)
    for p in net.parameters():
        for part in ours.state[p].values() if p in ours.state else ():
            assert not isinstance(part, Tensor) or not part.dim() or part.device == p.device
    model.check_replicas()
    model.close()


@pytest.mark.parametrize("wrapper", [dp.DataParallel, dp.DistributedDataParallel])
@pytest.mark.parametrize(("kind", "arguments"), OPTIMIZERS[2:5])
def test_originals_at_home_that_leave_the_host(wrapper: Any, kind: Any, arguments: Any) -> None:
    """The state of an optimizer goes along, as that of a checkpoint that was loaded before."""
    net = Net().eval()
    bare = copy.deepcopy(net)
    ours, plain = (kind(n.parameters(), **arguments) for n in (net, bare))
    model: Any = net
    for step in range(4):
        if step == 2:
            model = wrapper(net, DEVICES[:2])
        for called, module, optimizer in ((model, net, ours), (bare, bare, plain)):
            losses(called, module, optimizer, step)
            optimizer.step()
        assert_close(net, bare)


@pytest.mark.parametrize("options", [{"capturable": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_a_way_to_step_of_accelerators(num_devices: int, options: dict[str, Any]) -> None:
    """Training, or an error, is that of torch there with a module on one device."""
    found: list[Any] = []
    for wraps in (False, True):
        net = Net().eval().to(DEVICES[0])
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, **options)
        model: Any = wrap(net, num_devices) if wraps else net
        try:
            for step in range(3):
                x, y = (t.to(DEVICES[0]) for t in batch(step))
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                if wraps and step == 1:
                    model.gather_originals()
                optimizer.step()
        except (RuntimeError, NotImplementedError) as error:
            found.append(type(error))
        else:
            found.append(values(net))
    if isinstance(found[0], list):
        assert_close(*found)
    assert type(found[0]) is type(found[1])


@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree"])
def test_schedule_free(name: str, num_devices: int) -> None:
    """The parameters are an average between two trainings."""
    kind = getattr(pytest.importorskip("schedulefree"), name)
    net = Net().eval()
    bare = copy.deepcopy(net)
    model = wrap(net, num_devices)
    ours, plain = (kind(n.parameters(), lr=0.01, warmup_steps=2) for n in (net, bare))
    for step in range(4):
        for wrapper, module, optimizer in ((model, net, ours), (bare, bare, plain)):
            optimizer.train()
            losses(wrapper, module, optimizer, step)
            optimizer.step()
            optimizer.eval()
        assert_close(net, bare)
        x = batch(step)[0]
        assert_close([model(x.to(DEVICES[0])).detach().cpu()], [bare(x).detach()])


def test_muon() -> None:
    net = Net().eval()
    bare = copy.deepcopy(net)
    model = wrap(net, 3)
    muon = torch.optim.Muon
    for wrapper, module in ((model, net), (bare, bare)):
        matrices = [p for p in module.parameters() if p.dim() == 2 and p.requires_grad]
        optimizer = muon(matrices, lr=0.01)
        for step in range(3):
            losses(wrapper, module, optimizer, step)
            optimizer.step()
    assert_all_close(values(net), values(bare), rtol=1e-3, atol=1e-4)


class Sam(torch.optim.SGD):
    """Steps with the gradient at a point nearby: Foret et al., 2020."""

    def ascend(self) -> None:
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([g.norm().to(grads[0].device) for g in grads]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["before"] = p.detach().clone()
                    with torch.no_grad():
                        p.add_(p.grad * (0.1 / (norm + 1e-12)).to(p.device))

    def descend(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "before" in self.state[p]:
                    with torch.no_grad():
                        p.copy_(self.state[p].pop("before"))
        self.step()


def test_an_optimizer_that_computes_twice() -> None:
    net = Net().eval()
    bare = copy.deepcopy(net)
    model = wrap(net, 3)
    for wrapper, module in ((model, net), (bare, bare)):
        optimizer = Sam(module.parameters(), lr=0.1)
        for step in range(3):
            losses(wrapper, module, optimizer, step)
            optimizer.ascend()
            losses(wrapper, module, optimizer, step)
            optimizer.descend()
    assert_close(net, bare)


def test_averages_made_before_and_after() -> None:
    net = Net().eval()
    bare = copy.deepcopy(net)
    average = get_ema_multi_avg_fn(0.9)
    before = AveragedModel(net.to(DEVICES[0]), device=torch.device("cpu"))
    model = wrap(net, 3)
    after = AveragedModel(net, multi_avg_fn=average)
    plain = AveragedModel(bare, multi_avg_fn=average)
    means = AveragedModel(bare)
    for wrapper, module, averages in ((model, net, (before, after)), (bare, bare, (means, plain))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(3):
            losses(wrapper, module, optimizer, step)
            optimizer.step()
            for each in averages:
                each.update_parameters(module)
    for mine, theirs in ((before, means), (after, plain)):
        assert_close(mine, theirs)


def test_scaled_gradients() -> None:
    """GradScaler looks at the gradients of each device, and leaves out a step."""
    net = Net().eval()
    bare = copy.deepcopy(net)
    model = wrap(net, 3)
    for wrapper, module, kind in ((model, net, "virtual"), (bare, bare, "cpu")):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(kind, init_scale=8.0, growth_interval=2)
        for step in range(4):
            x, y = (t.to(DEVICES[0] if kind == "virtual" else "cpu") for t in batch(step))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(wrapper(x), y)
            scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert_close(net, bare)


def test_optimizers_that_cannot_be_spread_are_refused() -> None:
    net = Net().eval()
    model = wrap(net, 2)
    optimizer = torch.optim.LBFGS(net.parameters())

    def closure() -> float:
        return float(losses(model, net, optimizer, 0))

    with pytest.raises(RuntimeError, match="LBFGS puts all parameters into one vector"):
        optimizer.step(closure)
    with model.gather_originals():
        assert torch.isfinite(torch.nn.utils.parameters_to_vector(net.parameters())).all()


def test_a_step_in_the_graph_of_one_device_is_refused() -> None:
    """Only while originals are on several ones."""
    net = Net().eval()
    bare = copy.deepcopy(net)
    model = wrap(net, 3)
    ours, plain = (torch.optim.SGD(n.parameters(), lr=0.1) for n in (net, bare))
    for step in range(2):
        losses(model, net, ours, step)
        losses(bare, bare, plain, step)
        if step:
            model.gather_originals()
        refused = pytest.raises(RuntimeError, match="cannot record the step of an optimizer")
        graph = device_module.VirtualGraph()
        with device_module.graph(graph), refused if step == 0 else contextlib.nullcontext():
            ours.step()
        graph.replay() if step else ours.step()
        plain.step()
        assert_close(net, bare)


# --- modes of training ---------------------------------------------------------------------------


def train(wrapper: Any, module: Any, how: str) -> list[Tensor]:
    """Train in some mode; return what is to be the same."""
    home = "cpu" if wrapper is module else DEVICES[0]
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    seen: list[Tensor] = []
    for step in range(4):
        x, y = (t.to(home) for t in batch(step))
        if how == "accumulation":
            with wrapper.no_sync() if wrapper is not module else torch.enable_grad():
                nn.functional.cross_entropy(wrapper(x.flip(0)), y).backward()
        if how == "frozen" and step == 2:
            module.second.requires_grad_(False)
        if how == "thawed" and step == 2:
            module.frozen.requires_grad_(True)
        if how == "added" and step == 2:
            torch.manual_seed(1)
            extra = nn.Linear(WIDTH, 5)
            module.last = extra.to(next(module.last.parameters()).device).to(home)
            optimizer.add_param_group({"params": list(module.last.parameters())})
        if how == "assigned" and step == 2:
            state = {name: value.cpu().to(home) / 2 for name, value in module.state_dict().items()}
            module.load_state_dict(state, assign=True)
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        if how == "moved" and step == 2:
            module.to(home)
        output = wrapper(x)
        if how == "second order":
            inputs = [p for p in module.parameters() if p.requires_grad]
            loss = nn.functional.cross_entropy(output, y)
            grads = torch.autograd.grad(loss, inputs, create_graph=True)
            loss = loss + sum(g.pow(2).sum().to(home) for g in grads)
        else:
            loss = nn.functional.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [loss.detach().cpu(), *values(module)]
    return seen


MODES = ("accumulation", "frozen", "thawed", "added", "assigned", "moved", "second order")


@pytest.mark.parametrize("how", MODES)
def test_a_mode_of_training(how: str) -> None:
    net = Net().eval()
    bare = copy.deepcopy(net)
    model = wrap(net, 3)
    assert_close(train(model, net, how), train(bare, bare, how))
    assert len(places(net)) > 1
    model.check_replicas()


@pytest.mark.parametrize(
    "options",
    [
        {"nonfinite": "raise"},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
        {"capture": True},
    ],
    ids=str,
)
def test_an_option(options: dict[str, Any]) -> None:
    net = Net().eval()
    bare = copy.deepcopy(net)
    model = wrap(net, 3, **options)
    assert_close(train(model, net, ""), train(bare, bare, ""))


def test_steps_in_backward() -> None:
    net = Net().eval()
    bare = copy.deepcopy(net)
    model = wrap(net, 3)
    model.step_in_backward(torch.optim.AdamW, lr=0.01)
    plain = torch.optim.AdamW(bare.parameters(), lr=0.01)
    for step in range(4):
        x, y = (t.to(DEVICES[0]) for t in batch(step))
        nn.functional.cross_entropy(model(x), y).backward()
        losses(bare, bare, plain, step)
        plain.step()
    assert_close(net, bare)


# --- the module by itself ------------------------------------------------------------------------


def test_the_module_cannot_run_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    net = Net().eval()
    bare = copy.deepcopy(net)
    x = batch(0)[0].to(DEVICES[0])
    with caplog.at_level(logging.INFO, "dataparallel"):
        model = wrap(net, 3)
    assert "parameters were moved to their owners: virtual:0" in caplog.text
    weight = net.first.weight
    for module in (net, copy.deepcopy(net), dp.DataParallel(net, DEVICES[:2])):
        with pytest.raises((RuntimeError, ValueError), match="gather_originals"):
            module(x)
    expected = bare(x.cpu())
    with model.gather_originals():
        assert places(net) == {DEVICES[0]}
        torch.testing.assert_close(net(x).cpu(), expected, rtol=1e-5, atol=1e-5)
    assert len(places(net)) == 3 and net.first.weight is weight
    model.gather_originals()
    torch.testing.assert_close(net(x).cpu(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(x).cpu(), expected, rtol=1e-5, atol=1e-5)
    assert len(places(net)) == 3


def test_gathering_where_parameters_cannot_go_changes_nothing() -> None:
    net = Net()
    model = wrap(net, 3)
    x, y = batch(0)
    nn.functional.cross_entropy(model(x), y.to(DEVICES[0])).backward()
    before = {name: (p.device, p.grad) for name, p in net.named_parameters()}
    # Memory of the host is no memory of a virtual device.
    with pytest.raises(ValueError, match=r"move a copy: copy\.deepcopy\(model\.module\)\.to"):
        model.gather_originals("cpu")
    for name, parameter in net.named_parameters():
        device, grad = before[name]
        assert parameter.device == device and parameter.grad is grad
    assert {str(p.device) for p in copy.deepcopy(model.module).to("cpu").parameters()} == {"cpu"}


def test_a_forward_cannot_gather_the_originals() -> None:
    held: list[Any] = []

    class Gathers(Net):
        def forward(self, x: Tensor) -> Any:
            if len(x) < 4:
                held[0].gather_originals()
            return super().forward(x)

    model = wrap(Gathers().eval(), 3)
    held.append(model)
    with pytest.raises(RuntimeError, match=r"during a forward, .* call it between two steps"):
        model(batch(0)[0][:9].to(DEVICES[0]))
    x = batch(0)[0]
    torch.testing.assert_close(model(x.to(DEVICES[0])).cpu(), Net().eval()(x))


def test_another_wrapper_of_the_module() -> None:
    """As when a cell of a notebook runs again; one with originals at home brings them back."""
    net = Net().eval()
    bare = copy.deepcopy(net)
    ours, plain = (torch.optim.AdamW(n.parameters(), lr=0.01) for n in (net, bare))
    makes: list[Callable[[nn.Module], Any]] = [
        lambda n: wrap(n, 3),
        lambda n: wrap(n, 3),
        lambda n: wrap(n, 2),
        lambda n: dp.DistributedDataParallel(n, DEVICES[:3]),
        lambda n: wrap(n, 4),
    ]
    for step, make in enumerate(makes):
        model = make(net)
        for wrapper, module, optimizer in ((model, net, ours), (bare, bare, plain)):
            losses(wrapper, module, optimizer, step)
            optimizer.step()
        assert_close(net, bare)
        model.close()


def test_checkpoints_are_for_any_layout() -> None:
    net = Net().eval()
    model = wrap(net, 4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(2):
        losses(model, net, optimizer, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, map_location="cpu")
    found = []
    for make in (lambda n: n, lambda n: wrap(n, 3), lambda n: dp.DataParallel(n, DEVICES[:2])):
        other = Net().eval()
        wrapper = make(other)
        again = torch.optim.AdamW(other.parameters(), lr=0.01)
        other.load_state_dict(saved["model"])
        again.load_state_dict(copy.deepcopy(saved["optimizer"]))
        losses(wrapper, other if wrapper is other else wrapper.module, again, 2)
        again.step()
        found.append(values(other))
    losses(model, net, optimizer, 2)
    optimizer.step()
    for each in found:
        assert_close(each, net)
    # A copy of the wrapper trains, too.
    restored = copy.deepcopy(model)
    x = batch(7)[0].to(DEVICES[0])
    torch.testing.assert_close(restored(x), model(x))


def test_what_cannot_be_spread() -> None:
    layers = nn.Sequential(nn.Linear(4, 4, device=DEVICES[0]), nn.Linear(4, 4, device=DEVICES[1]))
    with pytest.raises(ValueError, match="layers of this module are on several devices"):
        dp.DistributedDataParallel(layers, [DEVICES[0]], originals="spread")
    with pytest.raises(ValueError, match="the module must be on virtual:0"):
        wrap(layers, 2)
    with pytest.raises(ValueError, match="originals"):
        dp.DistributedDataParallel(Net(), DEVICES[:2], originals="everywhere")  # type: ignore[arg-type]


def test_parameters_in_one_memory_move_together() -> None:
    net: Any = nn.Module()
    memory = torch.arange(4000.0)
    for name, part in (("a", memory[:3000]), ("b", memory[1000:]), ("c", torch.ones(4000))):
        net.register_parameter(name, nn.Parameter(part))
    model = wrap(net.to(DEVICES[0]), 2)
    assert len(places(net)) == 2
    # The move to the first device has parted them, as torch's does.
    net = nn.Module()
    memory = torch.arange(4000.0, device=DEVICES[0])
    for name, part in (("a", memory[:3000]), ("b", memory[1000:]), ("c", torch.ones(4000))):
        net.register_parameter(name, nn.Parameter(part.to(DEVICES[0])))
    model = wrap(net, 2)
    assert net.a.device == net.b.device != net.c.device
    with torch.no_grad():
        net.a[1000] = -1
    assert net.b[0].item() == -1
    model.close()


# --- replicas and processes ----------------------------------------------------------------------


def test_fewer_and_more_replicas() -> None:
    net = Net().eval()
    bare = copy.deepcopy(net)
    model = wrap(net, 3)
    ours, plain = (torch.optim.AdamW(n.parameters(), lr=0.01) for n in (net, bare))
    changes = [lambda: None, lambda: model.drop_replica(1), lambda: model.add_replica(DEVICES[3])]
    for step, change in enumerate([*changes, lambda: model.drop_replica(2)]):
        change()
        for wrapper, module, optimizer in ((model, net, ours), (bare, bare, plain)):
            losses(wrapper, module, optimizer, step)
            optimizer.step()
        assert places(net) == {str(device) for device in model.device_ids}
        assert_close(net, bare)


def _train_in_processes(rank: int, world_size: int, options: dict[str, Any]) -> list[Tensor]:
    net = Net().eval()
    model = wrap(net, 2, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(4):
        x, y = (t.to(DEVICES[0]) for t in batch(step, rank))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step == 1 and rank == 0:
            with model.gather_originals():
                net(x)
    model.check_replicas()
    assert len(places(net)) == 2
    return values(net)


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"average": "samples"}], ids=str)
def test_processes(cluster: Cluster, options: dict[str, Any]) -> None:
    """One of them brings the originals together between two steps, and the other does not."""
    found = cluster.run(_train_in_processes, 2, options, virtual=True)
    bare = Net().eval()
    optimizer = torch.optim.AdamW(bare.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            x, y = batch(step, rank)
            (nn.functional.cross_entropy(bare(x), y) / 2).backward()
        optimizer.step()
    for each in found:
        assert_close(each, bare)


def _send_half(_: object, bucket: Any) -> torch.futures.Future[Tensor]:
    mean = bucket.buffer().cpu().half() / dist.get_world_size()
    dist.all_reduce(mean)
    future = torch.futures.Future[Tensor]()
    future.set_result(mean.to(bucket.buffer()))
    return future


def _train_in_a_mode(
    rank: int, world_size: int, how: str, originals: Any, folder: str
) -> list[Tensor]:
    def make(num_devices: int) -> Any:
        dtype = torch.bfloat16 if how == "mixed precision" else None
        precision = dp.MixedPrecision(dtype, dtype, dtype)
        net = Net().eval()
        if dtype is not None:
            # That of the CPU wants one dtype, without autocast.
            net.norm = nn.Identity()  # type: ignore[assignment]
        model: Any = dp.DistributedDataParallel(
            net, DEVICES[:num_devices], originals=originals, mixed_precision=precision
        )
        if how == "hook":
            model.register_comm_hook(None, _send_half)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)

    model, optimizer = make(3)
    with model.join() if how == "join" else contextlib.nullcontext():
        for step in range(4 + (rank if how == "join" else 0)):
            if how == "checkpoint" and step == 2:
                checkpoint.save(folder, model, optimizer, step=step)
                model.close()
                model, optimizer = make(2)
                assert checkpoint.load(folder, model, optimizer).step == step
            x, y = (t.to(DEVICES[0]) for t in batch(step, rank))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    model.check_replicas()
    assert (len(places(model.module)) > 1) is (originals == "spread")
    return values(model.module)


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("how", ["mixed precision", "hook", "join", "checkpoint"])
def test_a_mode_as_with_originals_at_home(
    cluster: Cluster, tmp_path: pathlib.Path, how: str, num_processes: int
) -> None:
    """Other tests compare that with the bare module."""
    args = _train_in_a_mode, num_processes, how
    home = cluster.run(*args, "home", str(tmp_path / "home"), virtual=True)
    spread = cluster.run(*args, "spread", str(tmp_path / "spread"), virtual=True)
    for each in (*spread, *home[1:]):
        assert_close(each, home[0])


def _with_other_owners(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="originals are spread: 3 in rank 0; 2 in rank 1"):
        wrap(Net(), 3 - rank)
    net = Net()
    model = wrap(net, 2)
    with pytest.raises(ValueError, match="make a new wrapper in all processes"):
        model.drop_replica(1)
    losses(model, net, torch.optim.SGD(net.parameters(), lr=0.1), 0)


def test_processes_have_as_many_owners(cluster: Cluster) -> None:
    cluster.run(_with_other_owners, 2, virtual=True)


# --- memory and links ----------------------------------------------------------------------------


def deep() -> nn.Module:
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(32)])


def peaks(num_devices: int, originals: Any, **options: Any) -> list[float]:
    """Return the peak of four steps on each device, in sizes of the parameters."""
    gc.collect()
    devices = DEVICES[:num_devices]
    before = [device_module.memory_allocated(device) for device in devices]
    with virtual.dry_mode(), torch.device(DEVICES[0]):
        net = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(64)])
        size = sum(p.nbytes for p in net.parameters())
        model = dp.DistributedDataParallel(net, devices, originals=originals)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, **options)
        x = torch.randn(num_devices, 2048)
        for device in devices:
            device_module.synchronize(device)
            device_module.reset_peak_memory_stats(device)
        for _ in range(4):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        found = [device_module.max_memory_allocated(device) for device in devices]
        model.close()
    return [(peak - own) / size for peak, own in zip(found, before, strict=True)]


def test_no_device_holds_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, a quarter of gradients and states, and what is on its way; from step 0 on."""
    # However slow one of the threads is.
    monkeypatch.setattr(round_, "_PATIENCE", 100.0)
    home, *_ = peaks(4, "home", foreach=False)
    assert home > 4
    assert max(peaks(4, "spread", foreach=False)) < 1.92 + LATER
    # It needs its parameters once more while it steps.
    assert max(peaks(4, "spread", foreach=True)) < 2.1
    # Parameters and states are one and a half times what a device has.
    for device in DEVICES:
        limit = device_module.memory_allocated(device) + 2 * 2**20 * 1025
        virtual.set_memory_limit(device, limit)
    try:
        peaks(4, "spread", foreach=False)
        with pytest.raises(torch.OutOfMemoryError):
            peaks(4, "home", foreach=False)
    finally:
        virtual.set_memory_limit(None, None)


def test_a_model_that_no_device_can_hold_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_, "_PATIENCE", 100.0)
    net = deep()
    bare = copy.deepcopy(net)
    size = sum(p.nbytes for p in net.parameters())
    gc.collect()
    for device in DEVICES:
        # Training needs four of them; pieces are large for such a model.
        limit = device_module.memory_allocated(device) + int(3.4 * size)
        virtual.set_memory_limit(device, limit)
    try:
        home = dp.DistributedDataParallel(copy.deepcopy(net), DEVICES)
        optimizer = torch.optim.AdamW(home.parameters(), lr=0.01, foreach=False)
        x = torch.randn(8, 256)
        with pytest.raises(torch.OutOfMemoryError):
            for _ in range(2):
                home(x.to(DEVICES[0])).square().mean().backward()
                optimizer.step()
        home.close()
        del home, optimizer
        gc.collect()
        model = wrap(net, 4, bucket_cap_mb=0.25)
        settings: dict[str, Any] = {"lr": 0.01, "eps": 1e-2, "foreach": False}
        optimizer = torch.optim.AdamW(net.parameters(), **settings)
        plain = torch.optim.AdamW(bare.parameters(), **settings)
        for _ in range(3):
            for wrapper, each, place in ((model, optimizer, DEVICES[0]), (bare, plain, "cpu")):
                each.zero_grad()
                wrapper(x.to(place)).square().mean().backward()
                each.step()
        assert_all_close(values(net), values(bare), rtol=1e-3, atol=1e-4)
    finally:
        virtual.set_memory_limit(None, None)


@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_each_port_carries_its_part(num_devices: int) -> None:
    net = deep()
    size = sum(p.nbytes for p in net.parameters())
    model = wrap(net, num_devices)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(num_devices, 256, device=DEVICES[0])
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
        virtual.reset_counters()
    model(x).sum().backward()
    for device in range(num_devices):
        sent = sum(n for (source, _), n in virtual.routes().items() if source == device)
        received = sum(n for (_, target), n in virtual.routes().items() if target == device)
        # To all others its part of the parameters, and to each owner gradients of its part.
        expected = 2 * (num_devices - 1) / num_devices * size
        assert sent == pytest.approx(expected, rel=0.1)
        assert received == pytest.approx(expected, rel=0.1)


# --- between two calls of the wrapper -------------------------------------------------------------


@pytest.mark.parametrize("in_block", [False, True])
def test_gathered_between_forward_and_backward(in_block: bool) -> None:
    net = Net().eval()
    bare = copy.deepcopy(net)
    model = wrap(net, 3)
    ours, plain = (torch.optim.AdamW(n.parameters(), lr=0.01) for n in (net, bare))
    for step in range(3):
        x, y = batch(step)
        ours.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(DEVICES[0])), y.to(DEVICES[0]))
        with model.gather_originals() if in_block else contextlib.nullcontext():
            assert not in_block or torch.isfinite(net(x.to(DEVICES[0]))).all()
        if not in_block:
            model.gather_originals()
        loss.backward()
        losses(bare, bare, plain, step)
        found = [p for p in net.parameters() if p.grad is not None]
        assert all(p.grad is not None and p.grad.device == p.device for p in found)
        expected = [p.grad for p in bare.parameters() if p.grad is not None]
        assert_close([p.grad.cpu() for p in found if p.grad is not None], expected)
        ours.step()
        plain.step()
        assert_close(net, bare)
    model.check_replicas()


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("num_devices", [1, 3])
def test_a_hook_in_backward_cannot_gather_the_originals(kind: str, num_devices: int) -> None:
    net = Net().eval()
    bare = copy.deepcopy(net)
    model = wrap(net, num_devices)

    def gather(_: Tensor) -> None:
        model.gather_originals()

    for weight in (net.second.weight, net.last.weight):
        handle = getattr(weight, kind)(gather)
        with pytest.raises(RuntimeError, match=r"during a backward, .* call it between two steps"):
            losses(model, net, torch.optim.SGD(net.parameters()), 0)
        handle.remove()
        assert len(places(net)) == num_devices
    for step in range(2):
        for wrapper, module in ((model, net), (bare, bare)):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            losses(wrapper, module, optimizer, step)
            optimizer.step()
        assert_close(net, bare)


@pytest.mark.parametrize("originals", ["home", "spread"])
def test_a_backward_leads_to_no_leaf_on_the_host(originals: Any) -> None:
    """One there wakes the thread that waits: a failed backward would raise before it has ended."""
    model = dp.DistributedDataParallel(Net().eval(), DEVICES[:3], originals=originals)
    nodes = [model(batch(0)[0].to(DEVICES[0])).sum().grad_fn]
    for node in nodes:
        nodes += [n for n, _ in node.next_functions if n is not None and n not in nodes]
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    assert len(leaves) > 5
    assert {leaf.device.type for leaf in leaves} == {"virtual"}


def test_blocks_of_gathered_originals_within_each_other() -> None:
    net = Net().eval()
    model = wrap(net, 3)
    x = batch(0)[0].to(DEVICES[0])
    with model.gather_originals():
        with model.gather_originals():
            net(x)
        net(x)
    assert len(places(net)) == 3


def test_parameters_of_another_dtype() -> None:
    """The replicas compute with what the parameters are, not with what they were."""
    net = Net().eval()
    model = wrap(net, 3)
    x = batch(0)[0].to(DEVICES[0])
    model(x).sum().backward()
    net.zero_grad()
    net.double()
    assert model(x.double()).dtype == torch.float64
    assert len(places(net)) == 3


@pytest.mark.parametrize("place", [None, "cpu"])
@pytest.mark.parametrize("home", ["cpu", DEVICES[0]])
def test_a_state_is_where_its_optimizer_wants_it(place: str | None, home: str) -> None:
    """It follows its parameter wherever that goes, or stays on the CPU."""
    net = Net().eval()
    bare = copy.deepcopy(net)
    net.to(home)
    model = wrap(net, 3)
    ours, plain = (Momentum(n.parameters(), place) for n in (net, bare))
    for step in range(5):
        for wrapper, module, optimizer in ((model, net, ours), (bare, bare, plain)):
            losses(wrapper, module, optimizer, step)
            if step == 2:
                model.gather_originals()
            optimizer.step()
        assert_close(net, bare)


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.AdamW])
def test_a_state_that_is_spread_by_itself_stays_where_it_is(kind: Any) -> None:
    """The shards of its optimizer are not the owners of the parameters."""
    net = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8), *[nn.Linear(8, 8) for _ in range(30)])
    bare = copy.deepcopy(net)
    model = wrap(net, 3)
    ours = dp.ShardedOptimizer(kind, model, lr=0.01)
    plain = kind(bare.parameters(), lr=0.01)
    assert any(ours.device_of(p) != p.device for p in net.parameters())
    for step in range(4):
        for wrapper, optimizer in ((model, ours), (bare, plain)):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            wrapper(x).square().mean().backward()
            optimizer.step()
        if step == 2:
            model.gather_originals()
    assert_close(net, bare)


def test_models_that_are_gone_move_no_state() -> None:
    """Parameters of a later model have the ids of theirs."""
    for _ in range(5):
        gone = wrap(Net().eval(), 3)
        gone(batch(0)[0].to(DEVICES[0])).sum().backward()
        gone.close()
        del gone
        gc.collect()
        net = Net().eval().to(DEVICES[0])
        model = dp.DataParallel(net, DEVICES[:3])
        optimizer = Momentum(net.parameters(), DEVICES[1])
        for step in range(2):
            losses(model, net, optimizer, step)
            optimizer.step()
            # After a move each optimizer sees to its state.
            wrap(Net(), 2).close()


def test_verification() -> None:
    net = Net().eval()
    found = dp.verify(wrap(net, 3), batch(0)[0].to(DEVICES[0]))
    assert found, str(found)
    assert len(places(net)) == 3


class FailsOnce(torch.autograd.Function):
    """A node whose backward fails on one device, once."""

    is_due = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if grad.device == torch.device(DEVICES[1]) and FailsOnce.is_due:
            FailsOnce.is_due = False
            # Meanwhile the others begin to wait.
            time.sleep(0.5)
            raise ValueError("no such gradient")
        return grad


class Experts(nn.Module):
    """The first value of a chunk tells how many of its experts are used, if there is a choice."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = deep(), deep()
        self.experts = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
        self.kind = "all"

    def forward(self, x: Tensor) -> Tensor:
        num_chosen = int(x[0, 0]) + 1 if self.kind == "some" else 4
        x = self.below(x)
        if self.kind == "fails":
            x = FailsOnce.apply(x)
        # Their gradients come first.
        x = self.above(x)
        for expert in list(self.experts)[:num_chosen]:
            x = expert(x)
        return x


def test_replicas_part_where_they_use_other_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not because of a small batch, nor after an error in one of them."""
    monkeypatch.setattr(FailsOnce, "is_due", True)
    net = Experts()
    bare = copy.deepcopy(net)
    model = wrap(net, 4, bucket_cap_mb=0.25)
    x = torch.randn(8, 256)
    x[:, 0] = torch.arange(4).repeat_interleave(2)
    for kind, size, together in (
        ("all", 8, True),
        ("all", 2, True),
        ("fails", 8, True),
        ("all", 8, True),
        ("some", 8, False),
        ("some", 8, False),
    ):
        net.kind = bare.kind = kind
        # However slow one of the threads is.
        monkeypatch.setattr(round_, "_PATIENCE", 0.1 if kind in ("fails", "some") else 100.0)
        net.zero_grad()
        bare.zero_grad()
        loss = model(x[:size].to(DEVICES[0])).sum()
        if kind == "fails":
            with pytest.raises(ValueError, match="no such gradient"):
                loss.backward()
        else:
            loss.backward()
            for chunk in x[:size].split(2 if size == 8 else 1):
                bare(chunk).sum().backward()
            grads = [[p.grad for p in each.parameters()] for each in (net, bare)]
            assert_close([g.cpu() for g in grads[0] if g is not None], grads[1])
        assert model.reducer.stays_together is together


def _freeze_and_gather(rank: int, world_size: int) -> list[Tensor]:
    net = Net().eval()
    model = wrap(net, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        x, y = (t.to(DEVICES[0]) for t in batch(step, rank))
        optimizer.zero_grad()
        if step == 2:
            net.second.requires_grad_(False)
            if rank == 0:
                with model.gather_originals():
                    net(x)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.check_replicas()
    return values(net)


def test_owners_stay_where_one_process_gathers_what_was_frozen(cluster: Cluster) -> None:
    first, second = cluster.run(_freeze_and_gather, 2, virtual=True)
    assert_close(first, second)
