"""Which documents are held out: chosen by their text alone, so that copies of a document lie on the same side."""

import hashlib
import unicodedata

RULE = "normalized text"
"""What the held-out split is chosen by: the name of what ``is_heldout`` does, in a data set's settings."""
OLD_RULE = "exact text"
"""What it was chosen by in folders that do not say so."""

LOWER = bytes(range(65)) + bytes(range(97, 123)) + bytes(range(91, 256))
SPACE = bytes([*range(33), 127])
WIDE_SPACES = [chr(code).encode() for code in (0x85, 0xA0, 0x200B, 0x2028, 0x2029, 0x202F, 0x3000, 0xFEFF)]


def is_heldout(utf8: bytes, fraction: float) -> bool:
    """Tell on which side of the cut a document lies: a fixed hash of its text, seen as a number in [0, 1).

    Copies that differ in white space, control characters, the case of Latin letters or the Unicode form of characters
    have the same hash.

    Args:
        utf8: the document.
        fraction: how much of the hash range is held out.
    """
    digest = hashlib.blake2b(_normalized(utf8), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


def _normalized(utf8: bytes) -> bytes:
    if not utf8.isascii():
        text = utf8.decode()
        if not unicodedata.is_normalized("NFC", text):
            utf8 = unicodedata.normalize("NFC", text).encode()
        for space in WIDE_SPACES:
            utf8 = utf8.replace(space, b"")
    return utf8.translate(LOWER, SPACE)
