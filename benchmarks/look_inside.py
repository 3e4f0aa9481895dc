"""What looking inside by depth costs: the time of one look, pictures and all, as a share of 100 training steps.

Steps and looks take turns in one process of a real run. Any key of the run file can be set as well.

example: python benchmarks/look_inside.py train_configs/books_10m.yaml --data.path data/books --model.variant moda
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

from launch.torchrun import torchrun_environment

STEPS_BETWEEN_LOOKS = 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file")
    parser.add_argument("--turns", type=int, default=5)
    args, overrides = parser.parse_known_args()
    if "RANK" in os.environ:
        measure(args, overrides)
        return 0
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    with tempfile.TemporaryDirectory() as folder:
        run = ["--name", "look_inside", "--folder", f"{folder}/run", "--logging.depth_every", "1"]
        command = [sys.executable, *torchrun, __file__, *sys.argv[1:], *run]
        return subprocess.run(command, env=torchrun_environment(1)).returncode


def measure(args: argparse.Namespace, overrides: list[str]) -> None:
    from torchtitan_ext.resolve import load_resolved
    from torchtitan_ext.titan.config import trainer_config
    from torchtitan_ext.titan.diagnostics import look_inside

    resolved = load_resolved(args.run_file, overrides)
    trainer = trainer_config(resolved).build()
    batches = trainer.batch_generator(trainer.dataloader)
    every, trainer.config.depth_every = trainer.config.depth_every, 0
    assert every == 1
    steps, looks = [], []
    for turn in range(args.turns + 1):
        trainer.step += 1
        began = time.perf_counter()
        trainer.train_step(batches)
        stepped = time.perf_counter()
        numbers = look_inside(trainer.model_parts[0], trainer.heldout, trainer.train_context, trainer.device)
        trainer.metrics_processor.log_depth(trainer.step, numbers)
        if turn:  # the first turn warms up
            steps.append(stepped - began)
            looks.append(time.perf_counter() - stepped)
    trainer.close()
    step, look = statistics.median(steps), statistics.median(looks)
    print(
        f"{resolved.run.model.variant} at {resolved.run.model.size}: a step takes {step:.2f} s, a look {look:.2f} s; "
        f"one look every {STEPS_BETWEEN_LOOKS} steps adds {look / step / STEPS_BETWEEN_LOOKS:.2%}"
    )


if __name__ == "__main__":
    sys.exit(main())
