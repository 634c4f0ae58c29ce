"""Damage, kills, full disks and other writers: what was saved once is found, or said to be lost."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pathlib
import pickle
import random
import resource
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import checkpoint
from tests.checkpoint import forked
from tests.checkpoint.files import Gate, at_call, folder
from tests.checkpoint.forked import Fork, succeed
from tests.faults.harness import Figures

Say = Callable[[int], None]


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    checkpoint.close()


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
    """The step that is loaded; all of it is as it was saved."""
    loaded = checkpoint.load(directory)
    assert loaded.user["step"] == loaded.step
    assert torch.equal(loaded.user["weights"], weights(loaded.step, size))
    return loaded.step


def steps(directory: pathlib.Path) -> list[int]:
    return [info.number for info in checkpoint.generations(directory)]


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
    figures.record(
        goal=16,
        what="flipped, zeroed, cut and longer files that were loaded, or kept the last good "
        "generation from being loaded",
        value=len(accepted),
        unit="files",
        limit=0,
        repeats=2 * count,
        baseline="flips and zeroes load",
        details="; ".join(accepted[:5]),
    )


@pytest.mark.parametrize("which", ["manifest.json", "shared-00000.safetensors"])
def test_a_file_that_is_gone(which: str, tmp_path: pathlib.Path) -> None:
    for step in range(2):
        save(tmp_path, step)
    (folder(tmp_path, 1) / which).unlink()
    assert check(tmp_path) == 0
    assert [info.complete for info in checkpoint.generations(tmp_path)] == [True, False]
    shutil.rmtree(folder(tmp_path, 1))
    (folder(tmp_path, 0) / which).unlink()
    why = checkpoint.NoCheckpoint if which == "manifest.json" else checkpoint.CheckpointError
    with pytest.raises(why, match=r"nothing was saved|no generation in .* is good"):
        checkpoint.load(tmp_path)


def rewrite(path: pathlib.Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest as somebody would who knows the format."""
    content = json.loads(path.read_bytes())["content"]
    change(content)
    text = json.dumps(content, separators=(",", ":")).encode()
    path.write_bytes(
        b'{"sha256":"%s","content":%s}' % (hashlib.sha256(text).hexdigest().encode(), text)
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("files", [dict(name="../../x", rank=None, bytes=1, sha256="", tensors=["user.weights"])]),
        ("files", [{"name": 5}]),
        ("files", None),
        ("trees", []),
        ("trees", [{"user": {"$": "tensor", "name": "absent"}}]),
        ("parts", 3),
        ("number", 7),
    ],
)  # fmt: skip
def test_a_manifest_of_something_else(field: str, value: Any, tmp_path: pathlib.Path) -> None:
    for step in range(2):
        save(tmp_path, step)
    rewrite(folder(tmp_path, 1) / "manifest.json", lambda content: content.update({field: value}))
    assert check(tmp_path) == 0


@pytest.mark.parametrize("text", [b"[" * 100_000, b"{}", b"null", b'{"content":5}', b"\xff", b""])
def test_a_manifest_that_is_none(text: bytes, tmp_path: pathlib.Path) -> None:
    for step in range(2):
        save(tmp_path, step)
    (folder(tmp_path, 1) / "manifest.json").write_bytes(text)
    assert check(tmp_path) == 0


