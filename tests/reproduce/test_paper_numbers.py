"""The transcribed tables: their form, what the papers say twice, and their own sums."""

import csv
import math
import re

import pytest

from dpexp.complexity import formulas
from dpexp.errors import UserError
from dpexp.reproduce import complexity_tables
from dpexp.reproduce.paper import COLUMNS, FOLDER, PAPERS, paper_table, paper_tables

EVERY = [f"{paper}_{table}" for paper, table in paper_tables()]
GLUE = ("MNLI-m", "MNLI-mm", "QQP", "QNLI", "SST-2")
METHODS = ("full", "LoRA", "prefix", "RGP", "top2", "retrain")
GUARANTEES = ("ε = 3", "ε = 8", "non-private")
GENERATION = {"7": ("BLEU", "NIST", "METEOR", "ROUGE-L", "CIDEr"),
              "8": ("METEOR", "ROUGE-1", "ROUGE-2", "ROUGE-L", "BLEU", "BERTScore", "BLEURT")}  # fmt: skip


def numbers(paper, table):
    """(row, column) -> number, None for text and empty cells."""
    return {(cell.row, cell.column): cell.number for cell in paper_table(paper, table)}


def number(paper, table, row, column):
    value = numbers(paper, table)[row, column]
    assert value is not None
    return value


def shown(paper, table):
    """(row, column) -> the text of the cell."""
    return {(cell.row, cell.column): cell.value for cell in paper_table(paper, table)}


# Form


def test_every_table_that_prints_something_is_here():
    he = {f"table{n}" for n in ("1a", "1b", *range(2, 11), "11a", "11b", 12)}
    expected = {
        "he2023": he | {f"figure{n}" for n in (1, 2, 3, 4, 5, 6, 9)} | {"text"},
        "bu2023": {f"table{n}" for n in (1, 2, 3, 4, 5)} | {f"figure{n}" for n in (2, 5, 6, 7)} | {"text"},
        "li2022": {f"table{n}" for n in range(1, 11)} | {f"figure{n}" for n in (2, 3, 4, 5, 7)} | {"text"},
        "monir2023": {f"table{n}" for n in (7, 8, 9, 10)}
        | {f"figure{n}" for n in (8, 10, 11, 12)}
        | {"text"},
    }
    assert set(expected) == set(PAPERS)
    assert set(paper_tables()) == {(paper, table) for paper, tables in expected.items() for table in tables}


@pytest.mark.parametrize("name", EVERY)
def test_a_cell_says_what_it_is(name):
    paper, _, table = name.partition("_")
    cells = paper_table(paper, table)
    assert cells
    assert len({(cell.row, cell.column) for cell in cells}) == len(cells), "a cell is there twice"
    for cell in cells:
        assert (cell.paper, f"table{cell.table}" if cell.table[0].isdigit() else cell.table) == (paper, table)
        assert cell.row == cell.row.strip() != ""
        assert cell.column == cell.column.strip() != ""
        if cell.value == "":
            assert re.search(r"printed as -|empty in print|lost in our copy", cell.conditions), cell
        if cell.spread:
            assert float(cell.spread) >= 0
            assert cell.number is not None
        assert cell.seeds == "" or int(cell.seeds) > 1
        names = [part.partition("=")[0] for part in cell.conditions.split("; ") if "=" in part]
        assert len(set(names)) == len(names) == len(cell.settings)
        if cell.settings.get("metric") == "accuracy" and cell.unit == "%" and cell.value:
            assert 0 < float(cell.value) < 100
        if cell.settings.get("metric") not in (None, "epsilon") and cell.value:
            assert cell.unit, "a result without a unit"
            assert cell.number is not None, "a result that is no number"


@pytest.mark.parametrize("name", EVERY)
def test_a_file_is_written_in_one_way(name):
    text = (FOLDER / f"{name}.csv").read_text(encoding="utf-8")
    assert "\r" not in text
    assert text.startswith(",".join(COLUMNS) + "\n")
    assert {len(line) for line in csv.reader(text.splitlines())} == {len(COLUMNS)}


