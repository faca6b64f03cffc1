"""Runs `bench paper --quick`, checks every figure that does not depend on the machine's speed, and opens the report."""

import json
import os
import pathlib
import shutil
import subprocess

import pytest

from conftest import program

NODE = pathlib.Path(__file__).parent / "node"
# Claims that are known to differ, each for the reason that its row gives. All others of a short run agree.
DIFFER = {
    "OPT-13B: FasterTransformer over HF",
    "OPT-66B: paged over FasterTransformer",
    "OPT-13B, Alpaca: paged over Max",
    "6 beams, Alpaca: paged over Oracle",
    "A shared example (80 tokens): paged over Oracle",
    "Chatbot: paged over Oracle",
    "Chatbot: paged over Max",
    "Beam 4: paged over FasterTransformer",
    "OPT-13B, ShareGPT: rate of paged",
    "OPT-66B, ShareGPT: rate of paged",
    "OPT-13B, Alpaca: rate of paged",
    "Waste if exactly the length is reserved",
    "4 samples, ShareGPT-like lengths: memory",
    "8 samples, ShareGPT-like lengths: memory",
    "16 samples, ShareGPT-like lengths: memory",
    "Alpaca: block size 256 against the best",
    "Recomputing over swapping, blocks of 256",
}
# Loads that a short run leaves out.
LEFT_OUT = {"OPT-175B", "OPT-66B, Alpaca", "2 samples, Alpaca: paged", "4 samples, Alpaca: paged", "2 beams, Alpaca: paged"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    out = tmp_path_factory.mktemp("paper")
    command = [program(), "bench", "paper", "--quick", "--out", str(out)]
    subprocess.run(command, check=True, timeout=900)
    return out


@pytest.fixture(scope="module")
def result(folder) -> dict:
    return json.loads((folder / "paper.json").read_text())


def test_every_claim_of_a_short_run_has_a_figure(result):
    open_rows = [row["claim"] for row in result["claims"] if row["verdict"] == "NotRun"]
    unexpected = [
        claim
        for claim in open_rows
        if "generate" not in claim and not any(claim.startswith(left_out) for left_out in LEFT_OUT)
    ]
    assert unexpected == []
    assert len(result["claims"]) > 80


def test_figures_that_do_not_depend_on_speed_are_as_claimed_or_as_explained(result):
    rows = [row for row in result["claims"] if not row["depends_on_speed"] and row["verdict"] != "NotRun"]
    assert {row["claim"] for row in rows if row["verdict"] == "Differs"} == DIFFER
    assert all(row["why"] for row in rows if row["verdict"] == "Differs")


def test_paging_wins_in_every_simulated_load(result):
    for curves in result["serving"]:
        rates = {curve["system"]: curve["sustained"] for curve in curves["curves"]}
        order = ["ReserveMax", "ReservePow2", "ReserveOracle", "Paged"]
        assert sorted(order, key=rates.get) == order, (curves["title"], rates)


def test_a_run_goes_on_where_it_was(folder):
    before = (folder / "pieces.json").read_bytes()
    command = [program(), "bench", "paper", "--quick", "--out", str(folder)]
    subprocess.run(command, check=True, timeout=300)
    assert (folder / "pieces.json").read_bytes() == before


def test_the_report_opens_without_a_network_is_accessible_and_prints(folder):
    if not (shutil.which("node") and (NODE / "node_modules").exists()):
        pytest.fail(f"Node.js and its packages are needed: npm ci, in {NODE}")
    chromium = os.environ.get("CHROMIUM", "/usr/bin/chromium")
    if not shutil.which(chromium):
        pytest.fail("Chromium is needed: Debian's package chromium, or CHROMIUM names the program")
    command = ["node", NODE / "report.mjs", folder / "paper.html"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["violations"] == [] and found["errors"] == [] and found["requests"] == []
    assert found["charts"] > 15 and found["pdfBytes"] > 50_000
