"""Lightning: the strategy, and what the guide defines, against the bare module."""

from __future__ import annotations

import copy
import importlib
import logging
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.extras.lightning import Replicas, StrategyMixin
from tests.launched import launched
from tests.models import assert_all_close
from tests.test_docstrings import definitions

Data = torch.utils.data.DataLoader[tuple[Tensor, ...]]


class Steps(lightning.LightningModule):
    """Logs in every way. Some of its labels are ignored, in one sample or in all."""

    def __init__(self, seen: list[Any] | None = None) -> None:
        super().__init__()
        self.net, self.seen = nn.Linear(16, 4), [] if seen is None else seen
        self.kept: list[Tensor] = []

    def losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        output = self.net(batch[0])
        return output, nn.functional.cross_entropy(output.view(-1, 4), batch[1].flatten())

    def training_step(self, batch: Any, index: int) -> dict[str, Tensor]:
        output, loss = self.losses(batch)
        valid = batch[1] != -100
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(output))
        self.log_dict({"largest": output[valid].mean(), "constant": 2}, prog_bar=True)
        self.kept.append(loss.detach())
        return {"output": output.detach(), "loss": loss}

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.seen.append((outputs["output"].shape, dict(self.trainer.logged_metrics)))

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.losses(batch)[1])

    def test_step(self, batch: Any, index: int) -> Tensor:
        loss = self.losses(batch)[1]
        self.log("test_loss", loss, True, False)
        return loss

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self.net(batch[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def loader(words: int = 0, ignored: tuple[int, ...] = (), dtype: Any = torch.double) -> Data:
    """The last batch has two samples, fewer than the others; each has words, or is one itself."""
    inputs = torch.randn(42, *([words] if words else []), 16, dtype=dtype)
    labels = inputs[..., :4].argmax(-1)
    if words:
        labels[torch.arange(words) >= torch.randint(1, words + 1, (42, 1))] = -100
    labels[list(ignored)] = -100
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=8)


class AnyDevice(lightning.pytorch.accelerators.CPUAccelerator):
    """Lightning knows no virtual devices."""

    def setup_device(self, device: torch.device) -> None:
        pass


def trainer(folder: pathlib.Path, **options: Any) -> Any:
    fixed: dict[str, Any] = {"max_epochs": 2, "logger": False, "enable_progress_bar": False}
    fixed |= {"enable_model_summary": False, "default_root_dir": folder, "accelerator": "cpu"}
    return lightning.Trainer(**fixed | options)


@pytest.mark.parametrize(
    ("data", "weight", "slots"),
    [
        (loader, None, ["virtual:0", "virtual:1"]),
        (loader, "samples", ["cpu"] * 3),
        (lambda: loader(5), None, ["cpu"] * 3),
        (lambda: loader(5), lambda batch: (batch[1] != -100).sum(), ["virtual:0", "virtual:1"]),
        (lambda: loader(0, (11, 30)), None, ["cpu"] * 2),
    ],
    ids=["samples", "samples, told", "labels", "labels, told", "few ignored"],
)
def test_all_that_is_logged(
    tmp_path: pathlib.Path, data: Callable[[], Data], weight: Any, slots: list[str]
) -> None:
    """Each step's numbers, an epoch's, those of validation; the weights and the checkpoint."""
    batches = data()
    module = Steps().double()
    bare = copy.deepcopy(module)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    strategy = {"strategy": Replicas(slots, weight=weight), "accelerator": AnyDevice()}
    runs = [trainer(tmp_path / f"{len(own)}", **options, **own) for own in ({}, strategy)]
    for run, each in zip(runs, (bare, module), strict=True):
        run.fit(each, batches, batches)
    assert len(bare.seen) == 12 and bare.seen[0][1].keys() >= {"loss_step", "largest", "constant"}
    for (shape, metrics), (its_shape, its_metrics) in zip(bare.seen, module.seen, strict=True):
        assert shape == its_shape
        torch.testing.assert_close(its_metrics, metrics, check_device=False)
    expected, found = runs
    assert {"loss_epoch", "val_loss"} <= expected.callback_metrics.keys()
    metrics = dict(found.callback_metrics), dict(expected.callback_metrics)
    torch.testing.assert_close(*metrics, check_device=False)
    assert_all_close(module.parameters(), bare.parameters(), check_device=False)
    assert "log" not in vars(module)
    path = found.checkpoint_callback.best_model_path
    bare.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    torch.testing.assert_close(
        found.test(module, batches, verbose=False), expected.test(bare, batches, verbose=False)
    )
    for left, right in zip(*(run.predict(bare, batches) for run in runs), strict=True):
        torch.testing.assert_close(left, right, check_device=False)


def test_comparing_leaves_no_trace(tmp_path: pathlib.Path) -> None:
    """To a list of the module a step appends what replica 0 does, once."""
    module = Steps().double()
    run = trainer(tmp_path, strategy=Replicas(["cpu", "cpu"]), limit_train_batches=1, max_epochs=1)
    run.fit(module, loader(), loader())
    assert len(module.kept) == 1


def test_mixed_precision(tmp_path: pathlib.Path) -> None:
    module, data = Steps(), loader(5, dtype=torch.float)
    bare = copy.deepcopy(module)
    strategy = {"strategy": Replicas(["cpu", "cpu"])}
    for each, own in ((bare, {}), (module, strategy)):
        run = trainer(tmp_path, precision="bf16-mixed", enable_checkpointing=False, **own)
        run.fit(each, data, data)
    assert bare.seen[0][1]["loss_step"] != bare.seen[-1][1]["loss_step"]
    torch.testing.assert_close(
        module.seen[-1][1], bare.seen[-1][1], rtol=2e-2, atol=2e-2, check_dtype=False
    )


class Wrong(Steps):
    """Does what replicas cannot do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.automatic_optimization = kind != "manual"
        if kind == "wrapper":
            self.net = dp.DataParallel(self.net, ["cpu", "cpu"])  # type: ignore[assignment]
        if kind.startswith("metric"):
            self.metric = pytest.importorskip("torchmetrics").MeanMetric()

    def training_step(self, batch: Any, index: int) -> Any:
        output, loss = self.losses(batch)
        if self.kind == "metric":
            self.metric.update(loss.detach())
        if self.kind == "metric that is logged":
            self.log("metric", self.metric)
        if self.kind == "count":
            self.log("count", float(len(output)))
        if self.kind == "noise":
            loss = loss + 0 * torch.rand(())
        if self.kind == "mixes":
            loss = loss + output.mean(0).pow(2).sum()
        return {"loss": loss, "output": output.detach()}


@pytest.mark.parametrize(
    ("kind", "error", "match"),
    [
        ("manual", ValueError, "manual optimization.*wrap the network inside"),
        ("wrapper", ValueError, "has a wrapper inside.*leave out one of the two"),
        ("mixes", ValueError, r"of each alone .*samples: 0\.5 and 0\.5.*weight="),
        ("metric", TypeError, "updates or logs the metric 'metric'.*on_train_batch_end"),
        ("metric that is logged", TypeError, "updates or logs the metric 'metric'"),
    ],
)
def test_what_the_strategy_refuses(
    tmp_path: pathlib.Path, kind: str, error: type[Exception], match: str
) -> None:
    run = trainer(tmp_path, strategy=Replicas(["cpu", "cpu"]), enable_checkpointing=False)
    with pytest.raises(error, match=match):
        run.fit(Wrong(kind).double(), loader(), loader())


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("noise", "training_step draws random numbers"),
        ("count", "'count'.* of the batch is not the mean"),
    ],
)
def test_what_the_strategy_warns_of(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, kind: str, match: str
) -> None:
    run = trainer(tmp_path, strategy=Replicas(["cpu", "cpu"]), enable_checkpointing=False)
    with caplog.at_level(logging.WARNING, "dataparallel"):
        run.fit(Wrong(kind).double(), loader(), loader())
    (found,) = [each for each in caplog.records if each.name == "dataparallel"]
    assert re.search(match, found.getMessage())


def test_a_wrapper_of_the_lightning_module(caplog: pytest.LogCaptureFixture) -> None:
    """Lightning's own error names no remedy."""
    dp.DataParallel(Steps(), ["cpu", "cpu"])
    assert "extras.lightning.Replicas(), or wrap the network inside" in caplog.text


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
def test_the_other_package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = pytest.importorskip("pytorch_lightning")

    class Parallel(StrategyMixin, other.strategies.SingleDeviceStrategy):  # type: ignore[misc, name-defined]
        pass

    class Plain(other.LightningModule):  # type: ignore[misc, name-defined]
        __init__, losses = Steps.__init__, Steps.losses
        training_step, configure_optimizers = Steps.training_step, Steps.configure_optimizers

    assert issubclass(Replicas, lightning.pytorch.strategies.SingleDeviceStrategy)
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "dataparallel.extras.lightning")
    chosen = importlib.import_module("dataparallel.extras.lightning").Replicas
    assert issubclass(chosen, other.strategies.SingleDeviceStrategy)
    monkeypatch.setitem(sys.modules, "pytorch_lightning.strategies", None)
    monkeypatch.delitem(sys.modules, "dataparallel.extras.lightning")
    with pytest.raises(ImportError, match=r"'pytorch_lightning.*\[lightning\]"):
        importlib.import_module("dataparallel.extras.lightning")


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """Return the definitions of the guide."""
    found: dict[str, Any] = {}
    exec(definitions("lightning"), found)
    return found


