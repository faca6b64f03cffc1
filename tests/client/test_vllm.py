"""vLLM's paths and fields that no other API has, against the real model."""

import math

import pytest

QUESTIONS = {
    "topic": {"type": "choice", "instructions": "What is it about?", "criteria": {"memory": None, "weather": None}},
    "level": {"type": "score", "criteria": ["low", "high"]},
}


def decide(server, **changes):
    return server.post("/v1/systemone", {"state": "Pagetide swaps blocks.", "questions": QUESTIONS, **changes})


def test_decisions_are_probabilities(server):
    answer = decide(server)
    assert list(answer["answers"]) == ["topic", "level"] and answer["usage"]["output_tokens"] == 2
    topic, level = answer["answers"].values()
    assert sum(topic["probabilities"].values()) == pytest.approx(1)
    mass = answer["diagnostics"]["topic"]["label_mass"]
    assert 0 < mass <= 1 + 1e-6
    assert topic["confidence"] == pytest.approx(max(topic["probabilities"].values()) * mass)
    assert level["score"] == pytest.approx(level["probabilities"]["1"])
    assert decide(server)["answers"] == answer["answers"], "nothing is drawn"


def test_the_probability_of_a_label_is_that_of_the_token(server, client, model):
    one = {"topic": QUESTIONS["topic"]}
    mass = decide(server, questions=one)["diagnostics"]["topic"]["label_mass"]
    rendered = "Pagetide swaps blocks.\n\nQuestion: What is it about?\nA: memory\nB: weather\n"
    rendered += "Reply with the letter of one option and nothing else."
    chat = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": rendered}],
        max_tokens=1,
        logprobs=True,
        temperature=0,
        extra_body={"structured_outputs": {"choice": ["A", "B"]}, "chat_template_kwargs": {"enable_thinking": False}},
    )
    # That of the likelier of both.
    assert math.exp(chat.choices[0].logprobs.content[0].logprob) <= mass + 1e-6


def test_an_input_is_filled_up(server, client, model):
    def num_tokens(**extra):
        return client.embeddings.create(model=model, input=["Hello"], extra_body=extra).usage.prompt_tokens

    most = server.post("/tokenize", {"prompt": "Hello"})["max_model_len"]
    assert num_tokens() < most == num_tokens(padding="max_length")
