"""llama.cpp's API as its programs use it: plain HTTP, and lines of events read as they come."""

import json
import urllib.error
import urllib.request

import pytest
from conftest import serving

STORY = "A lighthouse"


def stream(server, body: dict) -> list[dict]:
    """The events of a streamed completion, in order."""
    data = json.dumps({**body, "stream": True}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{server.url}/completion", data), timeout=300) as answer:
        lines = [line.decode().rstrip("\n") for line in answer]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


def refusal(server, path: str, body: dict) -> dict:
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.post(path, body)
    return json.load(refused.value)["error"]


def test_a_stream_says_what_the_whole_completion_says(server):
    body = {"prompt": STORY, "n_predict": 24, "temperature": 0, "n_probs": 3}
    whole = server.post("/completion", {**body, "return_tokens": True})
    parts = stream(server, body)
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    ids = [token["id"] for part in parts[:-1] for token in part["completion_probabilities"]]
    assert ids == [token["id"] for token in whole["completion_probabilities"]] == whole["tokens"]
    for name in ("stop_type", "truncated", "tokens_predicted", "tokens_evaluated", "prompt", "has_new_line"):
        assert parts[-1][name] == whole[name], name
    assert whole["timings"]["predicted_n"] == whole["tokens_predicted"] == len(whole["tokens"])


def test_a_prompt_is_the_same_as_text_and_as_tokens(server):
    tokens = server.post("/tokenize", {"content": STORY, "add_special": True})["tokens"]
    body = {"n_predict": 8, "temperature": 0, "cache_prompt": False}
    contents = {
        server.post("/completion", {**body, "prompt": prompt})["content"]
        for prompt in (STORY, tokens, [*tokens[:2], server.post("/detokenize", {"tokens": tokens[2:]})["content"]])
    }
    assert len(contents) == 1
    several = server.post("/completion", {**body, "prompt": [STORY, tokens]})
    assert [one["index"] for one in several] == [0, 1] and {one["content"] for one in several} == contents


def test_a_seed_of_an_answer_gives_it_again(server):
    body = {"prompt": STORY, "n_predict": 16, "temperature": 1.5}
    first = server.post("/completion", body)
    again = server.post("/completion", {**body, "seed": first["generation_settings"]["seed"]})
    assert again["content"] == first["content"]


def test_the_text_follows_a_schema_or_a_grammar(server):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    answer = server.post("/completion", {"prompt": STORY, "json_schema": schema, "n_predict": 64})
    assert json.loads(answer["content"])["n"] in (1, 2)
    answer = server.post("/completion", {"prompt": STORY, "grammar": 'root ::= "yes" | "no"', "n_predict": 8})
    assert answer["content"] in ("yes", "no")
    assert answer["generation_settings"]["grammar"].startswith("root")


def test_a_chat_by_its_template_is_the_chat(server, client, model):
    messages = [{"role": "user", "content": "What is Pagetide?"}]
    prompt = server.post("/apply-template", {"messages": messages})["prompt"]
    completion = server.post("/completion", {"prompt": prompt, "n_predict": 16, "temperature": 0})
    chat = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=16)
    assert completion["content"] == chat.choices[0].message.content


def test_the_properties_describe_the_server(server):
    props = json.loads(server.get("/props"))
    slots = json.loads(server.get("/slots"))
    assert props["total_slots"] == len(slots) and props["chat_template"]
    assert slots[0]["n_ctx"] == props["default_generation_settings"]["n_ctx"]


def test_what_is_not_served_is_refused_in_llama_cpps_words(server):
    error = refusal(server, "/infill", {"input_prefix": "a", "input_suffix": "b"})
    assert (error["code"], error["type"]) == (501, "not_supported_error")
    error = refusal(server, "/completion", {"prompt": STORY, "n_predict": -5})
    assert (error["code"], error["type"]) == (400, "invalid_request_error") and "n_predict" in error["message"]
    error = refusal(server, "/completion", {"prompt": "a " * 10_000})
    assert error["type"] == "exceed_context_size_error"


def test_the_dialect_has_llama_cpps_shapes_and_metrics():
    flags = ("--set", "server.dialect=llama.cpp", "--set", "metrics.llama_cpp_names=true")
    # Of a long prompt, a step computes 64 tokens.
    with serving(*flags, "--set", "scheduler.max_num_batched_tokens=64", "--max-num-seqs", "8") as server:
        whole = server.post("/completions", {"prompt": STORY, "n_predict": 4})
        assert whole["stop"] is True and "choices" not in whole
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=300) as page:
            # Some clients look for it by its exact letters.
            assert int(dict(page.headers.items())["Process-Start-Time-Unix"]) > 0
            lines = page.read().decode().splitlines()
        assert f"llamacpp:prompt_tokens_total {whole['timings']['prompt_n']}" in lines
        assert f"llamacpp:tokens_predicted_total {whole['timings']['predicted_n']}" in lines
        body = {"prompt": [7] * 150, "n_predict": 1, "return_progress": True}
        told = [part["prompt_progress"] for part in stream(server, body) if "prompt_progress" in part]
        assert [progress["processed"] for progress in told] == [0, 64, 128, 150]
        again = [part["prompt_progress"] for part in stream(server, body) if "prompt_progress" in part]
        assert again[0]["cache"] == again[0]["processed"] > 64 and again[-1]["processed"] == again[-1]["total"] == 150


def test_probabilities_of_the_draw_add_up(server):
    body = {"prompt": STORY, "n_predict": 4, "seed": 5, "n_probs": 20, "post_sampling_probs": True, "top_k": 5}
    answer = server.post("/completion", body)
    for token in answer["completion_probabilities"]:
        probabilities = {other["id"]: other["prob"] for other in token["top_probs"]}
        assert 0 < len(probabilities) <= 5 and sum(probabilities.values()) == pytest.approx(1)
        assert token["prob"] == probabilities[token["id"]] > 0
    plain = server.post("/completion", {**body, "n_probs": 0, "return_tokens": True})
    assert plain["tokens"] == [token["id"] for token in answer["completion_probabilities"]]
