"""What ``depth export`` writes, loaded by ``transformers``."""

import importlib.abc
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from torchtitan_ext.depth.attentions import ATTENTIONS
from torchtitan_ext.depth.registry import VARIANTS
from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.titan.restore import restore

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'torchtitan-ext[export]'")
VOCAB_SIZE, SEQ_LEN = 512, 64
Command = Callable[..., int]
MakeRun = Callable[..., RunFolder]


@pytest.fixture(autouse=True)
def _modules_apart(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep copies of modelling files out of the user's cache."""
    modules = str(tmp_path_factory.getbasetemp() / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)


def load(folder: Path, **options: object) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def tokens(rows: int = 2, length: int = SEQ_LEN) -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def exported(standard: RunFolder, depth_export: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exports") / "standard"
    assert depth_export(standard.path, "--out", out) == 0
    return out


@torch.no_grad()
def test_the_standard_model_is_a_llama_with_the_same_logits(standard: RunFolder, exported: Path) -> None:
    llama = load(exported)
    assert type(llama) is transformers.LlamaForCausalLM
    ours = restore(standard, device=torch.device("cpu")).model(tokens())
    theirs = llama(tokens()).logits
    assert ours.std() > 0.5  # so that the tolerance means something
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    assert llama.lm_head.weight is llama.model.embed_tokens.weight


@torch.no_grad()
def test_it_writes_what_our_model_writes_token_by_token(standard: RunFolder, exported: Path) -> None:
    model, llama = restore(standard, device=torch.device("cpu")).model, load(exported)
    prompt = tokens(rows=1, length=8)
    written = prompt
    for _ in range(40):
        chosen = model(written)[:, -1, :VOCAB_SIZE].argmax(-1, keepdim=True)
        written = torch.cat([written, chosen], dim=1)
    # Random weights may choose the end-of-text token at any point; both are to go on.
    theirs = llama.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert theirs.tolist() == written.tolist()
    assert len(set(written[0, 8:].tolist())) > 5


def test_the_tokeniser_and_the_special_tokens_are_the_data_sets(exported: Path, dataset: Path) -> None:
    manifest = json.loads((dataset / "manifest.json").read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert (exported / "tokenizer.json").read_bytes() == (dataset / "tokenizer.json").read_bytes()
    text = "def main():\n    return 'Ångström'"
    assert tokenizer(text)["input_ids"] == Tokenizer.from_file(str(dataset / "tokenizer.json")).encode(text).ids
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == manifest["eot_id"]
    assert tokenizer.model_max_length == SEQ_LEN
    # Stated, because the default of transformers 4 has token_type_ids too, which a Llama refuses.
    settings = json.loads((exported / "tokenizer_config.json").read_text())
    assert settings["model_input_names"] == ["input_ids", "attention_mask"]
    assert list(tokenizer(text)) == ["input_ids", "attention_mask"]
    generation = load(exported).generation_config
    assert generation.eos_token_id == generation.bos_token_id == generation.pad_token_id == manifest["eot_id"]


def test_the_vocabularys_padding_is_stated_and_never_written(
    make_run: MakeRun, depth_export: Command, odd_dataset: Path, tmp_path: Path
) -> None:
    """A vocabulary of 500 tokens, padded to 512: with the padding's logits raised above all, still none is chosen."""
    folder = make_run("padded", "--data.path", str(odd_dataset))
    depth_export(folder.path, "--out", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["torchtitan_ext"]["vocab_size_without_padding"]) == (512, 500)
    llama = load(tmp_path / "out")
    hidden = []
    llama.model.norm.register_forward_hook(lambda module, inputs, output: hidden.append(output[0, -1]))
    llama(tokens(1, 4) % 500)
    with torch.no_grad():
        llama.get_output_embeddings().weight[500:] = 100 * hidden[0]
    prompt = tokens(1, 4) % 500
    assert llama(prompt).logits[0, -1].argmax() >= 500
    assert llama.generate(prompt, max_new_tokens=1, do_sample=False)[0, -1] < 500


@torch.no_grad()
def test_bfloat16_halves_the_file_and_rounds_the_weights(
    standard: RunFolder, exported: Path, depth_export: Command, tmp_path: Path
) -> None:
    depth_export(standard.path, "--out", tmp_path / "half", "--dtype", "bfloat16")
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (exported, tmp_path / "half")]
    assert sizes[1] == pytest.approx(sizes[0] / 2, rel=0.02)
    half, whole = load(tmp_path / "half", dtype="auto"), load(exported)
    assert half.dtype == torch.bfloat16
    for rounded, exact in zip(half.parameters(), whole.parameters(), strict=True):
        assert torch.equal(rounded, exact.to(torch.bfloat16))


@torch.no_grad()
@pytest.mark.parametrize(
    ("variant", "attention", "block"),
    [
        *((name, "standard", "llama") for name in VARIANTS if name != "standard"),
        *(("standard", name, "llama") for name in ATTENTIONS if name != "standard"),
        *(("moda", "gate_headwise", "llama"), ("standard", "standard", "gpt2"), ("moda", "qk_norm", "nanogpt")),
    ],
)
def test_an_architecture_has_the_same_logits(
    variant: str, attention: str, block: str, make_run: MakeRun, depth_export: Command, tmp_path: Path
) -> None:
    name = f"{variant}-{attention}-{block}"
    asked = ("--model.variant", variant, "--model.attention", attention, "--model.block", block)
    folder = make_run(name, *asked)
    depth_export(folder.path, "--out", tmp_path / name)
    theirs = load(tmp_path / name, trust_remote_code=True)(tokens()).logits
    assert theirs.std() > 0.3
    ours = restore(folder, device=torch.device("cpu")).model(tokens())
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def windowed(
    make_run: MakeRun, depth_export: Command, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunFolder, Path]:
    folder = make_run("windowed", "--model.variant", "control_block", "--depth.window", "2")
    out = tmp_path_factory.mktemp("variants") / "windowed"
    depth_export(folder.path, "--out", out)
    return folder, out


@torch.no_grad()
def test_a_variants_options_reach_the_exported_model(windowed: tuple[RunFolder, Path]) -> None:
    folder, out = windowed
    model = load(out, trust_remote_code=True)
    ours = restore(folder, device=torch.device("cpu")).model
    torch.testing.assert_close(model(tokens()).logits, ours(tokens()), rtol=0, atol=1e-5)
    config = json.loads((out / "config.json").read_text())
    assert config["architecture"] == {"variant": "control_block", "depth.window": 2}
    # The option counts: without it the model is another one.
    del config["architecture"]["depth.window"]
    (out / "config.json").write_text(json.dumps(config))
    other = load(out, trust_remote_code=True)(tokens()).logits
    (out / "config.json").write_text(
        json.dumps({**config, "architecture": {"variant": "control_block", "depth.window": 2}})
    )
    assert (other - model(tokens()).logits).abs().max() > 1e-2


@torch.no_grad()
def test_a_variant_generates_rows_of_different_lengths_as_it_does_alone(windowed: tuple[RunFolder, Path]) -> None:
    model = load(windowed[1], trust_remote_code=True)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    alone = [model.generate(tokens(1, length), **options)[0, length:].tolist() for length in (5, 9)]
    rows = torch.cat([torch.zeros(1, 4, dtype=torch.long), tokens(1, 5)], dim=1), tokens(1, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    together = model.generate(torch.cat(rows), attention_mask=mask, **options)[:, 9:].tolist()
    assert together == alone


def test_a_variant_has_a_loss_and_can_be_saved_again(windowed: tuple[RunFolder, Path], tmp_path: Path) -> None:
    model = load(windowed[1], trust_remote_code=True)
    output = model(tokens(), labels=tokens())
    logits = output.logits[:, :-1].flatten(0, 1).double()
    expected = torch.nn.functional.cross_entropy(logits, tokens()[:, 1:].flatten())
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    model.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again", trust_remote_code=True)
    assert torch.equal(again(tokens()).logits, output.logits)


def test_a_variant_refuses_more_tokens_than_it_has_positions(windowed: tuple[RunFolder, Path]) -> None:
    model = load(windowed[1], trust_remote_code=True)
    with pytest.raises(ValueError, match=r"65 tokens are more than config\.max_position_embeddings, 64"):
        model(tokens(1, SEQ_LEN + 1))


def test_without_a_folder_it_goes_into_the_runs_own(make_run: MakeRun, depth_export: Command) -> None:
    folder = make_run("own")
    depth_export(folder.path)
    assert load(folder.path / "export" / "step-10")
    with pytest.raises(UserError, match="step-10 is there already; remove it, or choose another"):
        depth_export(folder.path)


def test_a_variant_says_what_it_needs_where_the_package_is_missing(
    windowed: tuple[RunFolder, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nowhere(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, *unused: object) -> None:
            if name == "torchtitan_ext":
                raise ModuleNotFoundError("No module named 'torchtitan_ext'", name=name)

    monkeypatch.delitem(sys.modules, "torchtitan_ext")
    monkeypatch.setattr(sys, "meta_path", [Nowhere(), *sys.meta_path])
    with pytest.raises(ImportError, match=r"packages that were not found in your environment: torchtitan_ext\. Run"):
        load(windowed[1], trust_remote_code=True)
