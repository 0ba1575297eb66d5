"""Writes docs/reference/refusals.md: every error of Keras, the federated part and the tools.

    python -m tools.build.refusals

The sentences are those of the code, with what differs from call to call in braces.
"""

from __future__ import annotations

import ast
import collections
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
_FOLDERS = ("keras", "federated", "cli")
_NO_REFUSALS = {"Unsupported", "AssertionError", "NotImplementedError", "OSError", "SystemExit"}
_HEAD = """\
# Refusals

Every error of `bandmf_tf.keras`, `bandmf_tf.federated` and the command-line tools, by module. Each
sentence names what was wrong and the way out. Braces stand for what differs from call to call.
Search this page for a few words of the message that you see. Nearly all errors derive from
`bandmf_tf.BandMFError`; `ConnectionError` and `RuntimeError` are Python's own.

`python -m tools.build.refusals` writes this page from the code. Errors of other folders, such as
those of numbers out of range, have the same form and stand in the code alone.
"""


def page() -> str:
    """Returns the page."""
    parts = [_HEAD]
    for folder in _FOLDERS:
        for path in sorted((ROOT / "bandmf_tf" / folder).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            lines = [f"- `{kind}`: {_escaped(text)}" for kind, text in refusals(path.read_text())]
            if lines:
                parts.append("\n".join([f"## {module}\n", *dict.fromkeys(lines), ""]))
    return "\n".join(parts)


def refusals(source: str) -> Iterator[tuple[str, str]]:
    """Yields the class and the sentence of each error that `source` raises, in its order."""
    tree = ast.parse(source)
    assigned = [
        (target.id, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    times = collections.Counter(name for name, _ in assigned)
    known = {name: value for name, value in assigned if times[name] == 1 and _is_text(value)}
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    calls = [exc for exc in raised if isinstance(exc, ast.Call) and exc.args]
    for call in sorted(calls, key=lambda call: call.lineno):
        kind = ast.unparse(call.func).rpartition(".")[2]
        if kind not in _NO_REFUSALS and not kind.startswith("_"):
            yield kind, _sentence(call.args[0], known)


def _sentence(node: ast.expr, known: dict[str, ast.expr]) -> str:
    """Returns the text of an expression, with braces around what is known only when it runs."""
    if isinstance(node, ast.Name) and node.id in known:
        return _sentence(known[node.id], {})
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_sentence(part, known) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _sentence(node.value, known)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _sentence(node.left, known) + _sentence(node.right, known)
    return f"{{{ast.unparse(node)}}}"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant | ast.JoinedStr)


def _escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in "\\`*_<>[]|" else c for c in " ".join(text.split()))


if __name__ == "__main__":
    (ROOT / "docs" / "reference" / "refusals.md").write_text(page())
