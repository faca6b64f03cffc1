"""Requests that cost a server far more than they cost their client.

Each is a name, a path, and a function that makes the body; where it can be of any size, its argument is the size of the
largest body that the server takes.
"""

import dataclasses
import gzip
import json
import typing
import zlib

CHAT, COMPLETION, EMBEDDING = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "Hi"}]


@dataclasses.dataclass(frozen=True)
class Bomb:
    name: str
    path: str
    make: typing.Callable[[int], bytes]
    headers: dict = dataclasses.field(default_factory=dict)


BOMBS: list[Bomb] = []


def bomb(name: str, path: str, make, **headers):
    """`make` gives the body as bytes, or as an object."""

    def body(size: int) -> bytes:
        made = make(size)
        return made if isinstance(made, bytes) else json.dumps(made).encode()

    assert all(other.name != name for other in BOMBS), name
    BOMBS.append(Bomb(name, path, body, {name.replace("_", "-"): value for name, value in headers.items()}))


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


LEAST = -(2**63)
SPACES_CHAT = ('{"max_tokens":4,"messages":[{"role":"user","content":"', " ", '"}]}', "")

# Numbers of which a compiler makes expressions.
bomb("const of the least integer", CHAT, lambda _: schema({"const": LEAST}))
bomb("enum of the least integer, nested", CHAT,
     lambda _: schema({"type": "object", "properties": {"a": {"items": {"enum": [1, LEAST]}}}, "required": ["a"]}))
bomb("const that rounds to the least integer", CHAT, lambda _: raw_schema('{"const":-9223372036854775808.0}'))
bomb("bounds far below every integer", CHAT,
     lambda _: schema({"type": "integer", "minimum": -1e30, "maximum": -1e29}))
bomb("bounds at the least integer", CHAT, lambda _: schema({"type": "integer", "minimum": LEAST, "maximum": LEAST + 1}))
bomb("exclusive bounds at the ends", CHAT,
     lambda _: schema({"type": "integer", "exclusiveMinimum": LEAST, "exclusiveMaximum": 2**63 - 1}))
bomb("numbers at the ends of a float", CHAT, lambda _: schema({"anyOf": [
    {"const": 1e308}, {"const": -1e308}, {"const": 5e-324}, {"const": 2**63}, {"const": 2**64}, {"const": LEAST - 1},
    {"type": "number", "minimum": -1e308, "maximum": 1e308}, {"type": "number", "minimum": 5e-324, "maximum": 1e-300},
    {"type": "integer", "minimum": 1e308}, {"enum": [-1e19, 1e19]}]}))
bomb("minus zero", CHAT, lambda _: raw_schema('{"type":"number","minimum":-0.0,"maximum":-0.0}'))
bomb("multiples of almost nothing", CHAT, lambda _: schema({"type": "number", "multipleOf": 5e-324, "maximum": 1e308}))
bomb("multiples that share no divisor", CHAT, lambda _: schema({"allOf": [
    {"type": "integer", "multipleOf": prime} for prime in (999983, 999979, 999961, 999959, 999953)]}))
bomb("a const of 400 digits", CHAT, lambda _: raw_schema('{"const":1' + "0" * 400 + "}"))
bomb("a bound of a million digits", CHAT, lambda _: raw_schema('{"type":"integer","minimum":' + "9" * 10**6 + "}"))
bomb("least integer, Anthropic, forced tool", MESSAGES, lambda _: {
    "messages": HI, "max_tokens": 4, "tool_choice": {"type": "tool", "name": "f"},
    "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {"a": {"const": LEAST}}}}]})
bomb("least integer, responses", RESPONSES, lambda _: {
    "input": "Hi", "max_output_tokens": 4,
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {
        "type": "object", "properties": {"a": {"const": LEAST}}, "required": ["a"]}}}})
bomb("least integer, required tool", CHAT, lambda _: tools({"properties": {"a": {"enum": [LEAST]}}}))
bomb("least integer, schema as text", COMPLETION,
     lambda _: {"prompt": "Hi", "guided_json": json.dumps({"const": LEAST})})
bomb("least integer, Lark's %json", CHAT, lambda _: guided(grammar='start: %json {"const": -9223372036854775808}'))
bomb("least integer, Lark's %json, with escapes", CHAT,
     lambda _: guided(grammar='start: %json {"\\u0063onst": -9223372036854775808.0e0}'))

