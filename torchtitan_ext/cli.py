"""The ``depth`` command. Each sub-command lives in the room that does the work and is imported when it is called."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from torchtitan_ext.errors import UserError, nearest
from torchtitan_ext.shipped import found

COMMANDS = {
    "prep": ("data_prep.command", "turn text into a data set of tokens"),
    "train": ("launch.train_command", "train a run file on this machine, on all its GPUs or on the CPU"),
    "study": ("launch.study.command", "plan, run and watch a set of runs to compare"),
    "plan": ("torchtitan_ext.plan.command", "say what a run needs: memory per GPU, micro-batch, hours"),
    "compare": ("eval.compare.command", "compare runs with a baseline: loss, how sure, at what price"),
    "eval": ("eval.evaluate.command", "measure one trained model: held-out loss, samples, downstream tasks"),
    "export": ("eval.export.command", "write a trained model as a folder for transformers"),
    "import": ("eval.export.import_command", "begin a run with the weights of a Llama model"),
    "bench": ("torchtitan_ext.bench.command", "measure what variants cost beside standard: time and memory"),
    "sizes": ("torchtitan_ext.sizes_command", "list the model sizes"),
    "variants": ("torchtitan_ext.variants_command", "list the variants of the residual connection and their cost"),
    "quickstart": ("launch.quickstart", "prepare, train, stop, resume and finish a small run"),
}
"""Name → module with ``add_arguments(parser)`` and ``run(args) -> exit status``, and a line of help.

A module with ``TAKES_OVERRIDES`` gets the arguments that its parser does not know, keys of the run file, as
``args.overrides``.
"""

EXAMPLE = "example: depth train train_configs/quickstart.yaml --training.steps 50"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns its exit status (2 for a mistake of the user's, 130 after Ctrl-C)."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(_usage())
            return 0
        name, rest = arguments[0], [found(argument) for argument in arguments[1:]]
        if name not in COMMANDS:
            raise UserError(f"depth {name} is not a command; {nearest(name, COMMANDS)}")
        module = importlib.import_module(COMMANDS[name][0])
        parser = argparse.ArgumentParser(
            prog=f"depth {name}",
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(parser)
        args, unknown = parser.parse_known_args(rest)
        if unknown and not getattr(module, "TAKES_OVERRIDES", False):
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        args.overrides = unknown
        return module.run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe left; nothing more to say
        return 1


def _usage() -> str:
    lines = ["usage: depth COMMAND …    (depth COMMAND --help says more)", ""]
    lines += [f"  {name:<11} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join([*lines, "", EXAMPLE])


if __name__ == "__main__":
    sys.exit(main())
