"""A stand-in for the Hugging Face hub, for tests of what downloads from it: hub.py CONFIG.json PORTS.json

It behaves as huggingface.co does, unkind sides included. Large files are redirected to another host, to an address that expires
and that refuses an Authorization; small ones are redirected to a relative address. Text comes compressed where the client allows
it, and then has neither a length nor ranges. Errors have the words and headers of the real ones. On top of that, connections
break, stall and lie where a test asks for it. It serves until it is killed or its parent ends.

PORTS.json appears once it listens, on 127.0.0.1 only: {"hub": URL, "cdn": URL, "proxy": URL}, with TLS also "ca": PATH. The CDN's
host name is localhost, so that to a client it is not the hub's host.

CONFIG.json has these keys, of which any may be absent:
  repos              {"org/model": {"main": FOLDER, ...}}: a folder for each revision, with all that is beneath it
  renamed            {"old/name": "org/model"}
  gated              {"org/model": [TOKEN, ...]}: the tokens with access to the files; anyone may see the list of files
  private            likewise; to everybody else there is no such repository
  tokens             the tokens that are valid at all
  lfs                files of this many bytes (65536) or more are on the CDN, as is every .safetensors, .gguf and .bin file
  tls                a folder for a CA and a certificate, which `openssl` makes there: the hub and the CDN then speak TLS
  certificate        with TLS: "signed" by the CA, which "ca" of PORTS.json is; otherwise one that signed itself, and is "ca": "own" as
                     `openssl req -x509` makes it, "common" with the common name localhost and no other, "elsewhere" for another host,
                     or "expired"
  signature_seconds  how long an address on the CDN is good (3600), less what has passed of the current second
  rate               bytes per second for each body; 0 is no limit
  plain              true: as simple mirrors do, neither redirects nor ranges nor X-Linked headers
  etags              false: no ETag at all
  metadata           false: the list has names only, even where sizes and hashes are asked for
  always_gzip        true: text is compressed even for those who did not ask for it, as bad proxies do
  proxy_auth         "USER:PASSWORD" that the proxy wants

The hub's port also has the controls for the test:
  /-/faults          POST adds [FAULT, ...], GET lists those with times left, DELETE forgets all
  /-/log             GET lists the requests so far, those in progress included, DELETE forgets them
  /-/config          POST {KEY: VALUE, ...} replaces these keys of the configuration

A fault is {"on": REGEX, "kind": KIND, "times": 1, ...}. It applies to requests in whose "SERVER METHOD PATH" the regex is found;
SERVER is hub, cdn or proxy, and PATH is as sent. The first one in the list that applies is taken, and has one time less:
  status             {"status": 503, "headers": {}, "body": ""}: this is the answer
  redirect           {"location": URL}: a 302 to there is the answer
  cut                {"after": N}: closes the connection after N bytes of the body, under headers that promise all of it
  reset              likewise, with an RST
  stall              {"after": N, "seconds": S}: likewise, after a silence of S seconds; for N = -1 not even headers come
  slow               {"rate": R}: R bytes per second
  corrupt            {"at": K}: flips byte K of the file
  short              {"by": N}: the server believes that the file is N bytes shorter
The kinds from cut on concern content, which redirects and errors are not. They apply only where a request would get more bytes of
it than "after", which each may have (0), and corrupt only where byte K is among them. The proxy does not do corrupt and short."""

import base64
import collections
import contextlib
import fcntl
import gzip
import hashlib
import hmac
import http.client
import http.server
import json
import math
import os
import pathlib
import re
import secrets
import select
import socket
import socketserver
import ssl
import struct
import subprocess
import sys
import termios
import threading
import time
from urllib.parse import parse_qs, quote, unquote, urlsplit

PIECE = 1 << 20
LFS_NAMES = (".safetensors", ".gguf", ".bin")
# Names without an extension are those of texts as well: LICENSE, .gitattributes.
TEXT_NAMES = ("", ".json", ".txt", ".jinja", ".md")
JSON = {"Content-Type": "application/json; charset=utf-8"}
TEXT = {"Content-Type": "text/plain; charset=utf-8"}
LOGGED = ("Range", "Authorization", "Accept-Encoding", "User-Agent", "Host")
# Headers that concern one connection, which a proxy does not pass on.
HOP_BY_HOP = "connection keep-alive proxy-authorization proxy-connection te trailer transfer-encoding upgrade".split()

