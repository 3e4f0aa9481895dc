"""The memory that tensors take over time, by what it is for: a log of every storage's birth and death.

Works on fake tensors, which have sizes and no memory. PyTorch's own ``torch.distributed._tools`` trackers keep only the
peak and know FSDP's parts but not those of a model; their way of following storages is followed here.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Parts = dict[str, int]
"""Bytes by part."""


@dataclass(slots=True, eq=False)
class Storage:
    """One storage between two moments; a resized storage ends and begins anew. ``died`` is None while it lives."""

    part: str
    size: int
    born: int
    died: int | None = None


class StorageLog(TorchDispatchMode):
    """Logs the storages of all tensors that operations return inside ``with log:``, and those it is told of.

    A storage belongs to the part that is current when it is made (``during``), unless ``part_of(part, tensor)`` or
    ``assign`` says otherwise. PyTorch names scopes of its own with ``record_function`` (FSDP does): ``scopes`` maps the
    beginning of a scope's name to the part of what is made in it, ``claims`` to the part of what is read in it.
    """

    def __init__(
        self, part_of: Callable[[str, torch.Tensor], str], *, scopes: dict[str, str], claims: dict[str, str]
    ) -> None:
        super().__init__()
        self.part_of = part_of
        self.scopes, self.claims = scopes, claims
        self.moment = 0
        self.storages: list[Storage] = []
        self._part = ""
        self._named: list[str] = []
        self._living: dict[int, tuple[Storage, weakref.ref]] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Self:
        # FSDP frees and refills gathered weights by resizing their storages, which no operation shows.
        log, resize = self, self._resize

        def resize_and_log(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resized = resize(storage, size)
            log._resized(storage)
            return resized

        torch.UntypedStorage.resize_ = resize_and_log
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*exception)

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Storages made inside belong to ``part``."""
        outer, self._part = self._part, part
        try:
            yield
        finally:
            self._part = outer

    def assign(self, tensors: Any, part: str, of: str | None = None) -> None:
        """Give the storages of the tensors in a nest to ``part``; with ``of``, only those that belong to that part."""
        for tensor in _tensors(tensors):
            storage = self._find(tensor, part)
            if of is None or storage.part == of:
                storage.part = part

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let it become operations on its local tensors first
        if func is torch.ops.prim.device.default:  # a question that fake tensors answer by an operation
            return func(*args, **(kwargs or {}))
        name = func.name()
        if name.startswith("profiler::_record_function_enter"):
            self._named.append(args[0])
        elif name.startswith("profiler::_record_function_exit"):
            self._named.pop()
        else:
            for part in self._parts_of_scopes(self.claims):
                self.assign((args, kwargs), part, of=self._part)
        result = func(*args, **(kwargs or {}))
        part = next(self._parts_of_scopes(self.scopes), self._part)
        for tensor in _tensors(result):
            self._find(tensor, self.part_of(part, tensor))
        return result

    def peak(self) -> Parts:
        """The parts at the moment when they were most."""
        change: Counter[int] = Counter()
        for storage in self.storages:
            change[storage.born] += storage.size
            if storage.died is not None:
                change[storage.died] -= storage.size
        total, most, when = 0, -1, 0
        for moment in sorted(change):
            total += change[moment]
            if total > most:
                most, when = total, moment
        return self.at(when)

    def at(self, moment: int) -> Parts:
        """The parts at ``moment``."""
        parts: Counter[str] = Counter()
        for storage in self.storages:
            if storage.born <= moment and (storage.died is None or storage.died > moment):
                parts[storage.part] += storage.size
        return dict(parts)

    def _parts_of_scopes(self, parts: dict[str, str]) -> Iterator[str]:
        for name in reversed(self._named):
            for start, part in parts.items():
                if name.startswith(start):
                    yield part

    def _find(self, tensor: torch.Tensor, part: str) -> Storage:
        untyped = tensor.untyped_storage()
        known = self._living.get(untyped._cdata)
        return known[0] if known is not None else self._begin(untyped, part)

    def _begin(self, untyped: torch.UntypedStorage, part: str) -> Storage:
        storage, key = Storage(part, untyped.nbytes(), self.moment), untyped._cdata

        def end(reference: weakref.ref) -> None:
            storage.died = self.moment
            if key in self._living and self._living[key][1] is reference:
                del self._living[key]

        self._living[key] = storage, weakref.ref(untyped, end)
        self.storages.append(storage)
        self.moment += 1  # what dies from here on was there together with it
        return storage

    def _resized(self, untyped: torch.UntypedStorage) -> None:
        known = self._living.pop(untyped._cdata, None)
        if known is not None:
            known[0].died = self.moment
            self._begin(untyped, known[0].part)


def _tensors(nest: Any) -> list[torch.Tensor]:
    leaves = [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor)]
    return [leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in leaves]
