#!/usr/bin/env python3
"""Sends the same requests to vLLM and to Pagetide and says where the answers differ.

Both serve the same model in float32. The script compares status, shape (which fields, of which types), text, tokens,
log-probabilities (to 1e-3), finish reasons, usage, and the field that an error names. Streams are compared by the sum
of their chunks. scripts/vllm_comparison/differences.toml lists the intended differences, each with its reason, and
docs/api.md shows them. The exit status is 1 if there is another difference, or an entry of that file that explains none.

  scripts/compare-with-vllm.py --vllm URL --pagetide URL --name NAME       uses running servers
  scripts/compare-with-vllm.py --model DIR --vllm-bin .../bin/vllm         starts both, one after the other for
                                                                           embeddings

Needs Python 3.11, and vLLM (its CPU build is enough) if the script is to start it. models/demo can be the model; vLLM
then needs the flags of VLLM_FLAGS below.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from probes import free_port  # noqa: E402
from vllm_comparison.requests import generate  # noqa: E402

TOLERANCE = 1e-3
TIMEOUT_S = 300
# Made anew for every answer.
VOLATILE = {"id", "created", "system_fingerprint", "request_id", "created_at"}
# Depends on what came before, and on the size of a block.
VOLATILE |= {"cached_tokens"}
VLLM_FLAGS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details",
              "--enable-request-id-headers"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="URL", help="a server that runs")
    parser.add_argument("--pagetide", metavar="URL", help="a server that runs")
    parser.add_argument("--vllm-embeddings", metavar="URL", help="vLLM with --runner pooling: it serves either kind")
    parser.add_argument("--name", default="m", help="the served model's name")
    parser.add_argument("--model", metavar="DIR", help="start the servers that are not given, with this model")
    parser.add_argument("--vllm-bin", metavar="FILE")
    parser.add_argument("--pagetide-bin", metavar="FILE", default=str(HERE.parent / "target/release/pagetide"))
    parser.add_argument("--threads", type=int, default=2, help="of each server that is started")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", metavar="REGEX", help="requests whose name matches")
    parser.add_argument("--report", metavar="FILE", help="every difference and both answers, as JSON")
    return parser.parse_args()


# --- servers


class Server:
    """A server that this script starts and stops."""

    def __init__(self, command, environment, log):
        self.url = f"http://127.0.0.1:{command[-1]}"
        self.log = log
        with open(log, "w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **environment})
        print(f"starting {' '.join(command[:2])}; its log is {log}", file=sys.stderr)

    def wait(self):
        for _ in range(600):
            if self.process.poll() is not None:
                raise SystemExit(f"it ended at once: see {self.log}")
            try:
                urllib.request.urlopen(self.url + "/health", timeout=5)
                return self
            except OSError:
                time.sleep(0.5)
        raise SystemExit(f"it does not get ready: see {self.log}")

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def start_vllm(args, *more):
    command = [args.vllm_bin, "serve", args.model, "--dtype", "float32", "--max-model-len", "2048",
               "--served-model-name", args.name, "--host", "127.0.0.1", *more, "--port", str(free_port())]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                   "OMP_NUM_THREADS": str(args.threads), "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}"}
    return Server(command, environment, f"/tmp/compare-vllm-{command[-1]}.log")


def start_pagetide(args):
    command = [args.pagetide_bin, "serve", "--model", args.model, "--dtype", "float32", "--max-model-len", "2048",
               "--device", "cpu", "--set", f"device.threads={args.threads}", "--served-model-name", args.name,
               *tool_flags(args.pagetide_bin), "--port", str(free_port())]
    return Server(command, {}, f"/tmp/compare-pagetide-{command[-1]}.log")


def tool_flags(binary):
    text = subprocess.run([binary, "serve", "--help"], capture_output=True, text=True, check=True).stdout
    return ["--tool-call-parser", "hermes"] if "--tool-call-parser" in text else []


# --- asking


def ask(url, request):
    """The answer as `{"status": ..., "json": ...}` or `{"status": ..., "events": [...]}` or with `text`."""
    data = request.raw
    if data is None and request.body is not None:
        data = json.dumps(request.body).encode()
    headers = {"Content-Type": "application/json", **request.headers} if data is not None else request.headers
    message = urllib.request.Request(url + request.path, data, headers, method=request.method)
    try:
        with urllib.request.urlopen(message, timeout=TIMEOUT_S) as answer:
            return read(answer.status, answer.headers, answer.read())
    except urllib.error.HTTPError as error:
        return read(error.code, error.headers, error.read())
    except OSError as error:
        return {"status": 0, "text": f"no answer: {error}"}


def read(status, headers, body):
    answer = {"status": status, "request_id": headers.get("X-Request-Id")}
    kind = (headers.get("Content-Type") or "").split(";")[0]
    text = body.decode("utf-8", "replace")
    if kind == "text/event-stream":
        data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        return answer | {"done": data[-1:] == ["[DONE]"],
                         "events": [json.loads(event) for event in data if event != "[DONE]"]}
    if kind == "application/json":
        return answer | {"json": json.loads(text)}
    return answer | {"text": text}


# --- comparing


class Comparison:
    """Collects the differences of one request: `(kind, path, vllm, pagetide)`."""

    def __init__(self, request):
        self.request = request
        self.found = []

    def note(self, kind, path, vllm, pagetide):
        self.found.append((kind, path, vllm, pagetide))

    def answers(self, vllm, pagetide):
        if vllm["status"] != pagetide["status"]:
            self.note("status", "", vllm["status"], pagetide["status"])
            return
        if self.request.headers.get("X-Request-Id") and vllm["request_id"] != pagetide["request_id"]:
            self.note("value", "header X-Request-Id", vllm["request_id"], pagetide["request_id"])
        forms = [next((form for form in ("events", "json", "text") if form in answer), "") for answer in (vllm, pagetide)]
        if forms[0] != forms[1]:
            self.note("form", "", *forms)
        elif forms[0] == "events":
            self.streams(vllm, pagetide)
        elif vllm["status"] >= 400:
            self.errors(vllm.get("json"), pagetide.get("json"))
        elif forms[0] == "json":
            self.values("", vllm["json"], pagetide["json"])

    def errors(self, vllm, pagetide):
        """Messages are each server's own; so are the fields beside them where a value has none."""
        errors = [answer.get("error") if isinstance(answer, dict) else None for answer in (vllm, pagetide)]
        if not all(isinstance(error, dict) for error in errors):
            self.note("error form", "", *[sorted(answer) if isinstance(answer, dict) else answer
                                          for answer in (vllm, pagetide)])
            return
        for name in sorted(errors[0].keys() | errors[1].keys()):
            values = [error.get(name) for error in errors]
            if name == "param" and is_same_field(*values):
                continue
            if name != "message" and values[0] != values[1]:
                self.note("error", name, *values)

    def streams(self, vllm, pagetide):
        if vllm["done"] != pagetide["done"]:
            self.note("value", "[DONE]", vllm["done"], pagetide["done"])
        if any(isinstance(event.get("type"), str) for event in vllm["events"] + pagetide["events"]):
            self.typed_streams(vllm["events"], pagetide["events"])
            return
        # How tokens are cut into chunks is each server's own affair: a field counts where any chunk has it.
        for name in ("choices", "usage", "error"):
            some = [merged([event for event in answer["events"] if has(event, name)]) for answer in (vllm, pagetide)]
            self.fields(f"events with {name}: ", *some)
        self.values("sum of events", *[folded(answer["events"]) for answer in (vllm, pagetide)])

    def typed_streams(self, vllm, pagetide):
        """Of Responses and Messages, where every event says what it is."""
        orders = [" ".join(dict.fromkeys(str(event.get("type")) for event in events)) for events in (vllm, pagetide)]
        if orders[0] != orders[1]:
            self.note("value", "types of events", *orders)
        for kind in sorted({event.get("type") for event in vllm} & {event.get("type") for event in pagetide}):
            some = [merged([event for event in events if event.get("type") == kind]) for events in (vllm, pagetide)]
            self.fields(f"{kind}: ", *some)
        texts = [said(events) for events in (vllm, pagetide)]
        if texts[0] != texts[1] and not self.request.sampled:
            self.note("value", "sum of events: text", *texts)

    def fields(self, path, vllm, pagetide):
        for name in sorted(vllm.keys() | pagetide.keys()):
            if any(holder in vllm.keys() ^ pagetide.keys() or vllm[holder] != pagetide[holder]
                   for holder in holders(name) if holder in vllm or holder in pagetide):
                continue  # what differs is what it stands in
            sides = [" or ".join(sorted(side[name])) if name in side else None for side in (vllm, pagetide)]
            if sides[0] != sides[1]:
                self.note(kind_of(*sides), path + name, *sides)

    def shape(self, path, vllm, pagetide):
        self.fields(f"{path}: " if path else "", types(vllm), types(pagetide))

    def values(self, path, vllm, pagetide):
        """Fields, types and what they hold."""
        self.shape(path, vllm, pagetide)
        if not self.request.sampled:
            self.same(path, vllm, pagetide)

    def same(self, path, vllm, pagetide):
        if isinstance(vllm, dict) and isinstance(pagetide, dict):
            if is_logprob_table(vllm) and is_logprob_table(pagetide):
                self.tables(path, vllm, pagetide)
                return
            for name in vllm.keys() & pagetide.keys():
                if name not in VOLATILE:
                    self.same(f"{path}{separator(path)}{name}", vllm[name], pagetide[name])
        elif isinstance(vllm, list) and isinstance(pagetide, list):
            if path.endswith("top_logprobs") and all(isinstance(item, dict) for item in vllm + pagetide):
                vllm, pagetide = (by_token(items) for items in (vllm, pagetide))
                if isinstance(vllm, dict) and isinstance(pagetide, dict):
                    self.tables(path, vllm, pagetide)
                    return
            if len(vllm) != len(pagetide):
                self.note("value", f"{path}[]", f"{len(vllm)} items", f"{len(pagetide)} items")
                return
            for pair in zip(vllm, pagetide):
                self.same(f"{path}[]", *pair)
        elif isinstance(vllm, float) and isinstance(pagetide, (int, float)) and not isinstance(pagetide, bool):
            if abs(vllm - pagetide) > TOLERANCE:
                self.note("value", path, vllm, pagetide)
        elif path.endswith(".rank") and isinstance(vllm, int) and isinstance(pagetide, int):
            # Tokens that are as likely as each other stand in either order.
            if abs(vllm - pagetide) > max(1, vllm // 100):
                self.note("value", path, vllm, pagetide)
        elif type(vllm) is type(pagetide) and vllm != pagetide:
            self.note("value", path, vllm, pagetide)

    def tables(self, path, vllm, pagetide):
        """Tokens with log-probabilities. Two that are as likely as each other may take each other's place."""
        for token in vllm.keys() ^ pagetide.keys():
            side, other = (vllm, pagetide) if token in vllm else (pagetide, vllm)
            if len(vllm) != len(pagetide) or abs(side[token] - min(other.values())) > TOLERANCE:
                self.note("value", f"{path}{{tokens}}", sorted(vllm), sorted(pagetide))
                return
        for token in vllm.keys() & pagetide.keys():
            if abs(vllm[token] - pagetide[token]) > TOLERANCE:
                self.note("value", f"{path}{{logprob}}", vllm[token], pagetide[token])


def has(event, name):
    return isinstance(event, dict) and bool(event.get(name))


def separator(path):
    return ": " if path == "sum of events" else "." if path else ""


def is_same_field(vllm, pagetide):
    """vLLM writes `body.stop.0` or, for a whole list, `stop`; Pagetide `stop[0]`."""
    if vllm is None or pagetide is None:
        return vllm == pagetide
    # The names of vLLM's own types stand between those of the fields.
    parts = [part for part in vllm.removeprefix("body.").split(".") if not part[:1].isupper()]
    vllm = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts).lstrip(".")
    pagetide = re.sub(r"\.(\d+)", r"[\1]", pagetide)
    return re.match(re.escape(vllm) + r"($|\.|\[)", pagetide) is not None


