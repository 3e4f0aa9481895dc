"""Tokens per second of our loader against torchtitan's, which tokenises on the fly, on the same corpus in one run.

examples: python benchmarks/loader_throughput.py 'corpus/*.parquet' data/corpus --seq-len 1024
          python benchmarks/loader_throughput.py --shards 1192

The data set must have been prepared from the same corpus; torchtitan's loader gets its tokeniser. Both run in this
process alone, in turns, and start on data that have been read once. The median and the range of the ratios of
neighbouring turns are printed.

With --shards our loader reads random tokens that lie in so many shards instead: with all of them mapped, and with 16 at
a time, in turns.
"""

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from datasets import load_dataset
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

import torchtitan_ext.titan  # noqa: F401  (chooses the device, before torchtitan is imported)
from data_prep import dataset
from data_prep.manifest import MANIFEST, read_manifest
from data_prep.shards import ShardWriter
from torchtitan_ext.bench.random_tokens import write_random_tokens
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


def compare(name: str, other: str, pairs: list[tuple[float, float]]) -> None:
    """Print the median speeds and the ratios of turns of two loaders."""
    ratios = sorted(a / b for a, b in pairs)
    width = max(len(name), len(other))
    print(f"{name:<{width}} {statistics.median(a for a, _ in pairs):>14,.0f} tokens/s")
    print(f"{other:<{width}} {statistics.median(b for _, b in pairs):>14,.0f} tokens/s")
    spread = f"({ratios[0]:,.1f} to {ratios[-1]:,.1f} in {len(pairs)} turns)"
    print(f"{'ratio':<{width}} {statistics.median(ratios):>14,.1f}   {spread}")


def write_shards(folder: Path, number: int) -> None:
    """Write a data set of random tokens whose training split lies in ``number`` shards."""
    vocab_size, tokens = 50_000, 1 << 18
    write_random_tokens(folder, vocab_size, tokens)
    manifest = read_manifest(folder / MANIFEST)
    writer, generator = ShardWriter(folder, "train", np.dtype(manifest.dtype), 0), np.random.default_rng(0)
    shards = []
    for _ in range(number):
        writer.add(generator.integers(vocab_size, size=tokens, dtype=manifest.dtype))
        shards.append(writer.flush())
    train = manifest.splits["train"].model_copy(update={"tokens": number * tokens, "shards": tuple(shards)})
    manifest = manifest.model_copy(update={"splits": manifest.splits | {"train": train}})
    (folder / MANIFEST).write_text(manifest.to_json())


def many_shards(args: argparse.Namespace) -> None:
    """All shards mapped against 16 at a time."""
    with tempfile.TemporaryDirectory() as folder:
        args.data = folder
        write_shards(Path(folder), args.shards)
        speeds: dict[int, list[float]] = {dataset.OPEN_SHARDS: [], 16: []}
        loaders = {}
        for number in speeds:
            dataset.OPEN_SHARDS = number
            loaders[number] = ours(args)
            tokens_per_second(loaders[number], args.seconds)  # The first look at each shard is not measured.
        for _ in range(args.turns):
            for number, loader in loaders.items():
                dataset.OPEN_SHARDS = number
                speeds[number].append(tokens_per_second(loader, args.seconds))
        all_of_them, sixteen = speeds.values()
    print(f"{args.shards} shards")
    compare("all mapped", "16 at a time", list(zip(all_of_them, sixteen, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", nargs="?", help="glob of the parquet files the data set was made from")
    parser.add_argument("data", nargs="?", help="the prepared data set's folder")
    parser.add_argument("--shards", type=int, metavar="N", help="measure the reading of N shards instead")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a turn")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    if args.shards is not None:
        many_shards(args)
        return
    if args.data is None:
        parser.error("give a corpus and the data set prepared from it, or --shards")
    args.data = str(Path(args.data))

    def stream(path: str) -> Any:
        return load_dataset("parquet", data_files=path, split="train", streaming=True)

    DATASETS["local"] = DatasetConfig(path=args.corpus, loader=stream, sample_processor=lambda row: row["text"])
    mine, theirs = ours(args), torchtitans(args)
    pairs = [
        (tokens_per_second(mine, args.seconds), tokens_per_second(theirs, args.seconds)) for _ in range(args.turns)
    ]
    compare("ours", "torchtitan's", pairs)


if __name__ == "__main__":
    main()
