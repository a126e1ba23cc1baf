"""What goes to the hub and what stays, told by a stand-in that answers what huggingface_hub asks of the real one."""

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub
import pytest

import biphase
from biphase.errors import InputError
from biphase.export.push import LOCAL_PATH, push_model
from biphase.pretraining.loop import train
from biphase.recipe import Recipe
from biphase.run import Run


class Hub:
    """What the stand-in holds: for each repository whether it is private, and the files of each branch."""

    def __init__(self) -> None:
        self.private: dict[str, bool] = {}
        self.branches: dict[tuple[str, str], dict[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.url = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON."""
        self.asked.append(f"{method} {path}")
        parts = path.partition("?")[0].strip("/").split("/")
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            wanted = json.loads(body)
            repo = f"me/{wanted['name']}"
            self.private[repo] = wanted.get("private") is True or wanted.get("visibility") == "private"
            self.branches[repo, "main"] = {}
            return 200, {"url": f"{self.url}/{repo}", "id": repo, "name": repo}
        if method == "PUT":
            self.blobs[parts[-1]] = body
            return 200, {}
        if parts[-1] == "batch":
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.url}/blobs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        repo = "/".join(parts[2:4])
        if repo not in self.private:
            return 404, {"error": "Repository not found"}
        if method == "GET":
            return 200, {"id": repo, "modelId": repo, "private": self.private[repo], "siblings": []}
        verb, revision = parts[4], parts[5]
        if verb == "branch":
            self.branches[repo, revision] = {}
            return 200, {}
        if verb == "preupload":
            files = [
                {"path": one["path"], "uploadMode": self.mode(one["path"]), "shouldIgnore": False, "oid": None}
                for one in json.loads(body)["files"]
            ]
            return 200, {"files": files}
        assert verb == "commit"
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.branches[repo, revision][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "lfsFile":
                self.branches[repo, revision][line["value"]["path"]] = self.blobs[line["value"]["oid"]]
        oid = hashlib.sha1(body).hexdigest()
        return 200, {
            "success": True,
            "commitOid": oid,
            "commitUrl": f"{self.url}/{repo}/commit/{oid}",
            "hookOutput": "",
        }

    @staticmethod
    def mode(path: str) -> str:
        return "lfs" if path.endswith(".safetensors") else "regular"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The stand-in on a port of this machine, in place of the hub."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, answer = hub.answer(self.command, self.path, body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = respond

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)  # whose server is another one
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    yield hub
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def run(tiny_recipe: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two updates, one of each objective, a checkpoint after each; its data lie in a folder of this machine."""
    import biphase.pretraining.metrics as metrics

    steps = ["curriculum.0.steps=1", "curriculum.1.steps=1", "schedule.warmup_steps=0", "schedule.decay_steps=0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "peak_flops", lambda device, dtype: 1e12)
        return train(tiny_recipe(*steps), tmp_path_factory.mktemp("runs"))


@pytest.fixture
def folder(run: Run, tmp_path: Path) -> Path:
    return biphase.export(run.path, tmp_path / "encoder")


def test_a_model_goes_without_what_is_not_meant(hub: Hub, folder: Path, capsys: pytest.CaptureFixture) -> None:
    stays = ["optimizer.safetensors", "metrics.jsonl", "predictions/test.jsonl", "train.log", ".env", "notes.txt"]
    (folder / "predictions").mkdir()
    for name in stays:
        (folder / name).write_text("a text of a user")
    (folder / "pytorch_model.bin").symlink_to("/etc/passwd")
    biphase.push(folder, "me/encoder", license="apache-2.0", language="en,de", dry_run=True)
    told = capsys.readouterr().out
    assert hub.asked == [] and "nothing sent" in told and "model.safetensors" in told
    assert "stays here: " + ", ".join(sorted(stays)) in told
    biphase.push(folder, "me/encoder", license="apache-2.0", language="en,de")
    assert hub.private == {"me/encoder": True}
    sent = hub.branches["me/encoder", "main"]
    mine = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(sent) == mine - {*stays, "pytorch_model.bin"}
    assert all(sent[name] == (folder / name).read_bytes() for name in sent if name != "README.md")
    card = huggingface_hub.ModelCard(sent["README.md"].decode())
    assert (card.data.license, card.data.language) == ("apache-2.0", ["en", "de"])
    assert 'from_pretrained("me/encoder")' in card.text and "biphase" in card.data.tags
    assert f"{hub.url}/me/encoder/commit/" in capsys.readouterr().out


def test_checkpoints_of_a_run_are_revisions(hub: Hub, run: Run) -> None:
    biphase.push(run.path, "me/encoder", license="mit", language="en")
    assert {branch for _, branch in hub.branches} == {"main", "step-1"}
    first, last = (hub.branches["me/encoder", branch] for branch in ("step-1", "main"))
    assert json.loads(first["config.json"])["model_type"] == "llama"
    assert json.loads(last["config.json"])["model_type"] == "eurobert"
    assert first["model.safetensors"] != last["model.safetensors"]
    names = {name for files in hub.branches.values() for name in files}
    assert not any("optimizer" in name or "metrics" in name or "manifest" in name for name in names)
    assert not any(LOCAL_PATH.search(files["README.md"].decode()) for files in hub.branches.values())


def test_export_goes_on_to_the_hub(hub: Hub, run: Run, tmp_path: Path) -> None:
    biphase.export(run.path, tmp_path / "encoder", to_hub="me/other", license="mit", language="en")
    assert "model.safetensors" in hub.branches["me/other", "main"]


def test_what_is_refused_before_anything_is_sent(hub: Hub, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"README\.md says no license; give one"):
        push_model(str(folder), "me/encoder")
    with pytest.raises(InputError, match=r"README\.md says no language"):
        push_model(str(folder), "me/encoder", license="mit")
    for repo in ("encoder", "a/b/c", "me/--x", "https://huggingface.co/me/x"):
        with pytest.raises(InputError, match="is no name of a repository"):
            push_model(str(folder), repo, license="mit", languages=("en",))
    with pytest.raises(InputError, match="is no model folder"):
        push_model(str(tmp_path), "me/encoder", license="mit", languages=("en",))
    card = (folder / "README.md").read_text()
    (folder / "README.md").write_text(card.replace("---\n", "---\nlicense: mit\nlanguage: en\n", 1))
    push_model(str(folder), "me/encoder", license="mit", languages=("en",), dry_run=True)
    with pytest.raises(InputError, match=r"says license mit, not apache-2\.0: leave one out"):
        push_model(str(folder), "me/encoder", license="apache-2.0")
    (folder / "README.md").write_text("trained on /data/mine/corpus")
    with pytest.raises(InputError, match=r"README\.md names a place on this machine, /data/mine/corpus"):
        push_model(str(folder), "me/encoder", license="mit", languages=("en",))
    assert hub.asked == []


def test_a_public_repository_is_asked_for(hub: Hub, folder: Path) -> None:
    hub.private["me/encoder"] = False
    with pytest.raises(InputError, match="is there already, and public; say public"):
        push_model(str(folder), "me/encoder", license="mit", languages=("en",))
    assert not hub.branches
    push_model(str(folder), "me/new", license="mit", languages=("en",), public=True)
    assert hub.private["me/new"] is False


@pytest.mark.parametrize("text", ["https://huggingface.co/me/x", "80/10/10", "<br/>", "a and/or b", "runs/a@5", "1/2"])
def test_what_is_no_place_on_a_machine(text: str) -> None:
    assert not LOCAL_PATH.search(text)


@pytest.mark.parametrize("text", ["shards: /data/mine", "'~/models/x'", r"D:\data\mine", '"/data/a/b.json"'])
def test_what_is_one(text: str) -> None:
    assert LOCAL_PATH.search(text)
