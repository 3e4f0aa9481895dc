"""What every variant must do, whoever registers it: a line in the registry brings these checks with it."""

import re
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtitan.config.configs import CompileConfig, ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from tests.distinct import DISTINCT
from tests.rotation import rotated
from torchtitan_ext.depth.decoder import DepthDecoder
from torchtitan_ext.depth.registry import VARIANTS
from torchtitan_ext.titan.parallelize import checkpoint_and_compile

EVERY = pytest.mark.parametrize("name", DISTINCT)


@EVERY
def test_later_tokens_and_other_documents_change_nothing(checks: Any, name: str) -> None:
    checks.is_causal(VARIANTS[name])


@EVERY
def test_it_starts_as_the_standard_model_if_it_says_so_and_else_not(checks: Any, name: str) -> None:
    checks.starts_as_it_says(VARIANTS[name])


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_finite(checks: Any, name: str, dtype: torch.dtype) -> None:
    checks.trains_finitely(VARIANTS[name], 12, dtype)


@EVERY
def test_counts_are_those_of_the_model(checks: Any, name: str) -> None:
    checks.counts_are_those_of_the_model(VARIANTS[name], ["debug", "10M", "500M"])


@EVERY
def test_every_parameter_moves_but_those_that_are_declared_not_to(checks: Any, name: str) -> None:
    shape = checks.small_shape(6)
    model = checks.build(VARIANTS[name], shape, moved=0.05)
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    checks.loss_of(model, checks.tokens_of(30)).backward()
    torch.optim.SGD([p for p in model.parameters() if p.grad is not None], lr=1e6).step()
    still = [key for key, parameter in model.named_parameters() if torch.equal(parameter, before[key])]
    assert sum(before[key].numel() for key in still) == VARIANTS[name].without_gradient(shape), still


@EVERY
def test_each_parameter_that_is_added_is_in_one_group(checks: Any, name: str) -> None:
    shape = checks.small_shape(6)
    names = [key for key, _ in checks.build(VARIANTS[name], shape).named_parameters()]
    added = [key for key in names if checks.is_added(key)]
    for key in names:
        groups = [group.name for group in VARIANTS[name].groups(shape) if re.search(group.pattern, key)]
        assert len(groups) == (key in added), (key, groups)


@EVERY
def test_declared_flops_are_pytorchs_count_of_matrix_products_and_elementwise_work(checks: Any, name: str) -> None:
    """What is declared beyond the matrix products is not negative and grows as the width: no matrix is left out, and
    none is counted twice."""
    variant, tokens = VARIANTS[name], checks.tokens_of()[:, 1:].shape[1]
    beyond = []
    for width in (32, 64, 128):
        shape = checks.small_shape(6, width=width)
        beyond.append(variant.flops_per_token(shape, tokens) - checks.matrix_flops(variant, shape))
    assert min(beyond) >= 0
    assert beyond[2] - beyond[1] == pytest.approx(2 * (beyond[1] - beyond[0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", rotated(DISTINCT, 3))
def test_compiled_equals_eager(checks: Any, name: str) -> None:
    checks.compiles(VARIANTS[name], layers=7, deeper=10)


class Allocated(TorchDispatchMode):
    """The storages that operations make, and how many bytes of them are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[StorageWeakRef(storage)] = storage.nbytes()
        return made

    def alive(self) -> int:
        return sum(size for storage, size in self.storages.items() if not storage.expired())


@EVERY
def test_memory_falls_under_checkpointing(checks: Any, name: str) -> None:
    """What the forward pass keeps for the backward pass: less with selective checkpointing, least with full."""
    dims = ParallelDims.from_config(ParallelismConfig(), world_size=1)
    tokens = checks.tokens_of(length=33)

    def kept(config: Any) -> int:
        model: DepthDecoder = checks.build(VARIANTS[name], checks.small_shape(6), moved=0.05)
        policy = None if config is None else config.build(dump_folder="")
        checkpoint_and_compile(model, policy, CompileConfig(enable=False), dims)
        with Allocated() as allocated:
            loss = checks.loss_of(model, tokens)
        assert loss.requires_grad  # its graph is what keeps them
        return allocated.alive()

    everything, selective, full = kept(None), kept(SelectiveAC.Config()), kept(FullAC.Config())
    assert full < selective < everything
    assert full < everything / 2
