"""The Hugging Face hub where there is none: what `huggingface_hub` and `datasets` ask of it, over HTTP on 127.0.0.1.

A `SimulatedHub` holds repositories with commits, branches and tags, private and gated ones. It answers as the real hub
does: reading (information, trees in pages, paths, files with their entity tags, parts of files, redirects), writing
(repositories, branches, commits, large files) and refusing (tokens, what is not there). Large files are on another
origin, to which no token may go. `faults` are what it does wrong: a status, an answer that is cut short or late, a
change in between. Without Xet, whose protocol is another. In use: `hub.commit("me/encoder", {"config.json": b"{}"})`
within `with SimulatedHub() as hub:`, then a process in `os.environ | hub.environment(folder)`.
"""

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Literal
from urllib.parse import parse_qs, quote, unquote, urlsplit

TOKEN = "hf_TESTTOKENofthetestsandnobodyelse"
"""The one that may read and write all."""
STRANGER = "hf_TESTTOKENofsomebodywithoutaccess"
"""One that is valid, without access to private or gated repositories."""
LARGE = (".safetensors", ".bin", ".parquet", ".model", ".arrow", ".zst", ".gz")

Kind = Literal["models", "datasets"]
Headers = Mapping[str, str]


@dataclass
class Repository:
    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    """The commits of branches and tags."""
    titles: dict[str, dict[str, str]] = field(default_factory=dict)
    """For each commit, the title of the last one that changed a file."""


@dataclass
class Fault:
    """What happens to the next `times` requests whose `METHOD path` the pattern is found in."""

    pattern: str
    times: int = 1
    status: int | None = None
    headers: Headers = field(default_factory=dict)
    cut_after: int | None = None
    """The bytes of a content after which the connection ends."""
    seconds: float = 0.0
    first: Callable[[], Any] | None = None
    """What happens before the answer: another commit, for instance."""


@dataclass
class Answer:
    status: int = 200
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def answer_json(value: Any, **headers: str) -> Answer:
    return Answer(200, json.dumps(value).encode(), {"Content-Type": "application/json", **headers})


def refusal(status: int, code: str, message: str, **headers: str) -> Answer:
    told = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return Answer(status, json.dumps({"error": message}).encode(), told | headers)


