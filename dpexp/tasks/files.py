"""Tables in files: TSV, CSV, JSON lines, a JSON list or Parquet, each plain, .gz or .xz, and data sets saved by Hugging Face.

Every complaint names the file and the line.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import lzma
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpexp.errors import UserError

COMPRESSIONS = {"": None, ".gz": gzip.decompress, ".xz": lzma.decompress}
# of a column
LONGEST_NAME = 30
FORMATS = (".tsv", ".csv", ".json", ".jsonl", ".parquet")
# character -> what a message calls it
SEPARATORS = {";": "semicolons", "\t": "tabs", ",": "commas", "|": "bars"}
Row = tuple[int, Sequence[str]]
"""The line that a row starts on, counted from 1, and the wanted cells."""


@dataclass(frozen=True)
class Table:
    """Some columns of a file, as text.

    where: the file, as messages name it.
    columns: name -> `[rows]` cells.
    lines: `[rows]`, where each row starts, counted from 1.
    sha256: of the uncompressed bytes; hexadecimal.
    unit: what `lines` counts: "line", or "item" of a list, or "row".
    skipped: malformed rows that were left out because this was asked for.
    part: which rows of the file these are, where they are not all of them.
    """

    where: str
    columns: dict[str, list[str]]
    lines: Sequence[int]
    sha256: str
    unit: str = "line"
    skipped: int = 0
    part: str = ""

    def __len__(self) -> int:
        return len(self.lines)

    def rows(self, start: int, stop: int) -> Table:
        """Some of the rows, as a table of their own."""
        columns = {name: cells[start:stop] for name, cells in self.columns.items()}
        part = f"rows {start + 1} to {stop}"
        return replace(self, columns=columns, lines=self.lines[start:stop], part=part)

    def at(self, row: int) -> str:
        """Where a row stands, for messages."""
        return f"{self.where}, {self.unit} {self.lines[row]}"


def find_file(root: Path, stem: str) -> Path | None:
    """The file `stem` below `root`, plain or compressed; None if there is none.

    A folder may be written otherwise than in `stem` where only case and punctuation differ ("SST-2" for "sst2", as in
    GLUE's own archives).
    """
    *folders, name = Path(stem).parts
    for folder in folders:
        if not (root / folder).is_dir():
            same = [d for d in _subfolders(root) if _letters(d.name) == _letters(folder)]
            if len(same) != 1:
                return None
            folder = same[0].name
        root = root / folder
    for suffix in COMPRESSIONS:
        path = root / (name + suffix)
        if path.is_file():
            return path
    return None


def read_table(
    path: Path,
    wanted: Sequence[str],
    labels: Sequence[str] = (),
    *,
    header: Sequence[str] = (),
    skip_malformed: bool = False,
) -> Table:
    """Read the wanted columns of a file or of a folder written by `datasets.save_to_disk`.

    Args:
        path: its name says the format: .tsv, .csv, .json, .jsonl or .parquet, then nothing, .gz or .xz; or a folder.
        wanted: names of columns.
        labels: the declared classes; see `from_dataset`.
        header: the columns of a .tsv or .csv file whose first line is a row already; empty: the first line names them.
        skip_malformed: leave out rows of a .tsv or .csv file that have too few or too many cells, and count them.

    Raises:
        UserError: no such file, an unknown format, a damaged or empty file, bytes that are not UTF-8, missing columns,
            or a malformed row, with its line.
    """
    if path.is_dir():
        return _read_saved(path, wanted, labels)
    suffix = Path(_without_compression(path)).suffix.lower()
    if suffix not in FORMATS:
        raise UserError(
            f"{path}: unknown format; tables end in {', '.join(FORMATS)}, then nothing, .gz or .xz, or are folders "
            "written by datasets.save_to_disk"
        )
    if suffix == ".parquet":
        return _read_parquet(path, wanted, labels)
    data = _read_bytes(path)
    text = _decode(path, data)
    skipped: list[int] | None = [] if skip_malformed else None
    if suffix in (".json", ".jsonl"):
        parsed = _json(path, text, wanted)
    else:
        split, delimiter = (_tsv(text), "tab") if suffix == ".tsv" else (_csv(path, text), "comma")
        parsed = _delimited(path, split, wanted, delimiter, header, skipped)
    lines: list[int] = []
    cells: list[Sequence[str]] = []
    for line, row in parsed:
        lines.append(line)
        cells.append(row)
    if not cells:
        raise UserError(f"{path}: the file holds no rows")
    columns = {name: list(column) for name, column in zip(wanted, zip(*cells, strict=True), strict=True)}
    unit = "item" if suffix in (".json", ".jsonl") and _is_list(text) else "line"
    digest = hashlib.sha256(data).hexdigest()
    return Table(str(path), columns, lines, digest, unit, len(skipped or ()))


def from_dataset(dataset: Any, wanted: Sequence[str], where: str, labels: Sequence[str] = ()) -> Table:
    """The wanted columns of a `datasets.Dataset`.

    Args:
        dataset: one split.
        wanted: names of columns.
        where: what messages call it.
        labels: the declared classes. Numbered classes become their names, unless the numbers are what is declared.

    Raises:
        UserError: missing columns, or cells that are not text or a class.
    """
    _check_columns(where, wanted, dataset.column_names)
    columns = {}
    for name in wanted:
        values = dataset[name][:]
        names = getattr(dataset.features[name], "names", None)
        if names and not set(map(str, range(len(names)))) <= set(labels):
            values = [names[value] if value is not None and value >= 0 else value for value in values]
        columns[name] = [_cell(value, f"{where}, row {row}", name) for row, value in enumerate(values, 1)]
    if not len(dataset):
        raise UserError(f"{where}: the data set holds no rows")
    digest = hashlib.sha256()
    for row in zip(*columns.values(), strict=True):
        digest.update(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    return Table(where, columns, range(1, len(dataset) + 1), digest.hexdigest(), unit="row")


def read_text(path: Path) -> tuple[str, str]:
    """A file as text, and the hash of its uncompressed bytes: for layouts that are no tables.

    Raises:
        UserError: no such file, damaged, empty, or not UTF-8.
    """
    data = _read_bytes(path)
    return _decode(path, data), hashlib.sha256(data).hexdigest()


def _read_saved(path: Path, wanted: Sequence[str], labels: Sequence[str]) -> Table:
    import datasets

    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:
        # whatever its reader of Arrow, JSON or files raises
        raise UserError(
            f"{path}: a folder must be one written by datasets.save_to_disk, and this one can't be read as such"
        ) from error
    if isinstance(saved, datasets.DatasetDict):
        raise UserError(
            f"{path} holds several splits: give one of the folders {', '.join(str(path / s) for s in saved)}"
        )
    return from_dataset(saved, wanted, str(path), labels)


def _read_parquet(path: Path, wanted: Sequence[str], labels: Sequence[str]) -> Table:
    """By way of a data set in memory: the library's own reader would copy private rows into its cache."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(pyarrow.BufferReader(_read_bytes(path)))
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: this is no Parquet file, or a damaged one") from error
    _check_columns(path, wanted, table.column_names)
    table = table.select(list(wanted))
    for place, column in enumerate(table.columns):
        # the categories of pandas
        if pyarrow.types.is_dictionary(column.type):
            table = table.set_column(place, wanted[place], column.cast(column.type.value_type))
    return from_dataset(datasets.Dataset(table), wanted, str(path), labels)


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror})") from error
    decompress = COMPRESSIONS.get(path.suffix.lower())
    try:
        data = decompress(data) if decompress else data
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"{path}: the compressed file is damaged or cut short ({error})") from error
    if not data.strip():
        raise UserError(f"{path}: the file is empty")
    return data