def holders(path):
    """`a.b` and `a` of `a.b[].c`."""
    parts = re.split(r"(?=\.)|(?=\[\])", path)
    return ["".join(parts[:i]) for i in range(1, len(parts))]


def kind_of(vllm, pagetide):
    if vllm is None:
        return "only Pagetide has"
    return "only vLLM has" if pagetide is None else "type"


def type_of(value):
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"),
                       (dict, "object")):
        if isinstance(value, kind):
            return name
    return "null"


def types(value, path="", into=None):
    """The types at every path; the items of a list count as one."""
    into = defaultdict(set) if into is None else into
    into[path or "."].add(type_of(value))
    if isinstance(value, dict) and is_table(value):
        for item in value.values():
            types(item, f"{path}.*".lstrip("."), into)
    elif isinstance(value, dict):
        for name, item in value.items():
            types(item, f"{path}.{name}".lstrip("."), into)
    elif isinstance(value, list):
        for item in value:
            types(item, f"{path}[]", into)
    return into


def merged(values):
    into = defaultdict(set)
    for value in values:
        types(value, "", into)
    return into


def is_table(value):
    """Keyed by tokens: {" the": -1.5}, or {"57": {"logprob": -1.5, ...}}."""
    return is_logprob_table(value) or bool(value) and all(
        isinstance(item, dict) and "logprob" in item and key.isdigit() for key, item in value.items())


