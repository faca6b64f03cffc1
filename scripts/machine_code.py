"""Reads the machine code of kernels: what nvdisasm prints of a cubin, and how many thread blocks fit on a
multiprocessor."""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

SECTION = re.compile(r"^\s*\.section\s+(\S+?),")
NUMBER = re.compile(r"\.word\s+(0x[0-9a-f]+)")
FUNCTION = re.compile(r"\.word\s+index@\((\w+)\)")
ZERO_BYTES = re.compile(r"^\s*\.zero\s+(\d+)")
LABEL = re.compile(r"^(\.L_\w+):")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*)(.*)")
TARGET = re.compile(r"`\((\.L_\w+)\)")

# Copies from global to shared memory that no thread waits for: 16 bytes for each thread (cp.async), or whole tiles.
ASYNC_COPY = re.compile(r"LDGSTS\..*\b128\b|UBLKCP\b|UTMALDG\b")
# Products on tensor cores: mma.sync, wgmma, tcgen05. HFMA2.MMA is not one; it is a 16-bit multiplication.
TENSOR_CORES = re.compile(r"[HBIDQO]MMA\b|[HBIQO]GMMA\b|UTC[HIQO]?MMA\b")
LOCAL_MEMORY = re.compile(r"(LDL|STL)\b")
# ATOMS.CAST is the compare-and-swap of the loops that stand for atomics which shared memory does not have.
COMPARE_AND_SWAP = re.compile(r"(ATOM|ATOMS|ATOMG)\b.*\.CAST?\b")


@dataclass
class Kernel:
    """The figures of one kernel of a cubin."""

    registers: int = 0
    stack_bytes: int = 0
    static_shared_bytes: int = 0
    # The largest number of threads of a block (`__launch_bounds__`).
    threads: int = 1024
    async_copies: int = 0
    tensor_core_ops: int = 0
    local_accesses: int = 0
    # Compare-and-swaps that a later branch may repeat.
    cas_loops: int = 0


def count_cas_loops(instructions, labels):
    """How many compare-and-swaps lie in a loop: between a label and a branch back to it."""
    loops = [
        (labels[target[1]], index)
        for index, (opcode, operands) in enumerate(instructions)
        if opcode == "BRA" and (target := TARGET.search(operands)) and labels.get(target[1], index) < index
    ]
    return sum(
        1
        for index, (opcode, _) in enumerate(instructions)
        if COMPARE_AND_SWAP.match(opcode) and any(start <= index < end for start, end in loops)
    )


def read_sass(text, arch):
    """The kernels of a cubin, from what `nvdisasm CUBIN` prints: {name: Kernel}."""
    section, attribute, of_kernel = "", "", ""
    kernels, code = defaultdict(Kernel), {}
    for line in text.splitlines():
        if match := SECTION.match(line):
            section, attribute = match[1], ""
            if section.startswith(".text."):
                code[section.removeprefix(".text.")] = ([], {})
        elif "nvinfo : " in line:
            attribute = line.rsplit(" ", 1)[1]
        elif section == ".nv.info" and attribute in ("EIATTR_REGCOUNT", "EIATTR_FRAME_SIZE"):
            # Pairs of a function and a number.
            if match := FUNCTION.search(line):
                of_kernel = match[1]
            elif match := NUMBER.search(line):
                field = "registers" if attribute == "EIATTR_REGCOUNT" else "stack_bytes"
                setattr(kernels[of_kernel], field, int(match[1], 16))
        elif section.startswith(".nv.info.") and attribute == "EIATTR_MAX_THREADS":
            # The first of three numbers; blocks have one dimension.
            if match := NUMBER.search(line):
                kernels[section.removeprefix(".nv.info.")].threads = int(match[1], 16)
                attribute = ""
        elif section.startswith(".nv.shared.") and (match := ZERO_BYTES.match(line)):
            # From sm_90 on the system's part is counted too.
            of_system = 0 if arch == "sm_80" else SYSTEM_SHARED_BYTES
            kernels[section.removeprefix(".nv.shared.")].static_shared_bytes = max(int(match[1]) - of_system, 0)
        elif section.startswith(".text."):
            instructions, labels = code[section.removeprefix(".text.")]
            if match := LABEL.match(line):
                labels[match[1]] = len(instructions)
            elif match := INSTRUCTION.match(line):
                instructions.append((match[1], match[2]))
    for name, (instructions, labels) in code.items():
        kernel = kernels[name]
        if not instructions or kernel.registers == 0:
            raise ValueError(f"nvdisasm shows no code of {name}, or not its registers")
        opcodes = Counter(opcode for opcode, _ in instructions)
        count = lambda pattern: sum(n for opcode, n in opcodes.items() if pattern.match(opcode))
        kernel.async_copies = count(ASYNC_COPY)
        kernel.tensor_core_ops = count(TENSOR_CORES)
        kernel.local_accesses = count(LOCAL_MEMORY)
        kernel.cas_loops = count_cas_loops(instructions, labels)
    return {name: kernels[name] for name in code}


# Shared memory of a multiprocessor, of which a block can have 1 KiB less ("Technical Specifications per Compute
# Capability" in the CUDA C++ Programming Guide). All of these have 64 Ki registers, 2,048 threads and 32 blocks.
SHARED_BYTES = {"sm_80": 164 << 10, "sm_90a": 228 << 10, "sm_100a": 228 << 10}
REGISTERS, THREADS, BLOCKS, WARP = 64 << 10, 2048, 32, 32
# A warp's registers are given in units of 256, each quarter of a multiprocessor has its own, and a block's shared
# memory is given in units of 128 bytes, with 1 KiB for the system.
REGISTER_UNIT, QUARTERS, SHARED_UNIT, SYSTEM_SHARED_BYTES = 256, 4, 128, 1024


def round_up(number, unit):
    return -(-number // unit) * unit


def blocks_per_sm(arch, threads, registers, shared_bytes):
    """How many thread blocks run on a multiprocessor at once, and what limits them: (blocks, reason)."""
    warps = -(-threads // WARP)
    of_quarter = REGISTERS // QUARTERS // round_up(registers * WARP, REGISTER_UNIT)
    shared = round_up(shared_bytes + SYSTEM_SHARED_BYTES, SHARED_UNIT)
    limits = {
        "blocks": BLOCKS,
        "threads": THREADS // (warps * WARP),
        "registers": of_quarter * QUARTERS // warps,
        "shared memory": SHARED_BYTES[arch] // shared,
    }
    reason = min(limits, key=limits.get)
    return limits[reason], reason
