"""The manifest of a data set folder: what is in it, and what it was made from.

The folder::

    manifest.json              written last: a folder without it is unfinished
    tokenizer.json             for the ``tokenizers`` library
    token_bytes.safetensors    how many bytes of text each vocabulary id stands for
    train/00000.safetensors    one 1-D tensor "tokens" in each file, uint16 or uint32
    heldout/00000.safetensors
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from data_prep.heldout import OLD_RULE, RULE
from torchtitan_ext.errors import UserError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
TOKEN_BYTES = "token_bytes.safetensors"

SplitName = Literal["train", "heldout"]
SPLITS: tuple[SplitName, SplitName] = ("train", "heldout")

Count = Annotated[int, Field(ge=0)]


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Shard(Record):
    """One file of tokens: its name within the folder, how many tokens, its size in bytes, its SHA-256."""

    file: str
    tokens: Count
    size: Count
    sha256: str


class Split(Record):
    """One side of the held-out cut.

    ``tokens`` counts one end-of-text token after each document. ``bytes`` is the UTF-8 length of the text,
    ``token_bytes`` what ``token_bytes.safetensors`` gives for the tokens: equal, unless the tokeniser changes the text.
    """

    tokens: Count = 0
    documents: Count = 0
    bytes: Count = 0
    token_bytes: Count = 0
    shards: tuple[Shard, ...] = Field(default=(), strict=False)


class Settings(Record):
    """Everything that decides what the tokens are. Two folders with equal settings hold equal tokens."""

    source: dict[str, str | int | None]
    tokenizer: str
    eot_token: str | None = None
    heldout_fraction: float
    heldout_by: str = RULE
    shard_tokens: int


class Part(Record):
    """What was read of one file of the source, so that a change of it is noticed.

    Attributes:
        name: of the file.
        size: in bytes.
        stamp: changes when the file is written to; says nothing on another machine.
        rows: how many there were.
        digest: of their texts, see ``data_prep.digest``; hexadecimal.
    """

    name: str
    size: Count
    stamp: str
    rows: Count
    digest: str


class TokenizerFile(Record):
    """What the tokeniser is (``gpt2``, ``bpe:4096``, ``characters`` or ``file``), and its file in the folder."""

    kind: str
    file: str = TOKENIZER
    sha256: str


class Manifest(Record):
    """The contents of ``manifest.json``."""

    format_version: int = FORMAT_VERSION
    settings: Settings
    tokenizer: TokenizerFile
    token_bytes_sha256: str
    vocab_size: Annotated[int, Field(ge=1)]
    eot_id: Count
    dtype: Literal["uint16", "uint32"]
    splits: dict[SplitName, Split]
    parts: tuple[Part, ...] = Field(default=(), strict=False)
    """The files of the source; none in a folder of an earlier version."""
    empty_rows: Count = 0
    """Rows of the source without text."""
    skipped_rows: Count = 0
    """Rows of the source that could not be used and were left out on request."""

    @property
    def fingerprint(self) -> str:
        """Equal for equal tokens in equal order with an equal tokeniser; 16 hexadecimal digits."""
        return self._digest(SPLITS)

    @property
    def heldout_fingerprint(self) -> str:
        """The same for the held-out split alone."""
        return self._digest(("heldout",))

    def _digest(self, names: tuple[SplitName, ...]) -> str:
        shards = {name: [shard.sha256 for shard in self.splits[name].shards] for name in names}
        identity = [self.tokenizer.sha256, self.eot_id, shards]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return self.model_dump_json(indent=1) + "\n"


def read_manifest(path: Path) -> Manifest:
    """Read ``path``. Raises ``UserError`` naming it when it is of another format version or damaged."""
    try:
        record = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); prepare the data set again with `depth prep`") from error
    version = record.get("format_version") if isinstance(record, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path} has format version {version!r}, and this code reads {FORMAT_VERSION}; "
            "prepare the data set again with `depth prep`"
        )
    if isinstance(record.get("settings"), dict):
        record["settings"].setdefault("heldout_by", OLD_RULE)
    try:
        return Manifest.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}, key {key}: {first['msg']}; prepare the data set again with `depth prep`") from error
