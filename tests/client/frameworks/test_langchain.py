"""Uses the server through LangChain's packages for OpenAI, Anthropic and Ollama."""

import asyncio
from typing import Literal

import pydantic
import pytest
from conftest import serving_alike
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

QUESTION = "What is Pagetide?"


class Form(pydantic.BaseModel, extra="forbid"):
    size: Literal["small", "large"]


@tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def call_form(arguments: dict) -> dict:
    """A call in the format of this server's model. A schema demands it where an API cannot."""
    properties = {"name": {"const": "weather"}, "parameters": arguments}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


@pytest.fixture(scope="module")
def url():
    with serving_alike("--tool-call-parser", "llama3_json") as server:
        yield server.url


@pytest.fixture(params=["chat", "responses", "messages", "ollama"])
def make(url, request):
    """Makes a chat model of one of the APIs."""

    def make(**options):
        if request.param == "ollama":
            return ChatOllama(model="demo", base_url=url, **{"num_predict": 100, "temperature": 0} | options)
        common = dict(model="demo", api_key="none", max_tokens=100, max_retries=0) | options
        if request.param == "messages":
            return ChatAnthropic(base_url=url, **common)
        if request.param == "responses":
            common["use_responses_api"] = True
        return ChatOpenAI(base_url=f"{url}/v1", stream_usage=True, **common)

    make.api = request.param
    return make


@pytest.fixture
def caller(make):
    """A chat model that calls the tool."""
    if make.api == "ollama":
        # Ollama's API cannot demand a call.
        schema = weather.tool_call_schema.model_json_schema()
        return make(format=call_form(schema | {"additionalProperties": False})).bind_tools([weather])
    return make().bind_tools([weather], tool_choice="any")


def test_a_chat_is_streamed(make):
    whole = make().invoke([("system", "You are brief."), ("human", QUESTION)])
    assert whole.text and whole.usage_metadata["output_tokens"] > 0
    parts = list(make().stream([("system", "You are brief."), ("human", QUESTION)]))
    assert len(parts) > 4 and "".join(part.text for part in parts).strip()
    total = parts[0]
    for part in parts[1:]:
        total += part
    assert total.usage_metadata["output_tokens"] > 0 and total.response_metadata


def test_the_async_clients(url):
    common = dict(model="demo", api_key="none", max_tokens=100)
    openai = dict(base_url=f"{url}/v1", **common)
    models = [ChatOpenAI(**openai), ChatOpenAI(use_responses_api=True, **openai), ChatAnthropic(base_url=url, **common)]
    models.append(ChatOllama(model="demo", base_url=url))

    # One loop for all, because LangChain keeps connections.
    async def main():
        for model in models:
            whole, *batch = await model.abatch([QUESTION] * 3)
            assert whole.text and len(batch) == 2
            assert len([part.text async for part in model.astream(QUESTION)]) > 4

    asyncio.run(main())


def test_a_schema_is_kept_to(make):
    # Ollama's API cannot demand a call.
    methods = ["json_schema"] if make.api == "ollama" else ["json_schema", "function_calling"]
    for method in methods:
        structured = make().with_structured_output(Form, method=method)
        assert structured.invoke("How big is it?").size in ("small", "large")
        [*_, last] = structured.stream("How big is it?")
        assert last.size in ("small", "large")


def test_a_tool_is_called_and_answered(make, caller):
    asked = [HumanMessage("How is the weather?")]
    answer = caller.invoke(asked)
    [call] = answer.tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Oslo", "Rome")
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage) and result.content.startswith("sunny in ")
    after = make().bind_tools([weather]).invoke([*asked, answer, result])
    assert after.text and not after.tool_calls


def test_a_call_is_streamed(caller):
    total = None
    for part in caller.stream("How is the weather?"):
        total = part if total is None else total + part
    [call] = total.tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Oslo", "Rome") and call["id"]


def test_an_agent_ends(make):
    agent = create_agent(make(), tools=[weather], system_prompt="You are brief.")
    messages = agent.invoke({"messages": [("human", QUESTION)]})["messages"]
    assert messages[-1].type == "ai" and messages[-1].text


def test_completions(url):
    llm = OpenAI(model="demo", base_url=f"{url}/v1", api_key="none", max_tokens=20, temperature=0, max_retries=0)
    assert llm.invoke("Paging is") == "".join(llm.stream("Paging is")) != ""
    assert len(llm.batch(["Paging is", "A block is"])) == 2
    llama = OllamaLLM(model="demo", base_url=url, num_predict=20, temperature=0)
    assert llama.invoke("Paging is") == "".join(llama.stream("Paging is")) != ""


def test_embeddings(url):
    # Otherwise LangChain sends tokens of OpenAI's own tokenizer.
    texts = dict(check_embedding_ctx_length=False)
    embeddings = OpenAIEmbeddings(model="demo", base_url=f"{url}/v1", api_key="none", max_retries=0, **texts)
    for embeddings in (embeddings, OllamaEmbeddings(model="demo", base_url=url)):
        both = embeddings.embed_documents(["a tide", "a page"])
        assert len(both) == 2 and both[1] == pytest.approx(embeddings.embed_query("a page"), abs=1e-3)


def test_an_error_says_what_is_wrong(make):
    model = make(max_tokens=0) if make.api == "messages" else make(temperature=-1)
    with pytest.raises(Exception, match="(max_tokens|temperature) must be in"):
        model.invoke(QUESTION)
