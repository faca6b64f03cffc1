"""Uses files and batches through the openai and anthropic packages."""

import contextlib
import json
import pathlib
import signal

import anthropic
import openai
import pytest
from anthropic.types.messages import MessageBatch
from openai.types import Batch, FileObject

from conftest import serving, wait_for

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
LONG = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True}
SHORT = {"prompt": "a", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    with serving("--set", f"batches.folder={folder}", "--set", "batches.max_file_mib=1") as server:
        yield server


@pytest.fixture
def ask(batches):
    with batches.client() as made:
        yield made


def request(custom_id, body, url=COMPLETION, **changed) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body} | changed


def upload(client, lines) -> FileObject:
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    file = client.files.create(file=("requests.jsonl", text.encode()), purpose="batch")
    return FileObject.model_validate(file.to_dict())


def start(client, lines, endpoint=COMPLETION, **options) -> Batch:
    file = upload(client, lines)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options)


def ended(client, batch) -> Batch:
    wait_for(lambda: client.batches.retrieve(batch.id).status in ENDED)
    return Batch.model_validate(client.batches.retrieve(batch.id).to_dict())


def lines_of(client, file_id) -> dict:
    """The lines of a file by their custom_id, each of which it has once."""
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    by_id = {line["custom_id"]: line for line in lines}
    assert len(by_id) == len(lines)
    return by_id


def test_a_file_is_kept_listed_and_deleted(ask):
    file = upload(ask, ["one\n", "two\n"])
    assert (file.object, file.bytes, file.filename, file.purpose) == ("file", 8, "requests.jsonl", "batch")
    assert file.expires_at - file.created_at == 30 * 86_400
    assert ask.files.retrieve(file.id).to_dict() == file.to_dict()
    assert ask.files.content(file.id).read() == b"one\ntwo\n"
    other = upload(ask, ["x\n"])
    assert [listed.id for listed in ask.files.list(limit=1)][:2] == [other.id, file.id]
    assert [listed.id for listed in ask.files.list(order="asc", after=file.id)] == [other.id]
    assert not list(ask.files.list(purpose="batch_output", after=None))
    assert ask.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        ask.files.content(file.id)
    ask.files.delete(other.id)


def test_a_file_may_expire_sooner(ask):
    soon = {"anchor": "created_at", "seconds": 3600}
    file = ask.files.create(file=("a", b"x"), purpose="batch", expires_after=soon)
    assert file.expires_at - file.created_at == 3600
    for wrong in ({"anchor": "created_at", "seconds": 5}, {"anchor": "last_active_at", "seconds": 3600}):
        with pytest.raises(openai.BadRequestError, match="expires_after"):
            ask.files.create(file=("a", b"x"), purpose="batch", expires_after=wrong)


def test_wrong_uploads_are_refused(ask):
    with pytest.raises(openai.BadRequestError, match="purpose must be one of batch"):
        ask.files.create(file=("a", b"x"), purpose="fine-tune")
    with pytest.raises(openai.APIStatusError, match="batches.max_file_mib") as refused:
        ask.files.create(file=("a", b"x" * (1 << 20) + b"y"), purpose="batch")
    assert refused.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="multipart/form-data"):
        ask.post("/files", body={"purpose": "batch"}, cast_to=object)
    # A file of exactly the limit is kept.
    ask.files.delete(ask.files.create(file=("a", b"x" * (1 << 20)), purpose="batch").id)


def test_a_batch_of_chats(ask, batches):
    chat = {"messages": [{"role": "user", "content": "What is Pagetide?"}], "temperature": 0, "max_tokens": 20}
    lines = [
        request("good", chat, CHAT),
        "\n",
        request("refused", {"messages": [], "max_tokens": 5}, CHAT),
        request("good", chat, CHAT),
        request("elsewhere", {"prompt": "a"}),
        "{not json\n",
        request("streamed", chat | {"stream": True}, CHAT),
        request("also good", chat, CHAT),
    ]
    batch = start(ask, lines, CHAT, metadata={"k": "v"})
    assert (batch.object, batch.endpoint, batch.metadata) == ("batch", CHAT, {"k": "v"})
    assert batch.expires_at - batch.created_at == 86_400
    # The batch does not need its file any more.
    ask.files.delete(batch.input_file_id)
    batch = ended(ask, batch)
    assert batch.status == "completed" and batch.completed_at >= batch.in_progress_at
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (7, 2, 5)
    good = lines_of(ask, batch.output_file_id)
    assert sorted(good) == ["also good", "good"]
    direct = ask.chat.completions.create(model="demo", **chat)
    for line in good.values():
        assert (line["error"], line["response"]["status_code"]) == (None, 200)
        answer = line["response"]["body"]
        assert answer["choices"][0]["message"]["content"] == direct.choices[0].message.content
        assert line["response"]["request_id"] == answer["id"]
    bad = [json.loads(line) for line in ask.files.content(batch.error_file_id).text.splitlines()]
    bad = {(line["custom_id"], line["id"].rsplit("_", 1)[1]): line for line in bad}
    assert set(bad) == {("refused", "3"), ("good", "4"), ("elsewhere", "5"), (None, "6"), ("streamed", "7")}
    assert bad["refused", "3"]["response"]["body"]["error"]["param"] == "messages"
    assert bad["good", "4"]["error"] == {
        "code": "invalid_request",
        "message": "line 4: custom_id: an earlier line has the same",
    }
    for line, text in [(("elsewhere", "5"), "url"), ((None, "6"), "JSON"), (("streamed", "7"), "stream")]:
        assert bad[line]["response"] is None and text in bad[line]["error"]["message"]
    files = {file.id: file for file in ask.files.list(purpose="batch_output")}
    assert files[batch.output_file_id].filename == f"{batch.id}_output.jsonl"
    assert next(iter(ask.batches.list(limit=1))).id == batch.id


