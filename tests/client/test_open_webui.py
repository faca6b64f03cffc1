"""Makes the calls that Open WebUI's backend makes, and reads the answers as it does.

Its package is too large to install here. The calls are those of version 0.12.4, folder backend/open_webui; each test
names the file. Bodies have what is left of the browser's when the backend has taken out its own fields.
"""

import datetime
import json

import httpx
import pytest

from conftest import serving_alike

KEY = "s3cret"
ORIGIN = "http://webui.example:8080"
# As routers/*.py and utils/headers.py set them, with ENABLE_FORWARD_USER_INFO_HEADERS.
HEADERS = {
    "Content-Type": "application/json",
    "Authorization": f"Bearer {KEY}",
    "X-OpenWebUI-User-Name": "Ada%20L",
    "X-OpenWebUI-User-Id": "8d2f",
    "X-OpenWebUI-User-Email": "ada@example.org",
    "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "c-1",
}
QUESTION = {"role": "user", "content": "What is Pagetide?"}
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def url():
    # The origin is that of a browser which connects directly. By default none is allowed.
    flags = ["--tool-call-parser", "llama3_json", "--set", f'server.cors_allowed_origins=["{ORIGIN}"]']
    with serving_alike("--api-key", KEY, *flags) as server:
        yield server.url


@pytest.fixture(scope="module")
def webui(url):
    with httpx.Client(base_url=url, headers=HEADERS, timeout=300) as client:
        yield client


def post(webui, path, body):
    answer = webui.post(path, content=json.dumps(body))
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(webui, path, body):
    """The chunks of a stream, by lines as utils/middleware.py reads them."""
    with webui.stream("POST", path, content=json.dumps(body)) as answer:
        assert answer.status_code == 200 and "text/event-stream" in answer.headers["content-type"]
        lines = [line for line in answer.iter_lines() if line.startswith("data:")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data:")) for line in lines[:-1]]


def gather(chunks):
    """Text, calls, how the answer ends and its usage, as utils/middleware.py takes them from chunks."""
    text, calls, ending, usage = "", [], None, {}
    for chunk in chunks:
        counts = chunk.get("usage", {}) or {}
        counts.update(chunk.get("timings", {}))
        usage.update(counts)
        if not chunk.get("choices", []):
            assert not chunk.get("error")
            continue
        ending = chunk["choices"][0].get("finish_reason") or ending
        delta = chunk["choices"][0].get("delta", {})
        text += delta.get("content") or ""
        for part in delta.get("tool_calls") or []:
            known = next((call for call in calls if call["index"] == part["index"]), None)
            if known is None:
                calls.append(part)
            else:
                known["function"]["arguments"] += part["function"].get("arguments") or ""
    return text, calls, ending, usage


def test_a_connection_is_verified(url, webui):
    """routers/openai.py: /verify, and the list of models; without a key there is no header."""
    [model] = webui.get("/v1/models").json()["data"]
    assert model.get("name", model["id"]) == model["id"] == "demo"
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        refused = httpx.get(f"{url}/v1/models", headers=headers)
        assert refused.status_code == 401 and refused.json()["error"]["message"]
    # The provider llama.cpp asks for its models here, and takes one without a state as loaded.
    assert webui.get("/models").json()["data"][0].get("status", {}) in ({}, {"value": "loaded"})


def test_a_browser_connects_directly(url):
    """The frontend's direct connections ask from the page of Open WebUI: src/lib/apis/openai/index.ts."""
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    for path in ("/v1/models", "/v1/chat/completions"):
        allowed = httpx.options(url + path, headers={"Origin": ORIGIN, **asked})
        assert allowed.status_code in (200, 204)
        assert allowed.headers["access-control-allow-origin"] == ORIGIN
        names = allowed.headers["access-control-allow-headers"].lower()
        assert names == "*" or {"authorization", "content-type"} <= {name.strip() for name in names.split(",")}
    models = httpx.get(f"{url}/v1/models", headers={"Origin": ORIGIN, "Authorization": f"Bearer {KEY}"})
    assert models.headers["access-control-allow-origin"] == ORIGIN


def test_a_chat_is_streamed(webui):
    """routers/openai.py: /chat/completions, with the parameters that utils/payload.py adds."""
    params = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.0, "frequency_penalty": 0.1, "presence_penalty": 0.1}
    params |= {"seed": 42, "stop": ["\n\n\n"], "max_tokens": 40, "logit_bias": {"5": -100}, "top_k": 40}
    system = {"role": "system", "content": "User Context:\n\nYou are brief."}
    body = {"model": "demo", "messages": [system, QUESTION], "stream": True, **params}
    # Filters of users add fields of their own, and older versions left theirs in.
    own = {
        "session_id": "s",
        "chat_id": "c-1",
        "id": "m",
        "background_tasks": {"title_generation": True},
        "features": {},
    }
    for more in ({"stream_options": {"include_usage": True}}, own):
        text, calls, ending, usage = gather(chunks(webui, "/v1/chat/completions", body | more))
        assert text.strip() and not calls and ending in ("stop", "length")
    parts = [{"type": "text", "text": "What is this?"}]
    whole = post(
        webui, "/v1/chat/completions", body | {"stream": False, "messages": [{"role": "user", "content": parts}]}
    )
    assert whole["choices"][0]["message"]["content"] and whole["usage"]["completion_tokens"] > 0
    _, _, _, usage = gather(chunks(webui, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}}))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_an_answer_is_continued(webui):
    """routers/openai.py: /chat/completions when the user clicks Continue, with the provider llama.cpp."""
    body = {"model": "demo", "temperature": 0, "max_tokens": 60, "stream": True}
    text, *_ = gather(chunks(webui, "/v1/chat/completions", body | {"messages": [QUESTION]}))
    begun = text[: text.index(" ", 20)]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    messages = [QUESTION, {"role": "assistant", "content": begun}]
    rest, *_ = gather(chunks(webui, "/v1/chat/completions", body | more | {"messages": messages}))
    assert begun + rest == text


