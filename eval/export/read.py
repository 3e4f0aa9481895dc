"""Reading a folder that ``transformers`` wrote: its ``config.json``, its tokeniser, its safetensors."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer

from eval.export.llama import Weights
from torchtitan_ext.errors import UserError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json``. Raises ``UserError`` when it is missing or no JSON object."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; give one with config.json and model.safetensors")
    return _read_json(folder / CONFIG)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model: one, or those that an index names.

    Raises:
        UserError: a file is missing, or there are weights in another format only.
    """
    if (folder / INDEX).exists():
        index = _read_json(folder / INDEX)
        table = index.get("weight_map")
        if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
            raise UserError(f"{folder / INDEX} has no weight_map from tensors to files; fetch it again")
        files = [folder / name for name in sorted(set(table.values()))]
    else:
        files = [folder / WEIGHTS]
    for file in files:
        if not file.is_file():
            others = [path.name for pattern in ("*.bin", "*.pth", "*.gguf") for path in folder.glob(pattern)]
            hint = f"{others[0]} is of another format; convert it first" if others else "fetch it again"
            raise UserError(f"{file} is missing; {hint}")
    return files


def read_weights(files: list[Path]) -> Weights:
    """All tensors of ``files``, on the CPU. Raises ``UserError`` for a damaged file or a tensor that is there twice."""
    weights: Weights = {}
    for file in files:
        try:
            tensors = load_file(file)
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read ({error}); it is damaged, fetch it again") from error
        twice = weights.keys() & tensors.keys()
        if twice:
            raise UserError(f"{file}: tensor {min(twice)} is in another file too; fetch the folder again")
        weights |= tensors
    return weights


def check_tokenizer(folder: Path, data: Path, ours: Tokenizer) -> bool:
    """Raise ``UserError``, naming a token, when the tokeniser in ``folder`` numbers tokens otherwise than ``ours`` of
    the data set in ``data``. False when the folder has no ``tokenizer.json`` to check."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return False
    try:
        theirs = Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises no narrower class.
        raise UserError(f"{path} is not a tokenizer.json of the tokenizers library ({error})") from error
    mine, other = ours.get_vocab(), theirs.get_vocab()
    for token in sorted(mine.keys() | other.keys(), key=lambda token: mine.get(token, other.get(token, 0))):
        if mine.get(token) != other.get(token):
            raise UserError(
                f"{path}: token {token!r} has the id {other.get(token)}, and in the data set {data} {mine.get(token)}; "
                f"prepare the data again: depth prep … --tokenizer {path}"
            )
    return True


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing; give a folder with config.json and model.safetensors") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no JSON object; fetch it again")
    return content
