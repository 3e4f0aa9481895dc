"""Attention over depth: softmax over what earlier layers left behind, in place of their running sum.

Shape suffixes: B = batch, T = tokens, D = model width, K = key width, R = rank of the input-dependent part of the
query, n = sources, m = vectors of one query, J = K / 2.

A *depth read* gives a sublayer its input. With sources v_0 … v_(n-1), each [B, T, D], the embedding first, and a
learned query q::

    k_i = RMSNorm(v_i) ⊙ γ        logit_i = ⟨q, k_i⟩ + bias_i        α = softmax_i(logit)        h = Σ_i α_i v_i

One more read, with a query of its own, feeds the final norm. Kimi Team, arXiv 2603.15031, section 3, full and block
form; torchtitan's Kimi K3 (models/kimi_k3/model.py) and Megatron-LM pull request 6840 compute the same. The
arithmetic is in ``torchtitan_ext.ops.depth_read``: each option of ``DepthReadOptions`` chooses sources, a vector per
source, a scale or a bias there.

**What training needs.** The seed report (``attention_over_depth_named``) has RoPE over depth crash at step 80, the
sparse read and the value map not converge and the full form end 0.5 behind; the paper finds the full form best. The
report does not say what its runs did. These are the ways in which such reads were found or are known to go wrong, and
what is done:

* *How far a step moves a query.* ⟨q, k⟩ sums K coordinates of size 1, so one step of Adam, which moves every coordinate
  of q by the learning rate whatever the gradient, moves a logit by up to K times that. The published code learns q
  itself all the same (fla-org/flash-linear-attention, ops/attnres/naive.py, scale 1; arXiv 2605.18855's code), and so
  does this. With ``query_scale`` "inverse_sqrt" what is learned is √K q, and q moves √K times less: slower than is good
  in the runs that were measured (docs/variants.md, "The scale of depth queries").
* *Rounding.* Softmax, norms and logits are in fp32: a logit of 30 in bf16 is off by up to 0.06, the weight by 6%.
* *Where a run starts.* Queries start at zero, so that every read starts as the uniform mean, turned by RoPE or not.
  With ``granularity`` "sublayer" and ``block_summary`` "sum" that mean is the standard model's residual stream,
  divided by the number n of sources. The norm that follows takes the factor out again only where its eps is small
  beside the squares of what it gets: it computes what the standard model's norm would with n² eps. With embeddings of
  standard deviation 0.02 and eps 1e-5 that is another function at the start (logits differ by a third in
  ``attnres_full`` at 100M, by 2% in ``attnres_block``; tests/depth/test_attention_over_depth.py). With ``read_scale``
  "sources" (ours) the read is multiplied by n, and the model starts as the standard one.
* *RoPE over depth* turns the query alone, and keeps its length: no logit gets larger than without.
* *Sparse reads.* Counting "every 4th" from the reader makes an old block come and go with depth, and may drop the
  embedding. Here blocks are numbered from the embedding, number 0, which is therefore always kept; a block once dropped
  stays dropped.
* *The value map* starts at the identity. As α does not depend on it, it is applied once, to the sum.
* *Sources that are states* each contain all earlier ones: keys look alike, and a mean of L states holds the embedding
  L times and the last layer once. arXiv 2605.18855 reports perplexity 33.4 against 29.7 of the standard model for the
  full form with such sources at 36 layers (WANDB_RUNS.md of its code).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan_ext.ops import backends
from torchtitan_ext.ops.depth_query import EPS, DepthQuery, Found, depth_weights
from torchtitan_ext.ops.depth_read import take
from torchtitan_ext.recipe import INIT_STD
from torchtitan_ext.sizes import Shape

from . import initial
from .connection import Connection, Stream
from .depth_plan import Place, Read
from .depth_read_options import DepthReadOptions
from .observe import note

ROTARY_BASE = 10_000.0
"""RoPE's base (arXiv 2104.09864, section 3.2.2): wavelengths from 6 outputs to more than any model has (choice)."""


