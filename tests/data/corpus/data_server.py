"""A server of files that misbehaves as a test sets it, for the tests of downloads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Faults = dict[str, object]


@dataclass
class DataServer:
    """Files by path, the faults of each, and what was asked.

    Faults: `break_at` (bytes after which a connection breaks; a list: of each request in turn),
    `length` (a Content-Length that is not true), `no_range`, `status`, `slow` (seconds a KB).
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
            name = self.path.lstrip("/")
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
            body, first = server.files[name], 0
            asked = self.headers.get("Range")
            if asked and not faults.get("no_range"):
                first = int(asked.removeprefix("bytes=").rstrip("-"))
            with lock:
                server.requests.append((name, first))
                breaks = faults.get("break_at")
                if isinstance(breaks, list):
                    breaks = breaks.pop(0) if breaks else None
            length = int(str(faults.get("length", len(body))))
            self.send_response(206 if first else 200)
            if first:
                self.send_header("Content-Range", f"bytes {first}-{length - 1}/{length}")
            self.send_header("ETag", server.etag)
            self.send_header("Content-Length", str(length - first))
            self.end_headers()
            end = len(body) if breaks is None else min(len(body), first + int(str(breaks)))
            try:
                for begin in range(first, end, 1024):
                    time.sleep(float(str(faults.get("slow", 0))))
                    self.wfile.write(body[begin : min(begin + 1024, end)])
            except OSError:  # the client has what it wants
                pass
            if end < len(body):
                time.sleep(0.3)  # the client reads what was sent: after the end it might not
            self.close_connection = True

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
