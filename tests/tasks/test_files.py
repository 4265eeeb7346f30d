"""Reading tables: every format gives the same cells, and every complaint names the file and the line."""

import gzip
import json
import lzma
from pathlib import Path

import datasets
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpexp.errors import UserError
from dpexp.tasks.files import find_file, from_dataset, read_table

ROWS = [('a "quoted" start', "0"), ("commas, and ünïcode", "1"), ("", "0"), ('ends with a quote"', "1")]
COLUMNS = ["text", "label"]


def tsv(rows: list[tuple[str, str]]) -> str:
    return "".join(f"{text}\tx\t{label}\n" for text, label in [("text", "label"), *rows])


def csv(rows: list[tuple[str, str]]) -> str:
    quoted = [(text.replace('"', '""'), label) for text, label in rows]
    return "text,other,label\n" + "".join(f'"{text}",x,{label}\n' for text, label in quoted)


def jsonl(rows: list[tuple[str, str]]) -> str:
    return "".join(json.dumps({"label": int(label), "text": text}) + "\n" for text, label in rows)


def json_list(rows: list[tuple[str, str]]) -> str:
    return json.dumps([{"text": text, "label": label} for text, label in rows], indent=1)


FORMATS = {"a.tsv": tsv, "a.csv": csv, "a.jsonl": jsonl, "a.json": jsonl, "list.json": json_list}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_and_compression_gives_the_same_cells(tmp_path: Path, name: str) -> None:
    content = FORMATS[name](ROWS).encode()
    hashes = set()
    for suffix, compress in {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}.items():
        path = tmp_path / (name + suffix)
        path.write_bytes(compress(content))
        table = read_table(path, COLUMNS)
        assert list(zip(table.columns["text"], table.columns["label"])) == ROWS
        hashes.add(table.sha256)
    assert len(hashes) == 1


@given(st.lists(st.text(st.characters(exclude_characters="\t\n\r", codec="utf-8")), min_size=1, max_size=5))
def test_any_text_without_tabs_and_line_ends_survives_tsv(texts: list[str]) -> None:
    from dpexp.tasks.files import _tsv

    rows = [(text, "0") for text in texts]
    assert [(cells[0], cells[2]) for _, cells in _tsv(tsv(rows))][1:] == rows


def test_a_quoted_csv_cell_may_hold_lines_and_later_rows_keep_their_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text,label\n"two\nlines",0\nnext,1\n')
    table = read_table(path, COLUMNS)
    assert table.columns["text"] == ["two\nlines", "next"]
    assert table.at(1) == f"{path}, line 4"


def test_blank_lines_of_a_csv_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\ntext,label\r\n\r\nfine,0\n\n"two\n\nparts",1\n\n\n"",2\n\n')
    table = read_table(path, COLUMNS)
    assert table.columns == {"text": ["fine", "two\n\nparts", ""], "label": ["0", "1", "2"]}
    assert table.columns["text"] == list(pandas.read_csv(path, keep_default_na=False)["text"])
    assert table.at(2) == f"{path}, line 11"


