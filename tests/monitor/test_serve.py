"""`monitor serve`: metrics, whom the server answers, the command. See also page_in_browser.py."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest
from prometheus_client import generate_latest, parser

from dataparallel.monitor.readings.metrics import METRICS
from dataparallel.monitor.readings.reading import DeviceReading, HostReading, ProcessReading
from dataparallel.monitor.sample import Sample
from dataparallel.tools.cli import main
from dataparallel.tools.monitor import command, opening, serve_command
from dataparallel.tools.monitor.prometheus import registry_of
from dataparallel.tools.monitor.sample_store import SampleStore
from dataparallel.tools.monitor.serve_command import serving
from dataparallel.tools.monitor.server import MonitorServer, Response, Route
from dataparallel.tools.monitor.site import routes
from tests.monitor.cases import PID, FakeSampler, make_device, make_run, make_sample, samples
from tests.monitor.golden import Golden

PAGE = ("/", "/page.js", "/page.css", "/uPlot.min.js", "/uPlot.min.css", "/icon.svg")
DATA = ("/metrics", "/api/about", "/api/samples")


@contextlib.contextmanager
def site(
    store: SampleStore | None = None,
    kind: type[MonitorServer] = MonitorServer,
    host: str = "127.0.0.1",
    port: int = 0,
    **options: Any,
) -> Iterator[MonitorServer]:
    """The site of a made-up machine on a free port; its page asks four times a second."""
    if store is None:
        store = SampleStore()
        store.feed(samples(3))
    with kind(host, port, routes(store, 0.25), **options) as server, serving(server):
        yield server


@pytest.fixture(scope="module")
def machine() -> Iterator[MonitorServer]:
    with site() as server:
        yield server


def ask(server: MonitorServer, path: str, *, method: str = "GET", **headers: str) -> Any:
    """Return the answer, with its status, headers and body."""
    address = str(server.server_address[0])
    with contextlib.closing(
        http.client.HTTPConnection(address, server.server_port, timeout=10)
    ) as connection:
        connection.request(method, path, headers=headers)
        answer: Any = connection.getresponse()
        answer.body = answer.read()
        return answer


# --- what it answers ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PAGE, *DATA])
def test_each_path_answers_with_headers_that_protect(machine: MonitorServer, path: str) -> None:
    reply = ask(machine, path)
    assert reply.status == 200 and reply.body
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
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        reply = ask(machine, "/api/samples", method=method)
        assert reply.status == 501
        # The standard library's own answer has none.
        assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
    for path in ("/nothing", "/page/page.js", "/../pyproject.toml", "/api/"):
        reply = ask(machine, path)
        assert reply.status == 404 and b"there are /" in reply.body
    page = Path(serve_command.__file__).with_name("page")
    assert "MIT License" in (page / "uPlot.LICENSE").read_text()


def test_metrics_are_those_of_prometheus(machine: MonitorServer) -> None:
    reply = ask(machine, "/metrics")
    assert reply.headers["Content-Type"].startswith("text/plain; version=")
    names = {one.name for one in parser.text_string_to_metric_families(reply.body.decode())}
    assert "dataparallel_device_power_watts" in names
    reply = ask(machine, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert reply.headers["Content-Type"].startswith("application/o")
    assert reply.body.endswith(b"# EOF\n")


def test_points_come_once_and_the_latest_sample_whole() -> None:
    store = SampleStore(keep=3)
    with site(store) as server:

        def look(after: float) -> Any:
            return json.loads(ask(server, f"/api/samples?after={after}").body)

        assert look(0) == {"finished": False, "points": [], "sample": None}
        for tick in range(5):
            store.add(make_sample(tick))
        begin = make_sample().time
        # The oldest are forgotten.
        assert [point["time"] - begin for point in look(0)["points"]] == [2, 3, 4]
        assert [point["time"] - begin for point in look(begin + 3)["points"]] == [4]
        assert look(begin + 4)["points"] == []
        assert ask(server, "/api/samples?after=x").status == 400
        found = look(0)
    sample, point = found["sample"], found["points"][-1]
    assert sample["elapsed"] == 4
    assert sample["processes"][0]["name"] == "python train.py --epochs 90"
    assert {alert["severity"] for alert in sample["alerts"]} == {"error", "warning"}
    assert sample["runs"][0]["shares"][1]["idle"] == pytest.approx(0.353, abs=0.01)
    assert point["devices"]["GPU-3"][0] is None
    assert (sample["users"]["cuda:3"], sample["users"]["cuda:4"]) == ("replica 3", "")
    # Steps of 0.17 s, of 104 samples each.
    (course,) = point["jobs"].values()
    assert course == [pytest.approx(104 / 0.17), pytest.approx(0.17)]


@pytest.mark.parametrize("shows_commands", [True, False])
def test_commands_of_other_users_are_shown_if_that_is_wanted(shows_commands: bool) -> None:
    me = psutil.Process().username()
    processes = [
        ProcessReading("cuda:0", PID, "python", user, command="train --key 7")
        for user in (me, "ada", None)
    ]
    store = SampleStore(shows_commands=shows_commands)
    store.add(make_sample(processes=tuple(processes)))
    shown = [one["command"] for one in json.loads(store.after(0))["sample"]["processes"]]
    hidden = "train --key 7" if shows_commands else None
    assert shown == ["train --key 7", hidden, hidden]
    assert "--key" not in generate_latest(registry_of(store)).decode()


def test_what_json_has_not_is_null_and_of_a_run_that_is_gone_the_last_stays() -> None:
    store = SampleStore()
    odd = HostReading(math.inf, 1, 1.0, 1.0)
    store.feed([make_sample(0), make_sample(5, runs=(), cost=math.nan, host=odd)])
    found = json.loads(store.after(0), parse_constant=pytest.fail)
    assert found["sample"]["host"]["utilization"] is None
    (run,) = found["sample"]["runs"]
    assert (run["steps"], run["gone"]) == (1000, 5.0)
    assert found["finished"]


# --- what Prometheus is told: all that is known, in base units and under clean names ----------

BARE = DeviceReading("cuda:0", "GPU", "nvml"), DeviceReading("cuda:1", "GPU", "nvml")
FAST = make_sample(devices=BARE, processes=(), runs=(), host=None)
THROTTLED = dataclasses.replace(BARE[0], throttle=("power cap",))
SLOW = dataclasses.replace(FAST, devices=(THROTTLED, BARE[1]))
VERSIONS = {"driver": "570.1", "CUDA": "12.8"}
#: A sample in which each metric has a value.
EVERYTHING = make_sample(
    devices=(
        make_device(5, {metric.name: 0.5 for metric in METRICS}, throttle=("power cap",)),
        *make_sample().devices,
    ),
    host=HostReading(0.5, 2, 1.0, 2.0, {"main": 0.2}, (1.5, 2.5, 3.5), 4.0, 8.0),
    versions=VERSIONS,
)


def exposed(*samples: Sample) -> str:
    """Return the metrics after the last of some samples; they are also asked for at the others."""
    store = SampleStore()
    registry = registry_of(store)
    text = generate_latest(registry)
    for sample in samples:
        store.add(sample)
        text = generate_latest(registry)
    return text.decode()


PART = dataclasses.replace(make_device(0), parent="cuda:3")
NO_MORE: dict[str, Any] = {"devices": (), "processes": (), "host": None}
METRICS_AFTER = {
    "nothing": [],
    "a machine and its run": [make_sample(0), make_sample(1)],
    "a run that is gone": [make_sample(**NO_MORE), make_sample(**NO_MORE, runs=())],
    "a part of a device": [dataclasses.replace(FAST, devices=(PART,))],
    "a host that tells everything": [
        dataclasses.replace(FAST, devices=(), host=EVERYTHING.host, versions=VERSIONS)
    ],
    "a device that was never slowed down": [FAST],
    "one of two devices is slowed down": [SLOW],
    "it is no more": [SLOW, FAST],
}


def test_values(golden: Golden) -> None:
    shown = {}
    for what, looks in METRICS_AFTER.items():
        text = exposed(*looks).replace(metadata.version("dataparallel"), "VERSION")
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        shown[what] = "\n".join(f"{name} {float(value):.7g}" for name, _, value in lines)
    golden("metrics", shown)


#: As promtool has them.
_OTHER_UNITS = "milliseconds|minutes|hours|days|kilobytes|megabytes|bits|percent|fahrenheit|kelvins"
_ABBREVIATIONS = "s|ms|us|ns|sec|b|kb|mb|gb|tb|pb|m|h|d"


def test_each_metric_has_its_name_and_help_and_promtool_would_have_nothing_to_say() -> None:
    families = {f.name: f for f in parser.text_string_to_metric_families(exposed(EVERYTHING))}
    for metric in METRICS:
        name = f"dataparallel_device_{metric.name_with_unit}"
        family = families[name.removesuffix("_total")]
        assert family.type == ("counter" if metric.is_counter else "gauge")
        assert family.documentation.lower() == f"{metric.meaning}.".lower()
        assert {sample.name for sample in family.samples} == {name}
    assert "dataparallel_device_energy_joules" in families
    assert sum(len(family.samples) for family in families.values()) > 140
    for family in families.values():
        name = family.samples[0].name
        assert family.documentation, name
        assert (family.type == "counter") == name.endswith("_total"), name
        assert not re.search(r"_(count|sum|bucket)$|gauge|counter|[A-Z:]", name), name
        assert not re.search(rf"_({_OTHER_UNITS}|{_ABBREVIATIONS})(_|$)", name), name
        assert len({frozenset(sample.labels) for sample in family.samples}) == 1, name


def test_what_is_not_available_is_absent() -> None:
    values = {"utilization": None, "power": math.nan, "temperature": math.inf}
    text = exposed(make_sample(devices=(DeviceReading("cuda:0", "GPU", "nvml", values=values),)))
    assert re.findall(r"^dataparallel_device_\w+", text, re.MULTILINE) == ["dataparallel_device_up"]


def test_the_same_twice_is_told_once_and_any_name_can_be() -> None:
    # Prometheus refuses an answer in which two series are the same.
    odd = ProcessReading("cuda:0", 7, name='a "quoted"\nname \\ with \udcff', memory=1.0)
    text = exposed(
        make_sample(devices=(make_device(0),) * 2, processes=(odd, odd), runs=(make_run(),))
    )
    lines = [line.rsplit(" ", 1)[0] for line in text.splitlines()]
    assert not [line for line, count in Counter(lines).items() if count > 1]
    assert 'process="a \\"quoted\\"\\nname \\\\ with ?"' in text


# --- whom it answers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        # The port may be that of a tunnel.
        *((host, 200) for host in ("localhost", "127.0.0.1:9999", "[::1]:8377", "LOCALHOST.")),
        *((host, 403) for host in ("evil.example", "localhost.evil.example", "", "[")),
    ],
)
def test_a_name_that_was_made_to_lead_here_is_refused(
    machine: MonitorServer, host: str, status: int
) -> None:
    for path in ("/", "/api/samples"):
        reply = ask(machine, path, Host=host)
        assert reply.status == status
        assert b"cuda" not in reply.body or status == 200


@pytest.mark.parametrize("address", ["192.0.2.7", "::", "::ffff:192.0.2.7", "fe80::1%lo"])
def test_a_name_that_leads_elsewhere_needs_a_token(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(ValueError, match="whoever reaches localhost could read"):
        MonitorServer("localhost", 0, {})


def test_other_interfaces_have_any_name() -> None:
    with site(host="0.0.0.0", for_anyone=True) as server:
        assert not server.is_loopback
        assert ask(server, "/api/about", Host="gpu-box:8377").status == 200


TOKEN = "gehéim ü, 16 letters"


class Patient(MonitorServer):
    """Does not wait."""

    penalty = 0.0


@pytest.mark.parametrize("in_header", [True, False])
def test_the_token_opens_all_but_the_page(in_header: bool) -> None:
    with site(kind=Patient, token=TOKEN) as server:

        def show(token: str, path: str) -> Any:
            if in_header:
                shown = f"bearer  {token.encode().decode('latin-1')}"
                return ask(server, path, Authorization=shown)
            return ask(server, f"{path}?token={quote(token)}")

        for path in (*DATA, "/nothing"):
            for token in ("wrong", f"{TOKEN}2", ""):
                reply = show(token, path)
                assert (reply.status, b"cuda" in reply.body) == (401, False)
                assert reply.headers["WWW-Authenticate"].startswith("Bearer")
            assert show(TOKEN, path).status == (404 if path == "/nothing" else 200)
        assert {ask(server, path).status for path in PAGE} == {200}


# --- faults ------------------------------------------------------------------------------------


def test_an_address_that_cannot_be_used_is_told(machine: MonitorServer) -> None:
    used = ("127.0.0.1", machine.server_port)
    for host, port in (used, ("no-such-host.invalid", 0), ("192.0.2.1", 0)):
        with pytest.raises(ValueError, match=f"cannot serve at port {port} of {host}: .*--port 0"):
            MonitorServer(host, port, {}, token=TOKEN)


@pytest.mark.parametrize("said", [b"GET\r\n\r\n", b"\x16\x03\x01 \xff\r\n\r\n"])
def test_what_is_no_request_ends_the_connection_only(
    machine: MonitorServer, said: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("127.0.0.1", machine.server_port), timeout=10) as connection:
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        wait_for_end(connection)
    assert ask(machine, "/api/about").status == 200
    assert "Traceback" not in capfd.readouterr().err


def test_a_fault_of_the_server_is_told_and_seen(capfd: pytest.CaptureFixture[str]) -> None:
    def fail(request: object) -> Response:
        raise ZeroDivisionError("of ours")

    with MonitorServer("127.0.0.1", 0, {"/": Route(fail)}) as server, serving(server):
        assert ask(server, "/").status == 500
        assert ask(server, "/").status == 500
    # In one line, which says where.
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(r"'/' cannot be answered: ZeroDivisionError: of ours \(.*serve.py:\d+\)", line)


def wait_for_end(connection: socket.socket) -> bytes:
    """Return everything until the other side ends the connection."""
    connection.settimeout(10)
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(1 << 16):
            found += more
    return found


class Strict(MonitorServer):
    """Soon tired, soon full."""

    deadline = 0.3
    max_connections = 2


class Small(MonitorServer):
    """Has room for two connections, and for one of a client: an address, here."""

    max_connections = 2
    max_of_client = 1

    def client_of(self, address: tuple[Any, ...]) -> str:
        return str(address[0])


def test_a_client_takes_no_more_than_its_part_of_the_connections() -> None:
    with site(kind=Small) as server:
        address = ("127.0.0.1", server.server_port)
        with socket.create_connection(address) as silent:
            silent.sendall(b"GET /")
            with socket.create_connection(address) as second:
                assert wait_for_end(second).startswith(b"HTTP/1.0 503 ")
            with socket.create_connection(address, source_address=("127.0.0.2", 0)) as other:
                other.sendall(b"GET /api/about HTTP/1.0\r\nHost: localhost\r\n\r\n")
                assert b" 200 OK" in wait_for_end(other)


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"])
def test_on_this_machine_a_client_is_a_user(source: str) -> None:
    """A user may take any address of loopback, and is one client with all of them."""
    with site() as server:
        there = ("127.0.0.1", server.server_port)
        with socket.create_connection(there, source_address=(source, 0)) as connection:
            assert server.client_of(connection.getsockname()) == f"user {os.geteuid()}"
        assert server.client_of(("192.0.2.7", 4711)) == "192.0.2.7"
        assert server.client_of(("::ffff:192.0.2.7", 4711, 0, 0)) == "192.0.2.7"


def test_wrong_tokens_of_a_client_wait_behind_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Time:
        monotonic = staticmethod(lambda: 7.0)
        sleep = staticmethod(waits.append)

    monkeypatch.setattr("dataparallel.tools.monitor.server.time", Time)
    with site(token=TOKEN) as server:
        for _ in range(3):
            assert ask(server, "/metrics?token=wrong").status == 401
        assert ask(server, "/metrics").status == 401
        assert ask(server, f"/metrics?token={quote(TOKEN)}").status == 200
    assert waits == [1.0, 2.0, 3.0]


def test_connections_have_an_end_and_a_greatest_number() -> None:
    with site(kind=Strict) as server:
        address = ("127.0.0.1", server.server_port)
        with socket.create_connection(address) as one, socket.create_connection(address) as two:
            one.sendall(b"GET / HTTP/1.0\r\nHost: loc")
            with socket.create_connection(address) as three:
                assert wait_for_end(three).startswith(b"HTTP/1.0 503 ")
            # The server does not wait for a client that says nothing, or not all.
            assert wait_for_end(one) == wait_for_end(two) == b""
        # Their places are free as soon as their threads have seen it.
        deadline = time.monotonic() + 10
        while (status := ask(server, "/api/about").status) == 503:
            assert time.monotonic() < deadline
        assert status == 200


# --- the command -------------------------------------------------------------------------------


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> FakeSampler:
    """Replace the sampler by one that breaks after some samples."""

    def fail() -> None:
        raise OSError("the device is gone")

    sampler = FakeSampler(fail)
    monkeypatch.setattr(opening, "open_sampler", lambda arguments: sampler)
    monkeypatch.delenv(command.TOKEN_VARIABLE, raising=False)
    return sampler


def serve(*words: str) -> int:
    return main(["monitor", "serve", "--port", "0", *words])


def test_it_serves_until_it_is_interrupted() -> None:
    words = ["monitor", "serve", "--port", "0", "--source", "cpu", "--interval", "0.2"]
    with subprocess.Popen(
        [sys.executable, "-m", "dataparallel", *words, "--token", "geheim" * 3],
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
            news: Any = {"points": []}
            while len(news["points"]) < 2:
                address = f"http://127.0.0.1:{found[1]}/api/samples?token={'geheim' * 3}"
                with urllib.request.urlopen(address, timeout=30) as answer:
                    news = json.load(answer)
                # As a page does.
                time.sleep(0.05)
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


#: Words of the command and the token of the environment; the status, and what is told and not.
COMMANDS: list[tuple[str, str | None, int, str, str]] = [
    # The loopback address needs no token, by whatever name.
    ("--host localhost", None, 1, r"metrics: http://127.0.0.1:\d+", "token:|warning"),
    ("", None, 1, r"sampling has failed: OSError\('the device is gone'\)", "token:|warning"),
    *(
        (f"--host {host}", None, 2, f"whoever reaches {host} could read .*_TOKEN.*--no-tok", "page")
        for host in ("0.0.0.0", "::", "192.0.2.1")
    ),
    ("--host 0.0.0.0", TOKEN, 1, "(?s)token:   needed.*plain HTTP.* also the token", "geheim"),
    ("--host 0.0.0.0 --no-token", TOKEN, 1, "is plain HTTP: .*, and everyone who", "token:"),
    ("--token geheim --no-token", None, 2, "--no-token: not allowed with argument --tok", "page"),
    ("--token=", None, 2, "the token has 0 characters, but needs at least 16", "page"),
    ("--port=0", f"{'x' * 15} ", 2, "the token has 15 characters, but needs", "page"),
    ("--port=-1", None, 2, "'-1' is no port; it is a number from 0 to 65535", "page:"),
    ("--port=http", None, 2, "'http' is no port", "page:"),
    (f"--port={'9' * 5000}", None, 2, f"'{'9' * 40}' is no port", "page:"),
]


@pytest.mark.parametrize(("words", "token", "status", "told", "untold"), COMMANDS)
def test_commands(
    words: str,
    token: str | None,
    status: int,
    told: str,
    untold: str,
    failing: FakeSampler,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if token is not None:
        monkeypatch.setenv(command.TOKEN_VARIABLE, token)
    try:
        found: Any = serve(*words.split())
    except SystemExit as error:
        found = error.code
    printed = "".join(capsys.readouterr())
    assert found == status
    assert re.search(told, printed) and not re.search(untold, printed), printed
    assert failing.closed == (status == 1)
