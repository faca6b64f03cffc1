"""Faults of disks, files, signals, clocks, steps and memory cause clear errors and do not affect other requests.

PAGETIDE_LONG=1 runs the long form, with 1,000 failed steps and 100 kills with SIGKILL.
"""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import random
import resource
import signal
import socket
import subprocess
import threading
import time

import pytest
from attack import SHORT, Victim
from conftest import ROOT, program
from probes import Proc, Server, send, wait
from soak_answers import Stream, known_requests, may_stream, what_it_says
from soak_load import BROKEN, settings

LONG = os.environ.get("PAGETIDE_LONG", "0") != "0"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
DEBUG = ("--set", "server.debug_endpoints=true")
RESTARTS = "pagetide_executor_restarts_total"


def limit(kind: int, value: int):
    """A function that sets both the soft and the hard limit in the program that is started."""
    return lambda: resource.setrlimit(kind, (value, value))


def answers(server: Server) -> bool:
    return server.post(CHAT, SHORT).status == 200


def run(*arguments: str, before=None, stdin: str = "", **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [program(), *arguments], input=stdin, capture_output=True, text=True, timeout=120, preexec_fn=before, **options
    )


# Disks.


@pytest.mark.parametrize(
    "fault", ["a file instead of a folder", "a file size that is limited", "a folder of the kernel"]
)
def test_a_recording_that_cannot_be_written_is_an_error_of_who_asked(fault, tmp_path):
    (tmp_path / "file").write_text("")
    folder = {"a file instead of a folder": tmp_path / "file/recordings", "a folder of the kernel": "/proc/recordings"}
    before = limit(resource.RLIMIT_FSIZE, 64) if "limited" in fault else None
    options = ("--set", f"recorder.dir={folder.get(fault, tmp_path)}", *DEBUG)
    with Server(program(), *options, before=before) as server:
        assert answers(server)
        for _ in range(2):
            refused = server.ask("POST", "/admin/recording")
            assert refused.status == 500 and refused.json()["error"]["code"] == "recording_failed", refused
            assert "recorder.dir" in refused.json()["error"]["message"]
        # After a failed step the server tries to write a recording by itself; that error is only logged.
        server.ask("POST", "/admin/debug/fail_step")
        assert server.post(CHAT, SHORT).status == 500
        assert answers(server) and server.wait_idle()
        assert server.stop() == 0
    assert not [left for left in tmp_path.glob("*") if left.name != "file"], "a half-written file is left"


def test_a_log_that_cannot_be_written_costs_only_the_log():
    with open("/dev/full", "w") as full:
        server = Server(program(), "--set", "log.level=debug")
        server.process = subprocess.Popen(server.command, stdout=subprocess.DEVNULL, stderr=full)
        try:
            assert wait(lambda: is_ready(server), 60)
            assert all(answers(server) for _ in range(20))
            assert server.stop() == 0
        finally:
            server.kill()


def test_a_log_file_that_may_not_grow_costs_only_the_log(tmp_path):
    with Server(
        program(), "--set", "log.level=debug", log=tmp_path / "log", before=limit(resource.RLIMIT_FSIZE, 2048)
    ) as server:
        assert all(answers(server) for _ in range(20))
        assert server.stop() == 0


