"""Cheap depth controls: what a few scalars do for a residual stream, as rows beside the depth variants.

Shape suffixes: B = batch, T = tokens, D = model width, K = key/value heads, H = head width.

These are controls of modded-nanogpt and nanochat. Their scalars are one-element vectors, since FSDP shards no
zero-dimensional parameters.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan_ext.errors import UserError, nearest
from torchtitan_ext.parameter_groups import Group
from torchtitan_ext.sizes import Shape

from . import initial, skips
from .connection import AttentionConnection, Connection, Stream
from .pair import Pair, PairConnection, PairStream
from .variant import Variant

EMBEDDING_EPS = 1e-6
"""Added to an embedding's mean square, which is 4e-4 at the start. The sources leave PyTorch's default, which is up to
0.008 in bf16 but small beside their embeddings, drawn with standard deviation 0.8 or 1."""

ValuePair = tuple[torch.Tensor, torch.Tensor | None]
"""The residual stream x [B, T, D], and the first layer's values [B, T, K, H] once there are any."""


# Residual scalars


class ScaledConnection(PairConnection):
    """x ← λ x + μ x_0 before attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(PairConnection.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.residual_scale = nn.Parameter(torch.empty(1))
        self.embedding_scale = nn.Parameter(torch.empty(1))

    def open(self, state: Pair) -> tuple[torch.Tensor, Pair]:
        x_BTD, embedding_BTD = state
        x_BTD = (self.residual_scale * x_BTD + self.embedding_scale * embedding_BTD).to(x_BTD.dtype)
        return x_BTD, (x_BTD, embedding_BTD)


class ScaledStream(PairStream):
    """x_0, which is also where the residual stream starts, is the embedding, normalised if ``normalize``."""

    @dataclass(kw_only=True, slots=True)
    class Config(PairStream.Config):
        normalize: bool

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.normalize = config.normalize

    def start(self, x_BTD: torch.Tensor) -> Pair:
        return super().start(F.rms_norm(x_BTD, x_BTD.shape[-1:], eps=EMBEDDING_EPS) if self.normalize else x_BTD)


@dataclass(frozen=True)
class ResidualScalars(Variant):
    """x ← λ_l x + μ_l x_0 before layer l; x_0 is the RMS-normalised embedding, from which x starts too.

    Sources: ``residual_scalars`` is modded-nanogpt's, records/track_1_short/2024-11-06_ShortcutsTweaks ("embed
    shortcut"): λ = 1, μ = 0 at the start, both trained by Adam at 0.02 without decay, beside 0.02 for the matrices.
    ``x0_lambdas`` is nanochat's, nanochat/gpt.py @92d63d4e8b: from the first layer to the last λ falls from 1.15 to
    1.05 and μ from 0.20 to 0.05; Adam at 0.005 for λ, with decay 0.05, and at 0.5 for μ, without. Its dev/LOG.md,
    2026-01-11, reports −0.010, −0.008, −0.006 and −0.004 validation bits per byte at 8, 12, 16 and 20 layers.

    In both, models without the scalars normalise the embedding as well; the standard model here does not. With
    ``normalize`` false x_0 is the embedding as the standard model has it (ours), and with λ = 1 and μ = 0 the model
    then starts as the standard one, to the bit.

    Options: λ and μ at the start, in the first layer (``residual_start``, ``embedding_start``) and in the last
    (``residual_end``, ``embedding_end``), with equal steps in between; ``normalize``.
    """

    summary: str = "x ← λ x + μ x_0 before each layer, x_0 the normalised embedding; λ = 1, μ = 0 at the start"
    source: str = "modded-nanogpt 2024-11-06"
    rates: tuple[tuple[str, float], ...] = (("residual_scales.lr", 0.02), ("embedding_scales.lr", 0.02))
    residual_start: float = 1.0
    residual_end: float = 1.0
    embedding_start: float = 0.0
    embedding_end: float = 0.0
    normalize: bool = True

    def connections(self, shape: Shape, layer: int) -> tuple[Connection.Config, Connection.Config]:
        depth = layer / max(shape.layers - 1, 1)
        starts = {
            "residual_scale": self.residual_start + depth * (self.residual_end - self.residual_start),
            "embedding_scale": self.embedding_start + depth * (self.embedding_end - self.embedding_start),
        }
        param_init = {name: initial.constant(value) for name, value in starts.items()}
        return ScaledConnection.Config(param_init=param_init), PairConnection.Config()

    def stream(self, shape: Shape) -> Stream.Config:
        return ScaledStream.Config(normalize=self.normalize)

    def starts_as_standard(self) -> bool:
        residual, embedding = {self.residual_start, self.residual_end}, {self.embedding_start, self.embedding_end}
        return not self.normalize and residual == {1.0} and embedding == {0.0}

    def parameters(self, shape: Shape) -> int:
        return 2 * shape.layers

    def groups(self, shape: Shape) -> tuple[Group, ...]:
        names = {"residual_scales": "residual_scale", "embedding_scales": "embedding_scale"}
        return tuple(
            Group(group, rf"_connection\.{name}$", shape.layers, weight_decay=0.0) for group, name in names.items()
        )

    def flops_per_token(self, shape: Shape, seq_len: int) -> int:
        """Two multiplications and an addition per element and layer, and three operations per element for the norm;
        three times that with the backward pass."""
        return 3 * (shape.layers + self.normalize) * 3 * shape.width


# Value residual


FORMS: dict[str, tuple[float, float]] = {
    "identity": (0.5, 0.5),
    "constant": (2.0, 1.0),
    "learnable": (0.5, 0.5),
    "sparse": (5.0, 1.0),
    "learned_share": (0.5, 0.5),
}
"""λ_1 and λ_2, at the start if they are learned, by the form's name."""


