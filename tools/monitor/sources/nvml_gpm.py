"""NVML's performance metrics (GPM): what the processors really do. Hopper and newer have them.

They come from two samples, between which the driver counts. Unlike the counters of profilers they
can be read by several programs at once.
"""

from __future__ import annotations

from typing import Any

from dataparallel.tools.monitor.sources.nvml_query import Handle, Query, number

_MEBIBYTE = 2**20

#: Number of the metric: its name here, and what its value is multiplied with and divided by.
_METRICS: dict[int, tuple[str, int, int]] = {
    2: ("sm_active", 1, 100),
    3: ("sm_occupancy", 1, 100),
    5: ("tensor_active", 1, 100),
    10: ("dram_active", 1, 100),
    20: ("pcie_sent", _MEBIBYTE, 1),
    21: ("pcie_received", _MEBIBYTE, 1),
    60: ("nvlink_received", _MEBIBYTE, 1),
    61: ("nvlink_sent", _MEBIBYTE, 1),
}


class Gpm:
    """Reads the performance metrics of a device or of a MIG instance.

    Args:
        query: Asks NVML.
        handle: The device; for an instance, the device of which it is a part.
        instance: The number of the GPU instance; None for a whole device.
    """

    def __init__(self, query: Query, handle: Handle, instance: int | None = None) -> None:
        self._query = query
        self._handle = handle
        self._instance = instance
        self._key = handle.key if instance is None else f"{handle.key}/{instance}"
        self._samples: list[Any] = []
        self._has_before = False
        self._is_absent = False

    def read(self) -> dict[str, float]:
        """The values since the last call; none at the first one, or where there are none."""
        if self._is_absent:
            return {}
        if not self._samples and not self._prepare():
            self._is_absent = True
            return {}
        self._samples.reverse()
        if not self._take(self._samples[1]):
            self._has_before = False
            return {}
        if not self._has_before:
            self._has_before = True
            return {}
        return self._values()

    def _prepare(self) -> bool:
        support = self._query("nvmlGpmQueryDeviceSupport", self._handle)
        if support is None or not support.isSupportedDevice:
            return False
        samples = [self._query("nvmlGpmSampleAlloc", of=self._key) for _ in range(2)]
        self._samples = [sample for sample in samples if sample is not None]
        if len(self._samples) < 2:
            self.close()
            return False
        return True

    def _take(self, sample: Any) -> bool:
        if self._instance is None:
            return self._query("nvmlGpmSampleGet", self._handle, sample) is not None
        took = self._query("nvmlGpmMigSampleGet", self._handle, self._instance, sample)
        return took is not None

    def _values(self) -> dict[str, float]:
        module = self._query.module
        first, second = self._samples
        request = module.c_nvmlGpmMetricsGet_t(
            version=module.NVML_GPM_METRICS_GET_VERSION,
            numMetrics=len(_METRICS),
            sample1=first,
            sample2=second,
        )
        for metric, one in zip(_METRICS, request.metrics, strict=False):
            # An instance of the struct that NVML fills: its field is what says which metric it is.
            one.metricId = metric
        if self._query("nvmlGpmMetricsGet", request, of=self._key) is None:
            return {}
        values = {}
        for place, (name, times, per) in enumerate(_METRICS.values()):
            one = request.metrics[place]
            value = None if one.nvmlReturn else number(one.value)
            if value is not None:
                values[name] = value * times / per
        return values

    def close(self) -> None:
        """Give the samples back. A second call does nothing."""
        samples, self._samples = self._samples, []
        self._has_before = False
        for sample in samples:
            self._query("nvmlGpmSampleFree", sample, of=self._key)
