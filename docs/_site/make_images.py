"""Make the images of docs/images: a job with two ranks on eight GPUs, light and dark.

make images

The job trains on virtual devices; what is read of the GPUs comes from the stand-in for NVIDIA's
library that the tests use. It takes a minute and needs Chromium (`apt-get install chromium`, or
`python -m playwright install chromium`) and the package `playwright`, which `make images` installs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pynvml
from PIL import Image
from playwright.sync_api import sync_playwright

from dataparallel.monitor.attach import Answers, ask
from dataparallel.monitor.readings.host import HostReader
from dataparallel.monitor.readings.nvml import NvmlSource
from dataparallel.monitor.run import RunState
from dataparallel.monitor.sample import Sample
from dataparallel.monitor.sampler import Sampler
from dataparallel.tools.monitor import plot
from dataparallel.tools.monitor.palette import DARK, LIGHT
from dataparallel.tools.monitor.recorder import SampleRecorder
from dataparallel.tools.monitor.recording import read_recording
from dataparallel.tools.monitor.run_watch import RunWatch
from dataparallel.tools.monitor.top_app import TopApp
from dataparallel.tools.monitor.view import View
from docs._site.train import NUM_GPUS, NUM_RANKS, SECONDS
from tests.monitor.nvml_stub import EVERYTHING, Device, Stub

IMAGES = Path(__file__).parents[1] / "images"
#: The second size is that of a phone.
SIZES = {"": (1280, 900), "-phone": (390, 844)}
THEMES = ("light", "dark")
INTERVAL = 0.5


class Gpus:
    """The GPUs of a machine, as busy as the ranks that seem to run on them."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._stub = Stub()
        self._stub.devices = [
            Device(i, EVERYTHING, name="NVIDIA H100 80GB HBM3", fields={}) for i in range(NUM_GPUS)
        ]
        vars(pynvml)["CDLL"] = {"libnvidia-ml.so.1": self._stub}.__getitem__

    def answers(self) -> Answers:
        """Ask the ranks, and say that they run on these GPUs."""
        answers = ask(None, 1.0)
        return answers._replace(states=tuple(map(self._moved, answers.states)))

    def _moved(self, state: RunState) -> RunState:
        first = len(state.now) * state.rank
        own = range(first, first + len(state.now))
        is_late = state.rank == 1 and state.time - state.started > SECONDS / 2
        for i in own:
            # Rank 0 waits for rank 1 within a collective, which keeps a GPU busy and cool.
            share = self._random.uniform(0.28, 0.4) if is_late else self._random.uniform(0.86, 0.98)
            gpu = self._stub.devices[i]
            memory = int((46 + i % 3) * 1e9)
            degrees = round(38 + 26 * share + i % 4)
            gpu.processes = [("Compute", state.pid, memory, round(100 * share))]
            gpu.answers |= {
                "UtilizationRates": {"gpu": round(100 * share), "memory": round(60 * share)},
                "MemoryInfo_v2": {"total": 80 * 10**9, "used": memory, "free": 80 * 10**9 - memory},
                "PowerUsage": round(120_000 + 480_000 * share),
                "Temperature 0": degrees,
                "TemperatureV": {"temperature": degrees},
            }
        devices, uuids = zip(*((f"cuda:{i}", f"GPU-{i}") for i in own), strict=True)
        info, last = dataclasses.replace(state.info, devices=devices, uuids=uuids), state.last
        if last is not None:
            pairs = zip(last.replicas, devices, strict=True)
            moved = tuple(dataclasses.replace(replica, device=name) for replica, name in pairs)
            last = dataclasses.replace(last, replicas=moved)
        return dataclasses.replace(state, info=info, last=last)


def record(path: Path) -> None:
    """Record the GPUs and the ranks, as the command does."""
    watch = RunWatch(Gpus().answers)
    host = HostReader(watch.names).read
    sampler = Sampler([NvmlSource()], interval=INTERVAL, host=host, runs=watch)
    with sampler, SampleRecorder(path, about={"interval": INTERVAL}, tell=print) as recorder:
        for sample in itertools.islice(sampler.samples(), round(SECONDS / INTERVAL)):
            recorder.record(sample)


@contextlib.contextmanager
def started(*words: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A Python that is ended at the end of the ``with`` block."""
    # By a short name: `top` shows the command.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    process = subprocess.Popen(
        ["python", *words],
        cwd=Path(__file__).parent,
        env={**os.environ, "PATH": path, **threads, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def draw_top(samples: Sequence[Sample]) -> str:
    """Draw, as SVG, what `top` shows after these samples."""

    async def main() -> str:
        app = TopApp(View(interval=INTERVAL), deque(samples), lambda: True, is_live=False)
        async with app.run_test(size=(120, 36)) as pilot:
            await pilot.pause()
            return app.export_screenshot(title="dataparallel monitor top")

    return asyncio.run(main())


def take_pictures(url: str) -> None:
    """The page on all screens; an error of it ends this."""
    errors: list[str] = []
    with a_browser() as browser:
        for theme, (screen, (width, height)) in itertools.product(THEMES, SIZES.items()):
            page = browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme=theme,
                device_scale_factor=1.5,
            )
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(url)
            page.get_by_text("Rank 1").first.wait_for()
            page.locator("figcaption b", has_text="samples/s").wait_for()
            save(page.screenshot(full_page=not screen), f"monitor-page{screen}-{theme}")
    assert not errors, errors


@contextlib.contextmanager
def a_browser() -> Iterator[Any]:
    """Chromium, for as long as the ``with`` block lasts."""
    with sync_playwright() as playwright:
        # Without one of the system, playwright's own; it tells how to install that.
        path = shutil.which("chromium") or shutil.which("google-chrome")
        yield playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


def save(png: bytes, name: str) -> None:
    """Write an image with 256 colors; this method keeps those of the phases as they are."""
    few = Image.open(io.BytesIO(png)).convert("RGB")
    few = few.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(IMAGES / f"{name}.png", optimize=True)


def main() -> None:
    """Train, record and serve; take pictures of all of it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        recording = Path(folder) / "run.jsonl"
        # Only this job is watched.
        os.environ["DATAPARALLEL_MONITOR_DIR"] = folder
        job = {"WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(NUM_RANKS)}
        job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29731"}
        ranks = [
            running.enter_context(started("train.py", RANK=str(rank), LOCAL_RANK=str(rank), **job))
            for rank in range(NUM_RANKS)
        ]
        while len(list(Path(folder).glob("*.sock"))) < len(ranks):
            assert all(rank.poll() is None for rank in ranks)
            time.sleep(0.5)
        record(recording)
        # At once, so that none complains of another one.
        for rank in ranks:
            rank.kill()
        serve = ("-m", "dataparallel", "monitor", "serve", "--port", "0", "--source")
        server = running.enter_context(started(*serve, str(recording), "--speed", "1000"))
        assert server.stdout is not None
        url = re.findall(r"http://\S+", server.stdout.readline())[0]
        take_pictures(url)
        recorded = read_recording(recording)
    for theme, colors in zip(THEMES, (LIGHT, DARK), strict=True):
        picture = io.BytesIO()
        plot.draw(recorded, theme=colors).savefig(picture, dpi=120)
        save(picture.getvalue(), f"monitor-plot-{theme}")
    # Before there is a browser, which has an event loop of its own.
    svg = draw_top(recorded.samples)
    with a_browser() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 1100})
        page.set_content(svg)
        save(page.locator("svg").screenshot(), "monitor-top")


if __name__ == "__main__":
    main()
