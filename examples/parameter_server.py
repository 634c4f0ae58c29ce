"""Train word vectors that one worker keeps, and a dense part that the others train data-parallel.

torchrun --nproc-per-node 3 examples/parameter_server.py    # 2 trainers, 1 worker with the table

They learn which module of Python's standard library 16 words in a row are from.
"""

import os
import pathlib
import re
import sys
import sysconfig
import warnings
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as torch_rpc
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.distributed_autograd import (
    DistributedOptimizer,
    RRef,
    backward,
    context,
    rpc_sync,
)

MODULES, VOCABULARY, WIDTH, WORDS, STEPS = 12, 2000, 64, 16, 120
# The gradients of a sparse table have entries for the words of a batch alone.
table = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean", sparse=True)


def look_up(words: Tensor) -> Tensor:
    """Called in the worker with the table: the mean vector of each row of words."""
    return table(words)


def table_parameters() -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in table.parameters()]


def main() -> None:
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        sys.exit(f"start at least two processes:\n{__doc__}")
    dp.init_process_group()
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    trainers = dist.new_group(list(range(last)))
    warnings.filterwarnings("ignore", "You are using a Backend")  # init_rpc itself does
    # For a trusted network alone: workers run what others send.
    torch_rpc.init_rpc(
        "table" if rank == last else f"trainer{rank}", rank=rank, world_size=last + 1
    )
    if rank < last:
        train(trainers)
    torch_rpc.shutdown()  # waits until all are done, and serves their calls meanwhile
    dist.destroy_process_group()


def train(trainers: Any) -> None:
    rank = dist.get_rank()
    words, labels = load_text()
    torch.manual_seed(rank)  # other samples in every trainer
    dense = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, MODULES))
    model = dp.DistributedDataParallel(dense, ["cpu"], process_group=trainers)
    # The dense parts stay equal, since they step with the same gradients. The table steps with
    # the gradients of one trainer at a time.
    dense_optimizer = DistributedOptimizer(torch.optim.AdamW, model.parameters(), lr=0.003)
    references = rpc_sync("table", table_parameters)
    table_optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=40.0)
    for step in range(1, STEPS + 1):
        batch = torch.randint(len(words), (256,))
        with context() as context_id:
            vectors = rpc_sync("table", look_up, (words[batch],))
            output = model(vectors)
            loss = nn.functional.cross_entropy(output, labels[batch])
            backward(context_id, [loss])
            dense_optimizer.step(context_id)
            table_optimizer.step(context_id)
        if step % 20 == 0 and rank == 0:
            accuracy = (output.argmax(1) == labels[batch]).float().mean()
            print(
                f"step {step}/{STEPS}: loss {loss.item():.3f}, accuracy {accuracy:.1%}", flush=True
            )


def load_text() -> tuple[Tensor, Tensor]:
    """Rows of words as indices into the vocabulary, and which module each is from."""
    files = pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")
    largest = sorted(files, key=lambda file: -file.stat().st_size)[:MODULES]
    texts = [re.findall("[a-z_]+", file.read_text("utf-8").lower()) for file in largest]
    common = Counter(word for text in texts for word in text).most_common(VOCABULARY - 1)
    index = {word: i for i, (word, _) in enumerate(common, 1)}  # 0: any other word
    rows = [
        torch.tensor([index.get(word, 0) for word in text]).unfold(0, WORDS, WORDS)
        for text in texts
    ]
    labels = [torch.full((len(each),), i) for i, each in enumerate(rows)]
    return torch.cat(rows), torch.cat(labels)


if __name__ == "__main__":
    main()
