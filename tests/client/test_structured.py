"""Structured output: requests of the openai package, and a corpus of schemas on a model with random weights."""

import json
import os
import re
from unittest import mock

import conftest
import openai
import pydantic
import pytest
import schemas

# The number of schemas in the corpus. SAMPLES outputs are checked for each.
NUM_SCHEMAS = int(os.environ.get("PAGETIDE_SCHEMAS", 320))
QUESTION = [{"role": "user", "content": "Tell me about a city."}]

# Small enough to be fast. The vocabulary has the size of the demo model's, because a directory without a tokenizer gets
# the demo model's tokenizer.
RANDOM_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "vocab_size": 2048,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 2,
}


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    population: int = pydantic.Field(ge=0, le=40_000_000)
    coast: bool | None = None
    tags: list[str] = pydantic.Field(max_length=0)


def test_the_corpus_is_valid(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RANDOM_MODEL))
    with mock.patch.dict(os.environ, PAGETIDE_MODEL=str(tmp_path)), conftest.serving("--load-format", "dummy") as server:
        counts, _ = schemas.run_all(server.url, range(NUM_SCHEMAS), jobs=16)
        assert server.metric('pagetide_requests{state="running"}') == 0
    every = "properties required additionalProperties patternProperties minProperties maxProperties items prefixItems"
    every += " minItems maxItems pattern format minLength maxLength integer number minimum maximum exclusiveMinimum"
    every += " exclusiveMaximum multipleOf boolean null const enum anyOf oneOf allOf $ref recursion"
    assert [feature for feature in every.split() if counts[feature] < 3] == []


def test_a_pydantic_model_is_filled_in(client, model):
    for temperature in (0, 1):
        answer = client.chat.completions.parse(
            model=model, messages=QUESTION, response_format=City, temperature=temperature, max_tokens=200, seed=5, n=3
        )
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            assert isinstance(choice.message.parsed, City)


def test_a_stream_is_json_at_its_end(client, model):
    with client.chat.completions.stream(
        model=model, messages=QUESTION, response_format=City, max_tokens=200, temperature=1, seed=3
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, City)


def test_an_output_that_is_cut_says_so(client, model):
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, response_format={"type": "json_object"}, max_tokens=3
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content.startswith("{")


def test_forced_tokens_are_those_that_would_have_been_sampled(client, model):
    # With log-probabilities every token needs its own row of logits, so no token is forced.
    schema = {
        "type": "object",
        "properties": {"a rather long name": {"enum": ["one", "two"]}, "another name": {"type": "boolean"}},
        "required": ["a rather long name", "another name"],
        "additionalProperties": False,
    }
    body = {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}
    asked = dict(model=model, messages=QUESTION, max_tokens=60, temperature=1, seed=11, extra_body=body)
    forced = client.chat.completions.create(**asked)
    sampled = client.chat.completions.create(**asked, logprobs=True)
    assert forced.choices[0].message.content == sampled.choices[0].message.content
    assert forced.usage == sampled.usage


@pytest.mark.parametrize(
    "body, pattern",
    [
        ({"guided_regex": r"\d{3}-[a-z]{2}"}, r"\d{3}-[a-z]{2}"),
        ({"structured_outputs": {"regex": r"(ja|nein)!"}}, r"(ja|nein)!"),
        ({"guided_choice": ["über", "unter 🦀"]}, r"über|unter 🦀"),
        ({"structured_outputs": {"choice": ["a", "ab"]}}, r"ab?"),
        ({"grammar": 'root ::= "<" [a-c]{2} root? ">"'}, r"(<[a-c]{2})+>+"),
        ({"guided_grammar": 'start: "x" NUMBER\nNUMBER: /[0-9]{2}/'}, r"x[0-9]{2}"),
    ],
)
def test_a_text_is_what_was_asked_for(client, model, body, pattern):
    for seed in range(3):
        answer = client.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=100, temperature=1, seed=seed, extra_body=body
        )
        assert re.fullmatch(pattern, answer.choices[0].message.content)
        answer = client.completions.create(
            model=model, prompt="A city is", max_tokens=100, temperature=1, seed=seed, extra_body=body
        )
        assert re.fullmatch(pattern, answer.choices[0].text)


@pytest.mark.parametrize(
    "body, param",
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"grammar": 'root ::= "a'}, "grammar"),
        ({"guided_json": {"type": "object", "properties": {"x": {"type": "text"}}}}, "guided_json.properties.x.type"),
        ({"guided_json": {"not": {}}, "guided_regex": "a"}, "guided_regex"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"items": {"not": {"type": "null"}}}}}},
            "response_format.json_schema.schema.items.not",
        ),
        ({"guided_choice": ["a"], "use_beam_search": True, "n": 2}, "use_beam_search"),
        ({"guided_choice": ["a"], "allowed_token_ids": [5]}, "allowed_token_ids"),
    ],
)
def test_a_wrong_demand_is_refused_by_name(client, model, body, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=QUESTION, extra_body=body)
    assert caught.value.param == param
    assert param in caught.value.message