def test_a_log_that_nobody_reads_stops_nobody():
    server = Server(program(), "--set", "log.level=debug")
    server.process = subprocess.Popen(server.command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        assert wait(lambda: is_ready(server), 60)
        # A pipe holds 64 KiB, and each request logs at least a hundred bytes.
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            told = list(pool.map(lambda _: server.ask("GET", "/v1/models", timeout=30).status, range(1000)))
        assert told == [200] * 1000 and answers(server)
        assert server.stop() == 0, "SIGTERM ends it"
    finally:
        server.kill()


def is_ready(server: Server) -> bool:
    try:
        return server.ask("GET", "/ready", timeout=5).status == 200
    except OSError:
        return False


def test_results_on_a_full_disk_are_an_error_of_the_command(tmp_path):
    body = {"prompt": [3, 4, 5], "max_tokens": 4}
    request = json.dumps({"custom_id": "a", "method": "POST", "url": COMPLETION, "body": body})
    for output, before in [("/dev/full", None), (str(tmp_path / "limited"), limit(resource.RLIMIT_FSIZE, 16))]:
        done = run("generate", "--model", "demo", "--input", "-", "--output", output, stdin=request, before=before)
        assert done.returncode == 1 and "cannot write the results" in done.stderr, (done.returncode, done.stderr)


# Files and connections.


def test_connections_beyond_the_limit_of_files_wait_and_the_server_recovers(tmp_path):
    with Server(program(), log=tmp_path / "log", before=limit(resource.RLIMIT_NOFILE, 96)) as server:
        before = server.proc.files()
        crowd = []
        try:
            for _ in range(150):
                crowd.append(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            wait(lambda: server.proc.files() >= 90, 10)
            started, spent = time.monotonic(), server.proc.cpu_seconds()
            time.sleep(2)
            busy = (server.proc.cpu_seconds() - spent) / (time.monotonic() - started)
            assert busy < 0.5, f"the accept loops spin: {busy:.2f} cores"
        finally:
            for connection in crowd:
                connection.close()
        assert wait(lambda: is_ready(server), 60) and answers(server)
        assert wait(lambda: server.proc.files() <= before + 4, 60), "the files of closed connections are not closed"
        assert server.stop() == 0
    assert (tmp_path / "log").stat().st_size < 1 << 20, "the error is logged for each attempt, not just now and then"


@pytest.mark.parametrize("most", [10, 16, 24, 32, 40, 64])
def test_too_few_files_for_a_start_are_said(most, tmp_path):
    """The program either starts or says what is missing. It must not panic."""
    server = Server(program(), log=tmp_path / "log", before=limit(resource.RLIMIT_NOFILE, most))
    try:
        server.start()
        assert server.stop() == 0
    except RuntimeError:
        assert server.process.returncode == 1, server.process.returncode
    finally:
        server.kill()
    log = (tmp_path / "log").read_text()
    assert "panicked" not in log, log


# Signals.


def test_a_storm_of_hang_ups_cuts_no_stream(tmp_path):
    config = tmp_path / "pagetide.toml"
    config.write_text(settings())
    rng, known = random.Random(3), known_requests(3, 32)
    with Server(program(), "--config", str(config), log=tmp_path / "log") as server:
        right = [what_it_says(path, server.post(path, body).json()) for path, body in known]
        over = threading.Event()

        def storm():
            while not over.wait(0.002):
                config.write_text(rng.choice(BROKEN) if rng.random() < 0.5 else settings(rng))
                server.process.send_signal(signal.SIGHUP)

        stormy = threading.Thread(target=storm, daemon=True)
        stormy.start()
        try:
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                told = list(
                    pool.map(
                        lambda number: ask(server, *known[number % 32], number % 2 == 0),
                        range(64 * (10 if LONG else 1)),
                    )
                )
        finally:
            over.set()
            stormy.join()
        # max_requests changes too, but it stays at 24 or above, and there are only 8 clients.
        assert [(number % 32, says) for number, says in enumerate(told)] == [
            (number % 32, ("right", right[number % 32])) for number in range(len(told))
        ]
        config.write_text("[server]\nmax_requests = 77\n")
        server.process.send_signal(signal.SIGHUP)
        live = lambda: server.ask("GET", "/admin/config").json()["live"]  # noqa: E731
        assert wait(lambda: live()["server.max_requests"]["value"] == 77, 30), "the last file is not in force"
        assert server.wait_idle() and server.stop() == 0


def ask(server: Server, path: str, body: dict, stream: bool):
    """Returns ('right', the answer), ('failed', the message), ('hung', the path) or ('broken', the reason)."""
    stream = stream and may_stream(path, body)
    try:
        answer = server.post(path, {**body, "stream": True} if stream else body, timeout=120)
    except TimeoutError:
        return "hung", path
    except OSError as error:
        return "broken", repr(error)
    if answer.status != 200:
        return "failed", answer.json()["error"]["message"]
    if not stream:
        return "right", what_it_says(path, answer.json())
    read = Stream(path)
    for line in answer.body.decode().splitlines():
        if line.startswith("data: "):
            read.event(line[6:])
    if read.error:
        return "failed", read.error["message"]
    return ("right", read.says()) if read.done else ("broken", answer.body[-200:])


def test_killed_and_started_again_it_says_the_same(tmp_path):
    known = [request for request in known_requests(4, 16) if request[0] == COMPLETION]
    rng = random.Random(5)
    options = ("--set", f"recorder.dir={tmp_path}", "--num-device-blocks", "40", "--swap-space-gib", "0.002")
    server = Server(program(), *options, log=tmp_path / "log")
    try:
        server.start()
        right = [ask(server, *request, False) for request in known]
        for _ in range(100 if LONG else 3):
            victims = [Victim(server.port, 400) for _ in range(6)]
            for victim in victims:
                victim.start()
            time.sleep(rng.random() * 0.5)
            asking = threading.Thread(
                target=lambda: ignoring(lambda: server.ask("POST", "/admin/recording")), daemon=True
            )
            asking.start()
            time.sleep(rng.random() * 0.02)
            server.kill()
            for victim in victims:
                victim.join(30)
                assert not victim.is_alive(), "a client does not notice that the server is gone"
            asking.join(30)
            # On the same port, while the kernel still holds connections of the killed process.
            server.start()
            assert [ask(server, *request, False) for request in known] == right
            assert server.wait_idle()
            recorded = server.ask("POST", "/admin/recording")
            assert recorded.status == 200, recorded
            replayed = run("replay", recorded.json()["file"], "--check")
            assert replayed.returncode == 0, replayed.stdout + replayed.stderr
            for file in tmp_path.glob("*.recording"):
                checked = run("replay", str(file), "--check")
                assert checked.returncode == 0, f"a recording with its final name is not complete: {checked.stderr}"
                file.unlink()
        assert server.stop() == 0
    finally:
        server.kill()


def ignoring(what):
    try:
        what()
    except OSError:
        pass


# Clocks.


def faketime() -> str:
    name = "usr/lib/*/faketime/libfaketime.so.1"
    found = [*pathlib.Path("/").glob(name), *(ROOT / "target/ci/faketime").glob(name)]
    assert found, "there is no libfaketime: .ci/run unpacks Debian's package into target/ci/faketime"
    return str(found[0])


def test_a_clock_that_jumps_changes_nothing(tmp_path):
    """The clock jumps back and forth by decades. Only dates come from it; durations come from the monotonic clock."""
    jumps = tmp_path / "jumps"
    jumps.write_text("+0\n")
    env = {
        "LD_PRELOAD": faketime(),
        "FAKETIME_TIMESTAMP_FILE": str(jumps),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    options = (
        "--set",
        f"recorder.dir={tmp_path}",
        "--set",
        "server.request_timeout_s=600",
        "--set",
        "server.keep_alive_s=5",
        "--set",
        "limits.requests_per_minute=100000",
        "--set",
        "log.slow_request_s=3600",
    )
    known = known_requests(8, 16)
    with Server(program(), *options, env=env, log=tmp_path / "log") as server:
        right = [ask(server, *request, False) for request in known]
        for jump, year in [("+40y", "206"), ("-30y", "199"), ("+0", ""), ("-20y", "200"), ("-1d", "")]:
            jumps.write_text(f"{jump}\n")
            # The date of answers is computed twice a second.
            assert wait(lambda: f" {year}" in server.ask("GET", "/health").headers["date"], 30), "no jump seen"
            assert [ask(server, *request, True) for request in known] == right
            assert server.ask("POST", "/admin/recording").status == 200
            assert server.ask("GET", "/ready").status == 200
        assert server.wait_idle() and server.stop() == 0
    assert "took" not in (tmp_path / "log").read_text(), "a request seems to have taken decades"


# Steps.


def test_failed_steps_hang_nobody_and_change_no_answer(tmp_path):
    """Every request gets either an error or its complete, correct answer. The long form fails 1,000 steps."""
    known = [request for request in known_requests(6, 32) if request[0] in (CHAT, COMPLETION)]
    with Server(program()) as alone:
        right = [ask(alone, *request, False) for request in known]
    options = (
        "--num-device-blocks",
        "40",
        "--swap-space-gib",
        "0.001",
        "--set",
        "scheduler.admission=prompt",
        "--set",
        "recorder.minutes=0",
    )
    most, told = (1000 if LONG else 20), []
    with Server(program(), *DEBUG, *options, log=tmp_path / "log") as server:
        over = threading.Event()

        def client(number: int):
            rng, mine = random.Random(number), []
            while not over.is_set():
                which = rng.randrange(len(known))
                mine.append((which, ask(server, *known[which], rng.random() < 0.5)))
            return mine

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            clients = [pool.submit(client, number) for number in range(8)]
            try:
                for count in range(most):
                    assert server.ask("POST", "/admin/debug/fail_step").status == 200
                    assert wait(lambda: server.metrics()[RESTARTS] == count + 1, 60), "no step has failed"
                    time.sleep(0.05)
            finally:
                over.set()
            told = [one for each in clients for one in each.result()]
        outcomes = [says[0] for _, says in told]
        print({kind: outcomes.count(kind) for kind in ("right", "failed", "hung", "broken")})
        for which, says in told:
            if says[0] == "failed":
                assert "a failure was asked for" in says[1], says
            else:
                assert says == right[which]
        assert outcomes.count("failed") > 0 and outcomes.count("right") > 0
        assert server.wait_idle(), "blocks or requests are left"
        assert [ask(server, *request, False) for request in known] == right, "an answer is wrong afterwards"
        assert server.metrics()[RESTARTS] == most
        assert server.stop() == 0


# Memory.


@pytest.fixture(scope="module")
def own_mib():
    """The smallest limit of address space, in steps of 4 MiB, under which the program itself can be loaded."""
    for mib in range(4, 1024, 4):
        with contextlib.suppress(subprocess.SubprocessError):
            if run("--version", before=limit(resource.RLIMIT_AS, mib << 20)).returncode in (0, 1):
                return mib
    pytest.fail("the program does not start with 1 GiB of address space")


@pytest.mark.parametrize("more_mib", [0, 16, 32, 40, 100, 124, 128, 200, 340, 540, 840, 1340, 2440])
def test_too_little_address_space_for_a_start_is_said(own_mib, more_mib, tmp_path):
    """The program either starts or says what it had no memory for. It must not abort."""
    mib = own_mib + more_mib
    server = Server(
        program(), "--swap-space-gib", "0.25", log=tmp_path / "log", before=limit(resource.RLIMIT_AS, mib << 20)
    )
    try:
        server.start()
        assert answers(server)
        assert server.stop() == 0
    except RuntimeError:
        log = (tmp_path / "log").read_text()
        assert server.process.returncode == 1, (server.process.returncode, log)
        assert "panicked" not in log, log
        if more_mib < 32:
            assert "not 32 MiB of address space" in log, log
    finally:
        server.kill()


def test_the_first_allocation_aborts_under_no_limit_of_address_space(own_mib):
    """In a range of limits, 64 KiB wide, the allocator can reserve 128 MiB and then nothing more."""
    for kib in range(own_mib + 122 << 10, own_mib + 130 << 10, 32):
        ended = run("--version", before=limit(resource.RLIMIT_AS, kib << 10))
        assert ended.returncode in (0, 1), (kib, ended.returncode, ended.stderr)


def test_too_little_memory_for_a_request_is_not_the_servers_end(tmp_path):
    with Server(program(), log=tmp_path / "log") as server:
        assert answers(server)
        size = int(Proc(server.process.pid)._read("statm").split()[0]) * os.sysconf("SC_PAGE_SIZE")
        most = size + (300 << 20)
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, (most, most))
        body = json.dumps({"prompt": " " * 8_000_000, "max_tokens": 4}).encode()
        for path, data in [
            (COMPLETION, body),
            ("/tokenize", body),
            ("/v1/embeddings", b'{"input":[' + b"[1]," * 10**6 + b"[1]]}"),
        ]:
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                sent = [pool.submit(send, server.port, "POST", path, data, {}, 120) for _ in range(4)]
                assert all(one.result().status in (200, 400, 413, 429, 503) for one in sent), path
        assert server.alive() and answers(server)
