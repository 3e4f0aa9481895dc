"""Which implementation does a depth read.

``read`` and ``find`` are what a model calls. On the CPU, and inside a compiled graph, they are ``depth_read`` and
``find`` of ``torchtitan_ext.ops.depth_read``; a backend's name says what does them on a CUDA GPU. All backends compute
the same function and differ in rounding.

Reads of one block share their finished blocks and are made in two phases, which PyTorch and the Triton kernel do; the
other backends, which do not, are asked for such reads by name alone, and then read by read.

``auto`` measures, once for every kind of read in a process, those backends that are installed and able to do it, and
keeps the fastest. Each rank of a run measures for itself: ranks may then round differently, but each one's gradients
are of its own tokens anyway, and after their sum all parameters are the same. What it does cost is that two starts of
one run need not agree to the last bit. So where deterministic algorithms are asked for (``training.deterministic``),
and while a CUDA graph is recorded, nothing is measured and the Triton kernel is taken where it is able.
"""

import importlib
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from statistics import median
from typing import Any

import torch

from . import depth_read as by_torch
from . import depth_read_peers
from .depth_query import DepthQuery, Found

AUTO = "auto"
REPETITIONS = 5
"""Timed calls of each backend; one before them compiles it."""

logger = logging.getLogger(__name__)


class Ask(Enum):
    """What a read may ask for beyond one query vector, sources as they are and keys of whole width."""

    SCALES = "sources that are scaled"
    BIASES = "biases on the logits"
    VECTORS = "a query vector for each source"
    NARROW_KEYS = "keys narrower than the model"
    TOKEN_DEPENDENT = "queries that depend on the token"
    ODD_WIDTH = "a width that is no power of two"
    PHASES = "two phases, for sources shared with other reads"


@dataclass(frozen=True)
class Backend:
    """One implementation.

    Attributes:
        read: it, with the arguments and result of ``depth_read``.
        find: the first phase of several reads at once, where it has that.
        cannot: what a read may not ask of it.
        dtypes: types of sources it takes.
        module, package: what is imported for it, and what to install.
    """

    read: Callable[..., torch.Tensor]
    cannot: frozenset[Ask]
    dtypes: tuple[torch.dtype, ...]
    find: Callable[..., list[Found]] | None = None
    module: str = "torch"
    package: str = "torch"


def _triton_read(*arguments: Any) -> torch.Tensor:
    from .depth_read_triton import depth_read_triton

    return depth_read_triton(*arguments)


def _triton_find(*arguments: Any) -> list[Found]:
    from .depth_read_triton import find_triton

    return find_triton(*arguments)


_HALF = (torch.bfloat16, torch.float16)
_PLAIN = frozenset({Ask.SCALES, Ask.BIASES, Ask.VECTORS, Ask.TOKEN_DEPENDENT, Ask.PHASES})

BACKENDS: dict[str, Backend] = {
    "torch": Backend(by_torch.depth_read, frozenset(), (torch.float64, torch.float32, *_HALF), by_torch.find),
    "triton": Backend(
        _triton_read, frozenset({Ask.TOKEN_DEPENDENT}), (torch.float32, *_HALF), _triton_find, "triton", "triton"
    ),
    "flash-linear-attention": Backend(
        depth_read_peers.flash_linear_attention,
        _PLAIN | {Ask.NARROW_KEYS},
        (torch.float32, *_HALF),
        module="fla.ops.attnres",
        package="flash-linear-attention>=0.6.0",
    ),
    "fast-attnres": Backend(
        depth_read_peers.fast_attnres, _PLAIN, (torch.bfloat16,), module="attnres", package="fast-attnres>=2.1.0"
    ),
    "flash-attn-res": Backend(
        depth_read_peers.flash_attn_res,
        _PLAIN | {Ask.NARROW_KEYS, Ask.ODD_WIDTH},
        (torch.bfloat16,),
        module="flash_attn_res",
        package="flash-attn-res>=0.1.12",
    ),
}


@lru_cache
def unavailable(name: str) -> str | None:
    """Why this machine has no backend ``name``, as the end of a sentence; None where it has."""
    if name in (AUTO, "torch"):
        return None
    if not torch.cuda.is_available():
        return "needs a CUDA GPU, and none is visible"
    try:
        importlib.import_module(BACKENDS[name].module)
    except ImportError as error:
        return f"needs `pip install '{BACKENDS[name].package}'` ({error})"
    return None


def asks(query: DepthQuery, width: int) -> frozenset[Ask]:
    """What a read of sources of ``width`` asks for. One query vector is seen by its stride of 0 over the sources."""
    n, key_width = query.w_nK.shape
    found = {
        Ask.SCALES: query.scales is not None and any(scale != 1 for scale in query.scales),
        Ask.BIASES: query.biases is not None and any(bias != 0 for bias in query.biases),
        Ask.VECTORS: n > 1 and query.w_nK.stride(0) != 0,
        Ask.NARROW_KEYS: key_width < width,
        Ask.TOKEN_DEPENDENT: query.basis_nRK is not None,
        Ask.ODD_WIDTH: width & (width - 1) != 0,
    }
    return frozenset(ask for ask, asked in found.items() if asked)


