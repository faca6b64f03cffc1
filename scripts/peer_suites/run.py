"""Runs the peers' own tests of a server against pagetide, and says what passes. See scripts/peer-suites.sh."""

import argparse
import ast
import collections
import json
import os
import pathlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from peer_suites import lists  # noqa: E402
from peer_suites.sources import CACHE, PACKAGES, ROOT, source  # noqa: E402

PAGE = ROOT / "docs" / "compatibility.md"
HERE = pathlib.Path(__file__).resolve().parent
# Only ends a test that hangs. In a quick run all tests pass, so none has to be given up soon, on a slow machine either.
TEST_TIMEOUT_S = 60
QUICK_TEST_TIMEOUT_S = 600
# It takes longer than all other tests of vLLM. It runs schemathesis over the API description, as
# tests/client/test_schema.py does. So a quick run leaves it out.
SLOW = {"entrypoints/openai/test_openai_schema.py::test_openapi_stateless"}


@dataclass(frozen=True)
class Suite:
    name: str
    # The folder that the ids of its tests begin in.
    root: pathlib.Path
    # The files with tests, below the root.
    files: tuple[pathlib.Path, ...]
    # Classes with tests of a server; any class, if empty.
    class_endings: tuple[str, ...] = ()

    def functions(self) -> list[str]:
        """The ids of all test functions, as the source has them."""
        found = []
        for file in self.files:
            module = ast.parse(file.read_text(encoding="utf-8"))
            name = file.relative_to(self.root).as_posix()
            found += [f"{name}::{test}" for test in test_functions(module.body, self.class_endings)]
        return found


def test_functions(body, class_endings):
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test"):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            if not (node.name.endswith(class_endings) if class_endings else node.name.startswith("Test")):
                continue
            for test in test_functions(node.body, class_endings):
                yield f"{node.name}::{test}"


def suite_of(peer: str) -> Suite:
    root = source(peer)
    if peer == "vllm":
        return Suite(peer, root / "tests", tuple(sorted((root / "tests/entrypoints").rglob("test_*.py"))))
    if peer == "llama.cpp":
        tests = root / "tools/server/tests"
        return Suite(peer, tests, tuple(sorted((tests / "unit").glob("test_*.py"))))
    kits = root / "sglang/test/kits"
    return Suite(peer, kits.parent, tuple(sorted(kits.glob("*.py"))), ("Mixin", "Kit"))


