"""The input as portions of work, and a first look at it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nanogpt_cli.data.text.documents import Documents, Piece, Reading
from nanogpt_cli.data.text.encode import Cursor, Unit
from nanogpt_cli.data.text.inputs import Inputs
from nanogpt_cli.data.text.splits import SplitRule
from nanogpt_cli.data.tokenizers import code_points

UNIT = 1 << 19  # characters of a unit, at least
CODE_POINTS = 0x110000


@dataclass(frozen=True)
class Text:
    """Files, how they become documents, and which of these are for validation."""

    inputs: Inputs
    reading: Reading
    split: SplitRule

    def units(self, cursor: Cursor, cut: int | None = None) -> Iterator[Unit]:
        """Everything from `cursor` on, a portion at a time. Empty documents are left out and counted.

        With `cut` val begins at that character, whatever the split says.
        """
        labels, sizes = self.inputs.labels, self.inputs.sizes
        before, total = sum(sizes[: cursor.file]), max(1, sum(sizes))
        held, flags, size = list[Piece](), list[bool](), 0
        _, skip, row, empty, characters = cursor
        for index in range(cursor.file, len(labels)):
            starts, val = True, False  # of the document that the next piece belongs to
            with self.inputs.open(index) as path:
                documents = Documents(path, self.reading, labels[index])
                for number, piece in enumerate(documents):
                    val = self.split.is_val(index, row, piece.text) if starts else val
                    is_empty, starts = starts and piece.ends and not piece.text, piece.ends
                    if number < skip:
                        continue
                    row, empty = row + piece.ends, empty + is_empty
                    for part in [] if is_empty else _parted(piece, cut, characters):
                        held.append(part)
                        flags.append(val if cut is None else characters >= cut)
                        size, characters = size + len(part.text), characters + len(part.text)
                    if size >= UNIT:
                        share = (before + documents.share * sizes[index]) / total
                        yield Unit(held, flags, Cursor(index, number + 1, row, empty, characters), share)
                        held, flags, size = [], [], 0
            before, skip = before + sizes[index], 0
        if held:
            yield Unit(held, flags, Cursor(len(labels), 0, row, empty, characters), 1.0)

    def scan(self, most_bytes: int | None) -> "Scan | None":
        """Count characters and documents; None if the text is longer than `most_bytes` in UTF-8."""
        scan, text_bytes = Scan(), 0
        for unit in self.units(Cursor()):
            text = "".join(piece.text for piece in unit.pieces)
            scan.counts += np.bincount(code_points(text), minlength=CODE_POINTS)
            scan.characters, scan.documents = unit.after.characters, unit.after.documents
            text_bytes += len(text.encode())
            if most_bytes is not None and text_bytes > most_bytes:
                return None
        return scan


@dataclass
class Scan:
    """What a text consists of."""

    characters: int = 0
    documents: int = 0
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(CODE_POINTS, np.int64))  # by code point

    @property
    def alphabet(self) -> list[str]:
        """The different characters, in code point order."""
        return [chr(point) for point in np.flatnonzero(self.counts)]

    @property
    def most_frequent(self) -> str:
        """The most frequent character; the first of several."""
        return chr(int(self.counts.argmax()))


def _parted(piece: Piece, cut: int | None, characters: int) -> list[Piece]:
    """The piece, in two if val begins inside it; `characters` come before it."""
    place = -1 if cut is None else cut - characters
    if 0 < place < len(piece.text):
        return [Piece(piece.text[:place], False), Piece(piece.text[place:], piece.ends)]
    return [piece]
