"""`checkpoint import hf://…`: against a hub of this machine, from its cache, and its errors."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from click.testing import Result
from command_line import answer, call
from huggingface_hub import constants

from train.checkpoint import hub

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


@pytest.fixture
def import_model(
    server: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    url = f"http://127.0.0.1:{server.server_port}"
    values = {"ENDPOINT": url, "HF_HUB_CACHE": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": True}
    values["HUGGINGFACE_CO_URL_TEMPLATE"] = url + "/{repo_id}/resolve/{revision}/{filename}"

    def run(source: str, out: str, offline: bool = False) -> Result:
        for name, value in {**values, "HF_HUB_OFFLINE": offline}.items():
            monkeypatch.setattr(constants, name, value)
        arguments = ["checkpoint", "import", source, "--out", str(tmp_path / out), "--json"]
        return call(*arguments)

    return run


def test_a_model_is_downloaded_once_and_used_offline(
    tmp_path: Path, server: ThreadingHTTPServer, import_model: Callable[..., Result]
) -> None:
    handler: Any = server.RequestHandlerClass
    result = answer(import_model("hf://org/model", "a"))
    assert (result["source"], result["architecture"]) == ("hf://org/model", "GPTNeoXForCausalLM")
    assert (tmp_path / "a" / "manifest.json").is_file()
    fetched = {line.rpartition("/")[2] for line in handler.requests if line.startswith("GET /org")}
    assert {"config.json", "model.safetensors"} <= fetched
    assert not any("pytorch_model.bin" in line or "onnx" in line for line in handler.requests)
    handler.requests.clear()
    offline = import_model("hf://org/model", "b", offline=True)
    assert offline.exit_code == 0, offline.output
    assert not handler.requests
    old = import_model("hf://org/model@old", "c")
    assert old.exit_code == 0, old.output
    first, second, other = (
        next((tmp_path / name).glob("*.safetensors")).read_bytes() for name in "abc"
    )
    assert first == second != other


@pytest.mark.parametrize(
    ("source", "code", "message"),
    [
        ("hf://org/none", 2, "hf://org/none cannot be downloaded: "),
        ("hf://org/gated", 2, "hf://org/gated cannot be downloaded: "),
        ("hf://org/model@no", 2, "hf://org/model@no: no such branch, tag or commit; see http"),
        ("hf://a/b/c", 2, "write hf://ORG/NAME"),
        ("hf://org/pickles", 2, "hf://org/pickles has no safetensors"),
        ("hf://org/broken", 3, "try again, or copy there what `hf download org/broken`"),
        ("hf://org/cut", 3, "hf://org/cut cannot be downloaded to "),
    ],
)
def test_models_that_cannot_be_had(
    tmp_path: Path, import_model: Callable[..., Result], source: str, code: int, message: str
) -> None:
    done = import_model(source, "out")
    assert message in " ".join(done.stderr.split())
    assert done.exit_code == code
    assert not (tmp_path / "out").exists()


def test_offline_without_the_model(tmp_path: Path, import_model: Callable[..., Result]) -> None:
    source = "hf://org/model@old"
    done = import_model(source, "out", offline=True)
    assert done.exit_code == 2
    reason = f"{source} cannot be downloaded to {tmp_path}/home: HF_HUB_OFFLINE is set; unset it"
    text = " ".join(done.stderr.split())
    assert f"{reason}, or copy there what `hf download org/model --revision old` caches" in text


def test_fine_tuning_names_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = call("submit", "llama2_7b_finetune", "--nodes", "4")
    assert done.exit_code == 2
    fix = "`slurmllm checkpoint import hf://meta-llama/Llama-2-7b-hf --out weights`, then add"
    assert f"get them with {fix}" in " ".join(done.output.split())
