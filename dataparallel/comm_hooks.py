"""Communication hooks, with the signature of torch's.

Each reduces the buckets of a wrapper over processes, in place of the all-reduce. They are for
``register_comm_hook`` of this package's wrappers, where they have names too, and of
``torch.nn.parallel.DistributedDataParallel``.

Example::

    from dataparallel.comm_hooks import bf16_compress_hook

    model.register_comm_hook(process_group, bf16_compress_hook)
"""

from dataparallel.reducer.comm_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    noop_hook,
)

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "noop_hook",
]
