"""The examples in the help of `dataparallel monitor` work as they stand."""

from __future__ import annotations

import re
import shlex

import pytest

from dataparallel.tools import cli
from dataparallel.tools.monitor import opening
from dataparallel.tools.monitor.sampler import Sampler

COMMANDS = ("top", "record", "plot", "report", "serve")


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_examples_are_accepted_and_open(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sampler, "warm_up", lambda self: None)
    # Virtual devices are there in tests, but not in a process that only watches.
    monkeypatch.setattr("dataparallel.virtual.is_enabled", lambda: False)
    parser = cli.build_parser()
    with pytest.raises(SystemExit, match="0"):
        parser.parse_args(["monitor", *command, "--help"])
    examples = capsys.readouterr().out.split("examples:\n")[1].splitlines()
    assert len(examples) >= 2
    for example in examples:
        words = shlex.split(re.sub(r"^\s*([A-Z_]+=\S+ )*", "", example).split(" > ")[0])
        assert words[: 2 + len(command)] == ["dataparallel", "monitor", *command]
        arguments = parser.parse_args(words[1:])
        # What plays back a file or watches a run needs one.
        if getattr(arguments, "source", "a file") in opening.SOURCES and not arguments.attach:
            with opening.open_sampler(arguments) as sampler:
                assert sampler.interval > 0
