#!/usr/bin/env python3
"""Finds circles of files: files of a crate in src/ that import each other, directly or through other files.

    scripts/import-circles.py             prints every circle
    scripts/import-circles.py --check     the same, and fails if there is one
    scripts/import-circles.py --edges src/backend    prints the imports of these files

File A depends on file B if code of A, other than tests, names an item that B defines: in a `use`, or by a path such as
`crate::ids::BlockId`. A name is followed through re-exports to the file that defines it, so `pub use child::Item` costs
the files that use it nothing. A parent's `mod child;` and its re-exports of what its children define are no imports.
Methods are not followed: `impl Parent` in a child's file may be called by the parent's.

It needs only Python 3. It reads Rust as tokens and understands modules, `use` and paths. It does not expand macros.
"""

import argparse
import pathlib
import re
import sys
from dataclasses import dataclass, field

TOKEN = re.compile(
    r"""
    (?P<comment>//[^\n]*)
  | (?P<raw>b?r(?P<hashes>\#*)".*?"(?P=hashes))
  | (?P<string>[bc]?"(?:\\.|[^"\\])*")
  | (?P<char>b?'(?:\\(?:u\{[^}]*\}|x..|.)|[^\\'\n])')
  | (?P<lifetime>'[A-Za-z_]\w*)
  | (?P<ident>(?:r\#)?[A-Za-z_]\w*)
  | (?P<number>\d[\w.]*?(?=\.\.|[^\w.]|\.[A-Za-z_]|$))
  | (?P<path>::)
  | (?P<punct>[^\s\w])
    """,
    re.VERBOSE | re.DOTALL,
)
OPENING = {"(": ")", "[": "]", "{": "}"}
NAMED_ITEMS = {"struct", "enum", "union", "trait", "type", "const", "static", "fn"}
MODIFIERS = {"pub", "unsafe", "async", "default", "auto", "safe"}


def tokens_of(text: str) -> list[str]:
    """Identifiers, `::`, punctuation, and string literals in their quotes. No comments, lifetimes or numbers."""
    text = without_block_comments(text)
    tokens = []
    for match in TOKEN.finditer(text):
        kind = match.lastgroup if match.lastgroup != "hashes" else "raw"
        if kind in ("ident", "path", "punct"):
            tokens.append(match.group().removeprefix("r#"))
        elif kind == "string":
            tokens.append(match.group())
    return tokens


def without_block_comments(text: str) -> str:
    """Rust's block comments nest. They are looked for outside of strings and line comments."""
    out, position, depth = [], 0, 0
    for match in re.finditer(r'//[^\n]*|"(?:\\.|[^"\\])*"|/\*|\*/', text, re.DOTALL):
        if match.group() == "/*":
            if depth == 0:
                out.append(text[position : match.start()])
            depth += 1
        elif match.group() == "*/" and depth > 0:
            depth -= 1
            position = match.end()
    return "".join(out) + text[position:] if depth == 0 else "".join(out)


@dataclass
class Use:
    """One name that a `use` brings in; `name` is `*` for all."""

    path: list[str]
    name: str
    is_reexport: bool


@dataclass
class Module:
    file: pathlib.Path
    parent: "Module | None"
    children: dict[str, "Module"] = field(default_factory=dict)
    items: set[str] = field(default_factory=set)
    uses: list[Use] = field(default_factory=list)
    # Tokens of the items' own code: what paths are looked for in.
    code: list[str] = field(default_factory=list)

    def root(self) -> "Module":
        return self if self.parent is None else self.parent.root()


def skip_group(tokens: list[str], at: int) -> int:
    """The index behind the group that opens at `at`."""
    depth = 0
    while at < len(tokens):
        if tokens[at] in OPENING:
            depth += 1
        elif tokens[at] in OPENING.values():
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return at


