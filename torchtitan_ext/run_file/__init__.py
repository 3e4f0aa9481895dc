"""Run files: YAML into a checked :class:`Run`, with errors that name file, line and key."""

from torchtitan_ext.run_file.load import dump_run, load_run
from torchtitan_ext.run_file.schema import Run
from torchtitan_ext.run_file.words import KeyHelp, describe_schema

__all__ = ["KeyHelp", "Run", "describe_schema", "dump_run", "load_run"]
