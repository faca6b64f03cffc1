"""The requests that both servers get: valid and invalid ones for every field, from a seed.

All are greedy unless they say otherwise, so that texts can be compared.
"""
import random
from dataclasses import dataclass, field

WORDS = ("the tide comes in and takes the sand away while a small boat waits under the old light for rain and wind "
         "that nobody has seen since the summer when paper ships crossed a river of numbers").split()

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "set_light",
        "description": "Switches a light.",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}, "level": {"type": "integer", "minimum": 1, "maximum": 3}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}
OTHER_TOOL = {"type": "function", "function": {"name": "ring", "parameters": {"type": "object", "properties": {}}}}

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


@dataclass
class Request:
    name: str
    path: str
    body: object = None
    method: str = "POST"
    # Random samples: their shape is compared, not what they say.
    sampled: bool = False
    headers: dict = field(default_factory=dict)
    # In place of `body`: not necessarily JSON.
    raw: bytes | None = None
    # Needs a server of embeddings.
    embeddings: bool = False


class Generator:
    def __init__(self, seed, model):
        self.rng = random.Random(seed)
        self.model = model
        self.requests = []
        self.counts = {}

    def words(self, low, high):
        return " ".join(self.rng.choice(WORDS) for _ in range(self.rng.randint(low, high)))

    def tokens(self, low, high):
        return [self.rng.randrange(300, 2000) for _ in range(self.rng.randint(low, high))]

    def messages(self):
        turns = [{"role": "user", "content": self.words(3, 12)}]
        if self.rng.random() < 0.4:
            turns = [{"role": "system", "content": self.words(2, 6)}] + turns
        if self.rng.random() < 0.3:
            turns += [{"role": "assistant", "content": self.words(2, 6)}, {"role": "user", "content": self.words(2, 6)}]
        return turns

    def add(self, category, path, body=None, **more):
        number = self.counts[category] = self.counts.get(category, 0) + 1
        self.requests.append(Request(f"{category}/{number}", path, body, **more))

    def completion(self, category, sampled=False, **fields):
        prompt = fields.pop("prompt", None) or self.words(3, 20)
        tokens = {"max_tokens": self.rng.randint(4, 14)}
        greedy = {} if sampled else {"temperature": 0}
        self.add(category, COMPLETIONS, {"model": self.model, "prompt": prompt, **tokens, **greedy, **fields},
                 sampled=sampled)

    def chat(self, category, sampled=False, **fields):
        messages = fields.pop("messages", None) or self.messages()
        tokens = {"max_tokens": self.rng.randint(4, 14)}
        greedy = {} if sampled else {"temperature": 0}
        self.add(category, CHAT, {"model": self.model, "messages": messages, **tokens, **greedy, **fields},
                 sampled=sampled)

    def both(self, category, **fields):
        self.completion(f"completion-{category}", **fields)
        self.chat(f"chat-{category}", **fields)


def generate(seed, model):
    """About 300 requests, named by category and number."""
    make = Generator(seed, model)
    for part in (plain, sampling, logprobs, stops, prompts, chats, streams, tokens_endpoints, others, structured, tools,
                 beams, newer, embeddings, responses, messages, wrong_values, wrong_bodies):
        part(make)
    return make.requests


def plain(make):
    for _ in range(6):
        make.both("plain")
    make.both("defaults", temperature=None, max_tokens=8, sampled=True)
    make.completion("completion-max-tokens", max_tokens=1)
    make.completion("completion-max-tokens", max_tokens=None)
    make.completion("completion-max-tokens", max_tokens=40, ignore_eos=True)
    make.chat("chat-max-tokens", max_tokens=None, max_completion_tokens=5)
    make.chat("chat-max-tokens", max_tokens=3, max_completion_tokens=5)


