"""Make the images of docs/images: of a job with two ranks on four virtual devices, light and dark.

make images

It takes a minute and needs Chromium (`apt-get install chromium`, or
`python -m playwright install chromium`) and the package `playwright`, which `make images` installs.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import dataparallel as dp
from dataparallel.monitor import StepMonitor

IMAGES = Path(__file__).with_name("images")
#: The second size is that of a phone.
SIZES = {"": (1280, 900), "-phone": (390, 844)}
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
    """One rank: two of four devices, until it is ended. Loading takes longer from time to time."""
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
            if time.monotonic() - begin > SECONDS / 2:
                time.sleep(0.04)
            loss = model.loss(nn.functional.cross_entropy, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@contextlib.contextmanager
def started(*words: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A Python that is ended at the end of the ``with`` block."""
    process = subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def take_pictures(url: str) -> None:
    """The page on all screens; an error of it ends this."""
    from playwright.sync_api import sync_playwright

    errors: list[str] = []
    with sync_playwright() as playwright:
        # Without one of the system, playwright's own; it tells how to install that.
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for theme in ("light", "dark"):
            for screen, (width, height) in SIZES.items():
                page = browser.new_page(
                    viewport={"width": width, "height": height},
                    color_scheme="dark" if theme == "dark" else "light",
                    device_scale_factor=1.5,
                )
                page.on("pageerror", lambda error: errors.append(str(error)))
                page.goto(url)
                page.get_by_text("Rank 1").first.wait_for()
                page.locator("figcaption b", has_text="samples/s").wait_for()
                page.screenshot(
                    path=IMAGES / f"monitor-page{screen}-{theme}.png", full_page=not screen
                )
    assert not errors, errors


def main() -> None:
    """Train, record and serve; take pictures of all of it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        recording = Path(folder) / "run.jsonl"
        monitor = ("-m", "dataparallel", "monitor")
        # Only this job is watched.
        place = {"DATAPARALLEL_MONITOR_DIR": folder}
        job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **place}
        job |= {"MASTER_PORT": "29731"}
        for rank in ("0", "1"):
            running.enter_context(started(__file__, "train", RANK=rank, LOCAL_RANK=rank, **job))
        while len(list(Path(folder).glob("*.sock"))) < 2:
            time.sleep(0.5)
        watch = ("--attach", "auto", "--interval", "0.5")
        server = running.enter_context(started(*monitor, "serve", "--port", "0", *watch, **place))
        assert server.stdout is not None
        url = re.findall(r"http://\S+", server.stdout.readline())[0]
        record = [*monitor, "record", str(recording), "--for", str(SECONDS), *watch]
        subprocess.run([sys.executable, *record], env={**os.environ, **place}, check=True)
        take_pictures(url)
        for theme, options in (("light", []), ("dark", ["--dark"])):
            picture = str(IMAGES / f"monitor-plot-{theme}.png")
            plot = [*monitor, "plot", str(recording), picture, *options]
            subprocess.run([sys.executable, *plot], check=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["train"]:
        with contextlib.suppress(KeyboardInterrupt):
            train()
    else:
        main()
