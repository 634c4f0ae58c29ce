"""One process on all devices: their order, odd batches, graphs, and the order of sums."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dataparallel as dp
from tests.gpu.report.subject import kind, synchronize, table
from tests.gpu.test_training import WRAPPERS, make_net, train


def main(given: argparse.Namespace) -> None:
    """Check each way to train on each list of devices."""
    names = given.devices
    lists = [names, names[::-1]] if len(names) > 1 else [names, names * 2]
    checks: dict[str, Callable[[list[str]], object]] = {
        **{f"{name}, odd batches": _trains_with(name) for name in WRAPPERS},
        "bits of the order of sums": _bits,
    }
    if not given.eager:
        checks |= {"compiled": _compiled, "recorded in graphs": _captured}
    rows, failed = [], False
    for places in lists:
        for name, check in checks.items():
            try:
                check(places)
                outcome = "right"
            except Exception as error:
                outcome, failed = f"{type(error).__name__}: {str(error).splitlines()[0]}", True
                print(f"{name} on {places}:\n{error}", flush=True)
            rows.append([name, " ".join(places), outcome])
            synchronize(names)
    if failed:
        table("Training on all devices", ["check", "devices", "outcome"], rows)
        raise SystemExit("some results are not those of the bare module")
    print(*(" | ".join(row) for row in rows), sep="\n")


def _alike(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def _trains_with(wrapper: str) -> Callable[[list[str]], object]:
    def check(places: list[str]) -> None:
        _train(WRAPPERS[wrapper], places)

    return check


def _train(wrap: Callable[..., Any], places: list[str], **options: Any) -> None:
    """Train with batches that no number of devices divides, some smaller than that."""
    device = torch.device(places[0])
    bare, net = make_net().to(device), make_net().to(device)
    model = wrap(net, places, **options)
    try:
        _alike(train(net, model, device), train(bare, bare, device))
    finally:
        model.close()


def _compiled(places: list[str]) -> None:
    # Inductor makes no code for virtual devices.
    how = "inductor" if kind(places) == "cuda" else "aot_eager"

    def wrap(net: nn.Module, places: list[str]) -> Any:
        compiled: Any = torch.compile(net, backend=how)
        return dp.DistributedDataParallel(compiled, places)

    try:
        _train(wrap, places)
    finally:
        torch.compiler.reset()


def _captured(places: list[str]) -> None:
    """Train with one size of batch, so that after the first steps graphs are replayed."""
    device = torch.device(places[0])
    bare, net = make_net().to(device), make_net().to(device)
    model = dp.DistributedDataParallel(net, places, capture=True)
    try:
        for seed in range(8):
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(4 * len(places), 20, generator=generator).to(device)
            for called in (model, bare):
                called.zero_grad()
                called(x).pow(2).mean().backward()
            _alike(_grads(net), _grads(bare))
    finally:
        model.close()


def _bits(places: list[str]) -> None:
    """Compare with gradients of bare copies, one on each device, that are added in order."""
    device = torch.device(places[0])
    for wrapper, wrap in WRAPPERS.items():
        net = make_net().to(device)
        x = torch.randn(8 * len(places), 20, device=device)
        terms = []
        # A sum alone would have gradients without memory, which kernels add in another way.
        weights = torch.randn(len(x), 3, device=device)
        parts = zip(places, x.chunk(len(places)), weights.chunk(len(places)), strict=True)
        for place, chunk, weight in parts:
            single = copy.deepcopy(net).to(place)
            (single(chunk.to(place)) * weight.to(place)).sum().backward()
            terms.append([grad.to(device) for grad in _grads(single)])
        model = wrap(net, places)
        (model(x) * weights).sum().backward()
        for got, (first, *rest) in zip(_grads(net), zip(*terms, strict=True), strict=True):
            total = first.clone()
            for term in rest:
                total += term
            assert torch.equal(got, total), f"{wrapper}: other bits than in the replicas' order"
        model.close()


def _grads(net: nn.Module) -> list[Tensor]:
    return [p.grad for p in net.parameters() if p.grad is not None]