def sampling(make):
    for fields in (
        {"temperature": 0.8}, {"temperature": 1.5, "top_p": 0.9}, {"temperature": 0.7, "top_k": 5, "min_p": 0.1},
        {"temperature": 1, "seed": 7}, {"temperature": 1, "n": 3},
    ):
        make.both("sampled", sampled=True, **fields)
    for fields in (
        {"repetition_penalty": 1.3}, {"presence_penalty": 1.5}, {"frequency_penalty": 1.2},
        {"presence_penalty": -0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"logit_bias": {"1000": 100}}, {"logit_bias": {"1000": -100, "1001": 5}}, {"seed": 1}, {"top_k": 1},
        {"top_k": -1}, {"top_p": 0.5}, {"min_p": 0.5}, {"user": "somebody"},
    ):
        make.both("greedy", **fields)
    make.completion("completion-greedy", top_k=1, temperature=1)
    make.both("greedy-n", n=2)


def logprobs(make):
    for count in (0, 1, 5, 20):
        make.completion("completion-logprobs", logprobs=count)
    for count in (0, 1, 5, 20):
        make.chat("chat-logprobs", logprobs=True, top_logprobs=count)
    make.chat("chat-logprobs", logprobs=True)
    make.chat("chat-logprobs", logprobs=False)
    make.chat("chat-logprobs", top_logprobs=2)
    for count in (0, 1, 3):
        make.both("prompt-logprobs", prompt_logprobs=count)
    make.completion("completion-prompt-logprobs", prompt_logprobs=2, logprobs=2, prompt=make.tokens(4, 8))
    for fields in ({"echo": True}, {"echo": True, "max_tokens": 0}, {"echo": True, "logprobs": 2},
                   {"echo": True, "logprobs": 2, "max_tokens": 0}, {"echo": True, "n": 2, "top_k": 1, "temperature": 1},
                   {"echo": True, "prompt": make.tokens(4, 8)}, {"echo": False, "max_tokens": 0}):
        make.completion("completion-echo", **fields)
    make.both("token-ids", return_token_ids=True)
    make.completion("completion-token-ids", return_tokens_as_token_ids=True, logprobs=1)
    make.chat("chat-token-ids", return_tokens_as_token_ids=True, logprobs=True, top_logprobs=1)


def stops(make):
    for stop in ("a", ["e", "t"], " ", ["zzzzzz"], []):
        make.both("stop", stop=stop, max_tokens=24)
    for stop in ("a", ["e", "th"]):
        make.both("stop-included", stop=stop, include_stop_str_in_output=True, max_tokens=24)
    make.completion("completion-stop", stop="a", logprobs=1, max_tokens=24)
    make.completion("completion-stop", stop="a", min_tokens=6, max_tokens=24)
    make.completion("completion-stop", stop_token_ids=list(range(0, 2000, 9)), max_tokens=24)
    make.completion("completion-stop", stop_token_ids=list(range(0, 2000, 9)), max_tokens=24, min_tokens=9)
    make.completion("completion-stop", stop_token_ids=list(range(0, 2000, 9)), include_stop_str_in_output=True)
    make.both("min-tokens", min_tokens=4, max_tokens=8)
    make.both("special-tokens", skip_special_tokens=False)


def prompts(make):
    make.completion("completion-batch", prompt=[make.words(2, 5) for _ in range(3)])
    make.completion("completion-batch", prompt=[make.words(2, 5) for _ in range(2)], n=2, top_k=1, temperature=1)
    make.completion("completion-batch", prompt=[make.tokens(2, 6) for _ in range(3)], logprobs=1)
    make.completion("completion-batch", prompt=[make.words(2, 5), make.words(2, 5)], echo=True)
    make.completion("completion-prompt", prompt=make.tokens(3, 12))
    make.completion("completion-prompt", prompt="<|im_start|>user\nhello<|im_end|>\n")
    make.completion("completion-prompt", prompt="Grüße, 你好, 🌊!", echo=True, logprobs=1)
    make.completion("completion-prompt", prompt=make.words(200, 300))
    make.completion("completion-prompt", prompt=make.words(5, 9), add_special_tokens=False)
    make.completion("completion-prompt", prompt=[0])
    make.completion("completion-salt", cache_salt="a salt")


