"""A checkpoint comes back as the model that was saved, or a message says why not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchtitan_ext.depth.decoder import DepthDecoder
from torchtitan_ext.depth.registry import VARIANTS
from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.titan.restore import describe, find_checkpoint, restore

MakeRun = Callable[..., RunFolder]
MovedModel = Callable[[RunFolder, int], DepthDecoder]


@pytest.mark.parametrize(
    ("variant", "options"),
    [("standard", []), ("m_gate_kv", []), ("moda", ["--depth.write_every", "2"]), ("full_attnres", [])],
)
def test_the_weights_and_options_are_those_of_the_run(
    make_run: MakeRun, moved_model: MovedModel, variant: str, options: list[str]
) -> None:
    folder = make_run(f"restored_{variant}", "--model.variant", variant, *options, steps=(10, 20))
    saved = moved_model(folder, 20)
    restored = restore(folder, device=torch.device("cpu"))
    assert restored.step == 20, "the newest"
    assert restored.description.vocab_size == 512
    for option in options[::2]:
        name = option.removeprefix("--depth.")
        assert getattr(restored.description.architecture.variant, name) == 2 != getattr(VARIANTS[variant], name)
    state = restored.model.state_dict()
    assert state.keys() == saved.state_dict().keys()
    for name, tensor in saved.state_dict().items():
        assert torch.equal(state[name], tensor), name
    assert not restored.model.training
    assert not any(parameter.requires_grad for parameter in restored.model.parameters())
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(restored.model(tokens), saved(tokens))


def test_an_earlier_step_on_request(standard: RunFolder, moved_model: MovedModel) -> None:
    restored = restore(standard, 10, device=torch.device("cpu"))
    assert restored.step == 10
    expected = moved_model(standard, 10).norm.weight
    assert torch.equal(restored.model.norm.weight, expected)


def test_a_step_that_is_not_there(standard: RunFolder) -> None:
    with pytest.raises(UserError, match="no checkpoint of step 15; there are steps 10, 20"):
        find_checkpoint(standard, 15)


@pytest.fixture
def copy(standard: RunFolder, tmp_path: Path) -> RunFolder:
    return RunFolder(shutil.copytree(standard.path, tmp_path / "copy"))


def test_no_checkpoint_yet(copy: RunFolder) -> None:
    shutil.rmtree(copy.checkpoint_path)
    with pytest.raises(UserError, match="no checkpoint yet"):
        restore(copy)


@pytest.mark.parametrize("cut", [True, False], ids=["cut off", "deleted"])
def test_a_damaged_checkpoint_is_refused_by_name(copy: RunFolder, cut: bool) -> None:
    victim = next((copy.checkpoint_path / "step-20").glob("*.distcp"))
    if cut:
        victim.write_bytes(victim.read_bytes()[:-1])
    else:
        victim.unlink()
    for step in (None, 20):
        with pytest.raises(UserError, match=rf"step 20 is damaged: .*{victim.name}.*; whole ones .* steps 10"):
            restore(copy, step)
    assert restore(copy, 10).step == 10


def test_rubbish_of_the_right_size_is_no_traceback(copy: RunFolder) -> None:
    for name in (".metadata", next((copy.checkpoint_path / "step-20").glob("*.distcp")).name):
        path = copy.checkpoint_path / "step-20" / name
        whole = path.read_bytes()
        path.write_bytes(b"x" * len(whole))
        with pytest.raises(UserError, match="step-20 cannot be read"):
            restore(copy, 20)
        path.write_bytes(whole)


def test_one_bit_is_found_and_the_file_named(copy: RunFolder) -> None:
    path = max((copy.checkpoint_path / "step-20").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"{path.name} is not what was written .*; choose another step"):
        restore(copy)
    assert restore(copy, 10).step == 10


def test_a_checkpoint_whose_list_has_sizes_alone(copy: RunFolder, moved_model: MovedModel) -> None:
    path = copy.checkpoint_path / "step-20" / "files.json"
    sizes = {file.name: file.stat().st_size for file in path.parent.iterdir() if file != path}
    path.write_text(json.dumps(sizes))
    restored = restore(copy, device=torch.device("cpu"))
    assert torch.equal(restored.model.norm.weight, moved_model(copy, 20).norm.weight)


def test_a_checkpoint_of_another_model(copy: RunFolder, make_run: MakeRun) -> None:
    other = make_run("with_a_gate", "--model.variant", "m_gate_kv")
    facts = json.loads((other.path / "facts.json").read_text())
    (copy.path / "facts.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match=r"no weights for layers\.0\.feed_forward_connection\.gate.* another model"):
        restore(copy)


def test_what_is_no_run_folder(tmp_path: Path, copy: RunFolder) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        describe(RunFolder(tmp_path))
    (copy.path / "run.yaml").unlink()
    with pytest.raises(UserError, match=r"no run\.yaml"):
        describe(copy)
    facts = json.loads((copy.path / "facts.json").read_text())
    del facts["identity"]["model"]["layers"]
    (copy.path / "facts.json").write_text(json.dumps(facts))
    (copy.path / "run.yaml").write_text("")
    with pytest.raises(UserError, match=r"facts\.json does not describe"):
        describe(copy)
