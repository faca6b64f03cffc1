"""Uses the server as Continue does, by each of the providers that it knows: see node/continue.mjs."""

import json

import pytest

from conftest import seen_by_node

PROVIDERS = ["openai", "vllm", "ollama", "llama.cpp", "anthropic"]
# Those of OpenAI's API.
LIKE_OPENAI = PROVIDERS[:-1]


@pytest.fixture(scope="module")
def seen():
    return seen_by_node("continue.mjs", "--tool-call-parser", "llama3_json")


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_chat_is_streamed(seen, provider):
    chat = seen["chat"][provider]
    assert len(chat["pieces"]) > 4 and chat["whole"]
    assert 0 < chat["usage"]["completion_tokens"] <= 40 and chat["usage"]["prompt_tokens"] > 0


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_tool_is_called_and_answered(seen, provider):
    call = seen["tools"][provider]
    assert call["name"] == "weather" and json.loads(call["arguments"])["city"] in ("Oslo", "Lima")
    assert call["id"] and call["after"]


@pytest.mark.parametrize("provider", LIKE_OPENAI)
def test_a_schema_is_kept_to(seen, provider):
    assert seen["structured"][provider]["size"] in (1, 2, 3)


@pytest.mark.parametrize("provider", LIKE_OPENAI)
def test_completions_embeddings_and_models(seen, provider):
    others = seen["others"][provider]
    assert others["streamed"] == others["whole"] != ""
    assert len(others["embeddings"]) == 2 and len(set(others["embeddings"])) == 1
    assert others["models"] == ["demo"]


def test_documents_are_ranked(seen):
    results = seen["ranked"]["results"]
    assert sorted(result["index"] for result in results) == [0, 1, 2]
    assert all(0 <= result["relevance_score"] <= 1 and result["document"]["text"] for result in results)


def test_code_is_completed(seen):
    assert "".join(seen["autocomplete"]).strip()
    assert len(seen["llamaCpp"]) > 4


def test_the_core_speaks_to_ollama(seen):
    ollama = seen["ollama"]
    assert len(ollama["chat"]) > 4 and ollama["done"] is True
    assert ollama["completion"] and ollama["embeddings"] == 2 and ollama["tags"] == ["demo:latest"]
    # Continue reads these lines for stop texts and the length of the context, each a name and a value.
    assert all(len(line.split(maxsplit=1)) == 2 for line in ollama["parameters"].splitlines())
    assert "suffix: this model cannot fill in the middle" in ollama["suffix"]


def test_an_error_says_what_is_wrong(seen):
    failures = seen["failures"]
    for provider in PROVIDERS:
        assert "temperature must be in" in failures[provider]["message"]
    assert all(failures[provider]["status"] == 400 for provider in LIKE_OPENAI)
    # Mistral's path, which vLLM has not either.
    assert "no such path: /v1/fim/completions" in failures["fim"]["message"]
