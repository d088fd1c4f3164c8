"""`checkpoint import hf://…`: against a hub of this machine, from its cache, and its errors."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from click.testing import CliRunner

from checkpoint import hub
from slurmllm.cli.main import cli

COMMIT = hashlib.sha1(b"main").hexdigest()
OLD = hashlib.sha1(b"old").hexdigest()


class Hub(BaseHTTPRequestHandler):
    """The endpoints that a download uses; `org/model` has a folder of files for each revision."""

    files: dict[str, dict[str, bytes]]
    requests: list[str]
    short = False  # whether the connection ends before the content

    def log_message(self, *arguments: object) -> None:
        pass

    def reply(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:10] if self.short else content)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.requests.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            name, kind, revision = "/".join(parts[2:4]), parts[4], parts[5]
        else:
            name, kind, revision = "/".join(parts[:2]), parts[2], parts[3]
        if name == "org/gated":
            self.reply(403, b"{}", X_Error_Code="GatedRepo", X_Error_Message="gated")
        elif name == "org/broken":
            self.reply(500, b"{}")
        elif name not in ("org/model", "org/pickles", "org/cut"):
            self.reply(404, b"{}", X_Error_Code="RepoNotFound")
        elif (commit := {"main": COMMIT, "old": OLD}.get(revision, revision)) not in (COMMIT, OLD):
            self.reply(404, b"{}", X_Error_Code="RevisionNotFound")
        else:
            self.serve(self.files.get(name, self.files[commit]), kind, commit, parts)

    def serve(self, files: dict[str, bytes], kind: str, commit: str, parts: list[str]) -> None:
        if kind == "resolve":
            content = files["/".join(parts[4:])]
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            self.short = parts[1] == "cut" and self.command == "GET"
            self.reply(200, content, ETag=etag, X_Repo_Commit=commit, Accept_Ranges="bytes")
            return
        entries = [
            {
                "type": "file",
                "path": path,
                "size": len(content),
                "rfilename": path,
                "oid": hashlib.sha1(content).hexdigest(),
            }
            for path, content in files.items()
        ]
        model: dict[str, Any] = {"id": "/".join(parts[2:4]), "sha": commit, "siblings": entries}
        body = entries if kind == "tree" else model
        self.reply(200, json.dumps(body).encode(), Content_Type="application/json")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadingHTTPServer]:
    files = {}
    for commit in (COMMIT, OLD):
        folder = tmp_path_factory.mktemp("model")
        hub.small("neox").save_pretrained(folder)
        files[commit] = {path.name: path.read_bytes() for path in folder.iterdir()}
    files[COMMIT] |= {"pytorch_model.bin": b"a pickle", "onnx/model.safetensors": b"others"}
    files["org/pickles"] = {
        name: content
        for name, content in files[COMMIT].items()
        if name in ("config.json", "pytorch_model.bin")
    }
    handler = type("Handler", (Hub,), {"files": files, "requests": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def import_model(
    server: ThreadingHTTPServer, home: Path, source: str, out: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    # In a process of its own: the hub's package reads its variables when it is imported.
    variables = {name: text for name, text in os.environ.items() if not name.startswith("HF_")}
    variables |= {
        "HF_HOME": str(home),
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_ETAG_TIMEOUT": "60",
    }
    command = [sys.executable, "-m", "slurmllm", "checkpoint", "import", source]
    return subprocess.run(
        [*command, "--out", str(out), "--json"],
        env=variables | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_model_is_downloaded_once_and_used_offline(
    tmp_path: Path, server: ThreadingHTTPServer
) -> None:
    handler: Any = server.RequestHandlerClass
    done = import_model(server, tmp_path / "home", "hf://org/model", tmp_path / "a")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["source"], result["architecture"]) == ("hf://org/model", "GPTNeoXForCausalLM")
    assert (tmp_path / "a" / "manifest.json").is_file()
    fetched = {line.rpartition("/")[2] for line in handler.requests if line.startswith("GET /org")}
    assert {"config.json", "model.safetensors"} <= fetched
    assert not any("pytorch_model.bin" in line or "onnx" in line for line in handler.requests)
    handler.requests.clear()
    offline = import_model(
        server, tmp_path / "home", "hf://org/model", tmp_path / "b", HF_HUB_OFFLINE="1"
    )
    assert offline.returncode == 0, offline.stderr
    assert not handler.requests
    weights = [next((tmp_path / name).glob("*.safetensors")).read_bytes() for name in "ab"]
    assert weights[0] == weights[1]
    old = import_model(server, tmp_path / "home", "hf://org/model@old", tmp_path / "c")
    assert old.returncode == 0, old.stderr
    assert next((tmp_path / "c").glob("*.safetensors")).read_bytes() != weights[0]


@pytest.mark.parametrize(
    ("source", "code", "message"),
    [
        ("hf://org/none", 2, "hf://org/none: no such model, or a private one"),
        ("hf://org/gated", 2, "hf://org/gated is gated: accept its terms on http"),
        ("hf://org/model@no", 2, "hf://org/model@no: no such branch, tag or commit"),
        ("hf://a/b/c", 2, "hf://a/b/c names no model; write hf://ORG/NAME"),
        ("hf://org/pickles", 2, "hf://org/pickles has no safetensors"),
        ("hf://org/broken", 3, "cannot be reached; try again, or run `hf download org/broken "),
        ("hf://org/cut", 3, "hf://org/cut cannot be downloaded to "),
    ],
)
def test_models_that_cannot_be_had(
    tmp_path: Path, server: ThreadingHTTPServer, source: str, code: int, message: str
) -> None:
    done = import_model(server, tmp_path / "home", source, tmp_path / "out")
    assert message in " ".join(done.stderr.split())
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert not (tmp_path / "out").exists()


def test_offline_without_the_model(tmp_path: Path, server: ThreadingHTTPServer) -> None:
    source = "hf://org/model@old"
    done = import_model(server, tmp_path, source, tmp_path / "out", HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    text = " ".join(done.stderr.split())
    assert f"{source} is not fully cached, and HF_HUB_OFFLINE is set" in text
    assert "`hf download org/model --revision old --exclude '*.bin'` on a machine" in text
    assert f"{tmp_path}/hub" in text


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        ("neox_20b_finetune", "hf://EleutherAI/gpt-neox-20b"),
        ("llama2_7b_finetune", "hf://meta-llama/Llama-2-7b-hf"),
    ],
)
def test_fine_tuning_recipes_name_their_weights(
    recipe: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["submit", recipe, "--nodes", "4"])
    assert done.exit_code == 2
    text = " ".join(done.output.split())
    assert f"get them with `slurmllm checkpoint import {model} --out weights`, then add" in text
