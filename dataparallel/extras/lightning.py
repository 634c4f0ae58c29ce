"""A strategy for Lightning: the steps of a LightningModule run in replicas.

It is for the package ``lightning``, or for ``pytorch_lightning`` if only that is imported or
installed; for both in one program see :class:`StrategyMixin`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dataparallel.devices import DeviceLike, parse_devices
from dataparallel.errors import needs_extra
from dataparallel.extras.chunk_losses import ChunkLosses
from dataparallel.parallel.data_parallel import DataParallel
from dataparallel.parallel.distributed import DistributedDataParallel

__all__ = ["Replicas", "StrategyMixin"]

#: The packages that may contain Lightning; a name alone imports nothing.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_REMEDY = (
    'Say what a chunk counts with Replicas(weight="samples"), or with a function of the batch; or '
    "wrap the network inside of the LightningModule, and compute the loss from its outputs"
)

BatchWeight = Literal["samples"] | Callable[[Any], float | Tensor]


def _package() -> str:
    """Return the package of Lightning that is imported already, or else is installed."""
    installed = [name for name in _PACKAGES if importlib.util.find_spec(name.split(".")[0])]
    return next((name for name in _PACKAGES if name in sys.modules), (*installed, _PACKAGES[0])[0])


with needs_extra("lightning"):
    _strategies: Any = importlib.import_module(f"{_package()}.strategies")


class StrategyMixin:
    """A mixin that turns a strategy of Lightning for one device into one for replicas.

    Example::

        class Parallel(StrategyMixin, pytorch_lightning.strategies.SingleDeviceStrategy):
            pass

    Args:
        device_ids, weight, wrapper_options: See :class:`Replicas`.

    Raises:
        TypeError, ValueError: As :class:`Replicas` does.
    """

    lightning_module: Any
    precision_plugin: Any

    def __init__(
        self,
        device_ids: Sequence[DeviceLike] | None = None,
        *,
        weight: BatchWeight | None = None,
        wrapper_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._device_ids = parse_devices(device_ids)
        self._weight, self._wrapper_options = weight, dict(wrapper_options or {})
        self._replicas: DistributedDataParallel[Any] | None = None
        super().__init__(self._device_ids[0])  # type: ignore[call-arg]

    def setup(self, trainer: Any) -> None:
        """Make the replicas, once the module is where it is to be."""
        super().setup(trainer)  # type: ignore[misc]
        module = self.lightning_module
        if not module.automatic_optimization:
            raise ValueError(
                "with manual optimization, training_step itself calls backward and the optimizer, "
                "which no replica can do by itself; wrap the network inside of the LightningModule "
                "in place of this strategy: self.model = dp.DistributedDataParallel(net)"
            )
        if any(isinstance(each, DataParallel) for each in module.modules()):
            raise ValueError(
                "the LightningModule has a wrapper inside, and this strategy runs the whole module "
                "in replicas; leave out one of the two"
            )
        steps = _Steps(module)
        autocast = self.precision_plugin.forward_context
        losses = ChunkLosses(steps, None, autocast, _REMEDY, lenient=True)
        weight: Any = self._weight
        if weight is None:
            scalars: Any = losses
        else:
            scalars = "mean" if weight == "samples" else lambda step, batch, *_: weight(batch)
        options = {"scalars": scalars, **self._wrapper_options}
        self._replicas = DistributedDataParallel(steps, self._device_ids, **options)
        if options["scalars"] is losses:
            self._replicas.register_forward_pre_hook(losses.before, with_kwargs=True)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step in the replicas, each on its part of the batch."""
        return self._run("training_step", self.precision_plugin.train_step_context(), args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`training_step`."""
        return self._run("validation_step", self.precision_plugin.val_step_context(), args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`training_step`."""
        return self._run("test_step", self.precision_plugin.test_step_context(), args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`training_step`."""
        return self._run("predict_step", self.precision_plugin.predict_step_context(), args, kwargs)

    def _run(
        self, step: str, precision: AbstractContextManager[Any], args: Any, kwargs: Any
    ) -> Any:
        assert self._replicas is not None
        with precision:
            _, output, values, sizes, options = self._replicas(step, *args, **kwargs)
        for name, value in values.items():
            others, own = options[name]
            if name in sizes:
                own = {**own, "batch_size": int(sizes[name].sum())}
            self.lightning_module.log(name, value, *others, **own)
        return output

    def teardown(self) -> None:
        """End the replicas' threads, too."""
        if self._replicas is not None:
            self._replicas.close()
        super().teardown()  # type: ignore[misc]


class Replicas(StrategyMixin, _strategies.SingleDeviceStrategy):  # type: ignore[misc]
    """A strategy that trains a LightningModule, as it is, on all devices of this process.

    Losses, logs, outputs and weights are those of one device. Each step runs in the replicas, each
    on its part of the batch. On the first batch the strategy finds out, by comparing, the things
    over which the loss is a mean. It averages the loss and the logs of the step accordingly.

    Example::

        lightning.Trainer(accelerator="gpu", devices=1, strategy=Replicas())
        lightning.Trainer(accelerator="cpu", devices=1, strategy=Replicas(["cpu", "cpu"]))

    Args:
        device_ids: One device per replica. Default: every accelerator; without any, the CPU.
        weight: The weight of a chunk in the mean of its losses: ``"samples"``, or a function of its
            batch, such as the number of labels. Default: find out. Then each forward waits for the
            device, as it also does with a function that returns a tensor.
        wrapper_options: Other arguments of :class:`dataparallel.DistributedDataParallel`.

    Raises:
        TypeError: A step updates or logs a metric of torchmetrics, which would see one chunk.
        ValueError: The module optimizes manually, or has a wrapper inside; or the losses of
            chunks cannot be put together to that of the batch.
    """


class _Steps(nn.Module):
    """The steps of a LightningModule as a forward, which returns what they log."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """Return the loss, the result of the step, and its logs: values, batch sizes, options."""
        module: Any = self.module
        values: dict[str, Tensor] = {}
        sizes: dict[str, Tensor] = {}
        options: dict[str, Any] = {}

        # Numbers, too: outputs of replicas are joined where these compute.
        device = next((parameter.device for parameter in module.parameters()), None)

        def log(name: str, value: Any, *others: Any, **own: Any) -> None:
            if isinstance(value, nn.Module):
                raise TypeError(_about_metric(name))
            tensor = torch.as_tensor(value, device=device).detach().reshape(())
            dtype = tensor.dtype if tensor.is_floating_point() else torch.get_default_dtype()
            values[name] = tensor.to(dtype)
            if own.get("batch_size") is not None:
                sizes[name] = torch.tensor([own.pop("batch_size")], device=device)
            options[name] = others, own

        metrics = {name: m for name, m in module.named_modules() if hasattr(m, "update_count")}
        before = {name: metric.update_count for name, metric in metrics.items()}
        # In this replica.
        vars(module)["log"] = log
        try:
            output = getattr(module, step)(*args, **kwargs)
        finally:
            del vars(module)["log"]
        updated = [name for name, metric in metrics.items() if metric.update_count != before[name]]
        if updated:
            raise TypeError(_about_metric(updated[0]))
        loss = output.get("loss") if isinstance(output, Mapping) else output
        is_loss = isinstance(loss, Tensor) and not loss.dim()
        return loss if is_loss else None, output, values, sizes, options


def _about_metric(name: str) -> str:
    return (
        f"the step updates or logs the metric {name!r}, and in replicas each would see its part of "
        "the batch alone; return what it needs from the step, and update it in "
        "on_train_batch_end or on_validation_batch_end, which get the outputs of the whole batch"
    )
