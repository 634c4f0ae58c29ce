"""Samples that are taken while something else goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from dataparallel.monitor.sample import Sample
from dataparallel.monitor.sampler import Sampler


class BackgroundSampler:
    """A thread that takes samples, so that a driver that hangs holds nobody up.

    ``use`` is called once, in that thread, with all samples as they come. At the end a reading that
    is under way has ``patience`` seconds.
    """

    patience = 1.0

    def __init__(self, sampler: Sampler, use: Callable[[Iterable[Sample]], object]) -> None:
        self._sampler = sampler
        self._use = use
        self._error: BaseException | None = None
        self._has_failed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dataparallel-monitor", daemon=True)
        self._thread.start()

    def __enter__(self) -> BackgroundSampler:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._use(self._sampler.samples())
        except BaseException as error:
            self._error = error
            self._has_failed.set()

    @property
    def has_ended(self) -> bool:
        """True if no more samples come; RuntimeError if sampling has failed."""
        has_ended = not self._thread.is_alive()
        self._check()
        return has_ended

    def wait_for_failure(self) -> None:
        """Wait, for ever if need be, until sampling fails, and raise that."""
        self._has_failed.wait()
        self._check()

    def close(self) -> None:
        """End the thread and close the sampler. A second call does nothing."""
        self._sampler.stop()
        self._thread.join(self.patience)
        if not self._thread.is_alive():
            # A reading that hangs still uses the sources; the thread ends with the process.
            self._sampler.close()

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"sampling has failed: {self._error!r}") from self._error
