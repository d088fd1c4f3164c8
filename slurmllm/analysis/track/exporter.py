"""Exports a run's metrics while it trains: on a port, or to a file for node_exporter."""

from __future__ import annotations

import hmac
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from slurmllm.analysis.status.runs import supervised_state
from slurmllm.analysis.track.prometheus import Page
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.config.trackers import read_token
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.safe_files import login_name, write_whole
from slurmllm.core.run.worker_files import diagnostic

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

INTERVAL_S = 15.0  # between two pages: Prometheus scrapes every 15 to 60 s


class _Handler(WSGIRequestHandler):
    timeout = 5.0  # s without a byte of a request

    def log_message(self, *_: object) -> None:
        """Log nothing: Prometheus sends a request every few seconds."""


def serve(registry: CollectorRegistry, port: int, token: str | None) -> WSGIServer:
    """Serve metrics by threads: to this machine, or to all clients with the token."""
    page = make_wsgi_app(registry)

    def answer(request: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        credentials = request.get("HTTP_AUTHORIZATION", "").encode()
        if token and not hmac.compare_digest(credentials, f"Bearer {token}".encode()):
            start("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
            return [b"a bearer token is required\n"]
        result: Iterable[bytes] = page(request, start)
        return result

    host = "" if token else "127.0.0.1"
    server = make_server(host, port, answer, ThreadingWSGIServer, _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def export(run: RunDir, config: RunConfig, stop: threading.Event) -> None:
    """Publish a run's metrics until `stop`; each failure is logged once, and retried.

    Raises ConfigError if the token cannot be read.
    """
    metrics = config.cluster.metrics
    token = read_token(config)
    server = None
    page = Page(run, config)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(page)
    file = None
    if metrics.textfile is not None:
        file = Path(metrics.textfile, f"slurmllm-{login_name()}-{run.name}.prom")
    while True:
        with diagnostic("metrics"):
            page.update(supervised_state(run))
        if metrics.port is not None and server is None:
            # Another run on this node may use the port.
            with diagnostic(f"cluster.metrics.port {metrics.port}"):
                server = serve(registry, metrics.port, token)
        if file is not None:
            with diagnostic(f"cluster.metrics.textfile {file}"):
                file.parent.stat()  # belongs to node_exporter: not created here
                write_whole(file, generate_latest(registry), durable=False)
        if stop.wait(INTERVAL_S):
            break
    if file is not None:  # the series end with the training
        file.unlink(missing_ok=True)
