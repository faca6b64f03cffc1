"""Mixed traffic for scripts/soak.py: clients that ask, leave, send rubbish, and an operator who changes things."""

import collections
import http.client
import json
import random
import signal
import socket
import threading
import time

from bombs import BOMBS
from probes import Server, send
from soak_answers import Stream, known_requests, may_stream, what_it_says

# A client that has no answer by then will get none.
HUNG_S = 180
# Larger bombs are for the victim tests.
BOMB_BYTES = 50_000
KEPT_NOTES = 50

BAD = [
    ("/v1/completions", b"{"),
    ("/v1/completions", b"[]"),
    ("/v1/chat/completions", b'{"messages":[]}'),
    ("/v1/chat/completions", b'{"messages":[{"role":"user","content":7}]}'),
    ("/v1/nothing", b"{}"),
    ("/v1/completions", b'{"prompt":"Hi","temperature":-1}'),
    ("/v1/completions", b'{"prompt":[99999999]}'),
    ("/v1/completions", b'{"prompt":"Hi","max_tokens":1000000}'),
    ("/v1/embeddings", b'{"input":[[]]}'),
    ("/v1/messages", b'{"messages":[{"role":"user","content":"Hi"}]}'),
    ("/v1/responses", b'{"input":7}'),
    ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"Hi"}],"structured_outputs":{"regex":"("}}'),
    ("/v1/completions", b'{"prompt":"Hi","model":"another"}'),
    ("/tokenize", b'{"prompt":7}'),
    ("/v1/completions", b"\xff\xfe"),
    ("/v1/completions", b'{"prompt":"Hi","n":0}'),
]


class Load:
    """What the clients share: what is right, what has happened, the gate at which they wait when it is to be quiet."""

    def __init__(self, server: Server, seed: int, num_clients: int, with_bombs: bool):
        self.server, self.seed = server, seed
        self.known = known_requests(seed, 64)
        self.right = []
        self.lock = threading.Lock()
        self.outcomes, self.notes = collections.Counter(), []
        self.gate, self.stopping, self.inside = threading.Event(), threading.Event(), 0
        # When a step was last told to fail, and how often: who was there then has a reason to fail.
        self.failed_at, self.failures = 0.0, 0
        self.bombs = [bomb for bomb in BOMBS if len(bomb.make(BOMB_BYTES)) <= BOMB_BYTES] if with_bombs else []
        self.clients = [
            threading.Thread(target=self._client, args=(number,), daemon=True) for number in range(num_clients)
        ]

    def learn(self, server: Server):
        """The right answers, from a server that has nothing else to do."""
        for path, body in self.known:
            answer = server.post(path, body, timeout=HUNG_S)
            assert answer.status == 200, (path, body, answer.body)
            self.right.append(what_it_says(path, answer.json()))

    def start(self):
        self.gate.set()
        for client in self.clients:
            client.start()

    def pause(self, timeout_s: float) -> bool:
        """Whether all clients have come to rest."""
        self.gate.clear()
        deadline = time.monotonic() + timeout_s
        while self.inside and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.inside

    def go_on(self):
        self.gate.set()

    def stop(self):
        self.stopping.set()
        self.gate.set()
        for client in self.clients:
            client.join(HUNG_S)

    def _client(self, number: int):
        client = Client(self, random.Random(self.seed * 1000 + number))
        while not self.stopping.is_set():
            self.act(client.act)

    def act(self, what):
        """Does something as soon as there is to be load. What goes wrong with it is told: a client that ended silently
        would make the load smaller and the report better."""
        self.gate.wait()
        with self.lock:
            self.inside += 1
        try:
            if self.gate.is_set() and not self.stopping.is_set():
                what()
        except Exception as error:
            self.note("error", f"{error!r}")
        finally:
            with self.lock:
                self.inside -= 1

    def may_fail(self, started: float) -> bool:
        """Whether a request that began at `started` can have been in a step that was told to fail."""
        return self.failed_at > started - 10

    def note(self, outcome: str, what: str = ""):
        with self.lock:
            self.outcomes[outcome] += 1
            if what and len(self.notes) < KEPT_NOTES:
                self.notes.append(f"{outcome}: {what[:400]}")


