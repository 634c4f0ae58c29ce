"""Alarms of `monitor record` and `monitor run`: when they are raised, and what happens then."""

from __future__ import annotations

import dataclasses
import http.server
import json
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dataparallel.monitor.sample import Sample
from dataparallel.monitor.sampler import Sampler
from dataparallel.tools import cli
from dataparallel.tools.monitor import alarm, record_command
from tests.monitor.cases import BEGIN, FakeRun, FakeSampler, make_device, make_sample, sample


class Played(FakeSampler):
    """Gives these samples."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        super().__init__()
        self.all = samples

    def samples(self) -> Iterator[Sample]:
        yield from self.all


def hot_at(*times: int) -> list[Sample]:
    """Return samples in which two devices are hot at some times, and the first one always."""
    return [
        make_sample(
            time,
            devices=tuple(
                make_device(i, {"temperature": 90.0 if time in times or i == 0 else 50.0})
                for i in range(3)
            ),
            runs=(),
        )
        for time in range(100)
    ]


@pytest.fixture
def raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Return the status of a recording with some options; the alerts, or else what was told."""

    def record(samples: Iterable[Sample], *words: str) -> tuple[int, list[str]]:
        sampler: Sampler = Played(samples)
        monkeypatch.setattr(record_command, "open_sampler", lambda arguments: sampler)
        status = cli.main(["monitor", "record", str(tmp_path / "run.jsonl"), *words])
        lines = capsys.readouterr().err.splitlines()
        begin = "dataparallel: alert: "
        return status, [one.removeprefix(begin) for one in lines if one.startswith(begin)] or lines

    return record


def test_an_alert_is_told_once_until_it_has_ended(raised: Any) -> None:
    """Each device by itself; a short break is no end."""
    _, told = raised(hot_at(5, 6, 7, 12, 80, 81), "--alert", "hot device")
    names = [text.split()[0] for text in told]
    assert names == ["cuda:0", "cuda:1", "cuda:2", "cuda:1", "cuda:2"]


@pytest.mark.parametrize(
    ("condition", "kinds"),
    [
        ("finding>=error", {"cannot be read", "uncorrected"}),
        ("finding >= warning", {"cannot be read", "uncorrected", "slowed down", "Replica"}),
        ("memory errors>=warning", {"uncorrected"}),
        ("memory errors", {"uncorrected"}),
        ("finding>=20%", {"Replica"}),
        ("slow replica>=0.2", {"Replica"}),
        ("slow replica>=0.99", set()),
        ("never seen", set()),
    ],
)
def test_what_is_waited_for(raised: Any, condition: str, kinds: set[str]) -> None:
    status, told = raised([make_sample(0), make_sample(1)], "--alert", condition, "--exit-code")
    assert {kind for kind in kinds if any(kind in text for text in told)} == kinds
    assert status == (3 if kinds else 0) and (len(told) == len(kinds) or not kinds)


@pytest.mark.parametrize(("condition", "is_told"), [("input", True), ("input>=warning", False)])
def test_hints_are_told_if_they_are_wanted(raised: Any, condition: str, is_told: bool) -> None:
    run = FakeRun()
    samples = []
    for i in range(4):
        run.steps(2, [{"input": 0.1, "forward": 0.4, "backward": 0.4}] * 2)
        samples.append(sample(float(i), run=run.state(BEGIN + i)))
    _, told = raised(samples, "--alert", condition)
    assert ("passes before its batch is there" in told[0]) == is_told


def test_a_command_gets_the_alert_and_its_fault_is_told(
    raised: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "take.py"
    script.write_text(f"import sys; open({str(tmp_path / 'got')!r}, 'a').write(sys.stdin.read())")
    words = ["--alert", "hot device", "--exec", f"{sys.executable} {script}"]
    assert raised(hot_at()[:2], *words)[0] == 0
    got = json.loads((tmp_path / "got").read_text())
    assert (got["alert"], got["kind"], got["about"]) == ("hot device", "hot device", "cuda:0")
    assert got["severity"] == "warning" and got["time"] == make_sample().time
    for command in ("/no/such/program", f"{sys.executable} -c 'raise SystemExit(1)'"):
        faults: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(alarm, "tell", faults.append)
            raised(hot_at()[:2], "--alert", "hot device", "--exec", command)
        assert "the alert could not be passed on: " in faults[-1]


def test_a_server_gets_the_alert_and_one_that_hangs_holds_nothing_up(raised: Any) -> None:
    got: list[Any] = []
    recorded = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            # It answers after all samples.
            assert recorded.wait(30)
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    def samples() -> Iterator[Sample]:
        yield from (dataclasses.replace(one, runs=()) for one in hot_at(1)[:3])
        recorded.set()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/hook"
        raised(samples(), "--alert", "hot device", "--webhook", url)
        server.shutdown()
    assert sorted(one["about"] for one in got) == ["cuda:0", "cuda:1", "cuda:2"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--alert", "finding>=high"], "'finding>=high' is none: .*info, warning, error"),
        (["--alert", "finding>3"], "'finding>3' is none"),
        (["--alert", "input>=1.2.3"], "is none"),
        (["--exec", "true"], "--exec, --webhook and --exit-code need --alert"),
        (["--exit-code"], "need --alert"),
        (["--alert", "finding", "--webhook", "ftp://x"], "begins with neither http:// nor"),
    ],
)
def test_wrong_options(words: list[str], told: str, raised: Any, tmp_path: Path) -> None:
    status, (line,) = raised(hot_at()[:1], *words)
    assert status == 2 and re.search(told, line) and not list(tmp_path.iterdir())
