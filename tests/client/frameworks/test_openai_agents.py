"""Uses the server through OpenAI's agents, by the Responses API and by chats."""

import asyncio
from typing import Literal

import openai
import pydantic
import pytest
import weather_tool
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
    handoff,
)
from conftest import serving_alike


class Form(pydantic.BaseModel):
    size: Literal["small", "large"]


weather = function_tool(weather_tool.weather)


@pytest.fixture(scope="module")
def url():
    with serving_alike("--tool-call-parser", "llama3_json") as server:
        yield server.url


@pytest.fixture(params=[OpenAIResponsesModel, OpenAIChatCompletionsModel])
def agent(url, request):
    """Makes an agent."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = request.param("demo", client)

    def agent(**options):
        common = dict(name="helper", instructions="You are brief.", model=model)
        return Agent(**common | {"model_settings": ModelSettings(max_tokens=200, include_usage=True)} | options)

    return agent


def run(agent, question="What is Pagetide?", **options):
    # Traces would go to OpenAI.
    return Runner.run_sync(agent, question, run_config=RunConfig(tracing_disabled=True), **options)


def test_an_answer(agent):
    answer = run(agent())
    assert answer.final_output
    assert answer.context_wrapper.usage.output_tokens > 0


def test_an_answer_is_streamed(agent):
    async def main():
        streamed = Runner.run_streamed(agent(), "What is Pagetide?", run_config=RunConfig(tracing_disabled=True))
        events = [event async for event in streamed.stream_events() if event.type == "raw_response_event"]
        deltas = [event.data.delta for event in events if event.data.type == "response.output_text.delta"]
        return deltas, streamed

    deltas, streamed = asyncio.run(main())
    assert len(deltas) > 4 and "".join(deltas) == streamed.final_output
    assert streamed.context_wrapper.usage.output_tokens > 0


def test_a_form_is_filled_in(agent):
    assert isinstance(run(agent(output_type=Form), "How big is it?").final_output, Form)


def test_a_tool_is_called_and_answered(agent):
    # After the call the choice is the model's again, which then answers.
    settings = ModelSettings(max_tokens=200, tool_choice="required", parallel_tool_calls=False)
    answer = run(agent(tools=[weather], model_settings=settings), "How is the weather?")
    kinds = [item.type for item in answer.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"] and kinds[-1] == "message_output_item"
    assert answer.new_items[1].output in ("sunny in Oslo", "sunny in Rome") and answer.final_output


def test_a_call_is_streamed(agent):
    async def main():
        settings = ModelSettings(max_tokens=200, tool_choice="weather")
        asked = agent(tools=[weather], model_settings=settings, tool_use_behavior="stop_on_first_tool")
        streamed = Runner.run_streamed(asked, "How is it?", run_config=RunConfig(tracing_disabled=True))
        kinds = {event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"}
        return kinds, streamed.final_output

    kinds, output = asyncio.run(main())
    assert "response.function_call_arguments.delta" in kinds and output in ("sunny in Oslo", "sunny in Rome")


def test_one_agent_hands_over_to_another(agent):
    settings = ModelSettings(max_tokens=200, tool_choice="required", parallel_tool_calls=False)
    other = agent(name="other")
    answer = run(agent(handoffs=[handoff(other)], model_settings=settings), "How is the weather?")
    assert answer.last_agent is other and answer.final_output


def test_an_error_says_what_is_wrong(agent):
    with pytest.raises(openai.BadRequestError, match="temperature must be in"):
        run(agent(model_settings=ModelSettings(temperature=-1)))
