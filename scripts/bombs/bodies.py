"""Bodies that are large, deep, wrong or compressed, and lists and numbers beyond all sense."""

import gzip
import json
import zlib

from .making import CHAT, COMPLETION, COUNT, EMBEDDING, HI, MESSAGES, RESPONSES, bomb, chat, fill, raw, schema

SPACES_CHAT = ('{"max_tokens":4,"messages":[{"role":"user","content":"', " ", '"}]}', "")

# Bodies that are much larger in memory than as text, or long to go through.
bomb("embeddings of one-token prompts", EMBEDDING, lambda size: fill(size, '{"input":[', "[1]", "]}"))
bomb("embeddings of empty prompts", EMBEDDING, lambda size: fill(size, '{"input":[', "[]", "]}"), long=True)
bomb("embeddings of short texts", EMBEDDING, lambda size: fill(size, '{"input":[', '"a"', "]}"), long=True)
bomb("an embedding of millions of ids", EMBEDDING, lambda size: fill(size, '{"input":[', "1", "]}"))
bomb("a prompt of millions of ids", COMPLETION, lambda size: fill(size, '{"max_tokens":4,"prompt":[', "1", "]}"))
bomb("millions of prompts", COMPLETION, lambda size: fill(size, '{"max_tokens":4,"prompt":[', "[1]", "]}"), long=True)
bomb("a prompt whose last id is wrong", COMPLETION, lambda size: fill(size, '{"prompt":[', "1", ',"x"]}'), long=True)
bomb("an unknown field of lists", CHAT, lambda size: fill(size, json.dumps(chat())[:-1] + ',"unknown":[', "[[]]", "]}"))
bomb(
    "an unknown field of objects",
    COMPLETION,
    lambda size: fill(size, '{"prompt":"Hi","max_tokens":4,"unknown":[', '{"a":{}}', "]}"),
    long=True,
)
bomb(
    "millions of unknown fields", CHAT, lambda size: fill(size, json.dumps(chat())[:-1] + ",", '"u":0', "}"), long=True
)
bomb(
    "chat_template_kwargs of lists",
    CHAT,
    lambda size: fill(size, json.dumps(chat())[:-1] + ',"chat_template_kwargs":{"a":[', "[1]", "]}}"),
)
bomb(
    "metadata of a million names",
    CHAT,
    lambda size: (
        json.dumps(chat())[:-1] + ',"metadata":{' + ",".join(f'"{i}":""' for i in range(size // 12)) + "}}"
    ).encode(),
    long=True,
)
bomb("detokenize of millions", "/detokenize", lambda size: fill(size, '{"tokens":[', "1", "]}"))
bomb("tokenize of spaces", "/tokenize", lambda size: fill(size, '{"prompt":"', " ", '"}', ""))
bomb(
    "tokenize of messages of spaces",
    "/tokenize",
    lambda size: fill(size, '{"messages":[{"role":"user","content":"', " ", '"}]}', ""),
    long=True,
)
bomb(
    "count_tokens of spaces", COUNT, lambda size: fill(size, '{"messages":[{"role":"user","content":"', " ", '"}]}', "")
)
bomb("a prompt of spaces", COMPLETION, lambda size: fill(size, '{"max_tokens":4,"prompt":"', " ", '"}', ""))
bomb(
    "a prompt of one letter",
    COMPLETION,
    lambda size: fill(size, '{"max_tokens":4,"prompt":"', "a", '"}', ""),
    long=True,
)
bomb(
    "a prompt of spaces that is cut",
    COMPLETION,
    lambda size: fill(size, '{"max_tokens":4,"truncate_prompt_tokens":-1,"prompt":"', " ", '"}', ""),
)
bomb("a message of spaces", CHAT, lambda size: fill(size, *SPACES_CHAT))
bomb("a message of smileys", CHAT, lambda size: fill(size, SPACES_CHAT[0], "\U0001f600", *SPACES_CHAT[2:]))
bomb("a message of escapes", CHAT, lambda size: fill(size, SPACES_CHAT[0], r"\u00e9", *SPACES_CHAT[2:]), long=True)
bomb(
    "responses of spaces",
    RESPONSES,
    lambda size: fill(size, '{"max_output_tokens":4,"input":"', " ", '"}', ""),
    long=True,
)
bomb(
    "messages of spaces, Anthropic",
    MESSAGES,
    lambda size: fill(size, '{"max_tokens":4,"messages":[{"role":"user","content":"', " ", '"}]}', ""),
    long=True,
)
bomb("an embedding of spaces", EMBEDDING, lambda size: fill(size, '{"input":"', " ", '"}', ""), long=True)
bomb("100,000 messages", CHAT, lambda _: chat(messages=HI * 100_000))
bomb(
    "a million parts of a message",
    CHAT,
    lambda size: fill(
        size, '{"max_tokens":4,"messages":[{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}"
    ),
)
bomb(
    "a million items of responses",
    RESPONSES,
    lambda size: fill(size, '{"max_output_tokens":4,"input":[', '{"role":"user","content":"a"}', "]}"),
    long=True,
)
bomb(
    "a million blocks, Anthropic",
    MESSAGES,
    lambda size: fill(
        size, '{"max_tokens":4,"messages":[{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}"
    ),
    long=True,
)
bomb(
    "10,000 tools",
    CHAT,
    lambda _: chat(
        tools=[
            {"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object"}}} for i in range(10_000)
        ]
    ),
    long=True,
)
bomb(
    "10,000 tools, one required",
    CHAT,
    lambda _: chat(
        tool_choice="required",
        tools=[
            {"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object"}}} for i in range(10_000)
        ],
    ),
)
bomb(
    "arguments of a call that are deep",
    CHAT,
    lambda size: chat(
        messages=HI
        + [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":' + "[" * (size // 4)}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ]
        + HI
    ),
    long=True,
)
bomb(
    "arguments of a call that are large",
    CHAT,
    lambda size: chat(
        messages=HI
        + [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "1",
                        "type": "function",
                        "function": {"name": "f", "arguments": fill(size * 3 // 4, '{"a":[', "[1]", "]}").decode()},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ]
        + HI
    ),
)

# Lists and numbers of parameters.
bomb("logit_bias of 100,000", CHAT, lambda _: chat(logit_bias={str(i): 1 for i in range(100_000)}))
bomb("stop of 100,000", CHAT, lambda _: chat(stop=[f"stop {i}" for i in range(100_000)]), long=True)
bomb(
    "stop strings of a megabyte",
    CHAT,
    lambda size: chat(max_tokens=200, stop=["a" * (size // 20) + str(i) for i in range(16)]),
)
bomb("bad_words of 100,000", CHAT, lambda _: chat(bad_words=[f"word {i}" for i in range(100_000)]), long=True)
bomb("bad_words that are long", CHAT, lambda size: chat(bad_words=["ab" * (size // 600) + str(i) for i in range(256)]))
bomb(
    "allowed_token_ids of millions",
    CHAT,
    lambda size: fill(size, json.dumps(chat())[:-1] + ',"allowed_token_ids":[', "1", "]}"),
)
bomb(
    "stop_token_ids of millions",
    CHAT,
    lambda size: fill(size, json.dumps(chat())[:-1] + ',"stop_token_ids":[', "1", "]}"),
    long=True,
)
bomb("n of four thousand million", COMPLETION, lambda _: {"prompt": "Hi", "max_tokens": 4, "n": 2**32 - 1}, long=True)
bomb("max_tokens beyond every integer", CHAT, lambda _: chat(max_tokens=2**64), long=True)
bomb("100 answers with log-probabilities", CHAT, lambda _: chat(n=100, max_tokens=60, logprobs=True, top_logprobs=20))
bomb(
    "long answers with log-probabilities",
    CHAT,
    lambda _: chat(n=64, max_tokens=1800, ignore_eos=True, logprobs=True, top_logprobs=20),
)
bomb(
    "long completions with log-probabilities",
    COMPLETION,
    lambda _: {"prompt": ["Hi"] * 60, "max_tokens": 300, "ignore_eos": True, "logprobs": 20, "return_token_ids": True},
    long=True,
)
bomb(
    "a response with log-probabilities",
    RESPONSES,
    lambda _: {
        "input": "Hi",
        "max_output_tokens": 1900,
        "ignore_eos": True,
        "top_logprobs": 20,
        "include": ["message.output_text.logprobs"],
        "stream": True,
    },
    long=True,
)
bomb(
    "128 outputs with every parameter",
    CHAT,
    lambda _: chat(
        n=128,
        max_tokens=400,
        ignore_eos=True,
        logprobs=True,
        top_logprobs=1,
        bad_words=[f"word {i} of many" for i in range(256)],
        logit_bias={str(i): -1.5 for i in range(2000)},
        stop=[f"{i}" * 200 for i in range(16)],
        stop_token_ids=list(range(1700, 1956)),
        repetition_penalty=1.1,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        top_k=100,
        top_p=0.9,
        min_p=0.01,
    ),
)
bomb(
    "128 outputs of a schema, with bad words",
    CHAT,
    lambda _: {
        **schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(200)}}),
        "n": 128,
        "max_tokens": 300,
        "bad_words": [f"word {i} of many" for i in range(256)],
    },
)
bomb(
    "beams of a whole context",
    COMPLETION,
    lambda _: {"prompt": "Hi", "use_beam_search": True, "n": 16, "best_of": 16, "max_tokens": 1900, "ignore_eos": True},
)
for name, text in [
    ("letters", "".join(chr(97 + i * i % 26) for i in range(26 * 26)) * 380),
    ("one letter", "a" * 250_000),
    ("digits", "0123456789" * 25_000),
    ("marks", "!?.-" * 60_000),
    ("accents", "e\u0301\u0302" * 50_000),
    ("controls", "\x00\x01\x7f" * 80_000),
]:
    bomb(f"a word of {name}, as long as a prompt may be", COMPLETION, lambda _, text=text: {"prompt": text[:250_000], "max_tokens": 1}, long=True)
bomb("temperature of a million digits", CHAT, lambda _: raw(chat(temperature="HERE"), "0." + "1" * 10**6))
bomb("max_tokens of a million digits", CHAT, lambda _: raw(chat(max_tokens="HERE"), "1" * 10**6), long=True)
bomb("an exponent of a million digits", CHAT, lambda _: raw(chat(temperature="HERE"), "1e-" + "9" * 10**6), long=True)
bomb("a model's name of megabytes", CHAT, lambda size: chat(model="x" * (size - 1000)), long=True)
bomb(
    "a role of megabytes", CHAT, lambda size: chat(messages=[{"role": "x" * (size - 1000), "content": "Hi"}]), long=True
)
bomb("a field's name of megabytes", CHAT, lambda size: schema({"x" * (size - 1000): 1}))

# What is not JSON, or JSON that its reader may fall over.
for kind, opening in [("arrays", "["), ("objects", '{"a":')]:
    bomb(f"{kind} as deep as the body is long", CHAT, lambda size, opening=opening: fill(size, "", opening, "", ""))
    bomb(
        f"an unknown field of deep {kind}",
        CHAT,
        lambda size, opening=opening: fill(size, json.dumps(chat())[:-1] + ',"unknown":', opening, "", ""),
    )
bomb(
    "deep chat_template_kwargs",
    CHAT,
    lambda _: raw(chat(chat_template_kwargs={"a": "HERE"}), "[" * 100_000 + "]" * 100_000),
)
bomb("one name a million times", CHAT, lambda size: fill(size, "{", '"max_tokens":4', "}"))
bomb(
    "messages a thousand times",
    CHAT,
    lambda _: fill(10**6, "{", '"messages":[{"role":"user","content":"Hi"}]', ',"max_tokens":4}'),
    long=True,
)
bomb(
    "bytes that are no text",
    CHAT,
    lambda size: b'{"messages":[{"role":"user","content":"' + b"\xff\xc0\x80" * (size // 4) + b'"}]}',
)
bomb("JSON whose last byte is missing", COMPLETION, lambda size: fill(size, '{"prompt":"', "a", '"', ""), long=True)

# Bodies that are small on their way.
bomb(
    "gzip of far more than a body may have",
    CHAT,
    lambda _: gzip.compress(b"[" + b"1," * (128 << 20)),
    Content_Encoding="gzip",
)
bomb(
    "gzip of one-token prompts",
    EMBEDDING,
    lambda size: gzip.compress(fill(size, '{"input":[', "[1]", "]}")),
    Content_Encoding="gzip",
)
bomb(
    "gzip of spaces",
    COMPLETION,
    lambda size: gzip.compress(fill(size, '{"max_tokens":4,"prompt":"', " ", '"}', "")),
    Content_Encoding="gzip",
    long=True,
)
bomb(
    "deflate of an unknown field",
    CHAT,
    lambda size: zlib.compress(fill(size, json.dumps(chat())[:-1] + ',"unknown":[', "[[]]", "]}")),
    Content_Encoding="deflate",
    long=True,
)
bomb(
    "gzip in gzip in gzip",
    CHAT,
    lambda _: gzip.compress(gzip.compress(gzip.compress(b" " * (256 << 20)))),
    Content_Encoding="gzip, gzip, gzip",
    long=True,
)
bomb("gzip of thousands of members", CHAT, lambda _: gzip.compress(b"") * 50_000, Content_Encoding="gzip")
