"""Checkpoints: files, states, and what happens to them."""
