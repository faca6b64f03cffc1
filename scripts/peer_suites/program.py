"""Starts pagetide for the suites: one program for equal options, as the suites start hundreds of servers."""

import atexit
import functools
import hashlib
import http.client
import json
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass

from peer_suites.sources import CACHE, ROOT
from probes import free_port

DEMO = ROOT / "models" / "demo"
TEMPLATE = pathlib.Path(__file__).with_name("chat_template.jinja")
START_TIMEOUT_S = 300
# Programs that stay up for the next test with the same options.
KEPT = 2


def binary() -> str:
    return os.environ["PAGETIDE_BIN"]


@functools.cache
def settings() -> frozenset[str]:
    """The settings that the program has: a program of another version may lack some that the suites use."""
    text = subprocess.run([binary(), "config", "defaults"], check=True, capture_output=True, text=True).stdout
    section, names = "", set()
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[] ")
        elif "=" in line and not line.startswith("#"):
            names.add(f"{section}.{line.split('=')[0].strip()}")
    return frozenset(names)


def demo_model(max_len: int, template: str | None = None, sampling: dict | None = None) -> pathlib.Path:
    """The demo model with another context length, chat template and defaults of sampling.

    Without a template it gets one that knows tools and reasoning.
    """
    template = TEMPLATE.read_text() if template is None else template
    changes = hashlib.sha256(json.dumps([template, sampling]).encode()).hexdigest()[:12]
    name = f"demo-{max_len}-{changes}"
    folder = CACHE / "models" / name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        making = pathlib.Path(tempfile.mkdtemp(dir=folder.parent))
        for file in DEMO.iterdir():
            shutil.copy(file, making)
        config = json.loads((DEMO / "config.json").read_text())
        config["max_position_embeddings"] = max_len
        (making / "config.json").write_text(json.dumps(config, indent=1))
        (making / "chat_template.jinja").write_text(template)
        if sampling is not None:
            generation = json.loads((DEMO / "generation_config.json").read_text())
            (making / "generation_config.json").write_text(json.dumps({**generation, **sampling}))
        try:
            making.rename(folder)
        except OSError:
            # Another process has made the same model.
            shutil.rmtree(making)
    return folder


def command(options: dict[str, object], names: list[str], model: pathlib.Path) -> list[str]:
    """The command line of a server. `options` are settings; those that the program does not have are left out."""
    flags = [binary(), "serve", "--model", str(model)]
    for name in names:
        flags += ["--served-model-name", name]
    for key, value in options.items():
        if key in settings():
            flags += ["--set", f"{key}={json.dumps(value) if not isinstance(value, str) else value}"]
    return flags


@dataclass
class Program:
    process: subprocess.Popen
    port: int
    log: pathlib.Path

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


running: dict[tuple[str, ...], Program] = {}


def serve(flags: list[str]) -> Program:
    """A program with these flags, perhaps one that ran for an earlier test."""
    key = tuple(flags)
    program = running.pop(key, None)
    if program is None or not program.is_alive():
        program = start(flags)
    # The last is the one that was used last.
    running[key] = program
    while len(running) > KEPT:
        running.pop(next(iter(running))).stop()
    return program


def is_live(port: int, unix_socket: str | None, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    if unix_socket:
        connection.sock = socket.socket(socket.AF_UNIX)
    try:
        if unix_socket:
            connection.sock.connect(unix_socket)
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def start(
    flags: list[str], port: int | None = None, live_path: str = "/health", unix_socket: str | None = None
) -> Program:
    port = free_port() if port is None else port
    logs = CACHE / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{port}.log"
    with log.open("wb") as out:
        out.write((" ".join(flags) + "\n").encode())
        out.flush()
        process = subprocess.Popen([*flags, "--port", str(port)], stdout=out, stderr=subprocess.STDOUT)
    program = Program(process, port, log)
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        if not program.is_alive():
            raise RuntimeError(f"pagetide did not start: {log.read_text(errors='replace')[-2000:]}")
        if is_live(port, unix_socket, live_path):
            return program
        if time.monotonic() > deadline:
            program.stop()
            raise RuntimeError("pagetide did not answer in time")
        time.sleep(0.02)


@atexit.register
def stop_all():
    while running:
        running.popitem()[1].stop()
