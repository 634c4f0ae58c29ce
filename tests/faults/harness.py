"""The shared parts of tests of faults: the number of repeats, and figures.

A quick run shows that nothing is broken; the figures come from a long one, of one test at a time::

    pytest tests/faults --faults long
    cat out/faults/figures.md
"""

from __future__ import annotations

import datetime
import os
import pathlib
from collections.abc import Callable

import pytest
import torch

#: Seconds that a quick test may take, and a long one, which repeats hundreds of times.
_QUICK_LIMIT, _LONG_LIMIT = 300, 1800

#: Things may take so much longer in a quick run, for each process that wants the same core.
_SOFT_FACTOR = 5.0

_FOLDER = pathlib.Path(__file__).parents[2] / "out" / "faults"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that chooses how much is repeated."""
    parser.addoption(
        "--faults",
        choices=("quick", "long"),
        default="quick",
        help="how often tests of faults repeat; long writes figures to out/faults/figures.md",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only a long run has; the limit of every test of faults without one."""
    is_long = config.getoption("--faults") == "long"
    if not is_long:
        left_out = [item for item in items if item.get_closest_marker("long_faults")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    # A wait inside of torch notices no signal: a thread shows all stacks, and ends the process.
    limit = pytest.mark.timeout(_LONG_LIMIT if is_long else _QUICK_LIMIT, method="thread")
    for item in items:
        is_of_faults = pathlib.Path(__file__).parent in item.path.parents
        if is_of_faults or "repeats" in getattr(item, "fixturenames", ()):
            item.add_marker(limit)


class Figures:
    """The measurements of a test; see the fixture ``figures``."""

    def __init__(self, test: str, long: bool) -> None:
        self._test = test
        self._long = long

    def record(
        self,
        what: str,
        value: float,
        unit: str,
        limit: float,
        *,
        repeats: int,
        at_least: bool = False,
    ) -> None:
        """Compare a figure with its limit, and keep it if this is a long run.

        "s" and "%" get five times the limit in a quick run, and more on a busy machine; counts
        ("failures", "steps") have to be exact there, too.
        """
        sign = ">=" if at_least else "<="
        if self._long:
            today = f"{datetime.date.today()}, torch {torch.__version__}"
            measured = f"{value:.4g} {unit} of {repeats} ({sign} {limit:g})"
            _FOLDER.mkdir(parents=True, exist_ok=True)
            with open(_FOLDER / "figures.md", "a") as file:
                file.write(f"| {what} | {measured} | {today} | `pytest '{self._test}'` |\n")
        elif unit in ("s", "%"):
            limit *= _SOFT_FACTOR * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        fine = value >= limit if at_least else value <= limit
        assert fine, f"{what}: {value:.6g} {unit}, and not {sign} {limit:g} {unit}"


@pytest.fixture
def repeats(request: pytest.FixtureRequest) -> Callable[..., int]:
    """Return a function that chooses: ``repeats(quick=3, long=200)`` is one of the two."""

    def choose(*, quick: int, long: int) -> int:
        return long if request.config.getoption("--faults") == "long" else quick

    return choose


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    """Compares measured figures with their limits; see :meth:`Figures.record`."""
    is_long = request.config.getoption("--faults") == "long"
    return Figures(request.node.nodeid.split("[")[0], is_long)
