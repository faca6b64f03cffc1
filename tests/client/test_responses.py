"""Uses the Responses API through the openai package."""

import asyncio
import concurrent.futures
import json
from typing import Literal

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from conftest import cancelling, paused, serving, start_and_cancel

QUESTION = "What is Pagetide?"
IMAGE = {"type": "input_image", "image_url": "x"}
LONG = {"max_output_tokens": 1500, "extra_body": {"ignore_eos": True}}
EVENT = pydantic.TypeAdapter(ResponseStreamEvent)


def checked(response):
    """Validates a response, because the SDK accepts anything."""
    Response.model_validate(response.to_dict())
    return response


def test_a_response(client, model):
    answer = checked(client.responses.create(model=model, input=QUESTION, temperature=0, metadata={"k": "v"}))
    assert answer.object == "response"
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    [item] = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert answer.output_text == item.content[0].text != ""
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (answer.metadata, answer.temperature, answer.store) == ({"k": "v"}, 0, False)
    chat = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0
    )
    assert answer.output_text == chat.choices[0].message.content
    assert usage.input_tokens == chat.usage.prompt_tokens
    assert usage.output_tokens == chat.usage.completion_tokens


def test_a_conversation_is_sent_whole(client, model):
    asked = dict(model=model, instructions="Answer briefly.", temperature=0)
    conversation = [{"role": "user", "content": QUESTION}]
    first = client.responses.create(input=conversation, **asked)
    conversation += first.output
    conversation += [{"role": "user", "content": [{"type": "input_text", "text": "What is paging?"}]}]
    second = checked(client.responses.create(input=conversation, **asked))
    assert second.output_text
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert second.instructions == "Answer briefly."


def test_a_cut_off_response_says_so(client, model):
    answer = checked(client.responses.create(model=model, input=QUESTION, max_output_tokens=5))
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == 5


def test_the_stream_helper_says_what_the_whole_answer_says(client, model):
    asked = dict(model=model, input=QUESTION, temperature=0)
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = checked(stream.get_final_response())
    assert deltas == final.output_text == whole.output_text
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_every_event_is_one_of_the_sdks(client, model):
    asked = dict(model=model, input=QUESTION, max_output_tokens=6, include=["message.output_text.logprobs"])
    events = list(client.responses.create(**asked, top_logprobs=2, stream=True))
    for number, event in enumerate(events):
        EVENT.validate_python(event.to_dict())
        assert event.sequence_number == number
    assert events[-1].type == "response.incomplete"
    [part] = events[-1].response.output[0].content
    streamed = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert len(streamed) == len(part.logprobs) == 6
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


@pytest.mark.parametrize(
    "wrong, param",
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type"),
        ({"input": "page " * 3000}, "input"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"temperature": 101}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
    ],
)
def test_a_wrong_parameter_is_named(client, model, wrong, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": model, "input": QUESTION, **wrong})
    assert caught.value.param == param
    assert caught.value.request_id


def test_nothing_is_stored(client, model):
    made = client.responses.create(model=model, input=QUESTION, max_output_tokens=1, store=True)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve(made.id)
    assert caught.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="no-such-model", input=QUESTION)
    assert caught.value.code == "model_not_found"


def test_a_closed_stream_is_cancelled(server, client, model):
    with cancelling(server), client.responses.create(model=model, input=QUESTION, stream=True, **LONG) as stream:
        next(event for event in stream if event.type == "response.output_text.delta")


def test_a_request_whose_client_has_no_more_time_is_cancelled(server, client, model):
    with cancelling(server), paused(server), pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).responses.create(model=model, input=QUESTION, **LONG)


