"""What ``depth import`` refuses, before it makes a run folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import RunFolder

Command = Callable[..., int]


@pytest.fixture(scope="module")
def exported(standard: RunFolder, depth_export: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exports") / "standard"
    depth_export(standard.path, "--out", out)
    return out


@pytest.fixture
def model(exported: Path, tmp_path: Path) -> Path:
    """A copy of an importable model, to be spoilt."""
    shutil.copytree(exported, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def refused(depth_import: Command, run_file: Path, model: Path) -> Callable[..., str]:
    def refuse(*settings: str) -> str:
        folder = model.parent / "run"
        with pytest.raises(UserError) as caught:
            depth_import(model, run_file, "--folder", folder, *settings)
        assert "\n" not in str(caught.value)
        assert [path.name for path in model.parent.iterdir()] == ["model"]
        return str(caught.value)

    return refuse


def change(model: Path, **keys: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **keys}))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("model_type", "mistral", "model_type is 'mistral'; only 'llama' can be imported"),
        ("rms_norm_eps", 1e-6, "rms_norm_eps is 1e-06, and this project's decoder has 1e-05"),
        ("rope_theta", 10000.0, "rope_theta is 10000.0, and this project's decoder has 500000.0"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "rope_scaling asks for 'llama3'"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope_scaling asks for 'linear'"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 5e5}, "rope_parameters asks for 'yarn'"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}, "rope_theta is 10000.0"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor is 0.5"),
        ("hidden_act", "gelu", "hidden_act is 'gelu', and this project's decoder has 'silu'"),
        ("attention_bias", True, "attention_bias is True"),
        ("mlp_bias", True, "mlp_bias is True"),
        ("head_dim", 32, "head_dim is 32, and this project's decoder has 16"),
        ("tie_word_embeddings", False, "tie_word_embeddings is False, and this project's decoder has True"),
        ("quantization_config", {"bits": 4}, "quantization_config is given"),
        ("vocab_size", 32000, "vocab_size is 32000, and the run's data set has 512 tokens; prepare the data again"),
        ("vocab_size", 511, "vocab_size is 511, and the run's data set has 512 tokens"),
        ("vocab_size", "many", "vocab_size is 'many', and the run's data set has 512 tokens"),
        ("hidden_size", None, "has no key hidden_size"),
    ],
)
def test_a_llama_that_the_decoder_cannot_hold(
    key: str, value: Any, says: str, model: Path, refused: Callable[..., str]
) -> None:
    change(model, **{key: value})
    assert f"{model / 'config.json'}" in refused()
    assert says in refused()


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("rms_norm_eps", "rms_norm_eps is 1e-06"),
        ("rope_theta", "rope_theta is 10000.0"),
        ("tie_word_embeddings", "False"),
    ],
)
def test_a_missing_key_has_llamas_own_default(key: str, says: str, model: Path, refused: Callable[..., str]) -> None:
    config = json.loads((model / "config.json").read_text())
    del config[key]
    (model / "config.json").write_text(json.dumps(config))
    assert says in refused()


def test_another_shape_is_told_as_the_settings_to_give(model: Path, refused: Callable[..., str]) -> None:
    message = refused("--model.width", "128", "--model.layers", "2", "--model.ffn_width", "192")
    assert message.endswith(
        "num_hidden_layers is 4, and the run's model.layers is 2; set in the run file, or give here and to depth "
        "train: --model.layers 4 --model.width 64"
    )


def test_a_vocabulary_in_another_order(model: Path, refused: Callable[..., str]) -> None:
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["!"], vocabulary["#"] = vocabulary["#"], vocabulary["!"]
    path.write_text(json.dumps(content))
    message = refused()
    assert f"{path}: token '!' has the id {vocabulary['!']}, and in the data set" in message
    path.write_text("{}")
    assert "is not a tokenizer.json" in refused()


def test_weights_that_are_not_those_of_the_config(model: Path, refused: Callable[..., str]) -> None:
    path, name = model / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights = load_file(path)
    save_file({key: tensor for key, tensor in weights.items() if key != name}, path)
    assert refused() == f"{model} has no tensor {name}; its config.json asks for it"
    save_file({**weights, "model.layers.1.self_attn.q_proj.bias": torch.zeros(64)}, path)
    assert "model.layers.1.self_attn.q_proj.bias is no weight of a Llama model" in refused()
    save_file({**weights, name: weights[name][:100].clone()}, path)
    assert f"{name} has the shape [100, 64], and by config.json it has [192, 64]" in refused()
    rows = "model.embed_tokens.weight"
    save_file({**weights, rows: weights[rows][:500].clone()}, path)
    assert f"{rows} has the shape [500, 64], and by config.json it has [512, 64]" in refused()
    save_file({**weights, name: weights[name] / 0}, path)
    assert f"{name} is not made of finite" in refused()
    save_file({**weights, name: weights[name].to(torch.int8)}, path)
    assert f"{name} is not made of finite floating-point numbers" in refused()
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"] + 1}, path)
    assert "lm_head.weight is not the embedding" in refused()


def test_files_that_are_damaged_or_missing(model: Path, refused: Callable[..., str]) -> None:
    path = model / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert f"{path} cannot be read" in refused()
    path.rename(model / "pytorch_model.bin")
    assert "pytorch_model.bin is of another format" in refused()
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert f"{model / 'model-1.safetensors'} is missing" in refused()
    index.write_text("{}")
    assert "has no weight_map" in refused()
    (model / "config.json").write_text("{")
    assert "config.json is damaged" in refused()
    (model / "config.json").unlink()
    assert "config.json is missing" in refused()


def test_a_run_that_has_begun_is_left_alone(
    exported: Path, run_file: Path, standard: RunFolder, depth_import: Command, tmp_path: Path
) -> None:
    before = (standard.path / "facts.json").read_bytes()
    with pytest.raises(UserError, match="holds a run that has begun; choose another name or folder"):
        depth_import(exported, run_file, "--folder", standard.path)
    assert (standard.path / "facts.json").read_bytes() == before
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        depth_import(exported, run_file, "--folder", tmp_path)