def chats(make):
    make.chat("chat-content", messages=[{"role": "user", "content": [{"type": "text", "text": make.words(3, 6)}]}])
    make.chat("chat-content", messages=[{"role": "user", "content": [{"type": "text", "text": "one"},
                                                                     {"type": "text", "text": "two"}]}])
    make.chat("chat-content", messages=[{"role": "user", "content": ""}])
    make.chat("chat-content", messages=[{"role": "user", "content": "hello", "name": "ann"}])
    make.chat("chat-roles", messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}])
    make.chat("chat-roles", messages=[{"role": "assistant", "content": "hello"}])
    make.chat("chat-roles", messages=[{"role": "user", "content": "hi"}, {"role": "tool", "tool_call_id": "a",
                                                                          "content": "3"}])
    make.chat("chat-roles", messages=[{"role": "pirate", "content": "hi"}])
    last = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the tide"}]
    make.chat("chat-prompt", messages=last, continue_final_message=True, add_generation_prompt=False)
    make.chat("chat-prompt", messages=last, add_generation_prompt=False)
    make.chat("chat-prompt", messages=last, continue_final_message=True, add_generation_prompt=True)
    make.chat("chat-prompt", echo=True)
    make.chat("chat-prompt", chat_template="{% for m in messages %}{{ m.content }};{% endfor %}")
    make.chat("chat-prompt", chat_template_kwargs={"enable_thinking": False})
    make.chat("chat-prompt", documents=[{"title": "a", "text": "b"}])
    make.chat("chat-accepted", user="somebody", metadata={"a": "b"}, store=False, service_tier="auto")
    make.chat("chat-accepted", parallel_tool_calls=False)


