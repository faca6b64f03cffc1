"""Uses the server through Pydantic AI, by chats and by the Responses API."""

import asyncio
from typing import Literal

import pydantic
import pytest
from conftest import serving_alike
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.embeddings import Embedder
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.messages import ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from weather_tool import weather


class Form(pydantic.BaseModel, extra="forbid"):
    """The size of a thing."""

    size: Literal["small", "large"]


@pytest.fixture(scope="module")
def url():
    with serving_alike("--tool-call-parser", "llama3_json") as server:
        yield server.url


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel])
def agent(url, request):
    """Makes an agent."""
    model = request.param("demo", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))

    def agent(**options):
        return Agent(model, **{"instructions": "You are brief.", "model_settings": {"max_tokens": 200}} | options)

    return agent


async def text_parts(agent):
    async with agent.run_stream("What is Pagetide?") as run:
        parts = [part async for part in run.stream_text(delta=True, debounce_by=None)]
    return parts, run.usage


def test_an_answer_is_streamed(agent):
    whole = agent().run_sync("What is Pagetide?")
    assert whole.output and whole.usage.output_tokens > 0 and whole.usage.input_tokens > 0
    parts, usage = asyncio.run(text_parts(agent()))
    assert len(parts) > 4 and usage.output_tokens > 0


@pytest.mark.parametrize("output", [ToolOutput(Form), NativeOutput(Form)], ids=["tool", "native"])
def test_a_form_is_filled_in(agent, output):
    assert isinstance(agent(output_type=output).run_sync("How big is it?").output, Form)


def test_a_form_is_streamed(agent):
    async def main():
        async with agent(output_type=NativeOutput(Form)).run_stream("How big is it?") as run:
            return [part async for part in run.stream_output(debounce_by=None)]

    assert isinstance(asyncio.run(main())[-1], Form)


def test_a_tool_is_called_and_answered(agent):
    # The first step has to be a call.
    def settings(context):
        choice = {"tool_choice": "required", "parallel_tool_calls": False} if context.run_step == 1 else {}
        return {"max_tokens": 200, "extra_body": choice}

    run = agent(tools=[weather], model_settings=settings).run_sync("How is the weather?")
    parts = [part for message in run.all_messages() for part in message.parts]
    [result] = [part for part in parts if isinstance(part, ToolReturnPart)]
    assert result.content in ("sunny in Oslo", "sunny in Rome") and run.output


def test_embeddings(url):
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    result = Embedder(OpenAIEmbeddingModel("demo", provider=provider)).embed_documents_sync(["a tide", "a page"])
    assert len(result.embeddings) == 2


def test_an_error_says_what_is_wrong(agent):
    with pytest.raises(ModelHTTPError, match="temperature must be in") as caught:
        agent(model_settings={"max_tokens": 9, "temperature": -1}).run_sync("What is Pagetide?")
    assert caught.value.status_code == 400
