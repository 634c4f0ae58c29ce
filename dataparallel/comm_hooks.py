"""Torch's communication hooks that have names here, to be called by hooks of your own.

Example::

    from dataparallel.comm_hooks import allreduce_hook

    def hook(group, bucket):
        bucket.buffer().clamp_(-1, 1)
        return allreduce_hook(group, bucket)

    model.register_comm_hook(None, hook)
"""

from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)

__all__ = ["allreduce_hook", "bf16_compress_hook", "fp16_compress_hook", "noop_hook"]
