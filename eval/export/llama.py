"""The standard model as ``transformers``' Llama: its ``config.json`` and its weights, both ways.

Both are the same function. The names of the weights differ, and the order of the rows of the query and key matrices:
torchtitan rotates neighbouring pairs of a head's channels, ``transformers`` channel i with channel i + H/2, H the head
dimension. torchtitan's own adapter for Llama 3 (``torchtitan/models/llama3/state_dict_adapter.py``) maps both.
"""

from pathlib import Path
from typing import Any

import torch
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

from torchtitan_ext.depth.architecture import Architecture
from torchtitan_ext.depth.attention import FusedAttention
from torchtitan_ext.depth.attentions import Attention
from torchtitan_ext.depth.block import ROPE_THETA
from torchtitan_ext.depth.build import decoder_config
from torchtitan_ext.depth.decoder import DepthDecoder
from torchtitan_ext.depth.variant import Variant
from torchtitan_ext.errors import UserError
from torchtitan_ext.sizes import Shape

Weights = dict[str, torch.Tensor]

SHAPE_KEYS = {
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn_width",
}
"""Keys of a Llama ``config.json`` → names in a `Shape`, which are those of a run file's ``model`` section."""
DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
"""What ``LlamaConfig`` takes for a missing key, where that is not what this project's decoder has."""


def is_standard(shape: Shape, architecture: Architecture) -> bool:
    """Whether a model of ``shape`` and ``architecture`` is a plain Llama."""
    return shape.is_llama and type(architecture.variant) is Variant and type(architecture.attention) is Attention


def standard_config(shape: Shape) -> DepthDecoder.Config:
    return decoder_config(shape, Variant(), seq_len=1, inner_attention=FusedAttention.Config())


def to_llama(model: DepthDecoder) -> Weights:
    """The weights of a standard model under Llama's names; a tied head is left out."""
    return Llama3StateDictAdapter(model.config, None).to_hf(model.state_dict())


def from_llama(weights: Weights, shape: Shape, where: Path) -> Weights:
    """Llama weights as the state dict of the standard model of ``shape``, in fp32.

    Raises:
        UserError: a tensor is missing, too much, of another shape or not finite.
    """
    with torch.device("meta"):
        decoder = standard_config(shape).build()
    expected = to_llama(decoder)
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    embedding, head = weights.get("model.embed_tokens.weight"), weights.get("lm_head.weight")
    if shape.tied and embedding is not None and head is not None:
        if not torch.equal(embedding, head):
            raise UserError(f"{where}: lm_head.weight is not the embedding, and this project's models tie the two")
        del weights["lm_head.weight"]
    for name in expected:
        if name not in weights:
            raise UserError(f"{where} has no tensor {name}; its config.json asks for it")
    for name, tensor in weights.items():
        if name not in expected:
            raise UserError(f"{where}: {name} is no weight of a Llama model that this project's decoder can hold")
        given, wanted = list(tensor.shape), list(expected[name].shape)
        if given != wanted:
            raise UserError(f"{where}: {name} has the shape {given}, and by config.json it has {wanted}")
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise UserError(f"{where}: {name} is not made of finite floating-point numbers; it cannot be trained on")
    adapter = Llama3StateDictAdapter(decoder.config, None)
    return adapter.from_hf({name: tensor.float() for name, tensor in weights.items()})


def config_of(shape: Shape, seq_len: int) -> dict[str, Any]:
    """The keys of ``config.json`` that make ``LlamaForCausalLM`` compute what the standard model of ``shape`` does."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **{key: getattr(shape, name) for key, name in SHAPE_KEYS.items()},
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": seq_len,
        **_fixed(shape),
    }


def check_config(config: dict[str, Any], shape: Shape, vocab_size: int, where: Path) -> None:
    """Raise ``UserError``, naming the key, for a ``config.json`` whose model this project's decoder cannot hold, or
    whose shape is not ``shape``; ``vocab_size`` is the one of the data, without padding."""
    if not shape.is_llama:
        raise UserError(f"{where}: a Llama cannot be imported into a run with model.block {shape.block}; use llama")
    if config.get("model_type") != "llama":
        raise UserError(f"{where}: model_type is {config.get('model_type')!r}; only 'llama' can be imported")
    # transformers 5 keeps what belongs to rotary positions in a section of its own, older ones the scaling alone.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    if kind != "default":
        section = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        raise UserError(f"{where}: {section} asks for {kind!r}; this project's decoder scales no rotary positions")
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            config = {**config, name: rope[name]}
    if config.get("quantization_config"):
        raise UserError(f"{where}: quantization_config is given; only a model in plain floating point can be imported")
    _check_shape(config, shape, where)
    fixed = {**_fixed(shape), "head_dim": shape.head_dim, "tie_word_embeddings": shape.tied}
    for name, wanted in {**fixed, "partial_rotary_factor": 1.0}.items():
        given = config.get(name)
        if given is None:
            given = DEFAULTS.get(name, False if name == "tie_word_embeddings" else wanted)
        if given != wanted:
            raise UserError(f"{where}: {name} is {given!r}, and this project's decoder has {wanted!r} there, always")
    given = config.get("vocab_size")
    if type(given) is not int or not vocab_size <= given <= shape.vocab_size:
        padded = "" if shape.vocab_size == vocab_size else f" ({shape.vocab_size} with padding)"
        raise UserError(
            f"{where}: vocab_size is {given!r}, and the run's data set has {vocab_size} tokens{padded}; prepare the "
            "data again with the model's own tokeniser: depth prep … --tokenizer FOLDER/tokenizer.json"
        )


def _fixed(shape: Shape) -> dict[str, Any]:
    """What every model of this project has, by Llama's keys."""
    return {
        "hidden_act": "silu",
        "rms_norm_eps": standard_config(shape).norm.eps,
        "rope_theta": ROPE_THETA,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _check_shape(config: dict[str, Any], shape: Shape, where: Path) -> None:
    different = []
    for key, name in SHAPE_KEYS.items():
        given = config.get(key)
        if given is None and key == "num_key_value_heads":
            given = config.get("num_attention_heads")
        if given is None:
            raise UserError(f"{where} has no key {key}; it is no whole config.json of a Llama model")
        if given != getattr(shape, name):
            different.append((key, name, given))
    if different:
        key, name, given = different[0]
        settings = " ".join(f"--model.{name} {given}" for _, name, given in different)
        raise UserError(
            f"{where}: {key} is {given!r}, and the run's model.{name} is {getattr(shape, name)}; set in the run file, "
            f"or give here and to depth train: {settings}"
        )
