"""A digest of a sequence of documents that can be put together from those of its parts.

Each document's hash is a digit of a number to the base ``BASE`` modulo a prime (Karp and Rabin 1987). The digest of two
sequences one behind the other follows from their digests and lengths, so processes can work on a file's parts and a
later run can look at the beginning of a file alone.
"""

import hashlib
from typing import NamedTuple

PRIME = (1 << 127) - 1
BASE = 0x5851F42D4C957F2D14057B7EF767814F % PRIME


class Digest(NamedTuple):
    """Of ``rows`` documents; the empty sequence without arguments."""

    rows: int = 0
    value: int = 0

    def row(self, data: bytes) -> "Digest":
        """With one more document behind."""
        number = int.from_bytes(hashlib.blake2b(data, digest_size=15).digest()) + 1
        return Digest(self.rows + 1, (self.value * BASE + number) % PRIME)

    def then(self, other: "Digest") -> "Digest":
        """With the documents of ``other`` behind."""
        return Digest(self.rows + other.rows, (self.value * pow(BASE, other.rows, PRIME) + other.value) % PRIME)
