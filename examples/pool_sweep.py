"""Try learning rates side by side: one training on each device, the next when one has ended.

python examples/pool_sweep.py
python examples/pool_sweep.py --rates 0.3,0.1,0.03,0.01 --steps 300
DATAPARALLEL_VIRTUAL_DEVICES=4 python examples/pool_sweep.py     # 4 accelerators in host memory
"""

import argparse

import torch
from torch import nn

import dataparallel as dp


def train(rate: float, device: torch.device, steps: int) -> tuple[float, float]:
    """Train a small network; return its last loss, and its accuracy on other points."""
    torch.manual_seed(0)  # the same weights and the same batches for each rate
    x = torch.rand(2000, 2, device=device) * 4 - 2
    y = (x[:, 0] * x[:, 1] > 0).long()
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), rate, momentum=0.9)
    for _ in range(steps):
        batch = torch.randint(1500, (64,), device=device)
        loss = nn.functional.cross_entropy(net(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        right = (net(x[1500:]).argmax(1) == y[1500:]).float().mean()
    return loss.item(), right.item()


def main() -> None:
    options = parse_options()
    rates = [float(rate) for rate in options.rates.split(",")]
    devices = options.devices.split(",") if options.devices else dp.accelerators() or ["cpu", "cpu"]

    def train_at(rate: float, device: torch.device) -> tuple[float, float]:
        return train(rate, device, options.steps)

    with dp.Pool(device_ids=devices) as pool:
        found = pool.run(train_at, rates, on_error="return", progress=options.progress)
    print(f"{len(rates)} trainings on: {', '.join(map(str, devices))}")
    results = {}
    for rate, result in zip(rates, found, strict=True):
        if isinstance(result, Exception):
            print(f"rate {rate:g} has failed: {result}")
        else:
            results[rate] = result
            print(f"rate {rate:g}: loss {result[0]:.4f}, accuracy {result[1]:.1%}")
    best = max(results, key=lambda rate: results[rate][1])
    print(f"best rate: {best:g}")

    alone = train(best, torch.device(devices[0]), options.steps)
    print(f"difference of its loss to a training alone: {abs(alone[0] - results[best][0]):.1e}")


def parse_options() -> argparse.Namespace:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--devices", help="one for each training: cpu,cpu or cuda:0,cuda:1")
    parser.add_argument("--rates", default="1,0.3,0.1,0.03,0.01,0.003")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
