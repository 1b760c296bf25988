"""Do the links between the documentation's files lead somewhere, and do the repository's files that it names exist?

    python scripts/check_links.py [FILE.md …]        (default: every Markdown file of the repository)

Looks at relative Markdown links, at their #anchors, and at `code` that reads as a path below one of the
repository's folders. Code blocks and web addresses are left alone. Exit code: 1 if anything is missing.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("configs/", "docs/", "jaxrun/", "scripts/", "tests/", ".ci/")
BLOCK = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+\s+(.*?)\s*$", re.MULTILINE)


def without_blocks(text: str) -> str:
    """The text without its fenced code blocks; lines keep their numbers."""
    return BLOCK.sub(lambda block: "\n" * block.group().count("\n"), text)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to a file's headings."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(without_blocks(text))
    }


def problems(path: Path, root: Path = ROOT) -> Iterator[str]:
    """One line for each link or named file of the Markdown file `path` that is not there: where, and what is missing."""
    prose = without_blocks(path.read_text())
    for number, line in enumerate(prose.splitlines(), 1):
        where = f"{path.relative_to(root)}:{number}"
        for target in LINK.findall(CODE.sub("", line)):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            file = path.parent / name if name else path
            if not file.exists():
                yield f"{where}: the link to {target} leads nowhere"
            elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
                yield f"{where}: {name or path.name} has no heading #{anchor}"
        for code in CODE.findall(line):
            name = code.split()[0] if code.split() else ""
            if name.startswith(FOLDERS) and re.fullmatch(r"[\w./*-]+", name) and not any(root.glob(name.rstrip("/"))):
                yield f"{where}: names {name}, which is not there"


def main(arguments: list[str]) -> int:
    skipped = (".venv", ".git", "runs", "build")
    found = (p for p in sorted(ROOT.rglob("*.md")) if not p.relative_to(ROOT).parts[0].startswith(skipped))
    files = [Path(a).resolve() for a in arguments] or list(found)
    missing = [problem for path in files for problem in problems(path)]
    print("\n".join(missing) or f"{len(files)} files, all links lead somewhere")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
