"""Trials of designs that the package does not have yet; each has a page in ``docs/design``."""
