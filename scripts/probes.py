"""Starts the program for tests and observes it from outside: its answers, metrics, memory, threads and files.

Needs only Python, and Linux for what it reads from /proc. The soak, the clients' tests and the peers' suites use it.
"""

import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
ADMIN = "the-admin"
START_TIMEOUT_S = 300
# At most so much of one answer is read, so that no answer fills the memory of a test.
MOST_READ = 64 << 20
USED, SWAPPED = 'pagetide_device_blocks{state="used"}', 'pagetide_swap_blocks{state="used"}'
STATES = [f'pagetide_requests{{state="{state}"}}' for state in ("waiting", "running", "swapped")]


# They stay bound, so that no connection of a client gets such a port before the server listens at it.
RESERVED = []


def free_port() -> int:
    """A port that this process reserves. A server may still listen there if it sets SO_REUSEADDR, as most do."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    RESERVED.append(reserved)
    return reserved.getsockname()[1]


@dataclasses.dataclass
class Answer:
    status: int
    headers: dict
    body: bytes

    def json(self):
        return json.loads(self.body)


class Proc:
    """A process as /proc shows it, and those that it has started. What has ended is 0."""

    def __init__(self, pid: int):
        self.pid = pid

    def _read(self, name: str) -> str:
        try:
            return pathlib.Path(f"/proc/{self.pid}/{name}").read_text()
        except OSError:
            return ""

    def _status(self, field: str) -> int:
        found = re.search(rf"^{field}:\s+(\d+)", self._read("status"), re.MULTILINE)
        return int(found.group(1)) if found else 0

    def resident(self) -> int:
        return self._status("VmRSS") << 10

    def peak(self) -> int:
        """The most that was resident since `reset_peak`."""
        return self._status("VmHWM") << 10

    def reset_peak(self):
        pathlib.Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def own(self) -> int:
        """Resident memory that is no file's: what a helper takes beside the program that it shares."""
        return self._status("RssAnon") << 10

    def threads(self) -> int:
        return self._status("Threads")

    def files(self) -> int:
        try:
            return len(os.listdir(f"/proc/{self.pid}/fd"))
        except OSError:
            return 0

    def cpu_seconds(self) -> float:
        fields = self._read("stat").rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") if fields else 0.0

    def helpers(self) -> list:
        found = []
        for thread in pathlib.Path(f"/proc/{self.pid}/task").glob("*/children"):
            try:
                children = thread.read_text().split()
            except OSError:
                continue
            for child in map(int, children):
                found += [Proc(child), *Proc(child).helpers()]
        return found

    def all(self) -> list:
        return [self, *self.helpers()]


class Server:
    """A running program; `start` again after it has ended, with the same port and options."""

    def __init__(self, binary: str, *options: str, log=None, env=None, before=None, model="demo"):
        self.port, self.admin_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [binary, "serve", "--model", model, "--port", str(self.port)]
        self.command += [
            "--set",
            f"server.admin_key={ADMIN}",
            "--set",
            f"server.admin_listen=127.0.0.1:{self.admin_port}",
        ]
        self.command += options
        self.log, self.env, self.before = log, env, before
        self.process = None

    def start(self):
        out = open(self.log, "ab") if self.log else subprocess.DEVNULL
        # Without backtraces: for the first of them 200 MB of symbols are read.
        try:
            self.process = subprocess.Popen(
                self.command,
                stdout=out,
                stderr=out,
                env={**os.environ, "RUST_BACKTRACE": "0", **(self.env or {})},
                preexec_fn=self.before,
            )
        finally:
            if self.log:
                out.close()
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the program ended with {self.process.returncode} at its start")
            try:
                if self.ask("GET", "/ready", timeout=5).status == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.05)
        self.kill()
        raise TimeoutError(f"nothing answers at {self.url}")

    def __enter__(self):
        return self.start() if self.process is None else self

    def __exit__(self, *_):
        self.stop()

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self, timeout_s: float = 60) -> int:
        """Its exit status; killed where it does not stop."""
        if self.alive():
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.process.returncode

    def kill(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @property
    def proc(self) -> Proc:
        return Proc(self.process.pid)

    def ask(self, method: str, path: str, body=None, headers=None, timeout: float = 60) -> Answer:
        """One request on a connection of its own. Paths of the operator go to the operator's port, with its key."""
        admin = path.startswith(("/admin", "/metrics"))
        port = self.admin_port if admin else self.port
        headers = dict(headers or {}, **({"Authorization": f"Bearer {ADMIN}"} if admin else {}))
        data = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
        return send(port, method, path, data, headers, timeout)

    def post(self, path: str, body, timeout: float = 60) -> Answer:
        return self.ask("POST", path, body, timeout=timeout)

    def metrics(self) -> dict:
        """Every series by its name as it stands on the page."""
        found = {}
        for line in self.ask("GET", "/metrics").body.decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        return found

    def idle(self) -> bool:
        metrics = self.metrics()
        return not any(metrics[name] for name in (USED, SWAPPED, *STATES))

    def wait_idle(self, timeout_s: float = 60) -> bool:
        """Whether no request is left, and no block in use."""
        return wait(self.idle, timeout_s)


def send(port: int, method: str, path: str, data, headers: dict, timeout: float) -> Answer:
    """Sends a request, and reads the answer also where the server answers before it has read the whole body."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        if data is not None:
            head += f"Content-Length: {len(data)}\r\nContent-Type: application/json\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
        sending = None
        try:
            connection.sendall(head.encode())
            if data is not None:
                connection.sendall(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            sending = error
        answer = http.client.HTTPResponse(connection, method=method)
        try:
            answer.begin()
            body = answer.read(MOST_READ)
        except OSError as error:
            raise sending or error
        except http.client.HTTPException as error:
            raise ConnectionError(f"no whole answer: {error!r}") from error
        return Answer(answer.status, dict(answer.getheaders()), body)


def wait(what, timeout_s: float) -> bool:
    """Whether it has become so in time."""
    deadline = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class MemoryWatch:
    """The most memory that a server and its helpers have taken beyond what it had, from `with` on. Whoever takes more
    than `most` bytes is killed, so that the machine survives its trials."""

    def __init__(self, proc: Proc, most: int = 4 << 30):
        self.proc, self.most = proc, most
        self.helpers, self.too_much = 0, False
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self):
        self.proc.reset_peak()
        self.before = self.seen = self.proc.resident()
        self.thread.start()
        return self

    def _sample(self):
        while not self.stopped.wait(0.02):
            self.helpers = max(self.helpers, sum(helper.own() for helper in self.proc.helpers()))
            self.seen = max(self.seen, self.proc.resident())
            if self.above() > self.most:
                for proc in self.proc.all():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(proc.pid, signal.SIGKILL)
                self.too_much = True
                return

    def __exit__(self, *_):
        self.stopped.set()
        self.thread.join()

    def above(self) -> int:
        return max(self.proc.peak(), self.seen) - self.before + self.helpers
