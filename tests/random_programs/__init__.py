"""Random programs: the wrappers against the bare module and against torch's DDP."""