class DepthState(NamedTuple):
    """The depth state; all tensors are [B, T, D].

    Attributes:
        finished: the embedding, then the sum of the outputs of each finished block, or what else stands for it.
        partial: the sum of the outputs of the unfinished block; None when there are none, or nothing needs it.
        recent: the most recent outputs, oldest first.
        running: the embedding plus everything added since, where the read goes beside it; else None.
        found: what the next reads find in the finished blocks, that of the next one first; empty where each read looks
            at them for itself.
    """

    finished: tuple[torch.Tensor, ...]
    partial: torch.Tensor | None = None
    recent: tuple[torch.Tensor, ...] = ()
    running: torch.Tensor | None = None
    found: tuple[Found, ...] = ()


Carry = tuple[DepthState, torch.Tensor]
"""The state and what was read from it."""

InLayer = tuple[DepthState, torch.Tensor, torch.Tensor]
"""Between the two sublayers of a layer that reads once: the state, the feed-forward's input, attention's output."""


class DepthStream(Stream):
    """Both ends of the depth state, and everything that the reads of a model learn.

    Attributes (absent where the variant has no use for them):
        queries: q, or √K q where the variant's ``query_scale`` says so, [queries, K].
        gains: γ, [reads, K] or [blocks, K], one at first.
        query_down, query_up: [reads, R, D] and [reads, R, K]; where the current input is x, that has the further term
            Σ_r (query_down x)_r query_up_r; query_up is zero at first.
        value_map: [D, D], the identity at first.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Stream.Config):
        variant: DepthReadOptions
        shape: Shape

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.variant = config.variant
        self.plan = config.variant.plan(config.shape)
        self.reads = self.plan.reads()
        for name, shape in config.variant.learned(config.shape).items():
            setattr(self, name, nn.Parameter(torch.empty(shape)))

    def start(self, x_BTD: torch.Tensor) -> DepthState:
        return DepthState((x_BTD,), running=x_BTD if self.plan.beside_sum else None)

    def finish(self, state: DepthState) -> torch.Tensor:
        return self.read(state, len(self.reads) - 1) if state.running is None else state.running

    def read(self, state: DepthState, outputs: int) -> torch.Tensor:
        """The read [B, T, D] that is made when there are ``outputs`` outputs."""
        read = self.reads[outputs]
        if not read.sources:
            assert state.running is not None
            return state.running
        sources = self.sources(state, outputs)
        if read.row is None:
            h_BTD = sources[0]
        else:
            query = self.query(state, outputs)
            h_BTD = self._attend(sources, query, read, state)
            _note_weights(sources, query)
            if self.variant.read_scale == "sources":
                h_BTD = h_BTD * len(sources)
        if self.variant.value_map:
            h_BTD = F.linear(h_BTD, self.value_map.to(h_BTD.dtype))
        return h_BTD if state.running is None else state.running + h_BTD

    def write(
        self, state: DepthState, outputs: int, x_BTD: torch.Tensor, y_BTD: torch.Tensor, added_BTD: torch.Tensor
    ) -> DepthState:
        """The state with one output more than ``outputs``: ``added_BTD``, all that was added to what was read, or with
        sources that are states what a sublayer with the input ``x_BTD`` and the output ``y_BTD`` leaves behind."""
        plan = self.plan
        output_BTD = x_BTD + y_BTD if self.variant.source_kind == "state" else added_BTD
        running = None if state.running is None else state.running + added_BTD
        outputs, found = outputs + 1, state.found[1:]
        finished, partial = state.finished, None
        done = outputs % plan.block_size == 0
        if self.variant.block_summary == "alternating":
            if done:
                assert running is not None
                finished = (*finished, running - finished[-1])
        else:
            partial = output_BTD if state.partial is None else state.partial + output_BTD
            if done:
                finished, partial = (*finished, partial), None
        if plan.begins_group(outputs):
            found = self.look_ahead(finished, outputs)
        recent = (*state.recent, output_BTD)[-plan.window :] if plan.window else ()
        return DepthState(finished, partial, recent, running=running, found=found)

    def _attend(self, sources: list[torch.Tensor], query: DepthQuery, read: Read, state: DepthState) -> torch.Tensor:
        if not state.found:
            return backends.read(sources, query, backend=self.variant.backend)
        before, own = state.found[0], slice(read.finished, None)
        if not sources[own]:
            return take(before, sources[0].dtype)
        return backends.read(sources[own], query.of(own), before, self.variant.backend)

    def look_ahead(self, finished: tuple[torch.Tensor, ...], outputs: int) -> tuple[Found, ...]:
        """What each read from ``outputs`` on finds in ``finished``, until another block is finished.

        Empty where that saves nothing (one read, or one source), where queries depend on an input that is not there
        yet, where the backend knows whole reads alone, and where layers are recomputed from the state, which would have
        to keep it.
        """
        reads = self.reads[outputs : outputs + self.plan.block_size]
        phases = backends.has_phases(self.variant.backend)
        if len(reads) < 2 or reads[0].finished < 2 or self.variant.query_rank or self.recomputed or not phases:
            return ()
        shared = slice(reads[0].finished)
        queries = [self.query(DepthState(finished), read.position).of(shared) for read in reads]
        sources = [finished[source.index] for source in reads[0].sources[shared]]
        return tuple(backends.find(sources, queries, self.variant.backend))

    def sources(self, state: DepthState, outputs: int) -> list[torch.Tensor]:
        """The tensors that a read attends to, as they are kept in the state: for means, the sums."""
        kept = {Place.FINISHED: state.finished, Place.PARTIAL: (state.partial,), Place.RECENT: state.recent}
        return [kept[source.place][source.index] for source in self.reads[outputs].sources]

    def query(self, state: DepthState, outputs: int) -> DepthQuery:
        """What that read asks for, for a read with more than one source."""
        read = self.reads[outputs]
        assert read.row is not None
        if self.variant.key_gain == "block":
            gain = self.gains[_device_tensor([source.block for source in read.sources], self.gains)].unsqueeze(1)
        else:
            gain = self.gains[read.row]
        dtype = torch.float64 if self.queries.dtype == torch.float64 else torch.float32
        vectors_mK = self.queries[read.query_row].to(dtype).unsqueeze(0)
        if self.variant.query_rank:
            vectors_mK = torch.cat([vectors_mK, self.query_up[read.row].to(dtype)])
        if self.variant.query_scale == "inverse_sqrt":
            vectors_mK = vectors_mK * vectors_mK.shape[-1] ** -0.5
        gain = gain.to(dtype)
        if self.variant.position == "rotary":
            distances = [read.position - source.position for source in read.sources]
            vectors_nmK = _rotate(vectors_mK, distances) * gain
        elif self.variant.key_gain == "block":
            vectors_nmK = vectors_mK * gain
        else:  # expanded, not repeated: backends see by the stride of 0 that there is one vector for all sources
            vectors_nmK = (vectors_mK * gain).expand(len(read.sources), -1, -1)
        biases = None
        if self.variant.position == "linear":
            biases = [-self.variant.slope * (read.position - source.position) for source in read.sources]
        w_nK, basis_nRK = vectors_nmK[:, 0], vectors_nmK[:, 1:]
        return DepthQuery(
            w_nK,
            scales=[source.scale for source in read.sources],
            biases=biases,
            basis_nRK=basis_nRK if self.variant.query_rank else None,
            coefficients_BTR=self._coefficients(state, read) if self.variant.query_rank else None,
        )

    def _coefficients(self, state: DepthState, read: Read) -> torch.Tensor:
        """The input-dependent query's coordinates [B, T, R]: a projection of the newest source, RMS-normalised."""
        x_BTD = state.running
        if x_BTD is None:
            x_BTD = state.finished[-1] if state.partial is None else state.partial
        dtype = torch.float64 if x_BTD.dtype == torch.float64 else torch.float32
        # The factor goes on the product, so that no normalised copy of x is kept for backward.
        rms_BT1 = torch.linalg.vector_norm(x_BTD, dim=-1, keepdim=True, dtype=dtype) / x_BTD.shape[-1] ** 0.5
        return F.linear(x_BTD, self.query_down[read.row].to(x_BTD.dtype)) * (rms_BT1.square() + EPS).rsqrt()


