"""Opens the console in a browser: Debian's Chromium, driven by tests/client/node/console.mjs."""

import json
import os
import pathlib
import shutil
import subprocess

import pytest

from conftest import serving

NODE = pathlib.Path(__file__).parent / "node"
TESTS = [
    "chat_streams_and_chats_are_kept",
    "what_a_model_writes_is_never_html",
    "nothing_that_was_said_is_lost",
    "any_text_is_rendered_in_time",
    "who_comes_when_the_seats_are_taken_is_told_so_and_waits",
    "blocks_fill_and_say_whose_they_are",
    "a_load_makes_the_tide_move",
    "a_key_is_asked_for_and_kept_in_the_tab",
    "it_fits_a_phone",
    "it_is_accessible_in_both_themes",
]


@pytest.fixture(scope="module")
def results():
    if not (shutil.which("node") and (NODE / "node_modules").exists()):
        pytest.fail(f"Node.js and its packages are needed: npm ci, in {NODE}")
    chromium = os.environ.get("CHROMIUM", "/usr/bin/chromium")
    if not shutil.which(chromium):
        pytest.fail("Chromium is needed: Debian's package chromium, or CHROMIUM names the program")
    # Every request whose prompt fits is admitted, so that preemptions happen on any machine and the page can show them.
    small = ["--num-device-blocks", "96", "--swap-space-gib", "0.01", "--preemption-mode", "swap"]
    small += ["--set", "scheduler.admission=prompt"]
    locked = ["--api-key", "a-client", "--set", "server.admin_key=the-admin"]
    with (
        serving() as free,
        serving(*small) as narrow,
        serving(*locked) as closed,
        serving("--set", "console.max_watchers=1") as single,
    ):
        urls = {"open": free.url, "small": narrow.url, "locked": closed.url, "single": single.url}
        command = ["node", NODE / "console.mjs", json.dumps(urls)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)


@pytest.mark.parametrize("test", TESTS)
def test_the_console(results, test):
    assert results[test] == "ok", results[test]


def test_all_are_named(results):
    assert sorted(results) == sorted(TESTS)