DEFAULTS = {
    "repos": {},
    "renamed": {},
    "gated": {},
    "private": {},
    "tokens": [],
    "lfs": 65536,
    "tls": None,
    "certificate": "signed",
    "signature_seconds": 3600,
    "rate": 0,
    "plain": False,
    "etags": True,
    "metadata": True,
    "always_gzip": False,
    "proxy_auth": None,
}


class Bytes:
    """A body in memory."""

    def __init__(self, content):
        self.content = content
        self.size = len(content)

    def read(self, first, count):
        return self.content[first : first + count]

    def close(self):
        pass


class OnDisk:
    """A file as a body."""

    def __init__(self, file):
        self.file = open(file.path, "rb")
        self.size = file.size

    def read(self, first, count):
        return os.pread(self.file.fileno(), count, first)

    def close(self):
        self.file.close()


class Altered:
    """A body with one byte flipped, or without its last bytes."""

    def __init__(self, body, flipped=None, missing=0):
        self.body = body
        self.flipped = flipped
        self.size = max(body.size - missing, 0)

    def read(self, first, count):
        content = bytearray(self.body.read(first, count))
        if self.flipped is not None and first <= self.flipped < first + len(content):
            content[self.flipped - first] ^= 0xFF
        return bytes(content)

    def close(self):
        self.body.close()


class Stream:
    """A body that comes from elsewhere, and that can be read in order only; its size is None where nobody knows it."""

    def __init__(self, read, size, close):
        self.read = lambda first, count: read(count)
        self.size = size
        self.close = close


class Answer:
    """What a server has to say, before it knows how the client wants it: `text` may be compressed, and `ranges` be asked for. A
    `raw` body has no frame of HTTP around it."""

    def __init__(self, status, body, headers, text=False, ranges=False, raw=False):
        self.status = status
        self.body = Bytes(body) if isinstance(body, bytes) else body
        self.headers = headers
        self.text = text
        self.ranges = ranges
        self.raw = raw


# An answer as this client gets it: COUNT bytes of BODY from FIRST on. COVERED are the bytes of the file that those stand for.
Frame = collections.namedtuple("Frame", "status headers body first count covered")


class Refusal(Exception):
    """An error as the hub words it."""

    def __init__(self, status, message, code=None, headers=None):
        super().__init__(message)
        printable = re.sub(r"[^ -~]", "?", message)
        headers = {**JSON, "X-Error-Message": printable, **(headers or {})}
        if code:
            headers["X-Error-Code"] = code
        if status == 401:
            headers["WWW-Authenticate"] = 'Bearer realm="Authentication required", charset="UTF-8"'
        self.answer = Answer(status, json.dumps({"error": message}).encode(), headers)


# OID is git's hash of its object: for a file in LFS, of the pointer, which has POINTER bytes; for all others POINTER is None.
File = collections.namedtuple("File", "path size sha256 oid pointer")


