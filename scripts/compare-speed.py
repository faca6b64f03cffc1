#!/usr/bin/env python3
"""Pagetide beside llama.cpp and vLLM's CPU build, on the same work.

    compare-speed.py --model 1b=DIR,FILE.gguf --model 135m=DIR,FILE.gguf --trace azure_conv_2023.csv \\
        --pagetide target/release/pagetide --llama-server … --llama-bench … --vllm …/bin/vllm \\
        [--rows 135m-c1,1b-prefill-512] [--rounds 3] [--threads 4] [--isa avx2] [--json OUT] [--markdown OUT]

A peer whose program is not given is left out. The servers of a model run side by side, and one at a time has work. In a
round each row goes through all engines before the next row comes, and every other round runs in the opposite order. So a
machine whose speed changes from minute to minute treats all of them alike. The client is `pagetide bench serve --url`
for all engines; the servers get token ids and forced output lengths. The results are medians over the rounds, and the
median of the rounds' ratios to the better peer. `--list` shows the rows. With `--threads` below the number of cores,
everything, including the client, is kept on that many cores.

Nothing else should run meanwhile: the load average before each run is in the JSON. On a virtual machine the host may give
the cores to others. A row during which more than `--max-stolen` percent of their time went there is repeated with another
seed, up to three times. The JSON has the part that was stolen from each run.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field, replace
from pathlib import Path

ENGINES = ["pagetide", "llama.cpp", "vllm"]
# Where a page keeps the table.
BEGIN, END = "<!-- compare-speed -->", "<!-- end of compare-speed -->"
# More than a row may take, if it is done again.
SEEDS_A_ROUND = 10_000
# Time for a server to answer /health.
START_S = 600
MIB = 1 << 20


@dataclass
class Row:
    """Work that is compared. `goal`: Pagetide's figure over the better peer's, at least (or at most, of times)."""

    name: str
    model: str
    about: str
    goal: str = ""
    # serve: `args` of `pagetide bench serve`; prefill: prompt tokens; start and memory: none.
    kind: str = "serve"
    args: list = field(default_factory=list)
    seed: int = 0
    # (measure, larger is better), the first is what the goal is about.
    measures: list = field(default_factory=lambda: [("output tok/s", True)])


LATENCIES = [("ttft p50 ms", False), ("ttft p99 ms", False), ("itl p50 ms", False), ("itl p99 ms", False)]


def rows():
    """The rows of the comparison. Each has a seed of its own, so that none finds its prompts in a prefix cache."""

    def trace(concurrency):
        num = str(3 * concurrency + 5)
        return ["--trace", "TRACE", "--scale", "0.25", "--num", num, "--concurrency", str(concurrency)]

    prefix = ["--shared-prefix", "1024", "--fixed", "64:16", "--num", "32", "--concurrency", "4"]
    fixed = ["--fixed", "128:256", "--num", "64", "--concurrency", "32"]
    with_latencies = [("output tok/s", True)] + LATENCIES
    total = [("total tok/s", True)]
    prefill, start = [("prompt tok/s", True)], [("s to first token", False)]
    memory = [("MiB after load", False), ("MiB after the run", False), ("peak MiB", False)]
    memory += [("MiB beyond weights and KV", False)]
    made = [
        Row("135m-c1", "135m", "Azure conversation × 0.25, c = 1", "≥ 1.5", args=trace(1)),
        Row("135m-c8", "135m", "Azure conversation × 0.25, c = 8", "≥ 2.5", args=trace(8), measures=with_latencies),
        Row(
            "135m-c32",
            "135m",
            "Azure conversation × 0.25, c = 32",
            "≥ 2.5; ttft p99 and itl p99 ≤ 0.5",
            args=trace(32),
            measures=with_latencies + total,
        ),
        Row("135m-fixed", "135m", "64 requests of 128:256, c = 32", "≥ 2", args=fixed),
        Row("1b-c1", "1b", "Azure conversation × 0.25, c = 1", "≥ 1.2", args=trace(1)),
        Row("1b-c16", "1b", "Azure conversation × 0.25, c = 16", "≥ 2", args=trace(16), measures=with_latencies),
        Row("1b-prefill-512", "1b", "prefill of 512", "≥ 1.5", "prefill", ["512"], measures=prefill),
        Row("1b-prefill-4096", "1b", "prefill of 4,096", "≥ 1.5", "prefill", ["4096"], measures=prefill),
        Row("1b-prefix", "1b", "1,024 shared tokens, then 64:16, c = 4", "≥ 2", args=prefix, measures=total),
        Row("demo-start", "demo", "start to first token, the demo model", "< 0.2 s", "start", measures=start),
        Row("135m-start", "135m", "start to first token, files in the page cache", "", "start", measures=start),
        Row("1b-start", "1b", "start to first token, files in the page cache", "< 1.5 s", "start", measures=start),
        Row("1b-memory", "1b", "resident memory, around the rows above", "≤ 200 beyond", "memory", measures=memory),
    ]
    return [replace(row, seed=seed) for seed, row in enumerate(made, start=1)]


def stolen_ticks():
    """Of all processors: what the host has taken, and all."""
    ticks = [int(number) for number in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[7], sum(ticks)


# How often a row is done again, and for how long to wait before.
RETRIES, RETRY_S = 3, 20


def undisturbed(args, row, measure):
    """What `measure(row)` returns, done again where too much time was stolen from it, and how much was."""
    for retry in range(RETRIES + 1):
        before = stolen_ticks()
        # No prompt is sent twice: it would be found in a prefix cache.
        figures = measure(replace(row, seed=row.seed + 1000 * retry))
        stolen, ticks = (after - before for after, before in zip(stolen_ticks(), before))
        percent = 100 * stolen / max(ticks, 1)
        if percent <= args.max_stolen or retry == RETRIES:
            return figures | {"stolen %": percent}
        time.sleep(RETRY_S)


def pinned(args, command):
    """On as many cores as there are threads."""
    available = sorted(os.sched_getaffinity(0))
    if args.threads >= len(available):
        return command
    return ["taskset", "-c", ",".join(map(str, available[: args.threads])), *command]


def processes_of_session(session):
    """Of a server and all that it started: vLLM is several."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # it has ended
            # The command, in parentheses, may hold anything. Then come state, parent, group, session.
            state, _, _, of_session = stat.rpartition(")")[2].split()[:4]
            if int(of_session) == session and state != "Z":
                found.append(int(entry.name))
    return found


