"""The user's documents as values: their code blocks, links, tables and shell lines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block; ``mark`` is the comment on the line above it."""

    document: str
    language: str
    mark: str
    text: str


def blocks(document: Path, *languages: str) -> list[Block]:
    """The fenced blocks in ``languages``, in order."""
    found = [
        Block(document.name, match["language"], match["mark"] or "", match["text"])
        for match in _BLOCK.finditer(document.read_text())
    ]
    return [block for block in found if block.language in languages]


def all_blocks(*languages: str) -> list[Block]:
    """The blocks of every document."""
    return [block for document in DOCUMENTS for block in blocks(document, *languages)]


def prose(document: Path) -> str:
    """The text outside of fenced blocks."""
    return _BLOCK.sub("", document.read_text())


def links(document: Path) -> list[str]:
    """The targets of all links in the prose."""
    return _LINK.findall(prose(document))


def anchors(document: Path) -> set[str]:
    """The fragments that headings define, as GitHub spells them."""
    titles = _HEADING.findall(prose(document))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def table(document: Path, name: str) -> list[list[str]]:
    """The cells of the table under ``<!-- table: NAME -->``, without its heading."""
    after = document.read_text().split(f"<!-- table: {name} -->\n", 1)[1]
    rows = []
    for line in after.splitlines():
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows[2:]
