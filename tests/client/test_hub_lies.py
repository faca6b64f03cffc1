"""A hub with wrong answers causes a clear error. Nothing is written outside the cache, and the cache stays right."""

import json
import os
import random
import resource
import subprocess
import time

import pytest
from conftest import program
from lying_hub import MODEL, lying, tree, wait_for_requests

LONG = os.environ.get("PAGETIDE_LONG", "0") != "0"
LIES = [
    "HTML instead of JSON",
    "JSON of another kind",
    "a listing as deep as it is long",
    "a listing without an end",
    "redirects without an end",
    "a file's redirects without an end",
    "a commit outside of its folder",
    "sizes beyond every disk",
    "another hash",
    "a name outside of the cache",
    "an absolute name",
    "a commit of files outside of its folder",
    "a file beyond every disk",
    "more than was said",
    "HTML instead of a file",
    "no ranges",
    "another range",
    "a shard outside of its folder",
    # Only in the long form, because the program retries broken connections for half a minute.
    *(["less than was said"] if LONG else []),
]
REQUEST = json.dumps(
    {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": [3, 4, 5], "max_tokens": 4, "temperature": 0, "ignore_eos": True},
    }
)


def start(hub, home, before=None, **variables) -> subprocess.Popen:
    names = ("PAGETIDE_", "HF_", "HUGGING", "TRANSFORMERS_", "XDG_")
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(names) and not name.lower().endswith("_proxy")
    }
    env |= {"HOME": str(home), "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", **variables}
    command = [program(), "generate", "--input", "-", "--output", "-", "--num-device-blocks", "64", "--model", MODEL]
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    )
    try:
        process.stdin.write(REQUEST + "\n")
        process.stdin.close()
    except BrokenPipeError:
        pass  # the program has failed already
    process.stdin = None
    return process


def finish(process, timeout_s: float = 150) -> tuple:
    try:
        out, error = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, out, error


def few_bytes():
    """Limits the memory, so that an endless answer fails the test and does not exhaust the machine."""
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))


def text_of(result: tuple) -> str:
    code, out, error = result
    assert code == 0, error
    return json.loads(out)["response"]["body"]["choices"][0]["text"]


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    home = tmp_path_factory.mktemp("right")
    with lying("nothing", home / "outside") as hub:
        return text_of(finish(start(hub, home)))


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found_out(lie, right, tmp_path):
    home = tmp_path / "a/b/c/d/home"
    home.mkdir(parents=True)
    with lying(lie, tmp_path / "absolute/outside") as hub:
        code, out, error = finish(start(hub, home, before=few_bytes))
    assert code in (0, 1), (code, error)
    assert "panicked" not in error, error
    if code == 1:
        assert "127.0.0.1" in error or "model" in error, error
    else:
        assert text_of((code, out, error)) == right, "the answer is wrong"
    outside = {
        path
        for path in tree(tmp_path)
        if not path.startswith("a/b/c/d/home/.cache/huggingface/hub") and "outside" in path
    }
    assert not outside, f"written outside the model's folder: {outside}"
    in_model = {path for path in tree(home) if "outside" in path}
    assert not in_model, in_model
    if lie == "a shard outside of its folder":
        return  # the commit contains this file with the right hash, so it stays in the cache and is refused each time
    # What is left in the cache does no harm when the hub's answers are right again.
    with lying("nothing", tmp_path / "x") as hub:
        assert text_of(finish(start(hub, home))) == right


def test_a_slow_hub_is_waited_for_and_a_killed_download_goes_on(right, tmp_path):
    """The program is killed with SIGKILL at random moments of a download."""
    rng = random.Random(7)
    for count in range(100 if LONG else 3):
        home = tmp_path / str(count)
        home.mkdir()
        with lying("nothing", tmp_path / "x") as hub:
            for _ in range(2):
                process = start(hub, home)
                wait_for_requests(hub, hub.asked + rng.randrange(1, 12), process)
                time.sleep(rng.random() * 0.01)
                process.kill()
                process.communicate()
            assert text_of(finish(start(hub, home))) == right


@pytest.mark.parametrize("fault", ["a limited file", "a file instead of a folder", "a folder of the kernel"])
def test_a_cache_that_cannot_be_written_is_said(fault, right, tmp_path):
    (tmp_path / "file").write_text("")
    variables = {
        "a file instead of a folder": {"HF_HUB_CACHE": str(tmp_path / "file/hub")},
        "a folder of the kernel": {"HF_HUB_CACHE": "/proc/hub"},
    }.get(fault, {})
    before = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))) if fault == "a limited file" else None
    with lying("nothing", tmp_path / "x") as hub:
        code, _, error = finish(start(hub, tmp_path, before=before, **variables))
        assert code == 1 and "cannot write to the cache" in error, (code, error)
        assert text_of(finish(start(hub, tmp_path))) == right
