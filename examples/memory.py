"""Fine-tune a small GPT whose gradients and optimizer state do not fit on one device.

python examples/memory.py    # on 4 devices in host memory, each with a limit

The module's own parameters live on all devices then, and the losses are those of the bare module.
"""

import copy
import gc

import torch
from torch import Tensor, nn

import dataparallel as dp
from dataparallel import virtual

VOCABULARY, LENGTH, WIDTH, LAYERS, STEPS = 64, 16, 256, 6, 12
DEVICES = [f"virtual:{i}" for i in range(4)]


class Block(nn.Module):
    """Attention to earlier tokens, then two layers for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.heads, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.heads(self.norms[0](x)).unflatten(-1, (3, 4, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.layers(self.norms[1](x))


class GPT(nn.Module):
    """Predicts the next token at each place of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def batches() -> list[tuple[Tensor, Tensor]]:
    """Texts that count up from a random token; the targets are the next tokens."""
    generator = torch.Generator().manual_seed(1)
    begins = torch.randint(VOCABULARY, (STEPS, 8, 1), generator=generator)
    texts = (begins + torch.arange(LENGTH + 1)) % VOCABULARY
    return [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in texts]


def train(net: nn.Module, model: nn.Module) -> list[float]:
    """Train a module, by itself or in a wrapper; return the losses."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    losses = []
    for inputs, targets in batches():
        optimizer.zero_grad()
        output = model(inputs)  # a wrapper moves them to its devices
        loss = nn.functional.cross_entropy(
            output.flatten(0, 1), targets.flatten().to(output.device)
        )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    virtual.enable(len(DEVICES))
    torch.manual_seed(0)
    net = GPT()
    size = sum(p.nbytes for p in net.parameters())
    limit = 3 * size  # home needs 4 times the parameters on its first device
    print(f"parameters {size / 2**20:.1f} MiB; each device has {limit / 2**20:.1f} MiB")
    bare, other = copy.deepcopy(net), copy.deepcopy(net)
    bare_losses = train(bare, bare)
    virtual.set_memory_limit(None, limit)
    home = dp.DistributedDataParallel(other, DEVICES)
    try:
        train(other, home)
    except torch.OutOfMemoryError as error:
        print(f"home runs out of memory: {error}")
    home.close()
    del home, other
    gc.collect()  # what the failed training has left
    memory = torch.get_device_module("virtual")
    for device in DEVICES:
        memory.reset_peak_memory_stats(device)
    spread_losses = train(net, dp.DistributedDataParallel(net, DEVICES, originals="spread"))
    for i, (ours, its) in enumerate(zip(spread_losses, bare_losses, strict=True), 1):
        if i % 4 == 0:
            print(f"step {i}/{STEPS}: loss {ours:.4f}, bare module {its:.4f}")
    for device in DEVICES:
        peak = memory.max_memory_allocated(device)
        print(f"{device}: peak {peak / 2**20:.1f} MiB, {peak / size:.2f} times the parameters")
    largest = max(abs(ours - its) for ours, its in zip(spread_losses, bare_losses, strict=True))
    print(f"largest difference of a loss to the bare module's: {largest:.1e}")


if __name__ == "__main__":
    main()
