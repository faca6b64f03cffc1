"""Uses the server through the ollama package for JavaScript."""

import pytest

from conftest import seen_by_node


@pytest.fixture(scope="module")
def seen():
    return seen_by_node("ollama.mjs", "--tool-call-parser", "llama3_json")


def test_a_chat_is_streamed(seen):
    whole, parts = seen["chat"]["whole"], seen["chat"]["parts"]
    assert len(parts) > 2 and [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert "".join(part["message"]["content"] for part in parts) == whole["message"]["content"] != ""
    assert parts[-1]["eval_count"] == whole["eval_count"] > 0


def test_generate_goes_on_from_its_context(seen):
    first, parts = seen["generate"]["first"], seen["generate"]["parts"]
    assert len(first["context"]) == first["prompt_eval_count"] + first["eval_count"]
    assert parts[-1]["prompt_eval_count"] > first["prompt_eval_count"]
    assert (parts[-1]["done_reason"], parts[-1]["eval_count"]) == ("length", 5)


def test_a_tool_is_called(seen):
    for calls in (seen["toolCall"]["calls"], seen["toolCall"]["streamed"]):
        [call] = [call["function"] for call in calls]
        assert call["name"] == "weather" and set(call["arguments"]) == {"city"}
    assert seen["toolCall"]["after"]["done"]


def test_a_schema_is_kept_to(seen):
    assert set(seen["structured"]) == {"size"} and seen["structured"]["size"] in (1, 2, 3)


def test_a_stream_is_aborted(seen):
    stopped = seen["stopped"]
    # More parts may have come by the time that the client ends the stream.
    assert stopped["name"] == "AbortError" and stopped["seen"] >= 1, stopped


def test_the_model(seen):
    about = seen["about"]
    assert about["list"] == about["running"] == ["demo:latest"]
    assert "completion" in about["capabilities"] and about["version"]
    assert len(about["embeddings"]) == 2 and len(set(about["embeddings"])) == 1


def test_an_error_says_what_is_wrong(seen):
    failures = seen["failures"]
    assert {name: failure["status"] for name, failure in failures.items()} == {
        "suffix": 400,
        "temperature": 400,
        "model": 404,
        "pull": 501,
    }
    assert failures["suffix"]["message"].startswith("suffix: this model cannot fill in the middle")
    assert failures["temperature"]["message"].startswith("options.temperature must be in")
