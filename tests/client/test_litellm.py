"""Uses the APIs of Ollama, OpenAI and Anthropic through LiteLLM, as aider and many others do."""

import gc
import json
import os

import pytest

from conftest import serving_alike

# It would fetch a list of prices otherwise.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm  # noqa: E402

QUESTION = [{"role": "user", "content": "What is Pagetide?"}]


def closed(**properties):
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


CITY = closed(city={"type": "string", "maxLength": 8})
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": CITY}}


@pytest.fixture(autouse=True)
def streams_are_closed_after_a_test():
    """LiteLLM leaves a stream open when it has read its last event. The garbage collector closes it later. It may run
    while a request holds the lock of httpcore's connections. Closing takes that lock too, and waits for it forever."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.fixture(scope="module")
def url():
    with serving_alike("--tool-call-parser", "llama3_json") as server:
        yield server.url


def ask(url, provider="ollama_chat", **more):
    return litellm.completion(
        **{"model": f"{provider}/demo", "api_base": url, "messages": QUESTION, "temperature": 0, **more}
    )


@pytest.mark.parametrize("provider", ["ollama_chat", "ollama"])
def test_a_chat_is_streamed(url, provider):
    whole = ask(url, provider, max_tokens=20)
    assert whole.choices[0].message.content and whole.usage.completion_tokens == 20
    chunks = list(ask(url, provider, max_tokens=20, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert len(chunks) > 2


def form(schema):
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


@pytest.mark.parametrize("provider", ["ollama_chat", "ollama"])
def test_a_schema_is_kept_to(url, provider):
    answer = ask(url, provider, max_tokens=50, response_format=form(closed(size={"enum": [1, 2, 3]})))
    assert json.loads(answer.choices[0].message.content)["size"] in (1, 2, 3)


def test_a_tool_is_called(url):
    # The form of a call in this format is JSON, which a schema demands of the demo model.
    call = form(closed(name={"const": "weather"}, parameters=CITY))
    asked = dict(tools=[WEATHER], response_format=call, max_tokens=100)
    answer = ask(url, **asked).choices[0]
    [made] = answer.message.tool_calls
    assert (made.function.name, set(json.loads(made.function.arguments))) == ("weather", {"city"})
    assert answer.finish_reason == "tool_calls"
    streamed = [chunk.choices[0].delta.tool_calls for chunk in ask(url, stream=True, **asked)]
    [[streamed]] = [calls for calls in streamed if calls]
    assert streamed.function.arguments == made.function.arguments
    result = {"role": "tool", "tool_call_id": made.id, "content": "sunny"}
    after = ask(url, messages=[*QUESTION, answer.message.model_dump(), result], tools=[WEATHER], max_tokens=5)
    assert after.choices[0].message.content is not None


def test_an_embedding(url):
    for model, base in (("ollama/demo", url), ("openai/demo", f"{url}/v1"), ("hosted_vllm/demo", f"{url}/v1")):
        embedded = litellm.embedding(model=model, api_base=base, api_key="none", input=["a tide", "a page"])
        assert len(embedded.data) == 2 and len(embedded.data[0]["embedding"]) > 1


# Each with the path that it wants to have in its base.
PROVIDERS = {"openai": "/v1", "hosted_vllm": "/v1", "anthropic": ""}


@pytest.fixture(params=PROVIDERS)
def provider(url, request):
    """Asks by a provider that can demand a call."""
    base = url + PROVIDERS[request.param]
    return lambda **more: ask(base, request.param, **{"api_key": "none", "max_tokens": 60} | more)


def test_other_providers_stream(provider):
    whole = provider().choices[0].message.content
    chunks = list(provider(stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole != ""
    assert len(chunks) > 4 and chunks[-1].usage.completion_tokens > 0


def test_other_providers_keep_to_a_schema(provider):
    answer = provider(response_format=form(closed(size={"enum": [1, 2, 3]}))).choices[0].message.content
    assert json.loads(answer)["size"] in (1, 2, 3)


def test_other_providers_call_a_tool(provider):
    asked = dict(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    answer = provider(**asked).choices[0]
    [made] = answer.message.tool_calls
    assert (made.function.name, set(json.loads(made.function.arguments))) == ("weather", {"city"})
    chunks = list(provider(stream=True, **asked))
    [streamed] = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert streamed.function.name == "weather" and set(json.loads(streamed.function.arguments)) == {"city"}
    result = {"role": "tool", "tool_call_id": made.id, "content": "sunny"}
    after = provider(messages=[*QUESTION, answer.message.model_dump(), result], tools=[WEATHER])
    assert after.choices[0].message.content and not after.choices[0].message.tool_calls


def test_responses_and_completions(url):
    base = dict(api_base=f"{url}/v1", api_key="none")
    response = litellm.responses(model="openai/demo", input="What is Pagetide?", max_output_tokens=20, **base)
    assert response.output[0].content[0].text
    asked = dict(model="text-completion-openai/demo", prompt="Paging is", max_tokens=12, temperature=0, **base)
    streamed = "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(stream=True, **asked))
    assert litellm.text_completion(**asked).choices[0].text == streamed != ""


def test_an_error_says_what_is_wrong(url):
    with pytest.raises(litellm.exceptions.APIConnectionError, match="options.temperature must be in"):
        ask(url, temperature=-1)
    for provider, base in PROVIDERS.items():
        with pytest.raises(litellm.exceptions.BadRequestError, match="temperature must be in"):
            ask(url + base, provider, api_key="none", temperature=-1)
