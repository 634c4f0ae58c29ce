"""What tests of faults share: how often they repeat, their figures, what they may leave behind.

A quick run shows that nothing is broken; the figures come from a long one, of one test at a time::

    pytest tests/faults --faults long
    python -m tests.faults.table out/faults/figures.jsonl
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
from collections.abc import Callable, Iterator

import pytest
import torch

from tests import forkserver
from tests.faults.leaks import nothing_left as _nothing_left

#: Seconds that a quick test may take, and a long one, which repeats hundreds of times.
QUICK_LIMIT, LONG_LIMIT = 60, 1800

#: How much longer things may take in a quick run, beside which others run.
SOFT_FACTOR = 5.0

#: Units of what depends on the machine's load. Counts do not.
_TIMED = ("s", "ms", "us", "x", "%")

#: The file descriptor of the terminal.
TERMINAL = pytest.StashKey[int]()

_FOLDER = pathlib.Path(__file__).parents[2] / "out" / "faults"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that chooses how much is repeated."""
    parser.addoption(
        "--faults",
        choices=("quick", "long"),
        default="quick",
        help="how often tests of faults repeat; long writes figures to out/faults/figures.jsonl",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Keep the terminal, which pytest hides from tests."""
    config.stash[TERMINAL] = os.dup(2)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Give it back."""
    os.close(config.stash[TERMINAL])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only a long run has; the limit of every test of faults without one."""
    if not is_long(config):
        left_out = [item for item in items if item.get_closest_marker("long_faults")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    limit = LONG_LIMIT if is_long(config) else QUICK_LIMIT
    here = pathlib.Path(__file__).parent
    for item in items:
        used = getattr(item, "fixturenames", ())
        is_of_faults = here in item.path.parents or "repeats" in used or "figures" in used
        if is_of_faults and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(limit, method="signal"))


class Figures:
    """What a test measured; see the fixture ``figures``."""

    def __init__(self, test: str, long: bool, folder: pathlib.Path) -> None:
        self._test = test
        self._long = long
        self._folder = folder

    def record(
        self,
        *,
        goal: int,
        what: str,
        value: float,
        unit: str,
        limit: float,
        repeats: int,
        baseline: str,
        at_least: bool = False,
        details: str = "",
    ) -> None:
        """Compare a figure with its limit, and keep it if this is a long run.

        Example::

            figures.record(
                goal=4, what="kill -9 of a peer: error with the rank, p100", value=max(seconds),
                unit="s", limit=1.0, repeats=len(seconds), baseline="0.03 s, without the rank",
            )

        Args:
            goal: The number by which the table sorts its rows.
            what: What was measured, and over what: the worst of all (p100), a median, a count.
            value: The figure.
            unit: Of value and limit. "s", "ms", "us", "x" (a ratio) and "%" get five times the
                limit in a quick run, all others ("failures", "of 400") have to be exact there, too.
            limit: What the figure may be at most.
            repeats: Out of how many.
            baseline: What PyTorch alone does.
            at_least: The limit is what the figure has to be at least.
            details: Anything else for the table.
        """
        if self._long:
            self._write(locals())
        soft = SOFT_FACTOR if unit in _TIMED and not self._long else 1.0
        bound = limit / soft if at_least else limit * soft
        fine = value >= bound if at_least else value <= bound
        sign = ">=" if at_least else "<="
        assert fine, f"goal {goal}, {what}: {value:.6g} {unit}, and not {sign} {bound:g} {unit}"

    def _write(self, fields: dict[str, object]) -> None:
        row = {name: value for name, value in fields.items() if name != "self"}
        row["command"] = f"pytest '{self._test}' --faults long"
        row["when"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        row["torch"] = torch.__version__
        row["cores"] = os.cpu_count()
        self._folder.mkdir(parents=True, exist_ok=True)
        # In one write: several tests may append at once.
        with open(self._folder / "figures.jsonl", "ab", buffering=0) as file:
            file.write(json.dumps(row).encode() + b"\n")


def is_long(config: pytest.Config) -> bool:
    """Whether all repeats were asked for."""
    return bool(config.getoption("--faults") == "long")


@pytest.fixture
def repeats(request: pytest.FixtureRequest) -> Callable[..., int]:
    """How often to repeat: ``repeats(quick=3, long=200)`` is one of the two."""

    def choose(*, quick: int, long: int) -> int:
        return long if is_long(request.config) else quick

    return choose


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    """Compares measured figures with their limits; see :meth:`Figures.record`."""
    return Figures(request.node.nodeid.split("[")[0], is_long(request.config), _FOLDER)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """After the test there are no more processes, threads and open files than before.

    For what runs in other processes use :func:`tests.faults.leaks.nothing_left` there.
    """
    forkserver.start()
    with _nothing_left():
        yield
