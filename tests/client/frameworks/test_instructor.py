"""Uses the server through instructor, over the packages openai and anthropic."""

import asyncio
from typing import Literal

import anthropic
import instructor
import openai
import pydantic
import pytest
from conftest import serving_alike
from instructor import Mode

ASKED = dict(model="demo", messages=[{"role": "user", "content": "How big is it?"}])


class Form(pydantic.BaseModel, extra="forbid"):
    size: Literal["small", "large"]
    days: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def url():
    with serving_alike() as server:
        yield server.url


@pytest.fixture
def openai_client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS], ids=str)
def test_a_form_is_filled_in(openai_client, mode):
    made = instructor.from_openai(openai_client, mode=mode).create(response_model=Form, **ASKED)
    assert isinstance(made, Form)


@pytest.mark.parametrize("mode", [Mode.JSON, Mode.MD_JSON], ids=str)
def test_a_form_is_filled_in_by_a_model_that_knows_json(openai_client, mode):
    # The demo model does not, so a schema demands it.
    schema = {"structured_outputs": {"json": Form.model_json_schema()}}
    if mode == Mode.JSON:
        schema = {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "form", "schema": Form.model_json_schema()},
            }
        }
    client = instructor.from_openai(openai_client, mode=mode)
    assert isinstance(client.create(response_model=Form, extra_body=schema, **ASKED), Form)


def test_anthropics_tools(url):
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    client = instructor.from_anthropic(client, mode=Mode.ANTHROPIC_TOOLS)
    made, message = client.create_with_completion(response_model=Form, max_tokens=100, **ASKED)
    assert isinstance(made, Form) and message.usage.output_tokens > 0


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA], ids=str)
def test_a_form_is_streamed(openai_client, mode):
    client = instructor.from_openai(openai_client, mode=mode)
    parts = list(client.create_partial(response_model=Form, **ASKED))
    assert len(parts) > 2 and parts[0].days is None
    assert Form.model_validate(parts[-1].model_dump())
    # Some of the lists are empty.
    lists = (client.create_iterable(response_model=Form, max_tokens=200, seed=seed, **ASKED) for seed in range(10))
    forms = [form for some in lists for form in some]
    assert forms and all(isinstance(form, Form) for form in forms)


def test_the_async_client(url):
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            client = instructor.from_openai(client)
            return await asyncio.gather(*(client.create(response_model=Form, **ASKED) for _ in range(4)))

    assert all(isinstance(made, Form) for made in asyncio.run(main()))


def test_an_error_says_what_is_wrong(openai_client):
    with pytest.raises(Exception, match="temperature must be in"):
        instructor.from_openai(openai_client).create(response_model=Form, temperature=-1, max_retries=0, **ASKED)