class SimulatedHub:
    """Repositories by kind and id, and two servers: the hub's own, and the one that large files come from."""

    def __init__(self, page_size: int = 1000, large: int = 5_000_000) -> None:
        self.repositories: dict[tuple[Kind, str], Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.renamed: dict[str, str] = {}
        """Earlier names of repositories → their names now, to which who asks is sent on."""
        self.faults: list[Fault] = []
        self.asked: list[str] = []
        self.leaked: list[str] = []
        """Requests that carried a token to the other origin."""
        self.page_size = page_size
        self.large = large
        self.lock = Lock()
        self.servers: list[ThreadingHTTPServer] = []

    def __enter__(self) -> "SimulatedHub":
        self.url = self.serve(self.answer)
        self.storage = self.serve(self.answer_storage).replace("127.0.0.1", "localhost")  # another host, as in life
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def serve(self, answer: Callable[..., Answer]) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self, "find": answer}))
        self.servers.append(server)
        Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.05}).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """What a process needs in order to take this for the hub, with an empty cache of its own."""
        settings = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        return settings | {"HF_TOKEN": token or "", "HF_HUB_DISABLE_TELEMETRY": "1"}

    # What tests and trials put into it.

    def commit(
        self,
        id: str,
        files: Mapping[str, bytes | str | None],
        revision: str = "main",
        kind: Kind = "models",
        title: str = "Update",
        **access: bool,
    ) -> str:
        """Add a commit to a branch, made if need be: files on top of what the branch has, None takes one away."""
        repository = self.repositories.setdefault((kind, id), Repository(**access))
        head = repository.revisions.get(revision, repository.revisions.get("main"))
        tree: dict[str, bytes] = dict(repository.commits[head]) if head else {}
        for path, content in files.items():
            tree.pop(path, None)
            if content is not None:
                tree[path] = content.encode() if isinstance(content, str) else content
        listing = repr([(path, hashlib.sha1(content).hexdigest()) for path, content in sorted(tree.items())])
        commit = hashlib.sha1(f"{id} {len(repository.commits)} {listing}".encode()).hexdigest()
        repository.commits[commit] = tree
        repository.titles[commit] = repository.titles.get(head or "", {}) | dict.fromkeys(files, title)
        repository.revisions[revision] = commit
        return commit

    def files(self, id: str, revision: str = "main", kind: Kind = "models") -> dict[str, bytes]:
        repository = self.repositories[kind, id]
        return repository.commits[repository.revisions.get(revision, revision)]

    # What the hub answers.

    def answer(self, method: str, address: str, headers: Headers, body: bytes) -> Answer:
        url = urlsplit(address)
        for old, new in self.renamed.items():
            if re.match(rf"(/api/(models|datasets)|/datasets)?/{re.escape(old)}(/|$)", url.path):
                return Answer(307, headers={"Location": address.replace(old, new, 1)})
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        token = headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in ("", TOKEN, STRANGER):
            return refusal(401, "", "Invalid credentials in Authorization header")
        match parts:
            case ["api", "whoami-v2"]:
                user = {"name": "me", "type": "user", "auth": {"accessToken": {"role": "write"}}}
                return answer_json(user) if token else refusal(401, "", "Invalid username or password.")
            case ["api", "validate-yaml"]:
                return answer_json({"errors": [], "warnings": []})
            case ["api", "repos", "create"]:
                return self.create(json.loads(body), token)
            case ["api", "resolve-cache", kind, owner, name, commit, *path]:
                return self.small_file(self.repositories[kind, f"{owner}/{name}"], commit, "/".join(path))
            case ["api", "models" | "datasets" as kind, owner, name, *rest]:
                found = self.find(kind, f"{owner}/{name}", token)
                return found if isinstance(found, Answer) else self.ask(found, parts[1:4], rest, query, body, token)
            case ["datasets", owner, name, "resolve", revision, *path]:
                return self.resolve("datasets", f"{owner}/{name}", revision, "/".join(path), token)
            case [owner, name, "resolve", revision, *path]:
                return self.resolve("models", f"{owner}/{name}", revision, "/".join(path), token)
            case [_, _, "info", "lfs", "objects", "batch"]:
                return self.batch(json.loads(body), token)
        return refusal(404, "", "Sorry, we can't find the page you are looking for.")

    def find(self, kind: Any, id: str, token: str) -> Repository | Answer:
        repository = self.repositories.get((kind, id))
        if repository is None or (repository.private and token != TOKEN):
            if not token:  # the real one does not say either which of the two it is
                return refusal(401, "RepoNotFound", "Invalid username or password.")
            return refusal(404, "RepoNotFound", "Repository not found")
        return repository

    def ask(
        self, repository: Repository, name: list[str], rest: list[str], query: dict[str, str], body: bytes, token: str
    ) -> Answer:
        """About one repository, at a revision or as a whole; or a change of it."""
        id = "/".join(name[1:])
        verb, revision, path = [*rest, "", "", ""][0], [*rest, "", ""][1] or "main", "/".join(rest[2:])
        if verb in ("preupload", "commit", "branch", "tag") and token != TOKEN:
            return refusal(403 if token else 401, "", "You don't have the rights for this.")
        if verb == "branch":
            return self.make_branch(repository, unquote("/".join(rest[1:])), json.loads(body or b"{}"))
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.commits:
            return refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        tree = repository.commits[commit]
        match verb:
            case "" | "revision":
                access = {"private": repository.private, "gated": "auto" if repository.gated else False}
                siblings = [{"rfilename": path} for path in tree]
                facts = {"_id": id, "id": id, "sha": commit, "siblings": siblings, "tags": [], "downloads": 0}
                return answer_json(facts | access | ({"modelId": id} if name[0] == "models" else {}))
            case "refs":
                heads = [
                    {"name": one, "ref": f"refs/heads/{one}", "targetCommit": sha}
                    for one, sha in repository.revisions.items()
                ]
                return answer_json({"branches": heads, "converts": [], "tags": []})
            case "commits":
                made = {"id": commit, "title": "", "message": "", "authors": [], "date": "2026-01-01T00:00:00.000Z"}
                return answer_json([made])
            case "tree":
                return self.list_tree(name, commit, tree, path, query)
            case "paths-info":
                wanted = parse_qs(body.decode())["paths"]
                every = {one["path"]: one for one in self.entries(tree, "", True)}
                changed = {
                    path: {"id": commit, "title": title, "date": "2026-01-01T00:00:00.000Z"}
                    for path, title in repository.titles[commit].items()
                }
                return answer_json([every[path] | {"lastCommit": changed[path]} for path in wanted if path in every])
            case "preupload":
                return answer_json({"files": [self.upload_mode(one) for one in json.loads(body)["files"]]})
            case "commit":
                return self.receive(name, revision, body)
        return refusal(404, "", f"no {verb}")

    def list_tree(
        self, name: list[str], commit: str, tree: dict[str, bytes], folder: str, query: dict[str, str]
    ) -> Answer:
        entries = self.entries(tree, folder, query.get("recursive", "").lower() == "true")
        if folder and not entries:
            return refusal(404, "EntryNotFound", f"{folder} does not exist", **{"X-Repo-Commit": commit})
        start = int(query.get("cursor", 0))
        page = entries[start : start + self.page_size]
        address = f"{self.url}/api/{'/'.join(name)}/tree/{commit}/{quote(folder)}".rstrip("/")
        more = f"?recursive={query.get('recursive', 'false')}&cursor={start + self.page_size}"
        link = {"Link": f'<{address}{more}>; rel="next"'} if start + self.page_size < len(entries) else {}
        return answer_json(page, **link)

    def entries(self, tree: dict[str, bytes], folder: str, is_recursive: bool) -> list[dict[str, Any]]:
        prefix = f"{folder}/" if folder else ""
        folders: dict[str, dict[str, Any]] = {}
        files = []
        for path, content in tree.items():
            if not path.startswith(prefix):
                continue
            inner = path.removeprefix(prefix).split("/")
            for depth in range(1, len(inner) if is_recursive else min(len(inner), 2)):
                one = prefix + "/".join(inner[:depth])
                folders[one] = {"type": "directory", "oid": hashlib.sha1(one.encode()).hexdigest(), "size": 0}
                folders[one]["path"] = one
            if is_recursive or len(inner) == 1:
                entry = {"type": "file", "oid": blob_id(content), "size": len(content), "path": path}
                if self.is_large(path, content):
                    digest = hashlib.sha256(content).hexdigest()
                    entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
                files.append(entry)
        return [*folders.values(), *files]

    def resolve(self, kind: Kind, id: str, revision: str, path: str, token: str) -> Answer:
        repository = self.find(kind, id, token)
        if isinstance(repository, Answer):
            return repository
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.commits:
            return refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if repository.gated and token != TOKEN:
            what = f"Access to {kind.rstrip('s')} {id} is restricted"
            if token:
                return refusal(403, "GatedRepo", f"{what} and you are not in the authorized list. Ask for access.")
            return refusal(401, "GatedRepo", f"{what}. You must be authenticated to access it. Please log in.")
        content = repository.commits[commit].get(path)
        if content is None:
            return refusal(404, "EntryNotFound", "Entry not found", **{"X-Repo-Commit": commit})
        if not self.is_large(path, content):
            here = f"/api/resolve-cache/{kind}/{id}/{commit}/{quote(path)}"
            return Answer(307, headers=file_headers(commit, content) | {"Location": here})
        digest = hashlib.sha256(content).hexdigest()
        self.blobs[digest] = content
        linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content)), "X-Repo-Commit": commit}
        return Answer(302, headers=linked | {"Location": f"{self.storage}/{digest}"})

    def small_file(self, repository: Repository, commit: str, path: str) -> Answer:
        content = repository.commits[commit][path]
        return Answer(200, content, file_headers(commit, content))

    def is_large(self, path: str, content: bytes) -> bool:
        return path.endswith(LARGE) or len(content) > self.large

    def answer_storage(self, method: str, address: str, headers: Headers, body: bytes) -> Answer:
        digest = urlsplit(address).path.strip("/")
        if headers.get("Authorization"):
            self.leaked.append(f"{method} {address}")
        if method == "PUT":
            self.blobs[digest] = body
            return Answer()
        content = self.blobs.get(digest)
        return Answer(404) if content is None else Answer(200, content, {"ETag": f'"{digest}"'})

    # What is written to it.

    def create(self, wanted: dict[str, Any], token: str) -> Answer:
        kind: Kind = "datasets" if wanted.get("type") == "dataset" else "models"
        id = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        if token != TOKEN:
            return refusal(403 if token else 401, "", "You don't have the rights for this.")
        if (kind, id) in self.repositories:
            body = json.dumps({"error": "You already created this repo", "url": f"{self.url}/{id}"})
            return Answer(409, body.encode(), {})
        is_private = wanted.get("private") is True or wanted.get("visibility") == "private"
        self.commit(id, {".gitattributes": b""}, kind=kind, private=is_private)
        return answer_json({"url": f"{self.url}/{id}", "id": id, "name": id})

    def make_branch(self, repository: Repository, branch: str, wanted: dict[str, Any]) -> Answer:
        if branch in repository.revisions:
            return refusal(409, "", f"Reference already exists: {branch}")
        start = wanted.get("startingPoint", "main")
        repository.revisions[branch] = repository.revisions.get(start, start)
        return answer_json({})

    def upload_mode(self, file: dict[str, Any]) -> dict[str, Any]:
        is_large = file["path"].endswith(LARGE) or file["size"] > self.large
        mode = "lfs" if is_large else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}

    def batch(self, wanted: dict[str, Any], token: str) -> Answer:
        if token != TOKEN:
            return refusal(403 if token else 401, "", "You don't have the rights for this.")
        actions = [{"upload": {"href": f"{self.storage}/{one['oid']}"}} for one in wanted["objects"]]
        objects = [
            one if one["oid"] in self.blobs else {**one, "actions": action}
            for one, action in zip(wanted["objects"], actions, strict=True)
        ]
        return answer_json({"transfer": "basic", "objects": objects})

    def receive(self, name: list[str], revision: str, body: bytes) -> Answer:
        files: dict[str, bytes | None] = {}
        title = ""
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                title = line["value"]["summary"]
            elif line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "lfsFile":
                files[line["value"]["path"]] = self.blobs[line["value"]["oid"]]
            elif line["key"] == "deletedFile":
                files[line["value"]["path"]] = None
        id = "/".join(name[1:])
        commit = self.commit(id, files, revision, "datasets" if name[0] == "datasets" else "models", title)
        said = {"commitOid": commit, "commitUrl": f"{self.url}/{id}/commit/{commit}"}
        return answer_json({"success": True, "hookOutput": "", **said})