@pytest.mark.parametrize(
    ("endpoint", "body", "object"),
    [
        (COMPLETION, SHORT, "text_completion"),
        ("/v1/embeddings", {"input": ["a", "b"]}, "list"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 4}, "response"),
    ],
)
def test_every_endpoint(ask, endpoint, body, object):
    batch = ended(ask, start(ask, [request("a", body, endpoint)], endpoint))
    assert (batch.status, batch.error_file_id) == ("completed", None)
    assert lines_of(ask, batch.output_file_id)["a"]["response"]["body"]["object"] == object


def test_an_input_without_requests_fails(ask):
    for lines, code, line in [([], "empty_file", None), (["{}\n", "x\n"], "invalid_request", 1)]:
        batch = ended(ask, start(ask, lines))
        assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
        assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, line)
    with pytest.raises(openai.ConflictError, match="has ended"):
        ask.batches.cancel(batch.id)


def test_wrong_batches_are_refused(ask):
    file = upload(ask, ["x\n"])
    good = {"input_file_id": file.id, "endpoint": COMPLETION, "completion_window": "24h"}
    for field, value in [("endpoint", "/v1/messages"), ("completion_window", "1d"), ("metadata", {"k": 1})]:
        with pytest.raises(openai.BadRequestError, match=field):
            ask.batches.create(**good | {field: value})
    for unknown in ("file-0", "../lock"):
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            ask.batches.create(**good | {"input_file_id": unknown})
    with pytest.raises(openai.NotFoundError, match="there is no batch"):
        ask.batches.retrieve("batch_0")
    with pytest.raises(openai.BadRequestError, match="limit"):
        ask.batches.list(limit=101)


def test_a_batch_is_cancelled(ask):
    lines = [request(str(i), LONG) for i in range(200)]
    batch = start(ask, lines)
    wait_for(lambda: ask.batches.retrieve(batch.id).status == "in_progress")
    assert ask.batches.cancel(batch.id).status == "cancelling"
    batch = ended(ask, batch)
    assert batch.status == "cancelled" and batch.cancelled_at >= batch.cancelling_at
    counts = batch.request_counts
    assert (counts.total, counts.completed + counts.failed) == (200, 200) and counts.failed > 0
    given_up = lines_of(ask, batch.error_file_id)
    assert {line["error"]["code"] for line in given_up.values()} == {"batch_cancelled"}
    done = lines_of(ask, batch.output_file_id) if batch.output_file_id else {}
    assert {**given_up, **done}.keys() == {str(i) for i in range(200)}


def test_a_batch_goes_on_after_the_server_was_killed(tmp_path):
    flags = ("--set", f"batches.folder={tmp_path}", "--set", "batches.max_running=2")
    num_lines = 300
    with contextlib.suppress(AssertionError), serving(*flags) as server, server.client() as client:
        batch = start(client, [request(str(i), SHORT | {"max_tokens": 32}) for i in range(num_lines)])
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 10)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    [journal] = (tmp_path / "batches").glob("*.output")
    before = journal.read_text().splitlines()
    assert 10 <= len(before) < num_lines
    # Half of a line, as a crash of the machine leaves it.
    with journal.open("a") as file:
        file.write('{"id": "batch_req_')
    with serving(*flags) as server, server.client() as client:
        batch = ended(client, batch)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.total) == ("completed", 300, 300)
        after = client.files.content(batch.output_file_id).text.splitlines()
        assert after[: len(before)] == before, "what was done is not done again"
        assert lines_of(client, batch.output_file_id).keys() == {str(i) for i in range(num_lines)}
    assert not pathlib.Path(journal).exists()


