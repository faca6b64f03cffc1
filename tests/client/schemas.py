"""Makes JSON schemas with many features from seeds, and checks the outputs that a server generates for them.

To try more seeds than the tests do, run it against a running server:

    python tests/client/schemas.py --url http://127.0.0.1:8000 --seeds 0:5000
"""

import argparse
import collections
import concurrent.futures
import decimal
import json
import random
import sys
import urllib.error
import urllib.request

import jsonschema

# Enough digits for the numbers that a model writes.
decimal.getcontext().prec = decimal.DefaultContext.prec = 400

SAMPLES = 5
MAX_TOKENS = 600
# Outputs of a recursive schema may be cut at MAX_TOKENS. Then more outputs are requested, at most this many times.
MAX_ASKED = 8

NAMES = ["id", "name", "größe", "名前", "a b", 'with "quotes"', "back\\slash", "x/y", "$ref", "type", "🦀", "émoji", "n", "tab\there"]
TEXTS = ["", "a", "yes", "nein", "日本", "🦀🦀", 'say "hi"', "a\\b", "line\nbreak", "x" * 30, "ß", "null", "0"]
PATTERNS = ["^[a-z]{1,6}$", "^[A-Z]{2}-[0-9]{3}$", "^(foo|bar|bäz)$", "^\\d{2,4}$", "^[^x\"]{3}$", "^a.c$", "^(ab?){2,3}$", "^\\w{1,4}\\s\\w$"]
FORMATS = ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]


