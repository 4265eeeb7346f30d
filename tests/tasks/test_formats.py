"""Published layouts of pairs: what becomes of a row, and one clear error for a malformed one."""

import json
from pathlib import Path

import pytest

from dpexp.errors import UserError
from dpexp.schemas import DataConfig, TaskConfig
from dpexp.tasks.files import Table
from dpexp.tasks.formats import FORMATS, GROUP, SOURCE, TARGET, Columns
from dpexp.tasks.formats.base import hub_table
from dpexp.tasks.formats.demo import WRITERS, write_demo
from dpexp.tasks.formats.e2e import tokenised
from dpexp.tasks.pairs import find_pairs

FILES = {  # layout -> the names that its demo files get here
    "e2e": {"train": "train.csv", "dev": "dev.csv"},
    "triples": {"train": "train.json", "test": "test.xml"},
    "samsum": {"train": "train.json", "dev": "val.json"},
    "personachat": {"train": "train_self_original.txt", "dev": "valid_self_original.txt"},
}


def read(layout: str, path: Path, *more: Path) -> list[tuple[str, str, str]]:
    return rows(FORMATS[layout].read([path, *more]))


def rows(table: Table) -> list[tuple[str, str, str]]:
    return list(zip(table.columns[SOURCE], table.columns[TARGET], table.columns[GROUP], strict=True))


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_e2e_is_encoded_as_in_li_et_al(tmp_path: Path) -> None:
    mr = "name[The Punter], eatType[restaurant], priceRange[cheap], customer rating[average], familyFriendly[no]"
    path = write(
        tmp_path / "e2e.csv", f'mr,ref\n"{mr}","It is cheap, and good. "\n"name[A], near[B, C]",Text\n'
    )
    first, second = read("e2e", path)
    assert first[0] == (
        " name : The Punter | Type : restaurant | price : cheap | customer rating : average | family friendly : no "
    )
    assert first[1:] == ("It is cheap, and good.", mr)
    assert second[0] == " name : A | near : B, C "


def test_triples_are_encoded_as_in_li_et_al(tmp_path: Path) -> None:
    triples = [["Albany,_Oregon", "isPartOf", "Benton County"], ["[TABLECONTEXT]", "ETHNIC_GROUP", "A_b"]]
    item = {
        "tripleset": triples,
        "annotations": [{"source": "x", "text": "One."}, {"source": "y", "text": "Two."}],
    }
    path = write(tmp_path / "dart.json", json.dumps([item]))
    source = " Albany, Oregon : is part of : Benton County | [TABLECONTEXT] : ethnic group : A b "
    assert read("triples", path) == [(source, "One.", "1"), (source, "Two.", "1")]
    entry = "<mtriple>Albany,_Oregon | isPartOf | Benton County</mtriple><lex>One.</lex>"
    path = write(tmp_path / "dart.xml", f"<benchmark><entries><entry>{entry}</entry></entries></benchmark>")
    assert read("triples", path) == [(" Albany, Oregon : is part of : Benton County ", "One.", "1")]


def test_samsum_keeps_the_empty_dialogue_and_plain_line_ends(tmp_path: Path) -> None:
    items = [
        {"id": "1", "dialogue": "A: Hi\r\nB: Ho", "summary": "They greet. "},
        {"id": "2", "dialogue": "", "summary": "No."},
    ]
    path = write(tmp_path / "train.json", json.dumps(items))
    assert read("samsum", path) == [("A: Hi\nB: Ho", "They greet.", "1"), ("", "No.", "2")]


