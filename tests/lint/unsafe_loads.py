"""Finds what may run code out of data: unpickling, object collectives, eval, loaded libraries.

Note [Excused]
~~~~~~~~~~~~~~
What has to be, and why it is safe, is said in the line itself or in a comment right above it::

    # unsafe-load: written by this user into a folder that nobody else can write
    loader = ExtensionFileLoader(name, path)

A comment that excuses nothing is a fault as well, and so is one without a reason.

The names are resolved through the imports of the file. What hides better than that (a name put
together at run time, a class that is handed over) is not found: the rules are to keep those from
mistakes who mean well.
"""

from __future__ import annotations

import ast
import io
import pathlib
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

from tests.lint.rules import KEYWORDS, METHODS, MODULES, NAMES, OBJECT_COLLECTIVES, Rule

MARKER = "unsafe-load:"
#: A reason has at least so many words.
_MIN_WORDS = 3
_BUILTINS = frozenset({"eval", "exec", "compile", "getattr", "__import__"})


@dataclass(frozen=True, order=True)
class Finding:
    """A place in a source.

    Attributes:
        line: Where it is.
        text: What is wrong, and what to do instead.
    """

    line: int
    text: str


def check(path: pathlib.Path) -> list[Finding]:
    """The faults of a file."""
    return check_source(path.read_text(encoding="utf-8"))


def check_source(source: str) -> list[Finding]:
    """The faults of a source, by line."""
    checker = _Checker()
    tree = ast.parse(source)
    checker.bind(tree)
    checker.visit(tree)
    comments = _Comments(source)
    left = [
        Finding(node.lineno, text)
        for node, text in checker.found
        if not comments.excuse(node.lineno, node.end_lineno or node.lineno)
    ]
    return sorted({*left, *comments.faults()})


def markers(path: pathlib.Path) -> int:
    """How many excuses a file has."""
    source = path.read_text(encoding="utf-8")
    return len(_Comments(source).reasons) if MARKER in source else 0


class _Comments:
    """The excuses of a file."""

    def __init__(self, source: str) -> None:
        self.reasons: dict[int, str] = {}
        self._used: set[int] = set()
        # Lines that hold a comment alone, which may be the rest of a reason.
        self._alone: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type != tokenize.COMMENT:
                continue
            line = token.start[0]
            if token.line[: token.start[1]].strip() == "":
                self._alone.add(line)
            text = token.string.lstrip("# ")
            if text.startswith(MARKER):
                self.reasons[line] = text.removeprefix(MARKER).strip()

    def excuse(self, first: int, last: int) -> bool:
        lines = list(range(first, last + 1))
        above = first - 1
        while above in self._alone:
            lines.append(above)
            above -= 1
        excuses = [line for line in lines if line in self.reasons]
        self._used.update(excuses)
        return bool(excuses)

    def faults(self) -> Iterator[Finding]:
        for line, reason in self.reasons.items():
            if line not in self._used:
                yield Finding(line, f"'{MARKER}' excuses nothing here; remove it")
            if len(reason.split()) < _MIN_WORDS:
                yield Finding(line, f"'{MARKER}' needs the reason why it is safe")


