"""The page of `monitor serve` in Chromium; `make browser` runs this, pytest by itself does not."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from dataparallel.monitor.readings.reading import DeviceReading, HostReading, ProcessReading
from dataparallel.monitor.sample import Sample
from dataparallel.threads import Phase
from dataparallel.tools.monitor.sample_store import SampleStore
from tests.monitor.cases import PID, make_device, make_run, make_sample
from tests.monitor.golden import Golden
from tests.monitor.test_serve import TOKEN, ask, site

DESKTOP, PHONE = 1280, 390
#: Each text that has less than the contrast of WCAG 2, with its contrast.
FAINT = """() => {
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const [r, g, b] = parts(color).map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  const ground = (node) => {
    const color = getComputedStyle(node).backgroundColor;
    return (parts(color)[3] ?? 1) > 0 || node.parentElement === null ? color : ground(node.parentElement);
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const text = [...node.childNodes].filter((one) => one.nodeType === 3).map((one) => one.data).join("").trim();
    if (!text || !node.checkVisibility()) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))];
    const contrast = Math.max(a, b) / Math.min(a, b);
    if (contrast < 4.5) found.push([text, contrast]);
  }
  return found;
}"""  # noqa: E501


class Asked(SampleStore):
    """Does something each time when the page asks."""

    def __init__(self, do: Callable[[SampleStore, int], object]) -> None:
        super().__init__()
        self.do = do
        self.number = 0

    def after(self, time: float) -> str:
        self.do(self, self.number)
        self.number += 1
        return super().after(time)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Without one of the system, playwright's own; it tells how to install that.
        path = shutil.which("chromium") or shutil.which("google-chrome")
        yield playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens an address; no page may have complained at the end."""
    complaints: list[str] = []

    def note(message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            complaints.append(message.text)

    def opened(url: str, width: int = DESKTOP, scheme: Any = "light") -> Page:
        page = browser.new_page(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            reduced_motion="reduce",
            timezone_id="UTC",
        )
        page.on("console", note)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        return page

    yield opened
    for context in browser.contexts:
        context.close()
    assert not complaints


def two_ranks(tick: int) -> Sample:
    """Return the machine, whose devices a second rank uses too; it waits for the first."""
    sample = make_sample(tick)
    (first,) = sample.runs
    phases: tuple[Phase, ...] = ("input", "reduce across processes")
    loads, waits = (
        tuple(
            {**each, phase: each.get(phase, 0.0) + 0.1 * first.num_steps}
            for each in first.main.seconds
        )
        for phase in phases
    )
    labels = {"slurm_job": "812", "pod": "train-0"}
    first = dataclasses.replace(first, info=dataclasses.replace(first.info, labels=labels))
    ranks = (
        dataclasses.replace(first, kinds={"train": dataclasses.replace(first.main, seconds=loads)}),
        dataclasses.replace(
            first,
            kinds={"train": dataclasses.replace(first.main, seconds=waits)},
            rank=1,
            pid=PID + 1,
        ),
    )
    threads = {"rank 1 replica-2": 0.95, "rank 1 main": 0.5, "rank 0 main": 0.9}
    return dataclasses.replace(sample, runs=ranks, host=HostReading(0.4, 64, 1.0, 2.0, threads))


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_job_is_shown_whole_on_any_screen(
    open_page: Callable[..., Page], golden: Golden, width: int, scheme: str
) -> None:
    ticks = [0, 1]

    def add(store: SampleStore, number: int) -> None:
        while ticks:
            store.add(two_ranks(ticks.pop(0)))

    with site(Asked(add)) as server:
        page = open_page(server.url, width, scheme)
        expect(page.locator("#jobs h2 small")).to_contain_text("step 1,006")
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        golden("page", {"a job of two ranks": page.locator("body").aria_snapshot()})
        # Equal devices do not hide each other.
        assert page.locator(".device").count() == 5
        assert page.locator(".device canvas").count() == 15
        overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0
        assert page.evaluate(FAINT) == []
        # It asks again by itself.
        ticks.append(2)
        expect(page.locator("#jobs h2 small")).to_contain_text("step 1,012")


def test_a_chart_stays_one_while_ranks_come_and_values_go(open_page: Callable[..., Page]) -> None:
    """Its title changes; a device without a value has no chart of it, and leaves its place free."""

    def add(store: SampleStore, number: int) -> None:
        if number < 2:
            store.add(two_ranks(1) if number else make_sample(0))

    with site(Asked(add)) as server:
        page = open_page(server.url, PHONE)
        expect(page.locator("#jobs figure")).to_contain_text(
            ["Throughput, all ranks", "Step, slow"]
        )
        lost, partly = page.locator(".device").nth(2), page.locator(".device").nth(3)
        assert lost.locator("figure:visible").count() == 0
        assert partly.locator("figure:visible").count() == 2
        above = page.locator(".device").first.locator("figure")
        for place, figure in enumerate(partly.locator("figure").all()[1:], start=1):
            here, there = figure.bounding_box(), above.nth(place).bounding_box()
            assert here is not None and there is not None and here["x"] == there["x"]


def test_on_a_phone_charts_come_first_and_a_command_is_read(open_page: Callable[..., Page]) -> None:
    sample = two_ranks(1)
    command = f"python -m torch.distributed.run {'--option value ' * 40}"
    hot = [make_device(i, {"temperature": 90.0}) for i in range(5, 11)]
    store = SampleStore(shows_commands=True)
    store.add(
        dataclasses.replace(
            sample,
            devices=(*sample.devices, *hot),
            processes=(ProcessReading("cuda:0", PID, "python", command=command),),
        )
    )
    with site(store) as server:
        page = open_page(server.url, PHONE)
        expect(page.locator("#alerts li")).to_have_count(3)
        expect(page.locator("#more summary")).to_have_text("7 more")
        chart, alerts, phases, cell = (
            page.locator(each).first.bounding_box()
            for each in ("#jobs .charts", "#alerts", ".shares", ".table td:nth-child(3) div")
        )
        assert chart and alerts and phases and cell
        assert chart["y"] < alerts["y"] < phases["y"]
        # Three lines of it; the others of its row are a scroll away.
        assert cell["x"] + cell["width"] < PHONE and 50 < cell["height"] < 75
        assert page.evaluate(
            "(({ scrollWidth: a, clientWidth: b }) => a > b)(document.querySelector('.table'))"
        )


def test_charts_obey_the_keyboard(open_page: Callable[..., Page]) -> None:
    with site() as server:
        page = open_page(server.url)
        chart = page.locator("figure").first
        expect(chart).to_contain_text("samples/s")
        chart.focus()
        chart.press("ArrowLeft")
        expect(chart).to_contain_text(re.compile(r"samples/s at \d\d:\d\d:\d\d"))
        chart.press("Escape")
        expect(chart.locator("b")).to_have_text("612 samples/s")


EVIL = "<img src=x onerror=\"document.title='broken into'\"><script>document.title='too'</script>"


def test_text_from_outside_stays_text(open_page: Callable[..., Page]) -> None:
    run = make_run()
    info = dataclasses.replace(run.info, model=EVIL, devices=(EVIL,) * 4)
    store = SampleStore()
    store.add(
        make_sample(
            devices=(DeviceReading(EVIL, EVIL, EVIL, EVIL, {"fan": 0.5}, (EVIL,), EVIL),),
            processes=(ProcessReading(EVIL, PID, EVIL, EVIL, 1.0, command=EVIL),),
            host=HostReading(0.5, 2, 1.0, 2.0, {EVIL: 0.5}),
            runs=(dataclasses.replace(run, info=info, job=EVIL),),
            notes=(EVIL,),
        )
    )
    with site(store) as server:
        page = open_page(server.url)
        expect(page.locator(".device b").first).to_have_text(EVIL)
        served = ask(server, "/").body.decode()
        assert page.content().count("onerror") > 10
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == served.count("<script")
        assert page.title() == "dataparallel monitor"


def test_the_page_takes_the_token_of_the_address_or_asks(open_page: Callable[..., Page]) -> None:
    with site(token=TOKEN) as server:
        page = open_page(f"{server.url}?token={quote(TOKEN)}")
        expect(page.get_by_text("48.0 GiB of 80.0 GiB").first).to_be_visible()
        page = open_page(f"{server.url}?token=wrong")
        expect(page.get_by_text("This is not the token of the server.")).to_be_visible()
        page.locator("#token").fill(TOKEN)
        page.locator("#token").press("Enter")
        expect(page.get_by_text("48.0 GiB of 80.0 GiB").first).to_be_visible()
        expect(page.locator("#ask")).to_be_hidden()


def test_the_page_says_when_the_server_does_not_answer(
    open_page: Callable[..., Page], capfd: pytest.CaptureFixture[str]
) -> None:
    def fail_later(store: SampleStore, number: int) -> None:
        if number:
            raise OSError("out of order")
        store.add(make_sample(devices=(make_device(0),)))

    with site(Asked(fail_later)) as server:
        page = open_page(server.url)
        expect(page.get_by_text("not connected")).to_be_visible()
        expect(page.get_by_text("48.0 GiB of 80.0 GiB")).to_be_visible()
    assert capfd.readouterr().err.count("out of order") == 1
