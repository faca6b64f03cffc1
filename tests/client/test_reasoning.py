"""Reasoning, with chat templates from requests that make the model reason."""

import pytest

from conftest import serving

QUESTION = [{"role": "user", "content": "What is Pagetide?"}]
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def thinker():
    with serving("--reasoning-parser", "qwen3", "--set", "server.trust_request_chat_template=true") as server:
        yield server.client()


def ask(client, template, **more):
    asked = dict(model="demo", messages=QUESTION, max_tokens=30, temperature=0, extra_body={"chat_template": template})
    asked["extra_body"] |= more.pop("extra_body", {})
    [choice] = (answer := client.chat.completions.create(**asked, **more)).choices
    return choice, answer.usage


def test_the_prompt_begins_the_reasoning(thinker):
    plain, usage = ask(thinker, CHATML)
    assert plain.message.content and plain.message.reasoning_content is None
    assert usage.completion_tokens_details.reasoning_tokens == 0

    choice, usage = ask(thinker, CHATML + "<think>\n")
    assert choice.message.content is None and choice.message.reasoning_content
    # Every token except perhaps the one that ends the answer.
    assert usage.completion_tokens - 1 <= usage.completion_tokens_details.reasoning_tokens <= usage.completion_tokens
    hidden, _ = ask(thinker, CHATML + "<think>\n", extra_body={"include_reasoning": False})
    assert not hidden.message.content and hidden.message.reasoning_content is None


def test_a_grammar_holds_from_behind_the_reasoning(thinker):
    yes_or_no = {"structured_outputs": {"choice": ["yes", "no"]}}
    choice, _ = ask(thinker, CHATML + "<think>\n\n</think>\n\n", extra_body=yes_or_no)
    assert choice.message.content in ("yes", "no") and choice.finish_reason == "stop"
    # The grammar does not apply inside the reasoning. Here the reasoning does not end within max_tokens.
    for begun in ("<think>\n", ""):
        choice, _ = ask(thinker, CHATML + begun, extra_body=yes_or_no)
        assert choice.message.content is None and len(choice.message.reasoning_content) > 20
        assert choice.finish_reason == "length"


def test_reasoning_keeps_to_its_budget(thinker):
    for budget in (0, 5):
        limit = {"thinking_token_budget": budget}
        choice, usage = ask(thinker, CHATML + "<think>\n", extra_body=limit)
        assert choice.message.content, "the answer comes after the reasoning"
        # The mark of the end may be several tokens.
        assert usage.completion_tokens_details.reasoning_tokens <= budget + len("</think>")
    # A grammar holds from behind the forced end on.
    limit |= {"structured_outputs": {"choice": ["yes", "no"]}}
    choice, _ = ask(thinker, CHATML + "<think>\n", extra_body=limit)
    assert choice.message.content in ("yes", "no") and choice.message.reasoning_content
    plain, _ = ask(thinker, CHATML + "<think>\n\n</think>\n\n", extra_body={"thinking_token_budget": 5})
    assert plain.message.content


def test_a_stream_says_the_same(thinker):
    asked = dict(model="demo", messages=QUESTION, max_tokens=30, temperature=0)
    asked["extra_body"] = {"chat_template": CHATML + "<think>\n"}
    whole = thinker.chat.completions.create(**asked).choices[0].message
    chunks = thinker.chat.completions.create(**asked, stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == whole.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == ""
