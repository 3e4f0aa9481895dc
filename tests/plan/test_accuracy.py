"""The planned peak against the peak of real training, as PyTorch's profiler saw it: within 10%."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "plan_accuracy.py"
spec = importlib.util.spec_from_file_location("plan_accuracy", BENCHMARK)
assert spec is not None
assert spec.loader is not None
plan_accuracy = importlib.util.module_from_spec(spec)
sys.modules["plan_accuracy"] = plan_accuracy  # its processes look for their functions there
spec.loader.exec_module(plan_accuracy)

CASES = [
    ("standard", "none", 1),
    ("control_block", "full", 1),
    ("block_hybrid_memory", "none", 1),
    ("attnres_block", "selective", 1),
    ("m_gate_kv", "none", 2),
    ("moda", "full", 1),
]
"""Every family once, every mode, and FSDP; the benchmark has the whole grid."""


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "mode", "ranks"), CASES)
def test_the_planned_peak_is_the_measured_one(variant: str, mode: str, ranks: int, dataset: Path) -> None:
    planned, measured = plan_accuracy.compare(dataset, variant, mode, ranks)
    assert planned == pytest.approx(measured, rel=0.1)