def _decode(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}, line {line}: not UTF-8 (byte 0x{data[error.start]:02x}); convert the file with iconv"
        ) from error


def _tsv(text: str) -> Iterator[Row]:
    # GLUE's rule: no quoting, so that a line is a row and a quotation mark is a character.
    lines = text.rstrip("\r\n").split("\n")
    return ((number, line.removesuffix("\r").split("\t")) for number, line in enumerate(lines, 1))


def _csv(path: Path, text: str) -> Iterator[Row]:
    # of a cell: the library takes half a book for a mistake
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    reader = csv.reader(io.StringIO(text.rstrip("\r\n"), newline=""), strict=True)
    start = 1
    try:
        for row in reader:
            # a blank line is no row, as in pandas; an empty text has quotation marks
            if row:
                yield start, row
            start = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {start}: malformed CSV ({error})") from error


def _delimited(
    path: Path,
    rows: Iterator[Row],
    wanted: Sequence[str],
    delimiter: str,
    header: Sequence[str],
    skipped: list[int] | None,
) -> Iterator[Row]:
    names = list(header or next(rows, (1, []))[1])
    if len(names) == 1 and names[0] not in wanted:
        _refuse_separator(path, names[0], delimiter)
    _check_columns(path, wanted, names)
    places = [names.index(name) for name in wanted]
    for line, cells in rows:
        if len(cells) == len(names):
            yield line, [cells[place] for place in places]
        elif skipped is not None:
            skipped.append(line)
        else:
            there = "task.columns names" if header else "the header has"
            raise UserError(
                f"{path}, line {line}: malformed row: {len(cells)} {delimiter}-separated cells where {there} "
                f"{len(names)} ({_names(names)}); task.malformed=skip leaves such rows out and counts them"
            )