class Repositories:
    """The files of each revision, their hashes and the commits that these make."""

    def __init__(self, config):
        self.config = config
        self.lock = threading.RLock()
        self.hashed = {}
        self.commits = collections.defaultdict(dict)
        self.holders = collections.defaultdict(set)

    def refresh(self):
        """Hashes what is new, so that no client waits for it."""
        for repo, revisions in self.config["repos"].items():
            for folder in revisions.values():
                self.snapshot(repo, folder)

    def file(self, path):
        """The file as it is now, or None where there is none any more."""
        try:
            stat = os.stat(path)
        except OSError:
            return None
        lfs = stat.st_size >= self.config["lfs"] or path.endswith(LFS_NAMES)
        key = (path, stat.st_size, stat.st_mtime_ns, lfs)
        with self.lock:
            if key not in self.hashed:
                self.hashed[key] = file = self.hash(path, stat.st_size, lfs)
                self.holders[file.sha256].add(path)
            return self.hashed[key]

    @staticmethod
    def hash(path, size, lfs):
        sha256, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size)
        with open(path, "rb") as content:
            for piece in iter(lambda: content.read(PIECE), b""):
                sha256.update(piece)
                if not lfs:
                    blob.update(piece)
        if not lfs:
            return File(path, size, sha256.hexdigest(), blob.hexdigest(), None)
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256.hexdigest()}\nsize {size}\n".encode()
        oid = hashlib.sha1(b"blob %d\0" % len(pointer) + pointer).hexdigest()
        return File(path, size, sha256.hexdigest(), oid, len(pointer))

    def snapshot(self, repo, folder):
        """The commit that a folder makes now, and its files by name."""
        files = {}
        for root, _, names in os.walk(folder, followlinks=True):
            for path in (os.path.join(root, name) for name in names):
                file = self.file(path)
                if file:
                    files[os.path.relpath(path, folder).replace(os.sep, "/")] = file
        files = dict(sorted(files.items()))
        commit = hashlib.sha1("".join(f"{name}\0{file.sha256}\n" for name, file in files.items()).encode()).hexdigest()
        with self.lock:
            self.commits[repo][commit] = files
        return commit, files

    def commit(self, repo, revision):
        """The same for a revision: a name, a commit that was once handed out, or its beginning."""
        folders = self.config["repos"][repo]
        if revision in folders:
            return self.snapshot(repo, folders[revision])
        if re.fullmatch("[0-9a-f]{7,40}", revision):
            with self.lock:
                found = [item for item in self.commits[repo].items() if item[0].startswith(revision)]
            if len(found) == 1:
                return found[0]
        raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def find(self, repo, revision, name):
        """The commit of a revision, and one file of it."""
        commit, files = self.commit(repo, revision)
        file = name in files and self.file(files[name].path)
        if not file or file.sha256 != files[name].sha256:
            raise Refusal(404, "Entry not found", "EntryNotFound", {"X-Repo-Commit": commit})
        return commit, file

    def content(self, sha256):
        """A file with this content, or None."""
        with self.lock:
            files = [self.file(path) for path in self.holders.get(sha256, ())]
        return next((file for file in files if file and file.sha256 == sha256), None)


class Faults:
    """What is to go wrong."""

    # The keys of each kind, with their defaults; None where there is none.
    KINDS = {
        "status": {"status": None, "headers": {}, "body": ""},
        "redirect": {"location": None},
        "cut": {"after": 0},
        "reset": {"after": 0},
        "stall": {"after": 0, "seconds": None},
        "slow": {"after": 0, "rate": None},
        "corrupt": {"after": 0, "at": None},
        "short": {"after": 0, "by": None},
    }

    def __init__(self):
        self.lock = threading.Lock()
        self.faults = []

    def add(self, faults):
        complete = []
        for fault in faults:
            kind = self.KINDS.get(fault.get("kind"))
            if kind is None:
                raise ValueError(f"a fault is one of {', '.join(self.KINDS)}: {fault}")
            full = {"on": None, "kind": None, "times": 1, **kind, **fault}
            wrong = {key for key, value in full.items() if value is None} | full.keys() - kind.keys() - {"on", "kind", "times"}
            if wrong:
                raise ValueError(f"{', '.join(wrong)}: missing, or not a key of {fault['kind']}")
            re.compile(full["on"])
            complete.append(full)
        with self.lock:
            self.faults += complete

    def clear(self):
        with self.lock:
            self.faults = []

    def left(self):
        with self.lock:
            return [dict(fault) for fault in self.faults if fault["times"] > 0]

    def take(self, request, length, covered):
        """The fault for a request that gets LENGTH bytes of content, which stand for the bytes COVERED of a file; {} for none."""
        with self.lock:
            for fault in self.faults:
                if fault["times"] > 0 and re.search(fault["on"], request) and length > fault.get("after", -1):
                    at = {"corrupt": fault.get("at"), "short": covered.start}.get(fault["kind"])
                    if at is None or at in covered:
                        fault["times"] -= 1
                        return fault
        return {}


