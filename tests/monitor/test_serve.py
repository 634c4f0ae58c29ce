"""`monitor serve`: its page in a real browser, whom the server answers, and the command."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import math
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import parser

from dataparallel.tools.cli import main
from dataparallel.tools.monitor import command, opening, serve_command
from dataparallel.tools.monitor.reading import DeviceReading, HostReading, ProcessReading, Sample
from dataparallel.tools.monitor.sample_store import SampleStore
from dataparallel.tools.monitor.sampler import Sampler
from dataparallel.tools.monitor.serve_command import serving
from dataparallel.tools.monitor.server import Answer, MonitorServer, Route
from dataparallel.tools.monitor.site import routes
from tests.monitor.cases import PID, make_device, make_run, make_sample, samples

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
    """The answer, with its status, headers and body."""
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
        assert ask(machine, "/api/samples", method=method).status == 501
    for path in ("/nothing", "/page/page.js", "/../pyproject.toml", "/api/"):
        reply = ask(machine, path)
        assert reply.status == 404 and b"there are /" in reply.body
    page = Path(serve_command.__file__).with_name("page")
    assert "MIT License" in (page / "uPlot.LICENSE").read_text()


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "text/plain; version="),
        ("application/openmetrics-text; version=1.0.0", "application/o"),
    ],
)
def test_metrics_are_those_of_prometheus(machine: MonitorServer, accept: str, kind: str) -> None:
    reply = ask(machine, "/metrics", Accept=accept)
    assert reply.headers["Content-Type"].startswith(kind)
    assert reply.body.endswith(b"# EOF\n") == bool(accept)
    names = {one.name for one in parser.text_string_to_metric_families(reply.body.decode())}
    assert "dataparallel_device_power_watts" in names


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
    assert sample["shares"][1]["idle"] == pytest.approx(0.353, abs=0.01)
    assert point["devices"]["cuda:3"][0] is None
    # Six steps a second, of 104 samples each.
    assert point["speed"] == pytest.approx(624)


def test_what_json_has_not_is_null_and_of_a_run_that_is_gone_the_last_stays() -> None:
    store = SampleStore()
    odd = HostReading(math.inf, 1, 1.0, 1.0)
    store.feed([make_sample(0), make_sample(5, run=None, cost=math.nan, host=odd)])
    found = json.loads(store.after(0), parse_constant=pytest.fail)
    assert found["sample"]["host"]["utilization"] is None
    assert (found["sample"]["run"]["num_steps"], found["sample"]["gone"]) == (1000, 5.0)
    assert found["finished"]


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
    for path in ("/", "/api/samples", "/metrics"):
        reply = ask(machine, path, Host=host)
        assert reply.status == status
        assert b"cuda" not in reply.body or status == 200


def test_other_interfaces_have_any_name() -> None:
    with site(host="0.0.0.0", for_anyone=True) as server:
        assert not server.is_loopback
        assert ask(server, "/api/about", Host="gpu-box:8377").status == 200


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
                reply = ask(server, path + query, **headers)
                assert (reply.status, b"cuda" in reply.body) == (401, False)
                assert reply.headers["WWW-Authenticate"].startswith("Bearer")
            query, headers = how("gehéim ü")
            wanted = 404 if path == "/nothing" else 200
            assert ask(server, path + query, **headers).status == wanted
        assert {ask(server, path).status for path in PAGE} == {200}


# --- faults ------------------------------------------------------------------------------------


def test_an_address_that_cannot_be_used_is_told(machine: MonitorServer) -> None:
    used = ("127.0.0.1", machine.server_port)
    for host, port in (used, ("no-such-host.invalid", 0), ("192.0.2.1", 0)):
        with pytest.raises(ValueError, match=f"cannot serve at port {port} of {host}: .*--port 0"):
            MonitorServer(host, port, {}, token="geheim")


@pytest.mark.parametrize("said", [b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01 \xff\r\n\r\n"])
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

    deadline = 0.3
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


class Failing(Sampler):
    """Gives one sample, and then breaks."""

    is_closed = False

    def samples(self) -> Iterator[Sample]:
        yield make_sample()
        raise OSError("the device is gone")

    def close(self) -> None:
        super().close()
        self.is_closed = True


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    """What breaks after one sample takes the place of what is asked for."""
    sampler = Failing([])
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


#: Words of the command and the token of the environment; the status, and what is told and not.
COMMANDS: list[tuple[str, str | None, int, str, str]] = [
    # The loopback address needs no token, by whatever name.
    ("--host localhost", None, 1, r"metrics: http://127.0.0.1:\d+", "token:|warning"),
    ("", None, 1, r"sampling has failed: OSError\('the device is gone'\)", "token:|warning"),
    *(
        (f"--host {host}", None, 2, f"whoever reaches {host} could read .*_TOKEN.*--no-tok", "page")
        for host in ("0.0.0.0", "::", "192.0.2.1")
    ),
    ("--host 0.0.0.0", "geheim", 1, "token:   needed", "geheim|warning"),
    ("--host 0.0.0.0 --no-token", "geheim", 1, r"everyone who reaches http://\S+:\d+/ m", "token:"),
    ("--token geheim --no-token", None, 2, "--no-token: not allowed with argument --tok", "page"),
    ("--token=", None, 2, "the token is empty", "page"),
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
    failing: Failing,
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
    assert failing.is_closed == (status == 1)


# --- the page, in Chromium that is driven over a pipe by its DevTools protocol ------------------

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
#: In CI it is never skipped: there the browser is installed beforehand.
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("CI"), reason="needs chromium to look at the page"
)


class Browser:
    """One page; ``errors`` are exceptions, errors on the console, and dialogs."""

    def __init__(self) -> None:
        assert CHROMIUM is not None, "there is no Chromium: apt-get install chromium"
        self.errors: list[str] = []
        self._profile = tempfile.mkdtemp(prefix="dp-browser")
        self._in, theirs_out = os.pipe()
        theirs_in, self._out = os.pipe()
        # Its numbers are fixed: it reads from 3 and writes to 4.
        words = 'exec "$0" --headless --no-sandbox --disable-gpu --disable-dev-shm-usage "$@" '
        words += f"--disable-background-networking --no-first-run 3<&{theirs_in} 4>&{theirs_out}"
        options = ["--remote-debugging-pipe", f"--user-data-dir={self._profile}"]
        self._process = subprocess.Popen(
            ["bash", "-c", words, CHROMIUM, *options],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer = b""
        self._number = 0
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._process.kill()
        self._process.wait(timeout=10)
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol, and wait for its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._in], [], [], 30)[0], "Chromium does not answer"
            more = os.read(self._in, 1 << 20)
            assert more, "Chromium has gone"
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        data = message.get("params", {})
        level = data.get("type") or data.get("entry", {}).get("level")
        failed = ("Runtime.exceptionThrown", "Page.javascriptDialogOpening")
        if message.get("method") in failed or level in ("error", "warning"):
            self.errors.append(text.decode())
        return message

    def tell(self, expression: str) -> Any:
        """The value of an expression in the page."""
        options = {"returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in answer, (expression, answer)
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        return str(self.tell(text_of(selector)))

    def wait(self, expression: str) -> None:
        """Wait until an expression is true in the page."""
        deadline = time.monotonic() + 15
        while not self.tell(expression):
            if time.monotonic() > deadline:
                raise AssertionError(f"never true: {expression}; {self.text('body')}")
            # Lets the page go on; also reads what it has to say.
            self.tell("new Promise((done) => setTimeout(done, 20))")

    def open(self, url: str, width: int = 1440, theme: str = "dark") -> None:
        """Go to an address, in a window of this width."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Page.navigate", url=url)


