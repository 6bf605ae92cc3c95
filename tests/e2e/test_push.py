"""`posttrain export --push`: the requests that arrive at a hub, which here is a server on this machine."""

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from posttrain.checkpoints.checkpoint import newest_valid
from posttrain.models.pico import pico_folder
from tests.e2e.commands import command
from tests.e2e.rows import write_rows


class Hub(ThreadingHTTPServer):
    """Answers the requests of an upload: create, preupload, commit; all files are sent inside the commit."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.requests, self.files, self.hangs_up = [], {}, False


class HubRequest(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
        self.server.requests.append((self.path, self.headers.get("Authorization"), body))
        if self.server.hangs_up:
            self.close_connection = True
            return
        if self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            reply = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        elif self.path.endswith("/commit/main"):
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            reply = {"commitUrl": "http://127.0.0.1/me/small/commit/1", "commitOid": "1", "success": True}
        else:
            reply = {"url": "http://127.0.0.1/me/small", "name": "me/small"}
        self.answer(reply)

    def do_GET(self):
        self.answer({"id": "me/small", "sha": "0", "siblings": [], "name": "me", "type": "user"})

    def answer(self, value):
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def export(hub, *words, token="hf_of_the_test"):
    env = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "HF_TOKEN", "TRANSFORMERS_OFFLINE")}
    env |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": "hf-home", "HF_HUB_DISABLE_TELEMETRY": "1"}
    env |= {"HF_TOKEN": token} if token else {}
    done = [sys.executable, "-m", "posttrain", "export", *words]
    return subprocess.run(done, env=env, capture_output=True, text=True)


def test_a_run_is_pushed_with_its_card(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows("chat", tmp_path)
    data = ("--data.train", str(tmp_path / "chat.jsonl"), "--data.eval", "chat.jsonl", "--eval.every_steps", 1)
    given = ("--model.path", "pico", *data, "--out", "run", "--quiet", "--steps", 3, "--model.lora_rank", 2)
    assert command("sft", *given) == 0
    done = export(hub, "run", "out", "--push", "me/small", "--format", "fp8")
    assert done.returncode == 0, done.stderr
    assert "pushed: http" in done.stdout
    created = next(json.loads(body) for path, _, body in hub.requests if path == "/api/repos/create")
    assert created["visibility"] == "private" and created["name"] == "small"
    assert {authorization for path, authorization, _ in hub.requests} == {"Bearer hf_of_the_test"}
    here = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert hub.files == here and {"README.md", "curves.svg", "config.json"} <= here.keys()
    card = here["README.md"].decode()
    assert card.startswith("---\nlibrary_name: transformers\n") and "posttrain sft" in card
    assert "training: `chat.jsonl`" in card and "| `model.lora_rank` | `2` |" in card
    assert "| `eval/loss` |" in card and "KL divergence per token" in card and "3 steps." in card
    assert str(tmp_path) not in card and "hf_of_the_test" not in card

    # An earlier checkpoint has the metrics until then; an upload that fails says what is left.
    hub.hangs_up = True
    failed = export(hub, "run/checkpoints/step-00000002", "earlier", "--push", "me/small")
    assert failed.returncode == 1 and "the upload failed" in failed.stderr and "push it again" in failed.stderr
    assert "2 steps." in (tmp_path / "earlier/README.md").read_text()

    before = len(hub.requests)
    refused = export(hub, "run", "adapters", "--push", "me/small", "--no_merge")
    assert refused.returncode == 2 and "could not be loaded elsewhere" in refused.stderr
    refused = export(hub, "run", "other", "--push", "me/small", token="")
    assert refused.returncode == 2 and "HF_TOKEN" in refused.stderr
    refused = export(hub, "run", "other", "--push", "a/b/c")
    assert refused.returncode == 2 and "not a name of the hub" in refused.stderr
    assert not [path for path, _, _ in hub.requests[before:] if "create" in path or "commit" in path]
    assert not (tmp_path / "adapters").exists() and not (tmp_path / "other").exists()


def test_adapters_are_pushed_where_their_base_is_on_the_hub(hub, tmp_path, monkeypatch):
    """The base is in the cache as if it had been downloaded: the run is made to name it by its name there."""
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / "hf-home/hub/models--me--base"
    shutil.copytree(pico_folder(), cache / "snapshots/0")
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("0", encoding="utf-8")
    write_rows("chat", tmp_path)
    data = ("--data.train", "chat.jsonl", "--data.eval", "chat.jsonl", "--eval.every_steps", 1)
    assert command("sft", "--model.path", "pico", *data, "--out", "run", "--steps", 2, "--model.lora_rank", 2) == 0
    config = newest_valid(tmp_path / "run/checkpoints") / "model/adapter_config.json"
    entries = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(entries | {"base_model_name_or_path": "me/base"}), encoding="utf-8")
    done = export(hub, str(config.parent), "out", "--no_merge", "--push", "me/small")
    assert done.returncode == 0, done.stderr
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md", "curves.svg"} <= hub.files.keys()
    assert not [name for name in hub.files if name.startswith("model")], "the base is not uploaded"
    card = hub.files["README.md"].decode()
    assert "library_name: peft\n" in card and "base_model: me/base\n" in card
    assert "training: `chat.jsonl`" in card and "| `model.lora_rank` | `2` |" in card and "| `eval/loss` |" in card
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] == "me/base"
    assert str(tmp_path) not in card
