"""Learn which module of Python's standard library some words are from, with a parameter worker.

The last process keeps the table of word vectors; no trainer could say how large it may be. The
others train the dense part of the model, data-parallel.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import sys
import sysconfig
import time
import warnings
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as torch_rpc
from common import console, join_processes
from torch import Tensor, nn

from dataparallel import DistributedDataParallel
from dataparallel.distributed_autograd import (
    DistributedOptimizer,
    RRef,
    backward,
    context,
    rpc_sync,
)

MODULES = 24
VOCABULARY = 4000
WIDTH = 64
WORDS = 16
TABLE = "table"


def main() -> int:
    """Start the workers, train, test. Returns 1 if too little was learnt."""
    options = parse_options()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        console.print(
            "this needs at least 2 processes, a trainer and the worker that has the table; start "
            "it with: torchrun --nproc-per-node 3 examples/parameter_server.py"
        )
        return 2
    rank, num_processes = join_processes()
    trainers: Any = dist.new_group(list(range(num_processes - 1)))
    name = TABLE if rank == num_processes - 1 else f"trainer{rank}"
    if name == TABLE:
        make_table(options.seed)
    start_worker(name, rank, num_processes)
    try:
        # The worker with the table has nothing to do but to serve the others until all are done.
        accuracy = 1.0 if name == TABLE else train(options, trainers)
    finally:
        torch_rpc.shutdown()
        dist.destroy_process_group()
    if accuracy < options.min_accuracy:
        console.print(f"[red]the accuracy is below {options.min_accuracy:.2%}[/red]")
        return 1
    return 0


def parse_options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="""examples:
  torchrun --nproc-per-node 3 examples/parameter_server.py
  torchrun --nproc-per-node 3 examples/parameter_server.py --steps 40   (a short run)
  torchrun --nproc-per-node 5 examples/parameter_server.py --replicas 2 --batch-size 512""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=240, metavar="N", help="default: %(default)s")
    add("--replicas", type=int, default=1, metavar="N",
        help="replicas of the dense part in each trainer; default: %(default)s")  # fmt: skip
    add("--batch-size", type=int, default=256, metavar="N",
        help="samples per step and trainer; default: %(default)s")  # fmt: skip
    add("--lr", type=float, default=0.003, metavar="X",
        help="learning rate of the dense part; default: %(default)s")  # fmt: skip
    add("--table-lr", type=float, default=40.0, metavar="X",
        help="learning rate of the word vectors; default: %(default)s")  # fmt: skip
    add("--min-accuracy", type=float, default=0.0, metavar="X",
        help="fail below this accuracy on the test text; default: %(default)s")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="default: 0")
    return parser.parse_args()


def start_worker(name: str, rank: int, num_processes: int) -> None:
    """Make this process a worker that others can call."""
    # No types are declared for it.
    # unsafe-load: for a trusted network alone: workers run what others send
    init_rpc: Any = torch_rpc.init_rpc
    with warnings.catch_warnings():
        # What it does with a process group of its own.
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
        init_rpc(name, rank=rank, world_size=num_processes)


# --- the worker with the table -------------------------------------------------------------------

tables: list[nn.EmbeddingBag] = []