def blob_id(content: bytes) -> str:
    """What git calls a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def file_headers(commit: str, content: bytes) -> dict[str, str]:
    tag = {"ETag": f'"{blob_id(content)}"', "X-Linked-Size": str(len(content))}
    return {"X-Repo-Commit": commit, "Accept-Ranges": "bytes", **tag}


class Handler(BaseHTTPRequestHandler):
    """One request: what went wrong on demand, or the answer, of a file the part that was asked for."""

    protocol_version = "HTTP/1.1"
    hub: SimulatedHub
    find: Callable[..., Answer]

    def respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = f"{self.command} {self.path}"
        with self.hub.lock:
            self.hub.asked.append(request)
            faults = (one for one in self.hub.faults if one.times and re.search(one.pattern, request))
            fault = next(faults, Fault(""))
            fault.times -= 1
            if fault.first is not None:
                fault.first()
            answer = type(self).find(self.command, self.path, self.headers, body)
        time.sleep(fault.seconds)
        if fault.status is not None:
            answer = refusal(fault.status, "", "a fault on demand", **fault.headers)
        with suppress(ConnectionError):  # of a client that was killed
            self.give(answer, fault.cut_after)

    def give(self, answer: Answer, cut_after: int | None) -> None:
        status, content, headers = answer.status, answer.content, dict(answer.headers)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if status == 200 else None
        if asked:
            start, end = int(asked[1]), min(int(asked[2] or len(content) - 1), len(content) - 1)
            status = 206 if start < len(content) else 416
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            content = content[start : end + 1]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:cut_after])
        if cut_after is not None:
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = respond

    def log_message(self, *_: Any) -> None:
        pass
