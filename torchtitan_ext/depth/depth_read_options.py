"""The options of attention over depth: what they may be, and the parameters and FLOPs they cost.

D = model width, K = key width, R = rank of the input-dependent query, γ = key gain.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from torchtitan_ext.errors import UserError
from torchtitan_ext.errors import nearest as hint_for
from torchtitan_ext.ops.backends import AUTO, BACKENDS, Ask, unavailable
from torchtitan_ext.parameter_groups import Group
from torchtitan_ext.sizes import Shape

from .depth_plan import DepthPlan
from .variant import Variant

_CHOICES = {
    "granularity": ("layer", "sublayer"),
    "source_kind": ("delta", "state"),
    "block_summary": ("mean", "sum", "alternating"),
    "query_scale": ("one", "inverse_sqrt"),
    "read_scale": ("one", "sources"),
    "query_share": ("read", "block", "group", "all"),
    "key_gain": ("read", "block"),
    "position": ("none", "linear", "rotary"),
    "routing": ("replace", "add"),
    "backend": (AUTO, *BACKENDS),
}

_GROUPS = {"queries": ("queries",), "gains": ("gains",), "maps": ("query_down", "query_up", "value_map")}
"""Parameter groups, with the parameters of the stream that they hold."""

_NEEDS = {
    "query_group": ("query_share", "group"),
    "slope": ("position", "linear"),
    "nearest": ("sparse", True),
    "every": ("sparse", True),
    "late_blocks": ("routing", "add"),
}
"""Options that mean something only when another has a certain value."""


@dataclass(frozen=True)
class DepthReadOptions(Variant):
    """The options of a depth read, checked and counted; ``AttentionOverDepth`` builds it.

    Attributes:
        granularity: "layer": one read h per layer, whose output is A(n1 h) + F(n2(h + A(n1 h))); "sublayer": a read
            before A and a read before F.
        source_kind: "delta": an output is what the layer (or sublayer) adds; "state": its input plus that.
        block_size: outputs per block; 1 makes every output its own source; 0 where ``blocks`` says it.
        blocks: about how many blocks, each of ceil(layers / blocks) whole layers; 0 where ``block_size`` says it.
        block_summary: a block stands for the "mean" or the "sum" of its outputs; or, "alternating", number k for
            s_k = x − s_(k−1), x the running sum at its end and s_0 the embedding (``delta_attnres``).
        window: how many of the most recent outputs are sources of their own as well, whether or not they are in the
            unfinished block too.
        query_scale: what the learned vector is multiplied with to give the query: "one", as the published code has it,
            or "inverse_sqrt", K^(-1/2) (ours), with which a step of Adam moves the query √K times less.
        read_scale: what a read is multiplied with: "one", as published, or the number of its "sources" (ours), with
            which reads of equal weights are the sum of their sources.
        query_share: a query per "read", per "block" (for the reads made while it is the unfinished one), per "group" of
            ``query_group`` layers, or one for "all"; the last read, which feeds the final norm, has its own in any case
            (choice).
        query_group: layers in a group.
        query_rank: rank of the part of the query that depends on the newest source, which is the unfinished block or
            the last finished one (choice: the layer's input is known only after the read); 0 for none.
        key_gain: γ per "read" or per source "block", the embedding and the unfinished block included; a recent output
            uses its block's (choice).
        position: "linear": bias −slope · distance; "rotary": RoPE over depth. Distances count outputs back from the
            newest, and a block lies where its last output does (choice).
        slope: of the linear bias; 1/8 is the third of ALiBi's eight (arXiv 2108.12409, section 3) (choice).
        sparse: of the embedding and the finished blocks, numbered from 0, keep the ``nearest`` newest and every
            ``every``-th (choice: counted from the embedding, not from the reader).
        value_map: one learned D × D map for the model, on the values but not the keys, the identity at first (choice).
        key_rank: keys are the last so many coordinates of a source; 0 where ``key_fraction`` says it.
        key_fraction: the same as a fraction of D.
        routing: "replace": h is the read; "add": h is the running sum of all outputs plus the read, which then leaves
            out the unfinished block; the first read has no source and the final norm gets the running sum.
        late_blocks: with ``routing`` "add", the read that is made when a block is finished does not see it yet.
        query_std: standard deviation of the queries at first; 0 starts every read at the mean of its sources.
        backend: which implementation does the reads on a GPU, one of ``torchtitan_ext.ops.backends``; "auto" takes what
            measures fastest. On a CPU they are PyTorch's in any case.
    """

    machine_options: ClassVar[frozenset[str]] = frozenset({"backend"})

    granularity: str = "layer"
    source_kind: str = "delta"
    block_size: int = 1
    blocks: int = 0
    block_summary: str = "mean"
    window: int = 0
    query_scale: str = "one"
    read_scale: str = "one"
    query_share: str = "read"
    query_group: int = 4
    query_rank: int = 0
    key_gain: str = "read"
    position: str = "none"
    slope: float = 0.125
    sparse: bool = False
    nearest: int = 4
    every: int = 4
    value_map: bool = False
    key_rank: int = 0
    key_fraction: float = 1.0
    routing: str = "replace"
    late_blocks: bool = False
    query_std: float = 0.0
    backend: str = AUTO

    def check(self, shape: Shape) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise UserError(f"depth.{name} = {value!r} is unknown; {hint_for(str(value), choices)}")
        for name, (switch, on) in _NEEDS.items():
            if getattr(self, name) != type(self).__dataclass_fields__[name].default and getattr(self, switch) != on:
                wanted = str(on).lower()
                raise UserError(
                    f"depth.{name} = {getattr(self, name)} has no effect without depth.{switch}: {wanted}; "
                    f"set that, or leave out depth.{name}"
                )
        outputs = shape.layers * self.outputs_per_layer
        kind = "one per layer" if self.outputs_per_layer == 1 else "two per layer"
        if (self.block_size > 0) == (self.blocks > 0):
            raise UserError(
                f"depth.block_size = {self.block_size} and depth.blocks = {self.blocks}: one of them says how outputs "
                "are grouped; set the other to 0"
            )
        _within("block_size", self.block_size, 0, outputs, f"the model has {outputs} outputs, {kind}")
        _within("blocks", self.blocks, 0, None, "it is a number of blocks")
        _within("window", self.window, 0, outputs, f"the model has {outputs} outputs, {kind}")
        if self.window and self.block_size == 1:
            raise UserError(
                f"depth.window = {self.window} adds nothing to blocks of 1, where every output is a source already; "
                "set depth.window to 0 or depth.block_size to 2 or more"
            )
        if self.block_summary == "alternating" and (self.routing != "add" or self.source_kind != "delta"):
            raise UserError(
                "depth.block_summary = 'alternating' is made from the running sum, which is there with depth.routing: "
                "add and depth.source_kind: delta alone; set those, or choose mean or sum"
            )
        if self.query_std < 0:
            raise UserError(f"depth.query_std = {self.query_std} is a standard deviation; choose 0 or more")
        if self.query_share == "group":
            _within("query_group", self.query_group, 2, shape.layers, f"the model has {shape.layers} layers")
        _within("query_rank", self.query_rank, 0, shape.width, f"the model's width is {shape.width}")
        if self.sparse:
            _within("nearest", self.nearest, 1, None, "the newest block is always read")
            _within("every", self.every, 1, None, "1 keeps every block")
        if self.position == "linear" and self.slope <= 0:
            raise UserError(f"depth.slope = {self.slope}: a linear bias falls with distance; choose a slope above 0")
        if not 0 < self.key_fraction <= 1:
            raise UserError(
                f"depth.key_fraction = {self.key_fraction} is no fraction of the width; choose 0 to 1, 1 for all"
            )
        if self.key_rank and self.key_fraction != 1:
            raise UserError(
                f"depth.key_rank = {self.key_rank} and depth.key_fraction = {self.key_fraction} both say how wide keys "
                "are; set key_rank to 0 or key_fraction to 1.0"
            )
        _within("key_rank", self.key_rank, 0, shape.width, f"the model's width is {shape.width}")
        key_width = self.key_width(shape)
        if key_width < 1:
            raise UserError(
                f"depth.key_fraction = {self.key_fraction} leaves no coordinate of width {shape.width}; "
                "choose a larger one"
            )
        if self.position == "rotary" and key_width % 2:
            raise UserError(
                f"depth.position = 'rotary' turns pairs of coordinates, but keys have {key_width}; make it even"
            )
        if all(read.row is None for read in self.plan(shape).reads()):
            raise UserError(
                f"depth.routing = {self.routing!r} reads finished blocks only, and no block is finished "
                "before the last read; make depth.block_size smaller"
            )
        if self.read_scale == "sources" and self.routing == "add":
            raise UserError(
                "depth.read_scale = 'sources' makes reads start as the running sum, and depth.routing = 'add' adds "
                "them to it; leave out one of the two"
            )
        if self.backend != AUTO:
            self._check_backend(shape)

    def _check_backend(self, shape: Shape) -> None:
        asked = self._asks(shape)
        able = [name for name, backend in BACKENDS.items() if backend.cannot.isdisjoint(asked)]
        for ask, why in asked.items():
            if ask in BACKENDS[self.backend].cannot:
                raise UserError(
                    f"depth.backend = {self.backend!r} has no reads with {ask.value}, which {why} asks for; "
                    f"choose from: {', '.join([AUTO, *able])}"
                )

    def check_machine(self, precision: str) -> None:
        if reason := unavailable(self.backend):
            raise UserError(f"depth.backend = {self.backend!r} {reason}; 'auto' takes the fastest backend there is")
        self.check_precision(precision)

    def check_precision(self, precision: str) -> None:
        """Raise ``UserError`` where the backend named does not do a GPU's reads in ``precision``."""
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        if self.backend != AUTO and dtype not in BACKENDS[self.backend].dtypes:
            able = [name for name, backend in BACKENDS.items() if dtype in backend.dtypes]
            raise UserError(
                f"depth.backend = {self.backend!r} has no reads in fp32, which training.precision asks for; "
                f"choose from: {', '.join([AUTO, *able])}, or train in bf16"
            )

    def _asks(self, shape: Shape) -> dict[Ask, str]:
        """What the reads ask of a backend, and the option that makes them do so."""
        scaled = any(source.scale != 1 for read in self.plan(shape).reads() for source in read.sources)
        why = {
            Ask.SCALES: "depth.block_summary = 'mean'" if scaled else "",
            Ask.BIASES: "depth.position = 'linear'" if self.position == "linear" else "",
            Ask.VECTORS: "depth.position = 'rotary'" if self.position == "rotary" else "",
            Ask.NARROW_KEYS: "a key narrower than the model" if self.key_width(shape) < shape.width else "",
            Ask.TOKEN_DEPENDENT: f"depth.query_rank = {self.query_rank}" if self.query_rank else "",
            Ask.ODD_WIDTH: f"model.width = {shape.width}" if shape.width & (shape.width - 1) else "",
        }
        if self.key_gain == "block":
            why[Ask.VECTORS] = "depth.key_gain = 'block'"
        return {ask: option for ask, option in why.items() if option}

    @property
    def outputs_per_layer(self) -> int:
        return 2 if self.granularity == "sublayer" else 1

    def key_width(self, shape: Shape) -> int:
        """K: how many of a source's coordinates are its key."""
        return self.key_rank or int(self.key_fraction * shape.width)

    def plan(self, shape: Shape) -> DepthPlan:
        """Which sources each read sees in a model of ``shape``."""
        per_layer = self.outputs_per_layer
        block_size = self.block_size or per_layer * -(-shape.layers // self.blocks)
        spans = {"read": 0, "block": block_size, "group": self.query_group * per_layer, "all": shape.layers * per_layer}
        return DepthPlan(
            layers=shape.layers,
            outputs_per_layer=per_layer,
            block_size=block_size,
            mean=self.block_summary == "mean",
            window=self.window,
            nearest=self.nearest if self.sparse else 1,
            every=self.every if self.sparse else 1,
            beside_sum=self.routing == "add",
            query_span=spans[self.query_share],
            late=self.late_blocks,
        )

    def sources_per_read(self, shape: Shape) -> list[int]:
        """How many sources each read of the model sees, in order."""
        return [len(read.sources) for read in self.plan(shape).reads()]

    def learned(self, shape: Shape) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what the reads learn."""
        choosing = [read for read in self.plan(shape).reads() if read.row is not None]
        key_width = self.key_width(shape)
        gains = len(choosing)
        if self.key_gain == "block":
            gains = 1 + max(source.block for read in choosing for source in read.sources)
        learned: dict[str, tuple[int, ...]] = {
            "queries": (len({read.query_row for read in choosing}), key_width),
            "gains": (gains, key_width),
        }
        if self.query_rank:
            learned["query_down"] = (len(choosing), self.query_rank, shape.width)
            learned["query_up"] = (len(choosing), self.query_rank, key_width)
        if self.value_map:
            learned["value_map"] = (shape.width, shape.width)
        return learned

    def parameters(self, shape: Shape) -> int:
        return sum(math.prod(size) for size in self.learned(shape).values())

    def groups(self, shape: Shape) -> tuple[Group, ...]:
        """Queries and key gains apart from the maps; not decayed, where the source does not say (choice)."""
        groups = []
        for name, members in _GROUPS.items():
            count = sum(math.prod(size) for member, size in self.learned(shape).items() if member in members)
            groups.append(Group(name, rf"^stream\.({'|'.join(members)})$", count, weight_decay=0.0))
        return tuple(groups)

    def flops_per_token(self, shape: Shape, seq_len: int) -> int:
        """Per source of a read 2K for the logit, 2K for the mean square, 2D for the sum and 2RK for the
        input-dependent part of the query, whose projection takes 2RD per read; the value map 2D² per read; all three
        times, forward and backward."""
        width, key_width = shape.width, self.key_width(shape)
        forward = 0
        for read in self.plan(shape).reads():
            if read.row is not None:
                per_source = 4 * key_width + 2 * width + 2 * self.query_rank * key_width
                forward += len(read.sources) * per_source + 2 * self.query_rank * width
            if read.sources and self.value_map:
                forward += 2 * width * width
        return 3 * forward


def _within(name: str, value: int, least: int, most: int | None, why: str) -> None:
    if value < least or (most is not None and value > most):
        span = f"{least} to {most}" if most is not None else f"{least} or more"
        raise UserError(f"depth.{name} = {value}, but {why}; choose {span}")
