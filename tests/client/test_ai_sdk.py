"""Uses the server through the Vercel AI SDK."""

import json

import pytest

from conftest import seen_by_node


@pytest.fixture(scope="module")
def seen():
    return seen_by_node("client.mjs", "--tool-call-parser", "hermes")


def test_a_chat_is_streamed(seen):
    chat = seen["chat"]
    assert len(chat["pieces"]) > 1
    assert "".join(chat["pieces"]) == chat["whole"] != ""
    assert chat["finishReason"] in ("stop", "length")
    assert 0 < chat["usage"]["outputTokens"] <= 40
    assert chat["usage"]["inputTokens"] > 0


def test_a_tool_call_is_streamed(seen):
    call = seen["toolCall"]
    assert call["finishReason"] == "tool-calls"
    assert [made["toolName"] for made in call["calls"]] == ["weather"]
    made = call["calls"][0]["input"]
    assert made["city"] in ("Oslo", "Lima") and made["days"] in ("1", "2")
    assert json.loads(call["streamed"]) == made
    assert call["kinds"].index("tool-input-start") < call["kinds"].index("tool-input-delta")


def test_a_tool_that_is_called_has_a_result(seen):
    assert seen["agent"]["results"] in (["sunny in Oslo"], ["sunny in Lima"]) and seen["agent"]["text"]


def test_a_schema_is_kept_to(seen):
    structured = seen["structured"]
    assert structured["whole"]["size"] in ("small", "large") and structured["last"]["size"] in ("small", "large")


def test_embeddings(seen):
    assert len(seen["embeddings"]) == 2 and len(set(seen["embeddings"])) == 1


def test_an_error_says_what_is_wrong(seen):
    assert seen["failure"]["status"] == 400
    assert "temperature must be in [0, 100], got -1" in seen["failure"]["message"]
