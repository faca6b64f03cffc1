#!/usr/bin/env python3
"""Memory pressure must not change what a server says.

Sends the first requests of a trace one by one to a server with ample memory, then all at once to servers whose device
pool is a fraction of what they would need together, in each preemption mode. Every request must finish with the same
text. Afterwards every device block must be free or cached, and the swap pool empty. Needs only Python.

  scripts/check-pressure.py --trace azure.csv                      the demo model, 64 requests, a tenth of the memory
  scripts/check-pressure.py --model DIR --scale 0.25 --trace ...   a model of your own
"""
import argparse
import csv
import json
import random
import re
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from probes import free_port

ROOT = __file__.rsplit("/", 2)[0]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=f"{ROOT}/target/release/pagetide")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--trace", default=f"{ROOT}/tests/data/traces/azure_conv_64.csv",
                        help="CSV with columns ContextTokens and GeneratedTokens")
    parser.add_argument("--num", type=int, default=64, help="requests")
    parser.add_argument("--scale", type=float, default=0.25, help="factor on the trace's lengths")
    parser.add_argument("--fraction", type=float, default=0.1, help="device pool over what all need together")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"],
                        help="where; on a GPU with attention and products that do not depend on the batch")
    parser.add_argument("--vocab", type=int, default=1000, help="prompt tokens are drawn below this id")
    return parser.parse_args()


def workload(args):
    """Prompts of random tokens and forced output lengths, greedy and sampled by turns."""
    rng = random.Random(1)
    with open(args.trace, newline="") as file:
        rows = list(csv.DictReader(file))[: args.num]
    requests = []
    for i, row in enumerate(rows):
        prompt = max(1, int(int(row["ContextTokens"]) * args.scale))
        output = max(1, int(int(row["GeneratedTokens"]) * args.scale))
        requests.append({
            "prompt": [rng.randrange(10, args.vocab) for _ in range(prompt)],
            "max_tokens": output,
            "temperature": 0.0 if i % 2 == 0 else 1.0,
            "seed": i,
            "ignore_eos": True,
        })
    return requests


class Server:
    def __init__(self, args, *options):
        self.port = free_port()
        command = [args.binary, "serve", "--model", args.model, "--port", str(self.port),
                   "--block-size", str(args.block_size), "--device", args.device, "--batch-invariant", "true",
                   *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def __enter__(self):
        for _ in range(600):
            try:
                self.get("/ready")
                return self
            except OSError:
                if self.process.poll() is not None:
                    break
                time.sleep(0.1)
        sys.exit("the server did not start")

    def __exit__(self, *_):
        self.process.terminate()
        if self.process.wait(60) != 0:
            sys.exit(f"the server ended with status {self.process.returncode}")

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=600) as answer:
            return answer.read().decode()

    def complete(self, body):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=3600) as answer:
            choice = json.load(answer)["choices"][0]
        return choice["text"], choice["finish_reason"]

    def metric(self, series):
        found = re.search(rf"^{re.escape(series)} (\S+)$", self.get("/metrics"), re.MULTILINE)
        return float(found.group(1))

    def wait_until_idle(self):
        """Blocks go back with the step after the last one."""
        for _ in range(100):
            if self.metric('pagetide_device_blocks{state="used"}') == 0:
                return
            time.sleep(0.05)


def main():
    args = arguments()
    requests = workload(args)
    blocks = [-(-(len(r["prompt"]) + r["max_tokens"]) // args.block_size) for r in requests]
    pool = max(int(sum(blocks) * args.fraction), max(blocks))
    print(f"{len(requests)} requests need {sum(blocks)} blocks together; the device pool has {pool}")

    with Server(args) as server:
        expected = [server.complete(request) for request in requests]

    failed = False
    for mode in ("swap", "recompute", "auto"):
        # Who looks ahead when it admits avoids most preemptions.
        options = ["--num-device-blocks", str(pool), "--preemption-mode", mode, "--set", "scheduler.admission=prompt"]
        with Server(args, *options) as server, ThreadPoolExecutor(len(requests)) as executor:
            started = time.monotonic()
            answers = list(executor.map(server.complete, requests))
            wall = time.monotonic() - started
            server.wait_until_idle()
            same = sum(answer == wanted for answer, wanted in zip(answers, expected))
            swaps, recomputes = (int(server.metric(f'pagetide_preemptions_total{{mode="{m}"}}'))
                                 for m in ("swap", "recompute"))
            used = int(server.metric('pagetide_device_blocks{state="used"}'))
            swapped = int(server.metric('pagetide_swap_blocks{state="used"}'))
            ok = same == len(requests) and used == 0 and swapped == 0
            failed |= not ok
            print(f"{mode:>9}: {same} of {len(requests)} with the same text, preemptions: {swaps} by swapping, "
                  f"{recomputes} by recomputation; blocks left: {used} used, {swapped} swapped; {wall:.1f} s: "
                  f"{'ok' if ok else 'FAILED'}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
