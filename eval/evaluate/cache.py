"""Decoding with a key/value cache, for every variant.

Shape suffixes: B = batch, T = new tokens, S = all tokens so far, N = query heads, K = key/value heads, G = query heads
per key/value head, H = head width, V = vocabulary.

Whatever replaces the residual connection, a token's depth state is made from that token alone; tokens meet only in the
softmax over the sequence. So the keys and values of each layer's inner attention, one pair for each time that the layer
is applied, are all that later tokens need of earlier ones, as in a standard decoder, and the cache sits there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchtitan.models.common.attention import FlexAttention

from torchtitan_ext.depth.decoder import DepthDecoder


class CachedDecoder:
    """A decoder that is given new tokens only and remembers the earlier ones' keys and values."""

    def __init__(self, model: DepthDecoder) -> None:
        self.model = model
        self.document_BS: torch.Tensor | None = None
        self.allowed_BTS = torch.empty(0)
        self.calls = 0

    @torch.no_grad()
    def __call__(self, tokens_BT: torch.Tensor, positions_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] of new tokens behind all that came in earlier calls.

        ``positions_BT`` are those of the rotary embedding. A position of 0 begins a document, and nothing before it is
        attended to from there on; that is also how rows of different lengths are filled up on the left.
        """
        before_BS = self.document_BS
        document_BT = (positions_BT == 0).cumsum(dim=1)
        if before_BS is not None:
            document_BT = document_BT + before_BS[:, -1:]
            self.document_BS = torch.cat([before_BS, document_BT], dim=1)
        else:
            self.document_BS = document_BT
        new, total = document_BT.shape[1], self.document_BS.shape[1]
        same_BTS = document_BT[:, :, None] == self.document_BS[:, None, :]
        self.allowed_BTS = same_BTS.tril(diagonal=total - new)
        self.calls += 1
        return self.model(tokens_BT, positions=positions_BT)


@contextmanager
def cached(model: DepthDecoder) -> Iterator[CachedDecoder]:
    """``model`` with an empty cache, until the end of the block."""
    decoder = CachedDecoder(model)
    layers = list(model.layers.values())
    uncached = [layer.attention.inner_attention for layer in layers]
    try:
        for layer in layers:
            layer.attention.inner_attention = CachedAttention(decoder)
        yield decoder
    finally:
        for layer, attention in zip(layers, uncached, strict=True):
            layer.attention.inner_attention = attention


class CachedAttention(FlexAttention):
    """An inner attention over the new and all earlier keys and values.

    A ``FlexAttention`` by its interface alone: it hands its log-sum-exp on to an ``out_transform``, which is what
    mixture-of-depths attention asks of one. Scores and softmax are in fp32, or in fp64 for fp64 inputs.
    """

    def __init__(self, decoder: CachedDecoder) -> None:
        super().__init__(FlexAttention.Config())
        self.decoder = decoder
        self.call = self.applications = 0
        """How often the layer has been applied in which call of the decoder."""
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Keys and values [B, S, K, H] of each application."""

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """Return [B, T, N, H]; the argument names are those of torchtitan's inner attentions (L stands for T there)."""
        if self.call != self.decoder.calls:
            self.call, self.applications = self.decoder.calls, 0
        k_BSKH, v_BSKH = k_BLNH, v_BLNH
        if self.applications < len(self.kept):
            earlier = self.kept[self.applications]
            k_BSKH, v_BSKH = torch.cat([earlier[0], k_BLNH], dim=1), torch.cat([earlier[1], v_BLNH], dim=1)
        self.kept[self.applications : self.applications + 1] = [(k_BSKH, v_BSKH)]
        self.applications += 1
        wide = torch.promote_types(q_BLNH.dtype, torch.float32)
        scale = q_BLNH.shape[-1] ** -0.5 if scale is None else scale
        q_BTKGH = q_BLNH.unflatten(2, (k_BSKH.shape[2], -1)).to(wide) * scale
        scores_BTKGS = torch.einsum("btkgh,bskh->btkgs", q_BTKGH, k_BSKH.to(wide))
        scores_BTKGS = scores_BTKGS.masked_fill(~self.decoder.allowed_BTS[:, :, None, None], -torch.inf)
        out_BTKGH = torch.einsum("btkgs,bskh->btkgh", scores_BTKGS.softmax(-1), v_BSKH.to(wide))
        out_BLNH = out_BTKGH.flatten(2, 3).to(q_BLNH.dtype)
        if out_transform is None:
            return out_BLNH
        return out_transform(out_BLNH, scores_BTKGS.logsumexp(-1).flatten(2))
