"""Misspelled options: the error names the one that was meant."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dataparallel as dp
from dataparallel import checkpoint
from dataparallel.monitor import StepMonitor

Called = Callable[..., Any]

#: Whose keyword is misspelled, what is passed before it, the misspelled name and the right one.
NAMES: list[tuple[Called, tuple[Any, ...], str, str]] = [
    (dp.DataParallel, (nn.Linear(2, 2), ["cpu", "cpu"]), "buffer", "buffers"),
    (dp.DataParallel, (nn.Linear(2, 2),), "outdims", "out_dims"),
    (
        dp.DistributedDataParallel,
        (nn.Linear(2, 2),),
        "find_unused_params",
        "find_unused_parameters",
    ),
    (dp.DistributedDataParallel, (nn.Linear(2, 2),), "scalar", "scalars"),
    (dp.MixedPrecision, (), "params_dtype", "param_dtype"),
    (dp.balance, (None,), "warm_up", "warmup"),
    (dp.data_parallel, (nn.Linear(2, 2), torch.ones(2, 2)), "devices_ids", "device_ids"),
    (dp.init_process_group, ("gloo",), "time_out", "timeout"),
    (checkpoint.save, ("run",), "is_asynchronous", "asynchronous"),
    (checkpoint.load, ("run",), "missing_okay", "missing_ok"),
    (StepMonitor, (None,), "onstep", "on_step"),
]


@pytest.mark.parametrize(("called", "given", "wrong", "right"), NAMES)
def test_a_misspelled_keyword(
    called: Called, given: tuple[Any, ...], wrong: str, right: str
) -> None:
    message = f"unexpected keyword argument '{wrong}'. Did you mean '{right}'?"
    with pytest.raises(TypeError, match=re.escape(message)) as caught:
        called(*given, **{wrong: None})
    # Newer Pythons say it themselves.
    assert str(caught.value).count("Did you mean") == 1


class Named(dp.DataParallel[nn.Module]):
    def __init__(self, net: nn.Module, **options: Any) -> None:
        super().__init__(net, ["cpu", "cpu"], **options)


class OfDistributed(dp.DistributedDataParallel[nn.Module]):
    """Has no `__init__` of its own."""


@pytest.mark.parametrize("wrapper", [Named, OfDistributed])
def test_subclasses(wrapper: Called) -> None:
    assert wrapper(nn.Linear(2, 2), scalars="mean").scalars == "mean"
    with pytest.raises(TypeError, match=r"'scalers'\. Did you mean 'scalars'\?$"):
        wrapper(nn.Linear(2, 2), scalers="mean")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qqqqq": 1}, "unexpected keyword argument 'qqqqq'$"),
        ({}, "missing 1 required positional argument: 'module'$"),
        ({"module": 1}, "module must be a torch.nn.Module, but got int$"),
    ],
)
def test_other_errors_are_as_they_are(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        dp.DataParallel(**options)
    twice: dict[str, Any] = {"module": 1, "buffer": 1}
    with pytest.raises(TypeError, match=r"multiple values for argument 'module'$"):
        dp.DataParallel(nn.Linear(2, 2), **twice)


def test_signatures_and_pickles_remain() -> None:
    for called, _, _, right in NAMES:
        assert right in inspect.signature(called).parameters
        assert called.__module__.startswith("dataparallel.")
        assert inspect.getdoc(called)
        assert pickle.loads(pickle.dumps(called)) is called
    precision = dp.MixedPrecision(torch.bfloat16)
    assert pickle.loads(pickle.dumps(precision)) == precision
    assert next(iter(inspect.signature(dp.MixedPrecision).parameters)) == "param_dtype"


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


def test_a_misspelled_value_for_gather() -> None:
    with pytest.raises(
        ValueError, match=r"'stack', 'mean' or 'sum', but .*Did you mean 'stack'\?$"
    ):
        dp.gather([torch.ones(2)], "cpu", scalars="stacked")  # type: ignore[arg-type]
