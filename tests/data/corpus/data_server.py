"""A server of files that misbehaves as a test sets it, for the tests of downloads."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath

Faults = dict[str, object]


@dataclass
class DataServer:
    """Files by path, the faults of each, and what was asked.

    Faults: `break_at` (bytes after which a connection breaks; a list: of each request in turn),
    `length` (a Content-Length that is not true; 0: none), `no_range`, `status`, `slow` (seconds a
    KB), `location` (of a redirect), `range_from` (where the answer to a range begins), `headers`.
    """

    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, Faults] = field(default_factory=dict)
    requests: list[tuple[str, int]] = field(default_factory=list)  # path, first byte
    etag: str = '"1"'

    def asked(self, path: str) -> list[int]:
        return [first for name, first in self.requests if name == path]


@contextmanager
def data_server() -> Iterator[DataServer]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.send_response(200)  # without a length, as some servers
            self.end_headers()

        def do_GET(self) -> None:
            name = self.path.partition("?")[0].lstrip("/")
            if name.startswith("api/datasets/"):
                self.answer_as_hub(name.removeprefix("api/datasets/"))
                return
            faults = server.faults.get(name, {})
            if name.endswith("/") or not name:
                body = "".join(f'<a href="/{name}">x</a>' for name in sorted(server.files)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                return
            status = int(str(faults.get("status", 200 if name in server.files else 404)))
            if status != 200:
                self.send_error(status)
                return
            if "location" in faults:
                self.send_response(302)
                self.send_header("Location", str(faults["location"]))
                self.end_headers()
                return
            body, first, last = server.files[name], 0, ""
            asked = self.headers.get("Range")
            if asked and not faults.get("no_range"):
                begin, _, last = asked.removeprefix("bytes=").partition("-")
                first = int(begin)
            with lock:
                server.requests.append((name, first))
                breaks = faults.get("break_at")
                if isinstance(breaks, list):
                    breaks = breaks.pop(0) if breaks else None
            length = int(str(faults.get("length", len(body))))
            stop = min(int(last) + 1, length) if last else length
            is_range = first > 0 or last != ""
            self.send_response(206 if is_range else 200)
            if is_range:
                claimed = faults.get("range_from", first)
                self.send_header("Content-Range", f"bytes {claimed}-{stop - 1}/{length}")
            self.send_header("ETag", server.etag)
            for header, value in dict(faults.get("headers", {})).items():  # type: ignore[call-overload]
                self.send_header(header, value)
            if length:
                self.send_header("Content-Length", str(stop - first))
            self.end_headers()
            whole = min(len(body), stop or len(body))
            end = whole if breaks is None else min(whole, first + int(str(breaks)))
            try:
                for begin in range(first, end, 1024):
                    time.sleep(float(str(faults.get("slow", 0))))
                    self.wfile.write(body[begin : min(begin + 1024, end)])
            except OSError:  # the client has what it wants
                pass
            if end < whole:
                time.sleep(0.3)  # the client reads what was sent: after the end it might not
            self.close_connection = True

        def answer_as_hub(self, name: str) -> None:
            """Answer what huggingface_hub asks of the data set ORG/NAME, whose files are in
            `datasets/ORG/NAME/resolve/main/`."""
            dataset, tree, folder = name.partition("/tree/main")
            root = f"datasets/{dataset}/resolve/main/"
            files = {PurePosixPath(n.removeprefix(root)): len(b) for n, b in server.files.items()}
            answer: object = {"id": dataset, "sha": "a" * 40, "siblings": [], "tags": []}
            if tree:
                entries = [
                    {"type": "file", "path": str(path), "size": size, "oid": server.etag * 9}
                    for path, size in files.items()
                ]
                folders = {parent for path in files for parent in path.parents}
                entries += [{"type": "directory", "path": str(f), "oid": "b"} for f in folders]
                base = PurePosixPath(folder.lstrip("/"))
                for entry in list(entries):
                    parents = PurePosixPath(str(entry["path"])).parents
                    if base not in (parents if "recursive=true" in self.path else parents[:1]):
                        entries.remove(entry)
                answer = entries
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    lock = threading.Lock()
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = DataServer(f"http://127.0.0.1:{http.server_port}/")
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
