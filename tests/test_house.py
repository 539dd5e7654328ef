"""The house stays as it is laid out: who imports whom, and what may not be imported at module level."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import nanogpt_cli

PACKAGE = Path(nanogpt_cli.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
# from the top of the house down: a room imports only from rooms below it; modules beside them (errors, files, keyed)
# belong to all, and api.py stands above all rooms but the commands
ROOMS = ("cli", "training", "inference", "weights", "view", "runs", "machine", "model", "data", "config")
MAY_IMPORT_TORCH = {"training", "inference", "weights", "machine", "model"}
MAY_IMPORT_TORCH_TOO = {"api.py", "data/tokens/batches.py", "runs/checkpoint.py"}
HEAVY_FOR_CLI = {"torch", "numpy", "rich", "tiktoken", "pydantic"}


def room(path: Path) -> str | None:
    """The room a module lies in; None for one beside the rooms."""
    first = path.relative_to(PACKAGE).parts[0]
    return first if first in ROOMS else None


def imports(path: Path, *, module_level: bool) -> Iterator[str]:
    """Full names of what a module imports; at module level without what only a type checker reads."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(_at_module_level(tree)) if module_level else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _at_module_level(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _at_module_level(node)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_room_imports_from_above(path: Path) -> None:
    own = room(path)
    found = {name.split(".")[1] for name in imports(path, module_level=False) if name.startswith("nanogpt_cli.")} & set(
        ROOMS
    )
    allowed = set(ROOMS[ROOMS.index(own) :]) if own else set()
    if path.name == "api.py":
        allowed = set(ROOMS[1:])
    if path.name == "__main__.py":
        allowed = set(ROOMS)
    assert found <= allowed


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_torch_is_not_imported_before_it_is_needed(path: Path) -> None:
    if room(path) not in MAY_IMPORT_TORCH and str(path.relative_to(PACKAGE)) not in MAY_IMPORT_TORCH_TOO:
        assert "torch" not in {name.split(".")[0] for name in imports(path, module_level=True)}


@pytest.mark.parametrize("path", [p for p in MODULES if room(p) == "cli"], ids=lambda path: path.name)
def test_commands_import_only_what_help_needs(path: Path) -> None:
    assert not HEAVY_FOR_CLI & {name.split(".")[0] for name in imports(path, module_level=True)}


def test_every_module_says_what_it_is_for() -> None:
    silent = [str(p) for p in MODULES if p.stat().st_size and not ast.get_docstring(ast.parse(p.read_text("utf-8")))]
    assert silent == []


def test_nothing_is_left_to_do() -> None:
    words = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    assert [str(p) for p in MODULES if any(word in p.read_text(encoding="utf-8") for word in words)] == []
