"""schemathesis makes requests from the description of the API, right ones and wrong ones, and holds the answers to it."""

import os
import pathlib
import subprocess
import sys

from conftest import serving

HERE = pathlib.Path(__file__).parent / "schema"
KEY = "s3cret"


def test_the_server_does_what_its_description_says(tmp_path):
    with serving("--api-key", KEY, "--max-model-len", "128", "--set", "log.level=warn") as server:
        program = pathlib.Path(sys.executable).parent / "schemathesis"
        command = [program, "--config-file", HERE / "schemathesis.toml", "run", f"{server.url}/openapi.json"]
        command += ["--header", f"Authorization: Bearer {KEY}"]
        # Settings at random would make another server of it; tests/http/admin.rs looks at those paths.
        # The console's events do not end; tests/http/console.rs and test_console.py look at those.
        # Metrics want another key than the rest does; tests/http/server.rs looks at those.
        command += ["--exclude-path-regex", "^/((admin|console)/|metrics$)"]
        limits = ["--seed", "1", "--max-examples", "30", "--workers", "1"]
        env = os.environ | {"SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(HERE)}
        run = subprocess.run([*command, *limits], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stdout + run.stderr
