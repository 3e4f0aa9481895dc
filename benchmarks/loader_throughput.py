"""Tokens per second of our loader against torchtitan's, which tokenises on the fly, on the same corpus in one run.

example: python benchmarks/loader_throughput.py 'corpus/*.parquet' data/corpus --seq-len 1024

The data set must have been prepared from the same corpus; torchtitan's loader gets its tokeniser. Both run in this
process alone, in turns, and start on data that have been read once. The median and the range of the ratios of
neighbouring turns are printed.
"""

import argparse
import logging
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import load_dataset
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

import torchtitan_ext.titan  # noqa: F401  (chooses the device, before torchtitan is imported)
from torchtitan_ext.titan.loader import WindowLoader


def tokens_per_second(batches: Iterator[Any], seconds: float) -> float:
    next(batches)
    tokens, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        tokens += next(batches)[1].numel()
    return tokens / (time.perf_counter() - start)


def ours(args: argparse.Namespace) -> Iterator[Any]:
    config = WindowLoader.Config(dataset_path=args.data, global_batch=args.micro_batch)
    return iter(config.build(dp_world_size=1, dp_rank=0, seq_len=args.seq_len, local_batch_size=args.micro_batch))


def torchtitans(args: argparse.Namespace) -> Iterator[Any]:
    config = HuggingFaceTextDataLoader.Config(dataset="local", dataset_path=args.corpus, infinite=True)
    loader = config.build(
        dp_world_size=1,
        dp_rank=0,
        tokenizer=HuggingFaceTokenizer(tokenizer_path=args.data),
        seq_len=args.seq_len,
        local_batch_size=args.micro_batch,
        snapshot_every_n_steps=None,
    )
    return iter(loader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", help="glob of the parquet files the data set was made from")
    parser.add_argument("data", help="the prepared data set's folder")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a turn")
    args = parser.parse_args()
    args.data = str(Path(args.data))
    logging.disable(logging.INFO)

    def stream(path: str) -> Any:
        return load_dataset("parquet", data_files=path, split="train", streaming=True)

    DATASETS["local"] = DatasetConfig(path=args.corpus, loader=stream, sample_processor=lambda row: row["text"])
    mine, theirs = ours(args), torchtitans(args)
    pairs = [
        (tokens_per_second(mine, args.seconds), tokens_per_second(theirs, args.seconds)) for _ in range(args.turns)
    ]
    ratios = sorted(a / b for a, b in pairs)
    print(f"ours         {statistics.median(a for a, _ in pairs):>14,.0f} tokens/s")
    print(f"torchtitan's {statistics.median(b for _, b in pairs):>14,.0f} tokens/s")
    spread = f"({ratios[0]:,.1f} to {ratios[-1]:,.1f} in {args.turns} turns)"
    print(f"ratio        {statistics.median(ratios):>14,.1f}   {spread}")


if __name__ == "__main__":
    main()
