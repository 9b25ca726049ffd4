"""The prose check: all documents pass, and violations are detected."""

from __future__ import annotations

from pathlib import Path

import pytest

from website import prose

NOTEBOOKS = {"docs/how-to/integrate/python-api.ipynb"}
LONG = " ".join(["word"] * 61) + "."


def test_all_documents_pass() -> None:
    found = prose.documents()
    others = {"SECURITY.md", "clients/lisarec_client/README.md", "clients/npm/README.md"}
    assert {path.relative_to(prose.ROOT).as_posix() for path in found} > {*others, *NOTEBOOKS}
    assert prose.problems(found) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("One sentence. Another one.", ":3: more than one sentence on a line"),
        ("- An item.\n- An item. Another one (`x`).", ":4: more than one sentence on a line"),
        ("A sentence that\ngoes on.", ":3: a sentence goes on in the next line"),
        ("\n".join(["A sentence."] * 6), ":3: 6 sentences in a paragraph"),
        ("\n".join(["- A sentence.", *["  Another one."] * 5]), ":3: 6 sentences in a paragraph"),
        ("\n\n".join([LONG] * 5), "words in the median"),
        ("\n\n".join(["Short."] * 8 + [LONG] * 2), "a tenth of all paragraphs has 61 words or more"),
    ],
)
def test_violations_are_detected(text: str, problem: str, tmp_path: Path) -> None:
    page = tmp_path / "bad.md"
    page.write_text(f"# Bad page\n\n{text}\n", encoding="utf-8")
    assert any(problem in found for found in prose.problems([page])), prose.problems([page])


def test_code_and_tables_are_skipped(tmp_path: Path) -> None:
    page = tmp_path / "good.md"
    page.write_text(
        "# A title. With a dot. And more.\n\n"
        "| a cell. Two sentences. | another |\n|---|---|\n\n"
        "<!-- a comment. Two sentences. -->\n\n"
        "```sh\nwords. More words. And more\n\n# a comment. Two.\n```\n\n"
        "- An item:\n\n    ```text\n    One. Two. Three\n    ```\n\n"
        "See `a. B`, e.g. This and [a link](there.md).\nIt ends with code: `x`\nAnd goes on.\n",
        encoding="utf-8",
    )
    assert prose.problems([page]) == []
    assert [one.line for one in prose.paragraphs(page)] == [14, 20]
