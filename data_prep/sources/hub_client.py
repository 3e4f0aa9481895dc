"""The Hugging Face Hub over HTTP: a repository's files, and ranges of bytes of them."""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx

from data_prep.sources.base import PartFile
from data_prep.sources.patience import TEMPORARY, TIMEOUT, Patience, one_line
from torchtitan_ext.errors import UserError

FOOTER_GUESS = 1 << 20
MOST_HOPS = 5
PLAIN = {"accept-encoding": "identity"}


class _Refused(Exception):
    """Too many requests; when the next is welcome has been noted."""


class HubClient:
    """Reads one data set repository. May be used by several threads.

    Args:
        repository: its name, ``owner/name``.

    Raises:
        UserError: from every method, when the Hub cannot be reached or does not know what is asked for.
    """

    def __init__(self, repository: str, connections: int) -> None:
        # Importing it takes a while, which local sources need not pay.
        from huggingface_hub import constants, get_token

        self.repository = repository
        self._endpoint = constants.ENDPOINT.rstrip("/")
        self._offline = constants.HF_HUB_OFFLINE
        token = get_token()
        self._headers = PLAIN | ({"authorization": f"Bearer {token}"} if token else {})
        self.patience = Patience(f"{repository} on {self._endpoint}")
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._http = httpx.Client(timeout=TIMEOUT, limits=limits)
        self._moved: dict[str, str] = {}

    def commit(self, revision: str | None) -> str:
        """The commit that ``revision``, a commit, branch or tag, stands for now."""
        answer = self._get(self._api(f"revision/{quote(revision or 'main', safe='')}"), "--revision").json()
        return str(answer["sha"])

    def files(self, commit: str) -> list[PartFile]:
        """All files of the repository."""
        url: str | None = self._api(f"tree/{commit}?recursive=true")
        found: list[PartFile] = []
        while url:
            answer = self._get(url, "--revision")
            entries: list[dict[str, Any]] = answer.json()
            found += [PartFile(entry["path"], entry["size"], commit) for entry in entries if entry["type"] == "file"]
            url = answer.links.get("next", {}).get("url")
        return found

    def text(self, commit: str, name: str) -> str:
        return self._get(self._url(commit, name), name, follow=True).text

    def read(self, commit: str, name: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield bytes ``start`` to ``stop`` of a file. A connection that breaks is taken up where it broke.

        Raises:
            Interrupted: ``self.patience`` was stopped.
        """
        tries = 0
        while start < stop:
            self.patience.wait_until_welcome()
            try:
                for data in self._read_once(commit, name, start, stop):
                    tries = 0
                    start += len(data)
                    yield data
                if start < stop:
                    raise httpx.RemoteProtocolError("the connection ended early")
            except _Refused:
                continue
            except httpx.TransportError as error:
                self._moved.pop(name, None)
                tries += 1
                self.patience.failed(tries, f"{name}: {one_line(error)}")

    def footer(self, commit: str, file: PartFile) -> bytes:
        """The end of a Parquet file, with all of its footer."""
        data = b"".join(self.read(commit, file.name, max(0, file.size - FOOTER_GUESS), file.size))
        length = int.from_bytes(data[-8:-4], "little") + 8
        if len(data) < length <= file.size:
            start = file.size - length
            data = b"".join(self.read(commit, file.name, start, file.size - len(data))) + data
        return data

    def close(self) -> None:
        self.patience.stop()
        self._http.close()

    def _read_once(self, commit: str, name: str, start: int, stop: int, hops: int = 0) -> Iterator[bytes]:
        """Yield what one request gives of the range. Raises ``_Refused`` when it has to wait."""
        # Large files lie on another server. Asking for the way there counts as a request, so once has to do.
        moved = self._moved.get(name)
        url = moved or self._url(commit, name)
        mine = self._headers if url.startswith(self._endpoint + "/") else {}
        headers = mine | PLAIN | {"range": f"bytes={start}-{stop - 1}"}
        with self._http.stream("GET", url, headers=headers) as answer:
            follow = answer.is_redirect and hops < MOST_HOPS
            if follow:
                self._moved[name] = str(answer.url.join(answer.headers["location"]))
            elif answer.status_code == 206:
                self.patience.succeeded()
                given = re.match(r"bytes (\d+)-", answer.headers.get("content-range", ""))
                if given is None or int(given[1]) != start:
                    raise httpx.RemoteProtocolError("the server sent another range than was asked for")
                yield from _first(answer.iter_raw(), stop - start)
            elif answer.status_code == 200:
                # A server without ranges sends the whole file.
                self.patience.succeeded()
                yield from _first(_behind(answer.iter_raw(), start), stop - start)
            elif answer.status_code == 429:
                self.patience.refused(answer.headers)
                raise _Refused
            elif moved is None and answer.status_code not in TEMPORARY:
                raise self._unreachable(f"{name}: {_reason(answer)}")
            else:
                # The way to the other server holds for some time only.
                raise httpx.RemoteProtocolError(f"{_reason(answer)} from {answer.url.host}")
        if follow:
            # Not before the connection is free again: there may be no other.
            yield from self._read_once(commit, name, start, stop, hops + 1)

    def _get(self, url: str, what: str, follow: bool = False) -> httpx.Response:
        if self._offline:
            raise self._unreachable("the environment variable HF_HUB_OFFLINE is set")
        tries = 0
        while True:
            self.patience.wait_until_welcome()
            try:
                answer = self._http.get(url, headers=self._headers, follow_redirects=follow)
            except httpx.TransportError as error:
                raise self._unreachable(one_line(error)) from error
            if answer.status_code == 429:
                self.patience.refused(answer.headers)
            elif answer.status_code in TEMPORARY:
                tries += 1
                self.patience.failed(tries, f"HTTP {answer.status_code}")
            elif answer.is_error:
                raise self._unreachable(f"{what}: {_reason(answer)}")
            else:
                self.patience.succeeded()
                return answer

    def _unreachable(self, reason: str) -> UserError:
        return UserError(
            f"cannot open {self.repository} on {self._endpoint} ({reason}); check the network and --revision, or give "
            "local files or 'builtin' as the source"
        )

    def _api(self, path: str) -> str:
        return f"{self._endpoint}/api/datasets/{self.repository}/{path}"

    def _url(self, commit: str, name: str) -> str:
        return f"{self._endpoint}/datasets/{self.repository}/resolve/{commit}/{quote(name)}"


def _reason(answer: httpx.Response) -> str:
    said = answer.headers.get("x-error-message")
    return f"HTTP {answer.status_code}, {said}" if said else f"HTTP {answer.status_code}"


def _behind(data: Iterator[bytes], start: int) -> Iterator[bytes]:
    """Leave out the first ``start`` bytes."""
    for chunk in data:
        if start < len(chunk):
            yield chunk[start:]
        start = max(0, start - len(chunk))


def _first(data: Iterator[bytes], length: int) -> Iterator[bytes]:
    """Yield the first ``length`` bytes."""
    for chunk in data:
        if length <= len(chunk):
            yield chunk[:length]
            return
        length -= len(chunk)
        yield chunk