class Generator:
    """Makes one schema. `features` names the features that it uses.

    Every value has a bounded length, except in a recursive schema: there the recursion ends by chance.
    """

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.features: set[str] = set()
        self.definitions: dict = {}

    def schema(self) -> dict:
        kinds = [self.object, self.object, self.object, self.array, self.any, self.recursive]
        schema = self.random.choice(kinds)(0)
        if self.definitions:
            schema = {**schema, "$defs": self.definitions}
        if self.random.random() < 0.3:
            schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T", "description": "…", **schema}
        return schema

    def use(self, *features: str):
        self.features.update(features)

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def any(self, depth: int) -> dict:
        leaves = [self.string, self.integer, self.number, self.boolean, self.null, self.const, self.enum, self.nullable]
        nested = [self.object, self.object, self.array, self.tuple, self.any_of, self.one_of, self.all_of, self.reference]
        return self.random.choice(leaves if depth > 2 else leaves + nested)(depth)

    def string(self, depth: int) -> dict:
        kind = self.random.randrange(4)
        if kind == 0:
            self.use("pattern")
            return {"type": "string", "pattern": self.random.choice(PATTERNS)}
        if kind == 1:
            self.use("format")
            # Some formats have parts of unbounded length, such as the fraction of a second.
            return {"type": "string", "format": self.random.choice(FORMATS), "maxLength": 48}
        low = self.random.randrange(5)
        self.use("maxLength")
        schema = {"type": "string", "maxLength": low + self.random.randrange(10)}
        if low and self.chance(0.7):
            self.use("minLength")
            schema["minLength"] = low
        return schema

    def integer(self, depth: int) -> dict:
        self.use("integer")
        schema: dict = {"type": "integer"}
        low = self.random.choice([-1000, -7, 0, 1, 5, 10**6])
        high = low + self.random.choice([0, 1, 9, 123, 10**5])
        exclusive = self.chance(0.3)
        if self.chance(0.8):
            self.use("exclusiveMinimum" if exclusive else "minimum")
            schema["exclusiveMinimum" if exclusive else "minimum"] = low - exclusive
        if self.chance(0.8):
            exclusive = self.chance(0.3)
            self.use("exclusiveMaximum" if exclusive else "maximum")
            schema["exclusiveMaximum" if exclusive else "maximum"] = high + exclusive
        if high - low > 100 and self.chance(0.3):
            self.use("multipleOf")
            schema["multipleOf"] = self.random.choice([2, 3, 5, 7, 10])
        return schema

    def number(self, depth: int) -> dict:
        self.use("number")
        schema: dict = {"type": "number"}
        low = round(self.random.choice([-10.5, -1, -0.25, 0, 0.25, 3.75, 1e3, self.random.uniform(-100, 100)]), 3)
        high = round(low + self.random.choice([0.25, 0.5, 1, 2, 99.75, self.random.uniform(0.01, 1000)]), 3)
        if self.chance(0.7):
            schema[self.random.choice(["minimum", "exclusiveMinimum"])] = low
        if self.chance(0.7):
            schema[self.random.choice(["maximum", "exclusiveMaximum"])] = high
        if high - low > 1 and self.chance(0.3):
            self.use("multipleOf")
            schema["multipleOf"] = self.random.choice([0.25, 0.5, 0.01])
        return schema

    def boolean(self, depth: int) -> dict:
        self.use("boolean")
        return {"type": "boolean"}

    def null(self, depth: int) -> dict:
        self.use("null")
        return {"type": "null"}

    def value(self, depth: int = 0):
        makers = [
            lambda: self.random.choice(TEXTS),
            lambda: self.random.randrange(-50, 50),
            lambda: self.random.choice([0.5, -2.75, 1e10, 100.0]),
            lambda: self.random.choice([True, False, None]),
        ]
        if depth < 2:
            makers.append(lambda: [self.value(depth + 1) for _ in range(self.random.randrange(3))])
            makers.append(lambda: {name: self.value(depth + 1) for name in self.names(self.random.randrange(3))})
        return self.random.choice(makers)()

    def const(self, depth: int) -> dict:
        self.use("const")
        return {"const": self.value()}

    def enum(self, depth: int) -> dict:
        self.use("enum")
        if self.chance(0.5):
            return {"type": "string", "enum": self.random.sample(TEXTS, self.random.randint(1, 6))}
        return {"enum": [self.value() for _ in range(self.random.randint(1, 5))]}

    def nullable(self, depth: int) -> dict:
        self.use("type list")
        schema = self.random.choice([self.string, self.integer, self.boolean])(depth)
        return {**schema, "type": [schema["type"], "null"]}

    def names(self, count: int) -> list[str]:
        return self.random.sample(NAMES, count)

    def object(self, depth: int) -> dict:
        names = self.names(self.random.randint(0 if depth else 1, 5))
        schema: dict = {"type": "object", "properties": {name: self.any(depth + 1) for name in names}}
        self.use("properties")
        required = [name for name in names if self.chance(0.6)]
        if required:
            self.use("required")
            self.random.shuffle(required)
            schema["required"] = required
        schema["additionalProperties"] = False
        self.use("additionalProperties")
        if len(required) == len(names) and self.chance(0.25):
            self.use("patternProperties", "maxProperties")
            schema["patternProperties"] = {"^p_[a-z]{1,3}$": self.any(depth + 1)}
            schema["maxProperties"] = len(names) + self.random.randint(1, 3)
            if self.chance(0.4):
                self.use("minProperties")
                schema["minProperties"] = len(names) + 1
        elif self.chance(0.3):
            del schema["additionalProperties"]
            schema.update(self.closed_by_all_of())
        return schema

    def closed_by_all_of(self) -> dict:
        # Two other ways to say that there are no further properties.
        return self.random.choice([{"additionalProperties": False}, {"additionalProperties": {"enum": [1], "type": "null"}}])

    def array(self, depth: int) -> dict:
        self.use("items", "maxItems")
        low = self.random.randrange(3)
        schema = {"type": "array", "items": self.any(depth + 1), "maxItems": low + self.random.randrange(4)}
        if low:
            self.use("minItems")
            schema["minItems"] = low
        return schema

    def tuple(self, depth: int) -> dict:
        self.use("prefixItems")
        prefix = [self.any(depth + 1) for _ in range(self.random.randint(1, 3))]
        schema: dict = {"type": "array", "prefixItems": prefix, "minItems": self.random.randint(0, len(prefix))}
        if self.chance(0.6):
            return {**schema, "items": False}
        return {**schema, "items": self.any(depth + 1), "maxItems": len(prefix) + self.random.randint(0, 2)}

    def any_of(self, depth: int) -> dict:
        self.use("anyOf")
        return {"anyOf": [self.any(depth + 1) for _ in range(self.random.randint(2, 3))]}

    def one_of(self, depth: int) -> dict:
        self.use("oneOf")
        if self.chance(0.5):
            makers = self.random.sample([self.string, self.integer, self.boolean, self.null, self.array], 3)
            return {"oneOf": [make(depth + 1) for make in makers]}
        options = []
        for kind in self.random.sample(["cat", "dog", "猫"], 2):
            option = self.object(depth + 1)
            option = {"type": "object", "properties": {"kind": {"const": kind}, **option["properties"]}, "additionalProperties": False}
            options.append({**option, "required": ["kind"]})
        if self.chance(0.5):
            self.use("$ref")
            options = [self.define(option) for option in options]
        return {"oneOf": options}

    def all_of(self, depth: int) -> dict:
        self.use("allOf")
        kind = self.random.randrange(3)
        if kind == 0:
            return {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": self.random.randint(5, 500)}]}
        if kind == 1:
            return {"type": "string", "allOf": [{"pattern": "^[a-z]+$"}, {"minLength": 2, "maxLength": 8}]}
        one, other = self.names(2)
        return {
            "allOf": [
                {"type": "object", "properties": {one: self.any(depth + 1)}, "required": [one]},
                {"type": "object", "properties": {other: self.any(depth + 1)}, "required": [other]},
                {"properties": {one: True, other: True}, "additionalProperties": False},
            ]
        }

    def define(self, schema: dict) -> dict:
        name = self.random.choice(["Item", "größe", "a~b", "c/d", "e f"]) + str(len(self.definitions))
        self.definitions[name] = schema
        pointer = name.replace("~", "~0").replace("/", "~1").replace(" ", "%20")
        return {"$ref": f"#/$defs/{pointer}"}

    def reference(self, depth: int) -> dict:
        self.use("$ref")
        return self.define(self.any(depth + 1))

    def recursive(self, depth: int) -> dict:
        self.use("$ref", "recursion")
        name = f"Node{len(self.definitions)}"
        again = {"$ref": f"#/$defs/{name}"}
        self.definitions[name] = {}  # reserves the name
        value = self.random.choice([self.integer, self.boolean, self.enum])(depth)
        if self.chance(0.5):
            properties = {"value": value, "next": {"anyOf": [{"type": "null"}, again]}}
        else:
            properties = {"value": value, "children": {"type": "array", "items": again, "maxItems": self.random.randint(1, 2)}}
        self.definitions[name] = {
            "type": "object",
            "properties": properties,
            "required": ["value"] if self.chance(0.7) else list(properties),
            "additionalProperties": False,
        }
        return dict(again)


def make(seed: int) -> tuple[dict, set[str]]:
    generator = Generator(seed)
    return generator.schema(), generator.features


def exact(text: str):
    """Parses JSON with decimal numbers, because 0.30 is not a multiple of 0.1 in binary."""

    def constant(name):
        raise ValueError(f"{name} is not JSON")

    def number(digits):
        # Decimal arithmetic fails for numbers like 1e99999, and most JSON parsers read them as infinity.
        value = float(digits)
        return decimal.Decimal(digits if 1e-300 < abs(value) < 1e300 else 0) if abs(value) < 1e300 else value

    return json.loads(text, parse_float=number, parse_constant=constant)


def check(schema: dict, text: str):
    """Raises an error if `text` is not JSON that the schema accepts. Formats are checked too."""
    kind = jsonschema.Draft202012Validator
    # The schema itself is checked without formats, because clients write references that are not URIs.
    kind.check_schema(schema, format_checker=jsonschema.FormatChecker(formats=()))
    kind(exact(json.dumps(schema)), format_checker=kind.FORMAT_CHECKER).validate(exact(text))


def post(url: str, path: str, body: dict) -> dict:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise AssertionError(f"HTTP {error.code}: {error.read().decode()}") from None


def ask(url: str, schema: dict, seed: int) -> list[tuple[str, str]]:
    """Requests SAMPLES texts, and returns them with their finish reasons. The seed decides how the schema is sent."""
    common = {"max_tokens": MAX_TOKENS, "n": SAMPLES, "seed": seed, "temperature": 1}
    way = seed % 4
    if way == 0:
        asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}}
    elif way == 1:
        asked = {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}
    elif way == 2:
        asked = {"structured_outputs": {"json": json.dumps(schema)}}
    else:
        asked = {"guided_json": schema}
    if way < 2:
        messages = [{"role": "user", "content": f"Number {seed}."}]
        answer = post(url, "/v1/chat/completions", {**common, **asked, "messages": messages})
        texts = [choice["message"]["content"] for choice in answer["choices"]]
    else:
        answer = post(url, "/v1/completions", {**common, **asked, "prompt": f"Number {seed}:"})
        texts = [choice["text"] for choice in answer["choices"]]
    return list(zip(texts, (choice["finish_reason"] for choice in answer["choices"])))


