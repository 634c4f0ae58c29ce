"""Watches programs and notebooks that do not mention the monitor.

For ``dataparallel monitor run``, Python imports a module ``sitecustomize`` when it starts. That of
the command imports this file and waits until torch is imported and an optimizer makes its first
step. Then a StepMonitor watches the wrapper of this package whose parameters it steps. If there is
none, it watches the optimizer, and so the modules of its parameters, in that very thread. A
notebook says ``%load_ext dataparallel.monitor`` instead.
"""

from __future__ import annotations

import atexit
import gc
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from dataparallel.monitor.step_monitor import StepMonitor

#: The module with which torch's optimizers are there.
_OPTIMIZERS = "torch.optim"


class _Waiting(importlib.abc.Loader):
    """A loader that loads a module as another one does, and then calls a function."""

    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: Any) -> Any:
        """Make the module as the other loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Run the module."""
        self._loader.exec_module(module)
        self._then()


class _AfterImport(importlib.abc.MetaPathFinder):
    """A finder that finds nothing, and calls a function once torch's optimizers are imported."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the spec of that one module, as others find it."""
        if name != _OPTIMIZERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        places, loader = spec.submodule_search_locations, _Waiting(spec.loader, self._then)
        # The file is that which torch's own spec names.
        return importlib.util.spec_from_file_location(  # noqa: TID251
            name, spec.origin, loader=loader, submodule_search_locations=places
        )


class _Watch:
    """A monitor of the optimizer that steps first after each call of :meth:`look`."""

    def __init__(self) -> None:
        self.monitor: StepMonitor | None = None
        self._optimizer: Optimizer | None = None
        self._handles: list[Any] = []

    def look(self) -> None:
        """Wait for the next step, and from then on watch the optimizer that makes it."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._forget()
        is_found = False

        def note(optimizer: Optimizer, *_: Any) -> None:
            nonlocal is_found
            if not is_found:
                is_found = True
                # While torch calls hooks of one kind for all, no other one may be added to them.
                self._handles.append(optimizer.register_step_post_hook(watch))

        def watch(optimizer: Optimizer, *_: Any) -> None:
            handle.remove()
            if optimizer is not self._optimizer:
                self._watch(optimizer)

        handle = register_optimizer_step_pre_hook(note)
        self._handles.append(handle)

    def end(self) -> None:
        """Watch nothing more."""
        self._forget()
        monitor, self.monitor, self._optimizer = self.monitor, None, None
        if monitor is not None:
            monitor.__exit__(None, None, None)

    def _forget(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _watch(self, optimizer: Optimizer) -> None:
        try:
            from dataparallel.monitor.step_monitor import StepMonitor, num_watching

            monitor, self.monitor = self.monitor, None
            if monitor is not None:
                monitor.__exit__(None, None, None)
            # The program may have a monitor of its own.
            if not num_watching():
                self.monitor, self._optimizer = StepMonitor(_stepped_by(optimizer)), optimizer
                self.monitor.__enter__()
        except Exception as error:
            print(f"dataparallel: this program cannot be watched: {error}", file=sys.stderr)


def _stepped_by(optimizer: Optimizer) -> Any:
    """Return the wrapper of the parameters that an optimizer steps, or else the optimizer."""
    from dataparallel.parallel.data_parallel import DataParallel

    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    # Asking an object for its class may run code of a program's own.
    wrappers = [each for each in gc.get_objects() if issubclass(type(each), DataParallel)]
    of_these = [each for each in wrappers if not stepped.isdisjoint(map(id, each.parameters()))]
    # The last one of several, as where a cell of a notebook has run again.
    return max(of_these, key=lambda each: each.timeline.number, default=optimizer)


def begin() -> None:
    """Watch this process from the first step of an optimizer on, if there ever is one."""
    watch = _Watch()
    atexit.register(watch.end)
    sys.meta_path.insert(0, _AfterImport(watch.look))


# --- notebooks -----------------------------------------------------------------------------------

_of_notebook = _Watch()


def load_ipython_extension(shell: Any) -> None:
    """Watch the optimizer that steps first in each cell, for ``%load_ext dataparallel.monitor``."""
    shell.register_magic_function(_summarize, "line", "monitor")
    shell.events.register("pre_run_cell", _look)


def unload_ipython_extension(shell: Any) -> None:
    """Watch nothing more, for ``%unload_ext dataparallel.monitor``."""
    shell.events.unregister("pre_run_cell", _look)
    _of_notebook.end()


def _look(info: Any) -> None:
    _of_notebook.look()


def _summarize(line: str) -> Any:
    """Summarize the training that was watched last: its phases, and what to change first."""
    if _of_notebook.monitor is not None:
        return _of_notebook.monitor.summary()
    print("nothing was watched yet: no optimizer of torch has stepped since %load_ext")
    return None