def able(asked: Collection[Ask], dtype: torch.dtype) -> list[str]:
    """The backends that can do such a read of sources of ``dtype``, installed or not."""
    return [name for name, one in BACKENDS.items() if dtype in one.dtypes and one.cannot.isdisjoint(asked)]


def has_phases(backend: str) -> bool:
    """Whether ``backend`` can do reads in two phases, by ``find`` and ``read``."""
    return backend == AUTO or BACKENDS[backend].find is not None


def check_able(backend: str, asked: Collection[Ask], dtype: torch.dtype) -> None:
    """Raise ``ValueError`` where ``backend`` cannot do such a read."""
    names = able(asked, dtype)
    if backend not in names:
        what = ", ".join([f"{dtype} sources", *sorted(ask.value for ask in asked)])
        raise ValueError(f"depth.backend {backend!r} has no read of {what}; choose from: {', '.join([AUTO, *names])}")


def read(
    sources: Sequence[torch.Tensor], query: DepthQuery, before: Found | None = None, backend: str = AUTO
) -> torch.Tensor:
    """``depth_read`` [B, T, D] of sources [B, T, D] by ``backend``, one of ``BACKENDS`` or ``AUTO``.

    Raises ``ValueError`` for a read that the named backend cannot do.
    """
    return BACKENDS[_choice(sources, [query], before, backend)].read(sources, query, *_given(before))


def find(sources: Sequence[torch.Tensor], queries: Sequence[DepthQuery], backend: str = AUTO) -> list[Found]:
    """``find`` of the same sources by ``backend``. Raises ``ValueError`` likewise."""
    chosen = BACKENDS[_choice(sources, queries, None, backend, phases=True)].find
    assert chosen is not None
    return chosen(sources, queries)


def _given(before: Found | None) -> tuple[Found, ...]:
    return () if before is None else (before,)


_fastest: dict[tuple[object, ...], str] = {}


def _choice(
    sources: Sequence[torch.Tensor],
    queries: Sequence[DepthQuery],
    before: Found | None,
    backend: str,
    phases: bool = False,
) -> str:
    """The backend to use; ``phases``: for the first phase of the queries' reads."""
    first = sources[0]
    if backend == "torch" or not first.is_cuda or torch.compiler.is_compiling():
        return "torch"
    asked = frozenset[Ask]().union(*(asks(query, first.shape[-1]) for query in queries))
    if phases or before is not None:
        asked |= {Ask.PHASES}
    names = able(asked, first.dtype)
    if backend != AUTO:
        check_able(backend, asked, first.dtype)
        return backend
    names = [name for name in names if unavailable(name) is None]
    trained = torch.is_grad_enabled() and any(source.requires_grad for source in sources)
    size = (len(sources), len(queries), tuple(first.shape), queries[0].w_nK.shape[-1], first.dtype, first.device)
    kind = (size, phases, asked, trained)
    if len(names) > 1 and kind not in _fastest:
        if torch.are_deterministic_algorithms_enabled() or torch.cuda.is_current_stream_capturing():
            return "triton" if "triton" in names else "torch"
        _fastest[kind] = _measured(sources, queries, before, names, phases, trained)
    return _fastest.get(kind, names[0])


def _measured(
    sources: Sequence[torch.Tensor],
    queries: Sequence[DepthQuery],
    before: Found | None,
    names: list[str],
    phases: bool,
    trained: bool,
) -> str:
    """The fastest of the backends, for a forward and, if ``trained``, a backward pass."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(trained)

    def once(backend: Backend) -> None:
        leaves, vectors = [copy(source) for source in sources], [copy(query.w_nK) for query in queries]
        copies = [replace(query, w_nK=w_nK) for query, w_nK in zip(queries, vectors, strict=True)]
        earlier = [copy(tensor) for tensor in before or ()]
        if phases:
            assert backend.find is not None
            results = [tensor for found in backend.find(leaves, copies) for tensor in found]
        else:
            results = [backend.read(leaves, copies[0], *([Found(*earlier)] if earlier else []))]
        if trained:
            torch.autograd.grad(results, [*leaves, *vectors, *earlier], [torch.ones_like(result) for result in results])

    stream = torch.cuda.current_stream(sources[0].device)
    # A thread of its own, because hooks on saved tensors, modes and autocast belong to the caller's: under activation
    # checkpointing, a backward pass here would otherwise compute the caller's whole layer again.
    with ThreadPoolExecutor(1) as thread:
        times = {name: thread.submit(_milliseconds, name, once, stream, trained).result() for name in names}
    logger.info(
        "depth read, %d queries of %d sources %s: %s", len(queries), len(sources), list(sources[0].shape),
        ", ".join(f"{name} {time:.3f} ms" for name, time in times.items()),
    )  # fmt: skip
    return min(times, key=lambda name: times[name])


def _milliseconds(name: str, once: Callable[[Backend], None], stream: torch.cuda.Stream, trained: bool) -> float:
    """Median time of a call; infinity for a backend that fails."""
    try:
        with torch.cuda.device(stream.device), torch.cuda.stream(stream), torch.set_grad_enabled(trained):
            once(BACKENDS[name])
            times = []
            for _ in range(REPETITIONS):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                once(BACKENDS[name])
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end))
            return median(times)
    except Exception as error:
        logger.warning("depth read: backend %s failed and is left out: %s", name, error)
        return float("inf")
