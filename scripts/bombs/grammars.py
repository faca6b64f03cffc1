"""Schemas, expressions and grammars that grow when they are compiled, and what costs with each token."""

import json

from .making import CHAT, COMPLETION, HI, MESSAGES, RESPONSES
from .making import bomb, chat, guided, nested, numbered, raw, raw_schema, schema, tools

LEAST = -(2**63)

# Numbers of which a compiler makes expressions.
bomb("const of the least integer", CHAT, lambda _: schema({"const": LEAST}))
bomb(
    "enum of the least integer, nested",
    CHAT,
    lambda _: schema({"type": "object", "properties": {"a": {"items": {"enum": [1, LEAST]}}}, "required": ["a"]}),
)
bomb(
    "const that rounds to the least integer", CHAT, lambda _: raw_schema('{"const":-9223372036854775808.0}'), long=True
)
bomb("bounds far below every integer", CHAT, lambda _: schema({"type": "integer", "minimum": -1e30, "maximum": -1e29}))
bomb(
    "bounds at the least integer",
    CHAT,
    lambda _: schema({"type": "integer", "minimum": LEAST, "maximum": LEAST + 1}),
    long=True,
)
bomb(
    "exclusive bounds at the ends",
    CHAT,
    lambda _: schema({"type": "integer", "exclusiveMinimum": LEAST, "exclusiveMaximum": 2**63 - 1}),
    long=True,
)
bomb(
    "numbers at the ends of a float",
    CHAT,
    lambda _: schema(
        {
            "anyOf": [
                {"const": 1e308},
                {"const": -1e308},
                {"const": 5e-324},
                {"const": 2**63},
                {"const": 2**64},
                {"const": LEAST - 1},
                {"type": "number", "minimum": -1e308, "maximum": 1e308},
                {"type": "number", "minimum": 5e-324, "maximum": 1e-300},
                {"type": "integer", "minimum": 1e308},
                {"enum": [-1e19, 1e19]},
            ]
        }
    ),
)
bomb("minus zero", CHAT, lambda _: raw_schema('{"type":"number","minimum":-0.0,"maximum":-0.0}'), long=True)
bomb(
    "multiples of almost nothing",
    CHAT,
    lambda _: schema({"type": "number", "multipleOf": 5e-324, "maximum": 1e308}),
    long=True,
)
bomb(
    "multiples that share no divisor",
    CHAT,
    lambda _: schema(
        {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (999983, 999979, 999961, 999959, 999953)]}
    ),
)
bomb("a const of 400 digits", CHAT, lambda _: raw_schema('{"const":1' + "0" * 400 + "}"), long=True)
bomb("a bound of a million digits", CHAT, lambda _: raw_schema('{"type":"integer","minimum":' + "9" * 10**6 + "}"))
bomb(
    "least integer, Anthropic, forced tool",
    MESSAGES,
    lambda _: {
        "messages": HI,
        "max_tokens": 4,
        "tool_choice": {"type": "tool", "name": "f"},
        "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {"a": {"const": LEAST}}}}],
    },
)
bomb(
    "least integer, responses",
    RESPONSES,
    lambda _: {
        "input": "Hi",
        "max_output_tokens": 4,
        "text": {
            "format": {
                "type": "json_schema",
                "name": "x",
                "schema": {"type": "object", "properties": {"a": {"const": LEAST}}, "required": ["a"]},
            }
        },
    },
    long=True,
)
bomb("least integer, required tool", CHAT, lambda _: tools({"properties": {"a": {"enum": [LEAST]}}}), long=True)
bomb(
    "least integer, schema as text",
    COMPLETION,
    lambda _: {"prompt": "Hi", "guided_json": json.dumps({"const": LEAST})},
    long=True,
)
bomb(
    "least integer, Lark's %json",
    CHAT,
    lambda _: guided(grammar='start: %json {"const": -9223372036854775808}'),
    long=True,
)
bomb(
    "least integer, Lark's %json, with escapes",
    CHAT,
    lambda _: guided(grammar='start: %json {"\\u0063onst": -9223372036854775808.0e0}'),
)

