"""What the text of a PTX module says of its kernels."""

import re

ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)", re.DOTALL)
PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]\d+)(?:\s+\.ptr[^,]*?)?\s+\w+(?:\[(\d+)\])?\s*(?:,|$)")
OPCODE = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][a-z0-9_]*(?:[.:][\w:]+)*)\b(?=[\s;])", re.MULTILINE)


def parameter_sizes(ptx):
    """{kernel: [bytes of each parameter]}"""
    kernels = {}
    for name, params in ENTRY.findall(ptx):
        sizes = []
        for param in filter(str.strip, params.split(",")):
            match = PARAM.search(param.strip())
            if not match:
                raise ValueError(f"a parameter of {name}: {param}")
            sizes.append(int(match[1][1:]) // 8 * int(match[2] or 1))
        kernels[name] = sizes
    return kernels


def opcodes(ptx):
    """The instructions that it uses, with their modifiers, sorted."""
    bodies = re.findall(r"\{(.*)\}", ptx, re.DOTALL)
    text = re.sub(r"//.*", "", "\n".join(bodies))
    return sorted({opcode for opcode in OPCODE.findall(text)})