class State:
    """What the three servers share."""

    def __init__(self, config):
        self.config = dict(DEFAULTS)
        self.repositories = Repositories(self.config)
        self.faults = Faults()
        self.log = []
        self.secret = secrets.token_bytes(32)
        self.addresses = {}
        self.configure(config)

    def configure(self, config):
        if config.keys() - DEFAULTS.keys():
            raise ValueError(f"not in the configuration: {', '.join(config.keys() - DEFAULTS.keys())}")
        self.config.update(config)
        self.repositories.refresh()

    def signature(self, path, expires):
        return hmac.new(self.secret, f"{path} {expires}".encode(), "sha256").hexdigest()

    def signed_address(self, path):
        expires = int(time.time()) + self.config["signature_seconds"]
        return f"{self.addresses['cdn']}{path}?Expires={expires}&Signature={self.signature(path, expires)}"


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection: takes requests, and sends their answers with all that goes wrong in doing so."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    name = ""
    paced = True

    def setup(self):
        # Here and not where connections are accepted: a client that is slow to shake hands keeps only itself waiting.
        if self.server.tls:
            self.request = self.server.tls.wrap_socket(self.request, server_side=True)
        super().setup()
        self.state = self.server.state

    def handle(self):
        # Clients that leave, and for the proxy servers that leave, are part of the tests.
        with contextlib.suppress(ConnectionError, ssl.SSLError, http.client.HTTPException):
            super().handle()

    def finish(self):
        super().finish()
        self.connection.close()

    def log_message(self, *_):
        pass

    def serve(self):
        self.payload = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.record = {
            "server": self.name,
            "method": self.command,
            "path": self.path,
            **{name.lower().replace("-", "_"): self.headers.get(name) for name in LOGGED},
            "status": None,
            "sent": 0,
        }
        if self.name == "hub" and self.path.startswith("/-/"):
            return self.emit(self.frame(self.control()), {})
        self.state.log.append(self.record)
        try:
            answer = self.answer()
        except Refusal as refusal:
            answer = refusal.answer
        try:
            self.send(answer)
        finally:
            answer.body.close()

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_CONNECT = serve

    def send(self, answer):
        frame = self.frame(answer)
        content = self.command != "HEAD" and frame.status in (200, 206)
        request = f"{self.name} {self.command} {self.path}"
        fault = self.state.faults.take(request, frame.count if content else 0, frame.covered if content else range(0))
        kind = fault.get("kind")
        if kind == "stall" and fault["after"] < 0:
            return self.fall_silent(fault["seconds"])
        if kind == "status":
            frame = self.frame(Answer(fault["status"], fault["body"].encode(), {**TEXT, **fault["headers"]}))
        elif kind == "redirect":
            frame = self.frame(redirect(302, fault["location"], {}))
        elif kind in ("corrupt", "short"):
            answer.body = Altered(answer.body, fault.get("at"), fault.get("by", 0))
            frame = self.frame(answer)
        self.emit(frame, fault)

    def frame(self, answer):
        status, body, first = answer.status, answer.body, 0
        headers = {"Date": self.date_time_string(), **answer.headers}
        if not self.state.config["etags"]:
            headers = {name: value for name, value in headers.items() if "etag" not in name.lower()}
        count = math.inf if body.size is None else body.size
        covered = range(0 if isinstance(body, Stream) else body.size)
        if answer.text and (self.state.config["always_gzip"] or self.takes_gzip()):
            body = Bytes(gzip.compress(body.read(0, body.size), 1, mtime=0))
            count = body.size
            headers.update({"Content-Encoding": "gzip", "Transfer-Encoding": "chunked", "Vary": "Accept-Encoding"})
            if headers.get("ETag", "W/").startswith('"'):
                headers["ETag"] = "W/" + headers["ETag"]
        elif answer.ranges:
            headers["Accept-Ranges"] = "bytes"
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if asked and self.headers.get("If-Range", headers.get("ETag")) == headers.get("ETag"):
                start, last = int(asked[1]), min(int(asked[2] or body.size), body.size - 1)
                if start >= body.size:
                    status, count, headers["Content-Range"] = 416, 0, f"bytes */{body.size}"
                elif start <= last:
                    status, first, count = 206, start, last - start + 1
                    headers["Content-Range"] = f"bytes {start}-{last}/{body.size}"
                    covered = range(start, last + 1)
        if count == math.inf and not answer.raw:
            headers["Transfer-Encoding"] = "chunked"
        if "Transfer-Encoding" not in headers and not answer.raw and status not in (204, 304):
            headers.setdefault("Content-Length", str(count))
        return Frame(status, headers, body, first, count, covered)

    def takes_gzip(self):
        return re.search(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", self.headers.get("Accept-Encoding") or "")

    def emit(self, frame, fault):
        self.record["status"] = frame.status
        self.send_response_only(frame.status)
        for name, value in frame.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        kind = fault.get("kind")
        count = min(frame.count, fault["after"]) if kind in ("cut", "reset", "stall") else frame.count
        sent = self.transfer(frame, count, fault.get("rate"))
        if kind == "stall":
            self.fall_silent(fault["seconds"])
        elif kind == "reset":
            self.reset()
        elif kind == "cut" or sent < count < math.inf:
            self.hang_up()
        elif "Transfer-Encoding" in frame.headers:
            self.wfile.write(b"0\r\n\r\n")

    def transfer(self, frame, count, rate):
        """Sends COUNT bytes of the body, or as many as there are, and says how many that was."""
        chunked = "Transfer-Encoding" in frame.headers
        direct = isinstance(frame.body, OnDisk) and not chunked and not self.server.tls
        sent, due = 0, time.monotonic()
        while sent < count:
            limit = rate or (self.state.config["rate"] if self.paced else 0)
            piece = min(count - sent, PIECE, max(int(limit / 20), 1) if limit else PIECE)
            if direct and not limit:
                done = os.sendfile(self.connection.fileno(), frame.body.file.fileno(), frame.first + sent, piece)
            else:
                content = frame.body.read(frame.first + sent, piece)
                done = len(content)
                if done:
                    self.wfile.write(b"%x\r\n%b\r\n" % (done, content) if chunked else content)
            if not done:
                break
            sent += done
            self.record["sent"] += done
            if limit:
                due += done / limit
                time.sleep(max(due - time.monotonic(), 0))
        return sent

    def fall_silent(self, seconds):
        """Says nothing until the client leaves, for so many seconds at most, and closes the connection."""
        poll = select.poll()
        poll.register(self.connection.fileno(), getattr(select, "POLLRDHUP", 0))
        poll.poll(seconds * 1000)
        self.hang_up()

    def hang_up(self):
        """Closes the connection once all that was sent has arrived."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            # To close with bytes of the client unread would be to reset.
            self.connection.settimeout(1)
            while self.connection.recv(PIECE):
                pass

    def reset(self):
        """Resets the connection, once all that was sent has arrived: a reset drops what has not."""
        self.close_connection = True
        deadline = time.monotonic() + 5
        unsent = bytearray(4)
        while time.monotonic() < deadline:
            fcntl.ioctl(self.connection.fileno(), termios.TIOCOUTQ, unsent)
            if unsent == bytes(4):
                break
            time.sleep(0.001)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # The other thread of a tunnel reads here, and while it does, nothing is closed.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.connection, socket.SHUT_RD)
        os.close(self.connection.detach())


def redirect(status, location, headers):
    phrase = http.client.responses[status]
    return Answer(status, f"{phrase}. Redirecting to {location}".encode(), {**TEXT, **headers, "Location": location})


def content_headers(name, etag):
    name = quote(name.rpartition("/")[2])
    return {"ETag": f'"{etag}"', "Content-Disposition": f"inline; filename*=UTF-8''{name}; filename=\"{name}\";"}


def is_text(name):
    return os.path.splitext(name)[1] in TEXT_NAMES


class Hub(Handler):
    """The API, the addresses of files, the content of small ones, and the test's controls."""

    name = "hub"

    def answer(self):
        token = self.token()
        endpoints = {
            r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?": self.describe,
            r"/api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?": self.tree,
            r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)": self.resolve,
            r"/api/resolve-cache/models/([^/]+/[^/]+)/([^/]+)/(.+)": self.serve_small,
        }
        for pattern, answer in endpoints.items():
            asked = re.fullmatch(pattern, self.path.partition("?")[0])
            if asked and self.command in ("GET", "HEAD"):
                repo, *rest = (unquote(group or "") for group in asked.groups())
                if repo in self.state.config["renamed"]:
                    new = self.state.config["renamed"][repo]
                    return redirect(307, self.path[: asked.start(1)] + new + self.path[asked.end(1) :], {})
                self.admit(repo, token, answer in (self.resolve, self.serve_small))
                return answer(repo, *rest)
        raise Refusal(404, "Sorry, we can't find the page you are looking for.")

    def token(self):
        header = self.headers.get("Authorization")
        if header is None:
            return None
        scheme, _, token = header.partition(" ")
        if scheme.lower() != "bearer" or token not in self.state.config["tokens"]:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return token

    def admit(self, repo, token, to_files):
        config = self.state.config
        if repo not in config["repos"] or token not in config["private"].get(repo, [token]):
            if token:
                raise Refusal(404, "Repository not found", "RepoNotFound")
            raise Refusal(401, "Invalid username or password.", "RepoNotFound")
        if to_files and token not in config["gated"].get(repo, [token]):
            restricted = f"Access to model {repo} is restricted"
            if token:
                visit = f"Visit {self.state.addresses['hub']}/{repo} to ask for access."
                raise Refusal(403, f"{restricted} and you are not in the authorized list. {visit}", "GatedRepo")
            demand = "You must have access to it and be authenticated to access it. Please log in."
            raise Refusal(401, f"{restricted}. {demand}", "GatedRepo")

    def asks_for(self, parameter):
        return parse_qs(urlsplit(self.path).query).get(parameter, [""])[-1].lower() in ("true", "1")

    def json(self, value):
        body = json.dumps(value).encode()
        return Answer(200, body, {**JSON, "ETag": f'W/"{hashlib.sha1(body).hexdigest()}"'}, text=True)

    def describe(self, repo, revision):
        config = self.state.config
        commit, files = self.state.repositories.commit(repo, revision or "main")
        siblings = [{"rfilename": name} for name in files]
        if self.asks_for("blobs") and config["metadata"]:
            for sibling, file in zip(siblings, files.values()):
                sibling.update(blobId=file.oid, size=file.size)
                if file.pointer:
                    sibling["lfs"] = {"sha256": file.sha256, "size": file.size, "pointerSize": file.pointer}
        description = {
            "_id": hashlib.sha1(repo.encode()).hexdigest()[:24],
            "id": repo,
            "modelId": repo,
            "sha": commit,
            "private": repo in config["private"],
            "gated": "manual" if repo in config["gated"] else False,
            "disabled": False,
            "siblings": siblings,
        }
        return self.json(description)

    def tree(self, repo, revision, folder):
        commit, files = self.state.repositories.commit(repo, revision)
        prefix = folder.rstrip("/") + "/" if folder else ""
        entries = {}
        for name, file in files.items():
            if not name.startswith(prefix):
                continue
            parts = name[len(prefix) :].split("/")
            for depth in range(1, len(parts)):
                parent = prefix + "/".join(parts[:depth])
                # No client can look into git trees here, so any hash will do.
                oid = hashlib.sha1(f"{commit} {parent}".encode()).hexdigest()
                entries[parent] = {"type": "directory", "oid": oid, "size": 0, "path": parent}
            entries[name] = {"type": "file", "oid": file.oid, "size": file.size, "path": name}
            if file.pointer:
                entries[name]["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": file.pointer}
        if prefix and not entries:
            raise Refusal(404, f"{folder} does not exist on \"{revision}\"", "EntryNotFound")
        deep = self.asks_for("recursive")
        return self.json([entry for name, entry in sorted(entries.items()) if deep or "/" not in name[len(prefix) :]])

    def resolve(self, repo, revision, name):
        commit, file = self.state.repositories.find(repo, revision, name)
        headers = {"X-Repo-Commit": commit, **content_headers(name, file.sha256 if file.pointer else file.oid)}
        if self.state.config["plain"]:
            return Answer(200, OnDisk(file), {"Content-Type": "application/octet-stream", **headers}, text=is_text(name))
        headers.update({"X-Linked-Etag": headers["ETag"], "Accept-Ranges": "bytes"})
        if file.pointer:
            headers["X-Linked-Size"] = str(file.size)
            path = f"/repos/{file.sha256}/{quote(name.rpartition('/')[2])}"
            return redirect(302, self.state.signed_address(path), headers)
        asked = quote(self.path.partition("?")[0], safe="")
        etag = "&etag=" + quote(headers.pop("ETag")) if self.state.config["etags"] else ""
        # Slashes within the name are encoded, as they are on the real hub.
        return redirect(307, f"/api/resolve-cache/models/{repo}/{commit}/{quote(name, safe='')}?{asked}={etag}", headers)

    def serve_small(self, repo, commit, name):
        commit, file = self.state.repositories.find(repo, commit, name)
        headers = {**TEXT, "X-Repo-Commit": commit, **content_headers(name, file.oid)}
        return Answer(200, OnDisk(file), headers, text=is_text(name), ranges=True)

    def control(self):
        state, asked = self.state, f"{self.command} {self.path}"
        try:
            given = json.loads(self.payload or b"null")
            if asked == "POST /-/faults":
                state.faults.add(given)
            elif asked == "DELETE /-/faults":
                state.faults.clear()
            elif asked == "DELETE /-/log":
                state.log = []
            elif asked == "POST /-/config":
                state.configure(given)
            elif asked not in ("GET /-/faults", "GET /-/log"):
                raise ValueError(f"no such control: {asked}")
        except (ValueError, TypeError, AttributeError, re.error) as error:
            return Answer(400, f"{error}\n".encode(), dict(TEXT))
        result = {"/-/faults": state.faults.left(), "/-/log": list(state.log)}.get(self.path, {})
        return Answer(200, json.dumps(result).encode(), dict(JSON))


