"""Random programs: the wrappers against the bare module."""