def test_persona_chat_in_its_two_layouts(tmp_path: Path) -> None:
    lines = [
        "your persona: i ski.",
        "partner's persona: i sew.",
        "hi\thello\t\tx|y",
        "and ?\tfine",
        "ok\tyes",
        "so\tno",
    ]
    text = (
        "".join(f"{n} {line}\n" for n, line in enumerate(lines, 1)) + "1 your persona: i sing.\n2 hey\tyo\n"
    )
    pairs = read("personachat", write(tmp_path / "train.txt", text))
    assert [target for _, target, _ in pairs] == ["hello", "fine", "yes", "no", "yo"]
    assert pairs[1][0] == "your persona: i ski.\npartner: hi\nyou: hello\npartner: and ?"
    assert (
        pairs[3][0] == "your persona: i ski.\npartner: and ?\nyou: fine\npartner: ok\nyou: yes\npartner: so"
    )
    assert pairs[4][0] == "your persona: i sing.\npartner: hey", (
        "a dialogue starts without the history of the last"
    )
    odd = write(tmp_path / "odd.txt", "1 your persona: x\n2 a\x85b\tc\u2028d\r\n3 no tab\n")
    with pytest.raises(UserError, match=r"odd\.txt, line 3: malformed row: no tab"):
        read("personachat", odd)  # what else ends a line in Unicode is text
    source = write(tmp_path / "valid_no_cands_source.txt", "i ski.\ti sew.\thi\n")
    target = write(tmp_path / "valid_no_cands_target.txt", "hello\n")
    assert read("personachat", source, target) == [
        ("your persona: i ski.\nyour persona: i sew.\npartner: hi", "hello", "1")
    ]