def is_logprob_table(value):
    return bool(value) and all(isinstance(item, float) and item <= 0 for item in value.values())


def by_token(items):
    """[{"token": ..., "logprob": ...}] as a table; the list itself where tokens share their text."""
    table = {item.get("token"): item.get("logprob") for item in items}
    return table if len(table) == len(items) and all(isinstance(value, float) for value in table.values()) else items


def said(events):
    """The text of a stream of Responses or Messages."""
    deltas = [event.get("delta") for event in events if str(event.get("type")).endswith("delta")]
    return "".join(delta if isinstance(delta, str) else (delta or {}).get("text") or "" for delta in deltas)


def folded(events):
    """What a stream adds up to."""
    choices, last_usage = {}, None
    for event in events:
        last_usage = event.get("usage") or last_usage
        for choice in event.get("choices") or []:
            sum_ = choices.setdefault(choice.get("index"), {"text": "", "reasoning": "", "tool_calls": {}, "tokens": [],
                                                           "logprobs": [], "finish_reason": None, "stop_reason": None})
            delta = choice.get("delta") or {}
            sum_["text"] += choice.get("text") or delta.get("content") or ""
            sum_["reasoning"] += delta.get("reasoning_content") or delta.get("reasoning") or ""
            sum_["tokens"] += choice.get("token_ids") or []
            for call in delta.get("tool_calls") or []:
                parts = sum_["tool_calls"].setdefault(str(call.get("index")), {"name": "", "arguments": ""})
                for name in parts:
                    parts[name] += (call.get("function") or {}).get(name) or ""
            logprobs = choice.get("logprobs") or {}
            sum_["logprobs"] += logprobs.get("content") or logprobs.get("token_logprobs") or []
            sum_["finish_reason"] = choice.get("finish_reason") or sum_["finish_reason"]
            sum_["stop_reason"] = choice.get("stop_reason") or sum_["stop_reason"]
    return {"choices": [choices[index] for index in sorted(choices, key=str)], "usage": last_usage,
            "error": next((event["error"] for event in events if "error" in event), None)}


