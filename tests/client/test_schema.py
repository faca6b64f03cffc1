"""schemathesis makes valid and invalid requests from the API description, and checks the answers against it.

PAGETIDE_LONG=1 makes five times as many for each operation, and other ones each time.
"""

import os
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from conftest import serving

LONG = os.environ.get("PAGETIDE_LONG", "0") != "0"
HERE = pathlib.Path(__file__).parent / "schema"
# schemathesis.toml has them too.
KEY, ADMIN = "s3cret", "s3cret-admin"

# Two parts of about the same size run at the same time. No part has these paths:
# Random settings would change the server under test. tests/http/admin.rs tests the admin paths.
# The console's event streams do not end. tests/http/console.rs and test_console.py test them.
# A pause stops the engine under the other paths, and is for the operator. tests/http/sglang.rs tests it.
PARTS = [
    ["--include-path-regex", "^/v1/"],
    ["--exclude-path-regex", "^/((v1|admin|console)/|(pause|continue)_generation$)"],
]


def test_the_server_does_what_its_description_says(tmp_path):
    with ThreadPoolExecutor() as workers:
        for run in workers.map(run_part, PARTS, [tmp_path / "v1", tmp_path / "others"]):
            assert run.returncode == 0, run.stdout + run.stderr


def run_part(part: list[str], folder: pathlib.Path) -> subprocess.CompletedProcess:
    folder.mkdir()
    options = ["--api-key", KEY, "--set", f"server.admin_key={ADMIN}"]
    options += ["--set", f"batches.folder={folder / 'batches'}"]
    with serving(*options, "--max-model-len", "128", "--set", "log.level=warn") as server:
        program = pathlib.Path(sys.executable).parent / "schemathesis"
        command = [program, "--config-file", HERE / "schemathesis.toml", "run", f"{server.url}/openapi.json", *part]
        # What is bounded is the number of requests and the time of each. So a slow machine takes longer and no more.
        limits = ["--max-examples", "100"] if LONG else ["--seed", "1", "--max-examples", "20"]
        limits += ["--workers", "1", "--request-timeout", "60"]
        env = os.environ | {"SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(HERE)}
        return subprocess.run([*command, *limits], cwd=folder, env=env, capture_output=True, text=True)
