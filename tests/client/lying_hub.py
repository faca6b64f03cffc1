"""A Hugging Face hub with one small model. Its answers are wrong in one way, which a test chooses."""

import contextlib
import hashlib
import http.server
import json
import pathlib
import threading
import time

from conftest import ROOT

MODEL = "tide-org/Tiny-Llama.v1"
COMMIT = "1" * 40
FILES = ROOT / "tests/data/models/llama-bf16-sharded"


class Hub(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, lie: str):
        super().__init__(("127.0.0.1", 0), Answers)
        self.lie, self.asked = lie, 0
        self.over = threading.Event()
        self.files = {path.name: path.read_bytes() for path in FILES.iterdir()}
        if lie == "a shard outside of its folder":
            index = json.loads(self.files["model.safetensors.index.json"])
            index["weight_map"] = {name: "../../../../outside" for name in index["weight_map"]}
            self.files["model.safetensors.index.json"] = json.dumps(index).encode()
            self.files["../../../../outside"] = b"outside"

    def handle_error(self, *_):
        """Prints nothing, because tests expect clients that hang up."""

    def etag(self, name: str) -> str:
        data = self.files[name]
        if name.endswith(".safetensors"):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.server.asked += 1
        self.close_connection = True
        with contextlib.suppress(OSError):
            if self.path.startswith("/api/models/"):
                self.listing()
            else:
                self.file(self.path.rpartition("/resolve/")[2].partition("/")[2])

    def send(self, status: int, body: bytes, **headers):
        self.send_response(status)
        headers = {"content_length": len(body), "connection": "close", **headers}
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def listing(self):
        lie, hub = self.server.lie, self.server
        if lie == "HTML instead of JSON":
            return self.send(200, b"<html>Please log in</html>", content_type="text/html")
        if lie == "JSON of another kind":
            return self.send(200, b'{"sha": 7, "siblings": {"a": null}}')
        if lie == "a listing as deep as it is long":
            return self.send(200, b"[" * 10_000_000)
        if lie == "a listing without an end":
            self.send(200, b'{"sha": "', content_length=1 << 50)
            piece = b"a" * (1 << 20)
            while not hub.over.is_set():
                self.wfile.write(piece)
        if lie == "redirects without an end":
            return self.send(302, b"", location=self.path)
        if lie == "a commit outside of its folder":
            return self.send(200, self.listed(sha="../../../../outside"))
        if lie == "sizes beyond every disk":
            return self.send(200, self.listed(size=2**63))
        return self.send(200, self.listed())

    def listed(self, sha: str = COMMIT, size=None) -> bytes:
        def sibling(name):
            data, etag = self.server.files[name], self.server.etag(name)
            listed = {"rfilename": name, "size": len(data) if size is None else size, "blobId": etag[:40]}
            return {**listed, "lfs": {"sha256": etag}} if name.endswith(".safetensors") else listed

        return json.dumps({"sha": sha, "siblings": [sibling(name) for name in self.server.files]}).encode()

    def file(self, name: str):
        lie, data = self.server.lie, self.server.files.get(name)
        if data is None:
            return self.send(404, b"")
        etag, weights = self.server.etag(name), name.endswith(".safetensors")
        commit, total = COMMIT, len(data)
        if lie == "a file's redirects without an end":
            return self.send(302, b"", location=self.path, etag=etag, x_repo_commit=commit)
        if lie == "another hash" and weights:
            data = data[:-100] + bytes(100)
        if lie == "another content" and name == "config.json":
            data = data[:-20] + b" " * 20
        if lie == "a name outside of the cache":
            etag = "../../../../outside"
        if lie == "an absolute name":
            etag = str(self.server.outside)
        if lie == "a commit of files outside of its folder":
            commit = "../../../../outside"
        if lie == "a file beyond every disk" and weights:
            total = 2**62
        if lie == "more than was said":
            data += b"more" * 100
        start, _, end = self.headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, end = int(start), min(int(end or total - 1), total - 1)
        piece = data[start : end + 1]
        headers = {"etag": f'"{etag}"', "x_repo_commit": commit, "content_range": f"bytes {start}-{end}/{total}"}
        if lie == "HTML instead of a file" and weights and end > 0:
            return self.send(200, b"<html>Please log in</html>", content_type="text/html", **headers)
        if lie == "no ranges":
            return self.send(200, data, **headers)
        if lie == "less than was said" and weights:
            return self.send(206, piece[: len(piece) // 2], content_length=len(piece), **headers)
        if lie == "another range" and weights and end > 0:
            return self.send(206, data[: len(piece)][::-1], **headers)
        return self.send(206, piece, **headers)


@contextlib.contextmanager
def lying(lie: str, outside: pathlib.Path):
    hub = Hub(lie)
    hub.outside = outside
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.over.set()
        hub.shutdown()
        hub.server_close()
        thread.join(10)


def tree(folder: pathlib.Path) -> set:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def wait_for_requests(hub: Hub, count: int, process):
    """Waits for `count` requests, or until the program that sends them has ended."""
    while hub.asked < count and process.poll() is None:
        time.sleep(0.001)
