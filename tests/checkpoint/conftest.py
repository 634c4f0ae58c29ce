"""Each test gives back what it saves with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dataparallel import checkpoint


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    checkpoint.close()