def skip_item(tokens: list[str], at: int, ends_with_semicolon: bool) -> int:
    """The index behind an item: behind its `;`, or behind its braces where these may end it."""
    while at < len(tokens):
        token = tokens[at]
        if token == ";":
            return at + 1
        if token in OPENING:
            at = skip_group(tokens, at)
            if token == "{" and not ends_with_semicolon:
                return at
        elif token in OPENING.values():
            return at
        else:
            at += 1
    return at


def is_for_tests(attribute: list[str]) -> bool:
    return attribute[:1] == ["cfg"] and "test" in attribute and "not" not in attribute or attribute == ["test"]


def parse_use_tree(tokens: list[str], at: int, prefix: list[str], is_reexport: bool, uses: list[Use]) -> int:
    """Adds the names of the tree at `at`; returns the index behind it."""
    path = list(prefix)
    while at < len(tokens):
        token = tokens[at]
        if token == "::":
            at += 1
        elif token == "{":
            end = skip_group(tokens, at)
            at += 1
            while at < end - 1:
                at = parse_use_tree(tokens, at, path, is_reexport, uses)
                at += at < end - 1  # The comma.
            return end
        elif token == "*":
            uses.append(Use(path, "*", is_reexport))
            return at + 1
        elif token == "as":
            uses.append(Use(path, tokens[at + 1], is_reexport))
            return at + 2
        elif token in (";", ",", "}"):
            break
        else:
            if token != "self" or not path:
                path.append(token)
            at += 1
    if path != prefix or prefix:
        uses.append(Use(path, path[-1], is_reexport))
    return at


