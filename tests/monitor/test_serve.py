"""`monitor serve`: what the server answers, whom it answers, and the command."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import parser

from dataparallel.threads.timeline import PHASES
from dataparallel.tools.cli import main
from dataparallel.tools.monitor import command, opening, serve_command
from dataparallel.tools.monitor.background import BackgroundSampler
from dataparallel.tools.monitor.reading import HostReading, Sample
from dataparallel.tools.monitor.sample_store import SampleStore
from dataparallel.tools.monitor.sampler import Sampler
from dataparallel.tools.monitor.serve_command import serving
from dataparallel.tools.monitor.server import Answer, MonitorServer, Route
from dataparallel.tools.monitor.site import routes
from tests.monitor.made_up_machine import make_sample, samples

PAGE = ("/", "/page.js", "/page.css", "/uPlot.min.js", "/uPlot.min.css", "/icon.svg")
DATA = ("/metrics", "/api/about", "/api/samples")


@contextlib.contextmanager
def site(
    store: SampleStore | None = None,
    kind: type[MonitorServer] = MonitorServer,
    host: str = "127.0.0.1",
    **options: Any,
) -> Iterator[MonitorServer]:
    """The site of a made-up machine on a free port."""
    if store is None:
        store = SampleStore()
        store.feed(samples(3))
    with kind(host, 0, routes(store, 1.0), **options) as server, serving(server):
        yield server


@pytest.fixture(scope="module")
def machine() -> Iterator[MonitorServer]:
    with site() as server:
        yield server


class Reply:
    """What came back."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.body = answer.status, answer.headers, answer.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    server: MonitorServer,
    path: str,
    *,
    method: str = "GET",
    headers: dict[str, str] | None = None,
) -> Reply:
    address = str(server.server_address[0])
    with contextlib.closing(
        http.client.HTTPConnection(address, server.server_port, timeout=10)
    ) as connection:
        connection.request(method, path, headers=headers or {})
        return Reply(connection.getresponse())


# --- what it answers ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PAGE, *DATA])
def test_each_path_answers_with_headers_that_protect(machine: MonitorServer, path: str) -> None:
    reply = ask(machine, path)
    assert reply.status == 200
    assert reply.body
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert reply.headers["Cache-Control"] == "no-store"
    assert reply.headers["Content-Length"] == str(len(reply.body))
    policy = reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "Python" not in reply.headers["Server"]
    head = ask(machine, path, method="HEAD")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["Content-Length"] == reply.headers["Content-Length"]


def test_nothing_else_is_there_and_nothing_can_be_changed(machine: MonitorServer) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"):
        assert ask(machine, "/api/samples", method=method).status == 501
    for path in ("/nothing", "/page/page.js", "/../pyproject.toml", "/api/"):
        reply = ask(machine, path)
        assert reply.status == 404
        assert b"there are /" in reply.body


def test_the_license_of_the_charts_is_shipped_with_them() -> None:
    page = Path(serve_command.__file__).with_name("page")
    assert "MIT License" in (page / "uPlot.LICENSE").read_text()
    assert (page / "uPlot.min.js").read_text().startswith("/*! https://github.com/leeoniya/uPlot")


def test_about(machine: MonitorServer) -> None:
    about = ask(machine, "/api/about").json
    assert about["interval"] == 1.0
    assert [phase[0] for phase in about["phases"]] == list(PHASES)
    assert ["power", "W", "power drawn"] in about["metrics"]


def test_metrics_are_those_of_prometheus(machine: MonitorServer) -> None:
    reply = ask(machine, "/metrics")
    assert reply.headers["Content-Type"].startswith("text/plain; version=")
    families = parser.text_string_to_metric_families(reply.body.decode())
    assert "dataparallel_device_power_watts" in {family.name for family in families}
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    reply = ask(machine, "/metrics", headers=accept)
    assert reply.headers["Content-Type"].startswith("application/openmetrics-text")
    assert reply.body.endswith(b"# EOF\n")