class Cdn(Handler):
    """The content of large files, by its hash."""

    name = "cdn"

    def answer(self):
        if self.headers.get("Authorization") is not None:
            return self.error(400, "InvalidArgument", "Only one auth mechanism allowed")
        asked = re.fullmatch(r"(/repos/([0-9a-f]{64})/([^/?]+))\?Expires=(\d+)&Signature=([0-9a-f]+)", self.path)
        if not asked or not hmac.compare_digest(asked[5], self.state.signature(asked[1], asked[4])):
            return self.error(403, "AccessDenied", "Access Denied")
        if time.time() >= int(asked[4]):
            return self.error(403, "AccessDenied", "Request has expired")
        file = self.state.repositories.content(asked[2])
        if not file:
            return self.error(404, "NoSuchKey", "The specified key does not exist.")
        # The real CDN has its own hash for an ETag: it is not that of the content, though it is as long.
        etag = hashlib.sha256(asked[2].encode()).hexdigest()
        name = unquote(asked[3])
        headers = {"Content-Type": "binary/octet-stream", **content_headers(name, etag)}
        return Answer(200, OnDisk(file), headers, text=is_text(name), ranges=True)

    @staticmethod
    def error(status, code, message):
        body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'
        return Answer(status, body.encode(), {"Content-Type": "application/xml"})