def streams(make):
    for fields in ({}, {"stream_options": {"include_usage": True}},
                   {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, {"n": 2, "top_k": 1, "temperature": 1},
                   {"stop": "a", "max_tokens": 24}, {"stop": "a", "include_stop_str_in_output": True, "max_tokens": 24},
                   {"return_token_ids": True}, {"max_tokens": 1}, {"stream_options": {"include_usage": False}}):
        make.both("stream", stream=True, **fields)
    make.completion("completion-stream", stream=True, logprobs=2)
    make.chat("chat-stream", stream=True, logprobs=True, top_logprobs=2)
    make.completion("completion-stream", stream=True, echo=True)
    make.completion("completion-stream", stream=True, echo=True, logprobs=1)
    make.completion("completion-stream", stream=True, echo=True, max_tokens=0)
    make.completion("completion-stream", stream=True, prompt=[make.words(2, 4), make.words(2, 4)],
                    stream_options={"include_usage": True})
    make.chat("chat-stream", stream=True, messages=[{"role": "user", "content": "hi"},
                                                    {"role": "assistant", "content": "the tide"}],
              continue_final_message=True, add_generation_prompt=False, echo=True)
    make.both("stream-sampled", stream=True, temperature=1, n=2, seed=3, sampled=True)
    for fields in ({"stream_options": {"include_usage": True}}, {"stream": True, "stream_options": 3},
                   {"stream": "maybe"}, {"stream": True, "prompt_logprobs": 1}, {"stream": True, "temperature": -1}):
        make.both("stream-wrong", **fields)


def tokens_endpoints(make):
    for fields in ({"prompt": make.words(3, 9)}, {"prompt": ""}, {"prompt": "Grüße 🌊", "return_token_strs": True},
                   {"prompt": "<|im_start|>x", "add_special_tokens": False}, {"messages": make.messages()},
                   {"messages": make.messages(), "add_generation_prompt": False}, {"prompt": 3}, {"prompt": ["a", "b"]},
                   {}, {"model": "no-such-model", "prompt": "a"}):
        make.add("tokenize", "/tokenize", {"model": make.model, **fields})
    for fields in ({"tokens": make.tokens(3, 9)}, {"tokens": []}, {"tokens": [99_999_999]}, {"tokens": [-1]},
                   {"tokens": "a"}, {"tokens": [1.5]}, {}):
        make.add("detokenize", "/detokenize", {"model": make.model, **fields})


def others(make):
    for path in ("/v1/models", "/v1/models/" + make.model, "/v1/models/no-such-model", "/health", "/version",
                 "/no/such/path", COMPLETIONS, "/ping"):
        make.add("get", path, method="GET")
    make.add("get", "/v1/models", method="DELETE")


def structured(make):
    json_schema = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    # Where white space may stand in JSON is each server's own choice, and then greedy texts part.
    for form in ({"response_format": json_schema}, {"structured_outputs": {"json": SCHEMA}}):
        make.both("structured-json", max_tokens=64, sampled=True, temperature=0, **form)
    for form in ({"response_format": {"type": "text"}}, {"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}},
                 {"structured_outputs": {"choice": ["red", "green", "blue"]}},
                 {"structured_outputs": {"grammar": 'root ::= "yes" | "no" [a-c]'}}):
        make.both("structured", max_tokens=48, **form)
    make.both("structured-json", response_format={"type": "json_object"}, max_tokens=12, sampled=True)
    make.both("structured-json", response_format=json_schema, temperature=1, seed=5, sampled=True, max_tokens=64)
    make.chat("chat-structured-json", response_format=json_schema, max_tokens=64, stream=True, sampled=True)
    make.completion("completion-structured", structured_outputs={"choice": ["red", "green"]}, logprobs=2)
    for wrong in ({"response_format": {"type": "xml"}}, {"response_format": {"type": "json_schema"}},
                  {"response_format": "json"}, {"structured_outputs": {"regex": "["}},
                  {"structured_outputs": {"choice": []}}, {"structured_outputs": {}},
                  {"structured_outputs": {"json": {"type": "no-such-type"}}},
                  {"structured_outputs": {"grammar": "root ::= ("}},
                  {"structured_outputs": {"regex": "a", "choice": ["b"]}}):
        make.both("structured-wrong", **wrong)
    for older in ({"guided_choice": ["red", "green"]}, {"guided_regex": "[a-c]{3}"}, {"guided_json": SCHEMA},
                  {"guided_grammar": 'root ::= "yes" | "no"'}):
        make.both("guided", max_tokens=48, **older)


def tools(make):
    named = {"type": "function", "function": {"name": "set_light"}}
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        make.chat("tools", tools=[TOOL], **choice)
    for more in ({"tools": [TOOL], "tool_choice": named}, {"tools": [TOOL], "tool_choice": "required"}):
        make.chat("tools-forced", max_tokens=64, sampled=True, temperature=0, **more)
        make.chat("tools-forced", max_tokens=64, sampled=True, temperature=0, stream=True, **more)
    make.chat("tools-forced", tools=[TOOL, OTHER_TOOL], tool_choice=named, max_tokens=64, sampled=True, temperature=0)
    call = {"id": "call_1", "type": "function", "function": {"name": "set_light", "arguments": "{\"on\": true}"}}
    make.chat("tools-history", tools=[TOOL], messages=[
        {"role": "user", "content": "light"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"}])
    for wrong in ({"tool_choice": "required"}, {"tools": [], "tool_choice": "auto"}, {"tools": [TOOL], "tool_choice": 3},
                  {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "no_such"}}},
                  {"tools": "set_light"}, {"tools": [{"type": "function"}]}, {"tools": [TOOL], "tool_choice": "maybe"},
                  {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "zebra"}}}],
                   "tool_choice": "required"}):
        make.chat("tools-wrong", **wrong)


def beams(make):
    for fields in ({"n": 2}, {"n": 4, "max_tokens": 12}, {"n": 3, "length_penalty": 0.5}, {"n": 3, "best_of": 4},
                   {"n": 2, "logprobs": 2}):
        make.completion("completion-beams", use_beam_search=True, ignore_eos=True, **fields)
    make.chat("chat-beams", use_beam_search=True, n=2)
    make.both("beams-wrong", use_beam_search=True, n=2, stream=True)


