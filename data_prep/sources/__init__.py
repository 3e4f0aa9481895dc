"""Where documents come from: local files, the Hugging Face Hub, and the text that comes with Python."""

from data_prep.sources.base import Block, Cursor, Piece, Source, blocks
from data_prep.sources.builtin import BuiltinSource
from data_prep.sources.hub import FINEWEB_EDU, HubSource
from data_prep.sources.local import LocalSource

__all__ = [
    "FINEWEB_EDU",
    "Block",
    "BuiltinSource",
    "Cursor",
    "HubSource",
    "LocalSource",
    "Piece",
    "Source",
    "blocks",
]