class Proxy(Handler):
    """A forward proxy, which relays requests and tunnels connections, to this machine only."""

    name = "proxy"
    # Relayed content has the pace of its source.
    paced = False

    def answer(self):
        wanted = self.state.config["proxy_auth"]
        if wanted is not None:
            wanted = "Basic " + base64.b64encode(wanted.encode()).decode()
            if self.headers.get("Proxy-Authorization") != wanted:
                return self.error(407, "the proxy wants a password", {"Proxy-Authenticate": 'Basic realm="proxy"'})
        tunnel = self.command == "CONNECT"
        target = urlsplit(f"http://{self.path}" if tunnel else self.path)
        try:
            address = ("127.0.0.1", target.port or 80)
        except ValueError:
            return self.error(400, f"no port: {self.path}")
        if target.scheme != "http" or target.hostname not in ("127.0.0.1", "localhost"):
            return self.error(403, f"not on this machine: {self.path}")
        try:
            return self.tunnel(address) if tunnel else self.relay(address)
        except (OSError, http.client.HTTPException) as error:
            return self.error(502, f"{self.path}: {error}")

    @staticmethod
    def error(status, message, headers=None):
        return Answer(status, f"{message}\n".encode(), {**TEXT, **(headers or {})})

    def relay(self, address):
        server = http.client.HTTPConnection(*address)
        # As sent: to take the address apart and put it together again would change some.
        server.putrequest(self.command, "/" + (self.path.split("/", 3) + [""])[3], skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in HOP_BY_HOP:
                server.putheader(name, value)
        server.endheaders(self.payload or None)
        response = server.getresponse()

        def close():
            response.close()
            server.close()

        headers = {name: value for name, value in response.getheaders() if name.lower() not in HOP_BY_HOP}
        return Answer(response.status, Stream(response.read1, None if response.chunked else response.length, close), headers)

    def tunnel(self, address):
        server = socket.create_connection(address)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.close_connection = True

        def upwards():
            with contextlib.suppress(OSError):
                for content in iter(lambda: self.connection.recv(PIECE), b""):
                    server.sendall(content)
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_WR)

        def close():
            # It takes a shutdown to wake the other thread.
            for end in (self.connection, server):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            server.close()

        threading.Thread(target=upwards, daemon=True).start()
        return Answer(200, Stream(server.recv, None, close), {}, raw=True)


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    # The default of 5 makes clients with many connections wait a second for some.
    request_queue_size = 128

    def __init__(self, handler, state, tls=None):
        super().__init__(("127.0.0.1", 0), handler)
        self.state = state
        self.tls = tls

    def handle_error(self, request, client_address):
        # Clients of tests break off handshakes.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def certificate(folder, form):
    """
    Makes a CA, ca.pem, and a certificate for this machine, leaf.pem. Gives the TLS of a server that has the latter, and the path of the
    one to trust.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Complete, because the defaults of openssl.cnf differ between systems.
    (folder / "openssl.cnf").write_text(
        "[req]\ndistinguished_name=name\n[name]\n"
        "[ca]\nbasicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign,cRLSign\nsubjectKeyIdentifier=hash\n"
        "[leaf]\nbasicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\nextendedKeyUsage=serverAuth\n"
        "subjectAltName=DNS:localhost,IP:127.0.0.1\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
        "[common]\nbasicConstraints=critical,CA:TRUE\nsubjectKeyIdentifier=hash\n"
        "[own]\nbasicConstraints=critical,CA:TRUE\nsubjectAltName=DNS:localhost,IP:127.0.0.1\n"
        "[elsewhere]\nbasicConstraints=critical,CA:TRUE\nsubjectAltName=DNS:elsewhere.example\n"
        "[dated]\ndatabase=index.txt\nnew_certs_dir=.\ndefault_md=sha256\npolicy=any\nrand_serial=yes\nx509_extensions=own\n"
        "[any]\ncommonName=supplied\n"
    )
    (folder / "index.txt").touch()
    serial = secrets.randbits(63)
    commands = (
        "ecparam -name prime256v1 -genkey -noout -out ca.key",
        "ecparam -name prime256v1 -genkey -noout -out leaf.key",
        "req -config openssl.cnf -x509 -new -key ca.key -sha256 -days 30 -subj /CN=Hub-CA -extensions ca -out ca.pem",
        "req -config openssl.cnf -new -key leaf.key -sha256 -subj /CN=localhost -out leaf.csr",
        f"x509 -req -in leaf.csr -CA ca.pem -CAkey ca.key -set_serial {serial} -sha256 -days 30"
        " -extfile openssl.cnf -extensions leaf -out leaf.pem",
    )
    if form == "expired":
        commands += ("ca -config openssl.cnf -name dated -selfsign -keyfile leaf.key -in leaf.csr -out leaf.pem -batch -notext"
                     " -startdate 20200101000000Z -enddate 20210101000000Z",)
    elif form != "signed":
        commands += (f"req -config openssl.cnf -x509 -new -key leaf.key -sha256 -days 30 -subj /CN=localhost -extensions {form}"
                     " -out leaf.pem",)
    for command in commands:
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "leaf.pem", folder / "leaf.key")
    tls.set_alpn_protocols(["http/1.1"])
    return tls, str(folder / ("ca.pem" if form == "signed" else "leaf.pem"))


def main():
    parent = os.getppid()
    config, ports = map(pathlib.Path, sys.argv[1:])
    state = State(json.loads(config.read_text()))
    folder = state.config["tls"] and pathlib.Path(state.config["tls"]).resolve()
    tls, trusted = certificate(folder, state.config["certificate"]) if folder else (None, None)
    servers = {"hub": Server(Hub, state, tls), "cdn": Server(Cdn, state, tls), "proxy": Server(Proxy, state)}
    for name, server in servers.items():
        scheme, host = "https" if server.tls else "http", "localhost" if name == "cdn" else "127.0.0.1"
        state.addresses[name] = f"{scheme}://{host}:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
    if folder:
        state.addresses["ca"] = trusted
    draft = ports.with_name(ports.name + ".new")
    draft.write_text(json.dumps(state.addresses))
    draft.replace(ports)
    with contextlib.suppress(KeyboardInterrupt):
        while os.getppid() == parent:
            time.sleep(0.2)


if __name__ == "__main__":
    main()
