"""Uses the server through the openai package."""

import asyncio
import concurrent.futures
import json

import openai
import pytest

from conftest import cancelling, free_port, paused, serving, start_and_cancel, wait_for

QUESTION = [{"role": "user", "content": "What is Pagetide?"}]


def test_a_chat(client, model):
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=80, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.model == model
    assert answer.id.startswith("chatcmpl-")
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content.strip()
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens <= 80
    assert usage.prompt_tokens_details.cached_tokens >= 0


def test_a_streamed_chat_says_the_same(client, model):
    asked = dict(model=model, messages=QUESTION, max_tokens=60, temperature=0)
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    *deltas, last = chunks
    assert "".join(c.choices[0].delta.content for c in deltas) == whole.choices[0].message.content
    assert deltas[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(c.choices[0].finish_reason is None for c in deltas[:-1])
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert len({c.id for c in chunks}) == 1


def test_the_stream_helper_understands_the_chunks(client, model):
    with client.chat.completions.stream(model=model, messages=QUESTION, max_tokens=200, temperature=0) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_completion()
    assert answer.choices[0].message.content.strip()
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_content_parts_and_several_turns(client, model):
    messages = [
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": [{"type": "text", "text": "Hello."}, {"type": "text", "text": "Who are you?"}]},
        {"role": "assistant", "content": "I am Pagetide's demo model."},
        {"role": "user", "content": "What is paging?"},
    ]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=20)
    assert answer.choices[0].message.content.strip()


def test_completions_of_every_form_of_prompt(server, client, model):
    text = "Paging is"
    ids = server.post("/tokenize", {"prompt": text})["tokens"]
    asked = dict(model=model, max_tokens=12, temperature=0)
    [by_text] = client.completions.create(prompt=text, **asked).choices
    [by_ids] = client.completions.create(prompt=ids, **asked).choices
    assert by_ids.text == by_text.text != ""
    texts = client.completions.create(prompt=[text, "A block"], **asked)
    lists = client.completions.create(prompt=[ids, ids], **asked)
    assert [c.index for c in texts.choices] == [0, 1]
    assert texts.choices[0].text == by_text.text
    assert [c.text for c in lists.choices] == [by_text.text] * 2
    assert lists.usage.prompt_tokens == 2 * len(ids)


def test_a_streamed_completion_says_the_same(client, model):
    asked = dict(model=model, prompt=["Paging is", "A block is"], n=2, seed=4, max_tokens=24)
    whole = client.completions.create(**asked)
    texts = [""] * 4
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_echo(client, model):
    answer = client.completions.create(model=model, prompt="Paging is", echo=True, max_tokens=4, temperature=0)
    assert answer.choices[0].text.startswith("Paging is")
    answer = client.completions.create(model=model, prompt="Paging is", echo=True, max_tokens=0, logprobs=1)
    assert answer.choices[0].text == "Paging is"
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert answer.usage.completion_tokens == 0


def test_several_choices_differ_and_a_seed_repeats_them(client, model):
    def texts(**more):
        asked = dict(model=model, messages=QUESTION, max_tokens=30, temperature=1.5, n=4)
        return [c.message.content for c in client.chat.completions.create(**asked, **more).choices]

    first = texts(seed=7)
    assert len(first) == 4 and len(set(first)) > 1
    assert texts(seed=7) == first
    assert texts(seed=-8) != first


def test_log_probabilities_of_a_chat(client, model):
    asked = dict(model=model, messages=QUESTION, max_tokens=10, temperature=0, logprobs=True, top_logprobs=3)
    answer = client.chat.completions.create(**asked)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 3
        # At temperature 0 the most likely token is chosen.
        assert entry.token == entry.top_logprobs[0].token
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert [t.logprob for t in entry.top_logprobs] == sorted((t.logprob for t in entry.top_logprobs), reverse=True)
    shown = content if answer.choices[0].finish_reason == "length" else content[:-1]
    text = b"".join(bytes(entry.bytes) for entry in shown).decode()
    assert text.strip() == answer.choices[0].message.content.strip()
    streamed = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == content


def test_log_probabilities_of_a_completion(client, model):
    answer = client.completions.create(model=model, prompt="Paging is", max_tokens=8, temperature=0, logprobs=2)
    [choice] = answer.choices
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 8
    for token, offset in zip(logprobs.tokens, logprobs.text_offset):
        assert choice.text[offset:].startswith(token)
    assert all(len(top) == 2 for top in logprobs.top_logprobs)