class Crate:
    def __init__(self, root_file: pathlib.Path):
        self.modules: list[Module] = []
        self.root = self.load(root_file, None, root_file.parent)

    def load(self, file: pathlib.Path, parent: Module | None, folder: pathlib.Path) -> Module:
        """The module of a file; `folder` is where its children's files lie."""
        module = Module(file, parent)
        self.modules.append(module)
        self.parse_items(tokens_of(file.read_text()), module, folder)
        return module

    def parse_items(self, tokens: list[str], module: Module, folder: pathlib.Path) -> None:
        at = 0
        attributes: list[list[str]] = []
        is_public = False
        while at < len(tokens):
            token = tokens[at]
            start = at
            if token == "#":
                at += 1 + (tokens[at + 1] == "!")
                end = skip_group(tokens, at)
                attributes.append(tokens[at + 1 : end - 1])
                module.code += tokens[at:end]
                at = end
                continue
            if token in MODIFIERS:
                is_public |= token == "pub"
                at += 1
                if token == "pub" and at < len(tokens) and tokens[at] == "(":
                    at = skip_group(tokens, at)
                continue
            skipped = any(is_for_tests(attribute) for attribute in attributes)
            if token == "mod" and at + 2 < len(tokens):
                at = self.parse_module(tokens, at, module, folder, attributes, skipped)
            elif token == "use":
                uses: list[Use] = []
                at = parse_use_tree(tokens, at + 1, [], is_public, uses) + 1
                if not skipped:
                    module.uses += uses
            elif token == "macro_rules":
                name = tokens[at + 2]
                at = skip_group(tokens, at + 3)
                at += at < len(tokens) and tokens[at] == ";"
                if not skipped:
                    exported = ["macro_export"] in attributes
                    (module.root() if exported else module).items.add(name)
                    self.add_code(module, tokens[start:at])
            else:
                keyword = token
                # `const fn`, `extern "C" fn`.
                if token == "extern" and tokens[at + 1 : at + 2] == ["crate"]:
                    at = skip_item(tokens, at, True)
                    attributes, is_public = [], False
                    continue
                for ahead in range(at, min(at + 4, len(tokens))):
                    if tokens[ahead] == "fn" and token in ("const", "extern", "fn", "unsafe", "async"):
                        keyword, at = "fn", ahead
                        break
                if keyword in NAMED_ITEMS and at + 1 < len(tokens):
                    name = tokens[at + 1] if tokens[at + 1] != "mut" else tokens[at + 2]
                    if not skipped:
                        module.items.add(name)
                at = max(skip_item(tokens, at, keyword in ("const", "static", "type")), start + 1)
                if not skipped:
                    self.add_code(module, tokens[start:at])
            attributes, is_public = [], False

    def parse_module(self, tokens, at, module, folder, attributes, skipped) -> int:
        name = tokens[at + 1]
        path = next((a[2].strip('"') for a in attributes if a[:2] == ["path", "="]), None)
        if tokens[at + 2] == "{":
            end = skip_group(tokens, at + 2)
            if not skipped:
                child = Module(module.file, module)
                module.children[name] = child
                self.modules.append(child)
                self.parse_items(tokens[at + 3 : end - 1], child, folder / name)
            return end
        if not skipped:
            if path is not None:
                file = module.file.parent / path
                below = file.parent
            elif (folder / f"{name}.rs").is_file():
                file, below = folder / f"{name}.rs", folder / name
            else:
                file, below = folder / name / "mod.rs", folder / name
            module.children[name] = self.load(file, module, below)
        return at + 3

    def add_code(self, module: Module, tokens: list[str]) -> None:
        """Adds an item's code, without what is compiled for tests alone, and the `use`s within its functions."""
        at = 0
        while at < len(tokens):
            if tokens[at] == "#" and tokens[at + 1 : at + 2] == ["["]:
                end = skip_group(tokens, at + 1)
                if is_for_tests(tokens[at + 2 : end - 1]):
                    while end < len(tokens) and tokens[end] == "#":
                        end = skip_group(tokens, end + 1)
                    while end < len(tokens) and tokens[end] not in (";", ",", "}"):
                        was_brace = tokens[end] == "{"
                        end = skip_group(tokens, end) if tokens[end] in OPENING else end + 1
                        if was_brace:
                            break
                    at = end
                    continue
                module.code += tokens[at:end]
                at = end
            elif tokens[at] == "use" and tokens[at + 1 : at + 2] not in ([], ["<"]):
                at = parse_use_tree(tokens, at + 1, [], False, module.uses)
            else:
                module.code.append(tokens[at])
                at += 1

    def resolve(self, module: Module, path: list[str], seen: frozenset = frozenset(), outermost: bool = True):
        """The module that the path names, or the one that defines what it names. None for a path of another crate."""
        if not path:
            return None
        first, rest = path[0], path[1:]
        if outermost and first in ("crate", "self", "super"):
            target = {"crate": module.root(), "self": module, "super": module.parent}[first]
            while rest and rest[0] == "super" and target is not None:
                target, rest = target.parent, rest[1:]
            if target is None:
                return None
            return self.resolve(target, rest, seen, False) if rest else target
        if first in module.children:
            return self.resolve(module.children[first], rest, seen, False) if rest else module.children[first]
        if first in module.items:
            return module
        for use in module.uses:
            # A `use` that leads back to itself names another crate: `use metrics::{self, counter}`.
            if use.name == first and id(use) not in seen:
                return self.resolve(module, use.path + rest, seen | {id(use)}, True)
        for use in module.uses:
            if use.name == "*" and id(use) not in seen:
                seen = seen | {id(use)}
                target = self.resolve(module, use.path, seen, True)
                if target is not None and target is not module:
                    found = self.resolve(target, path, seen, False)
                    if found is not None:
                        return found
        return None

    def names_of(self, module: Module) -> set[str]:
        return module.items | set(module.children) | {use.name for use in module.uses if use.name != "*"}

    def edges(self) -> dict[pathlib.Path, dict[pathlib.Path, set[str]]]:
        """For each file the files that it imports, and what of them."""
        edges: dict[pathlib.Path, dict[pathlib.Path, set[str]]] = {}

        def add(module: Module, path: list[str]) -> None:
            target = self.resolve(module, path)
            if target is not None and target.file != module.file:
                edges.setdefault(module.file, {}).setdefault(target.file, set()).add("::".join(path))

        for module in self.modules:
            edges.setdefault(module.file, {})
            for use in module.uses:
                if use.name == "*":
                    target = self.resolve(module, use.path)
                    if target is not None and not (use.is_reexport and self.is_below(target, module)):
                        for name in self.names_of(target) & set(module.code):
                            add(module, use.path + [name])
                    continue
                target = self.resolve(module, use.path)
                if target is None or use.is_reexport and self.is_below(target, module):
                    continue
                # A module that is imported by name is used by the paths that begin with it.
                if not self.names_module(module, use.path):
                    add(module, use.path)
            for path in paths_in(module.code):
                add(module, path)
        return edges

    def names_module(self, module: Module, path: list[str]) -> bool:
        target = self.resolve(module, path)
        inside = self.resolve(module, path[:-1]) if len(path) > 1 else module
        return target is not None and target is not inside and path[-1] not in target.items

    @staticmethod
    def is_below(module: Module, ancestor: Module) -> bool:
        while module is not None:
            if module is ancestor:
                return True
            module = module.parent
        return False