def test_the_async_client(server, model):
    asked = dict(model=model, input=QUESTION, max_output_tokens=30, temperature=0)

    async def streamed(client):
        stream = await client.responses.create(**asked, stream=True)
        return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    async def main():
        async with server.async_client() as client:
            whole = client.responses.create(**asked)
            whole, *streams = await asyncio.gather(whole, *(streamed(client) for _ in range(4)))
            assert streams == [whole.output_text] * 4
            with cancelling(server):
                await start_and_cancel(server, client.responses.create(model=model, input=QUESTION, **LONG))

    asyncio.run(main())


def test_16_at_once_answer_as_one_does(client, model):
    def ask(i, stream):
        asked = dict(model=model, input=f"Story {i}: once", max_output_tokens=20, extra_body={"seed": i})
        if not stream:
            return client.responses.create(**asked).output_text
        events = client.responses.create(**asked, stream=True)
        return "".join(event.delta for event in events if event.type == "response.output_text.delta")

    alone = [ask(i, False) for i in range(4)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda i: ask(i % 4, i % 2 == 0), range(16)))
    assert together == [alone[i % 4] for i in range(16)]


def test_a_locked_and_full_server():
    with serving("--api-key", "s3cret", "--set", "server.max_requests=1") as small:
        with pytest.raises(openai.AuthenticationError):
            small.client("wrong").responses.create(model="demo", input=QUESTION)
        client = small.client("s3cret")
        with client.responses.create(model="demo", input=QUESTION, stream=True, **LONG) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as caught:
                client.responses.create(model="demo", input=QUESTION)
        assert int(caught.value.response.headers["retry-after"]) >= 1


class Answer(pydantic.BaseModel):
    size: Literal[1, 2, 3]
    colour: Literal["red", "green"]


WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 10}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "strict": True,
}
TIME = {"type": "function", "name": "time", "parameters": {"type": "object", "properties": {}}, "strict": None}


def call_of(response):
    [call] = [item for item in response.output if item.type == "function_call"]
    arguments = json.loads(call.arguments)
    assert set(arguments) == {"city", "days"} and arguments["days"] in (1, 2, 3)
    return call


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
    ],
)
def test_a_demanded_call_and_its_output(client, model, choice):
    asked = dict(model=model, tools=[WEATHER, TIME], max_output_tokens=200, parallel_tool_calls=False)
    conversation = [{"role": "user", "content": "How is the weather in Rome?"}]
    answer = checked(client.responses.create(input=conversation, tool_choice=choice, **asked))
    call = call_of(answer)
    assert (call.name, call.status, answer.status) == ("weather", "completed", "completed")
    conversation += answer.output
    conversation += [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    after = checked(client.responses.create(input=conversation, tool_choice="none", **asked))
    assert after.output[0].type == "message"
    assert after.usage.input_tokens > answer.usage.input_tokens


def test_a_streamed_call(client, model):
    demand = dict(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    with client.responses.stream(model=model, input=QUESTION, max_output_tokens=200, **demand) as stream:
        events = list(stream)
        final = checked(stream.get_final_response())
    call = call_of(final)
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in deltas) == deltas[-1].snapshot == call.arguments
    [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert (done.arguments, done.item_id) == (call.arguments, call.id)
    assert call.parsed_arguments == json.loads(call.arguments)


def test_output_of_a_schema(client, model):
    asked = dict(model=model, input="Make one up.", text_format=Answer, max_output_tokens=400, temperature=0)
    parsed = checked(client.responses.parse(**asked))
    assert isinstance(parsed.output_parsed, Answer)
    with client.responses.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert Answer.model_validate_json(text) == stream.get_final_response().output_parsed
    text = {"format": {"type": "json_object"}}
    answer = client.responses.create(model=model, input="JSON?", text=text, max_output_tokens=60)
    assert answer.output_text.lstrip().startswith("{")


@pytest.mark.parametrize(
    "wrong, param",
    [
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "time"}}, "tool_choice.name"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nothing"}}}},
            "text.format.schema",
        ),
    ],
)
def test_a_wrong_demand_is_named(client, model, wrong, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=model, input=QUESTION, **wrong)
    assert caught.value.param.startswith(param)
