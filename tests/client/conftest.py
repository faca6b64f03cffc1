"""Starts the program once for the whole run, and provides clients for it.

PAGETIDE_BIN is the program (default: target/release/pagetide, or else target/debug/pagetide). PAGETIDE_MODEL is the
model that it serves (default: the demo model, which is built into it).
"""

import asyncio
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request

import anthropic
import openai
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))
from probes import free_port  # noqa: E402

START_TIMEOUT_S = 300


def program() -> str:
    if named := os.environ.get("PAGETIDE_BIN"):
        return str(pathlib.Path(named).resolve())
    for profile in ("release", "debug"):
        if (built := ROOT / "target" / profile / "pagetide").exists():
            return str(built)
    pytest.exit("no pagetide program: cargo build, or set PAGETIDE_BIN", returncode=2)


class Server:
    """A running server process."""

    def __init__(self, url: str, process: subprocess.Popen):
        self.url = url
        self.process = process

    def client(self, api_key: str = "none", **options) -> openai.OpenAI:
        # Without retries, so that a test sees the first answer.
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=300, **options)

    def async_client(self, **options) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300, **options)

    def anthropic_client(self, api_key: str = "none", **options) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key=api_key, max_retries=0, timeout=300, **options)

    def async_anthropic_client(self, **options) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url, api_key="none", max_retries=0, timeout=300, **options)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=300) as answer:
            return answer.read().decode()

    def post(self, path: str, body: dict, key: str = "none") -> dict:
        headers = {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def metric(self, series: str) -> float:
        """The value of a series, named as on the metrics page: `pagetide_requests{state="running"}`."""
        for line in self.get("/metrics").splitlines():
            if line.startswith(series + " "):
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(series)


RUNNING = 'pagetide_requests{state="running"}'
WAITING = 'pagetide_requests{state="waiting"}'
CANCELLED = 'pagetide_requests_total{outcome="cancelled"}'


@contextlib.contextmanager
def cancelling(server: Server):
    """Checks that the code inside cancels exactly one request, and that none runs or waits afterwards."""
    before = server.metric(CANCELLED)
    yield
    wait_for(lambda: server.metric(CANCELLED) == before + 1)
    wait_for(lambda: server.metric(RUNNING) + server.metric(WAITING) == 0)


@contextlib.contextmanager
def paused(server: Server, admin_key: str = "none"):
    """Meanwhile all requests wait, so none ends too early on a fast machine."""
    server.post("/pause_generation", {"mode": "in_place"}, admin_key)
    try:
        yield
    finally:
        server.post("/continue_generation", {}, admin_key)


async def start_and_cancel(server: Server, request):
    """Cancels a request while it runs. No other request runs."""
    task = asyncio.ensure_future(request)
    await asyncio.to_thread(wait_for, lambda: server.metric(RUNNING) > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def wait_for(what, timeout_s=300):
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.02)


@contextlib.contextmanager
def serving(*flags: str, model: str | None = None):
    port = free_port()
    model = model or os.environ.get("PAGETIDE_MODEL", "demo")
    command = [program(), "serve", "--model", model, "--port", str(port), *flags]
    with subprocess.Popen(command) as process:
        try:
            wait_until_live(f"http://127.0.0.1:{port}", process)
            yield Server(f"http://127.0.0.1:{port}", process)
        finally:
            process.terminate()
            try:
                process.wait(timeout=START_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def serving_alike(*flags: str):
    """A server that answers equal requests alike. Not every client can give a seed, and some answers are empty."""
    return serving("--set", "server.default_seed=1", *flags)


def seen_by_node(script: str, *flags: str) -> dict:
    """What a script in the folder node finds out about a server with these flags. Its last line is JSON."""
    folder = pathlib.Path(__file__).parent / "node"
    if not (shutil.which("node") and (folder / "node_modules").exists()):
        pytest.fail(f"Node.js and its packages are needed: npm ci, in {folder}")
    with serving_alike(*flags) as server:
        command = ["node", folder / script, server.url, "demo"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout.splitlines()[-1])


def wait_until_live(url: str, process: subprocess.Popen):
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the program ended with {process.returncode}"
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.05)
    raise TimeoutError(f"nothing answers at {url}")


@pytest.fixture(scope="session")
def server():
    with serving() as running:
        yield running


@pytest.fixture
def client(server):
    with server.client() as made:
        yield made


@pytest.fixture
def claude(server):
    """A client of Anthropic's API."""
    with server.anthropic_client() as made:
        yield made


@pytest.fixture(scope="session")
def model(server):
    with server.client() as made:
        return made.models.list().data[0].id
