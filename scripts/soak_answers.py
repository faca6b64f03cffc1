"""Requests whose answers are always the same, and readers for the answers of every endpoint, whole or streamed."""

import json
import random

CHAT, COMPLETION, EMBEDDING = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
QUESTIONS = [
    "What is Pagetide?",
    "Tell me a story about a lighthouse.",
    "Hi",
    "How do I set the block size?",
    "What is a KV cache?",
    "Who wrote you?",
]


def known_requests(seed: int, count: int) -> list:
    """Paths and bodies; each has one right answer, whatever else the server does."""
    rng = random.Random(seed)
    makers = [
        greedy,
        greedy,
        sampled,
        several,
        best,
        beams,
        chat,
        chat,
        structured,
        structured,
        called,
        embedded,
        counted,
        responded,
        anthropic,
        scored,
    ]
    return [makers[number % len(makers)](rng) for number in range(count)]


def ids(rng, most=120) -> list:
    return [rng.randrange(10, 1000) for _ in range(rng.randrange(4, most))]


def asked(rng) -> list:
    return [{"role": "user", "content": rng.choice(QUESTIONS)}]


def greedy(rng):
    return COMPLETION, {"prompt": ids(rng), "max_tokens": rng.randrange(10, 160), "temperature": 0, "ignore_eos": True}


def sampled(rng):
    return COMPLETION, {"prompt": ids(rng), "max_tokens": rng.randrange(10, 120), "seed": rng.randrange(10**6)}


def several(rng):
    return COMPLETION, {"prompt": ids(rng), "max_tokens": rng.randrange(10, 60), "seed": rng.randrange(10**6), "n": 3}


def best(rng):
    return COMPLETION, {"prompt": ids(rng), "max_tokens": 30, "seed": rng.randrange(10**6), "n": 2, "best_of": 4}


def beams(rng):
    return COMPLETION, {"prompt": ids(rng, 60), "max_tokens": 24, "use_beam_search": True, "n": 3, "temperature": 0}


def scored(rng):
    return COMPLETION, {"prompt": ids(rng), "max_tokens": 20, "temperature": 0, "logprobs": 5, "echo": True}


def chat(rng):
    return CHAT, {"messages": asked(rng), "max_tokens": rng.randrange(10, 80), "temperature": 0}


def structured(rng):
    ways = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"structured_outputs": {"regex": "[a-z]{3,8}(, [a-z]{3,8}){1,4}"}},
        {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
        {"structured_outputs": {"grammar": 'root ::= "(" [0-9]{1,6} ("," [0-9]{1,6}){0,9} ")"'}},
    ]
    return CHAT, {"messages": asked(rng), "max_tokens": 80, "temperature": 0, **rng.choice(ways)}


def called(rng):
    tool = {"type": "function", "function": {"name": "note", "parameters": SCHEMA}}
    return CHAT, {
        "messages": asked(rng),
        "max_tokens": 90,
        "temperature": 0,
        "tools": [tool],
        "tool_choice": "required",
    }


def embedded(rng):
    return EMBEDDING, {"input": [ids(rng), ids(rng)]}


def counted(rng):
    return rng.choice(
        [
            ("/tokenize", {"prompt": " ".join(rng.choices(QUESTIONS, k=9))}),
            ("/detokenize", {"tokens": ids(rng)}),
            ("/v1/messages/count_tokens", {"messages": asked(rng)}),
        ]
    )


def responded(rng):
    return RESPONSES, {"input": rng.choice(QUESTIONS), "max_output_tokens": 40, "temperature": 0}


def anthropic(rng):
    return MESSAGES, {"messages": asked(rng), "max_tokens": 40, "temperature": 0}


def may_stream(path: str, body: dict) -> bool:
    generates = path in (CHAT, COMPLETION, RESPONSES, MESSAGES)
    return generates and not ({"use_beam_search", "best_of", "echo"} & body.keys())


def what_it_says(path: str, answer: dict):
    """The part of an answer that is always the same."""
    if path == COMPLETION:
        return [[choice["text"], choice["finish_reason"]] for choice in answer["choices"]]
    if path == CHAT:
        return [
            [choice["message"].get("content") or "", calls(choice["message"]), choice["finish_reason"]]
            for choice in answer["choices"]
        ]
    if path == RESPONSES:
        text = [part["text"] for item in answer["output"] for part in item.get("content", [])]
        return ["".join(text), answer["status"]]
    if path == MESSAGES:
        return ["".join(block.get("text", "") for block in answer["content"]), answer["stop_reason"]]
    if path == EMBEDDING:
        return [item["embedding"] for item in answer["data"]]
    return [answer.get(field) for field in ("tokens", "prompt", "input_tokens")]


def calls(message: dict) -> list:
    return [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or []]


class Stream:
    """Puts the events of a stream together to what the whole answer would have said."""

    def __init__(self, path: str):
        self.path = path
        self.choices, self.text, self.end = {}, "", None
        self.error, self.done = None, False

    def event(self, data: str):
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if event.get("error") or event.get("type") == "response.failed":
            self.error = event.get("error") or event["response"]["error"]
        elif self.path in (CHAT, COMPLETION):
            for choice in event["choices"]:
                self._add(choice)
        elif self.path == RESPONSES:
            self.text += event["delta"] if event["type"] == "response.output_text.delta" else ""
            if event["type"] in ("response.completed", "response.incomplete"):
                self.end, self.done = event["response"]["status"], True
        else:
            self.text += event["delta"].get("text", "") if event["type"] == "content_block_delta" else ""
            if event["type"] == "message_delta":
                self.end = event["delta"]["stop_reason"]
            self.done |= event["type"] == "message_stop"

    def _add(self, choice: dict):
        made = self.choices.setdefault(choice["index"], {"text": "", "calls": {}, "end": None})
        delta = choice.get("delta", choice)
        made["text"] += delta.get("content") or delta.get("text") or ""
        for call in delta.get("tool_calls") or []:
            name, arguments = made["calls"].setdefault(call["index"], [[], []])
            name.append(call["function"].get("name") or "")
            arguments.append(call["function"].get("arguments") or "")
        made["end"] = choice["finish_reason"] or made["end"]

    def says(self):
        if self.path in (RESPONSES, MESSAGES):
            return [self.text, self.end]
        chosen = [self.choices[index] for index in sorted(self.choices)]
        if self.path == COMPLETION:
            return [[choice["text"], choice["end"]] for choice in chosen]
        joined = [
            [["".join(part) for part in call] for _, call in sorted(choice["calls"].items())] for choice in chosen
        ]
        return [[choice["text"], called, choice["end"]] for choice, called in zip(chosen, joined)]
