"""Modules and losses train as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dataparallel.virtual
from tests.virtual.oracle import DEVICE, assert_same, assert_same_module


def image(channels: int = 4) -> Tensor:
    return torch.randn(2, channels, 8, 8, dtype=torch.float64, requires_grad=True)


def sequence() -> Tensor:
    return torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "conv1d": (lambda: nn.Conv1d(5, 6, 3, padding=1, stride=2), sequence),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding="same", dilation=2), image),
    "conv2d depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), image),
    "conv2d reflect": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), image),
    "conv3d": (lambda: nn.Conv3d(4, 2, 3, padding=1), lambda: image().view(2, 4, 4, 4, 4).detach()),
    "conv transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, output_padding=1), image),
    "batch norm": (lambda: nn.BatchNorm2d(4), image),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), image),
    "group norm": (lambda: nn.GroupNorm(2, 4), image),
    "layer norm": (lambda: nn.LayerNorm(8), sequence),
    "rms norm": (lambda: nn.RMSNorm(8), sequence),
    "lstm": (lambda: nn.LSTM(8, 6, num_layers=2, bidirectional=True), sequence),
    "gru": (lambda: nn.GRU(8, 6, num_layers=2, bidirectional=True), sequence),
    "rnn": (lambda: nn.RNN(8, 6, nonlinearity="relu"), sequence),
    "transformer layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        sequence,
    ),
    "multilayer": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4), nn.Softmax(-1)),
        sequence,
    ),
    "activations": (
        lambda: nn.Sequential(nn.SiLU(), nn.Mish(), nn.ELU(), nn.PReLU(), nn.Softplus(), nn.Tanh()),
        sequence,
    ),
}
# Computed from other elementary operations than the CPU's, with rounding of their own.
ROUNDED = ("lstm", "gru", "rnn", "transformer", "multilayer", "activations", "rms norm")


@pytest.mark.parametrize("strict", [False, True], ids=["eager", "strict"])
@pytest.mark.parametrize("name", sorted(MODULES))
def test_module_equals_cpu(name: str, strict: bool) -> None:
    make_module, make_input = MODULES[name]
    with dataparallel.virtual.strict_mode(strict):
        assert_same_module(make_module().double(), make_input(), exact=not name.startswith(ROUNDED))


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool) -> None:
    q, k, v = (torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert_same(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal).contiguous(),
        q, k, v, exact=False,
    )  # fmt: skip


def test_multihead_attention_with_masks() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, padding: Tensor) -> Any:
            return self.attention(x, x, x, key_padding_mask=padding)

    padding = torch.tensor([[False, False, True, True, True]] * 3)
    assert_same_module(Attention().double(), sequence(), padding, exact=False)


# A warning of torch itself, on every device.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("padded", [False, True])
def test_transformer_encoder_in_evaluation(padded: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(3, 5, 8)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
    arguments = {"src_key_padding_mask": mask} if padded else {}
    with torch.inference_mode():
        expected = encoder(x, **arguments)
        encoder.to(DEVICE)
        result = encoder(x.to(DEVICE), **{k: v.to(DEVICE) for k, v in arguments.items()})
    torch.testing.assert_close(result.cpu(), expected)


@pytest.mark.parametrize("sparse", [False, True])
def test_embedding(sparse: bool) -> None:
    index = torch.tensor([[1, 2], [2, 5]])
    assert_same_module(nn.Embedding(6, 3, padding_idx=5, sparse=sparse), index)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode: str) -> None:
    index, offsets = torch.tensor([1, 2, 4, 5, 4]), torch.tensor([0, 2])
    assert_same_module(nn.EmbeddingBag(6, 3, mode=mode), index, offsets)
    if mode != "max":
        assert_same_module(nn.EmbeddingBag(6, 3, mode=mode, sparse=True), index, offsets)


def test_packed_sequence() -> None:
    rnn = nn.LSTM(8, 4)
    x, lengths = torch.randn(5, 3, 8), torch.tensor([5, 3, 2])
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths)
    expected, _ = nn.utils.rnn.pad_packed_sequence(rnn(packed)[0])
    on_device = nn.utils.rnn.pack_padded_sequence(x.to(DEVICE), lengths)
    result, _ = nn.utils.rnn.pad_packed_sequence(rnn.to(DEVICE)(on_device)[0])
    torch.testing.assert_close(result.cpu(), expected)


def test_losses_and_layouts() -> None:
    logits, target = torch.randn(6, 4, requires_grad=True), torch.tensor([0, 1, -100, 3, 2, 1])
    weight = torch.rand(4)
    assert_same(lambda x, y: F.cross_entropy(x, y), logits, target)
    assert_same(lambda x, y, w: F.cross_entropy(x, y, w, ignore_index=-100), logits, target, weight)
    assert_same(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), logits, target)
    assert_same(lambda x, y: F.nll_loss(x, y, reduction="sum"), logits, target)
    other = torch.rand(6, 4)
    for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss):
        assert_same(loss, logits, other)
    assert_same(F.binary_cross_entropy_with_logits, logits, other)
    assert_same(lambda x, y: F.binary_cross_entropy(x.sigmoid(), y), logits, other)
    image_logits = torch.randn(2, 3, 4, 4, requires_grad=True)
    x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
    assert_same(F.conv2d, x, torch.randn(6, 4, 3, 3, requires_grad=True))
    assert_same(F.cross_entropy, image_logits, torch.randint(0, 3, (2, 4, 4)))
    ctc = torch.randn(5, 2, 4, requires_grad=True)
    assert_same(
        lambda x, y: F.ctc_loss(x.log_softmax(2), y, torch.tensor([5, 5]), torch.tensor([2, 2])),
        ctc,
        torch.tensor([[1, 2], [2, 3]]),
    )


def test_dropout_draws_as_on_the_cpu() -> None:
    x = torch.randn(64, 8, requires_grad=True)
    assert_same(lambda x: F.dropout(x, 0.25), x)
    assert_same(lambda x: F.dropout(x, 0.0) + F.dropout(x, 1.0) + F.dropout(x, 0.5, False), x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_checkpoint_draws_the_same_dropout_again(reentrant: bool, strict: bool) -> None:
    layer = nn.Linear(8, 8).to(DEVICE)
    x = torch.randn(16, 8, device=DEVICE)
    gradients = []
    with dataparallel.virtual.strict_mode(strict):
        for recompute in (False, True):
            torch.manual_seed(1)
            leaf = x.detach().requires_grad_()

            def block(x: Tensor) -> Tensor:
                return F.dropout(layer(x).relu(), 0.5)

            y = checkpoint(block, leaf, use_reentrant=reentrant) if recompute else block(leaf)
            torch.rand(3, device=DEVICE)
            y.square().sum().backward()
            assert leaf.grad is not None
            gradients.append(leaf.grad.cpu())
    assert torch.equal(gradients[0], gradients[1])
