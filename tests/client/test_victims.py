"""No request of one client may harm other clients. Each bomb is sent twice at once, beside streams and short prompts.

PAGETIDE_LONG=1 tries all bombs. PAGETIDE_VICTIMS_REPORT names a file for the figures.
"""

import os
import pathlib

import pytest
from attack import Target
from bombs import BOMBS

LONG = os.environ.get("PAGETIDE_LONG", "0") != "0"
TRIED = [bomb for bomb in BOMBS if LONG or not bomb.long]
# The machine may be busy with other things, so a bomb fails the test only if times are too long in every attempt.
ATTEMPTS = 3
COLUMNS = ["bomb", "body, kB", "answers", "after, s", "gap, s (quiet)", "short prompt, s (quiet)", "memory, MB", ""]
HEAD = "| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    log = tmp_path_factory.mktemp("victims") / "server.log"
    made = Target(log, "--set", "server.workers=2", "--set", "log.level=warn")
    yield made
    if made.server.alive():
        assert made.server.stop() == 0


@pytest.fixture(scope="module")
def rows():
    """Collects a row of the table for each bomb, and writes it to the file at once."""
    report = os.environ.get("PAGETIDE_VICTIMS_REPORT")
    made = []

    def add(line: str):
        made.append(line)
        if report:
            pathlib.Path(report).write_text("\n".join(made) + "\n")

    add(HEAD)
    yield add
    print("\n".join(["", *made]))


def row(name: str, seen, wrong: list) -> str:
    answers = ", ".join(map(str, seen.answers)) or "none"
    cells = [
        *(name, f"{seen.bytes / 1e3:.0f}", answers, f"{seen.answered_s:.1f}"),
        f"{seen.gap_s:.2f} ({seen.quiet_gap_s:.2f})",
        f"{seen.prompt_s:.2f} ({seen.quiet_prompt_s:.2f})",
        *(f"{seen.memory_mb:.0f}", "; ".join(wrong) or "holds"),
    ]
    return "| " + " | ".join(cells) + " |"


@pytest.mark.parametrize("bomb", TRIED, ids=lambda bomb: bomb.name)
def test_nobody_else_is_hurt_by(bomb, target, rows):
    check(bomb, target, rows)


# Bombs that are also sent by clients that disconnect before the answer.
LEFT = [
    "20 times 20 options, eight deep",
    "20 options of objects, four deep",
    "30 patterns that all hold",
    "a message of spaces",
    "GBNF with 60,000 ?",
    "embeddings of one-token prompts",
    "tokenize of spaces",
]


@pytest.mark.parametrize("bomb", [bomb for bomb in TRIED if bomb.name in LEFT], ids=lambda bomb: bomb.name)
def test_work_ends_with_its_client(bomb, target, rows):
    check(bomb, target, rows, leave_after_s=0.3)


def check(bomb, target, rows, **options):
    for _ in range(ATTEMPTS):
        seen = target.ready().attack(bomb, **options)
        if seen.wrong or not seen.late():
            break
    wrong = seen.wrong + seen.late()
    rows(row(bomb.name + (", and away" if options else ""), seen, wrong))
    assert not wrong
