"""``python -m dpexp.reproduce.accounting``: the ε columns of Li et al. (2022), Tables 1, 2, 3, 7 and 8,
beside ours.

Their σ spends ε = 3 or 8 under RDP (their Appendix B); the columns say what the same σ costs under the
central limit theorem of Gaussian DP and under numerically composed tradeoff functions. Settings that the
paper states are used as stated, the others are those that come closest to all printed values of a data set
at once; every row says which."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from dpexp.privacy.accountants import epsilon, prv_bounds
from dpexp.privacy.events import releases
from dpexp.privacy.plan import make_plan
from dpexp.reproduce.documents import Document, Section
from dpexp.reproduce.paper import paper_table

COLUMNS = (
    "paper", "table", "row", "target ε", "printed CLT", "our CLT", "difference CLT", "printed composed", "our composed",
    "difference composed", "to the digit", "σ that gives both", "settings", "N", "B", "E", "steps", "δ", "σ", "note",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """N examples, expected batch B, E epochs, δ; steps are E·⌊N/B⌋, as with the last, incomplete batch
    dropped."""

    source: str
    num_examples: int
    batch_size: int
    epochs: int
    delta: str | float = "half_over_n"
    sample_rate_of: int | None = (
        None  # N of the data set whose B/N and number of steps are kept, where that is stated
    )
    note: str = ""


@dataclass(frozen=True)
class Printed:
    """One row of the paper: at ε = 3 and 8, the CLT value and the composed value."""

    table: str
    row: str
    values: tuple[tuple[float, float], tuple[float, float]]
    settings: tuple[Settings, ...]


_TRANSFER = "App. I: SST-2's sampling rate and number of updates; the printed values contradict it"
_SST2 = Settings(
    "stated",
    67349,
    1024,
    3,
    note="the CLT values cannot be had from B = 1024, E = 3; the composed ones can, to 0.01",
)
_E2E = Settings("stated", 42061, 1024, 10)
_DART = Settings("stated", 62659, 1024, 10, note="E2E's settings (App. I)")
_FITTED = "fitted to this table: composed values within 0.01, CLT values within 0.03"
_UNSTATED = "within the search range of Tables 5, 6; the choice is not stated"


def _as_sst2(num_examples: int) -> Settings:
    return Settings("stated", num_examples, 1024, 3, sample_rate_of=67349, note=_TRANSFER)


def _unstated(stated: Settings, epochs: int) -> Settings:
    return replace(stated, source="B, E inferred", batch_size=512, epochs=epochs, note=_UNSTATED)


def _closest(settings: Settings) -> tuple[Settings, ...]:
    """The settings, and with what else has to be inferred to come closest to every printed value of the
    data set."""
    if settings.num_examples == 42061:
        found = replace(settings, delta=1e-5, note="δ = 1e-5 instead of 1/(2N)")
    else:
        found = replace(
            settings,
            num_examples=56000,
            delta=8e-6,
            note="N = 56000, δ = 8e-6: any N of 56 to 58 thousand fits",
        )
    added = "δ inferred" if settings.num_examples == 42061 else "N, δ inferred"
    return settings, replace(found, source=added if settings.source == "stated" else f"B, E, {added}")


_FULL_E2E, _LORA_E2E, _RGP_E2E = _closest(_E2E), _closest(_unstated(_E2E, 50)), _closest(_unstated(_E2E, 10))
_FULL_DART, _LORA_DART, _RGP_DART = (
    _closest(_DART),
    _closest(_unstated(_DART, 50)),
    _closest(_unstated(_DART, 10)),
)
_LORA_FOR_ALL = tuple(
    replace(s, note="LoRA's values, printed for every method (Table 7 has each its own)") for s in _LORA_E2E
)


def _printed(table: str, row: str, own: str, settings: tuple[Settings, ...]) -> Printed:
    """A row of ours with what the paper prints; ``own`` is its task, or the method that the names of its rows begin with."""
    found = {
        (cell.settings["epsilon"], cell.settings["accountant"]): float(cell.value)
        for cell in paper_table("li2022", table)
        if cell.value
        and cell.settings.get("metric") == "epsilon"
        and own in (cell.settings["task"], cell.row.partition(",")[0])
    }
    at_3, at_8 = ((found[target, "gdp"], found[target, "prv"]) for target in ("3", "8"))
    return Printed(table, row, (at_3, at_8), settings)


@cache
def printed_rows() -> tuple[Printed, ...]:
    """Every row with ε columns, as transcribed, and the settings that are tried on it."""
    methods = (("full", 0), ("LoRA", 1), ("prefix", 0), ("RGP", 2), ("top2", 1), ("retrain", 0))
    glue = (("MNLI", 392702, 6000, 18), ("QQP", 363846, 6000, 18), ("QNLI", 104743, 2000, 6))
    return (
        *(
            _printed("1", name, name.lower(), (_as_sst2(n), Settings("B, E inferred", n, b, e, note=_FITTED)))
            for name, n, b, e in glue
        ),
        _printed("1", "SST-2", "sst2", (_SST2,)),
        _printed("2", "E2E, all methods", "e2e", _LORA_FOR_ALL),
        _printed(
            "3",
            "Persona-Chat",
            "personachat",
            (Settings("B, E inferred", 131438, 2048, 20, note=_FITTED),),
        ),
        *(_printed("7", f"E2E, {name}", name, (_FULL_E2E, _LORA_E2E, _RGP_E2E)[i]) for name, i in methods),
        *(
            _printed("8", f"DART, {name}", name, (_FULL_DART, _LORA_DART, _RGP_DART)[i])
            for name, i in methods
        ),
    )


@cache
def reproduce(settings: Settings, target_epsilon: float) -> dict[str, float]:
    """σ that spends the target under RDP, and what it costs under the CLT and composed; δ and the number of
    steps."""
    sampled = settings.sample_rate_of or settings.num_examples
    plan = make_plan(
        num_examples=settings.num_examples,
        expected_batch_size=settings.batch_size * settings.num_examples / sampled,
        steps=settings.epochs * (sampled // settings.batch_size),
        delta=settings.delta,
        epsilon=target_epsilon,
        accountant="rdp",
    )
    event = plan.event()
    parts = releases(event)
    assert parts is not None
    return {
        "σ": plan.noise_multiplier,
        "δ": plan.delta,
        "B": plan.expected_batch_size,
        "steps": plan.steps,
        "clt": epsilon(event, plan.delta, "gdp"),
        # what the authors' code reports as its estimate
        "composed": prv_bounds(parts, plan.delta, eps_error=0.02)[1],
    }


@cache
def _slopes(settings: Settings, target_epsilon: float) -> tuple[float, float]:
    """d(CLT ε)/d(log σ) and d(composed ε)/d(log σ) at our σ, from one step of half a percent."""
    ours = reproduce(settings, target_epsilon)
    sampled = settings.sample_rate_of or settings.num_examples
    step = 0.005
    moved = make_plan(
        num_examples=settings.num_examples,
        expected_batch_size=ours["B"],
        steps=settings.epochs * (sampled // settings.batch_size),
        delta=settings.delta,
        noise_multiplier=ours["σ"] * (1 + step),
    )
    event = moved.event()
    parts = releases(event)
    assert parts is not None
    clt = epsilon(event, moved.delta, "gdp") - ours["clt"]
    composed = prv_bounds(parts, moved.delta, eps_error=0.02)[1] - ours["composed"]
    return clt / math.log1p(step), composed / math.log1p(step)


def _to_the_digit(printed: tuple[float, float], ours: dict[str, float]) -> str:
    """Which of the two values round to what is printed."""
    same = [
        f"{value:.2f}" == f"{shown:.2f}"
        for shown, value in zip(printed, (ours["clt"], ours["composed"]), strict=True)
    ]
    return {(True, True): "both", (True, False): "CLT", (False, True): "composed", (False, False): "no"}[
        same[0], same[1]
    ]


def _sigma_for_both(printed: tuple[float, float], settings: Settings, target: float) -> str:
    """The change of σ, in percent, with which both values would round to print (to first order); "none" within 1%."""
    ours = reproduce(settings, target)
    low, high = -0.01, 0.01
    for shown, value, slope in zip(
        printed, (ours["clt"], ours["composed"]), _slopes(settings, target), strict=True
    ):
        ends = sorted((shown + side * 0.005 - value) / slope for side in (-1, 1))
        low, high = max(low, ends[0]), min(high, ends[1])
    if low > high:
        return "none"
    return f"{100 * min(max(0.0, low), high):+.3f}%" if not low <= 0 <= high else "ours"


def rows() -> list[dict[str, str]]:
    """One row for each printed pair and each of its settings, as text."""
    table: list[dict[str, str]] = []
    for printed in printed_rows():
        for target, (clt, composed) in zip((3, 8), printed.values, strict=True):
            for settings in printed.settings:
                ours = reproduce(settings, float(target))
                cells = (
                    "Li et al. 2022", printed.table, printed.row, str(target),
                    f"{clt:.2f}", f"{ours['clt']:.2f}", f"{ours['clt'] - clt:+.3f}",
                    f"{composed:.2f}", f"{ours['composed']:.2f}", f"{ours['composed'] - composed:+.3f}",
                    _to_the_digit((clt, composed), ours), _sigma_for_both((clt, composed), settings, float(target)),
                    settings.source, str(settings.num_examples), f"{ours['B']:.0f}", str(settings.epochs),
                    f"{ours['steps']:.0f}", f"{ours['δ']:.3g}", f"{ours['σ']:.3f}", settings.note,
                )  # fmt: skip
                table.append(dict(zip(COLUMNS, cells, strict=True)))
    return table


INTRODUCTION = (
    "σ spends the target ε under RDP; the columns are what that σ costs under the central limit theorem of"
    " Gaussian DP (CLT) and under composed tradeoff functions (PRV, its estimate). Differences are ours minus"
    " printed. Steps are E·⌊N/B⌋, δ = 1/(2N) where it is not inferred. No training, no data: only arithmetic.",
    "With E2E's stated N, B and E, and δ = 1e-5, every printed value of E2E is met to about 0.01. DART's stated N"
    " leaves up to 0.05; N = 56000 with δ = 8e-6 meets every value to about 0.01, so the columns seem to come from"
    " fewer training examples. Table 1: MNLI, QQP and QNLI need 1170, 1080 and 312 updates, not SST-2's 195 as App. I"
    " says; SST-2's own settings give its composed values, but not its CLT values.",
    '*To the digit*: which of our two values round to the printed ones. *σ that gives both*: "ours", or by how much σ would'
    " have to differ for both values to round to print (to first order), or none within 1%. Their tolerance in the search"
    " for σ is not stated (ours is 0.01%); differences below a tenth of a percent may be that, which nothing here tests."
    " Inferred settings were fitted to these same columns, so that agreement there is no independent check.",
    "Regenerate with `python -m dpexp.reproduce.accounting`.",
)


def document() -> Document:
    """The page: a section for each table of the paper."""
    found = rows()
    sections = tuple(
        Section(f"Table {name}", (), COLUMNS[2:], [row for row in found if row["table"] == name])
        for name in dict.fromkeys(row["table"] for row in found)
    )
    return Document(
        "accounting-li",
        "The ε columns of Li et al. (2022)",
        "li",
        INTRODUCTION,
        sections,
        COLUMNS,
        rule="---|",
    )


def main(folder: Path) -> None:
    """Write ``accounting-li.md`` and ``accounting-li.csv`` into the folder."""
    page = document()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "accounting-li.md").write_text(page.as_markdown(), encoding="utf-8")
    (folder / "accounting-li.csv").write_text(page.as_csv(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "results/tables"))
