"""Studies: one file into a fair set of runs, planned before anything runs."""

from torchtitan_ext.study.load import load_study
from torchtitan_ext.study.plan import plan_study
from torchtitan_ext.study.planned import Plan, PlannedRun, TrainCommand
from torchtitan_ext.study.record import write_record
from torchtitan_ext.study.schema import Study
from torchtitan_ext.study.text import plan_text

__all__ = [
    "Plan",
    "PlannedRun",
    "Study",
    "TrainCommand",
    "load_study",
    "plan_study",
    "plan_text",
    "write_record",
]