def test_clients_that_wait_go_first(tmp_path):
    flags = ("--set", f"batches.folder={tmp_path}", "--set", "scheduler.max_num_seqs=2")
    with serving(*flags) as server, server.client() as client:
        long = {"prompt": "a", "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
        streams = [client.completions.create(model="demo", stream=True, **long) for _ in range(2)]
        for stream in streams:
            next(stream)
        batch = start(client, [request("a", SHORT)])
        wait_for(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        for _ in range(20):
            for stream in streams:
                next(stream)
            assert client.batches.retrieve(batch.id).request_counts.completed == 0
        for stream in streams:
            stream.close()
        assert ended(client, batch).request_counts.completed == 1


def test_a_key_sees_its_own(tmp_path):
    flags = ("--api-key", "one", "--api-key", "two", "--set", f"batches.folder={tmp_path}")
    with serving(*flags) as server, server.client("one") as one, server.client("two") as two:
        file = upload(one, [request("a", SHORT)])
        batch = one.batches.create(input_file_id=file.id, endpoint=COMPLETION, completion_window="24h")
        for ask in (
            lambda: two.files.retrieve(file.id),
            lambda: two.files.content(file.id),
            lambda: two.files.delete(file.id),
            lambda: two.batches.retrieve(batch.id),
            lambda: two.batches.cancel(batch.id),
            lambda: two.batches.create(input_file_id=file.id, endpoint=COMPLETION, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        assert not list(two.files.list()) and not list(two.batches.list())
        assert ended(one, batch).request_counts.completed == 1
        with server.client("three") as three, pytest.raises(openai.AuthenticationError):
            three.files.list()


def test_without_a_folder_the_error_names_the_setting(client, claude):
    for ask in (
        lambda: client.files.list(),
        lambda: client.files.create(file=("a", b"x"), purpose="batch"),
        lambda: client.batches.list(),
    ):
        with pytest.raises(openai.PermissionDeniedError, match="batches.folder"):
            ask()
    with pytest.raises(anthropic.PermissionDeniedError, match="batches.folder"):
        claude.messages.batches.list()


MESSAGE = {"max_tokens": 20, "messages": [{"role": "user", "content": "What is Pagetide?"}], "model": "demo"}


def ended_messages(claude, batch) -> MessageBatch:
    wait_for(lambda: claude.messages.batches.retrieve(batch.id).processing_status == "ended")
    return MessageBatch.model_validate(claude.messages.batches.retrieve(batch.id).to_dict())


def test_a_batch_of_messages(batches):
    with batches.anthropic_client() as claude:
        greedy = MESSAGE | {"temperature": 0}
        requests = [
            {"custom_id": "good", "params": greedy},
            {"custom_id": "refused", "params": MESSAGE | {"max_tokens": 0}},
        ]
        batch = claude.messages.batches.create(requests=requests)
        assert (batch.type, batch.results_url) == ("message_batch", None)
        batch = ended_messages(claude, batch)
        counts = batch.request_counts
        assert (counts.processing, counts.succeeded, counts.errored) == (0, 1, 1)
        results = {result.custom_id: result.result for result in claude.messages.batches.results(batch.id)}
        assert sorted(results) == ["good", "refused"]
        direct = claude.messages.create(**MESSAGE, extra_body={"temperature": 0})
        assert results["good"].type == "succeeded"
        assert results["good"].message.content == direct.content
        assert results["refused"].type == "errored"
        assert results["refused"].error.error.type == "invalid_request_error"
        assert "max_tokens" in results["refused"].error.error.message
        newest = claude.messages.batches.list(limit=1)
        assert [listed.id for listed in newest.data] == [batch.id]
        assert claude.messages.batches.delete(batch.id).type == "message_batch_deleted"
        with pytest.raises(anthropic.NotFoundError):
            claude.messages.batches.retrieve(batch.id)


def test_a_batch_of_messages_is_cancelled(batches):
    with batches.anthropic_client() as claude:
        long = {**MESSAGE, "max_tokens": 1500, "ignore_eos": True}
        batch = claude.messages.batches.create(
            requests=[{"custom_id": str(i), "params": long} for i in range(100)]
        )
        with pytest.raises(anthropic.ConflictError, match="has not ended"):
            claude.messages.batches.delete(batch.id)
        assert claude.messages.batches.cancel(batch.id).processing_status in ("canceling", "ended")
        batch = ended_messages(claude, batch)
        assert batch.cancel_initiated_at <= batch.ended_at
        assert batch.request_counts.canceled + batch.request_counts.succeeded == 100
        kinds = [result.result.type for result in claude.messages.batches.results(batch.id)]
        assert kinds.count("canceled") == batch.request_counts.canceled > 0
        # The two APIs do not see each other's batches.
        with batches.client() as client, pytest.raises(openai.NotFoundError):
            client.batches.retrieve(batch.id)


def test_wrong_batches_of_messages_are_refused(batches):
    with batches.anthropic_client() as claude:
        one = {"custom_id": "a", "params": MESSAGE}
        for requests, text in [([], "at least one"), ([one, one], "custom_id"), ([{"custom_id": "a"}], "params")]:
            with pytest.raises(anthropic.BadRequestError, match=text):
                claude.messages.batches.create(requests=requests)
        with pytest.raises(anthropic.NotFoundError):
            claude.messages.batches.results("msgbatch_0")
