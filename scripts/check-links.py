#!/usr/bin/env python3
"""Checks the Markdown files of the repository: every relative link leads to a file, and every anchor to a heading."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IGNORED = {".git", ".venv", "node_modules", "shared", "target"}
LINK = re.compile(r"\]\(([^()\s]+)\)")


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.replace("`", ""))
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def prose(text: str) -> list[tuple[int, str]]:
    """The lines outside of code blocks, with their numbers."""
    lines, in_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            lines.append((number, line))
    return lines


def anchors(path: Path) -> set[str]:
    found: set[str] = set()
    for _, line in prose(path.read_text()):
        if match := re.match(r"#+ (.*)", line):
            name, count = slug(match[1]), 0
            while (numbered := f"{name}-{count}" if count else name) in found:
                count += 1
            found.add(numbered)
    return found


def main() -> int:
    problems = []
    for path in sorted(ROOT.rglob("*.md")):
        name = path.relative_to(ROOT)
        if IGNORED & set(name.parts):
            continue
        for number, line in prose(path.read_text()):
            for link in LINK.findall(line):
                if re.match(r"[a-z]+:", link):
                    continue
                file, _, anchor = link.partition("#")
                target = (path.parent / file).resolve() if file else path
                if not target.exists():
                    problems.append(f"{name}:{number}: there is no {link}")
                elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                    problems.append(f"{name}:{number}: {file or name} has no heading #{anchor}")
    print("\n".join(problems) or "all links of the Markdown files lead somewhere")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
