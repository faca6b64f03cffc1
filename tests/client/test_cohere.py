"""Uses the server through the cohere package."""

import json

import cohere
import pytest

QUESTION = [{"role": "user", "content": "What is Pagetide?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 10}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def command(server):
    return cohere.ClientV2(base_url=server.url, api_key="none")


def test_a_chat(command, client, model):
    answer = command.chat(model=model, messages=QUESTION, temperature=0)
    assert answer.finish_reason == "COMPLETE" and answer.message.role == "assistant"
    chat = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
    assert answer.message.content[0].text == chat.choices[0].message.content
    assert answer.usage.tokens.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.tokens.output_tokens == chat.usage.completion_tokens


def test_a_streamed_chat_says_the_same(command, model):
    asked = dict(model=model, messages=QUESTION, temperature=0, max_tokens=20)
    whole = command.chat(**asked)
    events = list(command.chat_stream(**asked))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message-start", "content-start"] and kinds[-2:] == ["content-end", "message-end"]
    text = "".join(event.delta.message.content.text for event in events if event.type == "content-delta")
    assert text == whole.message.content[0].text
    assert (events[-1].delta.finish_reason, whole.finish_reason) == ("MAX_TOKENS", "MAX_TOKENS")
    assert events[-1].delta.usage.tokens.output_tokens == 20


def test_a_format_is_kept_to(command, model):
    schema = {"type": "object", "properties": {"size": {"enum": [1, 2]}}, "required": ["size"]}
    form = {"type": "json_object", "json_schema": {**schema, "additionalProperties": False}}
    answer = command.chat(model=model, messages=QUESTION, response_format=form, max_tokens=100)
    assert json.loads(answer.message.content[0].text)["size"] in (1, 2)


def test_a_demanded_call_and_its_result(command, model):
    asked = dict(model=model, tools=[WEATHER], max_tokens=200)
    answer = command.chat(messages=QUESTION, tool_choice="REQUIRED", **asked)
    assert answer.finish_reason == "TOOL_CALL"
    call = answer.message.tool_calls[0]
    assert call.function.name == "weather" and set(json.loads(call.function.arguments)) == {"city"}
    content = [{"type": "document", "document": {"data": {"weather": "sunny"}}}]
    result = {"role": "tool", "tool_call_id": call.id, "content": content}
    called = {"role": "assistant", "tool_plan": "I look.", "tool_calls": [call]}
    after = command.chat(messages=[*QUESTION, called, result], tool_choice="NONE", **asked)
    assert after.finish_reason in ("COMPLETE", "MAX_TOKENS")
    kinds = [event.type for event in command.chat_stream(messages=QUESTION, tool_choice="REQUIRED", **asked)]
    assert {"tool-call-start", "tool-call-delta", "tool-call-end"} <= set(kinds)


def test_what_ended_an_answer_is_said(command, model):
    text = command.chat(model=model, messages=QUESTION, temperature=0).message.content[0].text
    stop = text[len(text) // 3 : len(text) // 3 + 5]
    answer = command.chat(model=model, messages=QUESTION, temperature=0, stop_sequences=[stop], logprobs=True)
    assert answer.finish_reason == "STOP_SEQUENCE"
    assert answer.message.content[0].text == text[: text.index(stop)]
    assert all(position.logprobs[0] <= 0 for position in answer.logprobs)


def test_embeddings(command, model):
    asked = dict(model=model, texts=["a tide", "a page"], input_type="search_document")
    answer = command.embed(embedding_types=["float", "ubinary", "base64"], **asked)
    floats = answer.embeddings.float_
    assert len(floats) == 2 and answer.texts == asked["texts"]
    assert all(sum(x * x for x in embedding) == pytest.approx(1, abs=1e-3) for embedding in floats)
    assert len(answer.embeddings.ubinary[0]) * 8 == len(floats[0])
    assert len(command.embed(embedding_types=["float"], output_dimension=8, **asked).embeddings.float_[0]) == 8


def test_errors(command, model):
    with pytest.raises(cohere.BadRequestError) as caught:
        command.chat(model=model, messages=QUESTION, p=0)
    assert caught.value.body["message"].startswith("p must be above 0")
    with pytest.raises(cohere.NotFoundError):
        command.chat(model="command-a", messages=QUESTION)
    with pytest.raises(cohere.BadRequestError):
        command.embed(model=model, texts=["a"], input_type="search_document", embedding_types=["int8"])
