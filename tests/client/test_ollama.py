"""Uses the server through the ollama package."""

import asyncio
from typing import Literal

import ollama
import pydantic
import pytest

from conftest import serving

QUESTION = [{"role": "user", "content": "What is Pagetide?"}]
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def llama(server):
    return ollama.Client(host=server.url)


class City(pydantic.BaseModel, extra="forbid"):
    name: Literal["Rome", "Oslo"]
    size: Literal[1, 2, 3]


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return f"sunny in {city}"


def test_a_chat(llama, client, model):
    answer = llama.chat(model=model, messages=QUESTION, options=GREEDY)
    assert (answer.model, answer.done, answer.done_reason) == (model, True, "stop")
    assert answer.message.role == "assistant"
    chat = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
    assert answer.message.content == chat.choices[0].message.content
    assert answer.prompt_eval_count == chat.usage.prompt_tokens
    assert answer.eval_count == chat.usage.completion_tokens
    parts = [answer.load_duration, answer.prompt_eval_duration, answer.eval_duration]
    assert all(part >= 0 for part in parts) and sum(parts) <= answer.total_duration


def test_a_streamed_chat_says_the_same(llama, model):
    whole = llama.chat(model=f"{model}:latest", messages=QUESTION, options=GREEDY)
    parts = list(llama.chat(model=model, messages=QUESTION, options=GREEDY, stream=True))
    assert len(parts) > 2 and [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert (parts[-1].eval_count, parts[-1].done_reason) == (whole.eval_count, "stop")


def test_generate_goes_on_from_its_context(llama, model):
    first = llama.generate(model=model, prompt="What is Pagetide?", system="You are brief.", options=GREEDY)
    assert first.response and first.done
    assert len(first.context) == first.prompt_eval_count + first.eval_count
    second = llama.generate(model=model, prompt="And then?", context=first.context, options={"num_predict": 5})
    assert second.prompt_eval_count > first.prompt_eval_count
    assert (second.done_reason, second.eval_count) == ("length", 5)
    parts = list(llama.generate(model=model, prompt="Pagetide is", raw=True, options={"num_predict": 5}, stream=True))
    assert "".join(part.response for part in parts) and parts[-1].context is None


def test_an_answer_is_as_long_as_fits(llama, model):
    answer = llama.chat(model=model, messages=QUESTION, options={**GREEDY, "num_predict": 1_000_000})
    assert answer.done_reason in ("stop", "length") and answer.eval_count > 2


def test_a_suffix_needs_a_model_that_knows_it(llama, model):
    with pytest.raises(ollama.ResponseError) as caught:
        llama.generate(model=model, prompt="def f(", suffix="return x")
    assert caught.value.status_code == 400 and caught.value.error.startswith("suffix: this model cannot")


def test_a_format_is_kept_to(llama, model):
    asked = dict(model=model, messages=QUESTION, options={"num_predict": 100})
    City.model_validate_json(llama.chat(format=City.model_json_schema(), **asked).message.content)
    # The demo model does not end an object of its own accord.
    assert llama.chat(format="json", **asked).message.content.lstrip().startswith("{")


def test_tools():
    # The form of a call in this format is JSON, which a schema demands of the demo model.
    call = {
        "type": "object",
        "properties": {
            "name": {"const": "weather"},
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 8}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    with serving("--tool-call-parser", "llama3_json") as server:
        llama = ollama.Client(host=server.url)
        asked = dict(model="demo", tools=[weather], format=call, options={"num_predict": 200})
        answer = llama.chat(messages=QUESTION, **asked)
        [called] = answer.message.tool_calls
        assert (called.function.name, set(called.function.arguments)) == ("weather", {"city"})
        parts = list(llama.chat(messages=QUESTION, stream=True, **asked))
        assert len([call for part in parts for call in part.message.tool_calls or []]) == 1
        result = {"role": "tool", "tool_name": "weather", "content": weather(**called.function.arguments)}
        after = llama.chat(model="demo", messages=[*QUESTION, answer.message, result], tools=[weather])
        assert after.done and after.prompt_eval_count > answer.prompt_eval_count


def test_log_probabilities(llama, model):
    answer = llama.chat(model=model, messages=QUESTION, options={"num_predict": 4}, logprobs=True, top_logprobs=2)
    assert len(answer.logprobs) == 4
    assert all(position.logprob <= 0 and len(position.top_logprobs) == 2 for position in answer.logprobs)


def test_embeddings(llama, model):
    answer = llama.embed(model=model, input=["a tide", "a page"])
    assert len(answer.embeddings) == 2
    assert all(sum(x * x for x in embedding) == pytest.approx(1, abs=1e-3) for embedding in answer.embeddings)
    assert len(llama.embed(model=model, input="a tide", dimensions=8).embeddings[0]) == 8
    assert len(llama.embeddings(model=model, prompt="a tide").embedding) == len(answer.embeddings[0])


def test_the_model(llama, model):
    [listed] = llama.list().models
    assert listed.model == f"{model}:latest" and listed.size > 0
    shown = llama.show(listed.model)
    assert "completion" in shown.capabilities and shown.modelinfo["general.parameter_count"] > 0
    [running] = llama.ps().models
    assert running.model == listed.model and running.context_length > 0
    for managed in (lambda: llama.pull("llama3"), lambda: llama.delete("llama3"), lambda: llama.copy(model, "x")):
        with pytest.raises(ollama.ResponseError) as caught:
            managed()
        assert caught.value.status_code == 501


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"typical_p": 1.5}}, "options.typical_p"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"think": True}, "think"),
    ],
)
def test_a_wrong_parameter_is_named(llama, model, wrong, named):
    with pytest.raises(ollama.ResponseError) as caught:
        llama.chat(**{"model": model, "messages": QUESTION, **wrong})
    assert caught.value.status_code == 400 and caught.value.error.startswith(named)


def test_a_model_that_is_not_served(llama):
    with pytest.raises(ollama.ResponseError) as caught:
        llama.chat(model="llama3", messages=QUESTION)
    assert caught.value.status_code == 404


def test_the_async_client(server, model):
    async def main():
        llama = ollama.AsyncClient(host=server.url)
        whole = await llama.chat(model=model, messages=QUESTION, options=GREEDY)
        stream = await llama.chat(model=model, messages=QUESTION, options=GREEDY, stream=True)
        assert "".join([part.message.content async for part in stream]) == whole.message.content

    asyncio.run(main())