def memory_mib(pids, key):
    total = 0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        match = re.search(rf"^{key}:\s+(\d+) kB", status, re.M)
        total += int(match[1]) * 1024 if match else 0
    return total / MIB


class Server:
    """A running server of one engine; stopped, with all its processes, when the block ends."""

    def __init__(self, args, engine, model):
        self.args, self.engine, self.model = args, engine, model
        self.port = args.port + ENGINES.index(engine)
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = None

    def command(self):
        args, port = self.args, str(self.port)
        directory, gguf = args.models.get(self.model, ("demo", None))
        if self.engine == "pagetide":
            command = [args.pagetide, "serve", "--model", directory, "--port", port, "--served-model-name", "m"]
            command += ["--set", f"device.threads={args.threads}", "--set", f"device.isa={args.isa}", "--device", "cpu"]
            command += ["--block-size", str(args.block_size)]
            return command + shlex.split(args.pagetide_args)
        if self.engine == "llama.cpp":
            command = [args.llama_server, "-m", gguf, "-t", str(args.threads), "-np", "32", "-c", "65536"]
            command += ["--kv-unified", "--port", port, "--host", "127.0.0.1", "--alias", "m"]
            return command + shlex.split(args.llama_args)
        command = [args.vllm, "serve", directory, "--dtype", "bfloat16", "--max-model-len", "8192", "--port", port]
        return command + ["--host", "127.0.0.1", "--served-model-name", "m"] + shlex.split(args.vllm_args)

    def __enter__(self):
        self.log = tempfile.NamedTemporaryFile("w+", prefix=f"{self.engine}-", suffix=".log", delete=False)
        quiet = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if self.engine == "vllm":
            # It finds helpers, and its compiler's cache, beside its own interpreter.
            quiet["PATH"] = f"{Path(self.args.vllm).parent}:{os.environ['PATH']}"
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            pinned(self.args, self.command()),
            stdout=self.log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=quiet | dict(os.environ) | ({"PATH": quiet["PATH"]} if "PATH" in quiet else {}),
            start_new_session=True,
        )
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_):
        self.stop()

    def wait_until_ready(self):
        # Pagetide's /health says that the process lives; it listens before the model is there.
        path = "/ready" if self.engine == "pagetide" else "/health"
        while time.monotonic() - self.started < START_S:
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(self.url + path, timeout=5) as response:
                    if response.status == 200:
                        self.ready_s = time.monotonic() - self.started
                        return
            except OSError:
                pass
            time.sleep(0.005)
        tail = Path(self.log.name).read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{self.engine} did not start ({self.log.name}):\n{tail}")

    def first_token_s(self):
        """From the start of the process to the first token of a first request."""
        body = {"model": "m", "prompt": list(range(100, 116)), "max_tokens": 1, "temperature": 0, "stream": True}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=120) as response:
            for line in response:
                if line.startswith(b"data:") and b"choices" in line:
                    return time.monotonic() - self.started
        raise RuntimeError(f"{self.engine} answered no token")

    def memory(self, key="VmRSS"):
        return memory_mib(processes_of_session(self.process.pid), key)

    def stop(self):
        session = self.process.pid
        for stop in (signal.SIGTERM, signal.SIGKILL):
            for pid in processes_of_session(session):
                try:
                    os.kill(pid, stop)
                except ProcessLookupError:
                    pass
            deadline = time.monotonic() + 20
            while processes_of_session(session) and time.monotonic() < deadline:
                self.process.poll()
                time.sleep(0.05)
        self.process.wait()
        self.log.close()
        if processes_of_session(session):
            raise RuntimeError(f"{self.engine} cannot be stopped: {processes_of_session(session)}")
        os.unlink(self.log.name)


