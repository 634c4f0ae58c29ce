"""The start of a process group that also works for processes that were started again."""

from dataparallel.extras.process_start.start import init_process_group as init_process_group

__all__ = ["init_process_group"]
