"""Uses the server through the program `llm`, and through its Python package."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from conftest import serving_alike

PROGRAM = pathlib.Path(sys.executable).parent / "llm"
CALLED = """
def weather(city: str) -> str:
    "The weather of a city."
    return f"sunny in {city}"
"""


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """Runs the program, whose settings name the server."""
    home = tmp_path_factory.mktemp("llm")
    with serving_alike("--tool-call-parser", "llama3_json") as server:
        common = {"model_name": "demo", "api_base": f"{server.url}/v1"}
        can = {"supports_tools": True, "supports_schema": True}
        models = [
            {"model_id": "tide", **common, **can},
            {"model_id": "tide-text", **common, "completion": True},
        ]
        (home / "extra-openai-models.yaml").write_text(json.dumps(models))

        def run(*words, fails=False):
            env = os.environ | {"LLM_USER_PATH": str(home), "OPENAI_API_KEY": "none"}
            run = subprocess.run([PROGRAM, *words], env=env, capture_output=True, text=True, timeout=120)
            assert (run.returncode != 0) == fails, run.stdout + run.stderr
            return (run.stderr if fails else run.stdout).strip()

        yield run


def test_an_answer_is_streamed(llm):
    asked = ("-m", "tide", "-o", "temperature", "0", "-o", "max_tokens", "40", "What is Pagetide?")
    assert llm(*asked) == llm("--no-stream", *asked) != ""
    assert llm("--continue", "-o", "max_tokens", "20", "And then?")
    [_, _, last] = json.loads(llm("logs", "--json", "-n", "3"))
    assert last["response"] and last["input_tokens"] > 0 and last["output_tokens"] > 0


def test_a_completion(llm):
    assert llm("-m", "tide-text", "-o", "max_tokens", "20", "Paging is")


@pytest.mark.parametrize("stream", [[], ["--no-stream"]])
def test_a_schema_is_kept_to(llm, stream):
    schema = {
        "type": "object",
        "properties": {"size": {"enum": [1, 2, 3]}},
        "required": ["size"],
        "additionalProperties": False,
    }
    assert json.loads(llm("-m", "tide", *stream, "--schema", json.dumps(schema), "How big is it?"))["size"] in (1, 2, 3)


def test_tools_are_offered(llm):
    # Nothing demands a call, and the demo model makes none.
    assert llm("-m", "tide", "--functions", CALLED, "-o", "max_tokens", "20", "How is the weather?")


def test_an_error_says_what_is_wrong(llm):
    assert "max_tokens" in llm("-m", "tide", "-o", "max_tokens", "100000", "What?", fails=True)
