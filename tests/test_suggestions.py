"""Misspelled options: the error names the one that was meant."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

import dataparallel as dp


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"buffers": "replica_0"},
            "'mean' or 'sync', but got 'replica_0'. Did you mean 'replica0'?",
        ),
        ({"buffers": None}, "buffers must be 'replica0', 'mean' or 'sync', but got None"),
        ({"average": "sample"}, "or 'none', but got 'sample'. Did you mean 'samples'?"),
        ({"nonfinite": "skp"}, "'ignore', 'skip' or 'raise', but got 'skp'. Did you mean 'skip'?"),
        ({"scalars": "meen"}, "a chunk's weight, but got 'meen'. Did you mean 'mean'?"),
        ({"scalars": 3}, "'sum' or a function that gives a chunk's weight, but got 3"),
    ],
)
def test_a_misspelled_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        dp.DistributedDataParallel(nn.Linear(2, 2), ["cpu", "cpu"], **options)
