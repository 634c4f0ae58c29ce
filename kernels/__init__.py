"""CUDA kernels and their launchers, each beside a reference in plain torch."""