class _Checker(ast.NodeVisitor):
    """Goes through a file; ``found`` has what it met."""

    def __init__(self) -> None:
        self.found: list[tuple[ast.expr | ast.stmt, str]] = []
        # What a name may stand for; and the names that were found where they were imported.
        self._bound: dict[str, set[str]] = {}
        self._known: set[str] = set()

    def bind(self, tree: ast.Module) -> None:
        """Learn all imports, also those below their use."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    whole = alias.name if alias.asname else alias.name.split(".")[0]
                    self._bind(alias.asname or whole, whole)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self._bind(alias.asname or alias.name, f"{node.module}.{alias.name}")

    def _bind(self, name: str, whole: str) -> None:
        self._bound.setdefault(name, set()).add(whole)

    def _add(self, node: ast.expr | ast.stmt, what: str, rule: Rule) -> None:
        self.found.append((node, f"{what}: {rule.reason}"))

    # --- names -----------------------------------------------------------------------------------

    def _names(self, node: ast.expr) -> set[str]:
        """The full names that an expression may have."""
        if isinstance(node, ast.Name):
            # Others are the file's own.
            return self._bound.get(node.id) or {node.id} & _BUILTINS
        if isinstance(node, ast.Attribute):
            return {f"{name}.{node.attr}" for name in self._names(node.value)}
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return {str(node.slice.value)} if "sys.modules" in self._names(node.value) else set()
        if isinstance(node, ast.Call):
            return self._made(node)
        return set()

    def _made(self, call: ast.Call) -> set[str]:
        """Names that are given as texts: getattr(module, "name"), import_module("name")."""
        functions = self._names(call.func)
        texts = [
            one.value
            for one in call.args
            if isinstance(one, ast.Constant) and isinstance(one.value, str)
        ]
        if functions & {"importlib.import_module", "__import__"} and texts:
            return {texts[0]}
        if "getattr" in functions and len(call.args) > 1 and texts:
            return {f"{name}.{texts[0]}" for name in self._names(call.args[0])}
        return set()

    def _rule(self, name: str) -> Rule | None:
        if name in NAMES:
            return NAMES[name]
        for module, (safe, rule) in MODULES.items():
            if name == module:
                return Rule(f"is handed on as a whole, and {rule.reason}")
            rest = name.removeprefix(f"{module}.")
            if rest != name and rest.split(".")[0] not in safe:
                return rule
        folder, _, last = name.rpartition(".")
        return METHODS[last] if folder and last in OBJECT_COLLECTIVES else None

    # --- the parts of a file ---------------------------------------------------------------------

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            if alias.name == "*":
                rule = self._rule(f"{node.module}.*")
            else:
                # A module is told by its uses.
                rule = None if whole in MODULES else self._rule(whole)
            if rule is not None:
                self._known.add(whole)
                self._add(node, whole, rule)

    def visit_Name(self, node: ast.Name) -> None:
        self._look(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not self._look(node) and not self._is_dotted(node):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._check_keywords(node)
        if not self._look(node) and not self._look(node.func, node):
            self.visit(node.func)
        for part in (*node.args, *(keyword.value for keyword in node.keywords)):
            # The module whose attribute was looked at, not one that is handed on.
            if not (self._made(node) and part is node.args[0]):
                self.visit(part)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                self._check_value(node, key.value, value)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not self._look(node):
            self.generic_visit(node)

    def _is_dotted(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name)

    def _look(self, node: ast.expr, call: ast.Call | None = None) -> bool:
        """Whether there is a rule for what an expression names."""
        rules = [(name, self._rule(name)) for name in sorted(self._names(node))]
        if isinstance(node, ast.Attribute) and not any(rule for _, rule in rules):
            rules.append((f".{node.attr}", METHODS.get(node.attr)))
            if call is None and node.attr == "recv":
                # Only its call tells whose it is.
                rules.pop()
        matches = [(name, rule) for name, rule in rules if rule is not None]
        for name, rule in matches:
            if name not in self._known and not (call is not None and rule.allows(call)):
                self._add(call or node, name, rule)
        return bool(matches)

    def _check_keywords(self, call: ast.Call) -> None:
        for keyword in call.keywords:
            if keyword.arg is not None:
                self._check_value(call, keyword.arg, keyword.value)

    def _check_value(self, node: ast.expr, name: str, value: ast.expr) -> None:
        wanted, rule = KEYWORDS.get(name, (None, None))
        is_wanted = isinstance(value, ast.Constant) and value.value is wanted
        if rule is not None and not is_wanted:
            self._add(node, f"{name}={ast.unparse(value)}", rule)
