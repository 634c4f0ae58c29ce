"""Optimizers that step a shard of the parameters per device, or within backward."""
