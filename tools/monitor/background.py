"""Samples that are taken while something else goes on."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType

from dataparallel.tools.monitor.reading import Sample
from dataparallel.tools.monitor.sampler import Sampler


class BackgroundSampler:
    """Takes samples in a thread of its own, and keeps the last of them.

    Example::

        with BackgroundSampler(sampler) as background:
            background.wait(1, timeout=5)
            print(background.latest())

    Args:
        sampler: What takes the samples; it is closed with this.
        keep: How many samples are kept; older ones are forgotten. Default: 600.

    Raises:
        ValueError: ``keep`` is less than 1.
    """

    def __init__(self, sampler: Sampler, keep: int = 600) -> None:
        if keep < 1:
            raise ValueError(f"keep is the number of samples to keep, at least 1, but got {keep}")
        self._sampler = sampler
        self._kept: deque[Sample] = deque(maxlen=keep)
        self._changed = threading.Condition()
        self._num_samples = 0
        self._has_ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dataparallel-monitor", daemon=True)
        self._thread.start()

    def __enter__(self) -> BackgroundSampler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            for sample in self._sampler.samples():
                with self._changed:
                    self._kept.append(sample)
                    self._num_samples += 1
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    @property
    def has_ended(self) -> bool:
        """Whether no more samples come."""
        return self._has_ended

    @property
    def num_samples(self) -> int:
        """How many samples have been taken, with those that are forgotten."""
        return self._num_samples

    def latest(self) -> Sample | None:
        """The last sample; None before the first.

        Raises:
            RuntimeError: Sampling has failed; the cause is chained.
        """
        with self._changed:
            self._check()
            return self._kept[-1] if self._kept else None

    def samples(self) -> list[Sample]:
        """The samples that are kept, the oldest first."""
        with self._changed:
            self._check()
            return list(self._kept)

    def wait(self, number: int, timeout: float) -> bool:
        """Wait until so many samples have been taken.

        Args:
            number: How many, from the beginning.
            timeout: How long at most, in seconds.

        Returns:
            Whether they have; at once if no more come.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._num_samples >= number or self._has_ended, timeout=timeout
            )
            self._check()
            return self._num_samples >= number

    def close(self, timeout: float = 5.0) -> None:
        """End the thread and close the sampler. A second call does nothing.

        Args:
            timeout: How long to wait for a reading that is under way, in seconds. Default: 5.
        """
        self._sampler.stop()
        self._thread.join(timeout)
        if not self._thread.is_alive():
            # A reading that hangs still uses the sources; the thread ends with the process.
            self._sampler.close()

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"sampling has failed: {self._error!r}") from self._error
