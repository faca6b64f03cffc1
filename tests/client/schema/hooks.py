"""Drops fields whose valid values the schema cannot describe, and checks the errors of requests that are refused."""

import schemathesis

# Names and ids depend on the model. A request's template is accepted only if the server is configured to trust it.
UNKNOWN = ("model", "chat_template", "logit_bias", "allowed_token_ids", "stop_token_ids", "truncate_prompt_tokens")


@schemathesis.hook
def before_call(context, case, kwargs):
    # A form has no nulls, and what it is set to anew is checked anew, which the bytes of its file do not pass.
    if is_right(case) and case.media_type == "application/json" and isinstance(case.body, dict):
        case.body = {name: value for name, value in case.body.items() if value is not None and name not in UNKNOWN}


def is_right(case) -> bool:
    """Whether the request follows the schema."""
    return case.meta is not None and case.meta.generation.mode.is_positive


@schemathesis.check
def a_refusal_names_the_field(context, response, case):
    if response.status_code != 400 or not is_right(case):
        return
    answer = response.json()
    # Cohere's errors are the answer itself, and Ollama's are a text.
    error = answer.get("error", answer)
    if isinstance(error, str):
        assert error
        return
    assert error["message"]
    # Errors in the formats of Anthropic, Cohere and llama.cpp have no `param`.
    assert error.get("param") or "param" not in error, error