def run(url: str, seed: int) -> tuple[set[str], int]:
    """Requests and checks outputs until SAMPLES of them are complete.

    Returns the schema's features and the number of outputs that were cut.
    """
    schema, features = make(seed)
    ended = cut = 0
    for attempt in range(MAX_ASKED):
        for text, reason in ask(url, schema, seed + attempt * 1_000_004):
            if reason != "stop":
                cut += 1
                continue
            try:
                check(schema, text)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {text!r} is not valid for {json.dumps(schema, ensure_ascii=False)}: {error}") from error
            ended += 1
        if ended >= SAMPLES:
            return features, cut
    raise AssertionError(f"seed {seed}: {cut} of {cut + ended} outputs were cut: {json.dumps(schema, ensure_ascii=False)}")


def run_all(url: str, seeds: range, jobs: int = 16, on_error=None) -> tuple[collections.Counter, int]:
    """Checks all seeds. Returns how many schemas have each feature, and how many outputs were cut."""
    counts, cut = collections.Counter(), 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(run, url, seed) for seed in seeds]:
            try:
                features, num_cut = future.result()
            except AssertionError as error:
                if on_error is None:
                    raise
                on_error(error)
                continue
            counts.update(features)
            cut += num_cut
    return counts, cut


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--url", default="http://127.0.0.1:8000")
    options.add_argument("--seeds", default="0:1000", help="first:last, without the last one")
    options.add_argument("--jobs", type=int, default=16)
    given = options.parse_args()
    first, last = map(int, given.seeds.split(":"))
    errors = []

    def report(error):
        errors.append(error)
        print(error, file=sys.stderr)

    counts, cut = run_all(given.url, range(first, last), given.jobs, report)
    print(f"{last - first} schemas, {SAMPLES} outputs each, {len(errors)} wrong; {cut} outputs were cut and replaced")
    for feature, count in counts.most_common():
        print(f"  {feature:20} {count}")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
