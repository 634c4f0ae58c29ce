"""The module that a file of the user's makes, built without memory for its parameters."""

from __future__ import annotations

import importlib.util
import inspect
import pathlib
import sys
from types import ModuleType
from typing import Any

import torch
from torch import nn

# The beginning of the names under which files are imported.
_PREFIX = "model_to_fit_"
_WANTED = "a function without arguments that returns a module, or a class of such modules"


def load(named: str) -> nn.Module:
    """Return the module that ``FILE:NAME`` makes, on the meta device."""
    path, _, name = named.rpartition(":")
    if not path or not name:
        raise ValueError(f"{named!r} names no function; write FILE:NAME, as in model.py:make_model")
    file = pathlib.Path(path)
    if not file.is_file():
        raise ValueError(f"there is no file {path}")
    names = vars(_import(file))
    if name not in names:
        own = [each for each, value in names.items() if _is_own(value)]
        raise ValueError(
            f"{path} has no {name}; it has: {', '.join(own) or 'no function and no class'}"
        )
    return _build(names[name], named)


def _import(file: pathlib.Path) -> ModuleType:
    """Import a file under a name that no other module has; its neighbors can be imported."""
    name = _PREFIX + file.stem
    # The user has named it on the command line, to be run.
    spec = importlib.util.spec_from_file_location(name, file)  # noqa: TID251
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is not a file of Python, whose names end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{file} cannot be imported: {type(error).__name__}: {error}; what trains belongs "
            "below: if __name__ == '__main__'"
        ) from error
    finally:
        sys.path.remove(str(file.parent.resolve()))
    return module


def _is_own(value: Any) -> bool:
    is_one = inspect.isfunction(value) or inspect.isclass(value)
    return is_one and value.__module__.startswith(_PREFIX)


def _build(make: Any, named: str) -> nn.Module:
    if isinstance(make, nn.Module):
        return make
    if not callable(make):
        raise ValueError(f"{named} is of type {type(make).__name__}, but should be {_WANTED}")
    signature = inspect.signature(make)
    try:
        signature.bind()
    except TypeError as error:
        raise ValueError(
            f"{named}{signature} wants arguments, but should be {_WANTED}; write one that gives "
            "them"
        ) from error
    try:
        with torch.device("meta"):
            module = make()
    except Exception as error:
        raise ValueError(
            f"{named} cannot build its module on torch's meta device, where tensors have a shape "
            f"and no values: {type(error).__name__}: {error}; let it build the module alone, "
            "without .to(device), .item() or loaded weights"
        ) from error
    if not isinstance(module, nn.Module):
        raise ValueError(f"{named} returned {type(module).__name__}, but should be {_WANTED}")
    if any(isinstance(each, nn.UninitializedParameter) for each in module.parameters()):
        raise ValueError(f"{named} has lazy parameters, whose shapes only a first forward tells")
    return module
