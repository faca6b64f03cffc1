"""Makes requests of the shape that Claude Code makes, through the anthropic package's beta interface.

Claude Code sends `?beta=true` and beta headers, a system prompt of marked blocks, tools with whole JSON schemas, a
`metadata.user_id`, and names of models that this server does not have. It counts tokens, streams, and gives back what
the model said with the results of tools and reminders among them.
"""

import json

import anthropic
import pytest

from conftest import serving_alike

BETAS = ["claude-code-20250219", "interleaved-thinking-2025-05-14", "fine-grained-tool-streaming-2025-05-14"]
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0;"},
    {"type": "text", "text": "You are Claude Code, a command line tool.", **EPHEMERAL},
    {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
]
READ = {
    "name": "Read",
    "description": "Reads a file.",
    "input_schema": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "file_path": {"type": "string", "enum": ["/a.rs", "/b.rs"], "description": "The absolute path."},
            "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9},
        },
        "required": ["file_path"],
        "additionalProperties": False,
    },
}
TODO = {"name": "TodoWrite", "input_schema": {"type": "object", "properties": {"todos": {"type": "array"}}}}
REMINDER = {"type": "text", "text": "<system-reminder>Todo list is empty.</system-reminder>"}
ASKED = {"role": "user", "content": [REMINDER, {"type": "text", "text": "What is in a.rs?", **EPHEMERAL}]}
COMMON = dict(
    model="claude-sonnet-x",
    max_tokens=300,
    system=SYSTEM,
    tools=[READ, {**TODO, **EPHEMERAL}],
    metadata={"user_id": "user_5f_account__session_9a"},
    betas=BETAS,
)


@pytest.fixture(scope="module", params=["bearer", "x-api-key"])
def claude(request):
    # ANTHROPIC_AUTH_TOKEN or ANTHROPIC_API_KEY.
    key = {"auth_token": "s3cret", "api_key": None} if request.param == "bearer" else {"api_key": "s3cret"}
    flags = ["--api-key", "s3cret", "--set", "server.accept_any_model=true", "--tool-call-parser", "llama3_json"]
    with serving_alike(*flags) as server:
        headers = {"User-Agent": "claude-cli/2.1.0 (external, cli)", "X-App": "cli"}
        with anthropic.Anthropic(base_url=server.url, max_retries=0, default_headers=headers, **key) as client:
            yield client


def test_an_answer_is_streamed(claude):
    with claude.beta.messages.stream(messages=[ASKED], extra_body={"temperature": 1}, **COMMON) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text != ""
    assert final.stop_reason in ("end_turn", "max_tokens") and final.usage.output_tokens > 0


def test_a_tool_is_called_and_answered(claude):
    choice = {"type": "tool", "name": "Read", "disable_parallel_tool_use": True}
    with claude.beta.messages.stream(messages=[ASKED], tool_choice=choice, **COMMON) as stream:
        pieces = "".join(event.partial_json for event in stream if event.type == "input_json")
        final = stream.get_final_message()
    [call] = [block for block in final.content if block.type == "tool_use"]
    assert json.loads(pieces) == call.input and call.input["file_path"] in ("/a.rs", "/b.rs")
    assert final.stop_reason == "tool_use"
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": "     1→fn main() {}",
        "is_error": False,
        **EPHEMERAL,
    }
    told = [block.to_dict() for block in final.content]
    conversation = [ASKED, {"role": "assistant", "content": told}, {"role": "user", "content": [result, REMINDER]}]
    counted = claude.beta.messages.count_tokens(
        messages=conversation, **{name: COMMON[name] for name in ("model", "system", "tools", "betas")}
    )
    after = claude.beta.messages.create(messages=conversation, **COMMON)
    assert after.content[0].text and after.stop_reason in ("end_turn", "max_tokens")
    usage = after.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert usage.cache_read_input_tokens > 0


def test_titles_follow_a_schema(claude):
    """The small model is asked for the topic of a conversation, whose answer has a schema."""
    schema = {"type": "object", "properties": {"isNewTopic": {"type": "boolean"}}, "required": ["isNewTopic"]}
    asked = COMMON | {"model": "claude-haiku-x", "tools": [], "max_tokens": 60}
    output = {"format": {"type": "json_schema", "schema": schema | {"additionalProperties": False}}}
    answer = claude.beta.messages.create(messages=[ASKED], output_config=output, **asked)
    assert isinstance(json.loads(answer.content[0].text)["isNewTopic"], bool)


def test_its_quota_is_asked_for(claude):
    answer = claude.beta.messages.create(
        model="claude-haiku-x", max_tokens=1, messages=[{"role": "user", "content": "quota"}], betas=BETAS
    )
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 1


def test_an_error_says_what_is_wrong(claude):
    with pytest.raises(anthropic.BadRequestError, match="max_tokens must be in"):
        claude.beta.messages.create(messages=[ASKED], **COMMON | {"max_tokens": 0})
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="wrong", auth_token=None).beta.messages.create(messages=[ASKED], **COMMON)
