"""The log of storages, against sizes that are computed by hand."""

import torch

from torchtitan_ext.plan.storages import StorageLog


def logged() -> StorageLog:
    return StorageLog(lambda part, tensor: part, scopes={"gather": "gathered"}, claims={"reduce": "reduced"})


def test_the_peak_is_what_lives_at_once() -> None:
    log = logged()
    with log, log.during("work"):
        a = torch.zeros(100)  # 400 bytes
        b = a.view(10, 10)[:5]  # the same storage
        c = a + 1  # 800
        del a, c  # b keeps the first: 400
        d = torch.zeros(50, dtype=torch.float64) * 1.0  # 400 for the product beside 400 for the zeros: 1200
        del b, d
    assert log.peak() == {"work": 1200}


def test_a_result_is_there_together_with_what_it_is_made_from() -> None:
    log = logged()
    with log, log.during("work"):
        x = torch.zeros(1000)
        x = x + 1
        x = x + 1
        del x
    assert log.peak() == {"work": 8000}


def test_parts_by_time_by_scope_and_by_assignment() -> None:
    log = logged()
    weight = torch.zeros(10)
    log.assign([weight], "weights")
    with log:
        with log.during("forward"):
            kept = weight * 2
            with torch.profiler.record_function("gather (layer 0)"):
                gathered = weight.clone()
        with log.during("backward"):
            gradient = kept * 3
            lost = kept * 4
            with torch.profiler.record_function("reduce (layer 0)"):
                reduced = gradient + 0
        log.assign([reduced], "gradients")
    assert log.peak() == {"weights": 40, "forward": 40, "gathered": 40, "reduced": 40, "backward": 40, "gradients": 40}
    del gathered, lost


def test_a_resized_storage_counts_with_its_size_at_the_time() -> None:
    log = logged()
    with log, log.during("work"):
        a = torch.zeros(100)
        a.untyped_storage().resize_(0)
        b = torch.zeros(60)
        a.untyped_storage().resize_(400)
        del a, b
    assert log.peak() == {"work": 640}


def test_resizing_is_left_as_it_was() -> None:
    before = torch.UntypedStorage.resize_
    with logged():
        assert torch.UntypedStorage.resize_ is not before
    assert torch.UntypedStorage.resize_ is before