def text_of(selector: str) -> str:
    return f"(document.querySelector({selector!r})?.innerText ?? '')"


LIVE = f"{text_of('#status')}.startsWith('live')"
ROWS = "document.querySelectorAll('#devices .table tbody tr').length"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    chromium.errors.clear()
    return chromium


@needs_chromium
def test_numbers_charts_and_phases_are_drawn_and_go_on(browser: Browser) -> None:
    store = SampleStore()
    for one in samples(30):
        store.add(one)
    with site(store) as server:
        browser.open(server.url)
        browser.wait(LIVE)
        # A legend per chart, with the latest values; nobody knows the power of parts.
        legends = "[...document.querySelectorAll('#devices .u-legend')].map((one) => one.innerText)"
        browser.wait(f"{legends}.length == 3 && {legends}[2].includes('700 W')")
        use, memory, power = browser.tell(legends)
        assert "cuda:0" in use and "82 %" in use and "cuda:3" not in use
        assert "nvml:3:0" in memory and "12.0 GiB" in memory and "nvml" not in power
        painted = (
            "[...document.querySelectorAll('canvas')].map((one) => one.getContext('2d')"
            ".getImageData(0, 0, one.width, one.height).data.some((value) => value > 0))"
        )
        assert browser.tell(painted) == [True] * 5
        # Six steps a second, of 104 samples each.
        for selector, told in (
            ("#devices .table tbody tr", "cuda:0|48.0 GiB of 80.0 GiB|of 700 W|55 °C|replica 0"),
            ("#alerts", "cuda:2 cannot be read: GPU is lost|cuda:1 is hot"),
            ("#notes", "NVLink counters need a driver"),
            ("#processes", "python train.py --epochs 90|n/a"),
            ("#host", "43 % of 64 processors"),
            ("#run h2", "DistributedDataParallel(TransformerLM)|step 1,174"),
            ("#shares", "replica 0 on cuda:0, now forward, speed 52 % of the fastest"),
            ("#run .split", "1174, train, 104 samples, 170 ms"),
            ("#run .charts", "624 /s"),
        ):
            text = browser.text(selector)
            assert [one for one in told.split("|") if one not in text] == [], text
        label = "document.querySelector('#shares div:nth-child(2) .bar').getAttribute('aria-label')"
        assert "forward 12 %, loss 2 %, backward 24 %" in browser.tell(label)
        bars = "[...document.querySelectorAll('#last .replica:nth-child(2) i')].map((i) => i.title)"
        assert browser.tell(bars)[2:4] == ["forward 20 ms", "loss 4 ms"]
        # The next sample comes by itself, and has another device alone.
        store.add(make_sample(30, devices=(make_device(0, {"temperature": 77.0}),)))
        browser.wait(f"{text_of('#devices')}.includes('77 °C')")
        assert browser.tell(ROWS) == 1
        assert "cuda:1" not in browser.tell(legends)[0]
    assert browser.errors == []


