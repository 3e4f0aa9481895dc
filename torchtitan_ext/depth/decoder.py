"""A decoder whose residual connection is a part of its own: Llama 3's, or one with GPT-2's blocks.

Shape suffixes: B = batch, T = tokens, D = model width.

With Llama's block and the standard stream and connections this computes what ``torchtitan.models.llama3`` computes, to
the bit and with the same parameter names.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.models.common import Embedding
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.llama3 import Llama3Model

from . import initial
from .author_rules import check_learned
from .connection import QKV, AttentionConnection, Connection, State, Stream, SublayerInput
from .schedule import ChangingSchedule, Schedule
from .staged_attention import Projected, Rotated, StagedAttention


class DepthLayer(TransformerBlock):
    """Attention and feed-forward, each with a norm on its input, joined to the depth state by a connection each."""

    @dataclass(kw_only=True, slots=True)
    class Config(TransformerBlock.Config):
        attention_connection: Connection.Config
        feed_forward_connection: Connection.Config

    attention: StagedAttention
    attention_connection: Connection
    feed_forward_connection: Connection

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.feed_forward is not None
        self.attention = config.attention.build()
        self.feed_forward = config.feed_forward.build()
        self.attention_norm = config.attention_norm.build()
        self.ffn_norm = config.ffn_norm.build()
        self.attention_connection = config.attention_connection.build()
        self.feed_forward_connection = config.feed_forward_connection.build()

    @property
    def connections(self) -> tuple[Connection, Connection]:
        return self.attention_connection, self.feed_forward_connection

    def connect(self, stream: Stream) -> None:
        self.attention_connection.connect(stream, self.attention_norm)
        self.feed_forward_connection.connect(stream, self.ffn_norm)

    @property
    def sublayers(self) -> tuple[str, ...]:
        """The methods to compile where the whole layer cannot be one graph: what no connection takes part in."""
        connection = self.attention_connection
        if not isinstance(connection, AttentionConnection):
            return "attention_sublayer", "feed_forward_sublayer"
        before = ("project", "rotate") if _acts_before_rotation(connection) else ("project_and_rotate",)
        return *before, "feed_forward_sublayer"

    def attention_sublayer(
        self, x: SublayerInput, attention_masks: Any, positions: torch.Tensor | None
    ) -> torch.Tensor:
        return self.attention(self._attention_input(x), attention_masks, positions)

    def project(self, x: SublayerInput) -> Projected:
        return self.attention.project(self._attention_input(x))

    def rotate(self, projected: Projected, positions: torch.Tensor | None) -> Rotated:
        return self.attention.rotate(projected, positions)

    def project_and_rotate(self, x: SublayerInput, positions: torch.Tensor | None) -> Rotated:
        return self.attention.project_and_rotate(self._attention_input(x), positions)

    def feed_forward_sublayer(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.feed_forward(x_BTD if self.feed_forward_connection.applies_norm else self.ffn_norm(x_BTD))

    def _attention_input(self, x: SublayerInput) -> SublayerInput:
        if self.attention_connection.applies_norm:
            return x
        return QKV(*map(self.attention_norm, x)) if isinstance(x, QKV) else self.attention_norm(x)

    def _attend_with(
        self,
        connection: AttentionConnection,
        x: SublayerInput,
        carry: State,
        attention_masks: Any,
        positions: torch.Tensor | None,
    ) -> tuple[State, torch.Tensor]:
        """Attention in which a connection acts: the carry and the output [B, T, D]."""
        if _acts_before_rotation(connection):
            projected = self.project(x)
            carry, q_BTNH, k_BTKH, v_BTKH = connection.before_rotation(carry, *projected.qkv)
            rotated = self.rotate(projected._replace(qkv=QKV(q_BTNH, k_BTKH, v_BTKH)), positions)
        else:
            rotated = self.project_and_rotate(x, positions)
        carry, q_BTNH, k_BTKH, v_BTKH = connection.after_rotation(carry, *rotated.qkv, rotated.unrotated_BTKH)
        heads_BTNH = self.attention.attend(connection, carry, q_BTNH, k_BTKH, v_BTKH, attention_masks)
        return carry, self.attention.output(heads_BTNH, rotated.gates_BTNH)

    def forward(self, state: State, attention_masks: Any, positions: torch.Tensor | None = None) -> State:
        connection = self.attention_connection
        x, carry = connection.open(state)
        if isinstance(connection, AttentionConnection):
            carry, y_BTD = self._attend_with(connection, x, carry, attention_masks, positions)
        else:
            y_BTD = self.attention_sublayer(x, attention_masks, positions)
        state = connection.close(carry, y_BTD)
        x_BTD, carry = self.feed_forward_connection.open(state)
        return self.feed_forward_connection.close(carry, self.feed_forward_sublayer(x_BTD))


def _acts_before_rotation(connection: AttentionConnection) -> bool:
    return type(connection).before_rotation is not AttentionConnection.before_rotation


class DepthDecoder(Llama3Model):
    """Embeddings, a stack of layers that hand a depth state along, a final norm and the output head.

    ``schedules`` are the orders in which layers may be applied, the first of them at the start of training; a layer may
    stand in one several times. ``variant`` and ``attention`` are the names of their classes, for messages.
    ``make_mask`` turns positions [B, T] into the attention mask of a backend that torchtitan's trainer builds none for,
    or is None where attention is causal over the whole window.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        stream: Stream.Config
        schedules: tuple[Schedule, ...]
        changing_schedule: ChangingSchedule.Config | None = None
        variant: str
        attention: str
        seed: int = 0
        depth_parameters: int = 0
        attention_parameters: int = 0
        position_embeddings: Embedding.Config | None = None
        added_flops_per_token: int = 0
        make_mask: Callable[[torch.Tensor], Any] | None = None

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            # Named bases: dataclass(slots=True) makes a new class, which breaks the two-argument form of super().
            # Llama's own also says how tensor parallelism would split its layers, which others' parts do not fit.
            base = Llama3Model.Config if self.position_embeddings is None else Decoder.Config
            base.update_from_config(self, config=config, **kwargs)
            self.seed = config.debug.seed or 0

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Parameters, and training FLOPs per token: torchtitan's count for the standard part, which takes 6 for
            every parameter, and the own counts of variant and attention for what they add."""
            parameters, flops = Llama3Model.Config.get_nparams_and_flops(self, model, seq_len)
            unlike = self.depth_parameters + self.attention_parameters
            if self.position_embeddings is not None and self.enable_weight_tying:
                # No matrix product either; torchtitan leaves embeddings out where none is tied.
                unlike += self.position_embeddings.num_embeddings * self.dim
            return parameters, flops - 6 * unlike + self.added_flops_per_token

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        positions = config.position_embeddings
        self.position_embeddings = None if positions is None else positions.build()
        changing = config.changing_schedule
        self.changing_schedule = None if changing is None else changing.build()
        self.stream = config.stream.build()
        for layer in self.layers.values():
            layer.connect(self.stream)
        check_learned(config.variant, self.ends(), config.depth_parameters)
        attentions = {f"layers.{number}.attention": layer.attention for number, layer in self.layers.items()}
        check_learned(config.attention, attentions, config.attention_parameters, standard=("qkv_linear", "wo"))
        initial.bind(self, config.seed)

    def ends(self) -> dict[str, Stream | Connection]:
        """The stream and all connections, by name: everything that a variant adds."""
        return {"stream": self.stream} | {
            f"layers.{number}.{name}": getattr(layer, name)
            for number, layer in self.layers.items()
            for name in ("attention_connection", "feed_forward_connection")
        }

    def applied(self, schedule: Schedule | None = None) -> Iterator[DepthLayer]:
        """The layers in the order in which they are applied, by default now."""
        if schedule is None:
            number = 0 if self.changing_schedule is None else self.changing_schedule.number
            schedule = self.config.schedules[number]
        return (self.layers[str(number)] for number in schedule)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor | None = None, attention_masks: Any = None
    ) -> torch.Tensor:
        if attention_masks is None and positions is not None and self.config.make_mask is not None:
            attention_masks = self.config.make_mask(positions)
        x_BTD = self.tok_embeddings(tokens)
        if self.position_embeddings is not None:
            where = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
            x_BTD = x_BTD + self.position_embeddings(where)
        state = self.stream.start(x_BTD)
        for layer in self.applied():
            state = layer(state, attention_masks, positions)
        h_BTD = self.norm(self.stream.finish(state))
        return h_BTD if self._skip_lm_head else self.lm_head(h_BTD)
