"""What a client is told about memory pressure, and whose cached prefixes it can find."""

import asyncio
import concurrent.futures
import json
import urllib.request

import pytest

from conftest import serving

# Ten requests of about 130 tokens need more than three times the pool. Each starts as soon as its prompt fits.
POOL = (
    *("--num-device-blocks", "24", "--block-size", "16"),
    *("--set", "scheduler.inter_token_target_ms=0", "--set", "scheduler.admission=prompt"),
)
NUM_REQUESTS = 10


# Copies that the prefix cache makes to the swap pool are on no bill. Without that cache, every copy is on one.
@pytest.fixture(scope="module")
def small():
    with serving(*POOL, "--enable-prefix-caching", "false") as running:
        yield running


def asked(number: int) -> dict:
    return dict(
        prompt=[10 + number] * 10,
        max_tokens=120,
        temperature=0,
        extra_body={"ignore_eos": True, "include_kv_usage": True, "pause_comments": True},
    )


def test_streams_pause_and_say_what_it_cost(small):
    async def stream(client, model, number):
        text, kv = "", None
        async for chunk in await client.completions.create(model=model, **asked(number), stream=True):
            text += "".join(choice.text for choice in chunk.choices)
            if chunk.usage:
                kv = chunk.usage.model_extra["kv"]
        return text, kv

    async def all_at_once():
        async with small.async_client() as client:
            model = (await client.models.list()).data[0].id
            return await asyncio.gather(*(stream(client, model, number) for number in range(NUM_REQUESTS)))

    together = asyncio.run(all_at_once())
    with small.client() as client:
        model = client.models.list().data[0].id
        alone = [client.completions.create(model=model, **asked(number)) for number in range(NUM_REQUESTS)]
    assert [text for text, _ in together] == [answer.choices[0].text for answer in alone]
    assert sum(kv["preemptions"] for _, kv in together) > 0
    assert sum(kv["paused_ms"] for _, kv in together) > 0
    assert all(kv["preemptions"] > 0 or kv["paused_ms"] == 0 for _, kv in together)
    # The bills add up to the server's metrics.
    for field, metric in [
        ("swapped_out_bytes", "pagetide_swap_out_bytes_total"),
        ("swapped_in_bytes", "pagetide_swap_in_bytes_total"),
        ("recomputed_tokens", "pagetide_recomputed_tokens_total"),
    ]:
        assert sum(kv[field] for _, kv in together) == small.metric(metric), field
    # A request that has the pool to itself is never preempted.
    assert all(answer.usage.model_extra["kv"]["preemptions"] == 0 for answer in alone)


def test_comments_are_between_events(small):
    """Reads the raw stream, because the client in the test above skips comments."""

    def read(number):
        body = asked(number)
        body.update(body.pop("extra_body"), stream=True)
        request = urllib.request.Request(f"{small.url}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.read().decode().split("\n\n")

    with concurrent.futures.ThreadPoolExecutor(NUM_REQUESTS) as pool:
        streams = list(pool.map(read, range(NUM_REQUESTS)))
    paused = 0
    for events in streams:
        comments = [event for event in events if event.startswith(":")]
        assert all(comment == ": paused" for comment in comments[::2])
        assert all(comment.startswith(": resumed after ") for comment in comments[1::2])
        *_, usage, done, end = events
        assert (done, end) == ("data: [DONE]", "")
        kv = json.loads(usage.removeprefix("data: "))["usage"]["kv"]
        # A request may be preempted again before its KV is back. That belongs to the same pause.
        assert len(comments) % 2 == 0 and len(comments) <= 2 * kv["preemptions"]
        assert bool(comments) == bool(kv["preemptions"])
        paused += len(comments)
    assert paused > 0


def test_keys_share_no_prefix():
    def cached(server, key, prompt):
        with server.client(api_key=key) as client:
            model = client.models.list().data[0].id
            answer = client.completions.create(
                model=model, prompt=prompt, max_tokens=1, extra_body={"include_kv_usage": True}
            )
        kv = answer.usage.model_extra["kv"]
        assert kv["cached_tokens"]["device"] == answer.usage.prompt_tokens_details.cached_tokens
        return kv["cached_tokens"]["device"]

    prompt = [7] * 40
    keys = ("--api-key", "first", "--api-key", "second")
    with serving(*keys) as server:
        assert [cached(server, key, prompt) for key in ("first", "second", "first", "second")] == [0, 0, 32, 32]
    with serving(*keys, "--set", "server.cache_isolation=shared") as server:
        assert [cached(server, key, prompt) for key in ("first", "second")] == [0, 32]