EVIL = "<img src=x onerror=\"document.title='broken into'\"><script>document.title='too'</script>"


@needs_chromium
def test_text_from_outside_stays_text(browser: Browser) -> None:
    run = make_run()
    info = dataclasses.replace(run.info, model=EVIL, devices=(EVIL,) * 4)
    store = SampleStore()
    store.add(
        make_sample(
            devices=(
                DeviceReading(EVIL, EVIL, EVIL, EVIL, {"utilization": 0.5}, (EVIL,), EVIL, EVIL),
            ),
            processes=(ProcessReading(EVIL, PID, EVIL, EVIL, 1.0),),
            host=HostReading(0.5, 2, 1.0, 2.0, {EVIL: 0.5}),
            run=dataclasses.replace(run, info=info),
            notes=(EVIL,),
        )
    )
    with site(store) as server:
        browser.open(server.url)
        browser.wait("document.querySelector('tbody td') !== null")
        assert browser.text("body").count(EVIL) > 10
        assert browser.tell("document.querySelectorAll('img, body script').length") == 0
        assert browser.tell("document.title") == "dataparallel monitor"
        # And if it were more than text: the server's policy lets it do nothing.
        browser.tell(
            "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"evil = 1\">')"
        )
        browser.wait(
            "performance.getEntriesByType('resource').some((one) => one.name.endsWith('/x'))"
        )
        assert browser.tell("typeof evil") == "undefined"


@needs_chromium
def test_a_server_that_goes_and_comes_back(browser: Browser) -> None:
    with site() as server:
        port = server.server_port
        browser.open(server.url)
        browser.wait(f"{text_of('#status')} == 'end of the recording'")
    browser.wait(f"{text_of('#status')} == 'not connected'")
    assert "has not answered for" in browser.text("#alarm")
    # Its samples may be older: it plays back a recording.
    other = SampleStore()
    other.add(make_sample(0, devices=(DeviceReading("cpu", "another machine", "cpu"),)))
    with site(other, port=port):
        browser.wait(f"{text_of('#devices')}.includes('another machine')")
        browser.wait(LIVE)
        assert browser.tell("document.querySelector('#alarm').hidden")
        assert browser.tell(ROWS) == 1


@needs_chromium
def test_the_token_of_the_address_is_taken_and_another_is_asked_for(browser: Browser) -> None:
    store = SampleStore()
    store.add(make_sample(0))
    with site(store, token="gehéim") as server:
        browser.open(f"{server.url}?token=wrong")
        browser.wait("document.querySelector('#ask')?.hidden === false")
        assert browser.tell("location.search") == ""
        assert browser.tell(ROWS) == 0
        assert "not the token" in browser.text("#alarm")
        browser.tell(
            "document.querySelector('#token').value = 'gehéim';"
            "document.querySelector('#ask').requestSubmit()"
        )
        browser.wait(LIVE)
        assert browser.tell("document.querySelector('#ask').hidden")
        assert browser.tell("document.querySelector('#alarm').hidden")
        # It is remembered as long as the tab is open.
        browser.open(server.url)
        browser.wait(f"{ROWS} > 5")


@needs_chromium
@pytest.mark.parametrize(
    ("width", "theme", "color"),
    [(360, "light", "rgb(243, 245, 248)"), (1440, "dark", "rgb(16, 21, 28)")],
)
def test_it_fits_and_can_be_read(browser: Browser, width: int, theme: str, color: str) -> None:
    with site() as server:
        browser.open(server.url, width, theme)
        browser.wait("document.querySelectorAll('.u-legend').length == 5")
        assert browser.tell("document.documentElement.scrollWidth") <= width
        wide = "[...document.querySelectorAll('figure, figure *')].filter((one) => {"
        wide += " const card = one.closest('figure').getBoundingClientRect();"
        wide += " return one.getBoundingClientRect().right > card.right + 1; }).length"
        browser.wait(f"{wide} == 0")
        assert browser.tell("getComputedStyle(document.body).backgroundColor") == color
