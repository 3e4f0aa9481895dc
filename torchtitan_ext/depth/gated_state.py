"""A gated state that passes from layer to layer beside the residual stream.

Shape suffixes: B = batch, T = tokens, D = model width, N = query heads, K = key/value heads, H = head width.

Every token carries a state M [B, T, D], zero before the first layer. A layer reads it at its attention and renews
it, GRU-style, from the input of its feed-forward::

    K' = K + W_km M            V' = V + W_vm M                          (before rotary positions; Q stays as it is)
    x ← x + A(Q, K', V')       h = n2(x)
    g = σ(W_g h)               c = tanh(W_m h)                          M ← g ⊙ M + (1 − g) ⊙ c
    x ← x + F(h)

Source: "Adding a 4th Signal to Transformer Attention" (G. Seckin 2026) and its code, a nanoGPT fork
(github.com/guvense/nanoGPT-mgate @263a17a04a, model.py). It reports, at 1.2M parameters on character-level Shakespeare:
perplexity −4.2% over 8 seeds against a model of the same size (paired t = −9.04); validation loss 1.688 for this, 1.732
for the standard model, 1.770 for the detached control (3 seeds); 9–19% more time per step; and 1.3% worse than the
standard model given the same time.

As in the code, all matrices start from a normal distribution with standard deviation 0.02, and W_kvm has no bias: W_kvm
M is small at the start because M is. The formulas of the report give the gate biases b_g and b_m; the code gives W_gm a
bias where nanoGPT's other matrices have one, which in its runs, as here, is nowhere. ``gate_bias`` adds them, zero at
the start. ``zero_start`` starts the projection at zero (ours): the model then starts as the standard one, to the bit.

Where the source is silent, or was changed:

- K and V are biased before rotary positions (choice: the source's nanoGPT has learned positions).
- The first layer has no W_kvm and the last no W_gm. The source has both, but M_0 = 0 leaves nothing to project and
  nobody reads the last M: weights that never move, and time.
- The source names four attempts and describes two. ``query`` and ``output`` stand for the other two (choice).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torchtitan.models.common import Linear

from torchtitan_ext.errors import UserError, nearest
from torchtitan_ext.ops.gated_update import gated_update
from torchtitan_ext.parameter_groups import Group
from torchtitan_ext.recipe import INIT_STD
from torchtitan_ext.sizes import Shape

from . import initial
from .connection import AttentionConnection, Connection, Stream
from .observe import note
from .variant import Variant

GatedPair = tuple[torch.Tensor, torch.Tensor]
"""The residual stream x and the state M, both [B, T, D]."""

INJECTIONS = ("key_value", "query", "output", "multiply")
"""How M enters attention: added to keys and values, to queries or to the output; or multiplied with the output."""


class MemoryRead(AttentionConnection):
    """Attention that reads M. ``projection`` is W_kvm or its like; None if the layer has none."""

    @dataclass(kw_only=True, slots=True)
    class Config(AttentionConnection.Config):
        inject: str
        around_one: bool
        projection: Linear.Config | None

    full_precision: ClassVar[bool] = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.inject, self.around_one = config.inject, config.around_one
        self.projection = config.projection.build() if config.projection is not None else None

    def open(self, state: GatedPair) -> tuple[torch.Tensor, GatedPair]:
        return state[0], state

    def before_rotation(
        self, carry: GatedPair, q_BTNH: torch.Tensor, k_BTKH: torch.Tensor, v_BTKH: torch.Tensor
    ) -> tuple[GatedPair, torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.projection is None or self.inject not in ("key_value", "query"):
            return carry, q_BTNH, k_BTKH, v_BTKH
        added = self.projection(carry[1])
        if self.inject == "query":
            return carry, q_BTNH + added.unflatten(-1, q_BTNH.shape[2:]), k_BTKH, v_BTKH
        k_added, v_added = added.chunk(2, dim=-1)
        heads = k_BTKH.shape[2:]
        return carry, q_BTNH, k_BTKH + k_added.unflatten(-1, heads), v_BTKH + v_added.unflatten(-1, heads)

    def close(self, carry: GatedPair, y_BTD: torch.Tensor) -> GatedPair:
        x_BTD, m_BTD = carry
        if self.inject == "multiply":
            y_BTD = y_BTD + y_BTD * m_BTD if self.around_one else y_BTD * m_BTD
        elif self.inject == "output" and self.projection is not None:
            y_BTD = y_BTD + self.projection(m_BTD)
        return x_BTD + y_BTD, m_BTD


class MemoryRenewal(Connection):
    """The feed-forward beside the renewal of M, both from the normalised input h. ``gate`` is W_gm; None if the layer
    leaves M as it is."""

    @dataclass(kw_only=True, slots=True)
    class Config(Connection.Config):
        detach: bool
        gate: Linear.Config | None

    full_precision: ClassVar[bool] = False
    applies_norm = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.detach = config.detach
        self.gate = config.gate.build() if config.gate is not None else None
        if self.detach and self.gate is not None:
            # Nothing but the detached reads would bring them a gradient. Frozen, they cost no backward pass, and the
            # optimizer holds no state that a run without a gradient would leave out of its checkpoint.
            self.gate.requires_grad_(False)

    def open(self, state: GatedPair) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        x_BTD, m_BTD = state
        h_BTD = self.norm(x_BTD)
        return h_BTD, (x_BTD, m_BTD, h_BTD)

    def close(self, carry: tuple[torch.Tensor, torch.Tensor, torch.Tensor], y_BTD: torch.Tensor) -> GatedPair:
        x_BTD, m_BTD, h_BTD = carry
        return x_BTD + y_BTD, self.renewed(m_BTD, h_BTD)

    def renewed(self, m_BTD: torch.Tensor, h_BTD: torch.Tensor) -> torch.Tensor:
        """M after this layer."""
        if self.gate is None:
            return m_BTD
        # Detached reads bring M no gradient, so none is recorded on the way to M: the same as detaching at each read.
        if self.detach:
            m_BTD, h_BTD = m_BTD.detach(), h_BTD.detach()
        z_BT2D = self.gate(h_BTD)
        note("gate_openness", lambda: torch.sigmoid(z_BT2D.chunk(2, dim=-1)[0].float()).mean())
        return gated_update(z_BT2D, m_BTD)


class GatedStateStream(Stream):
    """M_0 = 0; the final norm reads the residual stream."""

    @dataclass(kw_only=True, slots=True)
    class Config(Stream.Config):
        pass

    def start(self, x_BTD: torch.Tensor) -> GatedPair:
        # A product, for a constant without gradient would be a graph of its own in the first layer.
        return x_BTD, x_BTD * 0

    def finish(self, state: GatedPair) -> torch.Tensor:
        return state[0]


@dataclass(frozen=True)
class GatedState(Variant):
    """A per-token state M under a GRU-style gate, read by attention.

    Options:
        inject: ``key_value`` (W_kvm: D → 2·K·H), ``query`` (Q' = Q + W_qm M, D → N·H), ``output`` (y + W_om M after
            the output projection, D → D; choice); or ``multiply`` (y ⊙ M after the output projection; choice), which
            has no weights.
        detach: no gradient from a layer's reading of M to the layers that made it: the source's control. The forward
            pass is the same. Nothing but those reads leads to W_gm, so W_gm keeps its initial values, as it does in
            the source.
        around_one: y ⊙ (1 + M) in place of y ⊙ M, for ``multiply`` alone.
        gate_bias: W_gm has the biases b_g and b_m.
        zero_start: W_kvm, W_qm or W_om is zero at the start.

    ``multiply`` is the failure that the source documents. M_0 = 0, so the first layer's attention adds nothing and
    learns nothing for the whole of training: its gradient is zero. In the layers after it M is small (|M| ≤ (1 −
    g)|c| + g|M|, about 0.1 at width 128), so attention is nearly silenced at the start and the gradient that would
    wake it is scaled by M as well. The fix by design is ``around_one``: with it M = 0 leaves attention as it is, and
    M's sign and size say how to change it.
    """

    summary: str = "a per-token state M under a GRU-style gate, added to keys and values"
    source: str = "Seckin 2026, Adding a 4th Signal to Transformer Attention (github.com/guvense/nanoGPT-mgate)"
    inject: str = "key_value"
    detach: bool = False
    around_one: bool = False
    gate_bias: bool = False
    zero_start: bool = False

    def check(self, shape: Shape) -> None:
        if self.inject not in INJECTIONS:
            raise UserError(f"depth.inject {self.inject!r} is unknown; {nearest(self.inject, INJECTIONS)}")
        if self.around_one and self.inject != "multiply":
            raise UserError(
                f"depth.around_one changes what depth.inject: multiply does, but depth.inject is {self.inject}; "
                "leave out depth.around_one or set depth.inject: multiply"
            )
        if self.zero_start and self.inject == "multiply":
            raise UserError(
                "depth.zero_start is about the projection of M, and depth.inject: multiply has none; leave it out"
            )
        if shape.layers < 2:
            raise UserError("a gated state passes from one layer to the next; model.layers is 1, make it 2 or more")

    def _widths(self, shape: Shape) -> int:
        """Outputs of the projection of M."""
        heads = {"key_value": 2 * shape.kv_heads, "query": shape.heads, "output": shape.heads, "multiply": 0}
        return heads[self.inject] * shape.head_dim

    def connections(self, shape: Shape, layer: int) -> tuple[Connection.Config, Connection.Config]:
        projection = gate = None
        if self._widths(shape) and layer > 0:
            start = initial.zeros if self.zero_start else initial.normal(INIT_STD)
            projection = Linear.Config(
                in_features=shape.width, out_features=self._widths(shape), param_init={"weight": start}
            )
        if layer < shape.layers - 1:
            gate = Linear.Config(
                in_features=shape.width,
                out_features=2 * shape.width,
                bias=self.gate_bias,
                param_init={
                    "weight": initial.normal(INIT_STD),
                    **({"bias": initial.zeros} if self.gate_bias else {}),
                },
            )
        return (
            MemoryRead.Config(inject=self.inject, around_one=self.around_one, projection=projection),
            MemoryRenewal.Config(detach=self.detach, gate=gate),
        )

    def stream(self, shape: Shape) -> Stream.Config:
        return GatedStateStream.Config()

    def parameters(self, shape: Shape) -> int:
        projection = shape.width * self._widths(shape)
        return (shape.layers - 1) * projection + self._gates(shape)

    def _gates(self, shape: Shape) -> int:
        """Parameters of all W_gm and their biases."""
        return (shape.layers - 1) * 2 * shape.width * (shape.width + self.gate_bias)

    def starts_as_standard(self) -> bool:
        return self.zero_start

    def without_gradient(self, shape: Shape) -> int:
        """With ``detach`` the gates. With ``multiply`` the first layer's attention and its norm, since y ⊙ M_0 = 0."""
        silenced = 0
        if self.inject == "multiply" and not self.around_one:
            keys_and_values = 2 * shape.width * shape.kv_heads * shape.head_dim
            silenced = 2 * shape.width * shape.width + keys_and_values + shape.width
        return silenced + (self._gates(shape) if self.detach else 0)

    def groups(self, shape: Shape) -> tuple[Group, ...]:
        """nanoGPT's rule: matrices are decayed as all others are, biases are not."""
        biases = 2 * shape.width * (shape.layers - 1) * self.gate_bias
        return (
            Group("gate_biases", r"_connection\.gate\.bias$", biases, weight_decay=0.0),
            Group("gates", r"_connection\.(gate|projection)\.weight$", self.parameters(shape) - biases),
        )

    def flops_per_token(self, shape: Shape, seq_len: int) -> int:
        """Matrices: 2·in·out forward, and as much again for each gradient that is needed. Elementwise operations, σ and
        tanh among them: one per element forward and two backward."""
        width, out = shape.width, self._widths(shape)
        read_matrix, read_rest = 2 * width * out, out
        gate_matrix, gate_rest = 4 * width * width, (6 + 2 * self.gate_bias) * width
        # In every layer, with nothing to project.
        multiplied = (3 * shape.layers * width * (1 + self.around_one)) if self.inject == "multiply" else 0
        if self.detach:
            # A projection without the gradient of its input, a gate without a backward pass.
            per_layer = 2 * read_matrix + 3 * read_rest + gate_matrix + gate_rest
        else:
            per_layer = 3 * (read_matrix + read_rest + gate_matrix + gate_rest)
        return (shape.layers - 1) * per_layer + multiplied


NAMED: dict[str, Variant] = {
    "m_gate_kv": GatedState(),
    "m_gate_kv_detached": GatedState(
        summary="m_gate_kv without gradient across layers: the same forward pass, the source's control", detach=True
    ),
    "m_gate_multiply": GatedState(
        summary="attention output times the gated state M: the documented failure", inject="multiply"
    ),
    "m_gate_query": GatedState(summary="the gated state M added to queries", inject="query"),
    "m_gate_output": GatedState(summary="the gated state M added to the attention output", inject="output"),
}
