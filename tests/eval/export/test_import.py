"""Llama models as the beginning of a run."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.dataset import TokenDataset
from data_prep.windows import WindowOrder, Windows
from torchtitan_ext.depth import initial
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.titan.restore import restore

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'torchtitan-ext[export]'")
CPU = torch.device("cpu")
VOCAB_SIZE, SEQ_LEN = 512, 64
Command = Callable[..., int]


def tokens(below: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randint(0, below, (2, SEQ_LEN), generator=torch.Generator().manual_seed(3))


def make_llama(vocab_size: int = VOCAB_SIZE) -> torch.nn.Module:
    """A Llama of the debug shape, by transformers alone, with weights that all count."""
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )
    llama = transformers.LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in llama.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return llama


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    return make_llama()


@torch.no_grad()
def test_a_llama_in_several_files_becomes_step_0_with_the_same_logits(
    llama: torch.nn.Module, run_file: Path, depth_import: Command, tmp_path: Path
) -> None:
    llama.save_pretrained(tmp_path / "llama", max_shard_size="300KB")
    assert (tmp_path / "llama" / "model.safetensors.index.json").exists()
    folder = RunFolder(tmp_path / "run")
    assert depth_import(tmp_path / "llama", run_file, "--folder", folder.path) == 0
    restored = restore(folder, device=CPU)
    theirs = llama(tokens()).logits
    assert restored.step == 0
    assert theirs.std() > 0.5
    torch.testing.assert_close(restored.model(tokens()), theirs, rtol=0, atol=1e-5)
    assert str(tmp_path / "llama" / "model-00001-of-") in (folder.path / "code.txt").read_text()


def test_an_exported_model_comes_back_to_the_bit(
    standard: RunFolder, run_file: Path, depth_export: Command, depth_import: Command, tmp_path: Path
) -> None:
    depth_export(standard.path, "--out", tmp_path / "out")
    depth_import(tmp_path / "out", run_file, "--folder", tmp_path / "run")
    before, after = restore(standard, device=CPU), restore(RunFolder(tmp_path / "run"), device=CPU)
    for (name, old), new in zip(before.model.state_dict().items(), after.model.state_dict().values(), strict=True):
        assert torch.equal(old, new), name


def test_a_tokeniser_that_cannot_be_checked_is_said(
    standard: RunFolder,
    run_file: Path,
    depth_export: Command,
    depth_import: Command,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    model = tmp_path / "out"
    depth_export(standard.path, "--out", model)
    said = f"not checked: {model} has no tokenizer.json"
    depth_import(model, run_file, "--folder", tmp_path / "checked")
    assert said not in capsys.readouterr().out
    (model / "tokenizer.json").unlink()
    depth_import(model, run_file, "--folder", tmp_path / "unchecked")
    assert [line for line in capsys.readouterr().out.splitlines() if said in line]
    assert RunFolder(tmp_path / "unchecked").exists


def test_what_a_variant_adds_begins_as_in_any_run(
    llama: torch.nn.Module, run_file: Path, depth_import: Command, tmp_path: Path
) -> None:
    llama.save_pretrained(tmp_path / "llama")
    settings = ["--model.variant", "m_gate_kv", "--seed", "5", "--folder", tmp_path / "run"]
    depth_import(tmp_path / "llama", run_file, *settings)
    state = restore(RunFolder(tmp_path / "run"), device=CPU).model.state_dict()
    # torchtitan and transformers name the feed-forward's matrices differently and store them alike.
    gate = llama.state_dict()["model.layers.2.mlp.gate_proj.weight"]
    assert torch.equal(state["layers.2.feed_forward.w1.weight"], gate)
    added = {name: tensor for name, tensor in state.items() if "_connection." in name or name.startswith("stream.")}
    assert len(added) == 6
    for name in added:
        drawn = torch.empty_like(added[name])
        torch.nn.init.trunc_normal_(drawn, std=0.02, a=-0.06, b=0.06, generator=initial.generator_for(5, name))
        torch.testing.assert_close(added[name] / added[name].std(), drawn / drawn.std())


@torch.no_grad()
def test_a_vocabulary_without_padding_is_padded_with_initial_rows(
    odd_dataset: Path, run_file: Path, depth_import: Command, tmp_path: Path
) -> None:
    llama = make_llama(500)
    llama.save_pretrained(tmp_path / "llama")
    depth_import(tmp_path / "llama", run_file, "--data.path", odd_dataset, "--folder", tmp_path / "run")
    model = restore(RunFolder(tmp_path / "run"), device=CPU).model
    assert model.lm_head.weight.shape == (512, 64)
    torch.testing.assert_close(model(tokens(500))[..., :500], llama(tokens(500)).logits, rtol=0, atol=1e-5)
    assert 0 < model.lm_head.weight[500:].abs().max() < 0.5


@pytest.mark.slow
def test_training_goes_on_from_an_imported_model(
    llama: torch.nn.Module, dataset: Path, run_file: Path, depth_import: Command, tmp_path: Path
) -> None:
    """The first logged loss is the Llama's own on the run's first batch."""
    llama.save_pretrained(tmp_path / "llama")
    settings = ["--folder", str(tmp_path / "run"), "--logging.every", "1"]
    depth_import(tmp_path / "llama", run_file, *settings)
    command = [sys.executable, "-m", "torchtitan_ext.train", "--config-file", str(run_file), *settings]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    # What torchrun sets for the one process of a launch.
    launch = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    subprocess.run(command, env={**os.environ, **launch}, check=True, timeout=240)
    folder = RunFolder(tmp_path / "run")
    assert folder.status() is not None
    assert folder.status()["state"] == "finished"
    windows = Windows(TokenDataset.open(dataset).split("train"), SEQ_LEN, batch=8)
    order = WindowOrder(windows.n_windows, 0)
    batch = torch.from_numpy(windows.batch(order.window(sample) for sample in range(8)).astype(np.int64))
    with torch.no_grad():
        logits = llama(batch[:, :-1]).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
    first = next(folder.metrics())
    assert first["step"] == 1
    assert first["loss_metrics/global_avg_loss"] == pytest.approx(expected.item(), rel=1e-5)
