"""What the loopback Hub answers: pure state and one function a route (:mod:`tests.hub_server` is the transport).

It checks what a Hub checks: the SHA-256 of each LFS object, that a commit names objects that are there, that its parent
is main's head, that a tag is free.
"""

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import parse_qs

import yaml

LARGE = (".safetensors", ".parquet", ".bin")
"""kept as LFS objects, as the Hub's .gitattributes say"""
Answer = tuple[int, Any, dict[str, str]]
"""status, JSON or bytes, headers"""


@dataclass(frozen=True, kw_only=True)
class Commit:
    """One state of main."""

    oid: str
    parent: str
    message: str
    files: dict[str, bytes]
    large: dict[str, str]
    """names of LFS files -> SHA-256"""


@dataclass(kw_only=True)
class Repo:
    """Commits of main, oldest first, and tags."""

    private: bool
    commits: list[Commit]
    tags: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(kw_only=True)
class State:
    """Everything that the Hub holds."""

    url: str
    chunk_bytes: int
    """LFS objects above this come in parts; 0 = never"""
    repos: dict[str, Repo] = field(default_factory=dict[str, Repo])
    objects: dict[str, bytes] = field(default_factory=dict[str, bytes])
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict[str, dict[int, bytes]])

    def create(self, repo_id: str, *, private: bool, files: dict[str, bytes] | None = None) -> Repo:
        """A repo as the Hub makes it, with a first commit."""
        first = Commit(oid=_oid(repo_id), parent="", message="initial commit", files=files or {}, large={})
        self.repos[repo_id] = Repo(private=private, commits=[first])
        return self.repos[repo_id]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a route needs of a request."""

    body: bytes
    query: dict[str, list[str]]

    @property
    def json(self) -> dict[str, Any]:
        """The body."""
        return cast(dict[str, Any], json.loads(self.body))


def route(state: State, request: Request, line: str) -> Answer:
    """The answer to `METHOD /path`."""
    for pattern, function in _ROUTES:
        found = re.fullmatch(pattern, line)
        if found:
            return function(state, request, *found.groups())
    return 404, {"error": f"no such route: {line}"}, {}


def create(state: State, request: Request) -> Answer:
    asked = request.json
    repo_id = f"{asked['organization']}/{asked['name']}"
    if repo_id in state.repos:
        return 409, {"error": "You already created this model repo", "url": f"{state.url}/{repo_id}"}, {}
    state.create(repo_id, private=asked.get("visibility") == "private" or bool(asked.get("private")))
    return 200, {"url": f"{state.url}/{repo_id}", "name": repo_id}, {}


def validate_yaml(state: State, request: Request) -> Answer:
    front = re.match(r"---\n(.*?)\n---\n", request.json["content"], re.DOTALL)
    try:
        held = yaml.safe_load(front[1]) if front else None
    except yaml.YAMLError as error:
        return 400, {"errors": [{"message": str(error)}], "warnings": []}, {}
    warnings = [] if isinstance(held, dict) else [{"message": "empty or missing yaml metadata"}]
    return 200, {"errors": [], "warnings": warnings}, {}


def info(state: State, request: Request, repo_id: str, revision: str | None = None) -> Answer:
    commit = _commit_of(state, repo_id, revision)
    if commit is None:
        return _MISSING
    siblings = [{"rfilename": name} for name in sorted(commit.files)]
    repo = state.repos[repo_id]
    return 200, {"id": repo_id, "sha": commit.oid, "private": repo.private, "tags": [], "siblings": siblings}, {}


def tree(state: State, request: Request, repo_id: str, revision: str) -> Answer:
    commit = _commit_of(state, repo_id, revision)
    if commit is None:
        return _MISSING
    return 200, _entries(commit), {}


def paths_info(state: State, request: Request, repo_id: str, revision: str) -> Answer:
    commit = _commit_of(state, repo_id, revision)
    if commit is None:
        return _MISSING
    asked = parse_qs(request.body.decode())["paths"]
    return 200, [entry for entry in _entries(commit) if entry["path"] in asked], {}


def _entries(commit: Commit) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for name, data in sorted(commit.files.items()):
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": _git_oid(data)}
        if name in commit.large:
            entry["lfs"] = {"oid": commit.large[name], "size": len(data), "pointerSize": 130}
        entries.append(entry)
    return entries


def refs(state: State, request: Request, repo_id: str) -> Answer:
    repo = state.repos.get(repo_id)
    if repo is None:
        return _MISSING
    main = {"name": "main", "ref": "refs/heads/main", "targetCommit": repo.commits[-1].oid}
    tags = [{"name": t, "ref": f"refs/tags/{t}", "targetCommit": oid} for t, oid in repo.tags.items()]
    return 200, {"branches": [main], "converts": [], "tags": tags}, {}


def tag(state: State, request: Request, repo_id: str, revision: str) -> Answer:
    commit, name = _commit_of(state, repo_id, revision), request.json["tag"]
    if commit is None:
        return _MISSING
    tags = state.repos[repo_id].tags
    if name in tags:
        return 409, {"error": "Tag reference exists already"}, {}
    tags[name] = commit.oid
    return 200, {}, {}


def preupload(state: State, request: Request, repo_id: str, revision: str) -> Answer:
    commit = _commit_of(state, repo_id, revision)
    if commit is None:
        return _MISSING
    answers: list[dict[str, Any]] = []
    for file in request.json["files"]:
        name = file["path"]
        held = commit.files.get(name)
        oid = commit.large.get(name) or (None if held is None else _git_oid(held))
        mode = "lfs" if name.endswith(LARGE) else "regular"
        answers.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return 200, {"files": answers}, {}


def batch(state: State, request: Request, repo_id: str) -> Answer:
    if repo_id not in state.repos:
        return _MISSING
    return 200, {"transfer": "basic", "objects": [_actions(state, o) for o in request.json["objects"]]}, {}


def _actions(state: State, wanted: dict[str, Any]) -> dict[str, Any]:
    oid, size, chunk = wanted["oid"], wanted["size"], state.chunk_bytes
    if oid in state.objects:
        return {"oid": oid, "size": size}
    base = f"{state.url}/lfs/{oid}"
    upload: dict[str, Any] = {"href": base}
    if chunk and size > chunk:
        parts = {str(n + 1): f"{base}?part={n + 1}" for n in range(-(-size // chunk))}
        upload = {"href": f"{base}/complete", "header": {"chunk_size": str(chunk), **parts}}
    return {"oid": oid, "size": size, "actions": {"upload": upload, "verify": {"href": f"{base}/verify"}}}


def put(state: State, request: Request, oid: str) -> Answer:
    if "part" in request.query:
        state.parts.setdefault(oid, {})[int(request.query["part"][0])] = request.body
        return 200, b"", {"ETag": f'"{hashlib.sha256(request.body).hexdigest()}"'}
    return _keep(state, oid, request.body)


def complete(state: State, request: Request, oid: str) -> Answer:
    parts = state.parts.pop(oid, {})
    named = [part["partNumber"] for part in request.json["parts"]]
    return _keep(state, oid, b"".join(parts[n] for n in named))


def _keep(state: State, oid: str, data: bytes) -> Answer:
    if hashlib.sha256(data).hexdigest() != oid:
        return 400, {"error": "the content's SHA-256 is not the object's id"}, {}
    state.objects[oid] = data
    return 200, b"", {}


def verify(state: State, request: Request, oid: str) -> Answer:
    held = state.objects.get(oid)
    return (200, {}, {}) if held is not None and len(held) == request.json["size"] else (404, {"error": "gone"}, {})


def commit(state: State, request: Request, repo_id: str, revision: str) -> Answer:
    repo = state.repos.get(repo_id)
    if repo is None or revision != "main":
        return _MISSING
    lines = [json.loads(line) for line in request.body.splitlines()]
    head, header = repo.commits[-1], lines[0]["value"]
    if header.get("parentCommit", head.oid) != head.oid:
        return 412, {"error": "A commit has happened since. Please refresh and try again."}, {}
    files, large = dict(head.files), dict(head.large)
    for line in lines[1:]:
        value = line["value"]
        if line["key"] == "lfsFile":
            if value["oid"] not in state.objects:
                return 400, {"error": f"{value['path']} points to an LFS object that is not there"}, {}
            files[value["path"]], large[value["path"]] = state.objects[value["oid"]], value["oid"]
        elif line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
            large.pop(value["path"], None)
        elif line["key"] == "deletedFile":
            if files.pop(value["path"], None) is None:
                return 404, {"error": "A file with this name doesn't exist"}, {"X-Error-Code": "EntryNotFound"}
            large.pop(value["path"], None)
        else:
            return 400, {"error": f"unknown operation {line['key']}"}, {}
    oid = _oid(head.oid, request.body)
    repo.commits.append(Commit(oid=oid, parent=head.oid, message=header["summary"], files=files, large=large))
    return 200, {"success": True, "commitOid": oid, "commitUrl": f"{state.url}/{repo_id}/commit/{oid}"}, {}


def resolve(state: State, request: Request, repo_id: str, revision: str, name: str) -> Answer:
    commit = _commit_of(state, repo_id, revision)
    if commit is None:
        return _MISSING
    if name not in commit.files:
        return 404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit.oid}
    data = commit.files[name]
    headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{commit.large.get(name) or _git_oid(data)}"'}
    if name in commit.large:
        headers |= {"X-Linked-Etag": f'"{commit.large[name]}"', "X-Linked-Size": str(len(data))}
    return 200, data, headers


def _commit_of(state: State, repo_id: str, revision: str | None) -> Commit | None:
    repo = state.repos.get(repo_id)
    if repo is None:
        return None
    oid = repo.tags.get(revision or "main", revision)
    if oid in (None, "main"):
        return repo.commits[-1]
    return next((commit for commit in repo.commits if commit.oid == oid), None)


def _oid(*parts: object) -> str:
    return hashlib.sha1(repr(parts).encode()).hexdigest()


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


_MISSING = (404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})
_REPO = r"([\w.-]+/[\w.-]+)"
_ROUTES = (
    (r"POST /api/repos/create", create),
    (r"POST /api/validate-yaml", validate_yaml),
    (rf"GET /api/models/{_REPO}", info),
    (rf"GET /api/models/{_REPO}/revision/(.+)", info),
    (rf"GET /api/models/{_REPO}/tree/([^/]+)/?", tree),
    (rf"POST /api/models/{_REPO}/paths-info/([^/]+)", paths_info),
    (rf"GET /api/models/{_REPO}/refs", refs),
    (rf"POST /api/models/{_REPO}/tag/(.+)", tag),
    (rf"POST /api/models/{_REPO}/preupload/(.+)", preupload),
    (rf"POST /api/models/{_REPO}/commit/(.+)", commit),
    (rf"POST /{_REPO}\.git/info/lfs/objects/batch", batch),
    (r"PUT /lfs/(\w+)", put),
    (r"POST /lfs/(\w+)/complete", complete),
    (r"POST /lfs/(\w+)/verify", verify),
    (rf"(?:GET|HEAD) /{_REPO}/resolve/([^/]+)/(.+)", resolve),
)