@pytest.mark.parametrize("task", ["title", "follow-ups", "tags", "queries", "emoji"])
def test_tasks_are_answered_whole(webui, task):
    """routers/tasks.py: a prompt without a stream, of which stream_options are taken out too."""
    prompt = f'### Task:\nGenerate {task} for the chat.\n### Output:\nJSON: {{ "{task}": "" }}\n'
    prompt += "<chat_history>\nhi\n</chat_history>"
    answer = post(
        webui,
        "/v1/chat/completions",
        {
            "model": "demo",
            "messages": [{"role": "user", "content": prompt}],
            "stream": False,
            "max_tokens": 50,
        },
    )
    assert isinstance(answer["choices"][0]["message"]["content"], str)
    assert answer["choices"][0]["message"].get("reasoning_content", "") in ("", None)


def test_tools_are_called_natively(webui):
    """utils/middleware.py: calls are gathered from the stream, and the conversation goes on with their results."""
    tools = [{"type": "function", "function": WEATHER}]
    body = {"model": "demo", "stream": True, "tools": tools, "max_tokens": 200}
    # The choice is a custom parameter of the model, because the demo model calls nothing by itself.
    demand = {"tool_choice": "required", "parallel_tool_calls": False}
    _, [call], ending, _ = gather(chunks(webui, "/v1/chat/completions", body | demand | {"messages": [QUESTION]}))
    assert ending == "tool_calls" and call["id"] and call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
    answered = [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
    ]
    text, calls, ending, _ = gather(chunks(webui, "/v1/chat/completions", body | {"messages": answered}))
    assert text.strip() and not calls and ending in ("stop", "length")