def paths_in(tokens: list[str]):
    """Paths of two segments or more, without those of `pub(in path)`."""
    at = 0
    while at < len(tokens):
        if re.match(r"[A-Za-z_]", tokens[at]) and (at == 0 or tokens[at - 1] not in ("::", ".", "$")):
            start, path = at, [tokens[at]]
            while at + 2 < len(tokens) and tokens[at + 1] == "::" and re.match(r"[A-Za-z_]", tokens[at + 2]):
                path.append(tokens[at + 2])
                at += 2
            if len(path) > 1 and tokens[start - 2 : start] != ["(", "in"]:
                yield path
        at += 1


def circles(edges: dict) -> list[list]:
    """Strongly connected components of more than one file (Tarjan's algorithm)."""
    index: dict = {}
    low: dict = {}
    stack: list = []
    found: list[list] = []

    def visit(node) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in edges.get(node, {}):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = []
            while not component or component[-1] != node:
                component.append(stack.pop())
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return sorted(found, key=lambda component: (-len(component), component))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if there is a circle")
    parser.add_argument("--edges", metavar="PREFIX", help="print the imports of the files whose path begins with this")
    parser.add_argument("--quiet", action="store_true", help="only the files of each circle, not what they import")
    parser.add_argument(
        "--repository",
        type=pathlib.Path,
        metavar="DIR",
        default=pathlib.Path(__file__).resolve().parent.parent,
        help="another checkout to look at",
    )
    arguments = parser.parse_args()
    repository = arguments.repository.resolve()
    sys.setrecursionlimit(10_000)

    edges: dict = {}
    # The program's files lie in src itself, and each crate in a folder of src.
    sources = repository / "src"
    for root in [sources / "main.rs", sources / "lib.rs", *sorted(sources.glob("*/lib.rs"))]:
        edges.update(Crate(root).edges())

    def shown(file: pathlib.Path) -> str:
        return str(file.relative_to(repository))

    if arguments.edges is not None:
        for file in sorted(edges):
            if shown(file).startswith(arguments.edges):
                print(shown(file))
                for target, names in sorted(edges[file].items()):
                    print(f"    {shown(target)}: {', '.join(sorted(names))}")
        return 0

    found = circles(edges)
    for component in found:
        print(f"{len(component)} files import each other:")
        for file in component:
            print(f"  {shown(file)}")
            if not arguments.quiet:
                for target in component:
                    if target in edges[file]:
                        print(f"      {shown(target)}: {', '.join(sorted(edges[file][target]))}")
    print(f"{len(found)} circles of {sum(map(len, found))} files, among {len(edges)} files")
    return int(arguments.check and len(found) > 0)


if __name__ == "__main__":
    sys.exit(main())
