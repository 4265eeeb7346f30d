"""What ``--help GROUP`` prints: the settings of a group, from the fields and the comments of the classes in `dpexp.schemas`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import json
import tokenize
from collections.abc import Iterator, Sequence
from typing import Any

from dpexp.config.usage import TAKE_A_WORD
from dpexp.errors import UserError, did_you_mean
from dpexp.schemas import CHOICES, group_class


def group_help(config_name: str, schema: type, groups: Sequence[str]) -> str:
    """Describe the settings of some groups.

    Args:
        config_name: the command.
        schema: its dataclass, whose fields are settings or, as dataclasses, groups of them.
        groups: their names.

    Raises:
        UserError: a word that names no group of this command.
    """
    known = {field.name: made for field in dataclasses.fields(schema) if (made := group_class(field))}
    lines = [
        f"dpexp {config_name} GROUP.SETTING=VALUE, with the value that holds where no choice of a group and no preset gives",
        "another one (--cfg job shows what holds in your command)",
    ]
    for group in groups:
        if group not in known:
            raise UserError(f"{group} is no group of settings{did_you_mean(group, list(known))}")
        lines.append("")
        for key, default, about in settings(known[group], group):
            lines.append(f"  {key}={json.dumps(default, ensure_ascii=False) if default != '' else ''}")
            lines += [f"      {line}" for line in [*about, ", ".join(CHOICES.get(key, ()))] if line]
    return "\n".join(lines)


def groups_asked(words: Sequence[str]) -> list[str]:
    """Find the words of a command that are neither options nor settings: after ``--help``, names of groups."""
    pairs = zip(["", *words], words, strict=False)
    return [
        word
        for before, word in pairs
        if not word.startswith("-") and "=" not in word and before not in TAKE_A_WORD
    ]


def settings(schema: type, prefix: str) -> Iterator[tuple[str, Any, list[str]]]:
    """Yield the dotted name, the default and the lines of comment of each setting, nested ones included."""
    comments = _comments(schema)
    for field in dataclasses.fields(schema):
        key = f"{prefix}.{field.name}"
        if inner := group_class(field):
            yield from settings(inner, key)
        else:
            made: Any = field.default_factory
            default = field.default if made is dataclasses.MISSING else made()
            yield key, default, comments[field.name]


def _comments(schema: type) -> dict[str, list[str]]:
    """Collect the comments of each field: those on its lines, and those on the lines right above."""
    source = inspect.getsource(schema)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    alone = {n for n, line in enumerate(source.splitlines(), 1) if line.lstrip().startswith("#")}
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    by_field = {}
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first, last = node.lineno, node.end_lineno or node.lineno
            while first - 1 in alone:
                first -= 1
            by_field[node.target.id] = [found[n] for n in range(first, last + 1) if n in found]
    return by_field
