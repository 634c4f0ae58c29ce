"""Lightning: what the guide defines, against the bare module."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.launched import launched
from tests.models import assert_all_close
from tests.test_docstrings import definitions


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the guide defines, and a module that logs in every way."""
    found: dict[str, Any] = {}
    exec(definitions("lightning") + LOGS, found)
    return found


LOGS = """
class Logs(Plain):
    def training_step(self, batch, index):
        output = self.net(batch[0])
        loss = nn.functional.cross_entropy(output, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"largest": output.mean(), "constant": 2.0}, prog_bar=True)
        self.replica_saw = len(batch[0])
        return {"loss": loss, "output": output.detach()}

    def on_train_batch_end(self, outputs, batch, index):
        seen.append((outputs["output"].shape, dict(self.trainer.logged_metrics)))

    def validation_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val_loss", loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


seen = []
"""


def loader() -> torch.utils.data.DataLoader[tuple[Tensor, ...]]:
    """The last batch has two samples, fewer than the others."""
    inputs = torch.randn(42, 16)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1))
    return torch.utils.data.DataLoader(data, batch_size=8)


def trainer(names: dict[str, Any], folder: pathlib.Path, **options: Any) -> Any:
    fixed: dict[str, Any] = {"max_epochs": 2, "logger": False, "enable_progress_bar": False}
    fixed |= {"enable_model_summary": False, "default_root_dir": folder, "accelerator": "cpu"}
    return names["lightning"].Trainer(**fixed | options)


def test_all_that_is_logged_in_replicas(names: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """Each step's numbers, an epoch's, those of validation; and the checkpoint."""
    module = names["Logs"]()
    bare = copy.deepcopy(module)
    data = loader()
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    runs: list[Any] = []
    for each, own in ((bare, {}), (module, {"strategy": names["Replicas"](["cpu"] * 3)})):
        names["seen"].clear()
        run = trainer(names, tmp_path / str(len(runs)), **options, **own)
        run.fit(each, data, data)
        runs.append((run, list(names["seen"])))
    (expected, in_steps), (found, in_replicas) = runs
    assert len(in_steps) == 12 and in_steps[0][1].keys() >= {"loss_step", "largest", "constant"}
    for (shape, metrics), (its_shape, its_metrics) in zip(in_steps, in_replicas, strict=True):
        assert shape == its_shape
        torch.testing.assert_close(its_metrics, metrics)
    assert {"loss_epoch", "val_loss"} <= expected.callback_metrics.keys()
    torch.testing.assert_close(dict(found.callback_metrics), dict(expected.callback_metrics))
    assert_all_close(module.parameters(), bare.parameters())
    assert "log" not in vars(module)
    path = found.checkpoint_callback.best_model_path
    bare.load_state_dict(torch.load(path, weights_only=True)["state_dict"])


@pytest.mark.parametrize("in_autocast", [True, False])
def test_precision_of_a_loss_in_fabric(names: dict[str, Any], in_autocast: bool) -> None:
    fabric = names["lightning"].Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    net = nn.Linear(16, 4)
    seen = set()
    net.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    model = fabric.setup(names["dp"].DistributedDataParallel(net, ["cpu", "cpu"]))
    inputs, labels = next(iter(loader()))
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
