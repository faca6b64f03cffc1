"""A pytest plugin that writes what became of each test to the file PEER_SUITES_RESULTS, a line of JSON each."""

import json
import os
import re
import signal
import sys

import pytest


def function_of(nodeid: str) -> str:
    """A test's function, without the brackets of its parameters."""
    return re.sub(r"\[.*\]$", "", nodeid, flags=re.DOTALL)


def short(text: str) -> str:
    return " ".join(text.split())[:600]


class Recorder:
    def __init__(self, path: str):
        self.out = open(path, "a", encoding="utf-8")

    def write(self, nodeid: str, outcome: str, message: str, seconds: float):
        line = {"test": function_of(nodeid), "id": nodeid, "outcome": outcome, "message": message}
        print(json.dumps({**line, "seconds": round(seconds, 2)}), file=self.out, flush=True)

    def pytest_collectreport(self, report):
        if report.failed:
            self.write(report.nodeid, "uncollected", short(str(report.longrepr)[-600:]), 0)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            message = ""
            if report.outcome != "passed":
                crash = getattr(report.longrepr, "reprcrash", None)
                message = crash.message if crash else str(report.longrepr)
                lines = [f"{report.when}:" if report.when != "call" else "", message]
                message = short(" ".join(lines))
            # An expected failure of theirs counts as theirs says: skipped.
            self.write(report.nodeid, report.outcome, message, report.duration)


def pytest_configure(config):
    # So that the programs stop too when a run is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if path := os.environ.get("PEER_SUITES_RESULTS"):
        config.pluginmanager.register(Recorder(path), "peer-suites-recorder")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    # A mark that repeats or retries a test would hide what a server did the first time.
    for item in items:
        item.own_markers = [mark for mark in item.own_markers if mark.name != "flaky"]