def test_the_responses_api(webui):
    """routers/openai.py: convert_to_responses_payload and convert_responses_result."""
    message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION["content"]}]}
    tools = [{"type": "function", **WEATHER, "strict": False}]
    body = {"model": "demo", "input": [message], "instructions": "You are brief.", "max_output_tokens": 100}
    whole = post(webui, "/v1/responses", body)
    [item] = whole["output"]
    assert "".join(part["text"] for part in item["content"] if part["type"] == "output_text")
    demand = {"tools": tools, "tool_choice": {"type": "function", "name": "weather"}}
    [call] = post(webui, "/v1/responses", body | demand)["output"]
    assert (call["type"], call["name"]) == ("function_call", "weather") and call["call_id"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    called = {key: call[key] for key in ("type", "call_id", "name", "arguments")}
    with webui.stream(
        "POST", "/v1/responses", json=body | {"stream": True, "input": [message, called, result]}
    ) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    final = events[-1]["response"]
    assert events[-1]["type"] == "response.completed" and final["usage"]["output_tokens"] > 0
    assert deltas == final["output"][0]["content"][0]["text"] != ""


def test_documents_are_embedded_and_ranked(webui):
    """retrieval/utils.py: generate_openai_batch_embeddings; retrieval/models/external.py."""
    texts = ["search_document: a tide", "search_document: a page"]
    embedded = post(webui, "/v1/embeddings", {"input": texts, "model": "demo", "prefix": "search_document: "})["data"]
    assert [one["index"] for one in embedded] == [0, 1] and len({len(one["embedding"]) for one in embedded}) == 1
    body = {"model": "demo", "query": "memory", "documents": ["a page of memory", "a boat"], "top_n": 2}
    ranked = sorted(post(webui, "/v1/rerank", body)["results"], key=lambda result: result["index"])
    assert [result["index"] for result in ranked] == [0, 1]
    assert all(isinstance(result["relevance_score"], float) for result in ranked)


def test_anthropics_tokens_are_counted(webui):
    """routers/openai.py: count_anthropic_tokens, with the key as a bearer."""
    body = {"model": "demo", "messages": [QUESTION], "system": [{"type": "text", "text": "Brief."}]}
    assert post(webui, "/v1/messages/count_tokens", body)["input_tokens"] > 0


def test_an_error_is_json_without_a_stream(webui):
    """routers/openai.py shows the error of an answer that is no stream of events."""
    for wrong in ({"temperature": -1}, {"messages": []}, {"model": "other"}):
        body = {"model": "demo", "messages": [QUESTION], "stream": True} | wrong
        refused = webui.post("/v1/chat/completions", content=json.dumps(body))
        assert refused.status_code in (400, 404) and "text/event-stream" not in refused.headers["content-type"]
        assert refused.json()["error"]["message"]


def lines_of(webui, path, body):
    """The lines of a stream of Ollama's, which routers/ollama.py passes on."""
    with webui.stream("POST", path, content=json.dumps(body)) as answer:
        assert answer.status_code == 200, answer.read()
        return [json.loads(line) for line in answer.iter_lines()]


def test_ollamas_models(webui):
    """routers/ollama.py: /verify, get_all_models with the times of /api/ps, and /api/show."""
    assert all(number.isdigit() for number in webui.get("/api/version").json()["version"].split("."))
    [tag] = webui.get("/api/tags").json()["models"]
    loaded = {model["model"]: model["expires_at"] for model in webui.get("/api/ps").json()["models"]}
    assert tag["model"] == tag["name"] == "demo:latest" and tag["size"] > 0
    assert int(datetime.datetime.fromisoformat(loaded[tag["model"]]).timestamp()) > 0
    shown = post(webui, "/api/show", {"name": tag["model"], "model": tag["model"]})
    assert "completion" in shown["capabilities"] and shown["details"]["family"]


def test_ollamas_chat_is_streamed(webui):
    """utils/payload.py: convert_payload_openai_to_ollama; utils/response.py reads the lines."""
    options = {"temperature": 0, "num_predict": 30, "num_ctx": 2048, "num_keep": 24, "repeat_last_n": 64, "mirostat": 0}
    options |= {"use_mmap": True, "num_thread": 4, "stop": ["\n\n\n"], "reasoning_effort": "low"}
    body = {"model": "demo:latest", "messages": [QUESTION], "stream": True, "options": options, "keep_alive": "5m"}
    *parts, last = lines_of(webui, "/api/chat", body)
    assert len(parts) > 4 and not any(part["done"] for part in parts)
    assert last["done"] and last["done_reason"] in ("stop", "length")
    # The speeds that it shows.
    assert (
        last["eval_count"] / last["eval_duration"] > 0 and last["prompt_eval_count"] / last["prompt_eval_duration"] > 0
    )
    whole = post(webui, "/api/chat", body | {"stream": False})
    assert whole["message"]["content"] == "".join(part["message"]["content"] for part in [*parts, last])


def test_ollamas_tools_and_formats(webui):
    """utils/payload.py: calls and results in the conversation; utils/response.py takes a call's id and index."""
    schema = {
        "type": "object",
        "properties": {"size": {"enum": [1, 2]}},
        "required": ["size"],
        "additionalProperties": False,
    }
    formed = post(webui, "/api/chat", {"model": "demo", "messages": [QUESTION], "stream": False, "format": schema})
    assert json.loads(formed["message"]["content"])["size"] in (1, 2)
    # The form of a call in this model's format. Ollama's API cannot demand one.
    properties = {"name": {"const": "weather"}, "parameters": WEATHER["parameters"]}
    form = {
        "type": "object",
        "properties": properties,
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": WEATHER}]
    body = {"model": "demo", "stream": True, "tools": tools, "options": {"num_predict": 100}}
    lines = lines_of(webui, "/api/chat", body | {"messages": [QUESTION], "format": form})
    [call] = [call for line in lines for call in line["message"].get("tool_calls") or []]
    index = call.get("index", call["function"].get("index", 0))
    assert (index, call["function"]["name"]) == (0, "weather") and call["id"]
    sent = {
        "index": index,
        "id": call["id"],
        "function": {"name": "weather", "arguments": call["function"]["arguments"]},
    }
    answered = [
        QUESTION,
        {"role": "assistant", "tool_calls": [sent], "content": ""},
        {"role": "tool", "content": "sunny", "tool_call_id": call["id"]},
    ]
    lines = lines_of(webui, "/api/chat", body | {"messages": answered})
    assert "".join(line["message"]["content"] for line in lines).strip() and lines[-1]["done"]


def test_ollamas_other_calls(webui):
    """routers/ollama.py: /api/generate, /api/embed and unload; retrieval/utils.py: generate_ollama_batch_embeddings."""
    lines = lines_of(
        webui, "/api/generate", {"model": "demo", "prompt": "Paging is", "stream": True, "options": {"num_predict": 9}}
    )
    assert "".join(line["response"] for line in lines) and lines[-1]["done"]
    # The model stays loaded, and the answer says so.
    unloaded = post(webui, "/api/generate", {"model": "demo:latest", "keep_alive": 0, "prompt": ""} | {"stream": False})
    assert unloaded["done"] and unloaded["done_reason"] == "load"
    [unloaded] = lines_of(webui, "/api/generate", {"model": "demo:latest", "keep_alive": 0, "prompt": ""})
    assert unloaded["done"]
    embedded = post(webui, "/api/embed", {"input": ["a tide", "a page"], "model": "demo", "truncate": True})
    assert len(embedded["embeddings"]) == 2


def test_ollamas_models_are_not_managed(webui):
    """routers/ollama.py: the error of pull, create, copy, push and delete is a text beside the status."""
    for method, path in [
        ("POST", "pull"),
        ("POST", "create"),
        ("POST", "copy"),
        ("POST", "push"),
        ("DELETE", "delete"),
    ]:
        body = {"model": "llama3", "name": "llama3", "insecure": True, "stream": True}
        refused = webui.request(method, f"/api/{path}", content=json.dumps(body))
        assert refused.status_code == 501 and isinstance(refused.json()["error"], str), path
    refused = webui.post("/api/chat", content=json.dumps({"model": "llama3", "messages": [QUESTION]}))
    assert refused.status_code == 404 and "llama3" in refused.json()["error"]
