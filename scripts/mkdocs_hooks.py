"""What the site does with the documents' links into the repository: they name the file, because the site holds docs/ alone."""

import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+(?!methods/|api/)[^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn a link that leaves docs/ into its text and the file's name."""
    depth = page.file.src_uri.count("/")

    def named(match: re.Match[str]) -> str:
        text, target = match.groups()
        if target.count("../") <= depth:
            return match[0]
        file = target.replace("../", "")
        return f"{text} (`{file}`)" if file not in text else text

    return LINK.sub(named, markdown)
