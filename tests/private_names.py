"""Finds where a source touches a name that torch keeps to itself.

Torch's names are resolved through the imports of a file, and through variables that stand for them.
An attribute of an object is torch's if none of our files defines it: what an object is cannot be
told from a source. So a private attribute that has the same name as one of ours slips through,
unless it is listed in ``TORCHS_OWN``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

#: What has to be touched where it is needed, and why.
ALLOWED = {
    # The registries of `nn.Module`, which its documentation of subclasses names.
    "_parameters",
    "_buffers",
    "_modules",
    # The counter of changes of a tensor, in torch's notes on autograd.
    "_version",
    # argparse's, of a parser: its options, which `shtab` reads too.
    "_actions",
    # Python's, of named tuples.
    "_asdict",
    "_fields",
    "_make",
    "_replace",
}
#: Attributes of torch's objects that some of our own classes have, too.
TORCHS_OWN = {
    "_base",
    "_cdata",
    "_get_backend",
    "_indices",
    "_metadata",
    "_schema",
    "_timeout",
    "_values",
}

_TEXT = re.compile(r"torch(\.\w+)*\._(?!_)\w+(\.\w+)*")
_BY_NAME = {"attrgetter", "delattr", "getattr", "hasattr", "methodcaller", "setattr"}


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore."""
    # What we put on torch's objects begins with our own name.
    return bool(re.match(r"_(?!_|dataparallel_)\w", name))


def defined_in(tree: ast.AST) -> Iterator[str]:
    """The private names that a source gives to functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            yield from ast.literal_eval(node.value)


def touches(tree: ast.Module, ours: Iterable[str]) -> list[str]:
    """The places of a source that touch a private name of torch, each with its line.

    Args:
        tree: The source.
        ours: Private names that our own files define.
    """
    finder = _Finder(tree, frozenset(ours) | ALLOWED)
    finder.visit(tree)
    return finder.found


class _Finder(ast.NodeVisitor):
    def __init__(self, tree: ast.Module, ours: frozenset[str]) -> None:
        self.found: list[str] = []
        self._ours = ours
        # What a name of the file may stand for.
        self._bound: dict[str, set[str]] = {}
        self._docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body
            if isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    whole = alias.name if alias.asname else alias.name.split(".")[0]
                    self._bind(alias.asname or whole, whole)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self._bind(alias.asname or alias.name, f"{node.module}.{alias.name}")
        # A variable may stand for another one.
        for _ in range(3):
            for node in ast.walk(tree):
                if isinstance(node, ast.Assign):
                    targets: list[ast.expr] = node.targets
                elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
                    targets = [node.target]
                else:
                    continue
                for target in targets:
                    if isinstance(target, ast.Name) and node.value is not None:
                        for name in self._names(node.value):
                            self._bind(target.id, name)

    def _bind(self, name: str, whole: str) -> None:
        self._bound.setdefault(name, set()).add(whole)

    def _names(self, node: ast.expr) -> set[str]:
        """The full names that an expression may have."""
        if isinstance(node, ast.Name):
            return self._bound.get(node.id, set())
        if isinstance(node, ast.Attribute):
            return {f"{name}.{node.attr}" for name in self._names(node.value)}
        if isinstance(node, ast.Subscript) and "sys.modules" in self._names(node.value):
            return _texts([node.slice])
        if isinstance(node, ast.Call):
            called = self._names(node.func)
            if called & {"sys.modules.get", "importlib.import_module"}:
                return _texts(node.args[:1])
            if isinstance(node.func, ast.Name) and node.func.id == "getattr":
                parts = _texts(node.args[1:2])
                return {f"{name}.{p}" for name in self._names(node.args[0]) for p in parts}
        return set()

    def _add(self, node: ast.AST, what: str) -> None:
        self.found.append(f"{getattr(node, 'lineno', 0)}: {what}")

    # --- the parts of a file ---------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if _is_torchs(alias.name):
                self._add(node, f"imports {alias.name}")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if _is_torchs(f"{node.module}.{alias.name}"):
                self._add(node, f"imports {node.module}.{alias.name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        names = self._names(node)
        private = sorted(filter(_is_torchs, names))
        if private:
            self._add(node, private[0])
            return
        if not names and is_private(node.attr):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if node.attr not in self._ours or (node.attr in TORCHS_OWN and not own):
                self._add(node, f"{ast.unparse(node)}, which is none of ours")
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if isinstance(node.func, ast.Name):
            function = node.func.id
        if function in _BY_NAME:
            for name in filter(is_private, _texts(node.args)):
                if name not in self._ours or name in TORCHS_OWN:
                    self._add(node, f"{function}() of {name}, which is none of ours")
        for keyword in node.keywords:
            if keyword.arg and is_private(keyword.arg) and keyword.arg not in self._ours:
                self._add(node, f"passes {keyword.arg}, which is none of ours")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        for name in filter(is_private, _texts([node.slice])):
            if name not in self._ours:
                self._add(node, f"looks up {name}, which is none of ours")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if any(isinstance(operation, (ast.In, ast.NotIn)) for operation in node.ops):
            for name in filter(is_private, _texts([node.left])):
                if name not in self._ours:
                    self._add(node, f"looks for {name}, which is none of ours")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        # A name that is kept for later.
        elements = getattr(node.value, "elts", [node.value])
        for name in filter(is_private, _texts(elements)):
            if name not in self._ours:
                self._add(node, f"keeps the name {name}, which is none of ours")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        text = node.value
        if isinstance(text, str) and _TEXT.fullmatch(text) and id(node) not in self._docstrings:
            self._add(node, repr(text))


def _is_torchs(name: str) -> bool:
    first, *others = name.split(".")
    return first == "torch" and any(map(is_private, others))


def _texts(nodes: Iterable[ast.expr]) -> set[str]:
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str)}
