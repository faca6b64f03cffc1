"""Uses the server through LlamaIndex, as a server like OpenAI's and as Ollama."""

import asyncio
from typing import Literal

import pydantic
import pytest
from conftest import serving_alike
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.ollama import OllamaEmbedding
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike
from weather_tool import weather

QUESTION = [ChatMessage(role="system", content="You are brief."), ChatMessage(role="user", content="What is Pagetide?")]


class Form(pydantic.BaseModel, extra="forbid"):
    """The size of a thing."""

    size: Literal["small", "large"]


@pytest.fixture(scope="module")
def url():
    with serving_alike("--tool-call-parser", "llama3_json") as server:
        yield server.url


@pytest.fixture
def like_openai(url):
    """Makes a model that is reached by OpenAI's API."""

    def make(**options):
        kind = dict(is_chat_model=True, is_function_calling_model=True, context_window=2048, max_tokens=100)
        common = dict(api_base=f"{url}/v1", api_key="none", temperature=0, max_retries=0)
        return OpenAILike(model="demo", **common | kind | options)

    return make


def ollama(url, **options):
    more = {"num_predict": 100} | options.pop("additional_kwargs", {})
    return Ollama(model="demo", base_url=url, temperature=0, context_window=2048, additional_kwargs=more, **options)


@pytest.fixture(params=["openai", "ollama"])
def llm(url, like_openai, request):
    return like_openai() if request.param == "openai" else ollama(url)


def test_a_chat_is_streamed(llm):
    whole = llm.chat(QUESTION).message.content
    deltas = [part.delta for part in llm.stream_chat(QUESTION)]
    assert len(deltas) > 4 and "".join(deltas) == whole != ""
    assert llm.complete("What is Pagetide?").text == "".join(
        part.delta for part in llm.stream_complete("What is Pagetide?")
    )


def test_the_async_client(llm):
    async def main():
        whole = await llm.achat(QUESTION)
        return whole, [part.delta async for part in await llm.astream_chat(QUESTION)]

    whole, deltas = asyncio.run(main())
    assert "".join(deltas) == whole.message.content


def test_completions(like_openai):
    llm = like_openai(is_chat_model=False)
    assert llm.complete("Paging is").text == "".join(part.delta for part in llm.stream_complete("Paging is")) != ""


def test_a_form_is_filled_in(llm):
    assert isinstance(llm.as_structured_llm(Form).complete("How big is it?").raw, Form)


def test_a_form_is_filled_in_by_a_schema(url, like_openai):
    by_schema = dict(is_function_calling_model=False, should_use_structured_outputs=True)
    for llm in (like_openai(**by_schema), ollama(url)):
        structured = llm.as_structured_llm(Form)
        assert isinstance(structured.chat(QUESTION).raw, Form)
        [*_, last] = structured.stream_chat(QUESTION)
        assert last.raw.size in ("small", "large")


def test_a_tool_is_called_and_answered(like_openai):
    llm, tool = like_openai(), FunctionTool.from_defaults(weather)
    answer = llm.chat_with_tools([tool], user_msg="How is the weather?", tool_required=True)
    [call] = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather" and call.tool_kwargs["city"] in ("Oslo", "Rome")
    result = ChatMessage(role="tool", content="sunny", additional_kwargs={"tool_call_id": call.tool_id})
    after = llm.chat_with_tools([tool], chat_history=[*QUESTION, answer.message, result])
    assert after.message.content and not llm.get_tool_calls_from_response(after, error_on_no_tool_call=False)
    assert llm.predict_and_call([tool], user_msg="How is the weather?", tool_required=True).response.startswith(
        "sunny in "
    )
    [*_, last] = llm.stream_chat_with_tools([tool], user_msg="How is the weather?", tool_required=True)
    assert llm.get_tool_calls_from_response(last) and last.message.additional_kwargs is not None


def test_ollamas_tools(url):
    # Ollama's API cannot demand a call, so a schema does.
    city = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    call = {"name": {"const": "weather"}, "parameters": city | {"additionalProperties": False}}
    form = {"type": "object", "properties": call, "required": [*call], "additionalProperties": False}
    llm, tool = ollama(url), FunctionTool.from_defaults(weather)
    answer = llm.chat(QUESTION, tools=[tool.metadata.to_openai_tool()], format=form)
    [call] = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather" and call.tool_kwargs["city"] in ("Oslo", "Rome")
    result = ChatMessage(role="tool", content="sunny", additional_kwargs={"tool_name": "weather"})
    assert llm.chat([*QUESTION, answer.message, result]).message.content


def test_an_agent_ends(llm):
    async def main():
        agent = FunctionAgent(tools=[weather], llm=llm, system_prompt="You are brief.")
        return await agent.run("What is Pagetide?")

    assert str(asyncio.run(main()))


def test_embeddings(url):
    like_openai = OpenAILikeEmbedding(model_name="demo", api_base=f"{url}/v1", api_key="none", max_retries=0)
    for embeddings in (like_openai, OllamaEmbedding(model_name="demo", base_url=url)):
        both = embeddings.get_text_embedding_batch(["a tide", "a page"])
        assert len(both) == 2 and both[1] == pytest.approx(embeddings.get_text_embedding("a page"), abs=1e-3)


def test_an_error_says_what_is_wrong(url, like_openai):
    for llm in (like_openai(additional_kwargs={"top_p": 2}), ollama(url, additional_kwargs={"top_p": 2})):
        with pytest.raises(Exception, match="top_p must be above 0"):
            llm.chat(QUESTION)
