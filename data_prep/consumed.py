"""Whether the files of a source still hold what was read of them.

A file whose size and times are those of then is taken to be the same. Of any other the rows that were read are compared
with the digest of then, so a copy of the files is as good as they are, and a file may be repaired behind the place
where the preparation stopped.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data_prep.digest import Digest
from data_prep.encode import digest_of, rows_of
from data_prep.manifest import Part
from data_prep.sources import Cursor, PartFile, Source
from data_prep.workers import ordered_map
from torchtitan_ext.errors import UserError


def part_of(file: PartFile, digest: Digest) -> Part:
    """What goes into the records about a file of which ``digest`` was read."""
    return Part(name=file.name, size=file.size, stamp=file.stamp, rows=digest.rows, digest=f"{digest.value:x}")


def digest_in(part: Part) -> Digest:
    return Digest(part.rows, int(part.digest, 16))


def check(folder: Path, parts: Sequence[Part], source: Source, end: Cursor, workers: int) -> Cursor:
    """Compare what was read of the source, up to ``end``, with the source as it is now.

    Args:
        folder: the data set folder, for messages.
        parts: what was read.
        source: as it is now.
        end: where reading stopped.
        workers: processes that compare.

    Returns:
        Where that place is now.

    Raises:
        UserError: naming a file that has changed.
    """
    files = source.files()
    questions = []
    for number, part in enumerate(parts):
        if number >= len(files) or files[number].name != part.name:
            now = files[number].name if number < len(files) else "no file"
            raise UserError(
                f"{folder} was prepared with {part.name} as file {number + 1} of the source, and now it is {now}; "
                "give the same files in the same order, or another --out"
            )
        if (files[number].size, files[number].stamp) != (part.size, part.stamp):
            questions.append(_Question(number, part, number < end.part))
    if questions:
        print(
            f"{len(questions)} files of the source have another size or date than when {folder} was prepared "
            "from them; comparing what was read of them",
            file=sys.stderr,
            flush=True,
        )
    answers = ordered_map(partial(_Answers, source, folder), questions, max(1, min(workers, len(questions))))
    for question, place in zip(questions, answers, strict=True):
        if question.number == end.part:
            end = Cursor(end.part, place)
    return end


def check_untouched(before: Sequence[PartFile], source: Source) -> None:
    """Raise ``UserError`` naming a file that was written to while it was read."""
    for old, new in zip(before, source.files(), strict=True):
        if old != new:
            raise UserError(f"{old.name} was changed while it was read; run the same command again to look at it anew")


@dataclass(frozen=True)
class _Question:
    """Does file ``number`` begin with the rows of ``part``; and, if ``whole``, hold no others?"""

    number: int
    part: Part
    whole: bool


class _Answers:
    def __init__(self, source: Source, folder: Path) -> None:
        self._source, self._folder = source, folder

    def __call__(self, question: _Question) -> int:
        """Return the place behind the rows. Raises ``UserError`` when they are not those of then."""
        rows, digest, place = question.part.rows, Digest(), 0
        for piece, _ in self._source.pieces(question.number):
            found = list(rows_of(piece))
            wanted = found[: rows - digest.rows]
            for row in wanted:
                digest = digest.row(digest_of(row))
            if len(wanted) == len(found):
                place = piece.end
                continue
            if question.whole:
                raise self._changed(question, f"had {rows} rows and has more now")
            place = piece.ends()[len(wanted) - 1] if wanted else place
            break
        if digest != digest_in(question.part):
            raise self._changed(question, f"its first {rows} rows are not those of then")
        return place

    def _changed(self, question: _Question, how: str) -> UserError:
        return UserError(
            f"{question.part.name} has changed since {self._folder} was prepared from it ({how}); put back what it "
            "was, or prepare the changed source with another --out"
        )