def test_private_results_name_their_epsilon_and_others_have_none():
    for paper, table in paper_tables():
        for cell in paper_table(paper, table):
            clip = cell.settings.get("clip")
            said = re.search(r"ε = ([\d.]+)", f"{cell.row} {cell.column}")
            if said and cell.settings.get("epsilon"):
                assert float(cell.settings["epsilon"]) == float(said[1]), cell
            if clip == "nonprivate":
                assert "epsilon" not in cell.settings, cell


def test_the_loader_names_what_is_missing(tmp_path):
    assert paper_table("he2023", "1b") == paper_table("he2023", "table1b")
    cell = paper_table("he2023", "4")[0]
    assert (cell.value, cell.number, cell.spread, cell.decimals) == ("88.70", 88.7, "0.52", 2)
    assert cell.settings["epochs"] == "3"
    with pytest.raises(UserError, match="did you mean he2023_table1"):
        paper_table("he2023", "1")
    (tmp_path / "x_table1.csv").write_text("paper,value\n")
    with pytest.raises(UserError, match="its columns are paper, value"):
        paper_table("x", "1", tmp_path)
    (tmp_path / "x_table1.csv").write_text(",".join(COLUMNS) + "\na,b\n")
    with pytest.raises(UserError, match="line 2: 2 columns"):
        paper_table("x", "1", tmp_path)


# What two tables or two papers print


@pytest.mark.parametrize("size", ["base", "large"])
def test_he_table_3_quotes_li_table_1(size):
    he, li = shown("he2023", "3"), shown("li2022", "1")
    for epsilon in (3, 8):
        for task in GLUE:
            column = f"ε = {epsilon}, {task}"
            assert (
                he[f"RoBERTa-{size}, Li et al. (2022b)", column] == li[f"full (RoBERTa-{size})", column] != ""
            )


@pytest.mark.parametrize("size", ["base", "large"])
def test_he_quotes_rgp_as_the_mean_of_matched_and_mismatched(size):
    he, li = numbers("he2023", "3"), numbers("li2022", "1")
    row, quoted = f"RGP (RoBERTa-{size})", f"RoBERTa-{size}, Yu et al. (2021b)"
    mean = (li[row, "ε = 8, MNLI-m"] + li[row, "ε = 8, MNLI-mm"]) / 2
    assert he[quoted, "ε = 8, MNLI-(m/mm)"] == pytest.approx(mean, abs=0.0501)
    for task in ("QQP", "QNLI", "SST-2"):
        assert he[quoted, f"ε = 8, {task}"] == li[row, f"ε = 8, {task}"]


@pytest.mark.parametrize(("data", "table"), [("E2E", "7"), ("DART", "8")])
def test_he_table_5_quotes_li_tables_7_and_8(data, table):
    he, li = shown("he2023", "5"), shown("li2022", table)
    for metric in ("BLEU", "ROUGE-L"):
        for guarantee in GUARANTEES:
            assert he[f"{metric}, {guarantee}", f"{data}, Flat"] == li[f"full, {guarantee}", metric] != ""


def test_li_table_2_is_a_part_of_table_7():
    two, seven = shown("li2022", "2"), shown("li2022", "7")
    for metric in ("BLEU", "ROUGE-L"):
        for guarantee in GUARANTEES:
            for method in METHODS:
                assert two[f"{metric}, {guarantee}", method] == seven[f"{method}, {guarantee}", metric] != ""


def test_li_table_2_prints_the_epsilons_of_lora_for_every_method():
    two, seven = numbers("li2022", "2"), numbers("li2022", "7")
    for column in ("Gaussian DP + CLT", "Compose tradeoff func."):
        for guarantee in GUARANTEES[:2]:
            printed = two[f"BLEU, {guarantee}", column]
            assert printed == two[f"ROUGE-L, {guarantee}", column]
            assert printed == pytest.approx(seven[f"LoRA, {guarantee}", column], abs=0.0101)
            assert printed > seven[f"full, {guarantee}", column]


