"""Every family and option, over HTTP in float32, against saved outputs of Hugging Face transformers."""

import json
import pathlib

import pytest

from conftest import ROOT, serving

MODELS = sorted(path.parent for path in (ROOT / "tests/data/models").glob("*/golden.json"))
TOLERANCE = 1e-3


def model_name(path: pathlib.Path) -> str:
    return path.name


@pytest.mark.parametrize("model", MODELS, ids=model_name)
def test_greedy_tokens_and_logprobs_are_those_of_transformers(model, monkeypatch):
    golden = json.loads((model / "golden.json").read_text())
    monkeypatch.setenv("PAGETIDE_MODEL", str(model))
    flags = ["--dtype", "float32", "--max-model-len", str(golden["max_model_len"]), "--served-model-name", "golden"]
    with serving(*flags) as server:
        client = server.client()
        for prompt in golden["prompts"]:
            expected = prompt["greedy"]
            completion = client.completions.create(
                model="golden", prompt=prompt["tokens"], max_tokens=len(expected), temperature=0, logprobs=0, echo=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            choice = completion.choices[0]
            assert choice.token_ids[-len(expected):] == [step["token"] for step in expected]
            logprobs = prompt["prompt_logprobs"] + [step["logprob"] for step in expected]
            assert choice.logprobs.token_logprobs[0] is None
            assert choice.logprobs.token_logprobs[1:] == pytest.approx(logprobs, abs=TOLERANCE)


def test_there_is_a_golden_for_every_family():
    families = {json.loads((model / "config.json").read_text())["model_type"] for model in MODELS}
    assert families == {"llama", "mistral", "qwen2", "qwen3", "opt"}
