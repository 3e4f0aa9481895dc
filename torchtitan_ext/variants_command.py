"""List the variants of the residual connection, and the forms of attention: what each adds to the model, in a line.

example: depth variants --size 100M --seq-len 2048
"""

import argparse
from collections.abc import Mapping

from torchtitan_ext.depth.attentions import ATTENTIONS
from torchtitan_ext.depth.declaration import Declaration
from torchtitan_ext.depth.registry import VARIANTS
from torchtitan_ext.errors import UserError
from torchtitan_ext.sizes import Shape, padded_vocab, shape_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="100M", help="the size to count at (default: %(default)s)")
    parser.add_argument(
        "--vocab-size", type=int, default=50_304, help="tokens in the vocabulary (default: %(default)s)"
    )
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens in a window (default: %(default)s)")
    parser.add_argument("--groups", action="store_true", help="show how the parameters that it adds are trained")
    parser.add_argument("--sources", action="store_true", help="show where each comes from")


def run(args: argparse.Namespace) -> int:
    shape = shape_of(args.size, padded_vocab(args.vocab_size))
    flops = shape.flops_per_token(args.seq_len)
    print(f"at {args.size}: {shape.parameters():,} parameters, {flops / 1e6:,.0f} MFLOPs per token in training")
    _table("model.variant adds", VARIANTS, shape, args)
    print()
    _table("model.attention adds", ATTENTIONS, shape, args)
    return 0


def _table(title: str, declared: Mapping[str, Declaration], shape: Shape, args: argparse.Namespace) -> None:
    print(f"{title:<24} {'parameters':>12} {'FLOPs':>8}  what it does")
    for name, declaration in declared.items():
        try:
            declaration.check(shape)
        except UserError as error:
            print(f"{name:<24} does not fit this size: {error}")
            continue
        added = declaration.flops_per_token(shape, args.seq_len) / shape.flops_per_token(args.seq_len)
        print(f"{name:<24} {declaration.parameters(shape):>12,} {added:>8.2%}  {declaration.summary}")
        if args.groups:
            for group in declaration.trained_groups(shape):
                print(f"{'':<24} {group}")
        if args.sources:
            print(f"{'':<24} {declaration.source}")
