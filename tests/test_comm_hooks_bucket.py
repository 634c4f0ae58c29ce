"""The bucket that a communication hook gets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket as TorchsGradBucket

from dataparallel.reducer.grad_bucket import GradBucket
from dataparallel.reducer.storage import BucketStorage
from tests.comm_hook_cases import NAMES, a_bucket, parameters


def test_a_bucket_has_the_methods_of_torchs() -> None:
    theirs = {name for name in dir(TorchsGradBucket) if not name.startswith("_")}
    assert theirs == {"buffer", "gradients", "index", "is_last", "parameters", "set_buffer"}
    assert theirs <= set(dir(GradBucket))


def test_what_a_bucket_tells() -> None:
    given = parameters()
    storage = BucketStorage(given)
    bucket = GradBucket(3, storage.flat, storage.views, given, NAMES, is_last=False)
    assert bucket.index() == 3
    assert not bucket.is_last()
    assert a_bucket().is_last()
    assert bucket.names() == NAMES
    assert all(a is b for a, b in zip(bucket.parameters(), given, strict=True))
    assert bucket.buffer().data_ptr() == storage.flat.data_ptr()
    assert repr(bucket) == (
        "GradBucket(index=3, numel=38, dtype=torch.float32, names=['weight', 'images', 'turned'])"
    )


def test_gradients_are_views_in_the_layout_of_the_parameters() -> None:
    bucket = a_bucket()
    for gradient, parameter in zip(bucket.gradients(), parameters(), strict=True):
        assert gradient.shape == parameter.shape
        assert gradient.stride() == parameter.stride()
    bucket.buffer().zero_()
    bucket.gradients()[1].fill_(1)
    assert bucket.buffer().tolist() == [0.0] * 6 + [1.0] * 24 + [0.0] * 8


def test_gradients_follow_another_buffer() -> None:
    bucket = a_bucket()
    before = bucket.gradients()
    replaced = bucket.buffer().to(torch.float16)
    bucket.set_buffer(replaced)
    assert bucket.buffer() is replaced
    for gradient, old in zip(bucket.gradients(), before, strict=True):
        assert gradient.dtype == torch.float16
        assert gradient.stride() == old.stride()
        assert torch.equal(gradient.float(), old)
    bucket.gradients()[2].zero_()
    assert replaced[-8:].count_nonzero() == 0
    assert before[2].count_nonzero() == 8


def test_a_buffer_within_a_larger_storage() -> None:
    """Views count from the start of the storage, and a buffer may begin further on."""
    flat = torch.arange(10.0)[4:]
    bucket = GradBucket(0, flat, [flat.view(2, 3)], [torch.zeros(2, 3)], ["w"], is_last=True)
    bucket.set_buffer(torch.arange(20.0)[7:13])
    assert bucket.gradients()[0].tolist() == [[7.0, 8.0, 9.0], [10.0, 11.0, 12.0]]


def test_gradients_in_the_order_of_memory() -> None:
    """As torch's bucket gives them; a contiguous one is the same in both."""
    bucket = a_bucket()
    bucket.in_memory_order = True
    for gradient, parameter in zip(bucket.gradients(), parameters(), strict=True):
        assert gradient.shape == parameter.shape
        assert gradient.is_contiguous()
    together = torch.cat([gradient.view(-1) for gradient in bucket.gradients()])
    assert torch.equal(together, bucket.buffer())
    bucket.gradients()[1].zero_()
    assert bucket.buffer().count_nonzero() == 38 - 1 - 24


def test_a_hook_may_resize_the_buffer() -> None:
    storage = BucketStorage(parameters())
    storage.flat.fill_(1)
    bucket = GradBucket(0, storage.flat, storage.views, parameters(), NAMES, is_last=True)
    bucket.buffer().resize_(4096)
    bucket.buffer().fill_(2)
    assert storage.flat.shape == (38,)
    assert storage.flat.tolist() == [2.0] * 38
    assert all((view == 2).all() for view in storage.views)


def test_a_sparse_bucket() -> None:
    with torch.sparse.check_sparse_tensor_invariants():
        gradient = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), torch.ones(2, 2), (5, 2))
    bucket = GradBucket(0, gradient, [gradient], [torch.zeros(5, 2)], ["table"], is_last=True)
    assert bucket.buffer() is gradient
    bucket.set_buffer(gradient * 2)
    assert bucket.gradients()[0].to_dense().sum() == 8


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.zeros(5), r"shape \(5,\), but its gradients have 38 elements; pass a tensor of"),
        (torch.zeros(38, 1), r"shape \(38, 1\), but its gradients have 38 elements"),
        (torch.zeros(76)[::2], r"stride 2, but gradients are cut .*; pass tensor.contiguous\(\)"),
    ],
)
def test_buffers_without_gradients(buffer: Tensor, message: str) -> None:
    bucket = a_bucket()
    bucket.set_buffer(buffer)
    assert bucket.buffer() is buffer
    with pytest.raises(ValueError, match=message):
        bucket.gradients()


def test_a_buffer_that_is_no_tensor() -> None:
    with pytest.raises(TypeError, match="bucket 0 cannot have a buffer of type list; pass a tens"):
        a_bucket().set_buffer([1.0])  # type: ignore[arg-type]
