#!/usr/bin/env python3
"""Put a run of `pagetide bench paper` into docs/paper.md: the counts, every claim, and the charts that the page shows.

  scripts/paper-page.py DIR      DIR is the run's --out
"""

import json
import re
import shutil
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
VERDICTS = {"Agrees": "agrees", "Differs": "differs", "NotRun": "not run"}


def counts(claims):
    numbers = [f"{sum(claim['verdict'] == verdict for claim in claims)} {says}" for verdict, says in VERDICTS.items()]
    return f"{len(claims)} claims: {', '.join(numbers)}.".replace("agrees", "agree").replace("differs", "differ")


def tables(claims):
    topics = {}
    for claim in claims:
        verdict = VERDICTS[claim["verdict"]]
        verdict += f": {claim['why']}" if claim["verdict"] == "Differs" else ""
        cells = [claim["claim"], claim["source"], claim["claimed"], claim["ours"], verdict]
        row = "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        topics.setdefault(claim["topic"], []).append(row)
    head = "| claim | section, figure | claimed | ours | |\n|---|---|---|---|---|\n"
    return "\n\n".join(f"### {topic}\n\n{head}" + "\n".join(rows) for topic, rows in topics.items())


def replace_between(text, name, new):
    pattern = rf"(<!-- {name} -->\n).*(\n<!-- end of {name} -->)"
    assert re.search(pattern, text, re.DOTALL), f"docs/paper.md has no section between the comments of '{name}'"
    return re.sub(pattern, lambda found: found[1] + new + found[2], text, flags=re.DOTALL)


def main():
    run = Path(sys.argv[1])
    claims = json.loads((run / "paper.json").read_text())["claims"]
    page = DOCS / "paper.md"
    text = replace_between(page.read_text(), "counts", counts(claims))
    text = replace_between(text, "claims", tables(claims))
    page.write_text(text)
    for chart in re.findall(r"images/paper/([\w-]+\.svg)", text):
        shutil.copy(run / chart, DOCS / "images" / "paper" / chart)


if __name__ == "__main__":
    main()
