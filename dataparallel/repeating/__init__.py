"""Run a forward or a step again after it has failed, as if it had not run before."""
