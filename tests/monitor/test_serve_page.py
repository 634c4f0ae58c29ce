"""The page of ``monitor serve`` in a real browser."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import pytest

from dataparallel.tools.monitor.reading import DeviceReading, HostReading, ProcessReading, Sample
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


def test_numbers_and_charts_are_drawn_and_go_on(browser: Browser) -> None:
    store = SampleStore()
    for sample in samples(30):
        store.add(sample)
    browser.errors.clear()
    with site(store) as server:
        browser.resize(1440, 900)
        browser.open(server.url)
        browser.wait(f"{text_of('#status')}.startsWith('live')")
        card = browser.tell(text_of("[aria-label='cuda:0']"))
        for part in ("Utilization", "48.0 GiB\nof 80.0 GiB", "of 700 W", "55 °C", "replica 0"):
            assert part in card
        lines = "document.querySelectorAll('.card .line[d*=L]').length"
        # Three each, less an unknown utilization; parts have memory only; two of the host.
        assert browser.tell(lines) == 8 * 3 - 1 + 2 + 2
        label = browser.tell("document.querySelector('.card svg').getAttribute('aria-label')")
        assert label.startswith("Utilization of cuda:0: now ") and "in the last 29" in label
        order = "[...document.querySelectorAll('#devices h3')].map((h) => h.innerText)"
        assert browser.tell(order)[5:8] == ["cuda:5", "nvml:5/0", "nvml:5/1"]
        alerts = browser.tell(text_of("#alerts"))
        assert "cuda:4 cannot be read: GPU is lost" in alerts
        assert "cuda:1 is hot" in alerts
        assert "NVLink counters need a driver" in browser.tell(text_of("#notes"))
        assert "python train.py --epochs 90" in browser.tell(text_of("#processes"))
        assert browser.tell(text_of("#processes tbody tr:last-child")).count("n/a") == 6
        # The next sample comes by itself.
        device = make_sample(30).devices[0]
        new = dataclasses.replace(device, values={**device.values, "temperature": 77.0})
        store.add(make_sample(30, devices=(new,)))
        browser.wait(f"{text_of('#devices')}.includes('77 °C')")
        assert browser.tell("document.querySelectorAll('#devices .card').length") == 1
    assert browser.errors == []


def with_a_long_past(sample: Sample) -> Sample:
    """Before the time shown the run waited for its input only."""
    assert sample.run is not None
    totals = tuple({**one, "input": one["input"] + 9000.0} for one in sample.run.totals)
    return dataclasses.replace(sample, run=dataclasses.replace(sample.run, totals=totals))


def test_phases_of_the_replicas(browser: Browser) -> None:
    store = SampleStore()
    store.feed(map(with_a_long_past, samples(10)))
    with site(store) as server:
        browser.open(server.url)
        browser.wait(f"{text_of('#status')} == 'end of the recording'")
        facts = browser.tell(text_of("#run .facts"))
        assert "DistributedDataParallel(TransformerLM)" in facts and "step 1,054" in facts
        label = "document.querySelector('#shares div:nth-child(2) .bar').getAttribute('aria-label')"
        assert "forward 12 %, loss 2 %, backward 24 %" in browser.tell(label)
        assert "idle 35 %" in browser.tell(label)
        shares = browser.tell(text_of("#shares"))
        assert "replica 0\ncuda:0 · now forward · speed 52 % of the fastest" in shares
        bars = (
            "[...document.querySelectorAll('#last .replica')].map((one) =>"
            "[...one.querySelectorAll('rect')].map((bar) => bar.textContent))"
        )
        first, second, *_ = browser.tell(bars)
        assert first[2] == "forward: 40.0 ms, from 10.0 ms"
        assert second[2:4] == ["forward: 20.0 ms, from 10.0 ms", "idle: 20.0 ms, from 30.0 ms"]
        assert browser.tell(text_of("#last-title")).endswith("1054, train, 104 samples, 170 ms")
        # Six steps a second, of 104 samples each.
        assert "624 /s" in browser.tell(text_of(".run-charts"))


def test_the_pointer_tells_the_values_of_a_time(browser: Browser) -> None:
    store = SampleStore()
    for tick in range(11):
        busy = {"utilization": tick / 10}
        store.add(make_sample(tick, devices=(DeviceReading("cpu", "CPU", "cpu", None, busy),)))
    with site(store) as server:
        browser.open(server.url)
        browser.wait("document.querySelector('#devices .line[d*=L]') !== null")
        value = text_of("#devices figcaption b")
        assert browser.tell(value) == "100 %"
        browser.tell(
            "{ const chart = document.querySelector('#devices svg');"
            "const box = chart.getBoundingClientRect();"
            "const clientX = box.left + 0.3 * box.width;"
            "chart.dispatchEvent(new PointerEvent('pointermove', { clientX })); }"
        )
        assert browser.tell(value) == "30 %"
        browser.tell(
            "document.querySelector('#devices svg').dispatchEvent(new Event('pointerleave'))"
        )
        assert browser.tell(value) == "100 %"


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
    store.add(make_sample(0))
    with site(store) as server:
        port = server.server_port
        browser.open(server.url)
        browser.wait(f"{text_of('#status')}.startsWith('live')")
    browser.wait(f"{text_of('#status')} == 'not connected'")
    assert "has not answered for" in browser.tell(text_of("#alarm"))
    other = SampleStore()
    other.add(make_sample(0, devices=(DeviceReading("cpu", "another machine", "cpu"),)))
    with site(other, port):
        browser.wait(f"{text_of('#devices')}.includes('another machine')")
        browser.wait(f"{text_of('#status')}.startsWith('live')")
        assert browser.tell("document.querySelector('#alarm').hidden")
        assert browser.tell("document.querySelectorAll('#devices .card').length") == 1


def test_the_token_of_the_address_is_taken_and_another_is_asked_for(browser: Browser) -> None:
    store = SampleStore()
    store.add(make_sample(0))
    with site(store, token="gehéim") as server:
        browser.open(f"{server.url}?token=wrong")
        browser.wait("document.querySelector('#ask')?.hidden === false")
        assert browser.tell("location.search") == ""
        assert browser.tell("document.querySelectorAll('.card').length") == 0
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
        browser.wait("document.querySelectorAll('.card').length > 5")


@pytest.mark.parametrize(("width", "theme"), [(360, "light"), (1440, "dark")])
def test_it_fits_and_can_be_read(browser: Browser, width: int, theme: str) -> None:
    store = SampleStore()
    store.feed(samples(3))
    with site(store) as server:
        browser.resize(width, 800, theme)
        browser.open(server.url)
        browser.wait("document.querySelectorAll('.card').length > 5")
        assert browser.tell("document.documentElement.scrollWidth") <= width
        wide = "[...document.querySelectorAll('.card, .card *')].filter((one) => {"
        wide += " const card = one.closest('.card').getBoundingClientRect();"
        wide += " return one.getBoundingClientRect().right > card.right + 1; }).length"
        assert browser.tell(wide) == 0
        back = "getComputedStyle(document.body).backgroundColor"
        assert (
            browser.tell(back) == {"light": "rgb(243, 245, 248)", "dark": "rgb(16, 21, 28)"}[theme]
        )
        unnamed = "[...document.querySelectorAll('svg, meter')].filter((one) =>"
        unnamed += " !one.closest('[hidden]') && !one.getAttribute('aria-label')).length"
        assert browser.tell(unnamed) == 0
