"""Uses the server through DSPy.

The model is too small to keep to DSPy's formats by itself. Regular expressions, schemas and required calls demand them.
"""

import asyncio
from typing import Literal

import dspy
import pytest
from conftest import serving_alike
from weather_tool import weather

# DSPy takes schemas and calls to models alone whose names it knows.
MODEL = "gpt-4o-mini"
END = r"\[\[ ## completed ## \]\]"


class Choice(dspy.Signature):
    """Choose a size."""

    question: str = dspy.InputField()
    size: Literal["small", "large"] = dspy.OutputField()


class Answer(dspy.Signature):
    question: str = dspy.InputField()
    answer: str = dspy.OutputField()


class Calls(dspy.Signature):
    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


def fields(**patterns: str) -> str:
    """The regular expression of an answer in the format of DSPy's ChatAdapter."""
    return "".join(rf"\[\[ ## {name} ## \]\]\n{pattern}\n\n" for name, pattern in patterns.items()) + END


@pytest.fixture(scope="module")
def url():
    with serving_alike(
        "--tool-call-parser", "llama3_json", "--served-model-name", "demo", "--served-model-name", MODEL
    ) as server:
        yield f"{server.url}/v1"


@pytest.fixture(params=["auto", "litellm"])
def make(url, request):
    """Makes a language model, whose answers follow `regex`, on each of DSPy's engines."""

    def make(regex=None, **options):
        if regex:
            options["extra_body"] = {"structured_outputs": {"regex": regex}}
        common = dict(engine=request.param, api_base=url, api_key="none", cache=False, num_retries=0, max_tokens=200)
        return dspy.LM(f"openai/{MODEL}", **common | options)

    return make


def plain() -> dspy.ChatAdapter:
    # Without a second try in another format.
    return dspy.ChatAdapter(use_json_adapter_fallback=False)


@pytest.mark.parametrize("kind", ["chat", "text", "responses"])
def test_a_model_answers_on_every_path(make, kind):
    [answer] = make(model_type=kind, max_tokens=30)("What is Pagetide?")
    assert answer


def test_predictions_and_chains_of_thought(make):
    with dspy.context(lm=make(fields(size="(small|large)")), adapter=plain(), track_usage=True):
        prediction = dspy.Predict(Choice)(question="How big is it?")
    assert prediction.size in ("small", "large")
    [usage] = prediction.get_lm_usage().values()
    assert usage["completion_tokens"] > 0 and usage["prompt_tokens"] > 0
    with dspy.context(lm=make(fields(reasoning="[a-z ]{9,30}", size="(small|large)")), adapter=plain()):
        prediction = dspy.ChainOfThought(Choice)(question="How big is it?")
    assert len(prediction.reasoning.strip()) > 2 and prediction.size in ("small", "large")


def test_a_schema_is_kept_to(make):
    with dspy.context(lm=make(temperature=1.5), adapter=dspy.JSONAdapter()):
        assert {dspy.Predict(Choice)(question="How big is it?").size for _ in range(4)} <= {"small", "large"}


def test_an_answer_is_streamed(make):
    listener = dspy.streaming.StreamListener(signature_field_name="answer")
    predict = dspy.streamify(dspy.Predict(Answer), stream_listeners=[listener])

    async def main():
        return [part async for part in predict(question="What is Pagetide?")]

    with dspy.context(lm=make(fields(answer="[a-z ]{60,80}"), temperature=0), adapter=plain()):
        *parts, prediction = asyncio.run(main())
    # DSPy may take the mark of the end as a part of the field.
    streamed = "".join(part.chunk for part in parts).split("[[")[0].strip()
    assert len(parts) > 4 and prediction.answer == streamed


def test_an_agent_calls_a_tool(make):
    agent = dspy.ReAct("question -> answer", tools=[weather], max_iters=1)
    arguments = r'\{"city": "(Oslo|Rome)"\}'
    step = fields(next_thought="[a-z ]{5,20}", next_tool_name="weather", next_tool_args=arguments)
    agent.react.lm = make(step)
    agent.extract.set_lm(make(fields(reasoning="[a-z ]{5,20}", answer="(sun|rain)")))
    with dspy.context(adapter=plain()):
        answer = agent(question="How is the weather?")
    assert answer.trajectory["observation_0"].startswith("sunny in ") and answer.answer in ("sun", "rain")


def test_a_tool_is_called_natively(make):
    lm = make(tool_choice="required", parallel_tool_calls=False)
    with dspy.context(lm=lm, adapter=dspy.ChatAdapter(use_native_function_calling=True)):
        [call] = dspy.Predict(Calls)(question="How is it in Oslo?", tools=[dspy.Tool(weather)]).calls.tool_calls
        assert call.name == "weather" and call.args["city"] in ("Oslo", "Rome")
        agent = dspy.ReActV2("question -> answer: Literal['sun', 'rain']", tools=[weather], max_iters=2)
        answer = agent(question="How is the weather?")
    assert answer.answer in ("sun", "rain") and answer.history.messages


def test_embeddings(url):
    embed = dspy.Embedder("openai/demo", api_base=url, api_key="none", caching=False, batch_size=2)
    together, alone = embed(["a tide", "a page", "a tide"]), embed("a page")
    assert together.shape == (3, *alone.shape)
    assert together[1] == pytest.approx(alone, abs=1e-4) and together[0] == pytest.approx(together[2], abs=1e-4)


def test_an_error_says_what_is_wrong(make):
    with pytest.raises(Exception, match="temperature must be in"):
        make(temperature=-1)("What is Pagetide?")