def test_windows_line_ends_and_a_byte_order_mark_are_no_content(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"\xef\xbb\xbftext\tlabel\r\ngood\t1\r\n")
    assert read_table(path, COLUMNS).columns == {"text": ["good"], "label": ["1"]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.tsv",
            b"text\tlabel\nfine\t0\nno tab here\n",
            r"a\.tsv, line 3: malformed row: 1 tab-separated cells",
        ),
        ("a.tsv", b"text\tlabel\nfine\t0\n\nfine\t0\n", r"a\.tsv, line 3: malformed row"),
        ("a.tsv", b"text\tlabel\none\ttwo\t0\n", r"line 2: malformed row: 3 .* header has 2 \(text, label\)"),
        ("a.tsv", b"sentence\tlabel\nfine\t0\n", r"no column text; the columns are sentence, label"),
        ("a.tsv", b"text\tlabel\ttext\nfine\t0\tx\n", r"column text appears 2 times"),
        ("a.tsv", b"text\tlabel\nfine\t0\ncaf\xe9\t1\n", r"a\.tsv, line 3: not UTF-8 \(byte 0xe9\)"),
        ("a.tsv", b"", r"a\.tsv: the file is empty"),
        ("a.tsv", b"\xef\xbb\xbf", r"a\.tsv: no column text"),
        ("a.csv", b"\xef\xbb\xbf", r"a\.csv: no column text"),
        ("a.tsv", b"text\tlabel\n", r"a\.tsv: the file holds no rows"),
        ("a.csv", b'text,label\nfine,0\n"never closed,1\n', r"a\.csv, line 3: malformed CSV"),
        ("a.csv", b"text,label\nfine,0\none,two,1\n", r"a\.csv, line 3: malformed row: 3 comma-separated"),
        ("a.jsonl", b'{"text": "x", "label": 1}\n{"text": \n', r"a\.jsonl, line 2: malformed JSON"),
        ("a.jsonl", b'{"text": "x"}\n', r"a\.jsonl, line 1: no column label; the columns are text"),
        (
            "a.jsonl",
            b'{"text": null, "label": 1}\n',
            r"line 1: column text holds nothing, neither text nor a number",
        ),
        (
            "a.jsonl",
            b'{"text": NaN, "label": 1}\n',
            r"line 1: column text holds nothing, neither text nor a number",
        ),
        ("a.jsonl", b'{"text": "x \\ud83d", "label": 1}\n', r"line 1: column text holds half of a character"),
        ("a.jsonl", b'"just text"\n', r"line 1: malformed row: a JSON object is expected"),
        ("a.json", b'[{"text": "x", "label": 1}, {"text": "y"}]', r"a\.json, item 2: no column label"),
        ("a.json", b'[{"text": "x",\n "label": }]', r"a\.json, line 2: malformed JSON"),
        ("a.tsv.gz", b"text\tlabel\n", r"a\.tsv\.gz: the compressed file is damaged"),
        (
            "a.tsv.xz",
            lzma.compress(b"text\tlabel\nx\t0\n")[:-20],
            r"a\.tsv\.xz: the compressed file is damaged",
        ),
        ("a.xlsx", b"x", r"a\.xlsx: unknown format; tables end in \.tsv"),
        ("a.parquet", b"x", r"a\.parquet: this is no Parquet file"),
        ("a.csv", b"text;label\nfine;0\n", r"first line has semicolons and no commas: save the table as"),
        ("a.csv", b"text\tlabel\nfine\t0\n", r"first line has tabs and no commas"),
        ("a.tsv", b"text,label\nfine,0\n", r"first line has commas and no tabs"),
        ("a.csv", b'"text,label"\nfine\n', r"no column text and no column label"),
    ],
)
def test_bad_files_get_one_error_with_file_and_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_table(path, COLUMNS)


@pytest.mark.parametrize(("name", "tab"), [("a.tsv", "\t"), ("a.csv", ",")])
def test_malformed_rows_are_left_out_and_counted_where_this_is_asked_for(
    tmp_path: Path, name: str, tab: str
) -> None:
    path = tmp_path / name
    path.write_text("text\tlabel\nfine\t0\nno tab here\none\ttwo\t1\nlast\t1\n".replace("\t", tab))
    table = read_table(path, COLUMNS, skip_malformed=True)
    assert table.columns == {"text": ["fine", "last"], "label": ["0", "1"]}
    assert table.skipped == 2
    assert [table.at(0), table.at(1)] == [f"{path}, line 2", f"{path}, line 5"]
    with pytest.raises(UserError, match=r"line 3: malformed row.*task\.malformed=skip"):
        read_table(path, COLUMNS)
    path.write_text("text\tlabel\nno tab\n".replace("\t", tab))
    with pytest.raises(UserError, match="holds no rows"):
        read_table(path, COLUMNS, skip_malformed=True)


