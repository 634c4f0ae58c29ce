"""Damage, kills, full disks and other writers: what was saved once is found, or said to be lost."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dataparallel import checkpoint
from tests.checkpoint.helpers import complete, folder
from tests.faults.harness import Figures

Say = Callable[[int], None]

# Python 3.12 says so; no child computes with several threads of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

FORKING = multiprocessing.get_context("fork")


class Fork:
    """A child that runs ``function(say)``, where ``say(number)`` tells the test a number."""

    def __init__(self, function: Callable[[Say], None]) -> None:
        self._heard, say = FORKING.Pipe(duplex=False)
        self.process = FORKING.Process(target=function, args=(say.send,))
        self.process.start()
        say.close()

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.join()

    def hear(self) -> int | None:
        """Return the next number that it says; None at its end."""
        assert self._heard.poll(20.0), "the child says nothing"
        with contextlib.suppress(EOFError):
            return int(self._heard.recv())
        return None

    def rest(self) -> list[int]:
        """Return the numbers that it said since, up to its end."""
        return list(iter(self.hear, None))

    def wait(self) -> int | None:
        """Wait for its end; its exit code, or the negative number of the signal that ended it."""
        # Not with a limit, which would wait for its children, too.
        self.process.join()
        return self.process.exitcode


def before_each_call(patched: pytest.MonkeyPatch, act: Callable[[str, Any], None]) -> None:
    """Call ``act`` before everything that is done to files."""

    def call(name: str, real: Any, *args: Any, **options: Any) -> Any:
        act(name, args)
        return real(*args, **options)

    for name in ("mkdir", "fsync", "replace", "unlink", "rmdir"):
        patched.setattr(os, name, functools.partial(call, name, getattr(os, name)))


@pytest.fixture
def in_memory() -> Iterator[pathlib.Path]:
    """A directory in memory, where there is one: hundreds of waits for a disk take long."""
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=place) as path:
        yield pathlib.Path(path)


def weights(step: int, size: int = 1000) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(step))


def save(directory: Any, step: int, size: int = 1000, keep: int = 9) -> None:
    """Save what belongs to a step."""
    user = {"weights": weights(step, size), "step": step}
    checkpoint.save(directory, step=step, user=user, keep=keep, rng=False)


def check(directory: Any, size: int = 1000) -> int:
    """Return the step that is loaded; all of it is as it was saved."""
    loaded = checkpoint.load(directory)
    assert loaded.user["step"] == loaded.step
    assert torch.equal(loaded.user["weights"], weights(loaded.step, size))
    return loaded.step


def numbers(directory: pathlib.Path) -> list[int]:
    return [int(path.name.split("-")[1]) for path in sorted(directory.glob("generation-*"))]


# --- damage --------------------------------------------------------------------------------------


def test_random_damage_is_always_found(
    in_memory: pathlib.Path, repeats: Callable[..., int], figures: Figures
) -> None:
    save(in_memory, 0)
    save(in_memory, 1)
    chance, count, accepted = random.Random(0), repeats(quick=100, long=500), []
    files = sorted(folder(in_memory, 1).iterdir())
    assert len(files) == 2
    for path in files:
        good = path.read_bytes()
        for _ in range(count):
            data = bytearray(good)
            place = chance.randrange(len(data) - 1)
            kind = chance.choice(["bit", "cut", "longer", "swap", "zeros"])
            if kind == "bit":
                data[place] ^= 1 << chance.randrange(8)
            elif kind == "cut":
                del data[place:]
            elif kind == "longer":
                data[place:place] = b"x"
            elif kind == "zeros":
                data[place : place + 64] = bytes(len(data[place : place + 64]))
            else:
                data[place], data[place + 1] = data[place + 1], data[place]
            path.write_bytes(data)
            loaded = checkpoint.load(in_memory)
            if loaded.step != int(bytes(data) == good):
                accepted.append(f"{kind} at {place} of {path.name}")
        path.write_bytes(good)
    assert check(in_memory) == 1
    what = "damaged files that were loaded, or kept the last good generation from being loaded"
    figures.record(what, len(accepted), "files", 0, repeats=2 * count)


TAG = {"$": "tensor", "name": "absent"}


@pytest.mark.parametrize(
    "change",
    [
        *({"files": [{"bytes": 1}]}, {"files": None}, {"trees": []}, {"trees": [{"user": TAG}]}),
        *({"trees": [{"user": {"$": "os.system", "value": "x"}}]}, {"number": 7}),
        *({"format": 7}, None, b"[" * 100_000, b"{}", b"null", b'{"content":5}', b"\xff", b""),
    ],
    ids=lambda change: repr(change)[:60],
)
def test_a_manifest_of_something_else(change: Any, tmp_path: pathlib.Path) -> None:
    """As somebody writes it who knows the format, or does not."""
    for step in range(2):
        save(tmp_path, step)
    path = folder(tmp_path, 1) / "manifest.json"
    if isinstance(change, dict):
        content = {**json.loads(path.read_bytes())["content"], **change}
        text = json.dumps(content, separators=(",", ":")).encode()
        sha256 = hashlib.sha256(text).hexdigest().encode()
        change = b'{"sha256":"%s","content":%s}' % (sha256, text)
    if change is None:
        (path.parent / "rank-00000.safetensors").unlink()
    else:
        path.write_bytes(change)
    assert check(tmp_path) == 0
    assert [number for number, _ in checkpoint.load(tmp_path).rejected] == [1]
    # Without a manifest it was never finished.
    path.unlink()
    assert checkpoint.load(tmp_path).rejected == ()
    assert complete(tmp_path) == [True, False]


# --- kills and errors ----------------------------------------------------------------------------


def kill(name: str, args: Any) -> None:
    """End this process; of what it was about to write, half is written."""
    if name == "fsync":
        path = os.readlink(f"/proc/self/fd/{args[0]}")
        if os.path.isfile(path):
            os.truncate(path, os.path.getsize(path) // 2)
    os.kill(os.getpid(), signal.SIGKILL)


def fail(name: str, args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save_with_a_fault(
    say: Say, directory: pathlib.Path, number: int, act: Callable[[str, Any], None]
) -> None:
    """The third save, which removes the first, meets a fault before its n-th call; then another."""
    done: list[str] = []

    def at_call(name: str, args: Any) -> None:
        done.append(name)
        if len(done) == number:
            act(name, args)

    for step in range(2):
        save(directory, step, keep=2)
    with pytest.MonkeyPatch.context() as patched:
        before_each_call(patched, at_call)
        try:
            save(directory, 3, keep=2)
            say(3 if len(done) >= number else -1)
        except checkpoint.CheckpointError as error:
            assert "nothing was saved to" in str(error)
            assert os.strerror(errno.ENOSPC) in str(error), error
    # After an error the process goes on.
    save(directory, 4, keep=2)
    say(4)


@pytest.mark.parametrize("act", [kill, fail], ids=["killed", "disk full"])
def test_before_everything_that_is_done_to_a_file(
    act: Callable[[str, Any], None], in_memory: pathlib.Path
) -> None:
    outcomes = set()
    for number in itertools.count(1):
        directory = in_memory / str(number)
        with Fork(
            functools.partial(save_with_a_fault, directory=directory, number=number, act=act)
        ) as child:
            said = child.rest()
            if said[:1] == [-1]:
                # There are not so many calls.
                break
            assert child.wait() == (-signal.SIGKILL if act is kill else 0)
        if act is kill:
            outcomes.add(check(directory))
            assert not said or check(directory) == 3, "a committed generation was lost"
            # The next save works, and nothing of the killed one stays.
            save(directory, 4, keep=2)
            checkpoint.close(directory)
        else:
            # Not all matter: that the removal of what nobody needs fails, for one.
            outcomes.add(3 if 3 in said else 1)
            assert said[-1] == 4
        assert check(directory) == 4
        assert all(complete(directory))
        assert not list(directory.rglob(".*"))
    assert number > 8 and outcomes == {1, 3}


@pytest.mark.long_faults
def test_killed_at_random_while_it_saves(
    tmp_path: pathlib.Path, repeats: Callable[..., int], figures: Figures
) -> None:
    kills, lost, during, size = repeats(quick=1, long=1000), 0, 0, 2**16

    def run(say: Say) -> None:
        step = max(numbers(tmp_path), default=-1) + 1
        while True:
            save(tmp_path, step, size, keep=2)
            say(step)
            step += 1

    chance = random.Random(0)
    for _ in range(kills):
        with Fork(run) as child:
            last = child.hear()
            # The moment of the kill: anywhere in one of the next saves.
            time.sleep(chance.random() * 0.02)
            child.process.kill()
            last = max([last or 0, *child.rest()])
        during += not all(complete(tmp_path))
        try:
            lost += check(tmp_path, size) < last
        except checkpoint.CheckpointError:
            lost += 1
    assert during > kills / 4, "the kills did not hit saves"
    what = "kill -9 during a save: runs without the last committed generation"
    figures.record(what, lost, "runs", 0, repeats=kills)


def test_everything_is_on_the_disk_before_it_counts(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 0)
    synchronized: set[int] = set()
    done: list[tuple[str, str]] = []

    def record(name: str, args: Any) -> None:
        path = args[1] if name == "replace" else args[0]
        if name == "fsync":
            synchronized.add(os.fstat(path).st_ino)
            path = os.readlink(f"/proc/self/fd/{path}")
        if name == "replace":
            assert os.stat(args[0]).st_ino in synchronized, f"{path} is not on the disk yet"
        done.append((name, os.path.basename(path)))

    before_each_call(monkeypatch, record)
    save(tmp_path, 1, keep=1)
    tensors, manifest = "rank-00000.safetensors", "manifest.json"
    replaced = [call for call in done if call[0] == "replace"]
    assert replaced == [("replace", tensors), ("replace", manifest)]
    after = done[done.index(("replace", manifest)) + 1 :]
    assert after[:2] == [("fsync", folder(tmp_path, 1).name), ("fsync", tmp_path.name)]
    # A removed generation is none from the first moment.
    removed = [call for call in done if call[0] == "unlink"]
    assert removed == [("unlink", manifest), ("unlink", tensors)]


def test_a_reader_beside_a_writer(in_memory: pathlib.Path) -> None:
    save(in_memory, 0)
    checkpoint.close()

    def run(say: Say) -> None:
        for step in range(1, 60):
            save(in_memory, step, keep=3)
        say(1)

    with Fork(run) as child:
        found = [0]
        while found[-1] < 59:
            found.append(check(in_memory))
        assert child.rest() == [1]
    assert found == sorted(found) and len(set(found)) > 3


# --- one writer ----------------------------------------------------------------------------------


def test_a_fork_is_another_writer(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "run"
    save(directory, 1)
    # The owner of a new folder locks it again.
    shutil.rmtree(directory)
    assert checkpoint.save(directory, step=2).wait() == 0

    def run(say: Say) -> None:
        with pytest.raises(checkpoint.CheckpointError, match=r"another process .* holds its lock"):
            save(directory, 2)
        checkpoint.close()
        save(tmp_path / "own", 2)
        say(1)

    with Fork(run) as child:
        assert child.rest() == [1]
    # The fork took nothing from its parent.
    save(directory, 3)
    assert numbers(directory) == [0, 1] and numbers(tmp_path / "own") == [0]


def test_a_fork_does_not_keep_the_lock_of_its_parent(tmp_path: pathlib.Path) -> None:
    def hold(say: Say) -> None:
        save(tmp_path, 1)
        its_own = FORKING.Process(target=signal.pause)
        its_own.start()
        say(its_own.pid or 0)
        os.kill(os.getpid(), signal.SIGKILL)

    with Fork(hold) as parent:
        pid = parent.hear()
        assert pid and parent.wait() == -signal.SIGKILL
        try:
            save(tmp_path, 2)
        finally:
            os.kill(pid, signal.SIGKILL)


# --- interrupts ----------------------------------------------------------------------------------


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt, which would end the test run."""


def interrupt(*_: Any) -> None:
    raise Interrupted


class State:
    """An object whose state cannot be had."""

    state_dict = load_state_dict = interrupt


@pytest.mark.parametrize("where", ["state", "asynchronous state", "write", "thread"])
def test_an_interrupt(where: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save is made, and waits for nothing."""
    start: Callable[[threading.Thread], None] = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        interrupt() if thread.name == "dataparallel-checkpoint" else start(thread)

    with monkeypatch.context() as patched:
        if where == "write":
            patched.setattr(os, "fsync", interrupt)
        if where == "thread":
            patched.setattr(threading.Thread, "start", refuse)
        states = {"o": State()} if "state" in where else None
        asynchronous = where in ("asynchronous state", "thread")
        with pytest.raises(Interrupted):
            checkpoint.save(tmp_path, step=1, states=states, asynchronous=asynchronous)
    results: list[Any] = []

    def run() -> None:
        results.append(checkpoint.save(tmp_path, step=7).wait(0))
        checkpoint.close(tmp_path)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert len(results) == 1 and checkpoint.load(tmp_path).step == 7
