"""The form of the documents' prose: a sentence a line, few sentences a paragraph, short paragraphs.

`python -m website.prose` prints what is wrong, and exits with status 1 where anything is.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
MAX_SENTENCES = 5  # of a paragraph
MAX_MEDIAN_WORDS, MAX_P90_WORDS = 25, 60  # of a paragraph, over all documents

FENCE = re.compile(r"\s*(```+|~~~+)")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
# headings, rows of tables, images, HTML, definitions of links, and beginnings of admonitions and tabs
NO_PROSE = re.compile(r"\s*(#|\||!\[|<|\[\^?[^\]]+\]:|!!! |\?\?\?\+? |=== )")
ITEM = re.compile(r"\s*([-*+]|\d+\.)\s+")
UNREAD = re.compile(r"`[^`]*`|\]\([^)]*\)|\be\.g\.|\bi\.e\.|\bvs\.|\bNo\.|\bet al\.")
BETWEEN_SENTENCES = re.compile(r"[.!?][)\"'*_]*\s+(?=[A-Z*_\[\"(\x00])")
END = re.compile(r"[.!?:;][)\"'*_]*$|\x00$")


@dataclass(frozen=True)
class Paragraph:
    """A paragraph, or an item of a list.

    line   where it begins, from 1
    texts  its lines
    """

    path: Path
    line: int
    texts: tuple[str, ...]

    @property
    def words(self) -> int:
        """The number of words, without the targets of links."""
        return len(re.sub(r"\]\([^)]*\)", "]", " ".join(self.texts)).split())

    @property
    def sentences(self) -> int:
        """The number of sentences."""
        return 1 + len(BETWEEN_SENTENCES.findall(" ".join(map(_read, self.texts))))

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with it, each time with the place."""
        if self.sentences > MAX_SENTENCES:
            yield f"{self._place(0)}: {self.sentences} sentences in a paragraph, of which it has {MAX_SENTENCES} at most"
        for number, text in enumerate(self.texts):
            if BETWEEN_SENTENCES.search(_read(text)):
                yield f"{self._place(number)}: more than one sentence on a line: {text[:60]}"
            elif number < len(self.texts) - 1 and not END.search(_read(text)):
                yield f"{self._place(number)}: a sentence goes on in the next line: ...{text[-60:]}"

    def _place(self, number: int) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line + number}"


def documents() -> list[Path]:
    """Return all documents, notebooks and READMEs of the packages included, but those that `rumdl` leaves out."""
    excluded = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["rumdl"].get("exclude", [])
    patterns = ("*.md", "docs/**/*.md", "docs/**/*.ipynb", "clients/*/README.md")
    found = [path for pattern in patterns for path in ROOT.glob(pattern) if path.name != "CHANGELOG.md"]
    return sorted(path for path in found if path.relative_to(ROOT).as_posix() not in excluded)


def paragraphs(path: Path) -> Iterator[Paragraph]:
    """Yield the paragraphs of a document, without code, tables and headings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    text = COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text)
    begin, texts, fence = 0, list[str](), ""
    for number, line in enumerate([*text.splitlines(), ""], 1):
        mark = FENCE.match(line)
        if mark is not None and (not fence or line.strip() == fence):
            fence = "" if fence else mark[1]
        is_prose = not fence and mark is None and bool(line.strip()) and NO_PROSE.match(line) is None
        if texts and (not is_prose or ITEM.match(line)):
            yield Paragraph(path, begin, tuple(texts))
            texts = []
        if is_prose:
            begin = begin if texts else number
            texts.append(ITEM.sub("", line).strip())


def p90(numbers: list[int]) -> int:
    """Return the number below which nine tenths of them are."""
    return sorted(numbers)[int(0.9 * len(numbers))]


def problems(paths: list[Path]) -> list[str]:
    """Return what is wrong with the prose of documents."""
    found = [one for path in paths for one in paragraphs(path)]
    wrong = [problem for paragraph in found for problem in paragraph.problems()]
    words = [one.words for one in found]
    if words and median(words) > MAX_MEDIAN_WORDS:
        wrong.append(f"a paragraph has {median(words):.0f} words in the median, and may have {MAX_MEDIAN_WORDS}")
    if words and p90(words) > MAX_P90_WORDS:
        wrong.append(f"a tenth of all paragraphs has {p90(words)} words or more; {MAX_P90_WORDS} are the limit")
    return wrong


def _read(text: str) -> str:
    """Return the text as sentences are looked for in it: with a sign in the place of code, addresses, abbreviations."""
    return UNREAD.sub(lambda found: "]" if found[0].startswith("]") else "\x00", text)


if __name__ == "__main__":
    wrong = problems(documents())
    print("\n".join(wrong))
    sys.exit(bool(wrong))
