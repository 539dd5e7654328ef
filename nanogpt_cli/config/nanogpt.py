"""Where a nanoGPT user finds what there was called otherwise, and nanoGPT's Python configs as TOML, never executed."""

import ast
import operator
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from nanogpt_cli.config.schema import settings
from nanogpt_cli.config.setting import shown
from nanogpt_cli.errors import UserError, typed

ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


@cache
def elsewhere() -> dict[str, dict[str, str]]:
    """What to type instead of "flags" and "commands" that are not here, by name."""
    return tomllib.loads(Path(__file__).with_name("elsewhere.toml").read_text("utf-8"))


def refuse_python(path: Path) -> NoReturn:
    """Answer `--config old.py` with a UserError that holds the whole TOML file to save."""
    try:
        tree = ast.parse(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{path}: settings are read from TOML, and this cannot be read: {error}") from None
    toml = path.with_suffix(".toml").name
    raise UserError(
        f"{path}: settings are read from TOML; Python is never executed. Its assignments, to be saved as {toml}:\n\n"
        f"{as_toml(tree)}\n"
        f"Then type: nanogpt train --preset gpt2 --config {typed(toml)}\n"
        "(the preset gpt2 holds what nanoGPT's train.py has by default)"
    )


def as_toml(tree: ast.Module) -> str:
    """The simple assignments of a nanoGPT config in our sections; what has no place stands in comments."""
    import tomli_w

    # the activation of nanoGPT's models; ours is GPT-2's own
    tables: dict[str, dict[str, Any]] = {"model": {"activation": "gelu"}}
    remarks: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Expr):  # a docstring or print needs no word
            continue
        try:
            name, value = _assignment(node)
        except (ValueError, ArithmeticError):
            remarks.append(f"# line {node.lineno}: no simple assignment, left out")
            continue
        ours, value, remark = _translate(name, value)
        if ours is None:
            remarks.append(f"# {name}: {remark}")
        elif value is not None:
            tables.setdefault(settings()[ours].section, {})[ours] = value
    return "\n".join([*remarks, *([""] if remarks else []), tomli_w.dumps(tables)])


def _assignment(node: ast.stmt) -> tuple[str, Any]:
    """Name and value of `name = constant`, sums and products of constants included; ValueError for anything else."""
    match node:
        case ast.Assign(targets=[ast.Name(name)]):
            return name, _constant(node.value)
    raise ValueError


def _constant(node: ast.expr) -> Any:
    if not isinstance(node, ast.BinOp):
        return ast.literal_eval(node)
    left, right, apply = _constant(node.left), _constant(node.right), ARITHMETIC.get(type(node.op))
    if apply is None or not isinstance(left, int | float) or not isinstance(right, int | float):
        raise ValueError
    return apply(left, right)


def _translate(name: str, value: Any) -> tuple[str | None, Any, str]:
    """Our setting, its value (None: the default says it already) and a remark where there is no setting."""
    if name == "decay_lr":
        return "schedule", None if value else "constant", ""
    if name == "wandb_log":
        return "wandb", value or None, ""
    if name == "init_from" and value in ("scratch", "resume"):
        return (name, None, "") if value == "scratch" else (None, None, elsewhere()["flags"]["resume"])
    known = settings().get(name)
    if known is None:
        return None, None, elsewhere()["flags"].get(name, "no setting of nanogpt")
    try:
        return name, known.check(value), ""
    except ValueError as error:
        return None, None, f"{shown(value)} does not fit: {error}"