@pytest.mark.parametrize(
    ("layout", "name", "text", "message"),
    [
        ("e2e", "a.csv", "mr,ref\nname[A],x\nname A,y\n", r"a\.csv, line 3: malformed row: 'name A' in mr is not NAME\[VALUE\]"),
        ("e2e", "a.csv", "mr,ref\nname[A]\n", r"a\.csv, line 2: malformed row: 1 comma-separated cells"),
        ("e2e", "a.csv", "mr,text\nname[A],x\n", r"a\.csv: no column ref; the columns are mr, text"),
        ("triples", "a.json", "[\n{,}]", r"a\.json, line 2: malformed JSON"),
        ("triples", "a.json", "{}", r"a\.json: a JSON list is expected"),
        ("triples", "a.json", '[{"tripleset": [["a", "b"]]}]', r"a\.json, item 1: malformed row: tripleset must be"),
        ("triples", "a.json", '[{"tripleset": [["a", "b", "c"]]}]', r"a\.json, item 1: malformed row: no annotations"),
        ("triples", "a.xml", "<a>\n<b></a>", r"a\.xml, line 2: malformed XML"),
        ("samsum", "a.json", '[{"dialogue": "x"}]', r"a\.json, item 1: no column summary"),
        ("personachat", "a.txt", "1 your persona: x\n2 hello\n", r"a\.txt, line 2: malformed row: no tab"),
        ("personachat", "a.txt", "hello\tyou\n", r"a\.txt, line 1: malformed row: ParlAI's lines begin with a number"),
    ],
)  # fmt: skip
def test_malformed_rows_are_named(tmp_path: Path, layout: str, name: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(layout, write(tmp_path / name, text))


def test_source_and_target_files_of_different_length(tmp_path: Path) -> None:
    paths = [write(tmp_path / "s.txt", "a\tb\nc\td\n"), write(tmp_path / "t.txt", "x\n")]
    with pytest.raises(UserError, match=r"s\.txt has 2 lines and .*t\.txt has 1"):
        FORMATS["personachat"].read(paths)


@pytest.mark.parametrize("layout", FILES)
def test_demo_files_are_read_by_the_same_readers(tmp_path: Path, layout: str) -> None:
    write_demo(tmp_path, layout, FILES[layout], 60)
    tables = {split: FORMATS[layout].read([tmp_path / name]) for split, name in FILES[layout].items()}
    assert len(tables.pop("train")) == 60
    assert all(len(table) == 48 for table in tables.values())
    again = tmp_path / "again"
    again.mkdir()
    write_demo(again, layout, FILES[layout], 60)
    for name in FILES[layout].values():
        assert (again / name).read_bytes() == (tmp_path / name).read_bytes()


def test_demo_sources_of_dev_are_not_in_train(tmp_path: Path) -> None:
    write_demo(tmp_path, "e2e", FILES["e2e"], 500)
    train, dev = (set(FORMATS["e2e"].read([tmp_path / f"{s}.csv"]).columns[SOURCE]) for s in ("train", "dev"))
    assert not train & dev
    with pytest.raises(UserError, match="from 1 to 20000 rows"):
        write_demo(tmp_path, "e2e", FILES["e2e"], 20_001)
    assert set(WRITERS) == {*(form.layout for form in FORMATS.values()), "columns"}


def test_rows_of_the_hub() -> None:
    """The columns of the hub's copies, as their cards describe them."""
    e2e = hub_table(FORMATS["e2e"], [{"meaning_representation": "name[A]", "human_reference": "It."}], "hub")
    assert rows(e2e) == [(" name : A ", "It.", "name[A]")]
    dart = {"tripleset": [["a", "b", "c"]], "annotations": {"source": ["x", "x"], "text": ["One.", "Two."]}}
    assert rows(hub_table(FORMATS["triples"], [dart], "hub")) == [
        (" a : b : c ", "One.", "1"),
        (" a : b : c ", "Two.", "1"),
    ]
    dart["annotations"] = [{"source": "x", "text": "One."}, {"source": "x", "text": "Two."}]  # type: ignore[assignment]
    assert len(hub_table(FORMATS["triples"], [dart], "hub")) == 2, "nested rows in their other form"
    webnlg = {"modified_triple_sets": {"mtriple_set": [["A_b | isIn | c"]]}, "lex": {"text": ["One."]}}
    assert rows(hub_table(FORMATS["triples"], [webnlg], "hub")) == [(" A b : is in : c ", "One.", "1")]
    with pytest.raises(UserError, match="hub, row 1: malformed row: no annotations"):
        hub_table(FORMATS["triples"], [{"tripleset": [["a", "b", "c"]]}], "hub")
    with pytest.raises(UserError, match="hub, row 1: malformed row: tripleset"):
        hub_table(FORMATS["triples"], [{"lex": {"text": ["One."]}}], "hub")
    chat = {"personality": ["i ski."], "history": ["hi"], "candidates": ["no", "yes"]}
    assert rows(hub_table(FORMATS["personachat"], [chat], "hub")) == [
        ("your persona: i ski.\npartner: hi", "yes", "1")
    ]
    with pytest.raises(UserError, match="hub, row 1: malformed row: no text under 'dialogue'"):
        hub_table(FORMATS["samsum"], [{"summary": "x"}], "hub")


def test_own_columns_share_references(tmp_path: Path) -> None:
    path = write(tmp_path / "own.tsv", "q\ta\nx\t1\ny\t2\nx\t3\n")
    assert rows(Columns("q", "a").read([path])) == [("x", "1", "x"), ("y", "2", "y"), ("x", "3", "x")]


def test_empty_targets_are_refused_in_train_and_counted_elsewhere(tmp_path: Path) -> None:
    item = {"tripleset": [["a", "b", "c"]], "annotations": [{"text": "One."}, {"text": ""}, {"text": None}]}
    (tmp_path / "d").mkdir()
    write(tmp_path / "d/train.json", json.dumps([item | {"annotations": [{"text": "One."}]}]))
    write(tmp_path / "d/dev.json", json.dumps([item]))
    task = TaskConfig(
        name="webnlg",
        kind="generation",
        format="triples",
        files={"train": "d/train.json", "dev": "d/dev.json"},
    )
    found = find_pairs(task, DataConfig(root=str(tmp_path)), "small")
    assert (len(found.splits["dev"]), found.splits["dev"].skipped) == (1, 2)
    write(tmp_path / "d/train.json", json.dumps([item]))
    with pytest.raises(UserError, match=r"train\.json, item 1: the target is empty"):
        find_pairs(task, DataConfig(root=str(tmp_path)), "small")


def test_what_was_tried_is_said(tmp_path: Path) -> None:
    task = TaskConfig(name="dart", kind="generation", format="triples", files={"train": "dart/train.json"})
    with pytest.raises(
        UserError,
        match=r"no data for task=dart\. Tried: data\.root=.*: no dart/train\.json.*; hub: .* names no",
    ):
        find_pairs(task, DataConfig(root=str(tmp_path)), "small")
    with pytest.raises(UserError, match=r"task\.format=tripels is unknown"):
        find_pairs(TaskConfig(name="dart", kind="generation", format="tripels"), DataConfig(), "small")


REAL = {
    "e2e": ("e2e/devset.csv", 4672, 547),
    "triples": ("dart/dart-v1.1.1-full-dev.json", 6980, 2768),
    "samsum": ("samsum/val.json", 818, 818),
    "personachat": ("personachat/valid_self_original.txt", 7801, 7801),
}


@pytest.mark.parametrize("layout", REAL)
def test_real_files_are_read_whole(real_data: Path, layout: str) -> None:
    stem, examples, sources = REAL[layout]
    task = TaskConfig(name="x", kind="generation", format=layout, files={"dev": stem})
    table = find_pairs(task, DataConfig(root=str(real_data)), "small").splits["dev"]
    assert (len(table), len(set(table.columns[GROUP]))) == (examples, sources)
    assert all(source.strip() and target for source, target, _ in rows(table)[:40])


def test_the_real_test_set_of_dart_is_xml(real_data: Path) -> None:
    task = TaskConfig(
        name="dart", kind="generation", format="triples", files={"test": "dart/dart-v1.1.1-full-test.xml"}
    )
    table = find_pairs(task, DataConfig(root=str(real_data)), "small").splits["test"]
    assert (len(table), table.skipped, len(set(table.columns[GROUP]))) == (12551, 1, 5097), (
        "one text is empty"
    )


def test_e2e_as_the_authors_had_it_is_tokenised(tmp_path: Path) -> None:
    mr = "name[The Punter], priceRange[£20-25], familyFriendly[no], near[Café Rouge]"
    text = "It's not family-friendly, near the Café Rouge.  It has 3.5 stars (1,000 votes)."
    path = write(tmp_path / "e2e.csv", f'mr,ref\n"{mr}","{text}"\n')
    assert read("e2e_tokenised", path) == [
        (
            " name : The Punter | price : £ 20 - 25 | family friendly : no | near : Café Rouge ",
            "It's not family - friendly , near the Café Rouge . It has 3.5 stars ( 1,000 votes ) .",
            mr,
        )
    ]
    printed = (
        "Located near the Raja Indian Cuisine at the city centre , is family - friendly pub The Vaults ."
    )
    assert tokenised(printed) == printed, "Li et al., Table 11: a reference"


def test_triples_as_the_authors_code_has_them(tmp_path: Path) -> None:
    triples = [["Albany,_Oregon", "isPartOf", "Benton County"], ["[TABLECONTEXT]", "ETHNIC_GROUP", "A_b"]]
    path = write(tmp_path / "d.json", json.dumps([{"tripleset": triples, "annotations": [{"text": "One."}]}]))
    source = " Albany,_Oregon : ispartof : Benton County | [TABLECONTEXT] : ethnic_group : A_b "
    assert read("triples_as_coded", path) == [(source, "One.", "1")]


@pytest.mark.parametrize("layout", FORMATS)
def test_every_format_has_demo_data(layout: str, tmp_path: Path) -> None:
    files = FILES[FORMATS[layout].layout]
    task = TaskConfig(kind="generation", format=layout, files=files, num_examples={"demo": 7})
    found = find_pairs(task, DataConfig(), "demo")
    assert len(found.splits["train"]) == 7
