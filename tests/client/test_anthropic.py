"""Uses the server through the anthropic package."""

import asyncio
import concurrent.futures
import json
from typing import Literal

import anthropic
import pydantic
import pytest
from anthropic.types import Message, RawMessageStreamEvent

from conftest import cancelling, free_port, paused, serving, start_and_cancel

QUESTION = [{"role": "user", "content": "What is Pagetide?"}]
GREEDY = {"temperature": 0}
LONG = {"max_tokens": 1500, "messages": QUESTION, "extra_body": {"ignore_eos": True}}
EVENT = pydantic.TypeAdapter(RawMessageStreamEvent)


def checked(message):
    """Validates a message, because the SDK accepts anything."""
    Message.model_validate(message.to_dict())
    return message


def test_a_message(claude, client, model):
    answer = checked(claude.messages.create(model=model, max_tokens=100, messages=QUESTION, extra_body=GREEDY))
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", model)
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    [block] = answer.content
    chat = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=100, temperature=0)
    assert block.text == chat.choices[0].message.content
    assert answer.usage.output_tokens == chat.usage.completion_tokens
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == chat.usage.prompt_tokens


def test_a_conversation_of_blocks(claude, model):
    text = lambda text: {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    system = [text("You are brief.")]
    conversation = [{"role": "user", "content": [text("Who are you?")]}]
    first = claude.messages.create(model=model, max_tokens=20, system=system, messages=conversation)
    conversation += [first.to_param(), {"role": "user", "content": [text("What is"), text("paging?")]}]
    second = checked(claude.messages.create(model=model, max_tokens=20, system=system, messages=conversation))
    assert second.content[0].text
    assert second.usage.cache_read_input_tokens > 0


def test_an_answer_goes_on_from_what_the_assistant_has_begun(claude, model):
    asked = dict(model=model, max_tokens=60, extra_body=GREEDY)
    text = claude.messages.create(messages=QUESTION, **asked).content[0].text
    begun = text[: text.index(" ", 20)]
    messages = QUESTION + [{"role": "assistant", "content": begun}]
    rest = claude.messages.create(messages=messages, **asked).content[0].text
    assert begun + rest == text


def test_what_ended_a_message_is_said(claude, model):
    asked = dict(model=model, messages=QUESTION, extra_body=GREEDY)
    answer = claude.messages.create(max_tokens=5, **asked)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 5)
    text = claude.messages.create(max_tokens=60, **asked).content[0].text
    stop = text[len(text) // 3 : len(text) // 3 + 5]
    answer = claude.messages.create(max_tokens=60, stop_sequences=["never said", stop], **asked)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]


def test_the_stream_helper_says_what_the_whole_answer_says(claude, model):
    asked = dict(model=model, max_tokens=100, messages=QUESTION, extra_body=GREEDY)
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = checked(stream.get_final_message())
    assert text == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    total = lambda usage: usage.input_tokens + usage.cache_read_input_tokens
    assert total(final.usage) == total(whole.usage)


def test_every_event_is_one_of_the_sdks(claude, model):
    events = list(claude.messages.create(model=model, max_tokens=6, messages=QUESTION, stream=True))
    for event in events:
        EVENT.validate_python(event.to_dict())
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert events[-2].delta.stop_reason == "max_tokens"


def test_tokens_are_counted(claude, model):
    conversation = dict(model=model, messages=QUESTION, system="You are brief.")
    counted = claude.messages.count_tokens(**conversation).input_tokens
    usage = claude.messages.create(max_tokens=1, **conversation).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.count_tokens(model=model, messages=[])


def test_models(claude, model):
    [card] = claude.models.list().data
    assert (card.id, card.type) == (model, "model")
    assert claude.models.retrieve(model).created_at == card.created_at
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("no-such-model")


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"max_tokens": 0}, "max_tokens must be in [1,"),
        ({"max_tokens": 10**6}, "max_tokens: this model's maximum context length"),
        ({"messages": []}, "messages must have at least one"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "page " * 3000}]}, "messages: this model's maximum context length"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"extra_body": {"temperature": 1.1}}, "temperature must be in [0, 1]"),
    ],
)
def test_a_wrong_parameter_is_named(claude, model, wrong, named):
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(**{"model": model, "max_tokens": 5, "messages": QUESTION, **wrong})
    assert caught.value.type == "invalid_request_error"
    assert named in caught.value.body["error"]["message"]
    assert caught.value.request_id == caught.value.body["request_id"]


def test_a_model_that_is_not_served(claude):
    for stream in (False, True):
        with pytest.raises(anthropic.NotFoundError) as caught:
            claude.messages.create(model="claude-x", max_tokens=5, messages=QUESTION, stream=stream)
        assert caught.value.type == "not_found_error"


def test_a_closed_stream_is_cancelled(server, claude, model):
    with cancelling(server), claude.messages.stream(model=model, **LONG) as stream:
        next(iter(stream.text_stream))


def test_a_request_whose_client_has_no_more_time_is_cancelled(server, claude, model):
    with cancelling(server), paused(server), pytest.raises(anthropic.APITimeoutError):
        claude.with_options(timeout=0.3).messages.create(model=model, **LONG)