# Schemas that grow when they are compiled.
bomb(
    "20 times 20 options, eight deep",
    CHAT,
    lambda _: schema(
        {
            "$defs": {str(depth): {"anyOf": [{"$ref": f"#/$defs/{depth + 1}"}] * 20} for depth in range(8)}
            | {"8": {"type": "integer"}},
            "oneOf": [{"$ref": "#/$defs/0"}, {"type": "string"}],
        }
    ),
)
bomb(
    "20 options of objects, four deep",
    CHAT,
    lambda _: schema(
        {
            "$defs": {
                str(depth): {
                    "type": "object",
                    "properties": {"a": {"anyOf": [{"$ref": f"#/$defs/{depth + 1}"}] * 20}},
                    "required": ["a"],
                }
                for depth in range(4)
            }
            | {"4": {"type": "integer"}},
            "oneOf": [
                {"$ref": "#/$defs/0"},
                nested(
                    4,
                    {"type": "string"},
                    lambda inner: {"type": "object", "properties": {"a": inner}, "required": ["a"]},
                ),
            ],
        }
    ),
    long=True,
)
bomb(
    "20 options that are written out, three deep",
    CHAT,
    lambda _: schema(nested(3, {"type": "integer"}, lambda inner: {"oneOf": [inner] * 20 + [{"type": "string"}]})),
    long=True,
)
bomb(
    "30 patterns that all hold",
    CHAT,
    lambda _: schema({"type": "string", "allOf": [{"pattern": "^(.*a.{%d})*$" % i} for i in range(1, 31)]}),
)
bomb(
    "references that double",
    CHAT,
    lambda _: schema(
        {
            "$defs": numbered(40, lambda i: {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2})
            | {"40": {"type": "integer"}},
            "$ref": "#/$defs/0",
        }
    ),
)
bomb(
    "references in a circle",
    CHAT,
    lambda _: schema(
        {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}},
            "$ref": "#/$defs/a",
        }
    ),
    long=True,
)
bomb(
    "thousands of oneOf",
    CHAT,
    lambda _: schema(
        {
            "type": "object",
            "properties": numbered(
                1900, lambda i: {"oneOf": [{"type": "integer"}, {"type": "string"}, {"const": None}]}
            ),
        }
    ),
)
bomb(
    "options of thousands of properties",
    CHAT,
    lambda _: schema(
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": i}} | numbered(60, lambda _: {"type": "string"}),
                    "required": ["kind"],
                }
                for i in range(250)
            ]
        }
    ),
)
bomb(
    "a thousand million items",
    CHAT,
    lambda _: schema({"type": "array", "minItems": 10**9, "items": {"type": "null"}}),
    long=True,
)
bomb("a thousand million characters", CHAT, lambda _: schema({"type": "string", "minLength": 10**9}), long=True)
bomb(
    "characters squared",
    CHAT,
    lambda _: schema(
        nested(
            4,
            {"type": "string", "maxLength": 60000},
            lambda inner: {"type": "array", "maxItems": 60000, "items": inner},
        )
    ),
    long=True,
)
bomb("100,000 properties", CHAT, lambda _: schema({"properties": numbered(100_000, lambda _: True)}), long=True)
bomb("an enum of 500,000", CHAT, lambda _: schema({"enum": list(range(500_000))}))
bomb("a schema 100,000 deep", CHAT, lambda _: raw_schema('{"items":' * 100_000 + "true" + "}" * 100_000))
bomb(
    "tools 100,000 deep", CHAT, lambda _: raw(tools("HERE"), '{"items":' * 100_000 + "true" + "}" * 100_000), long=True
)

# Regular expressions and grammars.
bomb("a regex of counts", CHAT, lambda _: guided(regex="((a{1,1000}){1,1000}){1,1000}"), long=True)
bomb("a regex that looks back for ever", CHAT, lambda _: guided(regex="(.*a.{500})*(.*b.{499})*"), long=True)
bomb("a regex of letters of all languages", CHAT, lambda _: guided(regex=r"(\p{L}{1,900}\w{0,900}){1,900}"))
bomb("a regex 4,000 deep", CHAT, lambda _: guided(regex="(" * 4000 + "a" + ")" * 4000), long=True)
bomb(
    "white space that looks back",
    CHAT,
    lambda _: guided(json={"type": "object"}, whitespace_pattern=r"(.*\s.{300})*"),
    long=True,
)
for sign in "?*+":
    bomb(f"GBNF with 60,000 {sign}", CHAT, lambda _, sign=sign: guided(grammar='root ::= "a"' + sign * 60_000))
