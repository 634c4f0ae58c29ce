"""Train a character-level transformer on the source text of Python's own standard library."""

from __future__ import annotations

import argparse
import pathlib
import sys
import sysconfig
import time

import matplotlib
import torch
from common import (
    ReplicaClock,
    TrainingProgress,
    choose_devices,
    console,
    describe_run,
    load_checkpoint,
    option_parser,
    save_checkpoint,
    typical_step,
)
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.monitor import StepMonitor, StepRecord
from dataparallel.tools.monitor.step_picture import draw_step

matplotlib.use("Agg")
from matplotlib import pyplot as plt

EPOCHS = 6
CONTEXT = 64
STEPS_PER_EPOCH = 100
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))


def main() -> int:
    """Train, save, reload, plot, write. Returns 1 if nothing beyond pairs of letters was learnt."""
    options = option_parser(
        "train_chars",
        "Train a transformer to write Python, letter by letter.",
        epochs=EPOCHS,
        batch_size=32,
        lr=0.002,
    ).parse_args()
    torch.manual_seed(options.seed)
    train_text, test_text = load_text()
    baselines = {
        "unigram": unigram_loss(train_text, test_text),
        "bigram": bigram_loss(train_text, test_text),
    }
    devices = choose_devices(options.devices)
    net = CharTransformer().to(devices[0])
    clock = ReplicaClock(net)
    console.print(f"{len(train_text):,} letters to learn from")
    describe_run(net, devices)

    model = DataParallel(net, device_ids=devices)
    begin = time.perf_counter()
    with StepMonitor(model) as monitor:
        losses, test_losses = train(model, train_text, test_text, options, clock)
    known = ", ".join(f"{name} {loss:.2f}" for name, loss in baselines.items())
    console.print(
        f"test loss {test_losses[-1]:.2f} nats per letter ({known}) "
        f"after {time.perf_counter() - begin:.1f} s"
    )

    checkpoint = options.output / "chars.safetensors"
    save_checkpoint(checkpoint, model)
    bare = CharTransformer()
    load_checkpoint(checkpoint, bare)
    reloaded = test_loss(bare, test_text)
    console.print(f"{checkpoint}: the bare module with these weights has {reloaded:.2f}")

    plot = options.output / "chars.png"
    draw(plot, losses, test_losses, baselines, typical_step(monitor))
    console.print(f"{plot}: loss, baselines, and what each replica did in one step")
    console.rule("what the model writes")
    console.print(write(bare, "def ", 400), markup=False)
    model.close()
    if abs(reloaded - test_losses[-1]) > 1e-3:
        console.print("[red]the reloaded weights have another loss[/red]")
        return 1
    if options.epochs >= EPOCHS and test_losses[-1] > baselines["bigram"]:
        console.print("[red]a table of letter pairs is better than this model[/red]")
        return 1
    return 0


