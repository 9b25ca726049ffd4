"""What mkdocs calls while it builds the site: llms.txt, a mermaid.js of the site's own, and the order of searches.

mkdocs loads this file by its path, so it imports nothing of the project.
"""

from __future__ import annotations

import re
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# of mermaid 11.16.0's dist/mermaid.min.js, as its authors publish it
MERMAID_SHA256 = "74d7c46dabca328c2294733910a8aa1ed0c37451776e8d5295da38a2b758fb9b"
MERMAID = "assets/javascripts/mermaid.min.js"
DIAGRAM = 'class="mermaid"'
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
BACKGROUND = ("measurements/", "explanation/decisions/")  # a search lists pages of these folders last


pages: list[Any] = []  # of the site that is built, in the order of the navigation


def on_nav(nav: Any, config: Any, files: Any) -> Any:
    """Remember the pages; their titles and texts are known at the end of the build."""
    pages[:] = nav.pages
    return nav


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rank a page of background lower in searches."""
    if page.url.startswith(BACKGROUND):
        page.meta["search"] = {"boost": 0.2}
    return markdown


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Load mermaid.js from the site itself where a page has a diagram; the theme would load it from elsewhere."""
    if DIAGRAM not in output:
        return output
    to_root = "../" * page.url.count("/")
    return output.replace("</head>", f'<script src="{to_root}{MERMAID}"></script></head>', 1)


def on_post_build(config: Any) -> None:
    """Write llms.txt, llms-full.txt and mermaid.js."""
    site = Path(config["site_dir"])
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    section = ""
    for page in pages:
        if (own := _section(page)) != section:
            section = own
            lines += ["", f"## {section}", ""]
        lines.append(f"- [{page.title}]({page.url}): {_summary(page.markdown)}")
    (site / "llms.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    full = "\n\n".join(f"<!-- {page.url} -->\n\n{page.markdown.strip()}" for page in pages)
    (site / "llms-full.txt").write_text(full + "\n", encoding="utf-8")
    (site / MERMAID).write_bytes(_mermaid())


def _section(page: Any) -> str:
    return " / ".join(ancestor.title for ancestor in reversed(page.ancestors)) or "Start"


def _summary(markdown: str) -> str:
    """Return the first sentence below the title, without links."""
    paragraphs = [part for part in re.split(r"\n\s*\n", markdown) if not part.lstrip().startswith(("#", "!"))]
    return LINK.sub(r"\1", paragraphs[0].strip().split("\n")[0]) if paragraphs else ""


def _mermaid() -> bytes:
    """Return mermaid.js, as a package carries it, if it is the one that its authors publish."""
    package = find_spec("mermaidx")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("the package mermaidx is not installed; run: make docs")
    script = (Path(package.submodule_search_locations[0]) / "assets" / "mermaid.js").read_bytes()
    if sha256(script).hexdigest() != MERMAID_SHA256:
        raise ValueError("mermaidx carries another mermaid.js than expected; compare it with the published one")
    return script