def bench(args, command):
    """The JSON of a `pagetide bench` command."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = pinned(args, [args.pagetide, "bench", *command, "--json", out.name])
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
        return json.loads(Path(out.name).read_text())


def serve_client(args, server, row):
    """What a server does of a row's work, as the client sees it."""
    command = ["serve", "--url", server.url, "--model", "m", "--warmup", "2"]
    command += [args.trace if arg == "TRACE" else arg for arg in row.args] + ["--seed", str(row.seed)]
    # It closes kept-alive connections under load.
    command += ["--no-keepalive"] if server.engine == "llama.cpp" else []
    result = bench(args, command)["result"]
    figures = {
        "output tok/s": result["out_tok_per_s"],
        "total tok/s": result["total_tok_per_s"],
        "cached tokens": result["cached_tokens"],
    }
    for name, times in [("ttft", result["ttft_ms"]), ("itl", result["itl_ms"])]:
        if times:
            figures |= {f"{name} p50 ms": times["p50"], f"{name} p99 ms": times["p99"]}
    return figures


def prefill(args, engine, row):
    """Prompt tokens per second of one prompt at a time, without a server where the engine can do without."""
    directory, gguf = args.models[row.model]
    tokens = row.args[0]
    if engine == "pagetide":
        command = ["latency", "--model", directory, "--fixed", f"{tokens}:1", "--num", "4", "--device", "cpu"]
        command += ["--set", f"device.threads={args.threads}", "--set", f"device.isa={args.isa}"]
        return {"prompt tok/s": bench(args, command + shlex.split(args.pagetide_args))["phases"]["prefill_tok_per_s"]}
    command = [args.llama_bench, "-m", gguf, "-t", str(args.threads), "-p", tokens, "-n", "0", "-r", "4", "-o", "json"]
    done = subprocess.run(pinned(args, command), capture_output=True, text=True, check=True)
    return {"prompt tok/s": json.loads(done.stdout)[0]["avg_ts"]}


def prefill_over_http(args, server, row):
    """vLLM has no such command that takes token ids: one request at a time."""
    tokens = row.args[0]
    work = ["--fixed", f"{tokens}:1", "--num", "4", "--concurrency", "1"]
    figures = serve_client(args, server, replace(row, args=work))
    return {"prompt tok/s": int(tokens) / figures["ttft p50 ms"] * 1e3}