class ValueConnection(AttentionConnection):
    """V' = λ_1 V_1 + λ_2 V, with V_1 the first layer's values; of a layer that has no λ, V' = V.

    ``weights`` are λ_1 and λ_2 where they are fixed; where they are learned, ``learned`` says which: "both", or the
    "share" λ_1, which leaves λ_2 = 1 − λ_1.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AttentionConnection.Config):
        weights: tuple[float, float] | None = None
        learned: str = ""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.fixed, self.learned = config.weights, config.learned
        if self.learned == "both":
            self.first_scale, self.own_scale = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
        elif self.learned == "share":
            self.mix = nn.Parameter(torch.empty(1))

    def open(self, state: ValuePair) -> tuple[torch.Tensor, ValuePair]:
        return state[0], state

    def before_rotation(
        self, carry: ValuePair, q_BTNH: torch.Tensor, k_BTKH: torch.Tensor, v_BTKH: torch.Tensor
    ) -> tuple[ValuePair, torch.Tensor, torch.Tensor, torch.Tensor]:
        x_BTD, first_BTKH = carry
        if first_BTKH is None:
            return (x_BTD, v_BTKH), q_BTNH, k_BTKH, v_BTKH
        if self.learned == "both":
            first, own = self.first_scale, self.own_scale
        elif self.learned == "share":
            first, own = self.mix, 1 - self.mix
        elif self.fixed is not None:
            first, own = self.fixed
        else:
            return carry, q_BTNH, k_BTKH, v_BTKH
        return carry, q_BTNH, k_BTKH, (own * v_BTKH + first * first_BTKH).to(v_BTKH.dtype)

    def close(self, carry: ValuePair, y_BTD: torch.Tensor) -> ValuePair:
        return carry[0] + y_BTD, carry[1]


class ValueStream(Stream):
    """There are no values at the start; the final norm reads the residual stream."""

    @dataclass(kw_only=True, slots=True)
    class Config(Stream.Config):
        pass

    def start(self, x_BTD: torch.Tensor) -> ValuePair:
        return x_BTD, None

    def finish(self, state: ValuePair) -> torch.Tensor:
        return state[0]


@dataclass(frozen=True)
class ValueResidual(Variant):
    """V'_l = λ_1 V_1 + λ_2 V_l in every layer after the first, V_1 the first layer's values.

    Source: Zhou et al., arXiv 2410.17897. ``value_residual`` is what their code computes
    (github.com/Zcchill/Value-Residual-Learning @95652f64ab, modeling_llama_resformer.py): λ_1 = λ_2 = ½, fixed.

    Options:
        form: "identity" is the code's. The paper's others: "constant", λ_1 = 2, λ_2 = 1, fixed; "learnable", both
            learned in each layer, ½ at the start; "sparse", λ_1 = 5, λ_2 = 1, fixed, in the last 3/8 of the layers
            alone (the paper's best: layers 6 to 8 of 8; the share is our reading). "learned_share" is modded-nanogpt's
            (``value_residual_learned``; records/track_1_short/2024-11-06_ShortcutsTweaks): one λ_1 is learned in each
            layer, by Adam at 0.02 without decay, beside 0.02 for the matrices, and λ_2 = 1 − λ_1.
        start: λ_1 of "learned_share" at the start; at 0 the model starts as the standard one, to the bit.

    The paper's validation losses at 82M parameters and 20B tokens, as others quote them: 2.739 for the standard model,
    2.712 "identity", 2.705 "learnable", 2.700 "constant", 2.687 "sparse". Its abstract reports the standard model's
    loss with 16.1% fewer parameters or 20.3% fewer tokens, for a further form which is not here.
    """

    summary: str = "half of the first layer's values and half of its own, in every later layer"
    source: str = "Zhou et al., arXiv 2410.17897 (ResFormer)"
    form: str = "identity"
    start: float = 0.5

    def check(self, shape: Shape) -> None:
        if self.form not in FORMS:
            raise UserError(f"depth.form {self.form!r} is unknown; {nearest(self.form, FORMS)}")
        if self.start != type(self).start and self.form != "learned_share":
            raise UserError(
                f"depth.start = {self.start} has no effect without depth.form: learned_share; set that, or leave it out"
            )
        if shape.layers < 2:
            raise UserError(
                "a value residual goes from the first layer to later ones; model.layers is 1, make it 2 or more"
            )

    def connections(self, shape: Shape, layer: int) -> tuple[Connection.Config, Connection.Config]:
        return self._attention(shape, layer), PairConnection.Config()

    def _attention(self, shape: Shape, layer: int) -> ValueConnection.Config:
        if layer not in self._mixing(shape):
            return ValueConnection.Config()
        first, own = FORMS[self.form]
        if self.form == "learned_share":
            return ValueConnection.Config(learned="share", param_init={"mix": initial.constant(self.start)})
        if self.form == "learnable":
            starts = {"first_scale": initial.constant(first), "own_scale": initial.constant(own)}
            return ValueConnection.Config(learned="both", param_init=starts)
        return ValueConnection.Config(weights=(first, own))

    def _mixing(self, shape: Shape) -> range:
        """The layers that mix the first layer's values in."""
        few = max(1, min(shape.layers - 1, round(3 / 8 * shape.layers)))
        return range(shape.layers - few if self.form == "sparse" else 1, shape.layers)

    def starts_as_standard(self) -> bool:
        return self.form == "learned_share" and self.start == 0.0

    def stream(self, shape: Shape) -> Stream.Config:
        return ValueStream.Config()

    def groups(self, shape: Shape) -> tuple[Group, ...]:
        """The paper's code has one AdamW for all parameters, and so decays what "learnable" learns."""
        decay = None if self.form == "learnable" else 0.0
        pattern = r"_connection\.(mix|first_scale|own_scale)$"
        return (Group("value_scales", pattern, self.parameters(shape), weight_decay=decay),)

    def parameters(self, shape: Shape) -> int:
        return {"learnable": 2, "learned_share": 1}.get(self.form, 0) * (shape.layers - 1)

    def flops_per_token(self, shape: Shape, seq_len: int) -> int:
        """Two multiplications and an addition per value and mixing layer; three times that with the backward pass."""
        return 3 * len(self._mixing(shape)) * 3 * shape.kv_heads * shape.head_dim


NAMED: dict[str, Variant] = {
    "residual_scalars": ResidualScalars(),
    "x0_lambdas": ResidualScalars(
        summary="x ← λ x + μ x_0 before each layer, x_0 the normalised embedding; λ from 1.15, μ from 0.2 at the start",
        source="nanochat gpt.py; its log: -0.010 to -0.004 validation bits per byte from 8 to 20 layers",
        residual_start=1.15,
        residual_end=1.05,
        embedding_start=0.2,
        embedding_end=0.05,
        rates=(("residual_scales.lr", 0.005), ("residual_scales.weight_decay", 0.05), ("embedding_scales.lr", 0.5)),
    ),
    "value_residual": ValueResidual(),
    "value_residual_learned": ValueResidual(
        summary="the first layer's values mixed into every later layer's, with one learned share per layer",
        source="modded-nanogpt 2024-11-06, after Zhou et al., arXiv 2410.17897",
        form="learned_share",
        rates=(("value_scales.lr", 0.02),),
    ),
    **skips.NAMED,
}
