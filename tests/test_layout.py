"""The house rules that a script can see."""

import ast
import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STAGES = ("data", "eval", "export", "recipes", "train")
SOURCES = [ROOT / "draftsmith.py", *(p for s in STAGES for p in sorted((ROOT / s).glob("*.py")))]


@pytest.mark.parametrize("file", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_functions_and_parameters_stay_small(file: Path) -> None:
    text = file.read_text()
    assert text.count("\n") <= 300, "a file is at most 300 lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or 0) - node.lineno + 1
            assert size <= 60, f"{node.name}: {size} lines"
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            given = [a for a in arguments if a.arg not in ("self", "ctx")]
            # Operators and kernels take their tensors one by one.
            flat = re.search(r"triton\.jit|custom_op|register_fake", " ".join(map(ast.unparse, node.decorator_list)))
            assert len(given) <= (8 if flat else 6), f"{node.name}: too many parameters"
            if not node.name.startswith("_") and node.name != "forward":
                assert ast.get_docstring(node) or _nested(node, file), f"{node.name}: public, without a docstring"


def _nested(node: ast.AST, file: Path) -> bool:
    outer = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return any(
        o.lineno < node.lineno and (o.end_lineno or 0) >= (node.end_lineno or 0) for o in outer
    )  # fmt: skip


def test_nothing_imports_eval_by_name_or_pickles() -> None:
    for file in SOURCES:
        text = file.read_text()
        assert not re.search(r"^\s*import eval\b", text, re.M), f"{file.name}: use `from eval.x import y`"
        assert not re.search(r"^\s*(import|from) pickle\b|torch\.load\(|torch\.save\(", text, re.M), (
            f"{file.name}: no pickle"
        )


def test_the_packages_are_ours_and_no_other_distribution_brings_them() -> None:
    owners = importlib.metadata.packages_distributions()
    for stage in STAGES:
        assert {o.lower() for o in owners.get(stage, ["draftsmith"])} == {"draftsmith"}
        assert (ROOT / stage / "__init__.py").read_text() == ""


def test_no_file_names_a_machine() -> None:
    # Written in pieces so that this file does not name them itself.
    hosts = ["py" + "pi.org", "python" + "hosted", "registry.npm" + "js", "deb.deb" + "ian"]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    for name in tracked:
        if (ROOT / name).suffix in (".py", ".md", ".yaml", ".toml", ".txt", ""):
            text = (ROOT / name).read_text()
            assert not any(host in text for host in hosts), name
            assert not re.search(r"(?<![\w.])/(wo" + r"rk|ro" + r"ot|fa" + r"rm)/", text), name


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").read_text().count("\n") < 200