def test_a_file_without_a_header_has_its_columns_declared(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("7\tfine\t0\n8\tdull\t1\n")
    table = read_table(path, COLUMNS, header=["id", "text", "label"])
    assert table.columns == {"text": ["fine", "dull"], "label": ["0", "1"]}
    assert table.at(0) == f"{path}, line 1"
    with pytest.raises(UserError, match=r"line 1: malformed row: 3 .* task\.columns names 2 \(text, label\)"):
        read_table(path, COLUMNS, header=COLUMNS)
    with pytest.raises(UserError, match="no column label; the columns are id, text"):
        read_table(path, COLUMNS, header=["id", "text"])


def test_some_rows_of_a_table_keep_their_places(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("text\tlabel\na\t0\nb\t1\nc\t0\n")
    table = read_table(path, COLUMNS)
    last = table.rows(1, 3)
    assert last.columns == {"text": ["b", "c"], "label": ["1", "0"]}
    assert (last.at(0), last.part, table.part) == (f"{path}, line 3", "rows 2 to 3", "")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.tsv: no such file"):
        read_table(tmp_path / "gone.tsv", COLUMNS)


def test_saved_datasets(tmp_path: Path) -> None:
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    dataset = datasets.Dataset.from_dict({"text": ["x", "y"], "label": [1, 0]}, features=features)
    dataset.save_to_disk(tmp_path / "saved")
    table = read_table(tmp_path / "saved", COLUMNS)
    assert table.columns == {"text": ["x", "y"], "label": ["good", "bad"]}
    assert table.at(1).endswith("saved, row 2")
    # the declared classes decide whether a numbered class is called by name or by number
    assert from_dataset(dataset, COLUMNS, "here", ["0", "1"]).columns["label"] == ["1", "0"]
    with pytest.raises(UserError, match="no column words; the columns are text, label"):
        read_table(tmp_path / "saved", ["words"])
    datasets.DatasetDict({"train": dataset}).save_to_disk(tmp_path / "splits")
    with pytest.raises(UserError, match=r"holds several splits: give one of the folders .*train"):
        read_table(tmp_path / "splits", COLUMNS)
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match=r"written by datasets\.save_to_disk"):
        read_table(tmp_path / "other", COLUMNS)


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = pandas.DataFrame(ROWS, columns=COLUMNS).assign(other="x")
    rows.to_parquet(path)
    table = read_table(path, COLUMNS)
    assert list(zip(table.columns["text"], table.columns["label"])) == ROWS
    assert table.at(1) == f"{path}, row 2"
    rows.astype({"label": "category"}).to_parquet(path)
    assert read_table(path, COLUMNS) == table
    with pytest.raises(UserError, match="no column words; the columns are text, label, other"):
        read_table(path, ["words"])
    rows.assign(text=None).to_parquet(path)
    with pytest.raises(UserError, match=r"a\.parquet, row 1: column text holds nothing"):
        read_table(path, COLUMNS)
    names = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    datasets.Dataset.from_dict({"text": ["x", "y"], "label": [1, 0]}, features=names).to_parquet(path)
    assert read_table(path, COLUMNS).columns["label"] == ["good", "bad"]


def test_a_cell_may_be_as_long_as_a_book(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f'text,label\n"{"word, " * 50_000}",0\n')
    assert len(read_table(path, COLUMNS).columns["text"][0]) == 300_000


def test_folders_are_found_under_their_published_spelling(tmp_path: Path) -> None:
    (tmp_path / "SST-2").mkdir()
    (tmp_path / "SST-2" / "dev.tsv.gz").touch()
    assert find_file(tmp_path, "sst2/dev.tsv") == tmp_path / "SST-2" / "dev.tsv.gz"
    (tmp_path / "SST-2" / "dev.tsv").touch()
    assert find_file(tmp_path, "sst2/dev.tsv") == tmp_path / "SST-2" / "dev.tsv"
    assert find_file(tmp_path, "sst2/train.tsv") is None
    assert find_file(tmp_path, "qnli/dev.tsv") is None
    (tmp_path / "Sst2").mkdir()  # two candidates: no guess
    assert find_file(tmp_path, "sst2/dev.tsv") is None