@pytest.mark.parametrize("in_autocast", [True, False])
def test_precision_of_a_loss_in_fabric(names: dict[str, Any], in_autocast: bool) -> None:
    fabric = names["lightning"].Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    net = nn.Linear(16, 4)
    seen = set()
    net.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    model = fabric.setup(names["dp"].DistributedDataParallel(net, ["cpu", "cpu"]))
    inputs, labels = next(iter(loader(dtype=torch.float)))
    with fabric.autocast() if in_autocast else torch.enable_grad():
        fabric.backward(model.loss(nn.CrossEntropyLoss(), inputs, labels))
    assert seen == {torch.bfloat16 if in_autocast else torch.float32}


IN_PROCESSES = """
import copy, sys

torch.manual_seed(0)
inputs = torch.randn(48, 16)
data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1))
net = nn.Linear(16, 4)
options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "max_epochs": 1, "logger": False}
options |= {"enable_progress_bar": False, "enable_checkpointing": False}


class Spread(Digits):
    def __init__(self, wrapper):
        lightning.LightningModule.__init__(self)
        self.net, self.wrapper = copy.deepcopy(net), wrapper

    def configure_model(self):  # Once there is a process group.
        self.model = self.wrapper(self.net, ["cpu", "cpu"])


def alone(net, devices):
    net.loss = lambda criterion, inputs, labels: criterion(net(inputs), labels)
    return net


weights = []
for wrapper in (alone, dp.DataParallel, dp.DistributedDataParallel):
    module = Spread(wrapper)
    try:
        loader = torch.utils.data.DataLoader(data, batch_size=8)
        lightning.Trainer(**options).fit(module, loader)
    except RuntimeError as error:
        assert wrapper is dp.DistributedDataParallel, error
        assert "would set all gradients to zero" in str(error), error
    weights.append(module.net.weight.detach())
alone, spread, refused = weights
torch.testing.assert_close(spread, alone)
assert refused.equal(net.weight) and not alone.equal(net.weight)
"""


def test_several_processes(tmp_path: pathlib.Path) -> None:
    """Torch's wrapper around the module: DataParallel in it is right, the other one refuses."""
    script = tmp_path / "script.py"
    script.write_text(definitions("lightning") + IN_PROCESSES)
    launched(script, 2, tmp_path, virtual=False)
