"""Loading distributed checkpoints of older versions, in which some parameters had other names."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from torchtitan_ext.older import todays_name


def todays_names(stored: Iterable[str]) -> dict[str, str]:
    """What a checkpoint stores, by the names of today."""
    return {todays_name(name): name for name in stored}


class TodaysNames(DefaultLoadPlanner):
    """Reads what is stored under older names into the tensors that have today's."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self.stored = todays_names(metadata.state_dict_metadata)
        entries = {name: metadata.state_dict_metadata[stored] for name, stored in self.stored.items()}
        super().set_up_planner(state_dict, replace(metadata, state_dict_metadata=entries), is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        items = [
            replace(item, storage_index=replace(item.storage_index, fqn=self.stored[item.storage_index.fqn]))
            for item in plan.items
        ]
        return replace(plan, items=items)
