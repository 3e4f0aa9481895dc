"""List the model sizes: their shapes, parameters and FLOPs.

example: depth sizes --vocab-size 50304 --seq-len 2048
"""

import argparse

from torchtitan_ext.sizes import SIZES, padded_vocab, shape_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--vocab-size", type=int, default=50_304, help="tokens in the vocabulary (default: %(default)s)"
    )
    parser.add_argument(
        "--seq-len", type=int, default=2048, help="tokens in a window, for the FLOPs (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    print(
        f"{'size':<10} {'layers':>6} {'width':>5} {'heads':>5} {'kv':>3} {'ffn':>5} "
        f"{'parameters':>13} {'MFLOPs/token':>12}"
    )
    for name in SIZES:
        shape = shape_of(name, padded_vocab(args.vocab_size))
        print(
            f"{name:<10} {shape.layers:>6} {shape.width:>5} {shape.heads:>5} {shape.kv_heads:>3} {shape.ffn_width:>5} "
            f"{shape.parameters():>13,} {shape.flops_per_token(args.seq_len) / 1e6:>12,.0f}"
        )
    return 0
