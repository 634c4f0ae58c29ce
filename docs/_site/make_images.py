"""Make the images of docs/images: a job with two ranks on four virtual devices, light and dark.

make images

It takes a minute and needs Chromium (`apt-get install chromium`, or
`python -m playwright install chromium`) and the package `playwright`, which `make images` installs.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import os
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

import torch
from PIL import Image
from playwright.sync_api import sync_playwright
from torch import nn

import dataparallel as dp
from dataparallel.monitor import StepMonitor
from dataparallel.monitor.sample import Sample
from dataparallel.tools.monitor import plot
from dataparallel.tools.monitor.palette import DARK, LIGHT
from dataparallel.tools.monitor.recording import read_recording
from dataparallel.tools.monitor.top_app import TopApp
from dataparallel.tools.monitor.view import View

IMAGES = Path(__file__).parents[1] / "images"
#: The second size is that of a phone.
SIZES = {"": (1280, 900), "-phone": (390, 844)}
THEMES = ("light", "dark")
SECONDS = 45


class ConvNet(nn.Module):
    """Small enough for two cores."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4)),
            *(nn.Flatten(), nn.Linear(48 * 16, 10)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(x)
        return logits


def train() -> None:
    """One rank: two of four devices, until it is ended. The second one loads slowly later on."""
    dp.virtual.enable(4)
    dp.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    devices = [f"virtual:{2 * rank}", f"virtual:{2 * rank + 1}"]
    torch.manual_seed(0)
    model = dp.DistributedDataParallel(ConvNet().to(devices[0]), devices)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    x, y = torch.randn(96, 3, 32, 32), torch.randint(10, (96,))
    begin = time.monotonic()
    with StepMonitor(model):
        while True:
            if rank and time.monotonic() - begin > SECONDS / 2:
                time.sleep(0.15)
            loss = model.loss(nn.functional.cross_entropy, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@contextlib.contextmanager
def started(*words: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A Python that is ended at the end of the ``with`` block."""
    # By a short name: `top` shows the command.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    process = subprocess.Popen(
        ["python", *words],
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
        app = TopApp(View(interval=0.5), deque(samples), lambda: True, is_live=False)
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
        monitor = ("-m", "dataparallel", "monitor")
        # Only this job is watched.
        place = {"DATAPARALLEL_MONITOR_DIR": folder}
        job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **place}
        job |= {"MASTER_PORT": "29731"}
        ranks = [
            running.enter_context(
                started(os.path.relpath(__file__), "train", RANK=rank, LOCAL_RANK=rank, **job)
            )
            for rank in ("0", "1")
        ]
        while len(list(Path(folder).glob("*.sock"))) < len(ranks):
            assert all(rank.poll() is None for rank in ranks)
            time.sleep(0.5)
        watch = ("--attach", "auto", "--interval", "0.5")
        server = running.enter_context(started(*monitor, "serve", "--port", "0", *watch, **place))
        assert server.stdout is not None
        url = re.findall(r"http://\S+", server.stdout.readline())[0]
        record = [*monitor, "record", str(recording), "--for", str(SECONDS), *watch]
        subprocess.run([sys.executable, *record], env={**os.environ, **place}, check=True)
        take_pictures(url)
        recorded = read_recording(recording)
        # At once, so that none complains of another one.
        for rank in ranks:
            rank.kill()
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
    if sys.argv[1:] == ["train"]:
        with contextlib.suppress(KeyboardInterrupt):
            train()
    else:
        main()