def test_points_come_once_and_the_latest_sample_whole() -> None:
    store = SampleStore(keep=3)
    with site(store) as server:

        def look(after: float) -> Any:
            return ask(server, f"/api/samples?after={after}").json

        assert look(0) == {"finished": False, "points": [], "sample": None}
        for tick in range(5):
            store.add(make_sample(tick))
        # The oldest are forgotten.
        assert [point["time"] for point in look(0)["points"]] == [1e9 + 2, 1e9 + 3, 1e9 + 4]
        assert [point["time"] for point in look(1e9 + 3)["points"]] == [1e9 + 4]
        found = look(1e9 + 4)
        assert found["points"] == []
        assert ask(server, "/api/samples?after=x").status == 400
    sample = found["sample"]
    assert sample["elapsed"] == 4
    assert sample["processes"][0]["name"] == "python train.py --epochs 90"
    assert {alert["severity"] for alert in sample["alerts"]} == {"error", "warning"}
    assert sample["shares"][1]["idle"] == pytest.approx(0.353, abs=0.01)
    points = json.loads(store.after(0))["points"]
    assert points[-1]["devices"]["cuda:5"][0] is None
    # Six steps a second, of 104 samples each.
    assert points[-1]["speed"] == pytest.approx(624)


def test_what_json_has_not_is_null_and_of_a_run_that_is_gone_the_last_stays() -> None:
    store = SampleStore()
    store.add(make_sample(0))
    store.add(make_sample(5, run=None, cost=math.nan, host=HostReading(math.inf, 1, 1.0, 1.0)))
    sample = json.loads(store.after(0), parse_constant=pytest.fail)["sample"]
    assert sample["host"]["utilization"] is None
    assert (sample["run"]["num_steps"], sample["gone"]) == (1000, 5.0)


# --- whom it answers ---------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9999", "[::1]:8377", "LOCALHOST."])
def test_names_of_loopback_are_answered(machine: MonitorServer, host: str) -> None:
    # The port may be that of a tunnel.
    assert ask(machine, "/api/about", headers={"Host": host}).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "", "["]
)
def test_a_name_that_was_made_to_lead_here_is_refused(machine: MonitorServer, host: str) -> None:
    for path in ("/", "/api/samples", "/metrics", "/nothing"):
        reply = ask(machine, path, headers={"Host": host})
        assert reply.status == 403
        assert b"cuda" not in reply.body


def test_other_interfaces_have_any_name() -> None:
    with site(host="0.0.0.0", for_anyone=True) as server:
        assert not server.is_loopback
        assert ask(server, "/api/about", headers={"Host": "gpu-box:8377"}).status == 200


def in_header(token: str) -> tuple[str, dict[str, str]]:
    return "", {"Authorization": f"bearer  {token.encode().decode('latin-1')}"}


def in_address(token: str) -> tuple[str, dict[str, str]]:
    return "?token=" + "".join(f"%{byte:02x}" for byte in token.encode()), {}


@pytest.mark.parametrize("how", [in_header, in_address])
def test_the_token_opens_all_but_the_page(
    how: Callable[[str], tuple[str, dict[str, str]]],
) -> None:
    with site(token="gehéim ü") as server:
        for path in (*DATA, "/nothing"):
            for token in ("wrong", "gehéim ü2", ""):
                query, headers = how(token)
                reply = ask(server, path + query, headers=headers)
                assert (reply.status, b"cuda" in reply.body) == (401, False)
                assert reply.headers["WWW-Authenticate"].startswith("Bearer")
            query, headers = how("gehéim ü")
            wanted = 404 if path == "/nothing" else 200
            assert ask(server, path + query, headers=headers).status == wanted
        assert {ask(server, path).status for path in PAGE} == {200}


# --- faults ------------------------------------------------------------------------------------


def test_an_address_that_cannot_be_used_is_told(machine: MonitorServer) -> None:
    for host, port in (
        ("127.0.0.1", machine.server_port),
        ("no-such-host.invalid", 0),
        ("192.0.2.1", 0),
    ):
        with pytest.raises(ValueError, match=f"cannot serve at port {port} of {host}: .*--port 0"):
            MonitorServer(host, port, {}, token="geheim")