# Schemas that grow when they are compiled.
bomb("20 times 20 options, eight deep", CHAT, lambda _: schema({
    "$defs": {str(depth): {"anyOf": [{"$ref": f"#/$defs/{depth + 1}"}] * 20} for depth in range(8)} | {"8": {"type": "integer"}},
    "oneOf": [{"$ref": "#/$defs/0"}, {"type": "string"}]}))
bomb("20 options of objects, four deep", CHAT, lambda _: schema({
    "$defs": {str(depth): {"type": "object", "properties": {"a": {"anyOf": [{"$ref": f"#/$defs/{depth + 1}"}] * 20}},
                           "required": ["a"]} for depth in range(4)} | {"4": {"type": "integer"}},
    "oneOf": [{"$ref": "#/$defs/0"}, nested(4, {"type": "string"}, lambda inner: {
        "type": "object", "properties": {"a": inner}, "required": ["a"]})]}))
bomb("20 options that are written out, three deep", CHAT, lambda _: schema(nested(
    3, {"type": "integer"}, lambda inner: {"oneOf": [inner] * 20 + [{"type": "string"}]})))
bomb("30 patterns that all hold", CHAT,
     lambda _: schema({"type": "string", "allOf": [{"pattern": "^(.*a.{%d})*$" % i} for i in range(1, 31)]}))
bomb("references that double", CHAT, lambda _: schema({
    "$defs": numbered(40, lambda i: {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2}) | {"40": {"type": "integer"}},
    "$ref": "#/$defs/0"}))
bomb("references in a circle", CHAT, lambda _: schema({
    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}},
    "$ref": "#/$defs/a"}))
bomb("thousands of oneOf", CHAT, lambda _: schema({"type": "object", "properties": numbered(
    1900, lambda i: {"oneOf": [{"type": "integer"}, {"type": "string"}, {"const": None}]})}))
bomb("options of thousands of properties", CHAT, lambda _: schema({"oneOf": [
    {"type": "object", "properties": {"kind": {"const": i}} | numbered(60, lambda _: {"type": "string"}),
     "required": ["kind"]} for i in range(250)]}))
bomb("a thousand million items", CHAT, lambda _: schema({"type": "array", "minItems": 10**9, "items": {"type": "null"}}))
bomb("a thousand million characters", CHAT, lambda _: schema({"type": "string", "minLength": 10**9}))
bomb("characters squared", CHAT, lambda _: schema(nested(
    4, {"type": "string", "maxLength": 60000}, lambda inner: {"type": "array", "maxItems": 60000, "items": inner})))
bomb("100,000 properties", CHAT, lambda _: schema({"properties": numbered(100_000, lambda _: True)}))
bomb("an enum of 500,000", CHAT, lambda _: schema({"enum": list(range(500_000))}))
bomb("a schema 100,000 deep", CHAT, lambda _: raw_schema('{"items":' * 100_000 + "true" + "}" * 100_000))
bomb("tools 100,000 deep", CHAT, lambda _: raw(tools("HERE"), '{"items":' * 100_000 + "true" + "}" * 100_000))

# Regular expressions and grammars.
bomb("a regex of counts", CHAT, lambda _: guided(regex="((a{1,1000}){1,1000}){1,1000}"))
bomb("a regex that looks back for ever", CHAT, lambda _: guided(regex="(.*a.{500})*(.*b.{499})*"))
bomb("a regex of letters of all languages", CHAT, lambda _: guided(regex=r"(\p{L}{1,900}\w{0,900}){1,900}"))
bomb("a regex 4,000 deep", CHAT, lambda _: guided(regex="(" * 4000 + "a" + ")" * 4000))
bomb("white space that looks back", CHAT, lambda _: guided(json={"type": "object"}, whitespace_pattern=r"(.*\s.{300})*"))
for sign in "?*+":
    bomb(f"GBNF with 60,000 {sign}", CHAT, lambda _, sign=sign: guided(grammar='root ::= "a"' + sign * 60_000))