# --- what is meant


class Expected:
    """Differences that are meant. An entry's fields are whole regular expressions, `reason` apart; those left out match
    anything."""

    FIELDS = ("request", "kind", "path", "vllm", "pagetide")

    def __init__(self, path):
        with open(path, "rb") as file:
            self.entries = tomllib.load(file)["difference"]
        for entry in self.entries:
            entry["used"] = 0

    def explain(self, request, difference):
        values = dict(zip(self.FIELDS, (request.name, *difference)))
        for entry in self.entries:
            if all(re.fullmatch(entry[name], str(values[name]), re.DOTALL) for name in self.FIELDS if name in entry):
                entry["used"] += 1
                return entry
        return None


def compare(args, vllm, pagetide, requests):
    def one(request):
        answers = [ask(url, request) for url in (vllm, pagetide)]
        comparison = Comparison(request)
        comparison.answers(*answers)
        return request, comparison.found, answers

    with ThreadPoolExecutor(4) as pool:
        results = []
        for result in pool.map(one, requests):
            results.append(result)
            if sys.stderr.isatty():
                print(f"\r{len(results)} of {len(requests)} requests", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return results


def short(value):
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def print_groups(results, expected):
    """The differences, those that are not meant first; returns how many those are."""
    unexplained, explained = defaultdict(list), defaultdict(int)
    for request, found, _ in results:
        for difference in found:
            entry = expected.explain(request, difference)
            if entry is None:
                kind, path, vllm, pagetide = difference
                key = (kind, path, vllm, pagetide) if kind in ("status", "error", "form") else (kind, path)
                unexplained[tuple(map(str, key))].append((request.name, vllm, pagetide))
            else:
                explained[entry["name"]] += 1
    for name, count in sorted(explained.items(), key=lambda item: -item[1]):
        print(f"meant        {count:4}  {name}")
    for key, examples in sorted(unexplained.items()):
        name, vllm, pagetide = examples[0]
        print(f"NOT MEANT    {len(examples):4}  {key[0]}: {key[1] or 'the answer'}: vLLM {short(vllm)}, "
              f"Pagetide {short(pagetide)}")
        print("                   " + ", ".join(name for name, *_ in examples[:6]) + (" ..." if len(examples) > 6 else ""))
    return sum(map(len, unexplained.values()))


def write_report(path, results):
    rows = [{"request": request.name, "path": request.path, "body": request.body,
             "differences": [dict(zip(("kind", "path", "vllm", "pagetide"), one)) for one in found],
             "vllm": answers[0], "pagetide": answers[1]}
            for request, found, answers in results if found]
    Path(path).write_text(json.dumps(rows, indent=1, ensure_ascii=False))


def run(args, servers):
    chosen = [request for request in generate(args.seed, args.name) if re.search(args.only or "", request.name)]
    generating = [request for request in chosen if not request.embeddings]
    embedding = [request for request in chosen if request.embeddings]
    pagetide = args.pagetide or servers.setdefault("pagetide", start_pagetide(args)).url
    vllm = args.vllm or servers.setdefault("vllm", start_vllm(args, *VLLM_FLAGS)).url
    for server in servers.values():
        server.wait()
    results = compare(args, vllm, pagetide, generating)
    pooling = args.vllm_embeddings
    if pooling is None and "vllm" in servers and embedding:
        servers.pop("vllm").stop()
        pooling = servers.setdefault("pooling", start_vllm(args, "--runner", "pooling")).wait().url
    if pooling is not None:
        results += compare(args, pooling, pagetide, embedding)
    elif embedding:
        print(f"{len(embedding)} requests for embeddings are left out: no --vllm-embeddings", file=sys.stderr)
    return results


def main():
    args = arguments()
    if not args.model and not (args.vllm and args.pagetide):
        raise SystemExit("give --vllm and --pagetide, or --model to start them with")
    if not args.vllm and not args.vllm_bin:
        raise SystemExit("give --vllm or --vllm-bin")
    expected = Expected(HERE / "vllm_comparison/differences.toml")
    servers = {}
    try:
        results = run(args, servers)
    finally:
        for server in servers.values():
            server.stop()
    if args.report:
        write_report(args.report, results)
    not_meant = print_groups(results, expected)
    same = sum(not found for _, found, _ in results)
    meant = sum(bool(found) and all(expected.explain(request, one) for one in found) for request, found, _ in results)
    stale = [entry["name"] for entry in expected.entries if not entry["used"] and not entry.get("sometimes")]
    stale = stale if not args.only else []
    for name in stale:
        print(f"UNUSED              {name}: no answer differs so")
    print(f"\n{len(results)} requests: {same} answered the same, {meant} with differences that are meant, "
          f"{len(results) - same - meant} with others ({not_meant} differences)")
    return 1 if not_meant or stale else 0


if __name__ == "__main__":
    sys.exit(main())
