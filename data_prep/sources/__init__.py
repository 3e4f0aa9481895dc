"""Where documents come from: local files, the Hugging Face Hub, and the text that comes with Python."""

from data_prep.sources.base import START, BadRow, Block, Cursor, PartFile, Piece, Source, bad_row, blocks
from data_prep.sources.builtin import BuiltinSource
from data_prep.sources.hub import FINEWEB_EDU, HubSource
from data_prep.sources.local import LocalSource

__all__ = [
    "FINEWEB_EDU",
    "START",
    "BadRow",
    "Block",
    "BuiltinSource",
    "Cursor",
    "HubSource",
    "LocalSource",
    "PartFile",
    "Piece",
    "Source",
    "bad_row",
    "blocks",
]
