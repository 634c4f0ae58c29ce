"""Operators, modules, losses and optimizers give on the device what they give on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import dataparallel.virtual
from tests.virtual.oracle import assert_same

Case = tuple[Any, ...]

pytestmark = [
    # A warning of torch itself, on every device.
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype"),
]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


A, B = randn(4, 6), randn(4, 6)
IMAGE, SEQUENCE = randn(2, 4, 8, 8), randn(3, 5, 8)
INDEX = torch.tensor([2, 0, 3])
MASK = torch.tensor([[True, False, True, True, False, True]] * 4)
PADDING = torch.tensor([[False, False, True, True, True], [False] * 5, [False] * 4 + [True]])
SPARSE = torch.sparse_coo_tensor(
    torch.tensor([[0, 2, 0, 1], [1, 0, 1, 2]]),
    torch.tensor([1.0, 2.0, 3.0, 4.0]),
    (3, 4),
    check_invariants=True,
)

# --- operators -----------------------------------------------------------------------------------

OPERATORS: dict[str, Case] = {
    "arithmetic": (lambda a, b: (a + b * 2 - b / 3, a**2, -a, a % 3, (a.detach() // 2)), A, B),
    "broadcast": (lambda a, b: a + b, A, randn(6)),
    "unary": (lambda a: (a.exp(), a.sin(), a.abs().sqrt(), a.sigmoid(), a.erf()), A),
    "compare": (lambda a, b: (a > b, a == b, torch.where(a > b, a, b), a.clamp(-1, 1)), A, B),
    "matmul": (lambda a, b: (a @ b.t(), torch.mv(a, b[0])), A, B),
    "bmm": (torch.bmm, randn(3, 4, 5), randn(3, 5, 2)),
    "linear": (F.linear, A, randn(5, 6), randn(5)),
    "einsum": (lambda a, b: torch.einsum("ij,kj->ik", a, b), A, B),
    "reductions": (lambda a: (a.sum(), a.mean(0), a.amax(1), a.var(), a.norm(), a.prod()), A),
    "max with indices": (lambda a: a.max(dim=1), A),
    "softmax": (lambda a: (a.softmax(1), a.log_softmax(0), a.logsumexp(1)), A),
    "sort": (lambda a: (a.sort(dim=1), a.topk(3), a.kthvalue(2)), A),
    "scans": (lambda a: (a.cumsum(1), a.cumprod(0), a.cummax(1)), A),
    "joining": (lambda a, b: (torch.cat([a, b]), torch.stack([a, b], 1)), A, B),
    "splitting": (lambda a: (a.split(2, 1), a.chunk(2), a.unbind(0)), A),
    "views": (lambda a: (a.view(6, 4) * 1, a.t() + 0, a[1:3, ::2] * 2, a.unfold(1, 3, 2) * 1), A),
    "index": (lambda a, i: (a[i], a[:, i], a.index_select(0, i)), A, INDEX),
    "mask": (lambda a, m: (a[m], a.masked_select(m), a.masked_fill(m, 3.0)), A, MASK),
    "gather": (lambda a, i: a.gather(0, i.repeat(2).view(1, 6)), A, INDEX),
    "scatter": (lambda a, b, i: a.scatter_add(0, i.repeat(2).view(1, 6), b[:1]), A, B, INDEX),
    "index_add": (lambda a, b, i: a.index_add(0, i, b[:3]), A, B, INDEX),
    "padding": (lambda a: (F.pad(a, (1, 2)), F.pad(a[None], (1, 1), mode="reflect")), A),
    "pooling": (lambda x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 3, 2, 1)), IMAGE),
    "adaptive": (lambda x: (F.adaptive_avg_pool2d(x, 3), F.adaptive_max_pool2d(x, 2)), IMAGE),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), IMAGE),
    "nearest": (lambda x: F.interpolate(x, size=5, mode="nearest"), IMAGE),
    "inverse": (lambda a: torch.linalg.inv(a @ a.t() + torch.eye(4).to(a)), A),
    "determinant": (lambda a: torch.linalg.det(a @ a.t()), A),
    "complex": (lambda a, b: (torch.complex(a, b).conj() * 1j, torch.fft.fft(a)), A, B),
    "lazy views": (lambda z: (z.conj() * 2, z.conj().imag, z.conj().resolve_conj()), A * 1j),
    "distances": (lambda a, b: (torch.cdist(a, b), F.cosine_similarity(a, b)), A, B),
    "triangles": (lambda a: (a.tril(), a.triu(1), a.diagonal() * 1, a.trace()), A[:, :4]),
    "flips": (lambda a: (a.flip(0), a.roll(1, 1), a.repeat(2, 1), a.expand(2, 4, 6) * 1), A),
    "unique": (lambda i: torch.unique(i, return_counts=True), torch.tensor([3, 1, 3, 2])),
    "nonzero": (lambda m: m.nonzero(), MASK),
    "bincount": (lambda i: torch.bincount(i, minlength=6), INDEX),
    "dropout": (lambda a: [F.dropout(a, p) for p in (0.25, 0.0, 1.0)], A),
    "foreach": (lambda *t: torch._foreach_add(torch._foreach_mul(list(t), 2.0), list(t)), A, B),
    "foreach in place": (lambda *t: torch._foreach_addcdiv_(t, t, t, 2.0), A.detach(), B.detach()),
    "vmap": (lambda a: torch.vmap(lambda row: row.softmax(0))(a), A),
    "forward mode": (lambda a: torch.func.jvp(torch.sin, (a,), (torch.ones_like(a),)), A),
    "second derivatives": (
        lambda a, b: torch.autograd.grad((a @ b.t()).tanh().sum(), (a, b), create_graph=True), A, B
    ),
    **{
        f"{dtype}": (lambda a, b: (a + b, a * b, a @ b.t(), a.sum(0)), A.detach().to(dtype),
                     B.detach().to(dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.complex64)
    },
    **{
        f"{dtype}": (lambda a: (a.bitwise_and(a), a.any(), a.sum(), a + 1, a == 1, a.float()),
                     MASK.to(dtype))
        for dtype in (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64)
    },
}  # fmt: skip


# --- tensors -------------------------------------------------------------------------------------


def versions(a: Tensor) -> list[Any]:
    view = a.view(6, 4)
    view.add_(1)
    torch.mul(a, 2, out=a)
    _ = a + 1
    return [a._version, view._version, a.detach()._version, view._base is a]


def memory(a: Tensor) -> list[bool]:
    views = a.view(6, 4), a[2:], a.t(), a.unfold(1, 2, 2), a.detach()
    return [v.untyped_storage().data_ptr() == a.untyped_storage().data_ptr() for v in views]


def written_through_views(a: Tensor) -> Tensor:
    x = a * 2
    x.view(6, 4)[0].mul_(a[0, :4])
    x.t()[1].zero_()
    x[1:3].add_(a[:2])
    return x


def resized(a: Tensor) -> list[Any]:
    storage = a.untyped_storage()
    storage.resize_(512)
    a.set_(storage, 0, (8, 8))  # type: ignore[call-overload]
    a.view(-1)[24:].fill_(7)
    other = torch.empty(0, device=a.device, dtype=a.dtype).set_(storage, 1, (2,), (2,))
    results = [storage.nbytes(), a * 1, other * 1, other.data_ptr() - a.data_ptr()]
    storage.resize_(0)
    storage.resize_(512)
    return [*results, a.fill_(3).resize_(2, 3), other.set_().numel()]  # type: ignore[call-overload]


def outputs(a: Tensor, out: Tensor, values: Tensor, indices: Tensor) -> list[Any]:
    assert torch.mm(a, a.t(), out=out) is out
    torch.sort(a, 1, True, out=(values, indices))
    return [a.add_(0) is a]


def channels_last(x: Tensor, weight: Tensor) -> list[Tensor]:
    made = torch.empty_like(x).zero_()
    like = torch.empty(2, 4, 8, 8, device=x.device, memory_format=torch.channels_last).zero_()
    # In strict mode its own strides are those that torch's meta kernel tells.
    return [x + 1, made, like, F.conv2d(x, weight).contiguous()]


TENSORS: dict[str, Case] = {
    "versions": (versions, A.detach()),
    "memory": (memory, A),
    "written through views": (written_through_views, A),
    "resized": (resized, A.detach()),
    "outputs": (outputs, A.detach(), torch.empty(0).double(), torch.empty(0).double(),
                torch.empty(0).long()),
    "channels last": (channels_last, IMAGE.to(memory_format=torch.channels_last).detach(),
                      randn(6, 4, 3, 3)),
}  # fmt: skip

# --- modules and losses --------------------------------------------------------------------------


def layer(module: nn.Module, *inputs: Tensor) -> Case:
    return lambda net, *given: net(*given), module.double(), *inputs


def encoder(net: nn.Module, x: Tensor, padding: Tensor | None = None) -> Any:
    with torch.inference_mode():
        return net(x, src_key_padding_mask=padding)


def packed(net: nn.LSTM, x: Tensor) -> Tensor:
    given = pack_padded_sequence(x, torch.tensor([3, 2, 2, 1, 1]))
    return pad_packed_sequence(net(given)[0])[0]


def recomputed(reentrant: bool) -> Callable[[nn.Module, Tensor], Any]:
    def call(net: nn.Module, x: Tensor) -> Any:
        y = checkpoint(lambda x: F.dropout(net(x).relu(), 0.5), x, use_reentrant=reentrant)
        torch.rand(3, device=x.device)  # The recomputation draws what the forward has drawn.
        return y

    return call


def attention(causal: bool) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).contiguous()

    return call


def ctc(x: Tensor, y: Tensor) -> Tensor:
    return F.ctc_loss(x.log_softmax(2), y, torch.tensor([5] * 3), torch.tensor([2] * 3))


BLOCK = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
LOGITS, TARGET = randn(6, 4), torch.tensor([0, 1, -100, 3, 2, 1])
BAG = torch.tensor([1, 2, 4, 5, 4]), torch.tensor([0, 2])

MODULES: dict[str, Case] = {
    "conv1d": layer(nn.Conv1d(5, 6, 3, padding=1, stride=2), SEQUENCE),
    "conv2d": layer(nn.Conv2d(4, 6, 3, padding="same", dilation=2), IMAGE),
    "conv2d depthwise": layer(nn.Conv2d(4, 8, 3, groups=4), IMAGE),
    "conv2d reflect": layer(nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), IMAGE),
    "conv3d": layer(nn.Conv3d(4, 2, 3, padding=1), randn(2, 4, 4, 4, 4)),
    "conv transposed": layer(nn.ConvTranspose2d(4, 6, 3, 2, output_padding=1), IMAGE),
    "batch norm": layer(nn.BatchNorm2d(4), IMAGE),
    "instance norm": layer(nn.InstanceNorm2d(4, affine=True), IMAGE),
    "group norm": layer(nn.GroupNorm(2, 4), IMAGE),
    "layer norm": layer(nn.LayerNorm(8), SEQUENCE),
    "embedding": layer(nn.Embedding(6, 3, padding_idx=5), INDEX),
    "embedding, sparse": layer(nn.Embedding(6, 3, padding_idx=5, sparse=True), INDEX),
    **{f"bag, {m}": layer(nn.EmbeddingBag(6, 3, mode=m), *BAG) for m in ("sum", "mean", "max")},
    "bag, sparse": layer(nn.EmbeddingBag(6, 3, sparse=True), *BAG),
    "recomputed": (recomputed(False), nn.Linear(8, 8).double(), SEQUENCE),
    "recomputed, reentrant": (recomputed(True), nn.Linear(8, 8).double(), SEQUENCE),
    "cross entropy": (F.cross_entropy, LOGITS, TARGET),
    "cross entropy, weights": (F.cross_entropy, LOGITS, TARGET, torch.rand(4).double()),
    "cross entropy, images": (F.cross_entropy, IMAGE, torch.randint(0, 3, (2, 8, 8))),
    "smoothed": (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), LOGITS, TARGET),
    "nll": (lambda x, y: F.nll_loss(x, y, reduction="sum"), LOGITS, TARGET),
    "ctc": (ctc, randn(5, 3, 4), torch.tensor([[1, 2], [2, 3], [1, 3]])),
    "bce": (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), A, B.detach()),
    **{
        loss.__name__: (loss, A, B.detach().sigmoid())
        for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
                     F.binary_cross_entropy_with_logits)
    },
}  # fmt: skip

# --- computed from other elementary operations than the CPU's, with rounding of their own --------


def trained(name: str, **options: Any) -> Callable[[nn.Module, Tensor], None]:
    """Three steps; a gradient is accumulated over two backwards."""

    def call(net: nn.Module, x: Tensor) -> None:
        optimizer = getattr(torch.optim, name)(list(net.parameters()), lr=0.05, **options)
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                net(x).square().mean().backward()
            optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    return call


NET = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam",
              "ASGD", "Rprop")  # fmt: skip
TABLE = nn.Embedding(5, 3, sparse=True)

ROUNDED: dict[str, Case] = {
    "rms norm": layer(nn.RMSNorm(8), SEQUENCE),
    "lstm": layer(nn.LSTM(8, 6, num_layers=2, bidirectional=True), SEQUENCE),
    "gru": layer(nn.GRU(8, 6, num_layers=2, bidirectional=True), SEQUENCE),
    "rnn": layer(nn.RNN(8, 6, nonlinearity="relu"), SEQUENCE),
    "packed": (packed, nn.LSTM(8, 4).double(), SEQUENCE),
    "transformer": layer(BLOCK, SEQUENCE),
    "encoder": (encoder, nn.TransformerEncoder(BLOCK, 2).eval(), SEQUENCE),
    "encoder, padded": (encoder, nn.TransformerEncoder(BLOCK, 2).eval(), SEQUENCE, PADDING),
    "attention": (attention(False), *(randn(2, 3, 5, 8) for _ in range(3))),
    "attention, causal": (attention(True), *(randn(2, 3, 5, 8) for _ in range(3))),
    "attention, masked": (
        lambda net, x, mask: net(x, x, x, key_padding_mask=mask),
        nn.MultiheadAttention(8, 2, batch_first=True).double(), SEQUENCE, PADDING,
    ),
    "perceptron": layer(nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Softmax(-1)), SEQUENCE),
    "activations": layer(
        nn.Sequential(nn.SiLU(), nn.Mish(), nn.ELU(), nn.PReLU(), nn.Softplus(), nn.Tanh()),
        SEQUENCE,
    ),
    **{
        f"{name}, {way}": (trained(name, **{way: True}), NET, A)
        for names, way in ((OPTIMIZERS, "foreach"), (OPTIMIZERS[:4], "fused"))
        for name in names
    },
    **{name: (trained(name, foreach=False), NET, A) for name in OPTIMIZERS},
    "SparseAdam": (trained("SparseAdam"), TABLE, INDEX),
    "momentum, sparse": (trained("SGD", momentum=0.9), TABLE, INDEX),
}  # fmt: skip

# --- sparse tensors ------------------------------------------------------------------------------


def made_sparse(x: Tensor) -> list[Any]:
    made = torch.sparse_coo_tensor(x._indices(), x._values(), (3, 4), check_invariants=True)
    assert made.device == made._values().device == x.device
    return [made, made._nnz(), made.sparse_dim(), made.dense_dim(), made.is_coalesced()]


def written_sparse(x: Tensor, y: Tensor) -> list[Any]:
    dense = torch.zeros(3, 4, device=x.device)
    same = dense.add_(y, alpha=2) is dense
    y.add_(y)
    y.mul_(3)
    tripled = y.clone()
    y.copy_(x)
    coalesced = x.coalesce()
    coalesced.values().fill_(7.0)
    return [same, dense, tripled, y.clone(), coalesced, y.zero_()._nnz()]


SPARSE_CASES: dict[str, Case] = {
    "made": (made_sparse, SPARSE),
    "arithmetic": (lambda x: (x + x, x * 2.5, x / 2, x.t(), torch.zeros_like(x), x.sum()), SPARSE),
    "coalesced": (lambda x: (x.coalesce(), x.coalesce().is_coalesced(), x.clone()), SPARSE),
    "with dense": (lambda x, a: (a + x, torch.sparse.mm(x, a.t())), SPARSE, torch.randn(3, 4)),
    "masked": (lambda x, a: a.sparse_mask(x.coalesce()), SPARSE, torch.randn(3, 4)),
    "converted": (lambda a: (a.to_sparse(), a.relu().to_sparse().to_dense()), torch.randn(3, 4)),
    "written": (written_sparse, SPARSE, SPARSE),
}

CASES = {
    **{f"operators: {name}": case for name, case in OPERATORS.items()},
    **{f"tensors: {name}": case for name, case in TENSORS.items()},
    **{f"modules: {name}": case for name, case in MODULES.items()},
    **{f"rounded: {name}": case for name, case in ROUNDED.items()},
    **{f"sparse: {name}": case for name, case in SPARSE_CASES.items()},
}


@pytest.mark.parametrize("strict", [False, True], ids=["eager", "strict"])
@pytest.mark.parametrize("name", CASES)
def test_as_on_the_cpu(name: str, strict: bool) -> None:
    function, *inputs = CASES[name]
    with dataparallel.virtual.strict_mode(strict):
        assert_same(function, *inputs, exact=not name.startswith("rounded"))
