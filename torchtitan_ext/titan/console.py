"""A console that a person can follow: short lines, without what torchtitan says for its developers."""

import logging
import sys
import warnings

NOISE = (
    "[GC]",
    "ENV[",
    "Building device mesh",
    "Successfully created meshes",
    "Finished loading",
    "Finished saving",
    "Last step checkpoint completed",
    "Saving the checkpoint",
    "Sleeping 2 seconds",
    "Synchronizing and adjusting timeout",
)
"""How the messages begin that say nothing about the run. Warnings and errors are shown."""


def set_up_logging() -> None:
    """Set up the root logger, which is torchtitan's too, for this process, in place of its ``init_logger``."""
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.handlers.clear()
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    handler.addFilter(_says_something)
    root.addHandler(handler)
    # No model here draws random numbers on a sharded tensor; initial.py says how weights are drawn.
    warnings.filterwarnings("ignore", message="DTensor (random operators|manual_seed)")
    # torchtitan restores a schedule so that it is asked for its rate outside a step.
    warnings.filterwarnings("ignore", message="To get the last learning rate")
    # FSDP's own hooks make a view of what a layer hands on as it came. No layer writes into its state in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def _says_something(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if record.levelno >= logging.WARNING:
        return not message.startswith("ENV[")
    return not message.startswith(NOISE)
