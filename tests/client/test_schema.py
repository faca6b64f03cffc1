"""schemathesis makes valid and invalid requests from the API description, and checks the answers against it."""

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
        # Random settings would change the server under test. tests/http/admin.rs tests the admin paths.
        # The console's event streams do not end. tests/http/console.rs and test_console.py test them.
        # Metrics need another key. tests/http/server.rs tests them.
        # The descriptions of these paths of other servers are not yet exact enough.
        others = "api/|v2/(chat|embed)$|flush_cache$|get_load$|health_generate$|server_info$|slots|v1/loads$|infill$"
        others += "|embedding$|invocations$|inference/v1/generate$|lora-adapters$|props$|tokenize$"
        others += "|v1/(chat/completions|completions|responses)/render$"
        command += ["--exclude-path-regex", f"^/((admin|console)/|metrics$|{others})"]
        limits = ["--seed", "1", "--max-examples", "30", "--workers", "1"]
        env = os.environ | {"SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(HERE)}
        run = subprocess.run([*command, *limits], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stdout + run.stderr
