"""Nothing that is read from a disk is run, whatever somebody has put there."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dataparallel import checkpoint
from dataparallel.extras.checkpoint import state
from dataparallel.tools.monitor.recording import read_recording
from tests.faults.hostile import KINDS, Canary, Touch, no_code_from_data


@pytest.fixture
def canary(tmp_path: pathlib.Path) -> Iterator[Canary]:
    made = Canary(tmp_path)
    yield made
    assert made.is_alive, "hostile data was run"


def test_the_payloads_and_the_alarm_are_real(tmp_path: pathlib.Path) -> None:
    canary = Canary(tmp_path)
    for name, load in {
        "pickle": lambda data: pickle.loads(data),
        "old pickle": lambda data: pickle.loads(data),
        "Python": lambda data: eval(data),
    }.items():
        with pytest.raises(AssertionError, match="code was taken from data"), no_code_from_data():
            load(canary.payloads()[name])
        assert not canary.is_alive, name
        canary.path.unlink()


# --- checkpoints -----------------------------------------------------------------------------


def save_two(folder: pathlib.Path) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    for step in (1, 2):
        checkpoint.save(folder, model, step=step).wait()
    checkpoint.close(folder)
    return model


def last(folder: pathlib.Path) -> pathlib.Path:
    return sorted(folder.glob("generation-*"))[-1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["manifest.json", "*.safetensors"])
def test_a_file_of_another_kind_is_rejected(
    tmp_path: pathlib.Path, canary: Canary, which: str, kind: str
) -> None:
    folder = tmp_path / "run"
    model = save_two(folder)
    for path in last(folder).glob(which):
        path.write_bytes(canary.payloads()[kind])
    other = nn.Linear(3, 2)
    with no_code_from_data():
        loaded = checkpoint.load(folder, other)
    assert loaded.step == 1
    assert len(loaded.rejected) == 1
    assert torch.equal(other.weight, model.weight)


def test_other_files_in_the_folder_are_left_alone(tmp_path: pathlib.Path, canary: Canary) -> None:
    folder = tmp_path / "run"
    save_two(folder)
    payloads = canary.payloads()
    for name in ("__init__.py", "sitecustomize.py", "torch.py", "hook.pth"):
        for place in (folder, last(folder)):
            (place / name).write_bytes(payloads["Python"])
    (last(folder) / "data.pkl").write_bytes(payloads["pickle"])
    with no_code_from_data():
        assert checkpoint.load(folder, nn.Linear(3, 2)).step == 2


@pytest.mark.parametrize(
    "value",
    [
        {"$": "dtype", "value": "load"},
        {"$": "object", "value": "os.system"},
        {"$": ["tuple"], "items": []},
        {"$": "tensor"},
        {"$": "tensor", "name": "../../../etc/passwd"},
        {"$": "device", "value": "cuda:99999999999999999999"},
    ],
    ids=lambda value: f"{value['$']}-{value.get('value', '')!s:.20}",
)
def test_right_hashes_do_not_make_names_into_code(
    tmp_path: pathlib.Path,
    canary: Canary,
    monkeypatch: pytest.MonkeyPatch,
    value: dict[str, object],
) -> None:
    folder = tmp_path / "run"
    save_two(folder)
    # A saver that knows the format, and writes what no other does.
    encode = state.Encoder.encode
    monkeypatch.setattr(
        state.Encoder,
        "encode",
        lambda self, given, path: value if type(given) is Touch else encode(self, given, path),
    )
    checkpoint.save(folder, nn.Linear(3, 2), step=3, user={"x": Touch("x")}).wait()
    checkpoint.close(folder)
    module = nn.Linear(3, 2)
    before = module.weight.detach().clone()
    why = "is not as it was saved|does not contain tensor"
    with no_code_from_data(), pytest.raises(checkpoint.CheckpointError, match=why):
        checkpoint.load(folder, module, number=2)
    assert torch.equal(module.weight, before), "it is loaded completely, or not at all"
    with no_code_from_data():
        loaded = checkpoint.load(folder, module)
    assert (loaded.step, [number for number, _ in loaded.rejected]) == (2, [2])


# --- recordings ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("line", [0, 1])
def test_a_recording_is_data(tmp_path: pathlib.Path, canary: Canary, kind: str, line: int) -> None:
    path = tmp_path / "run.jsonl"
    header = recording_header() if line else b""
    path.write_bytes(header + canary.payloads()[kind] + b"\n")
    with no_code_from_data():
        if line:
            recording = read_recording(path)
            assert not recording.samples and recording.problems
        else:
            with pytest.raises(ValueError, match=r"run\.jsonl"):
                read_recording(path)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"time": 1e999}',
        '{"time": ' + "9" * 5000 + "}",
        '{"time": null, "devices": {"__class__": "os.system"}}',
        '{"run": "x", "devices": 5}',
    ],
    ids=lambda text: text[:20],
)
def test_a_hostile_sample_is_left_out(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(recording_header() + text.encode() + b"\n")
    recording = read_recording(path)
    assert not recording.samples and len(recording.problems) == 1


def recording_header() -> bytes:
    from dataparallel.tools.monitor import recording

    return json.dumps({"format": recording.FORMAT, "version": recording.VERSION}).encode() + b"\n"


def test_the_working_directory_is_no_place_for_modules(
    tmp_path: pathlib.Path, canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is imported late must not come from where the data is.
    for name in ("safetensors", "numpy", "yaml", "cupy"):
        (tmp_path / f"{name}.py").write_bytes(canary.payloads()["Python"])
    monkeypatch.chdir(tmp_path)
    save_two(tmp_path / "run")
    assert checkpoint.load(tmp_path / "run", nn.Linear(3, 2)).step == 2
    assert os.getcwd() == str(tmp_path)