class Client:
    """One after the other: requests of all kinds."""

    def __init__(self, load: Load, rng: random.Random):
        self.load, self.rng = load, rng
        self.connection = None

    def act(self):
        actions = [
            (self.ask, 30),
            (self.stream, 36),
            (self.leave, 12),
            (self.bad, 10),
            (self.look, 6),
            (self.old_probe, 3),
            (self.slow, 2),
            (self.bomb, 4 if self.load.bombs else 0),
        ]
        (action,) = self.rng.choices([action for action, _ in actions], [weight for _, weight in actions])
        action()

    def _pick(self, streamed: bool):
        while True:
            number = self.rng.randrange(len(self.load.known))
            path, body = self.load.known[number]
            if may_stream(path, body) or not streamed:
                return path, body, self.load.right[number]

    def _send(self, path: str, body: dict):
        """The answer's head. The connection is often that of the request before."""
        data = json.dumps(body).encode()
        if self.connection is not None and self.rng.random() < 0.3:
            self._close()
        for attempt in range(2):
            fresh = self.connection is None
            if fresh:
                self.connection = http.client.HTTPConnection("127.0.0.1", self.load.server.port, timeout=HUNG_S)
            try:
                self.connection.request("POST", path, data)
                return self.connection.getresponse()
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                # A server may close a connection that is kept alive while nothing is under way.
                self._close()
                if fresh:
                    raise
                self.load.note("reconnected")
        raise AssertionError("the second connection was fresh")

    def _close(self):
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _broken(self, started: float, what: str, error: Exception):
        self._close()
        if isinstance(error, TimeoutError):
            self.load.note("hung", f"{what}: no answer in {HUNG_S} s")
        else:
            self.load.note("broken", f"{what}: {error!r} after {time.monotonic() - started:.1f} s")

    def _refused(self, started: float, status: int, error: dict, what: str):
        code = error.get("code")
        if status == 429 or error.get("type") == "rate_limit_error":
            self.load.note("queue full")
            time.sleep(self.rng.random() * 0.2)
        elif self.load.may_fail(started) and "a failure was asked for" in error.get("message", ""):
            self.load.note("failed step")
        else:
            self.load.note("error", f"{what}: {status} {code}: {error.get('message')}")

    def ask(self):
        path, body, right = self._pick(False)
        started = time.monotonic()
        try:
            answer = self._send(path, body)
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            return self._broken(started, path, error)
        told = json.loads(text)
        if answer.status != 200:
            return self._refused(started, answer.status, told["error"], path)
        self._compare(path, body, what_it_says(path, told), right)

    def _compare(self, path, body, says, right):
        if says == right:
            self.load.note("right")
        else:
            self.load.note(
                "wrong", f"{path} {json.dumps(body)[:200]}: {json.dumps(says)[-150:]} not {json.dumps(right)[-150:]}"
            )

    def stream(self, slow_s: float = 0.0):
        path, body, right = self._pick(True)
        started = time.monotonic()
        stream = Stream(path)
        try:
            answer = self._send(path, {**body, "stream": True})
            if answer.status != 200:
                return self._refused(started, answer.status, json.loads(answer.read())["error"], path)
            for line in answer:
                if line.startswith(b"data: "):
                    stream.event(line[6:].decode().strip())
                    time.sleep(slow_s)
        except (OSError, http.client.HTTPException) as error:
            return self._broken(started, f"stream of {path}", error)
        if stream.error:
            return self._refused(started, 500, stream.error, f"stream of {path}")
        if not stream.done:
            return self.load.note("broken", f"a stream of {path} ended without its end")
        self._compare(path, body, stream.says(), right)

    def slow(self):
        self.stream(slow_s=0.02)

    def leave(self):
        """Goes away at any moment, without a word."""
        path, body, _ = self._pick(self.rng.random() < 0.7)
        data = json.dumps({**body, "stream": may_stream(path, body)}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        request = head + data
        with socket.create_connection(("127.0.0.1", self.load.server.port), timeout=HUNG_S) as connection:
            try:
                connection.sendall(request[: self.rng.choice([len(request)] * 4 + [self.rng.randrange(len(request))])])
                stays = time.monotonic() + self.rng.random() ** 2 * 0.8
                connection.settimeout(0.05)
                while time.monotonic() < stays:
                    try:
                        if not connection.recv(4096):
                            break
                    except TimeoutError:
                        pass
            except OSError as error:
                return self.load.note("broken", f"before it left: {error!r}")
        self.load.note("left")

    def bad(self):
        path, body = self.rng.choice(BAD)
        started = time.monotonic()
        try:
            answer = send(self.load.server.port, "POST", path, body, {}, HUNG_S)
        except OSError as error:
            return self._broken(started, f"bad request to {path}", error)
        # Before the reason is looked for there may be no place.
        told = answer.status in (400, 404, 429) and answer.json().get("error")
        self.load.note(
            "refused" if told else "error", "" if told else f"a bad request to {path}: {answer.status} {answer.body}"
        )

    def bomb(self):
        bomb = self.rng.choice(self.load.bombs)
        started = time.monotonic()
        try:
            answer = send(self.load.server.port, "POST", bomb.path, bomb.make(BOMB_BYTES), bomb.headers, HUNG_S)
        except OSError as error:
            return self._broken(started, bomb.name, error)
        fine = answer.status == 200 or 400 <= answer.status < 500 or answer.status == 503 or self.load.may_fail(started)
        self.load.note("bomb" if fine else "error", "" if fine else f"{bomb.name}: {answer.status} {answer.body[:200]}")

    def look(self):
        path = self.rng.choice(["/health", "/ready", "/metrics", "/v1/models", "/openapi.json", "/admin/config", "/"])
        started = time.monotonic()
        try:
            answer = self.load.server.ask("GET", path, timeout=HUNG_S)
        except OSError as error:
            return self._broken(started, path, error)
        self.load.note(
            "looked" if answer.status == 200 else "error", "" if answer.status == 200 else f"{path}: {answer.status}"
        )

    def old_probe(self):
        """A health check as HAProxy sends it."""
        with socket.create_connection(("127.0.0.1", self.load.server.port), timeout=HUNG_S) as connection:
            connection.sendall(b"GET /ready HTTP/1.0\r\n\r\n")
            read = b""
            while piece := connection.recv(4096):
                read += piece
        self.load.note(
            "looked" if b" 200 " in read[:16] else "error", "" if b" 200 " in read[:16] else f"HTTP/1.0: {read[:80]}"
        )


SETTINGS = [
    ("scheduler", "max_num_seqs", [8, 16, 64, 256]),
    ("scheduler", "policy", ["fcfs", "priority"]),
    ("scheduler", "preemption_mode", ["auto", "swap", "recompute"]),
    ("scheduler", "watermark", [0.0, 0.01, 0.1]),
    ("scheduler", "admission", ["expected", "prompt", "max_tokens"]),
    ("scheduler", "inter_token_target_ms", [0, 20, 100]),
    ("swap", "high_watermark", [0.5, 0.8, 1.0]),
    ("swap", "max_tail_blocks", [0, 4]),
    ("swap", "space_gib", [0.0005, 0.001, 0.002]),
    ("server", "max_requests", [24, 32, 64]),
    ("server", "pause_comments", [True, False]),
    ("log", "level", ["warn", "error"]),
]
BROKEN = [
    "[server",
    "server = 7",
    '[scheduler]\nmax_num_seqs = "many"',
    "[scheduler]\nmax_num_seqs = 0",
    "\x00",
    "[nothing]\na = 1",
]


class Operator(threading.Thread):
    """Changes settings by SIGHUP, lets steps fail, takes recordings."""

    def __init__(self, load: Load, config, recordings, seed: int, fail_every_s: float):
        super().__init__(daemon=True)
        self.load, self.config, self.recordings = load, config, recordings
        self.rng, self.fail_every_s = random.Random(seed + 7), fail_every_s

    def run(self):
        while not self.load.stopping.wait(self.rng.random() * 4):
            self.load.act(self._act)

    def _act(self):
        what = self.rng.random()
        if what < 2 / max(self.fail_every_s, 2):
            # Before it happens, so that nobody hears of it too early.
            self.load.failed_at, self.load.failures = time.monotonic(), self.load.failures + 1
            answer = self.load.server.ask("POST", "/admin/debug/fail_step")
            self.load.note(
                "step told to fail" if answer.status == 200 else "error", "" if answer.status == 200 else str(answer)
            )
        elif what < 0.85:
            self._change()
        else:
            answer = self.load.server.ask("POST", "/admin/recording", timeout=HUNG_S)
            self.load.note(
                "recording" if answer.status == 200 else "error", "" if answer.status == 200 else str(answer)
            )
            # The one that the metrics and the disk would otherwise have hundreds of.
            for file in self.recordings.iterdir():
                file.unlink(missing_ok=True)

    def _change(self):
        if self.rng.random() < 0.3:
            self.config.write_text(self.rng.choice(BROKEN))
        else:
            self.config.write_text(settings(self.rng))
        for _ in range(self.rng.choice([1, 1, 1, 20])):
            self.load.server.process.send_signal(signal.SIGHUP)
        self.load.note("SIGHUP")


def settings(rng=None) -> str:
    sections = collections.defaultdict(list)
    for section, name, values in SETTINGS:
        value = rng.choice(values) if rng else values[-1]
        sections[section].append(f"{name} = {json.dumps(value)}")
    return "\n".join(f"[{section}]\n" + "\n".join(lines) for section, lines in sections.items()) + "\n"
