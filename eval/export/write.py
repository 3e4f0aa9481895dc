"""Writing a trained model as a folder for ``transformers``."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eval.export.llama import Weights, config_of, is_standard, to_llama
from eval.export.tokenizer_files import RunTokenizer
from eval.export.whole_folder import whole_folder
from torchtitan_ext.files import write_file
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.sizes import Shape
from torchtitan_ext.titan.restore import Description, Restored, restore

MODELING = Path(__file__).with_name("modeling_depth.py")
WEIGHTS = "model.safetensors"
HEAD = "lm_head.weight"


def write_export(folder: RunFolder, step: int, out: Path, dtype: str, tokenizer: RunTokenizer) -> None:
    """Write the model of ``step`` with weights of ``dtype`` (a name in torch) to ``out``, which is not there yet.

    Raises:
        UserError: the checkpoint cannot be read.
    """
    restored = restore(folder, step, torch.device("cpu"))
    description = restored.description
    standard = is_standard(description.shape, description.architecture)
    weights = to_llama(restored.model) if standard else _named_as_here(restored)
    weights = {name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in weights.items()}
    config = config_of(description.shape, description.seq_len) if standard else _depth_config(description)
    about = {
        "run": description.facts["name"],
        "step": step,
        "variant": description.facts["variant"],
        "attention": description.facts.get("attention", "standard"),
        "vocab_size_without_padding": tokenizer.vocab_size,
    }
    with whole_folder(out) as temporary:
        described = {**config, **tokenizer.ids(), "dtype": dtype, "torchtitan_ext": about}
        _write_json(temporary / "config.json", described)
        save_file(weights, temporary / WEIGHTS, metadata={"format": "pt"})
        # The library lets nobody but the owner read the file.
        shutil.copymode(temporary / "config.json", temporary / WEIGHTS)
        _write_json(temporary / "generation_config.json", _generation(description.shape, tokenizer, standard))
        _write_json(temporary / "tokenizer_config.json", tokenizer.config(description.seq_len))
        write_file(temporary / "tokenizer.json", tokenizer.json)
        if not standard:
            write_file(temporary / MODELING.name, MODELING.read_bytes())


def _named_as_here(restored: Restored) -> Weights:
    state = restored.model.state_dict()
    if restored.description.shape.tied:
        del state[HEAD]
    return {f"model.{name}": tensor for name, tensor in state.items()}


def _depth_config(description: Description) -> dict[str, Any]:
    """The keys of ``config.json`` for `DepthConfig`."""
    shape, model = description.shape, description.facts["identity"]["model"]
    return {
        "model_type": "torchtitan_ext",
        "architectures": ["DepthForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{MODELING.stem}.DepthConfig",
            "AutoModelForCausalLM": f"{MODELING.stem}.DepthForCausalLM",
        },
        "layers": shape.layers,
        "width": shape.width,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "ffn_width": shape.ffn_width,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied,
        "block": shape.block,
        "max_position_embeddings": description.seq_len,
        "architecture": {key: value for key, value in model.items() if not hasattr(shape, key)},
    }


def _generation(shape: Shape, tokenizer: RunTokenizer, standard: bool) -> dict[str, Any]:
    """The vocabulary's padding is in the logits, as it is in training, but is not to be chosen."""
    generation: dict[str, Any] = {**tokenizer.ids(), "pad_token_id": tokenizer.eot_id}
    if padding := list(range(tokenizer.vocab_size, shape.vocab_size)):
        generation["suppress_tokens"] = padding
    return generation if standard else {**generation, "use_cache": False}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_file(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
