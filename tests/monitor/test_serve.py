"""What the monitor's server answers, and whom it answers."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client import parser

from dataparallel.threads.timeline import PHASES
from dataparallel.tools.monitor.reading import HostReading
from dataparallel.tools.monitor.sample_store import SampleStore
from dataparallel.tools.monitor.serve_command import serving
from dataparallel.tools.monitor.server import Answer, MonitorServer, Route
from dataparallel.tools.monitor.site import routes
from tests.monitor.made_up_machine import make_sample, samples

PATHS = ("/", "/page.js", "/page.css", "/icon.svg", "/metrics", "/api/about", "/api/samples")


@contextlib.contextmanager
def site(store: SampleStore | None = None, **options: Any) -> Iterator[MonitorServer]:
    """The site of a made-up machine on a free port."""
    if store is None:
        store = SampleStore()
        store.feed(samples(3))
    host = options.pop("host", "127.0.0.1")
    with MonitorServer(host, 0, routes(store, 1.0), **options) as server, serving(server):
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


@pytest.mark.parametrize("path", PATHS)
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


@pytest.mark.parametrize("path", PATHS)
def test_head_is_get_without_the_body(machine: MonitorServer, path: str) -> None:
    whole, head = ask(machine, path), ask(machine, path, method="HEAD")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["Content-Length"] == whole.headers["Content-Length"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"])
def test_nothing_can_be_changed(machine: MonitorServer, method: str) -> None:
    reply = ask(machine, "/api/samples", method=method)
    assert (reply.status, reply.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/nothing", "/page/page.js", "/../pyproject.toml", "/api/"])
def test_what_is_not_there(machine: MonitorServer, path: str) -> None:
    reply = ask(machine, path)
    assert reply.status == 404
    assert b"there are /, " in reply.body


def test_about() -> None:
    with site() as server:
        about = ask(server, "/api/about").json
    assert about["interval"] == 1.0
    assert [phase["name"] for phase in about["phases"]] == list(PHASES)
    assert {"name": "power", "unit": "W", "meaning": "power drawn"} in about["metrics"]


def test_metrics_are_those_of_prometheus(machine: MonitorServer) -> None:
    reply = ask(machine, "/metrics")
    assert reply.headers["Content-Type"].startswith("text/plain; version=")
    families = parser.text_string_to_metric_families(reply.body.decode())
    assert "dataparallel_device_power_watts" in {family.name for family in families}


def test_metrics_as_open_metrics(machine: MonitorServer) -> None:
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    reply = ask(machine, "/metrics", headers=accept)
    assert reply.headers["Content-Type"].startswith("application/openmetrics-text")
    assert reply.body.endswith(b"# EOF\n")


def test_long_answers_are_compressed_for_who_reads_that(machine: MonitorServer) -> None:
    plain = ask(machine, "/page.js")
    small = ask(machine, "/page.js", headers={"Accept-Encoding": "gzip, br"})
    assert plain.headers["Content-Encoding"] is None
    assert small.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(small.body) == plain.body


# --- the history -------------------------------------------------------------------------------


def test_samples_come_once_and_the_latest_whole() -> None:
    store = SampleStore()
    with site(store) as server:
        empty = ask(server, "/api/samples").json
        assert (empty["last"], empty["points"], empty["sample"]) == (0, [], None)
        store.add(make_sample(0))
        store.add(make_sample(1))
        first = ask(server, "/api/samples?after=0").json
        store.add(make_sample(2))
        second = ask(server, f"/api/samples?after={first['last']}").json
        third = ask(server, f"/api/samples?after={second['last']}").json
    assert [[p["elapsed"] for p in r["points"]] for r in (first, second, third)] == [
        [0, 1],
        [2],
        [],
    ]
    assert third["sample"]["elapsed"] == 2
    assert third["sample"]["processes"][0]["name"] == "python train.py --epochs 90"
    assert first["points"][1]["devices"]["cuda:5"][0] is None
    assert {alert["severity"] for alert in third["sample"]["alerts"]} == {"error", "warning"}


def test_the_history_is_bounded() -> None:
    store = SampleStore(keep=2)
    store.feed(samples(5))
    with site(store) as server:
        for after in (0, 1, 2, 3):
            assert [p["n"] for p in ask(server, f"/api/samples?after={after}").json["points"]] == [
                4,
                5,
            ]
        # Of another server, perhaps.
        assert ask(server, "/api/samples?after=99").json["points"] == []


@pytest.mark.parametrize("number", ["-1", "x", "1.5", "%C2%B2", "9" * 5000])
def test_a_wrong_number_is_explained(machine: MonitorServer, number: str) -> None:
    reply = ask(machine, f"/api/samples?after={number}")
    assert reply.status == 400
    assert b"the number of the last sample that is known" in reply.body
    assert len(reply.body) < 200


def test_how_it_ended_is_told() -> None:
    def broken() -> Iterator[Any]:
        yield make_sample()
        raise OSError("no such device")

    store = SampleStore()
    assert json.loads(store.after(0))["progress"] == "running"
    with pytest.raises(OSError, match="no such device"):
        store.feed(broken())
    told = json.loads(store.after(0))
    assert (told["progress"], told["error"]) == ("failed", "OSError: no such device")
    store = SampleStore()
    store.feed(samples(1))
    assert json.loads(store.after(0))["progress"] == "finished"


def test_numbers_that_json_has_not_are_null() -> None:
    store = SampleStore()
    store.add(make_sample(cost=float("nan"), host=HostReading(float("inf"), 1, 1.0, 1.0)))
    assert (
        json.loads(store.after(0), parse_constant=pytest.fail)["sample"]["host"]["utilization"]
        is None
    )


def test_of_a_run_that_is_gone_the_last_stays() -> None:
    store = SampleStore()
    store.add(make_sample(0))
    store.add(make_sample(5, run=None))
    sample = json.loads(store.after(0))["sample"]
    assert (sample["run"]["num_steps"], sample["gone"]) == (1000, 5.0)


# --- whom it answers ---------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST", "localhost."])
@pytest.mark.parametrize("port", ["", ":9999"])
def test_names_of_loopback_are_answered(machine: MonitorServer, host: str, port: str) -> None:
    # The port may be that of a tunnel.
    assert ask(machine, "/api/about", headers={"Host": host + port}).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "", "["]
)
@pytest.mark.parametrize("path", ["/", "/api/samples", "/metrics", "/nothing"])
def test_a_name_that_was_made_to_lead_here_is_refused(
    machine: MonitorServer, host: str, path: str
) -> None:
    reply = ask(machine, path, headers={"Host": host})
    assert reply.status == 403
    assert b"cuda" not in reply.body


def test_other_interfaces_have_any_name() -> None:
    with site(host="0.0.0.0", for_anyone=True) as server:
        assert not server.is_loopback
        assert ask(server, "/api/about", headers={"Host": "gpu-box:8377"}).status == 200


SHOWN: dict[str, Callable[[str], tuple[str, dict[str, str]]]] = {
    "header": lambda token: ("", {"Authorization": f"Bearer {token}"}),
    "lower case": lambda token: ("", {"Authorization": f"bearer  {token}"}),
    "address": lambda token: (f"?token={token}", {}),
}


@pytest.mark.parametrize("how", SHOWN)
def test_the_token_opens(how: str) -> None:
    with site(token="geheim") as server:
        for path in ("/metrics", "/api/about", "/api/samples", "/nothing"):
            for token in ("wrong", "geheim2", ""):
                query, headers = SHOWN[how](token)
                reply = ask(server, path + query, headers=headers)
                assert (reply.status, b"cuda" in reply.body) == (401, False)
                assert reply.headers["WWW-Authenticate"].startswith("Bearer")
            query, headers = SHOWN[how]("geheim")
            wanted = 404 if path == "/nothing" else 200
            assert ask(server, path + query, headers=headers).status == wanted


def test_the_page_comes_without_the_token() -> None:
    with site(token="geheim") as server:
        assert ask(server, "/").status == ask(server, "/page.js").status == 200


def test_a_token_may_have_any_letters() -> None:
    with site(token="gehéim ü") as server:
        raw = "gehéim ü".encode().decode("latin-1")
        assert ask(server, "/api/about?token=geh%C3%A9im+%C3%BC").status == 200
        assert ask(server, "/api/about", headers={"Authorization": f"Bearer {raw}"}).status == 200
        assert ask(server, "/api/about?token=geh%C3%A9im").status == 401


def test_an_empty_token_is_refused() -> None:
    with pytest.raises(ValueError, match="the token is empty"):
        MonitorServer("127.0.0.1", 0, {}, token=" ")


# --- faults ------------------------------------------------------------------------------------


def test_a_port_in_use_is_explained(machine: MonitorServer) -> None:
    port = machine.server_port
    with pytest.raises(ValueError, match=f"port {port} of 127.0.0.1 is in use .* --port 0"):
        MonitorServer("127.0.0.1", port, {})


@pytest.mark.parametrize(
    ("host", "message"),
    [("no-such-host.invalid", "no interface 'no-such-host"), ("192.0.2.1", "cannot serve at port")],
)
def test_an_address_that_is_not_ours_is_explained(host: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MonitorServer(host, 0, {}, token="geheim")


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
        while connection.recv(1 << 16):
            pass
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


def test_a_connection_that_says_nothing_ends() -> None:
    with site(deadline=0.3) as server:
        with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\nHost: loc")
            assert wait_for_end(connection) == b""
        assert ask(server, "/api/about").status == 200


def test_more_connections_than_allowed_are_told_to_come_back() -> None:
    with site(max_connections=2, deadline=5.0) as server:
        address = ("127.0.0.1", server.server_port)
        with socket.create_connection(address) as one, socket.create_connection(address) as two:
            with socket.create_connection(address) as three:
                assert wait_for_end(three).startswith(b"HTTP/1.0 503 ")
            one.close()
            two.close()
        # Their places are free as soon as their threads have seen it.
        deadline = time.monotonic() + 10
        while (status := ask(server, "/api/about").status) == 503:
            assert time.monotonic() < deadline
        assert status == 200
