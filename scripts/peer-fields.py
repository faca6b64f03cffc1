#!/usr/bin/env python3
"""Lists the fields of the request schemas of vLLM, SGLang and llama.cpp.

    scripts/peer-fields.py            writes tests/data/peer_fields.json
    scripts/peer-fields.py --check    fails if the file is not what the sources say

The sources come from the package index (scripts/peer_suites/sources.py) and are read, not run. Of vLLM and SGLang, the
routes name the model of each request's body, and the model's annotations are its fields, inherited ones too. Of
llama.cpp, the fields are those that the C++ of each endpoint reads, and the parameters in the README.

A key such as "/generate sampling_params" holds the fields of an object in a request: its path is "/generate", its name
"sampling_params".
"""

import argparse
import ast
import json
import pathlib
import re
import sys
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))
from peer_suites.sources import PACKAGES, source  # noqa: E402

DATA = ROOT / "tests" / "data" / "peer_fields.json"
ROUTE_METHODS = {"post", "put", "api_route"}

# Objects in requests whose fields change the answer: (path, field, file, class).
VLLM_OBJECTS = [
    ("/inference/v1/generate", "sampling_params", "vllm/sampling_params.py", "SamplingParams"),
    ("/v1/chat/completions", "structured_outputs", "vllm/sampling_params.py", "StructuredOutputsParams"),
    ("/v1/chat/completions", "response_format", "vllm/entrypoints/generate/base/protocol.py", "AnyResponseFormat"),
    ("/v1/chat/completions", "stream_options", "vllm/entrypoints/generate/base/protocol.py", "StreamOptions"),
    ("/v1/completions", "structured_outputs", "vllm/sampling_params.py", "StructuredOutputsParams"),
    ("/v1/completions", "response_format", "vllm/entrypoints/generate/base/protocol.py", "AnyResponseFormat"),
    ("/v1/completions", "stream_options", "vllm/entrypoints/generate/base/protocol.py", "StreamOptions"),
]
SGLANG_PROTOCOL = "sglang/srt/entrypoints/openai/protocol.py"
SGLANG_OBJECTS = [
    ("/generate", "sampling_params", "sglang/srt/sampling/sampling_params.py", "SamplingParams"),
    ("/v1/chat/completions", "response_format", SGLANG_PROTOCOL, "ResponseFormat"),
    ("/v1/chat/completions", "stream_options", SGLANG_PROTOCOL, "StreamOptions"),
    ("/v1/completions", "stream_options", SGLANG_PROTOCOL, "StreamOptions"),
]


# --- Python: vLLM and SGLang ---


@dataclass
class Module:
    tree: ast.Module
    # What each name of the module's top level is: a class or the value of an alias.
    definitions: dict[str, ast.AST] = field(default_factory=dict)
    # Name here -> (the other module's path without its ending, name there).
    imports: dict[str, tuple[pathlib.Path, str]] = field(default_factory=dict)


class Package:
    """The modules of a package, read when they are needed."""

    def __init__(self, root: pathlib.Path):
        self.root = root
        self.modules: dict[pathlib.Path, Module] = {}

    def module(self, path: pathlib.Path) -> Module:
        if path not in self.modules:
            module = Module(ast.parse(path.read_text(encoding="utf-8")))
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ImportFrom) and node.module:
                    # One dot is the file's own folder, each further one the folder above.
                    start = path.parents[node.level - 1] if node.level else self.root
                    for alias in node.names:
                        base = start / node.module.replace(".", "/")
                        module.imports[alias.asname or alias.name] = (base, alias.name)
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef):
                    module.definitions[node.name] = node
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                    module.definitions[node.target.id] = node.value
                elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                    module.definitions[node.targets[0].id] = node.value
            self.modules[path] = module
        return self.modules[path]

    def find(self, path: pathlib.Path, name: str) -> tuple[pathlib.Path, ast.AST] | None:
        """The file and node that define `name` as the file at `path` sees it. None if it is not of this package."""
        module = self.module(path)
        if name in module.definitions:
            return path, module.definitions[name]
        if name not in module.imports:
            return None
        base, there = module.imports[name]
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.exists():
                return self.find(candidate, there)
        return None

    def fields(self, path: pathlib.Path, node: ast.AST) -> set[str]:
        """The fields of every class that an annotation names."""
        names = set()
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.isidentifier():
                part = ast.Name(part.value)
            if isinstance(part, ast.Name) and (found := self.find(path, part.id)):
                where, definition = found
                if isinstance(definition, ast.ClassDef):
                    names |= self.class_fields(where, definition)
                elif isinstance(definition, (ast.Subscript, ast.BinOp, ast.Name)):
                    names |= self.fields(where, definition)
        return names

    def class_fields(self, path: pathlib.Path, node: ast.ClassDef) -> set[str]:
        names = set()
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(base, ast.Name) and (found := self.find(path, base.id)):
                where, definition = found
                if isinstance(definition, ast.ClassDef):
                    names |= self.class_fields(where, definition)
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name = statement.target.id
                is_field = not name.startswith("_") and "ClassVar" not in ast.dump(statement.annotation)
                if is_field and name != "model_config":
                    names |= aliases(statement.value) or {name}
        return names


