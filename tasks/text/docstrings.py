"""English text on every machine: docstrings of installed packages, parsed and never imported."""

import ast
import importlib.metadata
import importlib.util
import itertools
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from dd_lightning.tasks.data import Origin

from .corpus import Document

PACKAGES = ("torch", "lightning")
# The prose of torch is in these; all of torch takes five times as long for twice the text.
TORCH_PARTS = ("nn", "optim", "distributed", "utils", "_torch_docs.py", "_tensor_docs.py")
REFERENCE, STDLIB = "reference", "stdlib"
GROUPS = (REFERENCE, STDLIB, *PACKAGES)
SKIPPED = {"__pycache__", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}
MIN_CHARACTERS = 200  # shorter ones are mostly signatures


def docs_origin() -> Origin:
    """Versions of what is read: another version is another corpus."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return Origin(
        source="docs",
        licence="PSF-2.0 (Python), BSD-3-Clause (torch), Apache-2.0 (lightning)",
        attribution="Documentation of CPython, PyTorch and PyTorch Lightning, by their authors.",
        versions={"python": platform.python_version(), **versions},
    )


def docs_documents() -> Iterator[Document]:
    """Language reference first, then the packages file by file in turn, each sorted by path.

    Taking turns keeps the mixture even wherever a byte limit ends it.
    """
    yield from _topics()
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    torch, lightning = (_package_folder(name) for name in PACKAGES)
    torch_files = [file for part in TORCH_PARTS for file in _python_files(torch / part)]
    turns = itertools.zip_longest(
        ((stdlib, file, STDLIB) for file in _python_files(stdlib)),
        ((torch.parent, file, "torch") for file in sorted(torch_files)),
        ((lightning.parent, file, "lightning") for file in _python_files(lightning)),
    )
    for root, file, group in (entry for turn in turns for entry in turn if entry is not None):
        yield from _docstrings(file, file.relative_to(root).as_posix(), group)


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)  # finds a top-level package without importing it
    if spec is None or spec.origin is None:
        raise ValueError(f"source=docs reads the docstrings of {name}, which is not installed")
    return Path(spec.origin).parent


def _python_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = (p for p in path.rglob("*.py") if not SKIPPED.intersection(p.relative_to(path).parts))
    return sorted(files)


def _topics() -> Iterator[Document]:
    """The language reference as CPython ships it for `help()`: one dict of texts."""
    path = Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Dict):
            for key, value in sorted(ast.literal_eval(node).items()):
                yield Document(f"pydoc/{key}", value.encode(), REFERENCE)


def _docstrings(path: Path, name: str, group: str) -> Iterator[Document]:
    """Docstrings of a module, its classes and functions; for torch also those passed to
    `add_docstr`, which documents what is written in C++."""
    for node in ast.walk(_parse(path)):
        text = None
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
        elif isinstance(node, ast.Call) and path.name in TORCH_PARTS:
            literals = [a.value for a in node.args if isinstance(a, ast.Constant)]
            text = next((v for v in literals if isinstance(v, str)), None)
        if text is not None and len(text) >= MIN_CHARACTERS:
            yield Document(f"{name}:{getattr(node, 'lineno', 0)}", text.encode(), group)


def _parse(path: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # other people's escape sequences
        return ast.parse(path.read_bytes(), filename=path.name)
