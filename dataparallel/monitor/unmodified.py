"""Watches a program that says nothing of it, for ``dataparallel monitor run``.

Python imports a module ``sitecustomize`` when it starts. That of the command imports this file,
which waits until torch is imported and an optimizer has made its first step. Then a StepMonitor
watches that optimizer, and so the modules whose parameters it steps, in that very thread.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.util
import sys
from typing import Any

#: The module with which torch's optimizers are there.
_OPTIMIZERS = "torch.optim"


class _Waiting(importlib.abc.Loader):
    """A loader that does what another one does, and then waits for a step of an optimizer."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        """Make the module as the other loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Run the module."""
        self._loader.exec_module(module)
        _wait_for_step()


class _AfterImport(importlib.abc.MetaPathFinder):
    """A finder that finds nothing, and notices when torch's optimizers are imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the spec of that one module, as others find it."""
        if name != _OPTIMIZERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        places, loader = spec.submodule_search_locations, _Waiting(spec.loader)
        # The file is that which torch's own spec names.
        return importlib.util.spec_from_file_location(  # noqa: TID251
            name, spec.origin, loader=loader, submodule_search_locations=places
        )


def begin() -> None:
    """Watch this process from the first step of an optimizer on, if there ever is one."""
    sys.meta_path.insert(0, _AfterImport())


def _wait_for_step() -> None:
    from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

    found: list[Optimizer] = []

    def note(optimizer: Optimizer, *_: Any) -> None:
        if not found:
            found.append(optimizer)
            # While torch calls hooks of one kind for all, no other one may be added to them.
            optimizer.register_step_post_hook(watch)

    def watch(optimizer: Optimizer, *_: Any) -> None:
        if handles:
            handles.pop().remove()
            _watch(optimizer)

    handles = [register_optimizer_step_pre_hook(note)]


def _watch(optimizer: Any) -> None:
    try:
        from dataparallel.monitor.step_monitor import StepMonitor, num_watching

        # The program has a monitor of its own.
        if num_watching():
            return
        monitor = StepMonitor(optimizer)
        monitor.__enter__()
        atexit.register(monitor.__exit__, None, None, None)
    except Exception as error:
        print(f"dataparallel: this program cannot be watched: {error}", file=sys.stderr)
