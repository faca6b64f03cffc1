#!/usr/bin/env python3
"""Sends hours of mixed traffic to one server that has little memory and many faults. Nothing may be lost, hang or grow.

Clients use all endpoints, with whole answers and streams, and compare each answer with the one of a server that has nothing
else to do. Other clients leave at any moment, or send rubbish and small bombs. An operator sends SIGHUP with changed and
broken files, makes steps fail and takes recordings. The pool is a tenth of what the clients want. Each minute the load
pauses, and the script checks what must then hold. Needs only Python, and Linux.

  scripts/soak.py --minutes 10
  scripts/soak.py --hours 2 --report soak-report          soak-report.md and soak-report.json

The exit status is 1 if a goal was missed.
"""

import argparse
import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from probes import ROOT, STATES, SWAPPED, USED, Server
from soak_load import Load, Operator, settings

BLOCK_SIZE = 16
# A client has some six blocks of prompt and output for each of its outputs.
BLOCKS_WANTED = 14
# The longest request alone: three outputs of 60 tokens after a prompt of 120.
LEAST_BLOCKS = 24
RESTARTS = "pagetide_executor_restarts_total"
SLOPE_GOAL_MB_H = 1.0
# A slope over less says nothing: the allocator's own ups and downs are larger.
SLOPE_MINUTES = 60


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument(
        "--binary", help="default: target/release/pagetide, or else target/debug/pagetide; built if there is none"
    )
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quiet-every", type=float, default=60.0, help="seconds between two looks at what must hold")
    parser.add_argument("--fail-every", type=float, default=20.0, help="seconds between two failed steps, about")
    parser.add_argument("--no-bombs", action="store_true", help="no requests that cost far more than others")
    parser.add_argument("--report", help="where the report goes, without .md and .json")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="further settings of the server"
    )
    args = parser.parse_args()
    args.seconds = 3600 * args.hours + 60 * args.minutes
    if args.seconds <= 0:
        parser.error("--hours or --minutes is needed")
    return args


def binary(args) -> str:
    if args.binary:
        return str(pathlib.Path(args.binary).resolve())
    built = [path for profile in ("release", "debug") if (path := ROOT / "target" / profile / "pagetide").exists()]
    if not built:
        subprocess.run(["cargo", "build", "--release", "--locked"], cwd=ROOT, check=True)
        built = [ROOT / "target/release/pagetide"]
    return str(built[0])