def pytest_run(suite: Suite, tests: list[str], options, results: pathlib.Path):
    """Runs the tests. `tests` are ids of functions or files."""
    environment = {
        **os.environ,
        "PAGETIDE_BIN": options.binary,
        "PEER_SUITES_RESULTS": str(results),
        "PYTHONPATH": str(HERE.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # Settings in the environment of this machine must not reach the programs.
    foreign = [name for name in environment if name.startswith("PAGETIDE_") and name != "PAGETIDE_BIN"]
    for name in foreign:
        del environment[name]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "peer_suites.recorder"]
    timeout_s = QUICK_TEST_TIMEOUT_S if options.quick else TEST_TIMEOUT_S
    command += ["--timeout", str(timeout_s), "--tb", "native", "-W", "ignore"]
    if suite.name == "vllm":
        folder = suite.root.parent
        environment["PEER_SUITES_SOURCE"] = str(folder)
        # Their conftest.py at the top imports torch.
        command += ["-c", os.devnull, "--rootdir", str(folder), "--confcutdir", str(suite.root / "entrypoints")]
        command += ["-p", "peer_suites.vllm_plugin", "--continue-on-collection-errors"]
        command += [f"tests/{test}" for test in tests]
    elif suite.name == "llama.cpp":
        from probes import free_port

        folder = suite.root
        environment["LLAMA_SERVER_BIN_PATH"] = str(HERE / "llama_server.py")
        environment["PORT"] = str(free_port())
        command += tests
    else:
        folder = ROOT
        # The kits are classes of one file here.
        command += [to_sglang_node(test) for test in tests]
    log = results.with_suffix(".log")
    with log.open("wb") as out:
        status = subprocess.run(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT).returncode
    # 0 and 1: all tests ran.
    if status not in (0, 1):
        raise RuntimeError(f"pytest ended with status {status}: {log}")


def to_sglang_node(test: str) -> str:
    """kits/a.py::B::c is sglang_suite.py::a.B::c."""
    file, kit, *function = test.split("::")
    return "::".join(["scripts/peer_suites/sglang_suite.py", f"{pathlib.Path(file).stem}.{kit}", *function])


def from_node(suite: Suite, node: str) -> str:
    if suite.name == "vllm":
        return node.removeprefix("tests/")
    if suite.name == "sglang" and "::" in node:
        _, kit, *rest = node.split("::")
        file, _, name = kit.partition(".")
        return "::".join([f"kits/{file}.py", name, *rest])
    return node


@dataclass
class Outcome:
    outcome: str
    message: str = ""
    seconds: float = 0.0


def outcomes(suite: Suite, results: pathlib.Path, listed: lists.Lists) -> dict[str, Outcome]:
    """What became of each function: it passed if all its cases passed, apart from those that skipped themselves."""
    found: dict[str, Outcome] = {}
    for line in results.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        test = from_node(suite, record["test"])
        if listed.leaves_out(test, record["id"].partition("[")[2]):
            continue
        kind = "failed" if record["outcome"] == "uncollected" else record["outcome"]
        had = found.setdefault(test, Outcome(kind, record["message"]))
        had.seconds += record["seconds"]
        rank = ["skipped", "passed", "failed"]
        if rank.index(kind) > rank.index(had.outcome):
            had.outcome, had.message = kind, record["message"]
    return found


@dataclass
class Report:
    suite: Suite
    seconds: float
    functions: list[str]
    found: dict[str, Outcome]
    lists: lists.Lists
    is_quick: bool

    def __post_init__(self):
        self.groups: dict[str, list[str]] = collections.defaultdict(list)
        # Tests that pass although a list says that they do not.
        self.surprises: list[str] = []
        for test in self.functions:
            entry = self.lists.find(test)
            if entry:
                entry.uses += 1
            outcome = self.outcome(test)
            if outcome == "passed":
                self.groups["passed"].append(test)
                # Of a group that is listed as a whole, some tests pass because they expect a refusal.
                if entry and entry.id == test:
                    self.surprises.append(test)
                elif entry:
                    entry.passed += 1
            elif entry:
                self.groups[entry.category].append(test)
            elif outcome == "skipped":
                self.groups["skipped"].append(test)
            else:
                self.groups["unlisted"].append(test)

    def outcome(self, test: str) -> str:
        if test in self.found:
            return self.found[test].outcome
        # A file that cannot be imported is reported as a whole.
        return "absent"

    def message(self, test: str) -> str:
        found = self.found.get(test) or self.found.get(test.split("::")[0])
        return found.message if found else "it was not collected"

    def count(self, *groups: str) -> int:
        return sum(len(self.groups[group]) for group in groups)

    def row(self) -> list[str]:
        missing = self.count("missing", "unlisted")
        counts = [self.count(name) for name in ("passed", "model", "differs", "feature", "internal", "skipped")]
        return [self.suite.name, str(len(self.functions)), *map(str, counts), str(missing)]

    def shares(self) -> tuple[str, str]:
        """What passes of the functions that need no capable model and no other feature, and of all of a server."""
        passed = self.count("passed")
        of = passed + self.count("missing", "unlisted", "differs")
        server = of + self.count("model", "feature")
        return f"{share(passed, of)} ({passed} of {of})", f"{share(passed, server)} ({passed} of {server})"

    def percentages(self) -> str:
        able, server = self.shares()
        return (
            f"{self.suite.name}: {able} of the functions that need no capable model and no other feature pass, "
            f"{server} of all that test a server; {self.seconds:.0f} s"
        )

    def details(self):
        for category, title in lists.CATEGORIES.items():
            tests = self.groups[category]
            if not tests:
                continue
            print(f"\n{self.suite.name}: {title} ({len(tests)})")
            by_reason = collections.defaultdict(list)
            for test in tests:
                by_reason[self.lists.find(test).reason].append(test)
            for reason, group in sorted(by_reason.items(), key=lambda item: -len(item[1])):
                print(f"  {reason}")
                # Whole files of their own code would fill the screen.
                for test in group if category != "internal" else sorted({test.split("::")[0] for test in group}):
                    print(f"    {test}")
        self.problems()

    def problems(self):
        for title, tests in (
            ("fails and is in no list", self.groups["unlisted"]),
            ("passes although it is in a list", self.surprises),
        ):
            if tests:
                print(f"\n{self.suite.name}: {title} ({len(tests)})")
                for test in tests:
                    print(f"  {test}" + (f"\n    {self.message(test)[:300]}" if title.startswith("fails") else ""))
        for entry in self.lists.entries.values():
            if entry.passed:
                print(f"{self.suite.name}: {entry.passed} of {entry.uses} pass in {entry.id}")
        entries = [*self.lists.entries.values()]
        # A quick run does not see all cases.
        entries += [entry for _, _, entry in self.lists.cases if not self.is_quick]
        unused = [entry for entry in entries if not entry.uses]
        for entry in unused:
            print(f"{self.lists.path.relative_to(ROOT)}:{entry.line}: no test is named {entry.id}")

    def is_good(self) -> bool:
        return not self.groups["unlisted"]


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none"


def shortened(wanted: list[str], functions: list[str]) -> list[str]:
    """The same tests, with a file instead of all its functions."""
    unwanted = {test.split("::")[0] for test in set(functions) - set(wanted)}
    return list(dict.fromkeys(test if test.split("::")[0] in unwanted else test.split("::")[0] for test in wanted))


def run_suite(peer: str, options) -> Report:
    suite = suite_of(peer)
    listed = lists.read(peer)
    functions = [test for test in suite.functions() if not (options.quick and test in SLOW)]
    wanted = [test for test in functions if not (entry := listed.find(test)) or entry.category != "internal"]
    if options.quick:
        # What passes has to go on passing. Tests in a list count as it says.
        wanted = [test for test in wanted if listed.find(test) is None]
    results = CACHE / "results" / f"{peer}.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    if not options.report:
        results.unlink(missing_ok=True)
        results.touch()
        start = time.monotonic()
        tests = wanted if peer == "sglang" else shortened(wanted, suite.functions())
        pytest_run(suite, tests, options, results)
        seconds = time.monotonic() - start
    else:
        seconds = 0.0
    found = outcomes(suite, results, listed)
    report = Report(suite, seconds, functions, found, listed, options.quick)
    failed = report.groups["unlisted"]
    if not failed or not options.quick or options.report:
        return report
    # Some of the tests wait for a time that a busy machine does not keep to. They fail if they fail alone too.
    again = results.with_suffix(".again.jsonl")
    again.unlink(missing_ok=True)
    again.touch()
    pytest_run(suite, failed, options, again)
    listed = lists.read(peer)
    passed = {test: outcome for test, outcome in outcomes(suite, again, listed).items() if outcome.outcome == "passed"}
    return Report(suite, time.monotonic() - start, functions, found | passed, listed, options.quick)


HEADS = [
    "suite", "functions", "passed", "model cannot", "differs", "other feature", "internal", "skips itself", "missing",
]  # fmt: skip


def write_page(reports: list[Report]):
    """Puts the results between the marks of docs/compatibility.md."""
    rows = [HEADS, ["---"] + ["---:"] * (len(HEADS) - 1), *(report.row() for report in reports)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines += ["", "| suite | passed of those that need no capable model and no other feature | of all of a server |"]
    lines += ["|---|---|---|"]
    for report in reports:
        package = PACKAGES[report.suite.name]
        lines.append(f"| {report.suite.name} ({package.name} {package.version}) | {' | '.join(report.shares())} |")
    before, mark, rest = PAGE.read_text(encoding="utf-8").partition("<!-- results -->\n")
    _, end, after = rest.partition("\n<!-- end of results -->")
    if not mark or not end:
        raise ValueError(f"{PAGE} has no marks for the results")
    PAGE.write_text(before + mark + "\n" + "\n".join(lines) + "\n" + end + after, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", nargs="?", choices=list(PACKAGES), help="default: all three")
    parser.add_argument("--quick", action="store_true", help="tests that no list names, which have to pass")
    parser.add_argument("--binary", default=str(ROOT / "target/release/pagetide"), help="the program to test")
    parser.add_argument("--report", action="store_true", help="run nothing; report the last run again")
    parser.add_argument("--write", action="store_true", help="write the results of all suites to docs/compatibility.md")
    options = parser.parse_args()
    if options.write and options.suite:
        parser.error("--write needs the results of all suites")
    options.binary = str(pathlib.Path(options.binary).resolve())
    if not pathlib.Path(options.binary).exists():
        parser.error(f"there is no program {options.binary}: build it, or give --binary")
    peers = [options.suite] if options.suite else list(PACKAGES)
    # A quick run has no test that keeps the processor busy for long: the suites run at the same time.
    with ThreadPoolExecutor(len(peers) if options.quick else 1) as workers:
        reports = list(workers.map(lambda peer: run_suite(peer, options), peers))
    for report in reports:
        report.problems() if options.quick else report.details()
    print()
    for row in [HEADS, *(report.row() for report in reports)]:
        print("  ".join(cell.rjust(max(len(head), 9)) for cell, head in zip(row, HEADS)))
    print()
    for report in reports:
        print(report.percentages())
    if options.write:
        write_page(reports)
    sys.exit(0 if all(report.is_good() for report in reports) else 1)


if __name__ == "__main__":
    main()
