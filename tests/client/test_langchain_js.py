"""Uses the server through LangChain.js, by the APIs of OpenAI, Anthropic and Ollama."""

import pytest

from conftest import seen_by_node

APIS = ["chat", "responses", "messages", "ollama"]


@pytest.fixture(scope="module")
def seen():
    return seen_by_node("langchain.mjs", "--tool-call-parser", "llama3_json")


@pytest.mark.parametrize("api", APIS)
def test_a_chat_is_streamed(seen, api):
    chat = seen["chat"][api]
    assert len(chat["pieces"]) > 4 and chat["whole"]
    for usage in (chat["usage"], chat["streamedUsage"]):
        assert 0 < usage["output_tokens"] <= 60 and usage["input_tokens"] > 0


@pytest.mark.parametrize("api", APIS)
def test_a_schema_is_kept_to(seen, api):
    assert seen["structured"][api]["size"] in ("small", "large")
    assert seen["byTool"]["size"] in ("small", "large")


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_a_tool_is_called_and_answered(seen, api):
    made = seen["toolCall"][api]
    [streamed] = made["streamed"]
    for call in (made["call"], streamed):
        assert call["name"] == "weather" and call["args"]["city"] in ("Oslo", "Lima") and call["id"]
    assert made["isResult"] and made["result"] == f"sunny in {made['call']['args']['city']}" and made["after"]


def test_completions_and_embeddings(seen):
    assert seen["completion"]["whole"] == seen["completion"]["streamed"] != ""
    assert all(len(both) == 2 and len(set(both)) == 1 for both in seen["embeddings"])


@pytest.mark.parametrize("api", APIS)
def test_an_error_says_what_is_wrong(seen, api):
    assert "temperature must be in" in seen["failure"][api]
