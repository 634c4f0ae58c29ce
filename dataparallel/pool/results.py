"""The results of many items, in order or as they come, while a bounded number is on its way."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import logging
import operator
import queue
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

from torch.utils.data import DataLoader, Dataset, default_collate

from dataparallel.pool.crew import Crew, refuse_to_wait
from dataparallel.pool.work import Batch, Call, Item
from dataparallel.threads import exclusive

#: The error of an item is raised in its turn, or is its result.
OnError: TypeAlias = Literal["raise", "return"]
Collate: TypeAlias = Callable[[list[Any]], Any]

# Seconds between two looks at Ctrl-C, which ends no wait if it comes just before that begins.
_WAIT = 0.2

_log = logging.getLogger("dataparallel")


def values_of(items: Iterable[Any] | Dataset[Any]) -> Iterator[Any]:
    """Return an iterator over items; a list that a DataLoader makes of tuples is one again."""
    if isinstance(items, DataLoader) and items.collate_fn is default_collate:
        return map(_tuple_again, items)
    if isinstance(items, Dataset) and not hasattr(items, "__iter__"):
        # By Python's rule its end is an IndexError, which few raise.
        sized: Any = items
        return (sized[index] for index in range(len(sized)))
    return iter(items)


def _tuple_again(batch: Any) -> Any:
    # Samples that are texts give a list of these.
    is_tuple = type(batch) is list and not all(isinstance(one, (str, bytes)) for one in batch)
    return tuple(batch) if is_tuple else batch


def collate_samples(samples: list[Any]) -> Any:
    """Return a batch as torch's DataLoader makes it; tuples give a tuple."""
    batch = default_collate(samples)
    return tuple(batch) if type(samples[0]) is tuple else batch


def in_batches(values: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of so many values; the last one, and that before an error, may be shorter."""
    iterator, error = iter(values), None
    while error is None:
        found: list[Any] = []
        try:
            # If there is an error, it has what came before.
            found.extend(itertools.islice(iterator, size))
        except Exception as caught:
            error = caught
        if found:
            yield found
        elif error is None:
            return
    raise error


class ItemResults(Iterator[Any]):
    """The results of a pool's items; an error that is raised leaves the others there to be taken.

    Args:
        crew: The threads.
        call: Everything but the items.
        batches: The values of items, in lists that are computed together.
        collate: Makes one argument of such a list; None for lists of one.
        ordered: False for results as they come.
        most: The most batches that are on their way, or wait to be taken.
        on_error: The treatment of errors.
        bar: Is told the number of results that were taken, and 0 at the end.
    """

    def __init__(
        self,
        crew: Crew,
        call: Call,
        batches: Iterator[list[Any]],
        collate: Collate | None,
        *,
        ordered: bool,
        most: int,
        on_error: OnError,
        bar: Callable[[int], object],
    ) -> None:
        self._crew, self._call, self._batches, self._collate = crew, call, batches, collate
        self._ordered, self._most, self._on_error, self._bar = ordered, most, on_error, bar
        self._number = 0
        self._is_exhausted = False
        # The error of the iterable, until the results of what came before it are taken.
        self._error: Exception | None = None
        # Those whose results were not all taken, and how many results are left of each.
        self._open: dict[int, tuple[Batch, int]] = {}
        self._items: deque[tuple[int, Item]] = deque()
        self._done: queue.SimpleQueue[tuple[int, Item]] = queue.SimpleQueue()

    def __iter__(self) -> ItemResults:
        return self

    def __next__(self) -> Any:
        refuse_to_wait(self._crew.is_here())
        error: BaseException | None = None
        item: Item | None = None
        try:
            self._pull()
            if self._open:
                with exclusive.lock.paused():
                    key, item = self._next()
                self._take(key)
                error = item.error()
                if error is None:
                    return item.future.result()
                if self._on_error == "return":
                    return error
            elif self._error is None:
                self._bar(0)
                raise StopIteration
            else:
                error, self._error = self._error, None
        except Exception:
            raise
        except BaseException:
            # Ctrl-C: nobody takes what is left.
            self._stop()
            raise
        try:
            raise error
        finally:
            # The traceback holds this frame, which would hold the error.
            del error, item

    def close(self) -> None:
        """Forget the items that no device has begun; a second call does nothing."""
        self._is_exhausted, self._error = True, None
        batches, self._open = self._open, {}
        self._items.clear()
        for batch, _ in batches.values():
            batch.cancel()
        if batches:
            self._bar(0)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing() and hasattr(self, "_done"):
            self.close()

    def _stop(self) -> None:
        batches = [batch for batch, _ in self._open.values()]
        self.close()
        self._crew.interrupt(batches)

    def _pull(self) -> None:
        """Hand on items: one for each result that is taken, and more until the next is there."""
        is_first = True
        while not self._is_exhausted and self._error is None and len(self._open) < self._most:
            if not is_first and self._is_ready():
                return
            is_first = False
            try:
                values = next(self._batches)
            except StopIteration:
                self._is_exhausted = True
                return
            except Exception as error:
                self._error = error
                return
            numbered = enumerate(values, self._number)
            self._number += len(values)
            self._put([Item(value, i, i, self._crew.is_here) for i, value in numbered])

    def _put(self, items: Sequence[Item]) -> None:
        """Have some items computed as one batch."""
        batch = Batch(self._call, items, self._collate)
        key = id(batch)
        self._open[key] = batch, len(items)
        for item in items:
            if self._ordered:
                self._items.append((key, item))
            else:
                item.future.add_done_callback(functools.partial(_note, self._done, (key, item)))
        try:
            batch.prepare()
            self._crew.put(batch)
        except Exception as error:
            # It is raised in its turn.
            batch.fail(error)

    def _next(self) -> tuple[int, Item]:
        """Wait for an item to end."""
        if self._ordered:
            key, item = self._items.popleft()
            while not item.future.done():
                with contextlib.suppress(concurrent.futures.TimeoutError):
                    item.error(_WAIT)
            return key, item
        while True:
            with contextlib.suppress(queue.Empty):
                return self._done.get(timeout=_WAIT)

    def _is_ready(self) -> bool:
        """True if a result can be taken at once."""
        if self._ordered:
            return bool(self._items) and self._items[0][1].future.done()
        return not self._done.empty()

    def _take(self, key: int) -> None:
        batch, left = self._open[key]
        if left > 1:
            self._open[key] = batch, left - 1
        else:
            del self._open[key]
        self._bar(1)


def progress_bar(items: object, size: int | None = None) -> Callable[[int], object]:
    """Return a function that is told of so many results more, and 0 at the end, and shows them.

    ``size`` is the number of items that give one result. Default: 1.
    """
    total = -(-operator.length_hint(items) // (size or 1)) or None
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return _rich_bar(total)
    bar = tqdm(total=total, unit="item")
    return lambda count: bar.update(count) if count else bar.close()


def _note(done: queue.SimpleQueue[Any], entry: Any, _: object) -> None:
    done.put(entry)


def no_bar(count: int) -> None:
    """Show nothing."""


def _rich_bar(total: int | None) -> Callable[[int], object]:
    try:
        from rich.progress import Progress
    except ImportError:
        _log.warning("progress=True shows nothing, since neither tqdm nor rich is installed")
        return no_bar
    progress = Progress()
    task = progress.add_task("items", total=total)
    progress.start()
    return lambda count: progress.advance(task, count) if count else progress.stop()
