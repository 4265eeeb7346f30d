"""Published layouts of text-to-text data: one small file each."""

from dpexp.tasks.formats.base import GROUP, SOURCE, TARGET, Format
from dpexp.tasks.formats.columns import Columns
from dpexp.tasks.formats.e2e import E2E, tokenised
from dpexp.tasks.formats.personachat import PersonaChat
from dpexp.tasks.formats.samsum import Samsum
from dpexp.tasks.formats.triples import Triples

FORMATS: dict[str, Format] = {
    "e2e": E2E(),
    "e2e_tokenised": E2E(tokenised),
    "triples": Triples(),
    "triples_as_coded": Triples(words=False),
    "samsum": Samsum(),
    "personachat": PersonaChat(),
}
"""`task.format` -> how its files are read."""

__all__ = ["FORMATS", "GROUP", "SOURCE", "TARGET", "Columns", "Format"]
