"""`dataparallel bench kernels`: small runs of the real thing, and what it refuses."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataparallel import kernels, torch_internals
from dataparallel.kernels import backend
from dataparallel.tools import cli
from dataparallel.tools.bench import kernels as bench
from dataparallel.tools.bench import (
    kernels_cases,
    kernels_work,
)
from dataparallel.tools.bench.kernels_summary import KernelRow, KernelVerdict
from tests.kernels.host_backend import HostBackend

CPU = torch.device("cpu")
SMALL = ["bench", "kernels", "--device", "cpu", "--sizes", "4KiB", "--footprint", "4KiB"]


def run(*words: str) -> int:
    return cli.main([*SMALL, "--rounds", "2", "--steps", "1", *words])


def test_all_references_on_the_cpu(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, picture = tmp_path / "results.json", tmp_path / "rates.png"
    assert run("--dtypes", "float32", "--json", str(target), "--plot", str(picture)) == 0
    result = json.loads(target.read_text())
    setting = result["setting"]
    assert setting["runs"] == "torch reference: no kernels on this device (cpu)"
    assert (setting["device"], setting["sizes"], setting["rounds"]) == ("cpu", [4096], 2)
    assert setting["cupy"] == bench.cupy_version()
    assert setting["torch"] == torch.__version__
    assert (result["kernels_in_use"], result["verdicts"]) == (False, [])
    rows = result["rows"]
    assert list(dict.fromkeys(each["case"]["kernel"] for each in rows)) == list(
        kernels_cases.KERNELS
    )
    assert {each["case"]["dtype"] for each in rows} == {"float32"}
    assert all(each["agrees"] and not each["left_out"] for each in rows)
    for each in rows:
        assert each["rate"]["low"] <= each["rate"]["median"] <= each["rate"]["high"]
        assert each["rate"]["high"] == pytest.approx(each["moved"] / each["seconds"]["low"])
        assert each["alternatives"][0]["ratio"]["median"] > 0
        assert (each["launch"], each["hidden"]) == (None, None)
    names = {each["case"]["kernel"]: {a["name"] for a in each["alternatives"]} for each in rows}
    assert names["reduce_add"] == {"stack", "foreach", "add_"}
    assert names["flatten"] == {"cat", "foreach"}
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert text.count("torch reference: no kernels on this device (cpu)") == len(
        kernels_cases.KERNELS
    )
    assert f"cpu, torch {torch.__version__}, " in text
    assert "no verdict: bars are for kernels, and references ran here" in text


def test_on_an_accelerator_launches_have_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "virtual:0", "--dtypes", "float32", "--json", "-"]
    assert run("--kernels", "flatten,fingerprint", *words) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["setting"]["runs"] == "torch reference: no kernels on this device (virtual:0)"
    for each in result["rows"]:
        assert each["agrees"] and each["launch"]["low"] > 0
        assert all(other["launch"]["low"] > 0 for other in each["alternatives"])
        assert each["hidden"] is not None
    assert run("--kernels", "flatten", *words[:4]) == 0
    assert "launch µs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("misses", "words", "status"),
    [
        (True, ["--check"], 1),
        (True, [], 0),
        (False, ["--check"], 0),
    ],
)
def test_kernels_are_named_and_judged(
    misses: bool,
    words: list[str],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    verdict = KernelVerdict("share", 1, ("a",) if misses else (), "a", 0.8, 0.9)
    judged: list[KernelRow] = []

    def judge(rows: list[KernelRow]) -> list[KernelVerdict]:
        judged.extend(rows)
        return [verdict]

    monkeypatch.setattr(bench, "judge", judge)
    host = HostBackend()
    with backend.registered([host]):
        assert run("--kernels", "reduce_add", "--dtypes", "float32", *words) == status
    assert {"reduce_add_f32_2", "reduce_add_f32_4", "reduce_add_f32_8"} == set(host.launches)
    assert len(judged) == 3
    text = capsys.readouterr().out
    assert "kernels, launched by HostBackend" in text
    assert "share: worst 0.800 (a)" in text
    assert "torch reference" not in text


@pytest.mark.parametrize("kernel", kernels_cases.KERNELS)
def test_kernels_agree_with_torch(kernel: str) -> None:
    cases = kernels_cases.plan_cases([kernel], ["float32", "bfloat16"], [4096])
    host = HostBackend()
    with backend.registered([host]):
        assert all(kernels_work.prepare(case, CPU, 1).agrees for case in cases)
    # Each call of ours was a launch at least.
    assert len(host.launches) >= len(cases)


def _last(tensor: torch.Tensor) -> None:
    tensor.view(-1)[-1].add_(1)


#: How the result of each function becomes wrong.
_WRONG: dict[str, Callable[[tuple[Any, ...], Any], None]] = {
    "reduce_add": lambda given, result: _last(result),
    "flatten": lambda given, result: _last(given[1]),
    "unflatten": lambda given, result: _last(given[1][-1]),
    "fingerprint": lambda given, result: _last(result),
}


@pytest.mark.parametrize("kernel", kernels_cases.KERNELS)
def test_a_wrong_result_is_seen(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = kernels_cases.plan_cases([kernel], ["float32", "bfloat16"], [4096])
    assert all(kernels_work.prepare(case, CPU, 1).agrees for case in cases)
    right = getattr(kernels, kernel)

    def wrong(*given: Any, **named: Any) -> Any:
        result = right(*given, **named)
        _WRONG[kernel](given, result)
        return result

    monkeypatch.setattr(kernels, kernel, wrong)
    assert not any(kernels_work.prepare(case, CPU, 1).agrees for case in cases)
    if kernel == "reduce_add":
        assert run("--kernels", kernel) == 1


def test_alternatives_that_torch_does_not_have_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*given: object) -> None:
        raise NotImplementedError("not on this device")

    monkeypatch.setattr(torch_internals, "foreach_add_", missing)
    assert run("--kernels", "reduce_add") == 0
    assert "not on this device: reduce_add: foreach" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--check"], "--check judges kernels, but cpu has none: torch references run there"),
        (["--sizes", "1KiB"], "1024 bytes, too few for 400 tensors"),
        (["--plot", "rates.table"], "rates.table has no ending of a picture"),
        (["--device", "gpu"], "'gpu' is not a device"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    assert message in capsys.readouterr().err


def test_examples_in_the_help_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    parser = cli.build_parser()
    with pytest.raises(SystemExit, match="0"):
        parser.parse_args(["bench", "kernels", "--help"])
    examples = capsys.readouterr().out.split("examples:\n")[1].splitlines()
    assert len(examples) == 5
    for example in examples:
        assert callable(parser.parse_args(example.split()[1:]).run)