def test_nobody_at_home():
    with pytest.raises(anthropic.APIConnectionError):
        anthropic.Anthropic(base_url=f"http://127.0.0.1:{free_port()}", api_key="none", max_retries=0).models.list()


def test_the_async_client(server, model):
    asked = dict(model=model, max_tokens=30, messages=QUESTION, extra_body=GREEDY)

    async def streamed(client):
        async with client.messages.stream(**asked) as stream:
            return await stream.get_final_text()

    async def main():
        async with server.async_anthropic_client() as client:
            whole = client.messages.create(**asked)
            whole, *streams = await asyncio.gather(whole, *(streamed(client) for _ in range(4)))
            assert streams == [whole.content[0].text] * 4
            with cancelling(server):
                await start_and_cancel(server, client.messages.create(model=model, **LONG))

    asyncio.run(main())


def test_16_at_once_answer_as_one_does(claude, model):
    def ask(i, stream):
        messages = [{"role": "user", "content": f"Story {i}: once"}]
        asked = dict(model=model, max_tokens=20, messages=messages, extra_body={"seed": i})
        if not stream:
            return claude.messages.create(**asked).content
        with claude.messages.stream(**asked) as stream:
            return stream.get_final_message().content

    texts = lambda content: [block.text for block in content]
    alone = [texts(ask(i, False)) for i in range(4)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda i: texts(ask(i % 4, i % 2 == 0)), range(16)))
    assert together == [alone[i % 4] for i in range(16)]


def test_a_locked_full_and_narrow_server():
    flags = ["--api-key", "s3cret", "--set", "server.max_requests=1", "--set", "server.max_body_bytes=1024"]
    with serving(*flags) as small:
        ask = dict(model="demo", max_tokens=5, messages=QUESTION)
        with pytest.raises(anthropic.AuthenticationError) as caught:
            small.anthropic_client("wrong").messages.create(**ask)
        assert caught.value.type == "authentication_error"
        claude = small.anthropic_client("s3cret")
        with pytest.raises(anthropic.APIStatusError) as caught:
            claude.messages.create(**ask, system="a" * 1024)
        assert (caught.value.status_code, caught.value.type) == (413, "request_too_large")
        with claude.messages.stream(model="demo", **LONG) as stream:
            next(iter(stream.text_stream))
            with pytest.raises(anthropic.RateLimitError) as caught:
                claude.messages.create(**ask)
        assert caught.value.type == "rate_limit_error"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        # Some clients send their key in this header.
        headers = {"x-api-key": "s3cret", "Authorization": "Bearer none"}
        assert claude.messages.count_tokens(model="demo", messages=QUESTION, extra_headers=headers).input_tokens


class Answer(pydantic.BaseModel):
    size: Literal[1, 2, 3]
    colour: Literal["red", "green"]


WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 10}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
ONE = {"type": "any", "disable_parallel_tool_use": True}


def call_of(message):
    [call] = [block for block in message.content if block.type == "tool_use"]
    assert set(call.input) == {"city", "days"} and call.input["days"] in (1, 2, 3)
    return call


@pytest.mark.parametrize("choice", [ONE, {"type": "tool", "name": "weather"}])
def test_a_demanded_call_and_its_result(claude, model, choice):
    asked = dict(model=model, tools=[WEATHER], max_tokens=200)
    conversation = [{"role": "user", "content": "How is the weather in Rome?"}]
    answer = checked(claude.messages.create(messages=conversation, tool_choice=choice, **asked))
    call = call_of(answer)
    assert (call.name, answer.stop_reason) == ("weather", "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    conversation += [answer.to_param(), {"role": "user", "content": [result]}]
    after = checked(claude.messages.create(messages=conversation, tool_choice={"type": "none"}, **asked))
    assert after.stop_reason in ("end_turn", "max_tokens")
    prompt = dict(model=model, messages=conversation, tools=[WEATHER], tool_choice={"type": "none"})
    counted = claude.messages.count_tokens(**prompt)
    assert counted.input_tokens == after.usage.input_tokens + after.usage.cache_read_input_tokens


def test_a_streamed_call(claude, model):
    asked = dict(model=model, messages=QUESTION, tools=[WEATHER], tool_choice=ONE, max_tokens=200)
    with claude.messages.stream(**asked) as stream:
        pieces = "".join(event.partial_json for event in stream if event.type == "input_json")
        final = checked(stream.get_final_message())
    assert json.loads(pieces) == call_of(final).input
    assert final.stop_reason == "tool_use"


def test_output_of_a_schema(claude, model):
    asked = dict(model=model, messages=QUESTION, output_format=Answer, max_tokens=400, extra_body=GREEDY)
    parsed = checked(claude.messages.parse(**asked))
    assert isinstance(parsed.parsed_output, Answer)
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        assert Answer.model_validate_json(text) == stream.get_final_message().parsed_output


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "time"}}, "tool_choice.name"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}},
            "output_config.format.schema",
        ),
    ],
)
def test_a_wrong_demand_is_named(claude, model, wrong, named):
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model=model, max_tokens=5, messages=QUESTION, **wrong)
    assert named in caught.value.body["error"]["message"]
