"""Tool calls through the openai package: made, answered, streamed and refused.

The model is too small to call a tool by itself, so the tests require calls. A grammar then makes the calls valid.
"""

import json

import openai
import pytest

from conftest import serving

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
CITIES = ["Paris", "Rome", "Oslo"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": CITIES}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
FORMATS = ["hermes", "llama3_json", "mistral"]


@pytest.fixture(scope="module", params=FORMATS)
def caller(request):
    """A client of a server whose model writes calls in this format."""
    with serving("--tool-call-parser", request.param) as server:
        yield server.client()


def check_weather(call):
    assert call.type == "function" and call.id
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in CITIES and 1 <= arguments["days"] <= 9 and len(arguments) == 2


def test_a_call_and_its_answer(caller):
    asked = dict(model="demo", messages=QUESTION, tools=[WEATHER, TIME], max_tokens=200, temperature=0)
    named = {"type": "function", "function": {"name": "get_weather"}}
    [choice] = caller.chat.completions.create(**asked, tool_choice=named).choices
    # OpenAI gives this finish reason for a call that the client has chosen.
    assert choice.finish_reason == "stop"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    check_weather(call)

    result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"celsius": 21})}
    asked["messages"] = [*QUESTION, choice.message, result]
    answer = caller.chat.completions.create(**asked).choices[0]
    assert answer.message.content.strip() and not answer.message.tool_calls
    assert answer.finish_reason in ("stop", "length")


def test_required_calls(caller):
    asked = dict(model="demo", messages=QUESTION, tools=[WEATHER, TIME], tool_choice="required", seed=1, n=3)
    for parallel in (True, False):
        answer = caller.chat.completions.create(**asked, parallel_tool_calls=parallel, max_tokens=300)
        for choice in answer.choices:
            if choice.finish_reason == "length":
                continue
            assert choice.finish_reason == "tool_calls"
            assert len(choice.message.tool_calls) >= 1 if parallel else len(choice.message.tool_calls) == 1
            for call in choice.message.tool_calls:
                assert isinstance(json.loads(call.function.arguments), dict)
                if call.function.name == "get_weather":
                    check_weather(call)


def test_streamed_calls_are_the_same(caller):
    asked = dict(model="demo", messages=QUESTION, tools=[WEATHER, TIME], tool_choice="required", max_tokens=200)
    asked |= dict(temperature=0, parallel_tool_calls=False)
    whole = caller.chat.completions.create(**asked).choices[0]
    with caller.chat.completions.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == whole.finish_reason
    [call], [streamed] = whole.message.tool_calls, final.message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(delta.arguments_delta for delta in deltas) == call.function.arguments
    if call.function.name == "get_weather":
        assert len(deltas) > 1, "arguments are not streamed"


def test_without_a_choice_the_model_answers(caller):
    [choice] = caller.chat.completions.create(
        model="demo", messages=QUESTION, tools=[WEATHER], max_tokens=40, temperature=0
    ).choices
    assert choice.message.content.strip() and not choice.message.tool_calls
    assert choice.finish_reason in ("stop", "length")


def test_a_model_of_no_known_format(client, model):
    """Only required calls work, because the server does not know in which format this model writes others."""
    asked = dict(model=model, messages=QUESTION, tools=[WEATHER], max_tokens=200)
    [choice] = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False).choices
    [call] = choice.message.tool_calls
    check_weather(call)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asked)
    assert refused.value.param == "tools"
    answer = client.chat.completions.create(**asked, tool_choice="none")
    assert answer.choices[0].message.tool_calls is None


def test_what_is_wrong_is_named(client, model):
    def refused(**wrong):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model=model, messages=QUESTION, max_tokens=5, **wrong)
        return error.value.param

    bad_name = {"type": "function", "function": {"name": "a b"}}
    assert refused(tools=[TIME, bad_name], tool_choice="none") == "tools[1].function.name"
    other = {"type": "function", "function": {"name": "get_tide"}}
    assert refused(tools=[TIME], tool_choice=other) == "tool_choice.function.name"
    bad_schema = {"type": "object", "properties": {"a": {"type": "sometimes"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": bad_schema}}
    assert refused(tools=[tool], tool_choice="required").startswith("tools[0].function.parameters.properties.a")
