"""What has the right hashes and is no training is not used: the generation before it is."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import checkpoint
from dataparallel.extras.checkpoint import strict_json
from dataparallel.extras.checkpoint.errors import CheckpointError
from dataparallel.extras.checkpoint.generation import read_generation
from dataparallel.extras.checkpoint.generation_writer import GenerationWriter
from dataparallel.extras.checkpoint.values import decode, references
from tests.checkpoint.generations import folder, manifest

FILE = "rank-00000"
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    checkpoint.close()


def forged(directory: pathlib.Path, document: Change, trees: Change) -> None:
    """Save generation 0, and as generation 1 the same with changes."""
    checkpoint.save(directory, nn.Linear(2, 2), step=1)
    checkpoint.close()
    with read_generation(directory) as good, GenerationWriter(directory, 1) as writer:
        told, noted = json.loads(json.dumps([good.document, good.metadata(FILE)]))
        told["step"] = 2
        document(told)
        trees(noted)
        writer.commit([writer.write(FILE, good.tensors(FILE), noted)], told)


def nothing(_: dict[str, Any]) -> None:
    """Leave it as it is."""


DOCUMENTS: dict[str, Change] = {
    "no step": lambda d: d.pop("step"),
    "step": lambda d: d.update(step="2"),
    "step below 0": lambda d: d.update(step=-2),
    "epoch": lambda d: d.update(epoch=[]),
    "time": lambda d: d.update(taken="now"),
    "kinds": lambda d: d["parts"].update(model=[]),
    "kind": lambda d: d["parts"].update(model="mine"),
    "parts": lambda d: d.update(parts=["model"]),
    "divided": lambda d: d.update(divided=None),
    "processes": lambda d: d.update(processes=10**15),
    "no processes": lambda d: d.update(processes=0),
    "format": lambda d: d.update(format=[1]),
    "empty": lambda d: d.clear(),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(name: str, tmp_path: pathlib.Path) -> None:
    forged(tmp_path, DOCUMENTS[name], nothing)
    for directory in (tmp_path, [tmp_path]):
        loaded = checkpoint.load(directory, nn.Linear(2, 2))
        assert loaded.step == 1
        [(number, reason)] = loaded.rejected
        assert number == 1 and ("has other entries" in reason or "has the format" in reason)


TREES: dict[str, tuple[Change, str]] = {
    "no such tensor": (
        lambda t: t["parts"]["model"]["state"]["weight"].update(name="gone"),
        "model.state.weight is the tensor 'gone', which no file has",
    ),
    "no name": (
        lambda t: t["parts"]["model"]["state"]["weight"].update(name=[1]),
        "which no file has",
    ),
    "no part": (lambda t: t["parts"].pop("model"), "rank-00000 lacks model"),
    "no parts": (lambda t: t.update(parts=[]), "does not say what its tensors are"),
    "no metadata": (lambda t: t.clear(), "does not say what its tensors are"),
    "unknown": (lambda t: t["parts"].update(user={"$": "code"}), "user is a 'code', which"),
    "generators": (lambda t: t["parts"].update(rng=7), "no states of random generators"),
    "states": (lambda t: t["parts"]["rng"].update(numpy=[1]), "no states of random"),
}


@pytest.mark.parametrize("name", TREES)
def test_trees(name: str, tmp_path: pathlib.Path) -> None:
    change, why = TREES[name]
    forged(tmp_path, nothing, change)
    net = nn.Linear(2, 2)
    loaded = checkpoint.load(tmp_path, net)
    assert (loaded.step, loaded.rejected[0][0]) == (1, 1) and why in loaded.rejected[0][1]
    before = net.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"generation 1 in .* is not good"):
        checkpoint.load(tmp_path, net, number=1)
    assert torch.equal(net.weight, before)


@pytest.mark.parametrize("written", ["1" + "0" * 400, "-1", "1" + "0" * 20])
def test_times(written: str, tmp_path: pathlib.Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, step=step)
    path = folder(tmp_path, 1) / "manifest.json"
    fields = json.loads(path.read_bytes())["manifest"]
    fields["written"] = int(written)
    path.write_bytes(manifest(fields))
    assert checkpoint.load(tmp_path).step == 1
    assert "the time is" in str(checkpoint.generations(tmp_path)[1].reason)
    # What nobody can read is in nobody's way.
    checkpoint.save(tmp_path, step=3, keep=1)
    assert [info.number for info in checkpoint.generations(tmp_path)] == [2]


def slow_ones(count: int) -> dict[str, Callable[[], Any]]:
    """What takes quadratic time: keys that all have the same hash, for example."""
    modulus = 2**61 - 1
    integers = [{"$": "int", "value": hex(i * modulus)} for i in range(1, 200)]
    complexes = [{"$": "complex", "value": [1000003 * i, -i]} for i in range(1, 200)]
    names = ",".join(f'"{i}":0' for i in range(4 * count))
    long: Any = {"x" * 10_000_000: [[]] * count}
    return {
        "set": lambda: decode({"$": "set", "items": integers}, "user", {}),
        "frozenset": lambda: decode({"$": "frozenset", "items": complexes}, "user", {}),
        "dict": lambda: decode({"$": "dict", "items": [[i, 0] for i in integers]}, "user", {}),
        "counter": lambda: decode({"$": "counter", "items": [[i, 0] for i in integers]}, "u", {}),
        "twice": lambda: strict_json.decode(f'{{{names},"{4 * count - 1}":0}}'.encode()),
        "long": lambda: decode({**long, "y": {"$": "?"}}, "user", {}),
    }


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *((name, "keys have the same hash") for name in ("set", "frozenset", "dict", "counter")),
        ("twice", "the key '79999' is there twice"),
        ("long", r"y is a '\?'"),
    ],
)
def test_time_stays_linear(name: str, why: str) -> None:
    hostile = slow_ones(20_000)[name]
    started = time.process_time()
    with pytest.raises((CheckpointError, ValueError), match=why):
        hostile()
    # The last two would take more than five.
    assert time.process_time() - started < 2


def test_few_keys_of_one_hash_are_fine() -> None:
    items = [{"$": "int", "value": hex(i * (2**61 - 1))} for i in range(1, 50)]
    assert len(decode({"$": "set", "items": items}, "user", {})) == 49


def test_references_of_what_is_nested_deeply() -> None:
    nested: Any = {"$": "tensor", "name": "x"}
    for _ in range(20_000):
        nested = [nested]
    assert references(nested) == {"x"}


@pytest.mark.parametrize("dtype", ["bool", "uint8", "quint8", "uint4"])
def test_bytes_that_are_no_other_type(dtype: str) -> None:
    told = {"$": "tensor", "name": "x", "dtype": dtype, "shape": [4]}
    with pytest.raises(CheckpointError, match=f"the bytes of {dtype}, which is never saved so"):
        decode(told, "user", {"x": torch.tensor([0, 1, 2, 255], dtype=torch.uint8)})


def test_states_of_optimizers(tmp_path: pathlib.Path) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters())
    checkpoint.save(tmp_path, net, optimizer, step=1)
    checkpoint.close()
    changes: list[Change] = [
        lambda tree: tree["parameters"][0][0].update(name=[1]),
        lambda tree: tree["parameters"][0][0].update(shape="x"),
        lambda tree: tree["parameters"][0][0].update(dtype={}),
        lambda tree: tree["state_dict"]["param_groups"][0].update(param_names=[]),
        lambda tree: tree["state_dict"]["param_groups"][0].update(params=[1, 0]),
    ]
    for number, change in enumerate(changes, 1):
        with read_generation(tmp_path, 0) as good, GenerationWriter(tmp_path, number) as writer:
            noted = json.loads(json.dumps(good.metadata(FILE)))
            change(noted["parts"]["optimizer"])
            writer.commit([writer.write(FILE, good.tensors(FILE), noted)], good.document)
        with pytest.raises(CheckpointError, match="no state of an optimizer there"):
            checkpoint.load(tmp_path, net, optimizer)


def test_times_that_are_told(tmp_path: pathlib.Path) -> None:
    # What is written late may have been taken early.
    late, early = tmp_path / "late", tmp_path / "early"
    before = time.time()
    checkpoint.save(early, step=7)
    with read_generation(early) as generation:
        assert before <= generation.document["taken"] <= generation.written
    forged(late, lambda d: d.update(taken=1.0), nothing)
    assert checkpoint.load([late, early]).step == 7
    assert checkpoint.load([early, late]).step == 7
