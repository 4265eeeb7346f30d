"""The tables that are arithmetic, as documents: what `accounting`, `complexity_tables` and `exact` compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from dpexp.reproduce import accounting, complexity_tables
from dpexp.reproduce.documents import Document, Rows, Section


def accounting_li() -> Document:
    """The ε columns of Li et al."""
    rows = accounting.rows()
    sections = tuple(
        Section(f"Table {name}", (), accounting.COLUMNS[2:], [row for row in rows if row["table"] == name])
        for name in dict.fromkeys(row["table"] for row in rows)
    )
    return Document(
        "accounting-li", "The ε columns of Li et al. (2022)", "li", accounting.INTRODUCTION, sections, accounting.COLUMNS,
        markdown=accounting.as_markdown(rows),
    )  # fmt: skip


@cache
def _complexity() -> dict[str, str]:
    return complexity_tables.pages()


def _of(name: str, title: str, rows: Callable[[], Rows], note: str = "") -> Callable[[], Document]:
    def build() -> Document:
        found = rows()
        section = Section("", (note,) if note else (), tuple(found[0]), found)
        return Document(name, title, "bu", (), (section,), markdown=_complexity()[f"{name}.md"])

    return build


COMPLEXITY: dict[str, Callable[[], Document]] = {
    "complexity-bu-table4": _of(
        "complexity-bu-table4", "Bu et al., Table 4: space of per-example norms, one 224 x 224 image", complexity_tables.table_4,
        "Floats; `2.0e7 x 4` is four layers of 2.0 · 10⁷. A layer's norm takes the smaller of the two.",
    ),
    "complexity-bu-table5": _of(
        "complexity-bu-table5", "Bu et al., Tables 2 and 5: one layer, as printed and as derived", complexity_tables.table_5,
        f"⟨a, b⟩: a where gradients are instantiated, b where the ghost norm is taken (2T² < pd). {complexity_tables.SPACE}",
    ),
    "complexity-bu-table8": _of(
        "complexity-bu-table8", "Whole networks: space of per-example norms, every implementation relative to non-DP",
        complexity_tables.table_8,
        "Bu et al. refer to such tables as 8 and 10, which are not in the text that we have. Floats of one example.",
    ),
    "complexity-bu-figure7": _of(
        "complexity-bu-figure7", "Bu et al., Figure 7: from which depth on the ghost norm takes less space",
        complexity_tables.figure_7, "Shortcut convolutions left out, as in the paper.",
    ),
}  # fmt: skip