def newer(make):
    make.both("best-of", best_of=1)
    make.both("best-of", best_of=3, temperature=1, seed=1, sampled=True)
    make.both("best-of", n=3, best_of=2, temperature=1, sampled=True)
    make.both("bad-words", bad_words=["a", "the"])
    make.both("bad-words", bad_words=[""])
    make.both("allowed-tokens", allowed_token_ids=[1000, 1001, 1002])
    make.both("allowed-tokens", allowed_token_ids=[])
    make.both("allowed-tokens", allowed_token_ids=[99_999_999])
    make.both("truncate", truncate_prompt_tokens=3)
    make.both("truncate", truncate_prompt_tokens=-1)
    make.both("truncate", truncate_prompt_tokens=0)
    make.both("truncate", truncate_prompt_tokens=-2)
    make.both("spaces", spaces_between_special_tokens=False, skip_special_tokens=False)
    make.completion("completion-suffix", suffix="the end")


def embeddings(make):
    path = "/v1/embeddings"
    for fields in ({"input": make.words(3, 9)}, {"input": [make.words(2, 5), make.words(2, 5)]},
                   {"input": make.tokens(3, 9)}, {"input": [make.tokens(3, 5), make.tokens(3, 5)]},
                   {"input": make.words(3, 9), "encoding_format": "base64"},
                   {"input": make.words(3, 9), "dimensions": 8}, {"input": ""}, {"input": []}, {}, {"input": 3},
                   {"input": "a", "encoding_format": "hex"}, {"input": "a", "truncate_prompt_tokens": 2}):
        make.add("embeddings", path, {"model": make.model, **fields}, embeddings=True)


def responses(make):
    function = {"type": "function", **TOOL["function"]}
    for fields in (
        {}, {"instructions": "be brief"}, {"stream": True}, {"input": [{"role": "user", "content": make.words(3, 6)}]},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": make.words(3, 6)}]}]},
        {"tools": [function], "tool_choice": "none"}, {"metadata": {"a": "b"}, "store": False}, {"temperature": 9},
        {"max_output_tokens": 0}, {"max_output_tokens": "x"}, {"input": None}, {"input": 3}, {"input": []},
        {"previous_response_id": "resp_none"}, {"background": True}, {"model": "no-such-model"}, {"top_p": 2},
        {"input": [{"role": "pirate", "content": "a"}]}, {"text": {"format": {"type": "text"}}},
    ):
        body = {"model": make.model, "input": make.words(3, 9), "max_output_tokens": 9, "temperature": 0, **fields}
        make.add("responses", RESPONSES, body)
    make.add("responses", RESPONSES + "/resp_none", method="GET")


def messages(make):
    tool = {"name": "set_light", "description": "Switches a light.", "input_schema": TOOL["function"]["parameters"]}
    for fields in (
        {}, {"system": "be brief"}, {"system": [{"type": "text", "text": "be brief"}]}, {"stream": True},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": make.words(3, 6)}]}]},
        {"stop_sequences": ["e"], "max_tokens": 30}, {"tools": [tool], "tool_choice": {"type": "auto"}},
        {"top_k": 5, "top_p": 0.9}, {"metadata": {"user_id": "a"}}, {"max_tokens": None}, {"max_tokens": 0},
        {"messages": []}, {"messages": [{"role": "system", "content": "a"}]}, {"temperature": "x"},
        {"messages": [{"role": "user", "content": 3}]}, {"model": "no-such-model"}, {"stream": True, "max_tokens": -1},
    ):
        body = {"model": make.model, "messages": [{"role": "user", "content": make.words(3, 9)}], "max_tokens": 9,
                "temperature": 0, **fields}
        make.add("messages", MESSAGES, {name: value for name, value in body.items() if value is not None})
    make.add("count-tokens", MESSAGES + "/count_tokens",
             {"model": make.model, "messages": [{"role": "user", "content": make.words(3, 9)}]})
    make.add("count-tokens", MESSAGES + "/count_tokens", {"model": make.model})


