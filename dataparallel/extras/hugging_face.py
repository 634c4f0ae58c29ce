"""The Trainer of Hugging Face on all devices of its process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from dataparallel.devices import DeviceLike
from dataparallel.errors import needs_extra
from dataparallel.extras.chunk_losses import ChunkLosses
from dataparallel.parallel.distributed import DistributedDataParallel

with needs_extra("trainer"):
    import transformers

__all__ = ["Trainer", "TrainerMixin"]


_REMEDY = (
    "Pass compute_loss_func=, which gets the outputs of the whole batch; or, if you know what "
    'chunks count, wrapper_options={"scalars": ...}'
)


class TrainerMixin:
    """A mixin that lets a subclass of Hugging Face's ``Trainer`` use all devices of its process.

    Example::

        class MyTrainer(TrainerMixin, transformers.Seq2SeqTrainer):
            pass

    Args:
        args, kwargs: Those of the other class.
        device_ids, wrapper_options: See :class:`Trainer`.

    Raises:
        TypeError, ValueError: As :class:`Trainer` does.
    """

    model: Any
    args: Any
    accelerator: Any
    label_names: Sequence[str]

    def __init__(
        self,
        *args: Any,
        device_ids: Sequence[DeviceLike] | None = None,
        wrapper_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._device_ids, self._wrapper_options = device_ids, dict(wrapper_options or {})
        self._wrapper: Any = None
        super().__init__(*args, **kwargs)
        # Else Trainer prepares batches and losses for torch.nn.DataParallel.
        self.args._n_gpu = min(1, self.args.n_gpu)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """Return the wrapper, which Trainer trains and evaluates in place of its model."""
        if isinstance(self.model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise TypeError(
                f"Trainer got a {type(self.model).__name__} for a model; give it the bare model, "
                "and the devices as device_ids=[...]"
            )
        if self._wrapper is None or self._wrapper.module is not self.model:
            labels = [*dict.fromkeys([*self.label_names, "labels", "shift_labels"])]
            losses = ChunkLosses(self.model, labels, self.accelerator.autocast, _REMEDY)
            options = {"scalars": losses, **self._wrapper_options}
            wrapper = DistributedDataParallel(self.model, self._device_ids, **options)
            if options["scalars"] is losses:
                wrapper.register_forward_pre_hook(losses.before, with_kwargs=True)
            self._wrapper = self.accelerator.prepare_model(wrapper, evaluation_mode=True)
        return self._wrapper


class Trainer(TrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """A ``transformers.Trainer`` that trains and evaluates on all devices of its process.

    Losses, logs, predictions and weights are those of ``transformers.Trainer`` with one device. It
    finds out on the first batch, by comparing, how the losses of chunks make that of the batch.

    Example::

        from dataparallel.extras.hugging_face import Trainer

        trainer = Trainer(model, args, train_dataset=data)      # or device_ids=["cpu", "cpu"]
        trainer.train()

    Args:
        args, kwargs: Those of ``transformers.Trainer``. The model is the bare one. The batch size
            "per device" is that of this process, whose devices share it.
        device_ids: One device per replica. Default: as for
            :class:`dataparallel.DistributedDataParallel`.
        wrapper_options: Other arguments of :class:`dataparallel.DistributedDataParallel`. With
            ``scalars=`` among them, nothing is compared.

    Raises:
        TypeError: The model is a wrapper already.
        ValueError: In training: the loss mixes samples, so that the losses of chunks cannot be put
            together to that of the batch.
    """
