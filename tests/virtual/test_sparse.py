"""Sparse COO tensors on the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dataparallel.virtual
from tests.virtual.oracle import DEVICE


def example() -> Tensor:
    indices = torch.tensor([[0, 2, 0, 1], [1, 0, 1, 2]])
    return torch.sparse_coo_tensor(
        indices, torch.tensor([1.0, 2.0, 3.0, 4.0]), (3, 4), check_invariants=True
    )


@pytest.mark.parametrize("strict", [False, True])
def test_operations_equal_cpu(strict: bool) -> None:
    x = example()
    with dataparallel.virtual.strict_mode(strict):
        y = torch.sparse_coo_tensor(
            x._indices().to(DEVICE), x._values().to(DEVICE), (3, 4), check_invariants=True
        )
        assert y.device == y._values().device == torch.device(DEVICE)
        assert (y._nnz(), y.sparse_dim(), y.dense_dim(), y.is_coalesced()) == (4, 2, 0, False)
        dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
        for made, wanted in (
            (y, x),
            (x.to(DEVICE), x),
            (y.coalesce(), x.coalesce()),
            (y + y, x + x),
            (y * 2.5, x * 2.5),
            (y / 2, x / 2),
            (y.t(), x.t()),
            (y.clone(), x.clone()),
            (torch.zeros_like(y), torch.zeros_like(x)),
            (y.to("virtual:2"), x),
            (y.cpu(), x),
            (dense.to(DEVICE).to_sparse(), dense.to_sparse()),
        ):
            assert made.layout == torch.sparse_coo
            assert made._nnz() == wanted._nnz()
            torch.testing.assert_close(made.to_dense().cpu(), wanted.to_dense())
        assert y.coalesce().is_coalesced()
        ones = torch.ones(3, 4, device=DEVICE)
        torch.testing.assert_close((ones + y).cpu(), torch.ones(3, 4) + x.to_dense())
        right = torch.randn(4, 2)
        product = torch.sparse.mm(y, right.to(DEVICE))
        torch.testing.assert_close(product.cpu(), x.to_dense() @ right)
        assert y.sum().item() == x.sum().item()
        kept = torch.ones(3, 4).to_sparse().to(DEVICE)
        masked = ones.sparse_mask(kept.coalesce()).to_dense()
        torch.testing.assert_close(masked.cpu(), torch.ones(3, 4))


def test_in_place() -> None:
    x, y = example(), example().to(DEVICE)
    dense = torch.zeros(3, 4, device=DEVICE)
    assert dense.add_(y, alpha=2) is dense
    torch.testing.assert_close(dense.cpu(), x.to_dense() * 2)
    same = y
    y.add_(y)
    y.mul_(3)
    assert y is same
    torch.testing.assert_close(y.to_dense().cpu(), x.to_dense() * 6)
    y.copy_(x)
    torch.testing.assert_close(y.to_dense().cpu(), x.to_dense())
    y.zero_()
    assert y._nnz() == 0
    values = example().to(DEVICE).coalesce()
    values.values().fill_(7.0)
    assert values.to_dense().max().item() == 7.0


def test_what_is_refused() -> None:
    x = example()
    with pytest.raises(RuntimeError, match=r"same device"):
        x.to("virtual:0") + x.to("virtual:1")
    with pytest.raises(RuntimeError, match=r"device of indices \(virtual:0\)|same device"):
        torch.sparse_coo_tensor(x._indices().to("virtual:0"), x._values().to("virtual:1"), (3, 4))
    with pytest.raises((RuntimeError, NotImplementedError), match="virtual"):
        torch.ones(2, 2, device=DEVICE).to_sparse_csr()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_training_with_sparse_gradients(kind: str, strict: bool) -> None:
    index = torch.tensor([[1, 2], [2, 2]])
    weights = []
    with dataparallel.virtual.strict_mode(strict):
        for device in ("cpu", DEVICE):
            torch.manual_seed(0)
            table = nn.Embedding(5, 3, sparse=True).to(device)
            optimizer: torch.optim.Optimizer
            if kind == "adam":
                optimizer = torch.optim.SparseAdam(list(table.parameters()), lr=0.1)
            else:
                optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
            for _ in range(3):
                for _ in range(2):
                    table(index.to(device)).square().sum().backward()
                assert table.weight.grad is not None
                assert table.weight.grad.is_sparse
                optimizer.step()
                optimizer.zero_grad()
            weights.append(table.weight.detach().cpu())
    torch.testing.assert_close(weights[1], weights[0])