bomb("GBNF that repeats a million times", CHAT, lambda _: guided(grammar='root ::= (("a"{1000}){1000}){1000}'))
bomb("GBNF 20,000 deep", CHAT, lambda _: guided(grammar="root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000))
bomb("GBNF of rules that double", CHAT, lambda _: guided(grammar="\n".join(
    ["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)), 'r60 ::= "a"'])))
bomb("GBNF that can be read in every way", CHAT, lambda _: guided(grammar='root ::= root root | "a" | ""'))
bomb("a Lark terminal of 12,000 parts", CHAT,
     lambda _: guided(grammar="start: A\nA: " + " ".join(["/[ab]/"] * 12_000)))
bomb("a Lark terminal of 12,000 options", CHAT,
     lambda _: guided(grammar="start: A\nA: " + " | ".join(["/a/"] * 12_000)))
bomb("Lark terminals that double", CHAT, lambda _: guided(grammar="\n".join(
    ["start: A0", *(f"A{i}: A{i + 1} A{i + 1}" for i in range(60)), "A60: /a/"]).replace("A", "TT")))
bomb("Lark with patterns that all hold", CHAT, lambda _: guided(
    grammar="start: A\nA: " + " & ".join(f"/(.*a.{{{i}}})*/" for i in range(1, 31))))
bomb("Lark's %regex of substrings", CHAT, lambda _: guided(
    grammar='start: A\nA: %regex {"substring_chars": "' + "ab" * 20_000 + '"}'))
bomb("Lark 20,000 deep", CHAT, lambda _: guided(grammar="start: " + "(" * 20_000 + '"a"' + ")" * 20_000))
bomb("100,000 choices", CHAT, lambda _: guided(choice=[f"choice {i}" for i in range(100_000)]))
bomb("choices of a megabyte", CHAT, lambda size: guided(choice=["ab" * (size // 20), "ba" * (size // 20)]))

# What costs with each token.
bomb("masks of an expression that looks back", CHAT,
     lambda _: guided(regex="(.*a.{500})*(.*b.{499})*") | {"max_tokens": 100})
bomb("masks of a grammar that can be read in every way", CHAT,
     lambda _: guided(grammar='root ::= root root | [a-z ] | ""') | {"max_tokens": 100})
bomb("masks of many options", CHAT, lambda _: guided(choice=[f"{i:03} of many" * 4 for i in range(900)]) | {"n": 16})
bomb("100 streams in one, with log-probabilities", CHAT,
     lambda _: chat(n=100, max_tokens=30, logprobs=True, top_logprobs=20, stream=True))
bomb("log-probabilities of a long prompt", COMPLETION,
     lambda _: {"prompt": [7] * 2000, "max_tokens": 4, "prompt_logprobs": 20, "echo": True, "logprobs": 20, "n": 8})
bomb("beams as wide and long as may be", COMPLETION,
     lambda _: {"prompt": "Hi", "max_tokens": 200, "use_beam_search": True, "n": 16, "ignore_eos": True})
bomb("stop strings that almost match, in a stream", COMPLETION, lambda size: {
    "prompt": [7] * 20, "max_tokens": 300, "stream": True, "ignore_eos": True, "stop": ["a" * (size // 40) + "b"] * 16})

# Bodies that are much larger in memory than as text, or long to go through.
bomb("embeddings of one-token prompts", EMBEDDING, lambda size: fill(size, '{"input":[', "[1]", "]}"))
bomb("embeddings of empty prompts", EMBEDDING, lambda size: fill(size, '{"input":[', "[]", "]}"))
bomb("embeddings of short texts", EMBEDDING, lambda size: fill(size, '{"input":[', '"a"', "]}"))
bomb("an embedding of millions of ids", EMBEDDING, lambda size: fill(size, '{"input":[', "1", "]}"))
bomb("a prompt of millions of ids", COMPLETION, lambda size: fill(size, '{"max_tokens":4,"prompt":[', "1", "]}"))
bomb("millions of prompts", COMPLETION, lambda size: fill(size, '{"max_tokens":4,"prompt":[', "[1]", "]}"))
bomb("a prompt whose last id is wrong", COMPLETION, lambda size: fill(size, '{"prompt":[', "1", ',"x"]}'))
bomb("an unknown field of lists", CHAT,
     lambda size: fill(size, json.dumps(chat())[:-1] + ',"unknown":[', "[[]]", "]}"))
bomb("an unknown field of objects", COMPLETION,
     lambda size: fill(size, '{"prompt":"Hi","max_tokens":4,"unknown":[', '{"a":{}}', "]}"))
bomb("millions of unknown fields", CHAT, lambda size: fill(size, json.dumps(chat())[:-1] + ",", '"u":0', "}"))
bomb("chat_template_kwargs of lists", CHAT,
     lambda size: fill(size, json.dumps(chat())[:-1] + ',"chat_template_kwargs":{"a":[', "[1]", "]}}"))
bomb("metadata of a million names", CHAT,
     lambda size: (json.dumps(chat())[:-1] + ',"metadata":{' + ",".join(
         f'"{i}":""' for i in range(size // 12)) + "}}").encode())
bomb("detokenize of millions", "/detokenize", lambda size: fill(size, '{"tokens":[', "1", "]}"))
bomb("tokenize of spaces", "/tokenize", lambda size: fill(size, '{"prompt":"', " ", '"}', ""))
bomb("tokenize of messages of spaces", "/tokenize",
     lambda size: fill(size, '{"messages":[{"role":"user","content":"', " ", '"}]}', ""))
bomb("count_tokens of spaces", COUNT,
     lambda size: fill(size, '{"messages":[{"role":"user","content":"', " ", '"}]}', ""))
bomb("a prompt of spaces", COMPLETION, lambda size: fill(size, '{"max_tokens":4,"prompt":"', " ", '"}', ""))
bomb("a prompt of one letter", COMPLETION, lambda size: fill(size, '{"max_tokens":4,"prompt":"', "a", '"}', ""))
bomb("a prompt of spaces that is cut", COMPLETION,
     lambda size: fill(size, '{"max_tokens":4,"truncate_prompt_tokens":-1,"prompt":"', " ", '"}', ""))
bomb("a message of spaces", CHAT, lambda size: fill(size, *SPACES_CHAT))
bomb("a message of smileys", CHAT, lambda size: fill(size, SPACES_CHAT[0], "\U0001f600", *SPACES_CHAT[2:]))
bomb("a message of escapes", CHAT, lambda size: fill(size, SPACES_CHAT[0], r"\u00e9", *SPACES_CHAT[2:]))
bomb("responses of spaces", RESPONSES, lambda size: fill(size, '{"max_output_tokens":4,"input":"', " ", '"}', ""))
bomb("messages of spaces, Anthropic", MESSAGES,
     lambda size: fill(size, '{"max_tokens":4,"messages":[{"role":"user","content":"', " ", '"}]}', ""))
bomb("an embedding of spaces", EMBEDDING, lambda size: fill(size, '{"input":"', " ", '"}', ""))
bomb("100,000 messages", CHAT, lambda _: chat(messages=HI * 100_000))
bomb("a million parts of a message", CHAT, lambda size: fill(
    size, '{"max_tokens":4,"messages":[{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}"))
bomb("a million items of responses", RESPONSES, lambda size: fill(
    size, '{"max_output_tokens":4,"input":[', '{"role":"user","content":"a"}', "]}"))
bomb("a million blocks, Anthropic", MESSAGES, lambda size: fill(
    size, '{"max_tokens":4,"messages":[{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}"))
bomb("10,000 tools", CHAT, lambda _: chat(tools=[
    {"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object"}}} for i in range(10_000)]))
bomb("10,000 tools, one required", CHAT, lambda _: chat(tool_choice="required", tools=[
    {"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object"}}} for i in range(10_000)]))
bomb("arguments of a call that are deep", CHAT, lambda size: chat(messages=HI + [
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":' + "[" * (size // 4)}}]},
    {"role": "tool", "tool_call_id": "1", "content": "x"}] + HI))
bomb("arguments of a call that are large", CHAT, lambda size: chat(messages=HI + [
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": fill(
            size * 3 // 4, '{"a":[', "[1]", "]}").decode()}}]},
    {"role": "tool", "tool_call_id": "1", "content": "x"}] + HI))

# Lists and numbers of parameters.
bomb("logit_bias of 100,000", CHAT, lambda _: chat(logit_bias={str(i): 1 for i in range(100_000)}))
bomb("stop of 100,000", CHAT, lambda _: chat(stop=[f"stop {i}" for i in range(100_000)]))
bomb("stop strings of a megabyte", CHAT,
     lambda size: chat(max_tokens=200, stop=["a" * (size // 20) + str(i) for i in range(16)]))
bomb("bad_words of 100,000", CHAT, lambda _: chat(bad_words=[f"word {i}" for i in range(100_000)]))
bomb("bad_words that are long", CHAT,
     lambda size: chat(bad_words=["ab" * (size // 600) + str(i) for i in range(256)]))
bomb("allowed_token_ids of millions", CHAT,
     lambda size: fill(size, json.dumps(chat())[:-1] + ',"allowed_token_ids":[', "1", "]}"))
bomb("stop_token_ids of millions", CHAT,
     lambda size: fill(size, json.dumps(chat())[:-1] + ',"stop_token_ids":[', "1", "]}"))
bomb("n of four thousand million", COMPLETION, lambda _: {"prompt": "Hi", "max_tokens": 4, "n": 2**32 - 1})
bomb("max_tokens beyond every integer", CHAT, lambda _: chat(max_tokens=2**64))
bomb("100 answers with log-probabilities", CHAT, lambda _: chat(n=100, max_tokens=60, logprobs=True, top_logprobs=20))
bomb("temperature of a million digits", CHAT, lambda _: raw(chat(temperature="HERE"), "0." + "1" * 10**6))
bomb("max_tokens of a million digits", CHAT, lambda _: raw(chat(max_tokens="HERE"), "1" * 10**6))
bomb("an exponent of a million digits", CHAT, lambda _: raw(chat(temperature="HERE"), "1e-" + "9" * 10**6))
bomb("a model's name of megabytes", CHAT, lambda size: chat(model="x" * (size - 1000)))
bomb("a role of megabytes", CHAT, lambda size: chat(messages=[{"role": "x" * (size - 1000), "content": "Hi"}]))
bomb("a field's name of megabytes", CHAT, lambda size: schema({"x" * (size - 1000): 1}))

# What is not JSON, or JSON that its reader may fall over.
for kind, opening in [("arrays", "["), ("objects", '{"a":')]:
    bomb(f"{kind} as deep as the body is long", CHAT, lambda size, opening=opening: fill(size, "", opening, "", ""))
    bomb(f"an unknown field of deep {kind}", CHAT,
         lambda size, opening=opening: fill(size, json.dumps(chat())[:-1] + ',"unknown":', opening, "", ""))
bomb("deep chat_template_kwargs", CHAT, lambda _: raw(
    chat(chat_template_kwargs={"a": "HERE"}), "[" * 100_000 + "]" * 100_000))
bomb("one name a million times", CHAT, lambda size: fill(size, "{", '"max_tokens":4', "}"))
bomb("messages a thousand times", CHAT, lambda _: fill(
    10**6, "{", '"messages":[{"role":"user","content":"Hi"}]', ',"max_tokens":4}'))
bomb("bytes that are no text", CHAT, lambda size: b'{"messages":[{"role":"user","content":"' + b"\xff\xc0\x80" * (size // 4) + b'"}]}')
bomb("JSON whose last byte is missing", COMPLETION, lambda size: fill(size, '{"prompt":"', "a", '"', ""))

# Bodies that are small on their way.
bomb("gzip of far more than a body may have", CHAT,
     lambda _: gzip.compress(b"[" + b"1," * (128 << 20)), Content_Encoding="gzip")
bomb("gzip of one-token prompts", EMBEDDING,
     lambda size: gzip.compress(fill(size, '{"input":[', "[1]", "]}")), Content_Encoding="gzip")
bomb("gzip of spaces", COMPLETION,
     lambda size: gzip.compress(fill(size, '{"max_tokens":4,"prompt":"', " ", '"}', "")), Content_Encoding="gzip")
bomb("deflate of an unknown field", CHAT, lambda size: zlib.compress(
    fill(size, json.dumps(chat())[:-1] + ',"unknown":[', "[[]]", "]}")), Content_Encoding="deflate")
bomb("gzip in gzip in gzip", CHAT, lambda _: gzip.compress(gzip.compress(gzip.compress(b" " * (256 << 20)))),
     Content_Encoding="gzip, gzip, gzip")
bomb("gzip of thousands of members", CHAT, lambda _: gzip.compress(b"") * 50_000, Content_Encoding="gzip")
