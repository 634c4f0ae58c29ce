"""The page of ``monitor serve`` in a real browser."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import pytest

from dataparallel.tools.monitor.reading import DeviceReading, HostReading, ProcessReading
from dataparallel.tools.monitor.sample_store import SampleStore
from dataparallel.tools.monitor.serve_command import serving
from dataparallel.tools.monitor.server import MonitorServer
from dataparallel.tools.monitor.site import routes
from tests.monitor.browser import CHROMIUM, Browser
from tests.monitor.made_up_machine import PID, make_run, make_sample, samples

# In CI it is never skipped: there the browser is installed beforehand.
pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("CI"), reason="needs chromium to look at the page"
)

#: So often the page asks in the tests, in seconds.
INTERVAL = 0.25


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


@contextlib.contextmanager
def site(store: SampleStore, port: int = 0, token: str | None = None) -> Iterator[MonitorServer]:
    pages = routes(store, INTERVAL)
    with MonitorServer("127.0.0.1", port, pages, token=token) as server, serving(server):
        yield server


def text_of(selector: str) -> str:
    return f"(document.querySelector({selector!r})?.innerText ?? '')"


def test_numbers_charts_and_phases_are_drawn_and_go_on(browser: Browser) -> None:
    store = SampleStore()
    for sample in samples(30):
        store.add(sample)
    browser.errors.clear()
    with site(store) as server:
        browser.resize(1440, 900)
        browser.open(server.url)
        browser.wait(f"{text_of('#status')}.startsWith('live')")
        row = browser.tell(text_of("#devices .table tbody tr"))
        for part in (
            "cuda:0",
            "48.0 GiB of 80.0 GiB",
            "of 700 W",
            "55 °C",
            "replica 0",
            "sm clock",
        ):
            assert part in row
        # A legend per chart, with the latest values; nobody knows the power of parts.
        legends = "[...document.querySelectorAll('#devices .u-legend')].map((one) => one.innerText)"
        browser.wait(f"{legends}.length == 3 && {legends}[2].includes('700 W')")
        use, memory, power = browser.tell(legends)
        assert "cuda:0" in use and "100 %" in use and "cuda:5" not in use
        assert "nvml:5/0" in memory and "12.0 GiB" in memory and "nvml" not in power
        painted = (
            "[...document.querySelectorAll('canvas')].map((one) => one.getContext('2d')"
            ".getImageData(0, 0, one.width, one.height).data.some((value) => value > 0))"
        )
        assert browser.tell(painted) == [True] * 5
        alerts = browser.tell(text_of("#alerts"))
        assert "cuda:4 cannot be read: GPU is lost" in alerts and "cuda:1 is hot" in alerts
        assert "NVLink counters need a driver" in browser.tell(text_of("#notes"))
        assert "python train.py --epochs 90" in browser.tell(text_of("#processes"))
        assert browser.tell(text_of("#processes tbody tr:last-child")).count("n/a") == 6
        assert "43 % of 64 processors" in browser.tell(text_of("#host"))
        # The run.
        facts = browser.tell(text_of("#run h2"))
        assert "DistributedDataParallel(TransformerLM)" in facts and "step 1,174" in facts
        label = "document.querySelector('#shares div:nth-child(2) .bar').getAttribute('aria-label')"
        assert "forward 12 %, loss 2 %, backward 24 %" in browser.tell(label)
        assert "idle 35 %" in browser.tell(label)
        shares = browser.tell(text_of("#shares"))
        assert "replica 0 on cuda:0, now forward, speed 52 % of the fastest" in shares
        bars = "[...document.querySelectorAll('#last .replica:nth-child(2) i')].map((i) => i.title)"
        assert browser.tell(bars)[2:4] == ["forward 20 ms", "idle 20 ms"]
        assert browser.tell(text_of("#run .split")).count("1174, train, 104 samples, 170 ms") == 1
        # Six steps a second, of 104 samples each.
        assert "624 /s" in browser.tell(text_of("#run .charts"))
        # The next sample comes by itself, and brings another device.
        device = make_sample(30).devices[0]
        new = dataclasses.replace(device, values={**device.values, "temperature": 77.0})
        store.add(make_sample(30, devices=(new,)))
        browser.wait(f"{text_of('#devices')}.includes('77 °C')")
        assert browser.tell("document.querySelectorAll('#devices .table tbody tr').length") == 1
        assert "cuda:1" not in browser.tell(legends)[0]
    assert browser.errors == []


def test_the_pointer_tells_the_values_of_a_time(browser: Browser) -> None:
    store = SampleStore()
    for tick in range(11):
        busy = {"utilization": tick / 10}
        store.add(make_sample(tick, devices=(DeviceReading("cpu", "CPU", "cpu", None, busy),)))
    with site(store) as server:
        browser.resize(1440, 900)
        browser.open(server.url)
        legend = text_of("#devices .u-legend")
        browser.wait(f"{legend}.includes('100 %')")
        browser.tell("document.querySelector('#devices figure').scrollIntoView()")
        over = "document.querySelector('#devices .u-over').getBoundingClientRect()"
        box = browser.tell(f"{over}.toJSON()")
        x, y = box["x"] + 0.3 * box["width"], box["y"] + box["height"] / 2
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        browser.wait(f"{legend}.includes('30 %')")


EVIL = "<img src=x onerror=\"document.title='broken into'\"><script>document.title='too'</script>"


def test_text_from_outside_stays_text(browser: Browser) -> None:
    run = make_run()
    info = dataclasses.replace(run.info, model=EVIL, devices=(EVIL,) * 4)
    device = DeviceReading(EVIL, EVIL, EVIL, EVIL, {"utilization": 0.5}, (EVIL,), EVIL, EVIL)
    sample = make_sample(
        devices=(device,),
        processes=(ProcessReading(EVIL, PID, EVIL, EVIL, 1.0),),
        host=HostReading(0.5, 2, 1.0, 2.0, {EVIL: 0.5}),
        run=dataclasses.replace(run, info=info),
        notes=(EVIL,),
    )
    store = SampleStore()
    store.add(sample)
    browser.errors.clear()
    with site(store) as server:
        browser.open(server.url)
        browser.wait("document.querySelector('tbody td') !== null")
        shown = browser.tell("document.body.innerText")
        assert shown.count(EVIL) > 10
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


def test_a_server_that_goes_and_comes_back(browser: Browser) -> None:
    store = SampleStore()
    store.add(make_sample(5))
    with site(store) as server:
        port = server.server_port
        browser.open(server.url)
        browser.wait(f"{text_of('#status')}.startsWith('live')")
    browser.wait(f"{text_of('#status')} == 'not connected'")
    assert "has not answered for" in browser.tell(text_of("#alarm"))
    # Its samples may be older: it plays back a recording.
    other = SampleStore()
    other.add(make_sample(0, devices=(DeviceReading("cpu", "another machine", "cpu"),)))
    with site(other, port):
        browser.wait(f"{text_of('#devices')}.includes('another machine')")
        browser.wait(f"{text_of('#status')}.startsWith('live')")
        assert browser.tell("document.querySelector('#alarm').hidden")
        assert browser.tell("document.querySelectorAll('#devices tbody tr').length") == 1


def test_the_token_of_the_address_is_taken_and_another_is_asked_for(browser: Browser) -> None:
    store = SampleStore()
    store.add(make_sample(0))
    rows = "document.querySelectorAll('#devices .table tbody tr').length"
    with site(store, token="gehéim") as server:
        browser.open(f"{server.url}?token=wrong")
        browser.wait("document.querySelector('#ask')?.hidden === false")
        assert browser.tell("location.search") == ""
        assert browser.tell(rows) == 0
        assert "not the token" in browser.tell(text_of("#alarm"))
        browser.tell(
            "document.querySelector('#token').value = 'gehéim';"
            "document.querySelector('#ask').requestSubmit()"
        )
        browser.wait(f"{text_of('#status')}.startsWith('live')")
        assert browser.tell("document.querySelector('#ask').hidden")
        assert browser.tell("document.querySelector('#alarm').hidden")
        # It is remembered as long as the tab is open.
        browser.open(server.url)
        browser.wait(f"{rows} > 5")


@pytest.mark.parametrize(("width", "theme"), [(360, "light"), (1440, "dark")])
def test_it_fits_and_can_be_read(browser: Browser, width: int, theme: str) -> None:
    store = SampleStore()
    store.feed(samples(3))
    with site(store) as server:
        browser.resize(width, 800, theme)
        browser.open(server.url)
        browser.wait(f"{text_of('#status')} == 'end of the recording'")
        browser.wait("document.querySelectorAll('.u-legend').length == 5")
        assert browser.tell("document.documentElement.scrollWidth") <= width
        wide = "[...document.querySelectorAll('figure, figure *')].filter((one) => {"
        wide += " const card = one.closest('figure').getBoundingClientRect();"
        wide += " return one.getBoundingClientRect().right > card.right + 1; }).length"
        browser.wait(f"{wide} == 0")
        back = "getComputedStyle(document.body).backgroundColor"
        colors = {"light": "rgb(243, 245, 248)", "dark": "rgb(16, 21, 28)"}
        assert browser.tell(back) == colors[theme]
