"""A Llama 3 decoder whose residual connection is a part of its own.

Shape suffixes: B = batch, T = tokens, D = model width.

With the standard stream and link this computes what ``torchtitan.models.llama3`` computes, to the bit and with the same
parameter names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.llama3 import Llama3Model

from . import initial
from .state import Link, Site, State, Stream


class DepthLayer(TransformerBlock):
    """Attention and feed-forward, each with a norm on its input, connected to the depth state by a link."""

    @dataclass(kw_only=True, slots=True)
    class Config(TransformerBlock.Config):
        link: Link.Config

    sublayers: ClassVar[tuple[str, ...]] = ("attention_sublayer", "feed_forward_sublayer")
    """The methods to compile when the whole layer cannot be one graph."""
    kernels: ClassVar[tuple[str, ...]] = ()
    """Then also to be compiled, but not checkpointed: functions that run where no gradient is recorded."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.feed_forward is not None
        self.attention = config.attention.build()
        self.feed_forward = config.feed_forward.build()
        self.attention_norm = config.attention_norm.build()
        self.ffn_norm = config.ffn_norm.build()
        self.link = config.link.build()

    @property
    def regions(self) -> tuple[str, ...]:
        """The methods that are compiled, each as one full graph shared by all layers."""
        return self.sublayers if self.link.in_sublayers else ("forward",)

    def attention_sublayer(
        self, x_BTD: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None
    ) -> torch.Tensor:
        return self.attention(self.attention_norm(x_BTD), attention_masks, positions)

    def feed_forward_sublayer(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.feed_forward(self.ffn_norm(x_BTD))

    def forward(self, state: State, attention_masks: Any, positions: torch.Tensor | None = None) -> State:
        x_BTD = self.link.read(state, Site.ATTENTION)
        y_BTD = self.attention_sublayer(x_BTD, attention_masks, positions)
        state = self.link.write(state, Site.ATTENTION, x_BTD, y_BTD)
        x_BTD = self.link.read(state, Site.FEED_FORWARD)
        y_BTD = self.feed_forward_sublayer(x_BTD)
        return self.link.write(state, Site.FEED_FORWARD, x_BTD, y_BTD)


class DepthDecoder(Llama3Model):
    """Embeddings, a stack of layers that hand a depth state along, a final norm and the output head.

    ``make_mask`` turns positions [B, T] into the attention mask of a backend that torchtitan's trainer builds none for,
    or is None where attention is causal over the whole window.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        stream: Stream.Config
        seed: int = 0
        depth_parameters: int = 0
        depth_flops_per_token: int = 0
        make_mask: Callable[[torch.Tensor], Any] | None = None

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            # Named bases: dataclass(slots=True) makes a new class, which breaks the two-argument form of super().
            Llama3Model.Config.update_from_config(self, config=config, **kwargs)
            self.seed = config.debug.seed or 0

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Parameters, and training FLOPs per token: torchtitan's count for the standard part, which takes 6 for
            every
            parameter, and the variant's own count for what it adds."""
            parameters, flops = Llama3Model.Config.get_nparams_and_flops(self, model, seq_len)
            return parameters, flops - 6 * self.depth_parameters + self.depth_flops_per_token

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.stream = config.stream.build()
        for layer in self.layers.values():
            layer.link.connect(self.stream)
        initial.bind(self, config.seed)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor | None = None, attention_masks: Any = None
    ) -> torch.Tensor:
        if attention_masks is None and positions is not None and self.config.make_mask is not None:
            attention_masks = self.config.make_mask(positions)
        state = self.stream.start(self.tok_embeddings(tokens))
        for layer in self.layers.values():
            state = layer(state, attention_masks, positions)
        h_BTD = self.norm(self.stream.finish(state))
        return h_BTD if self._skip_lm_head else self.lm_head(h_BTD)
