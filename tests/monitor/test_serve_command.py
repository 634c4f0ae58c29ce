"""``dataparallel monitor serve`` from the command line."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from dataparallel.tools.cli import main
from dataparallel.tools.monitor import command, opening, serve_command
from dataparallel.tools.monitor.background import BackgroundSampler
from dataparallel.tools.monitor.reading import Sample
from dataparallel.tools.monitor.sample_store import SampleStore
from dataparallel.tools.monitor.sampler import Sampler
from tests.monitor.made_up_machine import make_sample


class MadeUpSampler(Sampler):
    """Gives one sample, and then does something else."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__([])
        self._then = then
        self.is_closed = False

    def samples(self) -> Iterator[Sample]:
        yield make_sample()
        self._then()

    def close(self) -> None:
        super().close()
        self.is_closed = True


def fail() -> None:
    raise OSError("the device is gone")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> MadeUpSampler:
    """What breaks after one sample takes the place of what is asked for."""
    sampler = MadeUpSampler(fail)
    monkeypatch.setattr(opening, "open_sampler", lambda arguments: sampler)
    monkeypatch.delenv(command.TOKEN_VARIABLE, raising=False)
    return sampler


def test_it_serves_until_it_is_interrupted() -> None:
    command = [sys.executable, "-m", "dataparallel", "monitor", "serve"]
    with subprocess.Popen(
        [*command, "--port", "0", "--source", "cpu", "--interval", "0.2", "--token", "geheim"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        try:
            # Line by line: what is read ahead would be lost for `communicate`.
            lines = [process.stdout.readline() for _ in range(4)]
            found = re.fullmatch(r"page: +(http://127\.0\.0\.1:\d+/)\n", lines[0])
            assert found is not None
            assert lines[3].startswith("token:   needed")
            headers = {"Authorization": "Bearer geheim"}
            last = 0
            while last < 2:
                url = f"{found[1]}api/samples?after={last}"
                with urllib.request.urlopen(
                    urllib.request.Request(url, headers=headers), timeout=30
                ) as answer:
                    news = json.load(answer)
                last = news["last"]
                # As a page does.
                threading.Event().wait(0.05)
            assert news["sample"]["devices"][0]["source"] == "cpu"
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=30)
        finally:
            watchdog.cancel()
            process.kill()
    assert process.returncode == 0
    assert output.endswith("stopped\n")
    # Neither a traceback nor a line per request.
    assert errors == ""


def test_what_breaks_sampling_ends_it_with_an_error(
    failing: MadeUpSampler, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["monitor", "serve", "--port", "0"]) == 1
    printed = capsys.readouterr()
    assert "sampling has failed: OSError('the device is gone')" in printed.err
    assert "metrics: http://127.0.0.1:" in printed.out
    assert failing.is_closed


def test_a_token_is_taken_from_the_environment(
    failing: MadeUpSampler,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(command.TOKEN_VARIABLE, "geheim")
    assert main(["monitor", "serve", "--port", "0", "--host", "0.0.0.0"]) == 1
    printed = capsys.readouterr()
    assert "token:   needed" in printed.out
    assert "geheim" not in printed.out and "warning" not in printed.err


def test_everyone_on_the_network_is_warned_of(
    failing: MadeUpSampler, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["monitor", "serve", "--port", "0", "--host", "0.0.0.0"]
    assert main([*command, "--no-token"]) == 1
    message = r"warning: everyone who reaches http://\S+:\d+/ may read .*; DATAPARALLEL_MONITOR_"
    printed = capsys.readouterr()
    assert "metrics: http://" in printed.out and re.search(message, printed.err)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_beyond_loopback_there_is_no_server_without_a_token(
    host: str, failing: MadeUpSampler, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["monitor", "serve", "--port", "0", "--host", host]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"whoever reaches {host} could read names of processes" in printed.err
    assert "DATAPARALLEL_MONITOR_TOKEN" in printed.err and "--no-token" in printed.err
    # The loopback address needs none, by whatever name.
    assert main(["monitor", "serve", "--port", "0", "--host", "localhost"]) == 1
    assert "metrics: http://" in capsys.readouterr().out


def test_a_token_and_none_are_not_both_asked_for(
    failing: MadeUpSampler,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["monitor", "serve", "--token", "geheim", "--no-token"])
    assert "--no-token: not allowed with argument --token" in capsys.readouterr().err
    # What the environment has for other runs does not count where the option says no.
    monkeypatch.setenv(command.TOKEN_VARIABLE, "geheim")
    assert main(["monitor", "serve", "--port", "0", "--no-token"]) == 1
    assert "token:" not in capsys.readouterr().out


@pytest.mark.parametrize("token", ["", "  "])
def test_an_empty_token_is_refused(token: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "serve", "--port", "0", "--token", token]) == 2
    assert "the token is empty" in capsys.readouterr().err


def test_a_port_in_use_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        assert main(["monitor", "serve", "--port", str(port)]) == 2
    assert f"port {port} of 127.0.0.1 is in use" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["-1", "65536", "http", "9" * 5000])
def test_a_wrong_port_is_told(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["monitor", "serve", f"--port={port}"])
    assert f"'{port[:40]}' is no port; it is a number from 0 to 65535" in capsys.readouterr().err


def test_a_driver_that_hangs_does_not_hold_up_the_end() -> None:
    hanging, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        hanging.set()
        goes_on.wait(30)

    sampler = MadeUpSampler(hang)
    store = SampleStore()
    try:
        with BackgroundSampler(sampler, store.feed, patience=0.05):
            assert hanging.wait(30)
        assert store.latest is not None
        # Its sources are in use.
        assert not sampler.is_closed
    finally:
        goes_on.set()


def test_a_recording_that_ends_keeps_its_page() -> None:
    ended = threading.Event()
    store = SampleStore()
    with BackgroundSampler(MadeUpSampler(ended.set), store.feed) as background:
        assert ended.wait(30)
    assert background.has_ended
    assert json.loads(store.after(0))["progress"] == "finished"


def test_prometheus_that_is_missing_is_explained(
    failing: MadeUpSampler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("prometheus_client")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert main(["monitor", "serve", "--port", "0"]) == 2
    assert 'pip install "dataparallel[monitor]"' in capsys.readouterr().err


def test_signals_are_left_as_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), serve_command.stopped_by_signals():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