def test_epsilon_columns_of_li_are_those_that_the_accounting_reproduces():
    with (FOLDER.parent / "tables" / "accounting-li.csv").open(encoding="utf-8", newline="") as file:
        found = {
            (row["table"], row["row"], float(row["target ε"])): (
                float(row["printed CLT"]),
                float(row["printed composed"]),
            )
            for row in csv.DictReader(file)
        }
    rows = (("≈ ε (Gaussian DP + CLT)", 0), ("≈ ε (Compose tradeoff func.)", 1))
    one, two, three = (numbers("li2022", table) for table in "123")
    columns = (("Gaussian DP + CLT", 0), ("Compose tradeoff func.", 1))
    for target in (3, 8):
        for row, i in rows:
            for task in ("MNLI", "QQP", "QNLI", "SST-2"):
                name = "MNLI-(m/mm)" if task == "MNLI" else task
                assert one[row, f"ε = {target}, {name}"] == found["1", task, target][i]
        for column, i in columns:
            assert two[f"BLEU, ε = {target}", column] == found["2", "E2E, all methods", target][i]
            for model in ("GPT-2", "GPT-2-medium", "DialoGPT-medium"):
                assert three[f"{model}, ε = {target}", column] == found["3", "Persona-Chat", target][i]
            for table, data in (("7", "E2E"), ("8", "DART")):
                cells = numbers("li2022", table)
                for method in METHODS:
                    assert (
                        cells[f"{method}, ε = {target}", column]
                        == found[table, f"{data}, {method}", target][i]
                    )


def test_he_tables_1_2_and_11_print_the_same_runs():
    one_a, one_b, two = (numbers("he2023", t) for t in ("1a", "1b", "2"))
    eleven_a, eleven_b = numbers("he2023", "11a"), numbers("he2023", "11b")
    for epsilon in (3, 8):
        column = f"ε = {epsilon}"
        assert one_a["WRN16-4, Fixed per-layer", column] == eleven_a["Per-layer clipping, fixed", column] > 60
        flat = one_a["WRN16-4, Fixed flat", column]
        assert flat == eleven_a["Flat clipping, fixed", column]
        assert flat == two["Flat clipping (De et al., 2022)", f"{column}, Valid"]
        adaptive = eleven_a["Per-layer clipping, adaptive", column]
        assert adaptive == two["Adaptive per-layer", f"{column}, Valid"]
        assert one_b["RoBERTa-base, Fixed per-layer", column] == eleven_b["Per-layer clipping, fixed", column]


@pytest.mark.parametrize(("epsilon", "table"), [(3, "4"), (8, "12")])
def test_he_table_11b_has_tables_4_and_12_for_flat_but_table_1b_has_less(epsilon, table):
    """CLAIMS: SST-2's fixed flat clipping is 91.0 and 91.7 in Table 1b, and 91.5 and 92.0 elsewhere."""
    cells = {(cell.row, cell.column): cell for cell in paper_table("he2023", table)}
    tuned = cells["RoBERTa-base, Flat clipping (tuned)", "E = 20"]
    eleven = {(cell.row, cell.column): cell for cell in paper_table("he2023", "11b")}
    fixed = eleven["Flat clipping, fixed", f"ε = {epsilon}"]
    assert fixed.number == pytest.approx(tuned.number, abs=0.051)
    assert fixed.spread == tuned.spread
    assert number("he2023", "1b", "RoBERTa-base, Fixed flat", f"ε = {epsilon}") < fixed.number - 0.2


def test_he_prints_three_accuracies_for_adaptive_per_layer_on_sst2_at_epsilon_3():
    row = "RoBERTa-base, Adaptive per-layer"
    values = (
        number("he2023", "3", row, "ε = 3, SST-2"),
        number("he2023", "4", row, "E = 20"),
        number("he2023", "10", "RoBERTa-base, Global", "ε = 3, Validation"),
        number("he2023", "11b", "Per-layer clipping, adaptive", "ε = 3"),
    )
    assert values == (92.03, 92.33, 92.0, 92.0)