@pytest.mark.parametrize(
    "request_text",
    [b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01 \xff\r\n\r\n"],
)
def test_what_is_no_request_ends_the_connection_only(
    machine: MonitorServer, request_text: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("127.0.0.1", machine.server_port), timeout=10) as connection:
        connection.sendall(request_text)
        connection.shutdown(socket.SHUT_WR)
        wait_for_end(connection)
    assert ask(machine, "/api/about").status == 200
    assert "Traceback" not in capfd.readouterr().err


def test_a_fault_of_the_server_is_told_and_seen(capfd: pytest.CaptureFixture[str]) -> None:
    def fail(request: object) -> Answer:
        raise ZeroDivisionError("of ours")

    with MonitorServer("127.0.0.1", 0, {"/": Route(fail)}) as server, serving(server):
        assert ask(server, "/").status == 500
    assert "ZeroDivisionError: of ours" in capfd.readouterr().err


def wait_for_end(connection: socket.socket) -> bytes:
    """Everything until the other side ends the connection."""
    connection.settimeout(10)
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(1 << 16):
            found += more
    return found


class Strict(MonitorServer):
    """Soon tired, soon full."""

    deadline = 0.5
    max_connections = 2


def test_connections_have_an_end_and_a_greatest_number() -> None:
    with site(kind=Strict) as server:
        address = ("127.0.0.1", server.server_port)
        with socket.create_connection(address) as one, socket.create_connection(address) as two:
            one.sendall(b"GET / HTTP/1.0\r\nHost: loc")
            with socket.create_connection(address) as three:
                assert wait_for_end(three).startswith(b"HTTP/1.0 503 ")
            # Whoever says nothing, or not all, is not waited for.
            assert wait_for_end(one) == wait_for_end(two) == b""
        # Their places are free as soon as their threads have seen it.
        deadline = time.monotonic() + 10
        while (status := ask(server, "/api/about").status) == 503:
            assert time.monotonic() < deadline
        assert status == 200


# --- the command -------------------------------------------------------------------------------


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


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> MadeUpSampler:
    """What breaks after one sample takes the place of what is asked for."""

    def fail() -> None:
        raise OSError("the device is gone")

    sampler = MadeUpSampler(fail)
    monkeypatch.setattr(opening, "open_sampler", lambda arguments: sampler)
    monkeypatch.delenv(command.TOKEN_VARIABLE, raising=False)
    return sampler


def serve(*words: str) -> int:
    return main(["monitor", "serve", "--port", "0", *words])


def test_it_serves_until_it_is_interrupted() -> None:
    words = ["monitor", "serve", "--port", "0", "--source", "cpu", "--interval", "0.2"]
    with subprocess.Popen(
        [sys.executable, "-m", "dataparallel", *words, "--token", "geheim"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            # Line by line: what is read ahead would be lost for `communicate`.
            lines = [process.stdout.readline() for _ in range(4)]
            found = re.fullmatch(r"page: +http://127\.0\.0\.1:(\d+)/\n", lines[0])
            assert found is not None and lines[3].startswith("token:   needed")
            connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=30)
            news: Any = {"points": []}
            while len(news["points"]) < 2:
                connection.request("GET", "/api/samples?token=geheim")
                news = json.load(connection.getresponse())
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
    # The loopback address needs no token, by whatever name.
    assert serve("--host", "localhost") == 1
    printed = capsys.readouterr()
    assert "sampling has failed: OSError('the device is gone')" in printed.err
    assert "metrics: http://127.0.0.1:" in printed.out
    assert failing.is_closed


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_beyond_loopback_there_is_no_server_without_a_token(
    host: str, failing: MadeUpSampler, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve("--host", host) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"whoever reaches {host} could read names of processes" in printed.err
    assert "DATAPARALLEL_MONITOR_TOKEN" in printed.err and "--no-token" in printed.err


def test_a_token_comes_from_the_environment_unless_none_is_wanted(
    failing: MadeUpSampler,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(command.TOKEN_VARIABLE, "geheim")
    assert serve("--host", "0.0.0.0") == 1
    printed = capsys.readouterr()
    assert "token:   needed" in printed.out
    assert "geheim" not in printed.out and "warning" not in printed.err
    assert serve("--host", "0.0.0.0", "--no-token") == 1
    printed = capsys.readouterr()
    assert "token:" not in printed.out
    assert re.search(r"warning: everyone who reaches http://\S+:\d+/ may read", printed.err)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--token", "geheim", "--no-token"], "--no-token: not allowed with argument --token"),
        (["--token", "  "], "the token is empty"),
        (["--port=-1"], "'-1' is no port; it is a number from 0 to 65535"),
        (["--port=http"], "'http' is no port"),
        ([f"--port={'9' * 5000}"], f"'{'9' * 40}' is no port"),
    ],
)
def test_wrong_options(
    words: list[str],
    expected: str,
    failing: MadeUpSampler,
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        assert serve(*words) == 2
    except SystemExit as error:
        assert error.code == 2
    assert expected in capsys.readouterr().err


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
    assert json.loads(store.after(0))["finished"] is True


def test_prometheus_that_is_missing_is_explained(
    failing: MadeUpSampler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("prometheus_client")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert serve() == 2
    assert 'pip install "dataparallel[monitor]"' in capsys.readouterr().err


def test_signals_are_left_as_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), serve_command.stopped_by_signals():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
