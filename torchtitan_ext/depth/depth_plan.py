"""Which outputs of earlier layers each depth read sees: counting only, no tensors.

An *output* is what one layer adds (or one sublayer, where each sublayer reads for itself). Outputs are numbered from
1; number 0 is the embedding. Every ``block_size`` outputs a block is finished and stands for its outputs as one
source; the outputs after the last finished block are the unfinished block, one source more. So what a read sees
depends on one number alone: how many outputs there are by then.
"""

from dataclasses import dataclass
from enum import Enum


class Place(Enum):
    """Where in the depth state a source is kept."""

    FINISHED = "finished"
    """The embedding (index 0) and the finished blocks."""
    PARTIAL = "partial"
    """The unfinished block."""
    RECENT = "recent"
    """The most recent outputs one by one, oldest first."""


@dataclass(frozen=True)
class Source:
    """One source of a read.

    Attributes:
        place, index: where it is; the index counts within the place.
        scale: factor on the sum that is kept there: 1 / outputs for a mean.
        block: number of its block, from 1; 0 is the embedding.
        position: number of its last output, which is its place on the depth axis.
    """

    place: Place
    index: int
    scale: float
    block: int
    position: int


@dataclass(frozen=True)
class Read:
    """One read of the depth state, made when ``position`` outputs are there.

    Attributes:
        position: the place of the read on the depth axis.
        sources: what it sees; none at the start of a model that keeps the running sum beside the read.
        row: its number among the reads that choose, those with more than one source; None for the others.
        query_row: its row of the learned queries, which several reads may share; None likewise.
    """

    position: int
    sources: tuple[Source, ...]
    row: int | None
    query_row: int | None

    @property
    def finished(self) -> int:
        """How many of its sources are the embedding and finished blocks; they come first."""
        return sum(source.place is Place.FINISHED for source in self.sources)


@dataclass(frozen=True)
class DepthPlan:
    """How a model's outputs are grouped into sources.

    Attributes:
        layers, outputs_per_layer: the outputs there are; 1 or 2 per layer.
        block_size: outputs per block.
        mean: a block stands for the mean of its outputs; else for what the state keeps, undivided.
        window: how many of the most recent outputs are sources of their own as well.
        nearest, every: of the embedding and the finished blocks, numbered from 0, keep the ``nearest`` newest and every
            ``every``-th; 1 and 1 keep all.
        beside_sum: the running sum of all outputs is kept beside the read, which then needs neither the unfinished
            block nor a last read for the final norm.
        query_span: reads whose positions have the same quotient by this share one query; 0 for a query per read. The
            last read always has its own.
        late: the read that is made when a block is finished does not see that block yet.
    """

    layers: int
    outputs_per_layer: int
    block_size: int
    mean: bool
    window: int
    nearest: int
    every: int
    beside_sum: bool
    query_span: int
    late: bool = False

    def begins_group(self, outputs: int) -> bool:
        """Whether the read made when there are ``outputs`` outputs is the first to see the newest finished block; the
        ``block_size`` reads from there on see the same finished blocks."""
        return (outputs - self.late) % self.block_size == 0

    def reads(self) -> tuple[Read, ...]:
        """Every read of the model in order; read number i is made when there are i outputs."""
        outputs = self.layers * self.outputs_per_layer
        reads: list[Read] = []
        shares: dict[int, int] = {}
        row = 0
        for position in range(outputs if self.beside_sum else outputs + 1):
            sources = self.sources(position)
            if len(sources) > 1:
                share = position
                if self.query_span and position < outputs:
                    share = -1 - position // self.query_span
                query_row = shares.setdefault(share, len(shares))
                reads.append(Read(position, sources, row, query_row))
                row += 1
            else:
                reads.append(Read(position, sources, None, None))
        return tuple(reads)

    def sources(self, outputs: int) -> tuple[Source, ...]:
        """What a read sees when there are ``outputs`` outputs."""
        if self.beside_sum and not outputs:
            return ()
        finished, unfinished = divmod(outputs, self.block_size)
        if self.late and not unfinished:
            finished -= 1
        found = [
            Source(
                Place.FINISHED, block, self._scale(self.block_size) if block else 1.0, block, block * self.block_size
            )
            for block in range(finished + 1)
            if block > finished - self.nearest or block % self.every == 0
        ]
        if unfinished and not self.beside_sum:
            found.append(Source(Place.PARTIAL, 0, self._scale(unfinished), finished + 1, outputs))
        kept = min(self.window, outputs)
        for index in range(kept):
            output = outputs - kept + 1 + index
            found.append(Source(Place.RECENT, index, 1.0, -(-output // self.block_size), output))
        return tuple(found)

    def _scale(self, outputs: int) -> float:
        return 1.0 / outputs if self.mean else 1.0