def test_pickles_are_never_opened(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a pickle was opened")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    save(tmp_path, 1)
    assert check(tmp_path) == 1


# --- kills and errors ----------------------------------------------------------------------------


def count_calls(directory: pathlib.Path) -> int:
    """How many things the third save does to files, with those that remove the first one."""

    def run(say: Say) -> None:
        for step in range(2):
            save(directory, step, keep=2)
        with at_call(0, lambda *_: None) as done:
            save(directory, 3, keep=2)
        say(len(done))

    with Fork(run) as child:
        calls = child.hear()
    assert calls is not None and calls >= 8
    return calls


def kill(name: str, args: Any) -> None:
    """End this process; of what it was about to write, half is written."""
    if name == "fsync":
        os.ftruncate(args[0], os.fstat(args[0]).st_size // 2)
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_before_everything_that_is_done_to_a_file(in_memory: pathlib.Path) -> None:
    outcomes = set()
    for number in range(1, count_calls(in_memory / "count") + 1):
        directory = in_memory / str(number)

        def run(say: Say, at: int = number, directory: pathlib.Path = directory) -> None:
            for step in range(2):
                save(directory, step, keep=2)
            with at_call(at, kill):
                save(directory, 3, keep=2)
                say(3)

        with Fork(run) as child:
            said = child.rest()
            assert child.wait() in (-signal.SIGKILL, 0)
        outcomes.add(check(directory))
        assert not said or check(directory) == 3, "a committed generation was lost"
        # The next save works, and nothing of the killed one stays.
        save(directory, 4, keep=2)
        assert check(directory) == 4
        assert all(info.complete for info in checkpoint.generations(directory))
        assert not list(directory.rglob(".*"))
        checkpoint.close(directory)
    assert outcomes == {1, 3}


def test_killed_at_random_while_it_saves(
    tmp_path: pathlib.Path, repeats: Callable[..., int], figures: Figures
) -> None:
    kills, lost, during, size = repeats(quick=15, long=1000), 0, 0, 2**16

    def run(say: Say) -> None:
        step = max(steps(tmp_path), default=-1) + 1
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
            child.kill()
            last = max([last or 0, *child.rest()])
        during += not all(info.complete for info in checkpoint.generations(tmp_path))
        try:
            lost += check(tmp_path, size) < last
        except checkpoint.CheckpointError:
            lost += 1
    assert during > kills / 4, "the kills did not hit saves"
    figures.record(
        goal=15,
        what="kill -9 during a save: runs without the last committed generation",
        value=lost,
        unit="runs",
        limit=0,
        repeats=kills,
        baseline="19 of 20 (torch.save)",
        details=f"{during} left an unfinished generation",
    )


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_of_the_system_anywhere(in_memory: pathlib.Path, code: int) -> None:
    calls = count_calls(in_memory / "count")

    def fail(name: str, args: Any) -> None:
        raise OSError(code, os.strerror(code))

    def run(say: Say) -> None:
        for number in range(1, calls + 1):
            directory = in_memory / str(number)
            for step in range(2):
                save(directory, step, keep=2)
            with at_call(number, fail):
                try:
                    save(directory, 3, keep=2)
                except checkpoint.CheckpointError as error:
                    say(number)
                    assert os.strerror(code) in str(error), error
                    assert "earlier generations are as they were" in str(error), error
            check(directory)
            save(directory, 4, keep=2)
            assert check(directory) == 4
            assert all(info.complete for info in checkpoint.generations(directory))
            checkpoint.close(directory)

    with Fork(run) as child:
        told = child.rest()
        assert child.wait() == 0
    # Not all matter: that the removal of what nobody needs fails, for one.
    assert len(told) >= 4


def test_a_full_disk(tmp_path: pathlib.Path) -> None:
    forked.require_mounts(str(tmp_path))

    def run(say: Say) -> None:
        assert forked.mount_small(str(tmp_path), 1 << 20)
        os.chdir(tmp_path)
        save("run", 0, size=2**15)
        for step in range(1, 4):
            with pytest.raises(checkpoint.CheckpointError, match="No space left on device; make"):
                save("run", step, size=2**18 * step)
            assert check("run", 2**15) == 0
            assert not list(tmp_path.rglob(".*"))
        save("run", 9, size=2**15)
        assert check("run", 2**15) == 9

    succeed(run)


def test_a_file_system_that_became_read_only(tmp_path: pathlib.Path) -> None:
    forked.require_mounts(str(tmp_path))

    def run(say: Say) -> None:
        assert forked.mount_small(str(tmp_path), 1 << 20)
        os.chdir(tmp_path)
        save("run", 0)
        # The lock is a file that is open for writing.
        checkpoint.close()
        forked.make_read_only(str(tmp_path))
        with pytest.raises(checkpoint.CheckpointError, match=r"Read-only file system; save to a"):
            save("run", 1)
        assert check("run") == 0

    succeed(run)


def test_a_limit_on_the_size_of_files(tmp_path: pathlib.Path) -> None:
    def run(say: Say) -> None:
        save(tmp_path, 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
        with pytest.raises(checkpoint.CheckpointError, match=r"File too large; a limit"):
            save(tmp_path, 1, size=2**18)
        assert check(tmp_path) == 0
        save(tmp_path, 2)
        assert check(tmp_path) == 2

    succeed(run)


def test_a_directory_that_is_a_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(checkpoint.CheckpointError, match=r"taking the lock failed in .*file: "):
        save(tmp_path / "file", 0)
    with pytest.raises(checkpoint.CheckpointError, match=r"looking for generations failed in "):
        checkpoint.load(tmp_path / "file")


def test_everything_is_on_the_disk_before_it_counts(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 0)
    synced: set[int] = set()
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(fd: int) -> None:
        fsync(fd)
        synced.add(os.fstat(fd).st_ino)
        events.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))

    def recorded_replace(source: Any, target: Any) -> None:
        assert os.stat(source).st_ino in synced, f"{target} is renamed before it is on the disk"
        replace(source, target)
        events.append(("replace", os.path.basename(target)))

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    save(tmp_path, 1)
    renamed = [name for call, name in events if call == "replace"]
    assert renamed == ["shared-00000.safetensors", "manifest.json"]
    after = events[events.index(("replace", "manifest.json")) + 1 :]
    assert after[:2] == [("fsync", folder(tmp_path, 1).name), ("fsync", tmp_path.name)]


def test_what_is_removed_is_no_generation_from_the_first_moment(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 0)
    unlink, removed = os.unlink, []

    def recorded(name: Any, **options: Any) -> None:
        removed.append(os.path.basename(name))
        unlink(name, **options)

    monkeypatch.setattr(os, "unlink", recorded)
    save(tmp_path, 1, keep=1)
    assert removed == ["manifest.json", "shared-00000.safetensors"]


def test_a_reader_beside_a_writer_that_keeps_one(in_memory: pathlib.Path) -> None:
    save(in_memory, 0)
    checkpoint.close()

    def run(say: Say) -> None:
        for step in range(1, 60):
            save(in_memory, step, keep=1)
        say(1)

    with Fork(run) as child:
        found = [0]
        while found[-1] < 59:
            found.append(check(in_memory))
        assert child.rest() == [1]
    assert found == sorted(found) and len(set(found)) > 3


# --- one writer ----------------------------------------------------------------------------------


def test_a_fork_is_another_writer(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 1)
    parent = os.getpid()

    def run(say: Say) -> None:
        with pytest.raises(checkpoint.CheckpointError, match=f"process {parent} on .* its lock"):
            save(tmp_path, 2)
        checkpoint.close()
        save(tmp_path / "own", 2)

    succeed(run)
    # What the fork did took nothing from its parent.
    save(tmp_path, 3)
    assert steps(tmp_path) == [0, 1] and steps(tmp_path / "own") == [0]


def test_a_fork_does_not_keep_the_lock_of_its_parent(tmp_path: pathlib.Path) -> None:
    def hold(say: Say) -> None:
        save(tmp_path, 1)
        with Fork(lambda _: signal.pause()) as child:
            say(child.pid)
            child.pid = 0

    with Fork(hold) as parent:
        pid = parent.hear()
        assert pid is not None and parent.wait() == 0
        try:
            save(tmp_path, 2)
        finally:
            os.kill(pid, signal.SIGKILL)


def test_a_fork_during_a_save_waits_for_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)

    def run(say: Say) -> None:
        gate.opened.set()
        with pytest.raises(checkpoint.CheckpointError, match=r"forked from it .*wait there"):
            saving.wait()
        with pytest.raises(checkpoint.CheckpointError, match="holds its lock"):
            save(tmp_path, 2)
        checkpoint.close()

    saving = checkpoint.save(tmp_path, step=1, asynchronous=True)
    with Fork(run) as child:
        assert child.rest() == []
        assert child.wait() == 0
    gate.opened.set()
    assert saving.wait(30) == 0


