"""The lists of tests that do not pass, and why: files beside this one, a line for each test or group of tests.

    id | category | reason

An id is a test function, or what several begin with: a class, a file (`….py`) or a folder (`…/`). The longest id that
fits counts. An id with `[part]` at its end stands for the cases of its tests whose parameters contain the part: a
function is counted without them. `[=all]` stands for the case whose parameters are exactly these. Lines that begin with
# are comments.
"""

import pathlib
from dataclasses import dataclass, field

FOLDER = pathlib.Path(__file__).with_name("lists")

# In the order of the report's columns.
CATEGORIES = {
    "model": "a capable model would pass it, the demo model cannot",
    "differs": "Pagetide differs on purpose",
    "feature": "needs another feature",
    "internal": "tests the peer's own code, not a server",
    "missing": "to be built",
}


@dataclass
class Entry:
    id: str
    category: str
    reason: str
    line: int
    # How many functions it fits.
    uses: int = 0
    # How many of them pass.
    passed: int = 0


@dataclass
class Lists:
    path: pathlib.Path
    entries: dict[str, Entry] = field(default_factory=dict)
    # Cases: (id, part of the parameters, entry).
    cases: list[tuple[str, str, Entry]] = field(default_factory=list)

    def leaves_out(self, test: str, parameters: str) -> bool:
        """Whether the case of a test with these parameters, as in its node id, is left out."""
        for id, part, entry in self.cases:
            fits = parameters == f"{part[1:]}]" if part.startswith("=") else part in parameters
            if (test == id or test.startswith((f"{id}::", f"{id}/"))) and fits:
                entry.uses += 1
                return True
        return False

    def find(self, test: str) -> Entry | None:
        """The entry that says most exactly which test it means."""
        parts = test.split("::")
        candidates = ["::".join(parts[:count]) for count in range(len(parts), 0, -1)]
        folders = parts[0].split("/")[:-1]
        candidates += ["/".join(folders[:count]) + "/" for count in range(len(folders), 0, -1)]
        for candidate in candidates:
            if entry := self.entries.get(candidate):
                return entry
        return None


def read(suite: str) -> Lists:
    path = FOLDER / f"{suite}.txt"
    lists = Lists(path)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split("|", 2)]
        if len(parts) != 3 or parts[1] not in CATEGORIES or not parts[2]:
            raise ValueError(f"{path}:{number}: want `id | category | reason`; categories are {', '.join(CATEGORIES)}")
        if parts[0] in lists.entries:
            raise ValueError(f"{path}:{number}: {parts[0]} is there twice")
        entry = Entry(*parts, number)
        if parts[0].endswith("]"):
            id, _, part = parts[0][:-1].partition("[")
            lists.cases.append((id, part, entry))
        else:
            lists.entries[parts[0]] = entry
    return lists