def test_monir_repeats_its_numbers():
    eight = numbers("monir2023", "8")
    assert eight["ε", "Time Decay"] == 91.5 > eight["ε", "Polynomial Decay"] > eight["ε", "Exponential Decay"]
    assert eight["Epochs", "Exponential Decay"] == 87.41  # and 89.00 at ε = 1: CLAIMS, M15
    nine = numbers("monir2023", "9")
    shares = [
        value for (_, column), value in nine.items() if column == "Percentage of Data" and value is not None
    ]
    assert sum(shares) == 100
    for case in ("Case 1", "Case 2", "Case 3"):
        by_group = [value for (_, column), value in nine.items() if column == case]
        assert by_group == sorted(by_group)
        assert by_group[0] == 1.0


def test_bu_repeats_its_numbers():
    one, text = numbers("bu2023", "1"), numbers("bu2023", "text")
    row = "E2E, GPT2-large (774M)"
    assert (
        text["abstract, GPT2", "training speed over standard training"]
        == one[row, "Relative Speed over non-DP"]
    )
    speed = text["abstract, GPT2", "training speed over the most efficient DP implementation"]
    assert speed == one[row, "Relative Speed over GhostClip"]
    relative = 1 / one[row, "Relative Speed over non-DP, complexity"]
    assert text["abstract, GPT2", "time complexity over standard training"] == pytest.approx(
        relative, abs=0.005
    )
    ghost = text["abstract, GPT2", "time complexity over the most efficient DP implementation"]
    assert ghost == pytest.approx(6 * relative / (6 * relative + 4), abs=0.005)
    slow = text["section 2, GhostClip", "time beside non-DP at small T"]
    assert slow == pytest.approx(10 / 6, abs=0.0005)


def test_the_complexity_tables_hold_the_transcribed_values():
    two, five = shown("bu2023", "2"), shown("bu2023", "5")
    of = {x.name: x for x in formulas.IMPLEMENTATIONS}
    plain = str.maketrans("⟨⟩", "<>")
    for row in ("Non-DP", "Opacus", "FastGradClip", "GhostClip", "BK (ours)", "BK-MixOpt"):
        name = {"Non-DP": "non-DP", "BK (ours)": "BK"}.get(row, row)
        assert five[row, "Time complexity"] == str(of[name].printed_time).translate(plain)
        if row != "BK-MixOpt":
            assert five[row, "Space complexity"] == str(of[name].printed_space)
    assert two["Time Complexity of Clipping", "Opacus"] == five["Opacus", "Time complexity"]
    one = shown("bu2023", "1")
    for row, name in (
        ("QQP, RoBERTa-large (355M)", "roberta-large"),
        ("E2E, GPT2-large (774M)", "gpt2-large"),
        ("CIFAR, BEiT-large (304M)", "beit_large"),
    ):
        assert one[row, "Relative Speed over non-DP, complexity"] == complexity_tables.printed_1(name)
    seven = shown("bu2023", "figure7")
    for (name, image), depth in zip(complexity_tables.FIGURE_7, ("9", "17"), strict=False):
        assert seven[f"{name.replace('resnet', 'ResNet')}, {image} x {image}", "depth threshold"] == depth


# Sums


def parts(text):
    """ "4.1e3 x 1, 3.7e4 x 3" -> one (value, half a unit of its last digit) per layer."""
    found = []
    for part in text.split(", "):
        value, _, count = part.partition(" x ")
        mantissa, _, exponent = value.partition("e")
        unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
        found += [(float(value), unit / 2 if exponent else 0.0)] * int(count or 1)
    return found


@pytest.mark.parametrize(("label", "layers"), [("18-layer", 18), ("34-layer", 34), ("50-layer", 50)])
def test_bu_table_4_adds_to_its_totals(label, layers):
    four = shown("bu2023", "4")
    stages = [row for row, column in four if column == f"{label}, ghost norm 2T²" and row[:1] != "T"]
    ghost = [part for stage in stages for part in parts(four[stage, f"{label}, ghost norm 2T²"])]
    pd = [
        part for stage in stages for part in parts(four[stage, f"{label}, per-sample grad instantiation pd"])
    ]
    assert len(ghost) == len(pd) == layers
    mixed = [min(pair) for pair in zip(ghost, pd, strict=True)]
    printed = (
        ("Total complexity", "ghost norm 2T²", ghost),
        ("Total complexity", "per-sample grad instantiation pd", pd),
        ("Complexity by mixed ghost norm", "mixed", mixed),
    )
    for row, column, values in printed:
        text = four[row, f"{label}, {column}"]
        rounding = 0.5 * 10.0 ** -len(text.partition(".")[2]) * 1e6
        slack = rounding + sum(half for _, half in values)
        assert 1e6 * float(text) == pytest.approx(sum(value for value, _ in values), abs=slack), (row, column)


