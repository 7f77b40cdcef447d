"""How large the package is, and whether each name stands for one thing: the numbers of house.md.

Run it from the top of a checkout: ``python lab/house.py``. Lines of code leave out blank
lines, comments and docstrings.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "perturbdiff"
_SILENT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A file of the package.

    Attributes
    ----------
    path
        Below the package.
    lines, code
        All lines, and those of code.
    functions
        Name, lines of code and number of parameters of each function.
    """

    path: Path
    lines: int
    code: int
    functions: list[tuple[str, int, int]]


def read(path: Path) -> Module:
    """Return what is counted of a file."""
    text = path.read_text()
    tree = ast.parse(text)
    code = _lines_with_code(text) - _lines_of_docstrings(tree)
    functions = [
        (
            node.name,
            len(code & set(range(node.lineno, (node.end_lineno or node.lineno) + 1))),
            len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs),
        )
        for node in ast.walk(tree)
        if isinstance(node, _Function)
    ]
    return Module(path.relative_to(PACKAGE), text.count("\n"), len(code), functions)


def _lines_with_code(text: str) -> set[int]:
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SILENT:
            found |= set(range(token.start[0], token.end[0] + 1))
    return found


def _lines_of_docstrings(tree: ast.Module) -> set[int]:
    """Return the lines of texts that stand by themselves."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            found |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def modules() -> list[Module]:
    """Return all files of the package but the adapters, which run in environments of others."""
    return [read(path) for path in sorted(PACKAGE.rglob("*.py")) if "adapters" not in path.parts]


def named_twice(found: list[Module]) -> dict[str, list[str]]:
    """Return the module names that stand in several folders, with these."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in found:
        if not module.path.stem.startswith("__"):
            places[module.path.stem].append(str(module.path.parent))
    return {name: folders for name, folders in places.items() if len(folders) > 1}


def largest_folder(found: list[Module]) -> tuple[str, int]:
    """Return the folder with the most modules, and their number without ``__init__``."""
    [(folder, number)] = Counter(str(m.path.parent) for m in found if m.path.stem != "__init__").most_common(
        1
    )
    return folder, number


def main() -> None:
    """Print the numbers."""
    found = modules()
    named = [m for m in found if m.path.stem != "__init__"]
    longest = max(found, key=lambda m: m.lines)
    functions = [(*function, m.path) for m in found for function in m.functions]
    name, lines, _, path = max(functions, key=lambda function: function[1])
    folder, number = largest_folder(found)
    print(f"modules: {len(named)} and {len(found) - len(named)} __init__")
    print(f"lines of code: {sum(m.code for m in found):,}")
    print(f"longest function: {lines} ({name} in {path})")
    print(f"longest file: {longest.lines} lines, {longest.code} of code ({longest.path})")
    print(f"files above 350 lines: {sum(m.lines > 350 for m in found)}")
    print(f"largest folder: {number} ({folder})")
    print(f"functions of more than 8 parameters: {sum(parameters > 8 for *_, parameters, _ in functions)}")
    print(f"names that stand twice: {named_twice(found) or 'none'}")


if __name__ == "__main__":
    main()