def test_who_lost_the_lock_to_another_writer_is_told(tmp_path: pathlib.Path) -> None:
    def save_and_stay(say: Say) -> None:
        say(checkpoint.save(tmp_path, step=5).wait())
        signal.pause()

    save(tmp_path, 1)
    (tmp_path / "writer.lock").unlink()
    with Fork(save_and_stay) as child:
        assert child.hear() == 1
        with pytest.raises(checkpoint.CheckpointError, match=f"process {child.pid} on"):
            save(tmp_path, 2)
        child.kill()
    save(tmp_path, 2)
    assert steps(tmp_path) == [0, 1, 2]


def test_a_directory_that_was_removed_is_locked_again(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "run"
    save(directory, 1)
    shutil.rmtree(directory)
    assert checkpoint.save(directory, step=2).wait() == 0

    def run(say: Say) -> None:
        with pytest.raises(checkpoint.CheckpointError, match="holds its lock"):
            save(directory, 3)

    succeed(run)


def test_a_lock_that_is_removed_during_a_save(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def remove(fd: int) -> None:
        (tmp_path / "writer.lock").unlink(missing_ok=True)
        fsync(fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", remove)
        with pytest.raises(checkpoint.CheckpointError, match=r"lock of .* was removed or replaced"):
            save(tmp_path, 1)
    # It was not committed, and what another writer may have begun was left alone.
    assert [info.complete for info in checkpoint.generations(tmp_path)] == [False]
    save(tmp_path, 2)
    assert steps(tmp_path) == [1]


# --- interrupts ----------------------------------------------------------------------------------


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt, which would end the test run."""


class State:
    """An object whose state cannot be had."""

    def state_dict(self) -> dict[str, int]:
        raise Interrupted

    def load_state_dict(self, state: Any) -> None:
        """Never called."""


def assert_usable(directory: pathlib.Path, number: int) -> None:
    """The next save is made, and waits for nothing."""
    results: list[Any] = []

    def run() -> None:
        results.append(checkpoint.save(directory, step=7).wait(0))
        checkpoint.close(directory)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert results == [number]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_interrupt_while_the_state_is_taken(tmp_path: pathlib.Path, asynchronous: bool) -> None:
    with pytest.raises(Interrupted):
        checkpoint.save(tmp_path, step=1, states={"o": State()}, asynchronous=asynchronous)
    assert_usable(tmp_path, 0)


def test_an_interrupt_while_it_is_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(fd: int) -> None:
        raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", interrupt)
        with pytest.raises(Interrupted):
            save(tmp_path, 1)
    # What was begun is removed, so the number is free.
    assert_usable(tmp_path, 0)


@pytest.mark.parametrize("error", [Interrupted(), RuntimeError("can't start new thread")])
def test_a_thread_that_does_not_start(
    error: BaseException, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start: Callable[[threading.Thread], None] = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "dataparallel-checkpoint":
            raise error
        start(thread)

    net = nn.Linear(2, 2)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        if isinstance(error, Interrupted):
            with pytest.raises(Interrupted):
                checkpoint.save(tmp_path, net, step=1, asynchronous=True)
        else:
            # The training waits.
            assert checkpoint.save(tmp_path, net, step=1, asynchronous=True).done()
    assert_usable(tmp_path, 0 if isinstance(error, Interrupted) else 1)
