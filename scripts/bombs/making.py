"""What bombs are made of: their list, and functions that make bodies."""

import dataclasses
import json
import typing

CHAT, COMPLETION, EMBEDDING = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "Hi"}]


@dataclasses.dataclass(frozen=True)
class Bomb:
    name: str
    path: str
    make: typing.Callable[[int], bytes]
    headers: dict = dataclasses.field(default_factory=dict)
    # Tries what others have tried, and is left out where there is little time.
    long: bool = False


BOMBS: list[Bomb] = []


def bomb(name: str, path: str, make, long=False, **headers):
    """`make` gives the body as bytes, or as an object."""

    def body(size: int) -> bytes:
        made = make(size)
        return made if isinstance(made, bytes) else json.dumps(made).encode()

    assert all(other.name != name for other in BOMBS), name
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    BOMBS.append(Bomb(name, path, body, headers, long))


def fill(size: int, before: str, item: str, after: str, between: str = ",") -> bytes:
    """As many items as `size` bytes have room for."""
    count = max((size - len(before) - len(after)) // len((item + between).encode()), 1)
    return (before + between.join([item] * count) + after).encode()


def numbered(count: int, item) -> dict:
    return {f"{index}": item(index) for index in range(count)}


def chat(**fields) -> dict:
    return {"messages": HI, "max_tokens": 4, **fields}


def schema(body, **fields) -> dict:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": body}}, **fields)


def guided(**fields) -> dict:
    return chat(structured_outputs=fields)


def raw_schema(text: str) -> bytes:
    """For numbers that Python would write in another way, and depths that it would not write at all."""
    return json.dumps(schema("HERE")).replace('"HERE"', text).encode()


def raw(before: dict, text: str) -> bytes:
    return json.dumps(before).replace('"HERE"', text).encode()


def nested(depth: int, inner, wrap):
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def tools(parameters, **fields) -> dict:
    function = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return chat(tools=[function], tool_choice="required", **fields)
