"""Embed 10,000 texts on all devices: long batches and short ones go to whichever device is free.

python examples/pool_embed.py
python examples/pool_embed.py --texts 2000 --devices cpu,cpu,cpu
DATAPARALLEL_VIRTUAL_DEVICES=4 python examples/pool_embed.py    # 4 accelerators in host memory
"""

import argparse
import random
import zlib

import torch
from torch import Tensor, nn

import dataparallel as dp

WORDS = ("a", "device", "clone", "gives", "takes", "one", "item", "text", "and", "the", "free")
VOCABULARY, WIDTH, LONGEST = 1000, 64, 60


class Encoder(nn.Module):
    """A transformer whose outputs are averaged over the words of each text."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        states = self.layers(self.words(tokens), src_key_padding_mask=padding)
        sums = states.masked_fill(padding[..., None], 0).sum(1)
        return nn.functional.normalize(sums / (~padding).sum(1, keepdim=True), dim=1)


def tokenize(texts: list[str]) -> Tensor:
    """Give each word a number, and fill shorter texts up with zeros."""
    rows = [
        torch.tensor([1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in text.split()])
        for text in texts
    ]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def main() -> None:
    options = parse_options()
    draw = random.Random(0)
    lengths = [min(LONGEST, 1 + int(draw.expovariate(1 / 12))) for _ in range(options.texts)]
    texts = [" ".join(draw.choices(WORDS, k=length)) for length in lengths]
    torch.manual_seed(0)
    net = Encoder().eval()
    devices = options.devices.split(",") if options.devices else dp.accelerators() or ["cpu", "cpu"]

    # Texts of like lengths make a batch, so little is filled up; the longest come first, so that no
    # device has much left to do when the others have ended.
    order = sorted(range(len(texts)), key=lambda i: -lengths[i])
    embeddings = torch.empty(len(texts), WIDTH)
    with dp.Pool(net, devices) as pool:
        sorted_texts = [texts[i] for i in order]
        results = pool.map(
            sorted_texts, options.batch_size, collate_fn=tokenize, progress=options.progress
        )
        for i, embedding in zip(order, results, strict=True):
            embeddings[i] = embedding
    print(f"embedded {len(texts)} texts on: {', '.join(map(str, devices))}")

    with torch.inference_mode():
        bare = net.cpu()(tokenize(texts[:100]))
    print(f"largest difference to the bare module: {(embeddings[:100] - bare).abs().max():.1e}")


def parse_options() -> argparse.Namespace:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--devices", help="one for each item at a time: cpu,cpu or cuda:0,cuda:1")
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