def test_stop_strings(server, client, model):
    asked = dict(model=model, messages=QUESTION, max_tokens=60, temperature=0)
    text = client.chat.completions.create(**asked).choices[0].message.content
    stop = text[len(text) // 3 : len(text) // 3 + 5]
    stopped, cancelled = ('pagetide_requests_total{outcome="%s"}' % outcome for outcome in ("stop", "cancelled"))
    before = server.metric(stopped), server.metric(cancelled)
    answer = client.chat.completions.create(**asked, stop=["never said", stop])
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == stop
    streamed = client.chat.completions.create(**asked, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content for chunk in streamed) == text[: text.index(stop)]
    answer = client.chat.completions.create(**asked, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert answer.choices[0].message.content.endswith(stop)
    # Metrics count a stop string as a normal end, not as a cancelled request.
    wait_for(lambda: (server.metric(stopped), server.metric(cancelled)) == (before[0] + 3, before[1]))


def test_vllms_parameters(client, model):
    asked = dict(model=model, messages=QUESTION)
    more = {"ignore_eos": True, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "skip_special_tokens": False}
    answer = client.chat.completions.create(**asked, max_tokens=100, extra_body=more)
    assert answer.usage.completion_tokens == 100
    assert answer.choices[0].finish_reason == "length"
    answer = client.chat.completions.create(**asked, max_tokens=50, extra_body={"min_tokens": 50})
    assert answer.usage.completion_tokens == 50
    answer = client.chat.completions.create(**asked, max_tokens=1, extra_body={"prompt_logprobs": 1})
    assert answer.prompt_logprobs[0] is None
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens


def test_a_logit_bias_decides(server, client, model):
    [token] = server.post("/tokenize", {"prompt": "a", "add_special_tokens": False})["tokens"][-1:]
    asked = dict(model=model, prompt="Paging is", max_tokens=5, temperature=0)
    answer = client.completions.create(**asked, logit_bias={str(token): 100}, extra_body={"return_token_ids": True})
    assert answer.choices[0].token_ids == [token] * 5


@pytest.mark.parametrize(
    "wrong, param",
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 10**7}, "max_tokens"),
        ({"stop": ["a", ""]}, "stop"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias.99999999"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ],
)
def test_a_wrong_parameter_is_named(client, model, wrong, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": model, "messages": QUESTION, **wrong})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


def test_a_prompt_that_is_too_long_is_refused(client, model):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="page " * 100_000, max_tokens=4)
    assert caught.value.code == "context_length_exceeded"


def test_models(client, model):
    [card] = client.models.list().data
    assert card.id == model
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert caught.value.code == "model_not_found"


def test_a_request_id_is_echoed(client, model):
    asked = dict(model=model, prompt="a", max_tokens=1)
    answer = client.completions.with_raw_response.create(**asked, extra_headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"


def test_tokenize_and_detokenize(server):
    answer = server.post("/tokenize", {"prompt": "Paging — ça va?", "return_token_strs": True})
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    text = server.post("/detokenize", {"tokens": answer["tokens"]})["prompt"]
    assert text.endswith("Paging — ça va?")
    chat = server.post("/tokenize", {"messages": QUESTION})
    assert chat["count"] > server.post("/tokenize", {"prompt": QUESTION[0]["content"]})["count"]


def test_a_second_turn_finds_the_first_in_the_cache(client, model):
    story = "Tell me about this: " + "a page of memory, " * 40
    asked = dict(model=model, max_tokens=4, temperature=0)
    client.chat.completions.create(messages=[{"role": "user", "content": story}], **asked)
    again = client.chat.completions.create(messages=[{"role": "user", "content": story}], **asked)
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_a_closed_stream_is_cancelled(server, client, model):
    asked = dict(model=model, prompt="Once", max_tokens=1500, extra_body={"ignore_eos": True})
    with cancelling(server), client.completions.create(**asked, stream=True) as stream:
        next(iter(stream))


def test_a_request_whose_client_has_no_more_time_is_cancelled(server, client, model):
    asked = dict(model=model, messages=QUESTION, max_tokens=1500, extra_body={"ignore_eos": True})
    with cancelling(server), paused(server), pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(**asked)


def test_the_async_client(server, model):
    asked = dict(model=model, messages=QUESTION, max_tokens=30, temperature=0)

    async def ask(client, stream):
        answer = await client.chat.completions.create(**asked, stream=stream)
        if not stream:
            return answer.choices[0].message.content
        return "".join([chunk.choices[0].delta.content async for chunk in answer])

    async def main():
        async with server.async_client() as client:
            texts = await asyncio.gather(*(ask(client, i % 2 == 0) for i in range(8)))
            assert len(set(texts)) == 1 and texts[0]
            with cancelling(server):
                long = asked | {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
                await start_and_cancel(server, client.chat.completions.create(**long))

    asyncio.run(main())


def test_nobody_at_home():
    with pytest.raises(openai.APIConnectionError):
        openai.OpenAI(base_url=f"http://127.0.0.1:{free_port()}/v1", api_key="none", max_retries=0).models.list()


def test_32_at_once_answer_as_one_does(client, model):
    def ask(i, stream):
        asked = dict(model=model, prompt=f"Story {i}: once", max_tokens=40, temperature=0.9, seed=i, stream=stream)
        answer = client.completions.create(**asked)
        return "".join(c.choices[0].text for c in answer) if stream else answer.choices[0].text

    alone = [ask(i, False) for i in range(8)]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda i: ask(i % 8, i % 2 == 0), range(64)))
    assert together == [alone[i % 8] for i in range(64)]


def test_a_key_is_asked_for():
    with serving("--api-key", "s3cret") as locked:
        assert json.loads(locked.get("/health")) == {"status": "ok"}
        with pytest.raises(openai.AuthenticationError) as caught:
            locked.client("wrong").models.list()
        assert caught.value.code == "invalid_api_key"
        assert locked.client("s3cret").models.list().data


def test_a_full_server_says_when_to_come_back():
    with serving("--set", "server.max_requests=1") as small:
        client = small.client()
        name = client.models.list().data[0].id
        asked = dict(model=name, prompt="Once", max_tokens=1500, extra_body={"ignore_eos": True})
        with client.completions.create(**asked, stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(**asked)
        assert caught.value.code == "queue_full"
        assert int(caught.value.response.headers["retry-after"]) >= 1


def test_a_signal_lets_running_requests_end():
    with serving() as leaving:
        client = leaving.client()
        name = client.models.list().data[0].id
        asked = dict(model=name, prompt="Once", max_tokens=400, extra_body={"ignore_eos": True})
        with client.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
            events = iter(stream)
            next(events)
            leaving.process.terminate()
            *_, last = events
        assert last.usage.completion_tokens == 400
        assert leaving.process.wait(timeout=300) == 0


def test_embeddings(client):
    inputs = ["The tide comes in.", "The tide comes in.", "Blocks of memory."]
    answer = client.embeddings.create(model="demo", input=inputs)
    first, same, other = (np_free(item.embedding) for item in answer.data)
    assert first == same != other
    assert abs(sum(x * x for x in first) - 1) < 1e-5
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    plain = client.embeddings.create(model="demo", input=inputs[2], encoding_format="float", dimensions=len(other))
    assert max(abs(a - b) for a, b in zip(plain.data[0].embedding, other)) < 1e-5
    mean = client.embeddings.create(model="demo", input=inputs[2], extra_body={"pooling": "mean"})
    assert np_free(mean.data[0].embedding) != other
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="demo", input="a", dimensions=7)


def np_free(values):
    """Converts an embedding to a list, because the client returns a numpy array if numpy is installed."""
    return [float(x) for x in values]


def test_beams(client):
    def search(**more):
        return client.completions.create(
            model="demo", prompt="The block table", max_tokens=12, logprobs=0, **more
        )

    beams = search(n=3, extra_body={"use_beam_search": True, "best_of": 4})
    assert len({choice.text for choice in beams.choices}) == 3
    scores = [sum(choice.logprobs.token_logprobs) / len(choice.logprobs.tokens) for choice in beams.choices]
    assert scores == sorted(scores, reverse=True)
    greedy = search(temperature=0)
    assert sum(beams.choices[0].logprobs.token_logprobs) >= sum(greedy.choices[0].logprobs.token_logprobs) - 1e-3
    with pytest.raises(openai.BadRequestError, match="stop"):
        search(stop="a", extra_body={"use_beam_search": True})


def test_bad_words(client):
    def complete(**more):
        return client.completions.create(model="demo", prompt="The block", max_tokens=12, temperature=0, **more)

    word = complete().choices[0].text.split()[0]
    assert word not in complete(extra_body={"bad_words": [word]}).choices[0].text.split()[:1]
