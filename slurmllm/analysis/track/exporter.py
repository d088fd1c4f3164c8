"""Serves a run's page of metrics on a port, and writes it for node_exporter, while it trains."""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CONTENT_TYPE_LATEST

from slurmllm.analysis.status.runs import RunState
from slurmllm.analysis.track.prometheus import Page
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.config.token_file import read_token
from slurmllm.core.errors import ConfigError
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.safe_files import login_name, write_whole
from slurmllm.core.run.worker_files import diagnostic

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

INTERVAL_S = 15.0  # between two pages: Prometheus scrapes every 15 to 60 s
_SHARE = 0.05  # of the time, at most, for making pages
_STALE_S = 3600.0  # after which a page is that of a node that was lost

log = logging.getLogger(__name__)


class _Handler(WSGIRequestHandler):
    timeout = 5.0  # s, for a client to send its request: the server has one thread

    def log_message(self, *_: object) -> None:
        """Log nothing: Prometheus asks four times a minute."""


class Exporter:
    """Where the pages of a run go to; failures are logged, each once, and tried again."""

    def __init__(self, run: RunDir, config: RunConfig) -> None:
        metrics, self._token = config.cluster.metrics, None
        self.page = b""
        self._server: WSGIServer | None = None
        self._port, self._textfile = metrics.port, None
        try:
            self._token = read_token(config)
        except ConfigError as error:
            log.warning("%s", error)
            self._port = None
        if metrics.textfile is not None:
            folder = Path(metrics.textfile)
            self._textfile = folder / f"slurmllm-{login_name()}-{run.name}.prom"
            remove_stale(folder)

    def publish(self, page: bytes) -> None:
        self.page = page
        if self._port is not None and self._server is None:
            # It may be that of another run on this node.
            with diagnostic(f"cluster.metrics.port {self._port}"):
                host = "127.0.0.1" if self._token is None else ""
                self._server = make_server(host, self._port, self._answer, handler_class=_Handler)
                threading.Thread(target=self._server.serve_forever, daemon=True).start()
        if self._textfile is not None:
            with diagnostic(f"cluster.metrics.textfile {self._textfile}"):
                self._textfile.parent.stat()  # node_exporter's own: not made here
                write_whole(self._textfile, page, durable=False)

    def close(self) -> None:
        """Close the port and remove the file: series end, and no value outlives the training."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._textfile is not None:
            self._textfile.unlink(missing_ok=True)

    def _answer(self, request: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        sent = request.get("HTTP_AUTHORIZATION", "").encode()
        token = self._token
        if token is not None and not hmac.compare_digest(sent, f"Bearer {token}".encode()):
            start("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
            return [b"a bearer token is needed\n"]
        if request["PATH_INFO"] != "/metrics":
            start("404 Not Found", [])
            return [b"see /metrics\n"]
        start("200 OK", [("Content-Type", CONTENT_TYPE_LATEST)])
        return [self.page]


def remove_stale(folder: Path) -> None:
    """Remove the pages of supervisors that could not: those of a node that was lost, for one."""
    for path in folder.glob("slurmllm-*.prom"):
        with suppress(OSError):  # another user's
            if time.time() - path.lstat().st_mtime > _STALE_S:
                path.unlink()


def export(
    run: RunDir,
    config: RunConfig,
    read_state: Callable[[], RunState],
    ended: Callable[[], bool],
    sleep: Callable[[float], object],
) -> None:
    """Publish a run's metrics until `ended`."""
    exporter, page = Exporter(run, config), Page(run, config)
    try:
        while not ended():
            begin = time.monotonic()
            content = b""  # of damaged records: no figure is better than an old one
            with diagnostic("metrics"):
                content = page.render(read_state())
            exporter.publish(content)
            sleep(max(INTERVAL_S, (time.monotonic() - begin) / _SHARE))
    finally:
        exporter.close()