def _refuse_separator(path: Path, first_line: str, delimiter: str) -> None:
    """Say so where a first line of one cell looks like several cells with something else between them."""
    others = [name for mark, name in SEPARATORS.items() if mark in first_line and delimiter not in name]
    if others:
        raise UserError(
            f"{path}: its first line has {others[0]} and no {delimiter}s: save the table as .csv with commas or as .tsv with "
            "tabs between its cells"
        )


def _json(path: Path, text: str, wanted: Sequence[str]) -> Iterator[Row]:
    items = _json_list(path, text) if _is_list(text) else _json_lines(path, text)
    for line, unit, item in items:
        where = f"{path}, {unit} {line}"
        if not isinstance(item, dict):
            raise UserError(
                f"{where}: malformed row: a JSON object is expected, and this is a {type(item).__name__}"
            )
        _check_columns(where, wanted, item)
        yield line, [_cell(item[name], where, name) for name in wanted]


def _is_list(text: str) -> bool:
    return text.lstrip().startswith("[")


def _json_lines(path: Path, text: str) -> Iterator[tuple[int, str, Any]]:
    for line, content in enumerate(text.rstrip().split("\n"), 1):
        try:
            yield line, "line", json.loads(content)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}, line {line}: malformed JSON ({error.msg}); one object a line is expected"
            ) from error


def _json_list(path: Path, text: str) -> Iterator[tuple[int, str, Any]]:
    try:
        items = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: malformed JSON ({error.msg})") from error
    return ((number, "item", item) for number, item in enumerate(items, 1))


def _cell(value: Any, where: str, column: str) -> str:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{where}: column {column} holds half of a character (such as \\ud83d alone), which no tokenizer reads: repair "
                "the text"
            ) from error
        return value
    # what programs write for a missing cell is no text
    missing = value is None or (isinstance(value, float) and math.isnan(value))
    if isinstance(value, (bool, int, float)) and not missing:
        return json.dumps(value)
    # not the value: it may be private
    held = "nothing" if missing else f"a {type(value).__name__}"
    raise UserError(f"{where}: column {column} holds {held}, neither text nor a number")


def _check_columns(where: Path | str, wanted: Sequence[str], there: Iterable[str]) -> None:
    there = list(there)
    missing = [name for name in wanted if name not in there]
    if missing:
        raise UserError(
            f"{where}: no column {' and no column '.join(missing)}; the columns are {_names(there)}"
        )
    twice = [name for name in wanted if there.count(name) > 1]
    if twice:
        raise UserError(f"{where}: the column {twice[0]} appears {there.count(twice[0])} times")


def _names(columns: list[str]) -> str:
    """Without what is too long for a name: the first line of a file without a header is a row, and may be private."""
    return ", ".join(name if len(name) <= LONGEST_NAME else "(a text)" for name in columns)


def _without_compression(path: Path) -> str:
    return path.stem if path.suffix.lower() in COMPRESSIONS else path.name


def _subfolders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