def aliases(value: ast.AST | None) -> set[str]:
    """The names that `Field(alias=…)` or `Field(validation_alias=…)` gives a field."""
    names = set()
    if isinstance(value, ast.Call):
        for keyword in value.keywords:
            if keyword.arg in ("alias", "validation_alias"):
                for part in ast.walk(keyword.value):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        names.add(part.value)
    return names


def routes(tree: ast.Module):
    """The path of each route with a body, and its handler."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for decorator in node.decorator_list:
            is_route = (
                isinstance(decorator, ast.Call)
                and isinstance(decorator.func, ast.Attribute)
                and decorator.func.attr in ROUTE_METHODS
                and decorator.args
            )
            if is_route:
                # SGLang reads some paths from the environment: the default comes last.
                texts = [part.value for part in ast.walk(decorator.args[0]) if isinstance(part, ast.Constant)]
                yield texts[-1], node


def python_fields(root: pathlib.Path, files: list[pathlib.Path], objects: list[tuple[str, str, str, str]]):
    package = Package(root)
    fields: dict[str, set[str]] = {}
    for file in files:
        for path, handler in routes(package.module(file).tree):
            for argument in handler.args.args:
                # `Request` is the HTTP request.
                if argument.annotation and (annotation := ast.unparse(argument.annotation)) != "Request":
                    names = package.fields(file, argument.annotation)
                    if not names and re.search(r"Req(uest)?", annotation):
                        raise ValueError(f"{path}: no fields of {annotation} were found")
                    fields.setdefault(path, set()).update(names)
    for path, name, file, type_name in objects:
        fields[f"{path} {name}"] = package.fields(root / file, ast.Name(type_name))
    if empty := [key for key, names in fields.items() if " " in key and not names]:
        raise ValueError(f"no fields were found of {empty}")
    return fields


def vllm_fields():
    root = source("vllm")
    files = [
        file
        for file in sorted((root / "vllm" / "entrypoints").rglob("*.py"))
        if re.search(r"router\.(post|put|api_route)\(", file.read_text(encoding="utf-8"))
    ]
    fields = python_fields(root, files, VLLM_OBJECTS)
    # SageMaker's path takes the request of any of these.
    others = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/classify", "/score", "/rerank", "/pooling")
    fields["/invocations"] = set().union(*(fields[path] for path in others))
    return fields


def sglang_fields():
    root = source("sglang")
    return python_fields(root, [root / "sglang/srt/entrypoints/http_server.py"], SGLANG_OBJECTS)


# --- C++: llama.cpp ---

# The functions that read the body of each endpoint. `schema` is the table of sampling parameters.
COMPLETION = ("make_llama_cmpl_schema", "handle_completions_impl")
CHAT = ("oaicompat_chat_params_parse", *COMPLETION)
EMBEDDING = ("handle_embeddings_impl",)
RERANK = ("post_rerank", "format_response_rerank")
RESPONSES = ("server_chat_convert_responses_to_chatcmpl", *CHAT)
# The conversion copies the fields that it knows, and drops the others.
MESSAGES = ("server_chat_convert_anthropic_to_oai",)
SLOTS = ("post_slots", "handle_slots_save", "handle_slots_restore", "handle_slots_erase")
LLAMA_CPP_READERS = {
    "/completion": COMPLETION,
    "/completions": COMPLETION,
    "/v1/completions": ("oaicompat_completion_params_parse", *COMPLETION),
    "/chat/completions": CHAT,
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/control": ("post_control",),
    "/v1/responses": RESPONSES,
    "/responses": RESPONSES,
    "/v1/audio/transcriptions": ("convert_transcriptions_to_chatcmpl",),
    "/audio/transcriptions": ("convert_transcriptions_to_chatcmpl",),
    "/v1/messages": MESSAGES,
    "/infill": ("post_infill", *COMPLETION),
    "/embedding": EMBEDDING,
    "/embeddings": EMBEDDING,
    "/v1/embeddings": EMBEDDING,
    "/rerank": RERANK,
    "/reranking": RERANK,
    "/v1/rerank": RERANK,
    "/v1/reranking": RERANK,
    "/tokenize": ("post_tokenize",),
    "/detokenize": ("post_detokenize",),
    "/apply-template": ("oaicompat_chat_params_parse",),
    "/chat/completions/input_tokens": ("oaicompat_chat_params_parse",),
    "/v1/chat/completions/input_tokens": ("oaicompat_chat_params_parse",),
    "/responses/input_tokens": ("server_chat_convert_responses_to_chatcmpl", "oaicompat_chat_params_parse"),
    "/v1/responses/input_tokens": ("server_chat_convert_responses_to_chatcmpl", "oaicompat_chat_params_parse"),
    "/v1/messages/count_tokens": MESSAGES,
    "/lora-adapters": ("parse_lora_request",),
    "/slots/:id_slot": SLOTS,
}
# Endpoints of its router, proxy and tools, which serve no model, and one that reads nothing.
LLAMA_CPP_OTHERS = {
    "/models", "/models/load", "/models/unload", "/v1/streams/lookup", "/cors-proxy", "/tools", "/props",
}  # fmt: skip

BODY = r"(?:body|data|response_body|inp_body|request|request_data|entry)"
READS = [
    re.compile(rf'json_value\(\s*{BODY}\s*,\s*"([^"]+)"'),
    re.compile(rf'\b{BODY}\.(?:contains|at|count)\(\s*"([^"]+)"'),
    re.compile(r'new field_(?!nested)\w+\(\s*"([^"]+)"'),
    re.compile(r'add_alias\(\s*"([^"]+)"'),
]
# A nested field is read with its first name; its subfields are not fields of the request.
NESTED = re.compile(r'new field_nested\(\s*"([^"]+)"')
SUBFIELD = re.compile(r'add_subfield\(\(new field_\w+\(\s*"[^"]+"')
LISTS = re.compile(r'(?:\w+ : |unsupported_params )\{\s*("[^"}]+"(?:\s*,\s*"[^"}]+")*)\s*\}')


def cpp_body(text: str, name: str) -> str:
    """The text of a function, or of a handler that is assigned to a member, up to the brace that ends it."""
    function = rf"[\w:<>,&*\s]*?\b{name}\([^;{{]*?\)(?:\s*const)?\s*\{{"
    start = re.search(rf"^(?:{function}|\s*this->{name} = \[)", text, re.MULTILINE)
    if start is None:
        return ""
    opening = text.index("{", start.end() - 1)
    depth = 0
    for position in range(opening, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[opening : position + 1]
    raise ValueError(f"{name} does not end")


def without_strings_of_braces(text: str) -> str:
    """Removes comments, and braces in character and string literals, so that braces can be counted."""
    text = re.sub(r"//[^\n]*", "", text)
    return re.sub(r"'[{}]'|\"(?:\\.|[^\"\\\n])*\"", lambda match: re.sub(r"[{}]", "", match.group()), text)


def llama_cpp_fields():
    server = source("llama.cpp") / "tools" / "server"
    files = [file.read_text(encoding="utf-8") for file in sorted(server.glob("*.cpp"))]
    text = "\n".join(without_strings_of_braces(file) for file in files)
    readme = readme_parameters((server / "README.md").read_text(encoding="utf-8"))
    posted = set(re.findall(r'ctx_http\.post\(\s*"([^"]+)"', text))
    if unknown := posted - LLAMA_CPP_READERS.keys() - LLAMA_CPP_OTHERS:
        raise ValueError(f"name the functions that read the body of these endpoints of llama.cpp: {sorted(unknown)}")
    fields: dict[str, set[str]] = {}
    for path in posted & LLAMA_CPP_READERS.keys():
        names = set()
        for function in LLAMA_CPP_READERS[path]:
            body = cpp_body(text, function)
            if not body:
                raise ValueError(f"llama.cpp has no function {function}")
            for list_of_names in LISTS.findall(body):
                names.update(re.findall(r'"([^"]+)"', list_of_names))
            names.update(NESTED.findall(body))
            body = SUBFIELD.sub("", body)
            for read in READS:
                names.update(read.findall(body))
        fields[path] = names | readme.get(path, set())
    # These take the parameters that the README lists for /completion.
    for path, functions in LLAMA_CPP_READERS.items():
        if "make_llama_cmpl_schema" in functions:
            fields[path] |= readme["/completion"]
    return fields


def readme_parameters(text: str) -> dict[str, set[str]]:
    """The parameters that the README lists for each endpoint: lines that begin with the name in backquotes."""
    found = {}
    for section in re.split(r"^#+ ", text, flags=re.MULTILINE):
        if heading := re.match(r"POST `([^`?]+)", section):
            options = section.split("**Response")[0].partition("*Options:*")[2]
            found[heading[1]] = set(re.findall(r"^`([\w.]+)` ?:", options, flags=re.MULTILINE))
    return found


# --- the file ---


def read_all() -> str:
    peers = {"vllm": vllm_fields(), "sglang": sglang_fields(), "llama.cpp": llama_cpp_fields()}
    data = {}
    for peer, fields in peers.items():
        data[peer] = {"version": PACKAGES[peer].version}
        data[peer].update({path: sorted(fields[path]) for path in sorted(fields) if fields[path]})
    return json.dumps(data, indent=1) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if the file is not what the sources say")
    options = parser.parse_args()
    text = read_all()
    if not options.check:
        DATA.write_text(text, encoding="utf-8")
    elif not DATA.exists() or DATA.read_text(encoding="utf-8") != text:
        sys.exit(f"{DATA.relative_to(ROOT)} is stale: run scripts/peer-fields.py")


if __name__ == "__main__":
    main()
