"""Tests over a process group that takes tensors on accelerators only, as NCCL's does."""
