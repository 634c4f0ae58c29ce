"""The wrapper as a function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from dataparallel.devices import DeviceLike, parse_devices
from dataparallel.errors import suggesting
from dataparallel.parallel.data_parallel import DataParallel, OutputDevice
from dataparallel.replicas.replicate import check_placement


@suggesting
def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: OutputDevice = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
    *,
    in_dims: Mapping[str | int, Any] | None = None,
    out_dims: Any = None,
) -> Any:
    """Run a module once on several devices, each on its part of the batch.

    Example::

        output = data_parallel(net, x, device_ids=["cpu", "cpu"])

    Args:
        module: The module, on the first device.
        inputs: Its argument, or a tuple of positional arguments; None for none.
        device_ids: One device per replica. Default: every accelerator, or the CPU.
        output_device: Where the output is gathered; ``-1`` for the CPU, ``"each"`` for a list of
            the replicas' outputs. Default: the first device.
        dim: The batch dimension. Default: 0.
        module_kwargs: Keyword arguments of the module.
        in_dims, out_dims: Batch dimensions that are not ``dim``, as :class:`DataParallel` takes
            them.

    Returns:
        What :class:`DataParallel` returns for the same call.

    Raises:
        ValueError: As :class:`DataParallel` does.
    """
    if not isinstance(inputs, tuple):
        inputs = (inputs,) if inputs is not None else ()
    devices = parse_devices(device_ids)
    # The wrapper moves the module to its only device; a function should not move its argument.
    check_placement(module, devices[0])
    wrapper = DataParallel(module, devices, output_device, dim, in_dims=in_dims, out_dims=out_dims)
    try:
        return wrapper(*inputs, **(module_kwargs or {}))
    finally:
        wrapper.close()