# Values that a field of both endpoints cannot have.
WRONG = {
    "temperature": ("hot", -0.1, [1]),
    "top_p": (0, 1.5, "x"),
    "top_k": (-2, 1.5, "x"),
    "min_p": (-0.1, 1.1),
    "n": (0, -1, "two", 1.5),
    "max_tokens": (-1, "many", 1.5, 100_000),
    "min_tokens": (-1, 99, "x"),
    "presence_penalty": (3, "x"),
    "frequency_penalty": (-3,),
    "repetition_penalty": (0, -1),
    "stop": (3, [3], [""]),
    "stop_token_ids": ("a", [1.5], [-1]),
    "logit_bias": ([1], {"x": 1}, {"99999999": 1}, {"5": "x"}, {"5": 200}),
    "seed": ("x", 1.5, 2**70),
    "prompt_logprobs": (-1, -2, 100, "x"),
    "ignore_eos": ("maybe",),
    "skip_special_tokens": (3,),
    "priority": ("x", 1),
    "cache_salt": ("", 3),
    "include_stop_str_in_output": ([],),
    "user": (3,),
}


def wrong_values(make):
    for name, values in WRONG.items():
        for i, value in enumerate(values):
            if i % 2 == 0:
                make.completion("completion-wrong-" + name, **{name: value})
            else:
                make.chat("chat-wrong-" + name, **{name: value})
    for value in (-1, 21, "x", 1.5):
        make.completion("completion-wrong-logprobs", logprobs=value)
    for fields in ({"logprobs": 5}, {"logprobs": True, "top_logprobs": -1}, {"logprobs": True, "top_logprobs": 21},
                   {"logprobs": True, "top_logprobs": "x"}, {"max_tokens": None, "max_completion_tokens": 0},
                   {"max_tokens": 0}):
        make.chat("chat-wrong-logprobs" if "logprobs" in fields else "chat-wrong-max-tokens", **fields)
    for prompt in ([""], 3, [], {"text": "a"}, ["a", 3], [[]], [-1], [99_999_999], [1.5], ["a", [1]]):
        make.add("completion-wrong-prompt", COMPLETIONS, {"model": make.model, "prompt": prompt, "max_tokens": 2,
                                                          "temperature": 0})
    make.add("completion-wrong-prompt", COMPLETIONS, {"model": make.model, "prompt": "", "max_tokens": 2})
    make.add("completion-wrong-prompt", COMPLETIONS, {"model": make.model, "prompt": None, "max_tokens": 2})
    make.add("completion-wrong-prompt", COMPLETIONS, {"model": make.model, "prompt": "a " * 3000})
    for messages in ([], "hi", [3], [{"role": "user"}], [{"content": "hi"}], [{"role": "user", "content": 3}],
                     [{"role": "user", "content": [{"type": "text"}]}],
                     [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
                     [{"role": "user", "content": [{"type": "smell", "smell": "tar"}]}],
                     [{"role": "user", "content": "a " * 3000}]):
        make.add("chat-wrong-messages", CHAT, {"model": make.model, "messages": messages, "max_tokens": 2,
                                               "temperature": 0})


def wrong_bodies(make):
    for path in (COMPLETIONS, CHAT):
        body = {"model": make.model, "max_tokens": 2, "temperature": 0}
        make.add("missing", path, body)
        body |= {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
        make.add("unknown-field", path, {**body, "no_such_field": {"a": [1]}})
        make.add("model", path, {**body, "model": "no-such-model"})
        make.add("model", path, {**body, "model": 3})
        make.add("model", path, {name: value for name, value in body.items() if name != "model"})
        make.add("request-id", path, body, headers={"X-Request-Id": "an-id-of-mine"})
        for raw in (b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe"):
            make.add("not-json", path, raw=raw)
        make.add("content-type", path, raw=b"a=b", headers={"Content-Type": "text/plain"})
