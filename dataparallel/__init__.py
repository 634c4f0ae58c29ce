"""Train and run PyTorch models on all devices of a machine from one process."""