def train(
    model: DataParallel[CharTransformer],
    text: Tensor,
    test_text: Tensor,
    options: argparse.Namespace,
    clock: ReplicaClock,
) -> tuple[list[float], list[float]]:
    """Train; returns the loss of each step, and the loss on the test text after each epoch."""
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    steps = options.epochs * STEPS_PER_EPOCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, steps)
    test_losses = []
    with TrainingProgress(options.epochs, STEPS_PER_EPOCH, clock) as progress:
        for _ in range(options.epochs):
            model.train()
            for _ in range(STEPS_PER_EPOCH):
                x, y = random_windows(text, options.batch_size)
                # The logits are many times as large as the letters: they stay on their devices.
                loss = model.loss(criterion, x, y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                progress.step(loss, len(x))
            test_losses.append(test_loss(model, test_text))
    return progress.losses, test_losses


# --- text --------------------------------------------------------------------------------------


def load_text() -> tuple[Tensor, Tensor]:
    """The modules at the top of the standard library as indices into the alphabet.

    Returns:
        The text to learn from and the text to test with, a tenth of the modules, each ``(N,)``.
    """
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    index = {letter: i for i, letter in enumerate(ALPHABET)}

    def encode(paths: list[pathlib.Path]) -> Tensor:
        text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
        return torch.tensor([index[letter] for letter in text if letter in index])

    return encode([p for i, p in enumerate(files) if i % 10]), encode(files[::10])


def random_windows(text: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Windows ``(number, CONTEXT)`` of the text, and the letters that follow each position."""
    starts = torch.randint(len(text) - CONTEXT, (number, 1))
    positions = starts + torch.arange(CONTEXT)
    return text[positions], text[positions + 1]


def unigram_loss(train: Tensor, test: Tensor) -> float:
    """Nats per letter of a model that knows how frequent each letter is."""
    counts = torch.bincount(train, minlength=len(ALPHABET)) + 1.0
    return -(counts / counts.sum()).log()[test].mean().item()


def bigram_loss(train: Tensor, test: Tensor) -> float:
    """Nats per letter of a model that knows how often each letter follows each other."""
    size = len(ALPHABET)
    counts = torch.bincount(train[:-1] * size + train[1:], minlength=size**2) + 0.1
    table = counts.reshape(size, size)
    return -(table / table.sum(1, keepdim=True)).log()[test[:-1], test[1:]].mean().item()


# --- model -------------------------------------------------------------------------------------


class CharTransformer(nn.Module):
    """Letters ``(N, T)`` to logits ``(N, alphabet, T)`` of the letter that follows each."""

    def __init__(self, width: int = 128, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(ALPHABET), width)
        self.positions = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(ALPHABET))

    def forward(self, letters: Tensor) -> Tensor:
        length = letters.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=letters.device)
        hidden = self.letters(letters) + self.positions[:length]
        logits: Tensor = self.head(self.encoder(hidden, mask, is_causal=True))
        return logits.transpose(1, 2)


@torch.no_grad()
def test_loss(model: nn.Module, text: Tensor) -> float:
    """Nats per letter over fixed windows of the test text."""
    model.eval()
    starts = torch.linspace(0, len(text) - CONTEXT - 1, 256).long().unsqueeze(1)
    positions = starts + torch.arange(CONTEXT)
    logits = model(text[positions]).cpu()
    return nn.functional.cross_entropy(logits, text[positions + 1]).item()


@torch.no_grad()
def write(model: nn.Module, start: str, length: int) -> str:
    """Continue ``start``, one letter drawn at a time."""
    model.eval()
    text = [ALPHABET.index(letter) for letter in start]
    for _ in range(length):
        logits = model(torch.tensor([text[-CONTEXT:]]))[0, :, -1]
        text.append(int(torch.multinomial((logits / 0.7).softmax(0), 1)))
    return "".join(ALPHABET[i] for i in text)


def draw(
    path: pathlib.Path,
    losses: list[float],
    test_losses: list[float],
    baselines: dict[str, float],
    step: StepRecord,
) -> None:
    """Losses and baselines above, the timeline below."""
    figure, (above, below) = plt.subplots(2, figsize=(9, 7), height_ratios=(3, 2))
    steps_per_epoch = len(losses) // len(test_losses)
    epochs = [(i + 1) / steps_per_epoch for i in range(len(losses))]
    above.plot(epochs, losses, color="#4477aa", linewidth=1, label="training loss")
    above.plot(
        range(1, len(test_losses) + 1), test_losses, color="#cc6677", marker="o", label="test loss"
    )
    for name, loss in baselines.items():
        above.axhline(loss, color="#777777", linestyle="--", linewidth=1)
        above.text(epochs[-1], loss, f"{name} {loss:.2f}", ha="right", va="bottom")
    above.set(xlabel="epoch", ylabel="nats per letter")
    above.set_title("Python's standard library, letter by letter", loc="left")
    above.legend()
    draw_step(below, step)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