def make_table(seed: int) -> None:
    """Make the table, before anybody can ask for it."""
    torch.manual_seed(seed)
    # Gradients have entries for the words of a batch alone: the rest of the table costs nothing.
    tables.append(nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean", sparse=True))


def look_up(words: Tensor) -> Tensor:
    """The mean vector ``(N, WIDTH)`` of each row of ``words``, ``(N, WORDS)``."""
    vectors: Tensor = tables[0](words)
    return vectors


def table_parameters() -> list[RRef[nn.Parameter]]:
    """References to the parameters of the table."""
    return [RRef(parameter) for parameter in tables[0].parameters()]


# --- the trainers --------------------------------------------------------------------------------


def train(options: argparse.Namespace, trainers: dist.ProcessGroup) -> float:
    """Train together with the other trainers; returns the accuracy on the test text."""
    rank = dist.get_rank()
    torch.manual_seed(options.seed)
    dense = nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, MODULES)
    )
    devices = ["cpu"] * options.replicas
    model = DistributedDataParallel(dense, devices, process_group=trainers)
    # The trainers' dense parts stay equal, since they step with the same gradients. The table
    # is stepped with the gradients of one trainer at a time.
    dense_optimizer = DistributedOptimizer(torch.optim.AdamW, model.parameters(), lr=options.lr)
    table_optimizer = DistributedOptimizer(
        torch.optim.SGD, rpc_sync(TABLE, table_parameters), lr=options.table_lr
    )
    train_texts, test_texts = load_texts()
    generator = torch.Generator().manual_seed(options.seed * 1000 + rank)
    begin = time.perf_counter()
    accuracy = 0.0
    steps_per_line = max(1, options.steps // 6)
    for step in range(1, options.steps + 1):
        words, labels = random_windows(train_texts, options.batch_size, generator)
        with context() as context_id:
            vectors = rpc_sync(TABLE, look_up, (words,))
            loss = nn.functional.cross_entropy(model(vectors), labels)
            backward(context_id, [loss])
            dense_optimizer.step(context_id)
            table_optimizer.step(context_id)
        if step % steps_per_line == 0 or step == options.steps:
            accuracy = accuracy_on(dense, test_texts)
            speed = options.batch_size * step * dist.get_world_size(trainers)
            console.print(
                f"step {step:4}  loss {loss.item():.3f}  test accuracy {accuracy:.1%}  "
                f"{speed / (time.perf_counter() - begin):,.0f} samples/s"
            )
    console.print(f"guessing one of {MODULES} modules blindly is right in {1 / MODULES:.1%}")
    model.close()
    return accuracy


@torch.no_grad()
def accuracy_on(dense: nn.Module, texts: list[Tensor]) -> float:
    """How many windows of the test texts the model tells right."""
    words, labels = random_windows(texts, 1000, torch.Generator().manual_seed(1))
    logits: Tensor = dense(rpc_sync(TABLE, look_up, (words,)))
    return (logits.argmax(1) == labels).float().mean().item()


# --- text ----------------------------------------------------------------------------------------


def load_texts() -> tuple[list[Tensor], list[Tensor]]:
    """The words of the largest modules of the standard library, as indices into the vocabulary.

    Returns:
        Per module the text to learn from, and its last fifth to test with.
    """
    files = pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")
    largest = sorted(files, key=lambda path: (-path.stat().st_size, path.name))[:MODULES]
    texts = [re.findall("[a-z_]+", path.read_text(encoding="utf-8").lower()) for path in largest]
    counts = Counter(word for text in texts for word in text)
    # Index 0 is for all words that are not in the vocabulary.
    index = {word: i for i, (word, _) in enumerate(counts.most_common(VOCABULARY - 1), 1)}
    encoded = [torch.tensor([index.get(word, 0) for word in text]) for text in texts]
    cuts = [len(text) * 4 // 5 for text in encoded]
    learnt = [text[:cut] for text, cut in zip(encoded, cuts, strict=True)]
    return learnt, [text[cut:] for text, cut in zip(encoded, cuts, strict=True)]


def random_windows(
    texts: list[Tensor], number: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Windows ``(number, WORDS)`` of random modules, and which modules these are."""
    labels = torch.randint(len(texts), (number,), generator=generator)
    places = torch.rand(number, generator=generator)
    windows = []
    for label, place in zip(labels.tolist(), places.tolist(), strict=True):
        start = int(place * (len(texts[label]) - WORDS))
        windows.append(texts[label][start : start + WORDS])
    return torch.stack(windows), labels


if __name__ == "__main__":
    sys.exit(main())