class Trial:
    def __init__(self, args, folder: pathlib.Path):
        self.args, self.log = args, folder / "server.log"
        self.recordings = folder / "recordings"
        self.recordings.mkdir()
        self.config = folder / "pagetide.toml"
        self.config.write_text(settings())
        blocks = max(args.clients * BLOCKS_WANTED // 10, LEAST_BLOCKS)
        own = [option for setting in args.set for option in ("--set", setting)]
        self.server = Server(
            binary(args),
            "--config",
            str(self.config),
            "--block-size",
            str(BLOCK_SIZE),
            *("--num-device-blocks", str(blocks), "--set", "server.debug_endpoints=true"),
            # It grows until it is full, or until its first minutes are over.
            *("--set", "recorder.max_mib=8"),
            *("--set", f"recorder.dir={self.recordings}"),
            *own,
            log=self.log,
        )
        self.load = Load(self.server, args.seed, args.clients, not args.no_bombs)
        self.samples, self.missed = [], []

    def run(self):
        with Server(self.server.command[0], "--block-size", str(BLOCK_SIZE)) as alone:
            self.load.learn(alone)
        self.server.start()
        operator = Operator(self.load, self.config, self.recordings, self.args.seed, self.args.fail_every)
        self.started = time.monotonic()
        try:
            self.look("start")
            self.load.start()
            operator.start()
            while (left := self.args.seconds - self.elapsed()) > 0 and self.server.alive():
                self.wait(min(left, self.args.quiet_every))
                if not self.be_quiet():
                    break
        except KeyboardInterrupt:
            self.miss("interrupted")
        self.load.stop()
        operator.join(60)
        self.end()

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def wait(self, seconds: float):
        """Ends early where the server does."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.server.alive():
            time.sleep(min(0.5, max(deadline - time.monotonic(), 0)))

    def miss(self, what: str):
        if len(self.missed) < 50:
            self.missed.append(f"after {self.elapsed() / 60:.1f} min: {what}")
        print("MISSED", self.missed[-1], flush=True)

    def be_quiet(self) -> bool:
        """What must hold where nobody asks. False: there is no sense in going on."""
        if not self.load.pause(240):
            self.miss(f"{self.load.inside} clients still wait for an answer")
            return False
        if not self.server.alive():
            self.miss(f"the process ended with {self.server.process.returncode}")
            return False
        try:
            if not self.server.wait_idle(60):
                metrics = self.server.metrics()
                self.miss(
                    f"left behind: { {name: metrics[name] for name in (USED, SWAPPED, *STATES) if metrics[name]} }"
                )
            if self.server.ask("GET", "/ready").status != 200:
                self.miss("the server is not ready")
            self.look("quiet")
        except OSError as error:
            self.miss(f"the operator's port: {error!r}")
            return False
        self.load.go_on()
        return True

    def look(self, when: str):
        """A sample of what must not grow. What the prefix cache and the recorder fill up is warm-up."""
        # Connections that were closed a moment ago are still in the server's hands, and memory in its allocator's.
        time.sleep(1)
        proc, metrics, resident = self.server.proc, self.server.metrics(), []
        for _ in range(5):
            time.sleep(0.3)
            resident.append((proc.resident() + sum(helper.own() for helper in proc.helpers())) / 1e6)
        sample = {
            "minute": round(self.elapsed() / 60, 2),
            "when": when,
            "resident_mb": min(resident),
            "peak_mb": proc.peak() / 1e6,
            "threads": proc.threads(),
            "files": proc.files(),
            "helpers": len(proc.helpers()),
            "tokens": metrics["pagetide_generated_tokens_total"],
            "restarts": metrics[RESTARTS],
            "recorder_mb": metrics["pagetide_recorder_bytes"] / 1e6,
            "preemptions": sum(
                value for name, value in metrics.items() if name.startswith("pagetide_preemptions_total")
            ),
        }
        self.samples.append(sample)
        with self.load.lock:
            outcomes = dict(self.load.outcomes)
        print(
            f"{sample['minute']:7.2f} min: {sample['resident_mb']:.1f} MB, {sample['threads']} threads, "
            f"{sample['files']} files; {json.dumps(outcomes)}",
            flush=True,
        )

    def end(self):
        outcomes = self.load.outcomes
        for outcome in ("wrong", "hung", "broken", "error"):
            if outcomes[outcome]:
                self.miss(f"{outcomes[outcome]} requests: {outcome}")
        # The last one may have been told when no step followed any more.
        failures = range(self.load.failures - 1, self.load.failures + 1)
        if self.samples[-1]["when"] == "quiet" and self.samples[-1]["restarts"] not in failures:
            self.miss(f"{self.load.failures} steps were to fail, {self.samples[-1]['restarts']:.0f} did")
        for what, most in (("threads", 4), ("files", 8)):
            seen = [sample[what] for sample in warm(self.samples)]
            if seen and max(seen) - seen[0] > most:
                self.miss(f"{what} grow: {seen}")
        self.slope = slope(warm(self.samples))
        if self.slope is not None and self.args.seconds >= 60 * SLOPE_MINUTES:
            rise, error = self.slope
            if rise - 2 * error > SLOPE_GOAL_MB_H:
                self.miss(f"resident memory grows by {rise:.2f} MB an hour (standard error {error:.2f})")
        if self.server.alive():
            status = self.server.stop()
            if status != 0:
                self.miss(f"it ended with {status}")
        panics = panics_in(self.log)
        if panics:
            self.miss(f"{len(panics)} panics in the log, the first: {panics[0]}")


def panics_in(log: pathlib.Path) -> list:
    """The first of them; but for those that were asked for, whose message is in that line or the next."""
    found, before = [], ""
    with open(log, errors="replace") as lines:
        for line in lines:
            if (
                re.search("panicked at", before)
                and "a failure was asked for" not in before + line
                or "overflowed its stack" in line
            ):
                found.append((before + line).strip()[:400])
            before = line
            if len(found) == 20:
                break
    return found


def warm(samples: list) -> list:
    """Without the first quarter of the time."""
    quiet = [sample for sample in samples if sample["when"] == "quiet"]
    last = quiet[-1]["minute"] if quiet else 0
    return [sample for sample in quiet if sample["minute"] >= last / 4]


def slope(samples: list):
    """Of resident memory by least squares, and its standard error, in MB an hour."""
    if len(samples) < 4:
        return None
    hours = [sample["minute"] / 60 for sample in samples]
    memory = [sample["resident_mb"] for sample in samples]
    mean_h, mean = sum(hours) / len(hours), sum(memory) / len(memory)
    square = sum((hour - mean_h) ** 2 for hour in hours)
    rise = sum((hour - mean_h) * (mb - mean) for hour, mb in zip(hours, memory)) / square
    left = sum((mb - mean - rise * (hour - mean_h)) ** 2 for hour, mb in zip(hours, memory))
    return rise, math.sqrt(left / (len(hours) - 2) / square)


def markdown(trial: Trial) -> str:
    first, last = trial.samples[0], trial.samples[-1]
    outcomes = trial.load.outcomes
    answers = sum(outcomes[name] for name in ("right", "wrong"))
    grows = (
        "too short to say" if trial.slope is None else "{:.2f} MB an hour (standard error {:.2f})".format(*trial.slope)
    )
    lines = [
        f"{trial.elapsed() / 3600:.2f} hours, {trial.args.clients} clients, seed {trial.args.seed}.",
        "",
        "| what | seen | goal |",
        "|---|---|---|",
        f"| answers compared, of which wrong | {answers}, {outcomes['wrong']} | 0 wrong |",
        f"| without an answer in {180} s | {outcomes['hung']} | 0 |",
        f"| broken connections and streams | {outcomes['broken']} | 0 |",
        f"| unexpected errors | {outcomes['error']} | 0 |",
        f"| resident memory after warm-up grows by | {grows} | at most {SLOPE_GOAL_MB_H} MB an hour |",
        f"| resident memory at the end | {last['resident_mb']:.0f} MB | |",
        f"| threads: start, end | {first['threads']}, {last['threads']} | stable |",
        f"| files: start, end | {first['files']}, {last['files']} | stable |",
        f"| steps that failed, as told | {last['restarts']:.0f}, {trial.load.failures} | equal |",
        f"| tokens generated | {last['tokens']:.0f} | |",
        f"| preemptions | {last['preemptions']:.0f} | |",
        *(
            f"| {name} | {outcomes[name]} | |"
            for name in sorted(outcomes)
            if name not in ("right", "wrong", "hung", "broken", "error")
        ),
        "",
        "All goals are met." if not trial.missed else "Missed:",
        *(f"- {what}" for what in trial.missed),
        *(f"- {note}" for note in trial.load.notes),
    ]
    return "\n".join(lines) + "\n"


def main():
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="pagetide-soak-") as folder:
        trial = Trial(args, pathlib.Path(folder))
        try:
            trial.run()
        finally:
            trial.server.kill()
    report = markdown(trial)
    print("\n" + report)
    if args.report:
        base = pathlib.Path(args.report)
        base.parent.mkdir(parents=True, exist_ok=True)
        base.with_name(base.name + ".md").write_text(report)
        data = {
            "seconds": trial.elapsed(),
            "seed": args.seed,
            "clients": args.clients,
            "outcomes": dict(trial.load.outcomes),
            "slope_mb_h": trial.slope,
            "missed": trial.missed,
            "notes": trial.load.notes,
            "samples": trial.samples,
        }
        base.with_name(base.name + ".json").write_text(json.dumps(data, indent=1) + "\n")
    sys.exit(1 if trial.missed else 0)


if __name__ == "__main__":
    main()