# Open: what its lexer makes in a step is counted only afterwards.
bomb("GBNF that repeats a million times", CHAT, lambda _: guided(grammar='root ::= (("a"{1000}){1000}){1000}'))
bomb("GBNF 20,000 deep", CHAT, lambda _: guided(grammar="root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000), long=True)
bomb(
    "GBNF of rules that double",
    CHAT,
    lambda _: guided(
        grammar="\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)), 'r60 ::= "a"'])
    ),
    long=True,
)
bomb(
    "64 outputs of a GBNF that can be read in every way",
    CHAT,
    lambda _: {**guided(grammar='root ::= root root | "a" | "b" | ""'), "n": 64, "max_tokens": 200},
)
bomb(
    "64 outputs that learn a state for each text",
    CHAT,
    lambda _: {**guided(regex="([ab]*a[ab]{13}c)*"), "n": 64, "max_tokens": 200},
)
bomb(
    "64 outputs of many options",
    CHAT,
    lambda _: {
        **guided(grammar="\n".join(["root ::= (" + " | ".join(f"r{i}" for i in range(300)) + ")*", *(f'r{i} ::= "a"* "b"? [a-z]{{1,9}} r{(i * 7) % 300}?' for i in range(300))])),
        "n": 64,
        "max_tokens": 100,
    },
)
bomb("GBNF that can be read in every way", CHAT, lambda _: guided(grammar='root ::= root root | "a" | ""'))
bomb("a Lark terminal of 12,000 parts", CHAT, lambda _: guided(grammar="start: A\nA: " + " ".join(["/[ab]/"] * 12_000)))
bomb(
    "a Lark terminal of 12,000 options",
    CHAT,
    lambda _: guided(grammar="start: A\nA: " + " | ".join(["/a/"] * 12_000)),
    long=True,
)
bomb(
    "Lark terminals that double",
    CHAT,
    lambda _: guided(
        grammar="\n".join(["start: A0", *(f"A{i}: A{i + 1} A{i + 1}" for i in range(60)), "A60: /a/"]).replace(
            "A", "TT"
        )
    ),
)
bomb(
    "Lark with patterns that all hold",
    CHAT,
    lambda _: guided(grammar="start: A\nA: " + " & ".join(f"/(.*a.{{{i}}})*/" for i in range(1, 31))),
)
bomb(
    "Lark's %regex of substrings",
    CHAT,
    lambda _: guided(grammar='start: A\nA: %regex {"substring_chars": "' + "ab" * 20_000 + '"}'),
    long=True,
)
bomb("Lark 20,000 deep", CHAT, lambda _: guided(grammar="start: " + "(" * 20_000 + '"a"' + ")" * 20_000), long=True)
bomb("100,000 choices", CHAT, lambda _: guided(choice=[f"choice {i}" for i in range(100_000)]))
bomb("choices of a megabyte", CHAT, lambda size: guided(choice=["ab" * (size // 20), "ba" * (size // 20)]), long=True)

# What costs with each token.
bomb(
    "masks of an expression that looks back",
    CHAT,
    lambda _: guided(regex="(.*a.{500})*(.*b.{499})*") | {"max_tokens": 100},
)
bomb(
    "masks of a grammar that can be read in every way",
    CHAT,
    lambda _: guided(grammar='root ::= root root | [a-z ] | ""') | {"max_tokens": 100},
)
bomb(
    "64 outputs with such masks",
    CHAT,
    lambda _: guided(grammar='root ::= root root | [a-z ] | ""') | {"max_tokens": 100, "n": 64},
)
bomb(
    "masks of many options",
    CHAT,
    lambda _: guided(choice=[f"{i:03} of many" * 4 for i in range(900)]) | {"n": 16},
    long=True,
)
bomb(
    "100 streams in one, with log-probabilities",
    CHAT,
    lambda _: chat(n=100, max_tokens=30, logprobs=True, top_logprobs=20, stream=True),
    long=True,
)
bomb(
    "log-probabilities of a long prompt",
    COMPLETION,
    lambda _: {"prompt": [7] * 2000, "max_tokens": 4, "prompt_logprobs": 20, "echo": True, "logprobs": 20, "n": 8},
)
bomb(
    "beams as wide and long as may be",
    COMPLETION,
    lambda _: {"prompt": "Hi", "max_tokens": 200, "use_beam_search": True, "n": 16, "ignore_eos": True},
    long=True,
)
bomb(
    "stop strings that almost match, in a stream",
    COMPLETION,
    lambda size: {
        "prompt": [7] * 20,
        "max_tokens": 300,
        "stream": True,
        "ignore_eos": True,
        "stop": ["a" * (size // 40) + "b"] * 16,
    },
)