class DepthConnection(Connection):
    """One read and one write. ``outputs``: how many outputs there are when the sublayer reads."""

    @dataclass(kw_only=True, slots=True)
    class Config(Connection.Config):
        outputs: int

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.outputs = config.outputs
        self._stream: tuple[DepthStream, ...] = ()

    def connect(self, stream: Stream, norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().connect(stream, norm)
        assert isinstance(stream, DepthStream)
        self._stream = (stream,)


class SublayerRead(DepthConnection):
    """A sublayer that reads for itself."""

    @dataclass(kw_only=True, slots=True)
    class Config(DepthConnection.Config):
        pass

    def open(self, state: DepthState) -> tuple[torch.Tensor, Carry]:
        h_BTD = self._stream[0].read(state, self.outputs)
        return h_BTD, (state, h_BTD)

    def close(self, carry: Carry, y_BTD: torch.Tensor) -> DepthState:
        state, h_BTD = carry
        return self._stream[0].write(state, self.outputs, h_BTD, y_BTD, y_BTD)


class LayerRead(DepthConnection):
    """The attention of a layer that reads once: its feed-forward gets what attention made of that."""

    @dataclass(kw_only=True, slots=True)
    class Config(DepthConnection.Config):
        pass

    def open(self, state: DepthState) -> tuple[torch.Tensor, Carry]:
        h_BTD = self._stream[0].read(state, self.outputs)
        return h_BTD, (state, h_BTD)

    def close(self, carry: Carry, y_BTD: torch.Tensor) -> InLayer:
        state, h_BTD = carry
        return state, h_BTD + y_BTD, y_BTD


class LayerWrite(DepthConnection):
    """The feed-forward of such a layer: what both sublayers made is one output."""

    @dataclass(kw_only=True, slots=True)
    class Config(DepthConnection.Config):
        pass

    def open(self, state: InLayer) -> tuple[torch.Tensor, InLayer]:
        return state[1], state

    def close(self, carry: InLayer, y_BTD: torch.Tensor) -> DepthState:
        state, x_BTD, attention_BTD = carry
        return self._stream[0].write(state, self.outputs, x_BTD, y_BTD, attention_BTD + y_BTD)


def _note_weights(sources: Sequence[torch.Tensor], query: DepthQuery) -> None:
    """Note the weights' average over tokens, and the average entropy (nats) of a token's weights."""
    weights_BTn = cache(lambda: depth_weights(sources, query))
    note("attention_map", lambda: weights_BTn().mean(dim=(0, 1)))
    note("attention_entropy", lambda: torch.special.entr(weights_BTn()).sum(-1).mean())


def _device_tensor(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    # Not waiting is safe, for the source is pageable memory, and spares the device a stop at every read.
    return torch.tensor(values).to(like.device, non_blocking=True)


def _rotate(vectors_mK: torch.Tensor, distances: Sequence[int]) -> torch.Tensor:
    """The vectors turned by RoPE for each of n distances, [n, m, K]; coordinate j is paired with j + K/2."""
    half = vectors_mK.shape[-1] // 2
    steps = torch.arange(half, device=vectors_mK.device, dtype=vectors_mK.dtype)
    angle_n1J = _device_tensor(distances, vectors_mK)[:, None, None] * ROTARY_BASE ** (-steps / half)
    cos, sin = angle_n1J.cos(), angle_n1J.sin()
    first_mJ, second_mJ = vectors_mK[:, :half], vectors_mK[:, half:]
    return torch.cat([first_mJ * cos - second_mJ * sin, first_mJ * sin + second_mJ * cos], dim=-1)


@dataclass(frozen=True)
class AttentionOverDepth(DepthReadOptions):
    """A depth read for every layer or sublayer; ``DepthReadOptions`` has the options."""

    def connections(self, shape: Shape, layer: int) -> tuple[Connection.Config, Connection.Config]:
        if self.plan(shape).outputs_per_layer == 1:
            return LayerRead.Config(outputs=layer), LayerWrite.Config(outputs=layer)
        return SublayerRead.Config(outputs=2 * layer), SublayerRead.Config(outputs=2 * layer + 1)

    def stream(self, shape: Shape) -> DepthStream.Config:
        initialisers = {
            "queries": initial.normal(self.query_std) if self.query_std else initial.zeros,
            "gains": initial.ones,
            "query_down": initial.normal(INIT_STD),
            "query_up": initial.zeros,
            "value_map": initial.identity,
        }
        return DepthStream.Config(
            variant=self, shape=shape, param_init={name: initialisers[name] for name in self.learned(shape)}
        )
