"""Some of a test's cases, in which any two values of its parameters still meet.

A mistake shows with one value or with two that meet, rarely only where three do. A test with the
mark ``in_pairs`` runs in few of its cases, and with ``--all-cases`` in each::

    pytest -m in_pairs --all-cases
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that runs every case."""
    parser.addoption("--all-cases", action="store_true", help="every case of tests in pairs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases all of whose pairs of values meet in others."""
    if config.getoption("--all-cases"):
        return
    cases: dict[str, dict[pytest.Item, dict[str, int]]] = defaultdict(dict)
    for item in items:
        if item.get_closest_marker("in_pairs") and isinstance(item, pytest.Function):
            values = {name: id(value) for name, value in item.callspec.params.items()}
            cases[item.nodeid.split("[")[0]][item] = values
    left_out = {item for each in cases.values() for item in each.keys() - _covering(each)}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def _covering(cases: dict[pytest.Item, dict[str, int]]) -> set[pytest.Item]:
    """Return cases in which all pairs of values meet: always the one with the most new pairs."""
    pairs = {
        case: set(itertools.combinations(sorted(values.items()), 2))
        for case, values in cases.items()
    }
    missing, chosen = set().union(*pairs.values()), set()
    assert missing, "a test in pairs has two parameters"
    while missing:
        best = max(pairs, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        chosen.add(best)
    return chosen
