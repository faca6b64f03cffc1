"""A device fails while nobody watches: there is one alert and one recording, and the server continues."""

import concurrent.futures
import json
import pathlib
import subprocess
import urllib.error

import openai
import pytest
from conftest import RUNNING, WAITING, Server, paused, program, serving, wait_for
from prometheus import scraping

ADMIN = "the-admin"
RESTARTS = "pagetide_executor_restarts_total"
# Sequences have up to 200 tokens, and the pool holds two of them, so that there are preemptions before the failure.
OPTIONS = (
    *("--num-device-blocks", "28", "--block-size", "16", "--swap-space-gib", "0.01"),
    *("--preemption-mode", "swap", "--set", "scheduler.admission=prompt", "--set", f"server.admin_key={ADMIN}"),
    *("--set", "server.debug_endpoints=true"),
)


def fail_next_step(server: Server) -> dict:
    return server.post("/admin/debug/fail_step", {}, ADMIN)


def replay(*arguments) -> str:
    run = subprocess.run([program(), "replay", *map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


class Failed:
    """What can be seen after the failure."""

    def __init__(self, server, prometheus, folder: pathlib.Path, errors: list, survivor: str):
        self.server, self.prometheus, self.folder = server, prometheus, folder
        self.errors, self.survivor = errors, survivor

    def recordings(self) -> list:
        return sorted(self.folder.iterdir())


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    folder, recordings = tmp_path_factory.mktemp("prometheus"), tmp_path_factory.mktemp("recordings")
    with serving(*OPTIONS, "--set", f"recorder.dir={recordings}") as server, scraping(server.url, folder) as prometheus:
        client = server.client()
        model = client.models.list().data[0].id

        def ask(start: int, count: int) -> str:
            options = {"ignore_eos": True}
            prompt = list(range(start, start + 32))
            answer = client.completions.create(
                model=model, prompt=prompt, max_tokens=count, temperature=0, extra_body=options
            )
            return answer.choices[0].text

        before = ask(100, 20)
        # Prometheus sees an increase only if it has seen the counter at 0 before.
        wait_for(lambda: prometheus.query(f"{RESTARTS} == 0"))
        with concurrent.futures.ThreadPoolExecutor() as pool:

            def ask_together(number: int, count: int) -> list:
                asked = [pool.submit(ask, 40 * which, count) for which in range(number)]
                wait_for(lambda: server.metric(WAITING) == number)
                return asked

            with paused(server, ADMIN):
                asked = ask_together(4, 160)
            [one.result() for one in asked]
            assert server.metric('pagetide_preemptions_total{mode="swap"}') > 0
            with paused(server, ADMIN):
                asked = ask_together(2, 400)
                fail_next_step(server)
            errors = [one.exception() for one in asked]
        assert ask(100, 20) == before, "the server continues and gives the same text"
        wait_for(lambda: prometheus.query(f"{RESTARTS} == 1"))
        yield Failed(server, prometheus, recordings, errors, before)


def test_requests_of_the_step_hear_of_it_and_the_server_goes_on(failed):
    told = [error for error in failed.errors if error]
    assert told and all(isinstance(error, openai.InternalServerError) for error in told), failed.errors
    assert all("a failure was asked for" in error.body["message"] for error in told)
    assert json.loads(failed.server.get("/ready")) == {"status": "ready"}
    assert failed.server.metric(RUNNING) == 0
    assert failed.server.metric('pagetide_requests_total{outcome="failed"}') == len(told)


def test_there_is_one_alert(failed):
    def firing() -> list:
        return [alert for alert in failed.prometheus.api("alerts")["alerts"] if alert["state"] == "firing"]

    wait_for(firing)
    assert [alert["labels"]["alertname"] for alert in firing()] == ["PagetideExecutorRestarted"]


def test_there_is_one_recording_which_replays_to_the_same_decisions(failed):
    wait_for(lambda: [file.suffix for file in failed.recordings()] == [".recording"])
    (recording,) = failed.recordings()
    assert failed.server.metric('pagetide_recordings_total{cause="failure"}') == 1
    told = replay(recording, "--check")
    assert "written when the executor failed" in told and "decided in the same way" in told


def test_without_the_setting_nobody_fails_a_step():
    with serving("--set", f"server.admin_key={ADMIN}") as server:
        with pytest.raises(urllib.error.HTTPError) as refused:
            fail_next_step(server)
        assert refused.value.code == 403
