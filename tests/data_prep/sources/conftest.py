"""A Hugging Face Hub of one repository on this machine: its API, its files by ranges of bytes, and its bad days."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

COMMIT = "c0ffee" + "0" * 34
REPOSITORY = "HuggingFaceFW/fineweb-edu"
PAGE = 2
"""Files in one page of the listing."""


@dataclass
class Hub:
    """What the server serves, what it was asked for, and how it fails.

    Attributes:
        folder: the repository.
        url: of the server.
        requests: method, path and range of each request.
        sent: bytes of files that were sent.
        status: (path) → another HTTP status than usual and, for 429, the seconds to wait; called for each request.
        break_after: bytes of a file after which a connection breaks; 0 for never.
        ranges: whether ranges of bytes are understood.
        meet: requests for files wait until so many have been there at once.
    """

    folder: Path
    url: str = ""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    sent: int = 0
    status: Callable[[str], tuple[int, str] | None] = lambda path: None
    break_after: int = 0
    ranges: bool = True
    meet: int = 0
    at_once: int = 0
    most_at_once: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    commit: str = COMMIT

    def asked(self, pattern: str) -> list[str]:
        return [path for _, path, _ in self.requests if re.search(pattern, path)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: ClassVar[Hub]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.hub
        url = urlsplit(self.path)
        path = unquote(url.path)
        with hub.changed:
            hub.requests.append((self.command, path, self.headers.get("range", "")))
            other = hub.status(path)
        if other is not None:
            self._answer(other[0], b"", {"Retry-After": other[1]} if other[1] else {})
        elif path.startswith(f"/api/datasets/{REPOSITORY}/revision/"):
            known = path.rsplit("/", 1)[1] in ("main", COMMIT)
            self._answer(200 if known else 404, json.dumps({"sha": COMMIT}).encode())
        elif path == f"/api/datasets/{REPOSITORY}/tree/{COMMIT}":
            self._tree(int(parse_qs(url.query).get("cursor", ["0"])[0]))
        elif path.startswith(f"/datasets/{REPOSITORY}/resolve/{COMMIT}/"):
            name = path.split(COMMIT + "/", 1)[1]
            if name.endswith(".parquet"):
                self._answer(302, b"", {"Location": f"{hub.url}/elsewhere/{name}"})
            else:
                self._file(hub.folder / name)
        elif path.startswith("/elsewhere/"):
            self._file(hub.folder / path.removeprefix("/elsewhere/"))
        else:
            self._answer(404, b"")

    def _tree(self, first: int) -> None:
        files = sorted(path for path in self.hub.folder.rglob("*") if path.is_file())
        page = [
            {"type": "file", "path": path.relative_to(self.hub.folder).as_posix(), "size": path.stat().st_size}
            for path in files[first : first + PAGE]
        ]
        more = {}
        if first + PAGE < len(files):
            more["Link"] = (
                f'<{self.hub.url}{urlsplit(self.path).path}?recursive=true&cursor={first + PAGE}>; rel="next"'
            )
        self._answer(200, json.dumps(page).encode(), more)

    def _file(self, path: Path) -> None:
        hub = self.hub
        data = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        with hub.changed:
            hub.at_once += 1
            hub.most_at_once = max(hub.most_at_once, hub.at_once)
            hub.changed.notify_all()
            if asked is not None and int(asked[2]) + 1 < len(data):  # not the footer
                hub.changed.wait_for(lambda: hub.most_at_once >= hub.meet, timeout=30)
        try:
            if asked is None or not hub.ranges:
                self._answer(200, data)
            else:
                start, stop = int(asked[1]), min(int(asked[2]) + 1, len(data))
                self._answer(206, data[start:stop], {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})
        finally:
            with hub.changed:
                hub.at_once -= 1

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        limit = self.hub.break_after if status in (200, 206) and "parquet" in self.path else 0
        part = body[:limit] if limit else body
        try:
            self.wfile.write(part)
            self.wfile.flush()
        except OSError:
            self.close_connection = True
        with self.hub.changed:
            self.hub.sent += len(part)
        if len(part) < len(body):
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def serve() -> Callable[[Path], AbstractContextManager[Hub]]:
    """Serve a folder as the repository until the end of a block."""
    return _serve


@contextmanager
def _serve(folder: Path) -> Iterator[Hub]:
    hub = Hub(folder)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    # Clients that leave early are part of the tests.
    server.handle_error = lambda request, address: None  # type: ignore[method-assign]
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
