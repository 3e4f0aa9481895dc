"""``python -m data_prep``: the ``depth prep`` command without the rest of ``depth``."""

import argparse
import sys

from data_prep.command import add_arguments, run
from torchtitan_ext.errors import UserError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m data_prep")
    add_arguments(parser)
    try:
        return run(parser.parse_args())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
