"""A model of torchtitan-ext with a variant of the residual connection, for ``transformers``.

``depth export`` puts this file beside the weights; it needs torchtitan-ext installed, which holds the model itself::

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

Shape suffixes: B = batch, T = tokens, V = vocabulary.
"""

import dataclasses
from typing import Any

import torch
from torch import nn
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import QKVLinear
from torchtitan.models.common.rope import RoPE
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from torchtitan_ext.depth.architecture import Architecture
from torchtitan_ext.depth.attention import FusedAttention, document_mask
from torchtitan_ext.depth.build import decoder_config
from torchtitan_ext.depth.decoder import DepthDecoder
from torchtitan_ext.sizes import Shape


class DepthConfig(PretrainedConfig):
    """``config.json``: a shape by torchtitan-ext's names, and what its ``facts.json`` says of the architecture."""

    model_type = "torchtitan_ext"
    attribute_map = {  # noqa: RUF012  transformers reads it off the class
        "num_hidden_layers": "layers",
        "hidden_size": "width",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "intermediate_size": "ffn_width",
    }

    layers: int = 4
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    ffn_width: int = 192
    vocab_size: int = 512
    tie_word_embeddings: bool = True
    block: str = "llama"
    architecture: dict | None = None
    max_position_embeddings: int = 2048


def build(config: DepthConfig) -> DepthDecoder:
    """The decoder that ``config`` describes. Its query, key and value projections are apart, as in the files."""
    names = ("layers", "width", "heads", "kv_heads", "ffn_width", "vocab_size")
    positions = 0 if config.block == "llama" else config.max_position_embeddings
    numbers = {name: getattr(config, name) for name in names}
    shape = Shape(**numbers, tied=config.tie_word_embeddings, block=config.block, positions=positions)
    architecture = Architecture.described({"variant": "standard", **(config.architecture or {})}, "config.json")
    model = decoder_config(
        shape,
        architecture.variant,
        architecture.attention,
        seq_len=config.max_position_embeddings,
        inner_attention=FusedAttention.Config(),
    )
    for layer in model.layers:
        attention = layer.attention
        attention.rope = dataclasses.replace(attention.rope, max_seq_len=config.max_position_embeddings)
        attention.qkv_linear = QKVLinear.Config(
            head_dim=shape.head_dim,
            wq=Linear.Config(in_features=shape.width, out_features=shape.width, bias=shape.biases),
            wkv=Linear.Config(in_features=shape.width, out_features=shape.kv_heads * shape.head_dim, bias=shape.biases),
        )
    return model.build()


class DepthForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model. It keeps no keys and values: each new token reads all before it again."""

    config_class = DepthConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _tied_weights_keys = {"model.lm_head.weight": "model.tok_embeddings.weight"}  # noqa: RUF012  see DepthConfig

    def __init__(self, config: DepthConfig) -> None:
        super().__init__(config)
        self.model = build(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        # All weights come from the file, but what is computed once has no place there.
        if isinstance(module, RoPE):
            module._init_self_buffers()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.tok_embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.model.lm_head

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **loss_options: Any,
    ) -> CausalLMOutput | tuple:
        """Logits [B, T, V] for ``input_ids`` [B, T]; with ``labels`` [B, T] (-100: not counted) the mean loss too.

        ``attention_mask`` [B, T] is 0 where a row is filled up. Raises ``ValueError`` for more tokens than
        ``max_position_embeddings``.
        """
        longest = self.config.max_position_embeddings
        if input_ids.shape[1] > longest:
            raise ValueError(f"{input_ids.shape[1]} tokens are more than config.max_position_embeddings, {longest}")
        positions_BT = mask_B1TT = None
        if attention_mask is not None and not bool(attention_mask.all()):
            # A row begins at position 0 behind what fills it up, and does not look back past its beginning.
            positions_BT = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
            mask_B1TT = document_mask(positions_BT)
        logits_BTV = self.model(input_ids, positions=positions_BT, attention_masks=mask_B1TT)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits_BTV, labels, vocab_size=self.config.vocab_size, **loss_options)
        output = CausalLMOutput(loss=loss, logits=logits_BTV)
        return output if return_dict in (None, True) else output.to_tuple()

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **unused: Any
    ) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": attention_mask}
