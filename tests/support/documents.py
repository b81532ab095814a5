"""README and docs as tests read them: pages, their blocks of code, their links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = (README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md")))
MADE = (ROOT / "docs" / "tables.md",)  # pages of the site that `make docs` makes and that are not committed
# A comment right before a block says what the block needs beside this library.  Such a block is compiled; it runs only
# if it needs just "gpu" and there is one.  A block that needs DIFFS runs in a copy of the package with the diffs.
DIFFS = "the diffs above"
BLOCK = re.compile(r"(?:^<!-- needs: ([^\n]+?) -->\n)?^```(\w+)[^\n]*\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int  # of the fence
    needs: str
    language: str
    text: str

    def compiled(self) -> object:
        """Return the block's code; line numbers in errors are those of the page."""
        return compile("\n" * self.line + self.text, str(self.page), "exec")


def apply(diff: str, root: Path) -> None:
    """Apply a diff to files.  A hunk is found by its words, which must occur once, regardless of line breaks."""
    for part in re.split(r"^--- ", diff, flags=re.M)[1:]:
        header, *hunks = re.split(r"^@@.*\n", part, flags=re.M)
        before, after = header.splitlines()
        path = root / after.removeprefix("+++ b/")
        if before == "/dev/null":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(line[1:] for line in hunks[0].splitlines()) + "\n", encoding="utf-8")
            continue
        text = path.read_text(encoding="utf-8")
        for hunk in hunks:
            text = changed(text, hunk.splitlines(keepends=True), path.name)
        path.write_text(text, encoding="utf-8")


def changed(text: str, hunk: list[str], where: str) -> str:
    """Return a file's text after one hunk; `where`: the file's name, for errors."""
    old = "".join(line[1:] or "\n" for line in hunk if line[0] != "+")
    new = "".join(line[1:] or "\n" for line in hunk if line[0] != "-")
    found = list(anywhere(old).finditer(text))
    assert len(found) == 1, f"{where} has {len(found)} times\n{old}"
    begin, end = found[0].span()
    line = text.rfind("\n", 0, begin) + 1
    indent = line if not text[line:begin].strip() else begin  # words in the middle of a line stay there
    return text[:indent] + (new.lstrip("\n") if indent == line else new.lstrip()).rstrip("\n") + text[end:]


def anywhere(words: str) -> re.Pattern[str]:
    """Return a pattern that finds a text by its words and punctuation, regardless of line breaks."""
    tokens = re.findall(r"\w+|[^\w\s]", words)
    return re.compile(r"(?<!\w)" * tokens[0].isidentifier() + r"\s*".join(map(re.escape, tokens)))


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        needs, word, body = match.groups()
        line = text.count("\n", 0, match.start(2)) + 1
        found.append(Block(page, line, needs or "", word, body))
    return [block for block in found if block.language == language]


def links(page: Path) -> list[str]:
    """Return the targets of links that lead to files of this repository."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [x for x in LINK.findall(text) if not re.match(r"[a-z]+:", x)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page, which links have behind #: its headings as both GitHub and mkdocs spell them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    plain = (re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower() for heading in headings)
    return {re.sub(r"\s", "-", heading) for heading in plain}


def plain(page: Path) -> str:
    """Return a page's text with one blank for all white space, so that tests do not depend on line breaks."""
    return " ".join(page.read_text(encoding="utf-8").split())


def prose(page: Path) -> str:
    """Return a page's text without blocks of code and rows of tables."""
    return re.sub(r"^```.*?^```$|^\|[^\n]*$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
