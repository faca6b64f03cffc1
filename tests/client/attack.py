"""Measures what other clients of a server notice during an attack."""

import dataclasses
import json
import os
import socket
import threading
import time

from bombs import MESSAGES, Bomb
from conftest import ROOT, program  # noqa: F401  (its imports make scripts/ known)
from probes import MemoryWatch, Server, send, wait

# How long to wait for the answer to a bomb. It only ends what hangs: slow machines take more than a minute for some.
ANSWER_LIMIT_S = 300
PROMPT = {"prompt": [10, 11, 12], "temperature": 0, "ignore_eos": True}
SHORT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0}


class Victim(threading.Thread):
    """A client that reads one stream after the other on one connection, and keeps the longest gap between bytes."""

    def __init__(self, port: int, max_tokens: int = 1500):
        super().__init__(daemon=True)
        body = json.dumps({**PROMPT, "max_tokens": max_tokens, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self.request = head.encode() + body
        self.connection = socket.create_connection(("127.0.0.1", port))
        self.streaming = threading.Event()
        self.leaving = False
        self.broken = None
        self.forget()

    def forget(self):
        """Forgets earlier gaps."""
        self.last, self.worst = time.monotonic(), 0.0

    def gap(self) -> float:
        """The longest time without a token, including the gap that lasts now."""
        if not self.streaming.is_set():
            return self.worst
        return max(self.worst, time.monotonic() - self.last)

    def run(self):
        try:
            while not self.leaving:
                self._read_stream()
        except OSError as error:
            if not self.leaving:
                self.broken = self.broken or repr(error)
        self.streaming.clear()

    def _read_stream(self):
        self.connection.sendall(self.request)
        end = b""
        while not end.endswith(b"\r\n0\r\n\r\n"):
            read = self.connection.recv(1 << 16)
            now = time.monotonic()
            if not read or b'"error"' in read or (not end and not read.startswith(b"HTTP/1.1 200")):
                raise ConnectionError(f"a stream broke: {(end + read)[-300:]}")
            # The time before a stream's first bytes is not a gap; it is how long its request took to start.
            if self.streaming.is_set():
                self.worst = max(self.worst, now - self.last)
            self.last = now
            self.streaming.set()
            end = (end + read)[-400:]
        self.streaming.clear()

    def leave(self):
        self.leaving = True
        with_shutdown(self.connection)


def with_shutdown(connection):
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the server has closed it already
    connection.close()


class ShortPrompts(threading.Thread):
    """Sends short prompts one after the other, each on a new connection, and keeps the longest time that one took."""

    def __init__(self, port: int):
        super().__init__(daemon=True)
        self.port, self.enough = port, threading.Event()
        self.worst, self.broken, self.sent_at, self.count = 0.0, None, None, 0

    def run(self):
        while not self.enough.is_set() or self.count < 2:
            self.sent_at = time.monotonic()
            try:
                answer = send(self.port, "POST", "/v1/chat/completions", json.dumps(SHORT).encode(), {}, ANSWER_LIMIT_S)
                if answer.status != 200:
                    self.broken = f"{answer.status}: {answer.body[:200]}"
            except OSError as error:
                self.broken = repr(error)
            self.worst = max(self.worst, time.monotonic() - self.sent_at)
            self.count += 1
            if self.broken:
                return
            self.enough.wait(0.1)


@dataclasses.dataclass
class Seen:
    """The effects of one bomb, sent twice at the same time."""

    bytes: int = 0
    answers: list = dataclasses.field(default_factory=list)
    answered_s: float = 0.0
    quiet_gap_s: float = 0.0
    gap_s: float = 0.0
    quiet_prompt_s: float = 0.0
    prompt_s: float = 0.0
    memory_mb: float = 0.0
    # Everything that went wrong, except times that were too long.
    wrong: list = dataclasses.field(default_factory=list)

    def late(self) -> list:
        """The times that are longer than the goals.

        A busy machine is slow without a bomb too, so four times the quiet time is added to each goal. Every change is
        tested with a debug build on a shared machine. There the goals are five times as long, and only work without a
        bound exceeds them.
        """
        slack = 1 if os.environ.get("PAGETIDE_LONG") else 5
        found = []
        if self.gap_s > slack * (1 + 4 * self.quiet_gap_s):
            found.append(f"a stream stood still for {self.gap_s:.1f} s")
        if self.prompt_s > slack * (2 + 4 * self.quiet_prompt_s):
            found.append(f"a short prompt took {self.prompt_s:.1f} s")
        return found


class Target:
    """A server that is restarted if an attack was too much for it."""

    def __init__(self, log, *options: str):
        self.server = Server(program(), *options, log=log)
        self.log = log
        self.http_threads = 2
        self.max_body = 0

    def start(self):
        self.server.start()
        live = self.server.ask("GET", "/admin/config").json()["live"]
        self.max_body = live["server.max_body_bytes"]["value"]
        # The first request of a kind loads things that later ones find loaded.
        for body in (SHORT, {**SHORT, "response_format": {"type": "json_object"}}):
            assert self.server.post("/v1/chat/completions", body).status == 200

    def ready(self):
        """Returns this target with its server able to answer. Restarts the server if necessary."""
        if self.server.alive():
            try:
                if self.server.post("/v1/chat/completions", SHORT, timeout=5).status == 200 and self.server.idle():
                    return self
            except OSError:
                pass
            self.server.kill()
        self.start()
        return self

    def victims(self) -> list:
        """Starts streams on every HTTP thread. The server assigns connections to its threads in turn."""
        made = [Victim(self.server.port) for _ in range(2 * self.http_threads)]
        for victim in made:
            victim.start()
        return made

    def attack(self, bomb: Bomb, leave_after_s=None) -> Seen:
        seen = Seen()
        body = bomb.make(self.max_body - 1)
        seen.bytes = len(body)
        victims = self.victims()
        try:
            if not wait(lambda: all(victim.streaming.is_set() for victim in victims), 30):
                seen.wrong.append("streams did not begin")
                return seen
            seen.quiet_gap_s, seen.quiet_prompt_s = self._measure(victims, lambda: time.sleep(0.5), seen)
            with MemoryWatch(self.server.proc) as memory:
                started = time.monotonic()
                drop = lambda: self._drop(bomb, body, seen, leave_after_s)  # noqa: E731
                seen.gap_s, seen.prompt_s = self._measure(victims, drop, seen)
                seen.answered_s = time.monotonic() - started
            seen.memory_mb = memory.above() / 1e6
            if memory.too_much:
                seen.wrong = ["far too much memory: killed"]
        finally:
            for victim in victims:
                victim.leave()
            for victim in victims:
                victim.join(10)
        self._check(seen)
        return seen

    def _measure(self, victims, meanwhile, seen: Seen) -> tuple:
        for victim in victims:
            victim.forget()
        prompts = ShortPrompts(self.server.port)
        prompts.start()
        meanwhile()
        prompts.enough.set()
        prompts.join(ANSWER_LIMIT_S)
        gap = max(victim.gap() for victim in victims)
        if not self.server.alive():
            seen.wrong.append(f"the process ended with {self.server.process.wait()}")
            return gap, prompts.worst
        seen.wrong += [victim.broken for victim in victims if victim.broken]
        if prompts.is_alive():
            seen.wrong.append("a short prompt got no answer")
        elif prompts.broken:
            seen.wrong.append(f"a short prompt failed: {prompts.broken}")
        return gap, prompts.worst

    def _drop(self, bomb: Bomb, body: bytes, seen: Seen, leave_after_s):
        def drop():
            timeout = leave_after_s or ANSWER_LIMIT_S
            try:
                answers.append(send(self.server.port, "POST", bomb.path, body, bomb.headers, timeout))
            except TimeoutError:
                if leave_after_s is None:
                    seen.wrong.append("a bomb got no answer")
            except OSError as error:
                # Only bytes that are not HTTP may be answered by closing the connection.
                seen.wrong.append(f"a bomb's connection broke: {error!r}")

        answers = []
        senders = [threading.Thread(target=drop, daemon=True) for _ in range(2)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join(2 * ANSWER_LIMIT_S)
        seen.answers = [answer.status for answer in answers]
        if not self.server.alive():
            seen.wrong = [wrong for wrong in seen.wrong if not wrong.startswith("a bomb")]
            return
        seen.wrong += [told for told in (unlike_the_api(bomb.path, answer) for answer in answers) if told]

    def _check(self, seen: Seen):
        """Checks that the attack leaves nothing behind."""
        if not self.server.alive():
            if not any("killed" in wrong or "process ended" in wrong for wrong in seen.wrong):
                seen.wrong.append(f"the process ended with {self.server.process.wait()}")
            return
        # The file of a debug build has 200 MB, and each helper process maps a part of it.
        slack = 1 if os.environ.get("PAGETIDE_LONG") else 2
        allowed = slack * (200 + 10 * seen.bytes / 1e6)
        if seen.memory_mb > allowed:
            seen.wrong.append(f"{seen.memory_mb:.0f} MB of memory; {allowed:.0f} MB are allowed")
        try:
            if not self.server.wait_idle(20):
                seen.wrong.append("blocks or requests are left")
            if self.server.post("/v1/chat/completions", SHORT, timeout=20).status != 200:
                seen.wrong.append("a prompt is refused afterwards")
            if self.server.ask("GET", "/ready").status != 200:
                seen.wrong.append("the server is not ready afterwards")
        except OSError as error:
            seen.wrong.append(f"no answers afterwards: {error!r}")
            return
        if not wait(self.at_rest, 20):
            seen.wrong.append("the server is still computing")

    def at_rest(self) -> bool:
        """Whether the server uses less than half a core for 0.2 seconds."""

        def spent():
            return sum(proc.cpu_seconds() for proc in self.server.proc.all())

        before = spent()
        time.sleep(0.2)
        return spent() - before < 0.1


def unlike_the_api(path: str, answer):
    """Says what is wrong with an answer's format, or returns None."""
    if answer.status == 200 and answer.headers.get("content-type", "").startswith("text/event-stream"):
        last = answer.body.rstrip().rsplit(b"\n\n", 1)[-1]
        ends = (b"data: [DONE]", b"event: response.completed", b"event: response.incomplete", b"event: message_stop")
        return None if last.startswith(ends) else f"a stream without its last event: {last[-100:]}"
    try:
        body = answer.json()
    except ValueError:
        return f"an answer {answer.status} that is not JSON: {answer.body[:100]}"
    if answer.status == 200:
        known = {"choices", "data", "output", "content", "tokens", "prompt", "input_tokens", "count"}
        return None if known & body.keys() else f"an answer 200 without content: {answer.body[:100]}"
    if not 400 <= answer.status < 600:
        return f"status {answer.status}"
    error = body.get("error")
    wanted = {"type", "message"} if path.startswith(MESSAGES) else {"type", "message", "param", "code"}
    if not isinstance(error, dict) or not wanted <= error.keys() or not error["message"]:
        return f"an error {answer.status} in another format: {answer.body[:200]}"
    if path.startswith(MESSAGES) and body.get("type") != "error":
        return f"an error that is not Anthropic's: {answer.body[:200]}"
    if len(answer.body) > 20_000:
        return f"an error of {len(answer.body)} bytes"
    return None
