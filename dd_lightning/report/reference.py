"""The configuration reference: keys, defaults and comments of the YAML files that ship.

A key's meaning is the comment on its line, else the comment lines right above it; timeouts have
theirs in `Timeouts`. Nothing here is written by hand but the order and the heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from dd_lightning.commands.doctor import timeouts

# the files whose keys are listed, and under which prefix they are set
DETAILED = {
    "config": "",
    "algorithm/paper": "algorithm.",
    "algorithm/data_parallel": "algorithm.",
    "network/us_eu": "network.",
    "chaos/none": "chaos.",
    "chaos/poisson": "chaos.",
    "launcher/local": "launcher.",
    "learner/single": "learner.",
    "simulate/default": "simulate.",
    "trainer/default": "trainer.",
    "timeouts/default": "timeouts.",
}
HEAD = """# Configuration reference

Generated from `conf/` and the code (`python scripts/configuration_reference.py`); a test
holds it to them. Keys are set as `key=value` behind `dd-lightning launch`, groups as
`group=choice`; `dd-lightning launch --cfg job` prints what a run would take.
"""
NOT_KEYS = ("defaults", "hydra")


@dataclass(frozen=True, slots=True)
class Key:
    """One setting of a YAML file: its dotted name, the text of its default, what it is."""

    name: str
    default: str
    meaning: str


def reference(conf: Path) -> str:
    """The page, as Markdown.

    Args:
        conf: folder with `config.yaml` and the groups.
    """
    parts = [HEAD]
    tasks = {f"task/{path.stem}": "task." for path in sorted((conf / "task").glob("*.yaml"))}
    for name, prefix in (DETAILED | tasks).items():
        parts.append(_keys(conf / f"{name}.yaml", name, prefix))
    parts.append("## Choices of the groups\n")
    for group in sorted({path.parent for path in conf.glob("*/*.yaml")}):
        parts.append(_choices(group))
    return "\n".join(parts).rstrip() + "\n"


def keys_of(path: Path) -> list[Key]:
    """Every leaf of a YAML file, in its order."""
    text = path.read_text()
    root = yaml.compose(text)
    return list(_leaves(root, text.splitlines(), "")) if root is not None else []


def _leaves(node: yaml.MappingNode, lines: list[str], prefix: str) -> Iterator[Key]:
    for key, value in node.value:
        name = prefix + key.value
        if not prefix and key.value in NOT_KEYS:
            continue
        if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
            yield from _leaves(value, lines, f"{name}.")
            continue
        default = _source(value, lines)
        yield Key(name, default, _comment(key.start_mark, value.end_mark, lines))


def _source(node: yaml.Node, lines: list[str]) -> str:
    start, end = node.start_mark, node.end_mark
    if start.line == end.line:
        return lines[start.line][start.column : end.column].strip()
    last = lines[end.line][: end.column] if end.line < len(lines) else ""
    taken = [lines[start.line][start.column :], *lines[start.line + 1 : end.line], last]
    return " ".join(_without_comment(line).strip() for line in taken).strip()


def _comment(start: yaml.Mark, end: yaml.Mark, lines: list[str]) -> str:
    line = start.line
    last = end.line if end.line < len(lines) and end.column else max(line, end.line - 1)
    said = [_after_hash(lines[index]) for index in range(line, last + 1)]
    below = last + 1
    while below < len(lines) and re.match(r"\s{12,}#", lines[below]):  # goes on under itself
        said.append(_after_hash(lines[below]))
        below += 1
    if not any(said):
        above = line - 1
        while above > 0 and lines[above].startswith(" " * start.column + "#"):
            said.insert(0, _after_hash(lines[above]))
            above -= 1
    return " ".join(part for part in said if part)


def _after_hash(line: str) -> str:
    found = re.search(r"(?:^|\s)#\s*(.*)$", line)
    return found.group(1).strip() if found else ""


def _without_comment(line: str) -> str:
    return re.sub(r"(?:^|\s)#.*$", "", line)


def _keys(path: Path, name: str, prefix: str) -> str:
    meanings = {key: told["meaning"] for key, told in timeouts().items()}
    rows = ["| key | default | |", "|---|---|---|"]
    for key in keys_of(path):
        meaning = meanings.get(key.name, "") if prefix == "timeouts." else key.meaning
        rows.append(f"| `{prefix}{key.name}` | `{_cell(key.default)}` | {_cell(meaning)} |")
    return f"## {name}.yaml\n\n{_first_sentences(path)}\n\n" + "\n".join(rows) + "\n"


def _choices(group: Path) -> str:
    rows = [f"### {group.name}\n", "| choice | |", "|---|---|"]
    for path in sorted(group.glob("*.yaml")):
        rows.append(f"| `{path.stem}` | {_cell(_first_sentences(path))} |")
    return "\n".join(rows) + "\n"


def _first_sentences(path: Path) -> str:
    """The comment lines at the top of a file, as one line."""
    said = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            said.append(line.lstrip("# ").strip())
    return " ".join(said)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