def at_floor(args, row):
    """A row's first measure, had Pagetide's steps taken no longer than memory and arithmetic must (`--roofline`)."""
    options = ["--set", f"device.threads={args.threads}", "--set", f"device.isa={args.isa}", "--device", "cpu"]
    options += ["--model", args.models[row.model][0], "--roofline", *shlex.split(args.pagetide_args)]
    if row.kind == "prefill":
        found = bench(args, ["latency", "--fixed", f"{row.args[0]}:1", "--num", "4", *options])
    else:
        work = [args.trace if arg == "TRACE" else arg for arg in row.args] + ["--seed", str(row.seed)]
        found = bench(args, ["serve", *work, *options])
    result, kinds = found["result"], found["roofline"]["kinds"]
    prompt, output = result["prompt_tokens"], result["output_tokens"]
    tokens = {"prompt tok/s": prompt, "output tok/s": output, "total tok/s": prompt + output}[row.measures[0][0]]
    floor_s, steps_s = sum(kind["floor_s"] for kind in kinds), found["roofline"]["steps_s"]
    return {"at floor": tokens / floor_s, "times floor": steps_s / floor_s, "machine": found["roofline"]["machine"]}


def pagetide_kv(args, server, row):
    """What Pagetide's memory must hold: the weights, and the KV blocks that the run filled."""
    directory = Path(args.models[row.model][0])
    config = json.loads((directory / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    values = config["num_hidden_layers"] * 2 * config.get("num_key_value_heads", heads) * head_dim
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as response:
        text = response.read().decode()
    # Of both pools.
    counts = re.findall(r'^pagetide_(?:device|swap)_blocks\{state="(used|cached)"\} (\d+)', text, re.M)
    filled = sum(int(count) for _, count in counts)
    return {
        "weights MiB": sum(file.stat().st_size for file in directory.glob("*.safetensors")) / MIB,
        "KV MiB filled": filled * args.block_size * values * 2 / MIB,
    }


def read_files(args, model):
    """So that the page cache has them."""
    directory, gguf = args.models.get(model, (None, None))
    files = [*Path(directory).glob("*.safetensors")] if directory else []
    for file in [*files, Path(gguf)] if gguf else files:
        with open(file, "rb") as data:
            while data.read(64 * MIB):
                pass


def memory_figures(args, server, after_load, row):
    """Of a server that has done work."""
    figures = {"MiB after load": after_load}
    figures |= {"MiB after the run": server.memory(), "peak MiB": server.memory("VmHWM")}
    if server.engine == "pagetide":
        figures |= pagetide_kv(args, server, row)
        held = figures["weights MiB"] + figures["KV MiB filled"]
        figures["MiB beyond weights and KV"] = figures["MiB after the run"] - held
    return figures


def measure_row(args, engine, server, row):
    if row.kind == "serve":
        return serve_client(args, server, row)
    return prefill_over_http(args, server, row) if engine == "vllm" else prefill(args, engine, row)


def measure_starts(args, row, engines, record):
    """From the start of a process, its files in the page cache, with nothing else running."""
    read_files(args, row.model)
    for turn in range(1, args.rounds + 1):
        for engine in engines:

            def start(row, engine=engine):
                with Server(args, engine, row.model) as server:
                    return {"s to first token": server.first_token_s(), "s to ready": server.ready_s}

            record(turn, engine, row, start)


def measure_model(args, model, engines, all_rows, chosen, record):
    """All rows of a model: `record(turn, engine, row, measure)` keeps what `measure(row)` returns."""
    of_kind = {row.kind: row for row in chosen}
    if "start" in of_kind:
        measure_starts(args, of_kind["start"], engines if model != "demo" else ["pagetide"], record)
    work = [row for row in chosen if row.kind in ("serve", "prefill")]
    memory = of_kind.get("memory")
    if memory and not work:
        work = [row for row in all_rows if row.name == "1b-c16"]
    if not work:
        return
    with contextlib.ExitStack() as stack:
        servers = {engine: stack.enter_context(Server(args, engine, model)) for engine in engines}
        after_load = {}
        for engine, server in servers.items():
            server.first_token_s()
            after_load[engine] = server.memory()
        for turn in range(1, args.rounds + 1):
            for row in work:
                # A seed of its own in each round, so that none finds its prompts in a prefix cache.
                row = replace(row, seed=row.seed + SEEDS_A_ROUND * turn)
                for engine in engines if turn % 2 else engines[::-1]:
                    record(turn, engine, row, lambda row, e=engine: measure_row(args, e, servers[e], row))
        for engine, server in servers.items() if memory else []:
            figures = memory_figures(args, server, after_load[engine], memory)
            record(args.rounds, engine, memory, lambda _, figures=figures: figures)


def medians(results, row, measure):
    """By engine, of the rounds in which it was measured."""
    found = {}
    for engine in ENGINES:
        values = [run[measure] for run in results.get(row.name, {}).get(engine, []) if measure in run]
        if values:
            found[engine] = statistics.median(values)
    return found


def ratio_to_peers(results, row, measure, better):
    """The median of what the rounds say: in each, all engines had the machine in about the same state."""
    by_engine = {engine: runs for engine, runs in results.get(row.name, {}).items() if runs}
    ratios = []
    for turn in {run["round"] for run in by_engine.get("pagetide", [])}:
        found = {
            engine: run[measure]
            for engine, runs in by_engine.items()
            for run in runs
            if run["round"] == turn and measure in run
        }
        ours, peers = found.pop("pagetide", None), found.values()
        if ours is not None and peers:
            ratios.append(ours / better(peers))
    return statistics.median(ratios) if ratios else None


def summarise(results, floors, chosen):
    lines = []
    for row in chosen:
        for measure, larger_is_better in row.measures:
            by_engine = medians(results, row, measure)
            if not by_engine:
                continue
            ratio = ratio_to_peers(results, row, measure, max if larger_is_better else min)
            runs = max(len(runs) for runs in results[row.name].values())
            goal = row.goal if measure == row.measures[0][0] else ""
            lines.append({"row": row.name, "work": f"{row.model}, {row.about}", "measure": measure, "goal": goal})
            if measure == row.measures[0][0]:
                lines[-1] |= {"floor": floors.get(row.name)}
            lines[-1] |= {"rounds": runs, "medians": by_engine, "ratio to the better peer": ratio}
    return lines


def number(value):
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def markdown(lines):
    head = ["row", "work", "measure", "Pagetide", "llama.cpp", "vLLM"]
    head += ["ratio to the better peer", "goal", "at the floor"]
    table = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for line in lines:
        engines = [number(line["medians"].get(engine)) for engine in ENGINES]
        ratio = "–" if line["ratio to the better peer"] is None else f"{line['ratio to the better peer']:.2f}"
        floor = number(line["floor"]["at floor"]) if line.get("floor") else ""
        cells = [f"`{line['row']}`", line["work"], line["measure"], *engines, ratio, line["goal"], floor]
        table.append("| " + " | ".join(cells) + " |")
    return "\n".join(table) + "\n"


def write_markdown(path, table):
    page = path.read_text() if path.exists() else ""
    if BEGIN in page and END in page:
        before, after = page.split(BEGIN, 1)[0], page.split(END, 1)[1]
        table = f"{before}{BEGIN}\n\n{table}\n{END}{after}"
    path.write_text(table)


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pagetide", default="target/release/pagetide", metavar="PROGRAM")
    parser.add_argument("--llama-server", metavar="PROGRAM")
    parser.add_argument("--llama-bench", metavar="PROGRAM")
    parser.add_argument("--vllm", metavar="PROGRAM")
    parser.add_argument("--model", action="append", default=[], metavar="NAME=DIR,GGUF", help="135m and 1b")
    parser.add_argument("--trace", metavar="CSV", help="the Azure conversation trace of 2023")
    parser.add_argument("--rows", metavar="NAME,…", help="default: all")
    parser.add_argument("--engines", default=",".join(ENGINES), metavar="NAME,…")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--isa", default="auto", help="Pagetide's; the peers have what they were built for")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="Pagetide's")
    parser.add_argument("--pagetide-args", default="", help="more arguments of the server, as one string")
    parser.add_argument("--llama-args", default="")
    parser.add_argument("--vllm-args", default="")
    parser.add_argument("--port", type=int, default=18200, metavar="N")
    parser.add_argument("--json", metavar="FILE", help="written after every row, so that nothing is lost")
    parser.add_argument("--markdown", metavar="FILE", help="the table; of a page, between its markers")
    parser.add_argument("--max-stolen", type=float, default=2.0, metavar="PERCENT")
    parser.add_argument("--floor", action="store_true", help="after the rounds, the floor of each row by --roofline")
    parser.add_argument("--list", action="store_true", help="show the rows")
    args = parser.parse_args(argv)
    args.models = {}
    for given in args.model:
        name, _, paths = given.partition("=")
        directory, _, gguf = paths.partition(",")
        if name not in ("135m", "1b") or not directory:
            parser.error(f"--model {given}: must be 135m=DIR,GGUF or 1b=DIR,GGUF")
        args.models[name] = (directory, gguf)
    if args.rounds < 1 or args.threads < 1:
        parser.error("--rounds and --threads: at least 1")
    return parser, args


def choose(parser, args):
    all_rows = rows()
    names = args.rows.split(",") if args.rows else [row.name for row in all_rows]
    unknown = set(names) - {row.name for row in all_rows}
    if unknown:
        parser.error(f"--rows: no row {', '.join(sorted(unknown))}; --list shows them")
    chosen = [row for row in all_rows if row.name in names]
    for row in chosen:
        if row.model != "demo" and row.model not in args.models:
            parser.error(f"row {row.name} needs --model {row.model}=DIR,GGUF")
        if ("TRACE" in row.args or row.kind == "memory") and not args.trace:
            parser.error(f"row {row.name} needs --trace")
    needs = {"pagetide": [args.pagetide], "llama.cpp": [args.llama_server, args.llama_bench], "vllm": [args.vllm]}
    wanted = args.engines.split(",")
    if set(wanted) - set(ENGINES):
        parser.error(f"--engines: choose from {', '.join(ENGINES)}")
    engines = [engine for engine in ENGINES if engine in wanted and all(needs[engine])]
    if "llama.cpp" in engines and not all(args.models[row.model][1] for row in chosen if row.model != "demo"):
        parser.error("llama.cpp needs a GGUF file of each model")
    return all_rows, chosen, engines


def main(argv):
    parser, args = parse(argv)
    if args.list:
        for row in rows():
            print(f"{row.name:<18}{row.model + ', ' + row.about:<58}{row.goal}")
        return 0
    all_rows, chosen, engines = choose(parser, args)
    # So that servers are stopped when this is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    results, floors, loads, errors = {}, {}, [], []

    def save():
        lines = summarise(results, floors, chosen)
        if args.json:
            report = {"command": shlex.join([sys.argv[0], *argv]), "threads": args.threads, "isa": args.isa}
            report |= {"errors": errors, "load_averages": loads, "summary": lines, "runs": results}
            Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
        if args.markdown:
            write_markdown(Path(args.markdown), markdown(lines))
        return lines

    def failed(turn, engine, what, error):
        errors.append({"round": turn, "engine": engine, "what": what, "error": str(error)})
        print(f"round {turn}  {engine:<10} {what:<16} FAILED: {error}", file=sys.stderr, flush=True)

    def record(turn, engine, row, measure):
        loads.append({"round": turn, "engine": engine, "row": row.name, "load": os.getloadavg()[0]})
        try:
            figures = {"round": turn} | undisturbed(args, row, measure)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:  # of one row alone
            return failed(turn, engine, row.name, error)
        results.setdefault(row.name, {}).setdefault(engine, []).append(figures)
        shown = ", ".join(f"{name} {number(value)}" for name, value in figures.items() if name != "round")
        print(f"round {turn}  {engine:<10} {row.name:<16} {shown}", file=sys.stderr, flush=True)
        save()

    for model in dict.fromkeys(row.model for row in chosen):
        of_model = [row for row in chosen if row.model == model]
        try:
            measure_model(args, model, engines, all_rows, of_model, record)
        except (RuntimeError, OSError) as error:
            failed(0, "a server", model, error)
    for row in chosen if args.floor else []:
        if row.kind in ("serve", "prefill"):
            try:
                floors[row.name] = at_floor(args, row)
            except RuntimeError as error:
                failed("floor", "pagetide", row.name, error)
    print(markdown(save()))
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