def test_bu_table_4_repeats_its_geometry_except_for_one_slip():
    """The ghost norm at H x W takes 2 (HW)²; 34-layer's first conv4_x is 256 · 128 · 9 = 2.9e5 as in 18-layer, printed 2.6e5."""
    four = shown("bu2023", "4")
    for stage, side in (("conv1", 112), ("conv2_x", 56), ("conv3_x", 28), ("conv4_x", 14), ("conv5_x", 7)):
        value = parts(four[stage, "18-layer, ghost norm 2T²"])[0][0]
        assert value == pytest.approx(2 * side**4, rel=0.03)
    first = {label: parts(four["conv4_x", f"{label}, per-sample grad instantiation pd"])[0][0]
             for label in ("18-layer", "34-layer")}  # fmt: skip
    assert first == {"18-layer": 2.9e5, "34-layer": 2.6e5}


@pytest.mark.parametrize("table", ["11a", "11b"])
def test_gains_of_he_table_11_are_differences(table):
    cells = numbers("he2023", table)
    checked = 0
    for group in ("Flat clipping", "Per-layer clipping"):
        for epsilon in (3, 8):
            column = f"ε = {epsilon}"
            adaptive, gain = cells[f"{group}, adaptive", column], cells[f"{group}, gain of adaptive", column]
            if adaptive is None:
                assert (table, group, gain) == ("11a", "Flat clipping", 0), (
                    "the only empty cell, with a gain of +0"
                )
                continue
            assert gain == pytest.approx(adaptive - cells[f"{group}, fixed", column], abs=1e-6)
            checked += 1
    assert checked == (2 if table == "11a" else 4)


def test_memory_of_the_review_follows_its_formula():
    cells = {cell.row: cell for cell in paper_table("monir2023", "figure8")}
    b = int(cells["mini-batch clipping"].settings["b"])
    assert cells["mini-batch clipping"].number == b * 1 + (1 + b) * 1
    assert cells["per-layer clipping"].number == b * 1 + 2 * 1


def test_sizes_that_li_gives_follow_from_gpt2():
    text = numbers("li2022", "text")
    layers, width, prefix, hidden = 12, 768, 10, 512
    lora = layers * 4 * (width + 3 * width)
    assert 1e6 * text["section 5.2, LoRA with rank 4 on GPT-2", "parameters"] == pytest.approx(lora, rel=0.02)
    out = layers * 2 * width
    size = prefix * width + (width + 1) * hidden + (hidden + 1) * out
    assert 1e6 * text["section 5.2, prefix-tuning on GPT-2", "parameters"] == pytest.approx(size, rel=0.02)
    saved = 50_000 * 768 / (2 * 1024**2)
    assert text["section 4.2, GPT-2 embedding", "memory saved"] == 22 > saved == pytest.approx(18.3, abs=0.05)
    words = text["App. M, canaries", "vocabulary V"] ** text["App. M, canaries", "average length l"]
    most = text["App. M, canaries", "exposure of extraction, log2(V^l)"]
    assert most == round(math.log2(words))
    exposures = [cell.number for cell in paper_table("li2022", "9")]
    assert sum(value > math.log2(words) for value in exposures) == 2  # CLAIMS, L9


def test_human_ratings_lie_in_the_middle_of_their_intervals():
    rated = [
        cell
        for cell in paper_table("li2022", "3")
        if cell.settings.get("metric") == "human" and cell.number is not None
    ]
    assert len(rated) == 5
    for cell in rated:
        low, high = float(cell.settings["low"]), float(cell.settings["high"])
        assert cell.number == pytest.approx((low + high) / 2, abs=0.011)
