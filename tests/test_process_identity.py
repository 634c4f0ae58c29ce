"""Whether a process is still there."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys

import pytest

from dataparallel.comm import process_identity
from dataparallel.comm.process_identity import ProcessIdentity

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc of Linux")


def identity_of(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    """As the process itself would have it."""
    found = process_identity._stat(process.pid)
    assert found is not None
    mine = ProcessIdentity.of_this_process()
    return dataclasses.replace(mine, pid=process.pid, started=found[1])


def test_this_process_has_not_ended() -> None:
    mine = ProcessIdentity.of_this_process()
    assert mine.started and mine.space and not mine.has_ended()


def test_a_process_that_nobody_has_waited_for_has_ended() -> None:
    process = subprocess.Popen(["sleep", "60"])
    identity = identity_of(process)
    assert not identity.has_ended()
    process.kill()
    # A zombie until it is waited for.
    deadline_path = pathlib.Path(f"/proc/{process.pid}/stat")
    while ") Z" not in deadline_path.read_text():
        pass
    assert identity.has_ended()
    process.wait()
    assert identity.has_ended()


def test_another_process_with_the_same_number() -> None:
    mine = ProcessIdentity.of_this_process()
    assert dataclasses.replace(mine, started=f"{mine.started}1").has_ended()


def test_when_a_process_was_there() -> None:
    mine = ProcessIdentity.of_this_process()
    now = process_identity.ticks()
    assert mine.was_there(now) and not mine.was_there(int(mine.started) - 1)
    assert not dataclasses.replace(mine, started="").was_there(now)


@pytest.mark.parametrize("unknown", ["space", "started"])
def test_nobody_can_know(unknown: str) -> None:
    mine = ProcessIdentity.of_this_process()
    gone = dataclasses.replace(mine, pid=2**22 + 1)
    assert gone.has_ended()
    assert not ProcessIdentity(**{**dataclasses.asdict(gone), unknown: ""}).has_ended()
    assert not dataclasses.replace(gone, space="another machine").has_ended()


def test_what_is_hidden_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = dataclasses.replace(ProcessIdentity.of_this_process(), started="1")

    def refuse(path: pathlib.Path) -> str:
        raise PermissionError(path)

    space = process_identity._space()
    monkeypatch.setattr(process_identity, "_space", lambda: space)
    monkeypatch.setattr(pathlib.Path, "read_text", refuse)
    assert not mine.has_ended()
