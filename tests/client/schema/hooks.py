"""What schemathesis cannot know from the schema: how fields limit each other, and how little an answer may be."""

import schemathesis

# Answers are kept short: there are thousands.
MOST_TOKENS = 4


@schemathesis.hook
def before_call(context, case, kwargs):
    if case.meta is None or not case.meta.generation.mode.is_positive or not isinstance(case.body, dict):
        return
    case.body = possible(case.body)


def possible(body: dict) -> dict:
    body = {name: value for name, value in body.items() if value is not None}
    # The schema knows neither the model's name nor its vocabulary.
    body.pop("model", None)
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids", "bad_words", "chat_template_kwargs"):
        body.pop(name, None)
    return body
