"""The depth read by itself: its floor by hand, and its memory beside the reference's."""

import json
from pathlib import Path

import pytest

from torchtitan_ext.bench.read_case import Shape

from .test_bench_command import bench


def test_the_floor_moves_each_tensor_once() -> None:
    shape = Shape(sources=3, tokens=10, width=8, key_width=8, rank=0, dtype="bfloat16")
    assert shape.source_bytes == 160
    # Forward: three sources in, one read out. Backward: three sources and a gradient in, three gradients out.
    assert shape.bytes == (4 * 160, 7 * 160)


@pytest.mark.slow
def test_memory_and_time_beside_the_reference(tmp_path: Path) -> None:
    size = ["--sources", "5", "--tokens", "1024", "--width", "512", "--turns", "2"]
    assert bench("--operation", "depth_read", *size, "--out", str(tmp_path)) == 0
    record = json.loads((tmp_path / "bench.json").read_text())
    found = {one["label"]: one for one in record["implementations"]}
    one_source = 1024 * 512 * 4
    # Both hold the read and the gradients of all sources; the reference a stack of the sources too.
    assert found["torch"]["extra_bytes"] > 5 * one_source
    assert found["reference"]["extra_bytes"] > 10 * one_source
    assert found["torch"]["memory_ratio"] == found["torch"]["extra_bytes"] / found["reference"]["extra_bytes"] < 1
    ratios = [
        sum(reference) / sum(fused)
        for reference, fused in zip(found["reference"]["turns"], found["torch"]["turns"], strict=True)
    ]
    assert found["torch"]["speedup"][1] == pytest.approx(sum(ratios) / 2)
    both = found["torch"]["turns"]
    floor = sum(record["floor_seconds"])
    assert floor == pytest.approx((6 + 11) * one_source / record["copy_bytes_per_second"])
    assert found["torch"]["of_floor"] == pytest.approx(sum(sum(turn) for turn in both) / 2 / floor)
