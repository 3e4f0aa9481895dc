"""How close `depth prep` comes to the bare tokeniser, and whether its memory grows with the corpus.

In one run, on the same files, tokeniser and cores: tokens per second of `tokenizers.encode_batch` alone on text that
lies in memory, then of the whole `depth prep` command, reading, cutting, writing and start-up included. The two take
turns, and the best of `--repeats` counts for each. The same ratio in processor time instead of time holds on a machine
that is busy with other work. Then the peak resident memory of the command (all its processes together) on the corpus
and on the corpus repeated `--times` times, and what the process that reads and writes costs there: processor seconds
per million tokens, which is the share of a core at a million tokens per second. Linux only: /proc is read.
"""

import argparse
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tokenizers import Tokenizer

from data_prep.dataset import TokenDataset
from data_prep.sources import LocalSource, blocks
from data_prep.tokenizer import build

BATCH = 1000
"""Documents in each call of the bare tokeniser."""

PAGE = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", nargs="+", help="paths, folders or globs of .parquet, .jsonl and .txt files")
    parser.add_argument("--tokenizer", default="bpe:4096", help="as for `depth prep` (default: bpe:4096)")
    parser.add_argument("--text-column", default="text", help="as for `depth prep` (default: text)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="cores (default: all)")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each speed (default: 3)")
    parser.add_argument("--times", type=int, default=10, help="how often the corpus is repeated (default: 10)")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = LocalSource(args.corpus, args.text_column, None).paths
        tokenizer = folder / "tokenizer.json"
        source = LocalSource([str(path) for path in files], args.text_column, None)
        build(args.tokenizer, source, heldout_fraction=0.005, workers=args.workers).save(str(tokenizer))

        bare, prep, bare_cpu, prep_cpu, peak = 0.0, 0.0, 0.0, 0.0, 0
        for number in range(args.repeats):
            speed, cpu_speed = bare_speed(source, tokenizer, args.workers)
            bare, bare_cpu = max(bare, speed), max(bare_cpu, cpu_speed)
            seconds, cpu, memory, _ = run_prep(files, tokenizer, args, folder / f"data-{number}")
            tokens = tokens_in(folder / f"data-{number}")
            prep, prep_cpu, peak = max(prep, tokens / seconds), max(prep_cpu, tokens / cpu), max(peak, memory)
            print(f"try {number + 1}: bare {bare:,.0f}, depth prep {prep:,.0f} tokens/s (best so far)", flush=True)
        print(f"depth prep / encode_batch: {prep / bare:.3f} on {args.workers} cores")
        print(f"the same by processor time: {prep_cpu / bare_cpu:.3f}")

        many = folder / "many"
        many.mkdir()
        links = [
            many / f"{copy}-{index}{path.suffix}" for copy in range(args.times) for index, path in enumerate(files)
        ]
        for link, path in zip(links, [*files] * args.times, strict=True):
            shutil.copy(path, link)
        _, _, grown, main_cpu = run_prep(links, tokenizer, args, folder / "data-many")
        tokens = tokens_in(folder / "data-many")
        print(f"peak memory: {peak / 2**20:.0f} MiB; corpus {args.times} times: {grown / 2**20:.0f} MiB")
        print(f"growth: {grown / peak:.3f}")
        print(f"the reading process: {main_cpu / tokens * 1e6:.4f} cores per million tokens/s (start-up included)")


def tokens_in(folder: Path) -> int:
    return sum(split.tokens for split in TokenDataset.open(folder).manifest.splits.values())


def bare_speed(source: LocalSource, tokenizer: Path, cores: int) -> tuple[float, float]:
    """Tokens per second, and per second of processor time, of `encode_batch` with as many threads as cores.

    It runs in a process of its own.
    """
    os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(cores)}
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_bare_speed, (source, tokenizer))


def _bare_speed(source: LocalSource, path: Path) -> tuple[float, float]:
    texts = [text for block in blocks(source) for piece in block.pieces for text in piece.texts()]
    tokenizer = Tokenizer.from_file(str(path))
    tokens = 0
    begin, cpu = time.perf_counter(), time.process_time()
    for first in range(0, len(texts), BATCH):
        encodings = tokenizer.encode_batch(texts[first : first + BATCH], add_special_tokens=False)
        tokens += sum(map(len, encodings))
    return tokens / (time.perf_counter() - begin), tokens / (time.process_time() - cpu)


def run_prep(
    files: list[Path], tokenizer: Path, args: argparse.Namespace, out: Path
) -> tuple[float, float, int, float]:
    """Run the command.

    Returns:
        Its seconds, its processor seconds, the peak memory of its processes together, and the processor seconds of the
        process that reads and writes.
    """
    options = ["--tokenizer", tokenizer, "--text-column", args.text_column, "--workers", args.workers, "--out", out]
    command = [sys.executable, "-m", "data_prep", *map(str, [*files, *options])]
    peak, main_cpu = 0, 0.0
    begin, cpu = time.perf_counter(), children_cpu()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None:
        peak = max(peak, session_memory(process.pid))
        main_cpu = max(main_cpu, process_cpu(process.pid))
        time.sleep(0.05)
    seconds = time.perf_counter() - begin
    if process.returncode:
        raise SystemExit(f"`{' '.join(command)}` failed")
    return seconds, children_cpu() - cpu, peak, main_cpu


def process_cpu(pid: int) -> float:
    """Processor seconds of a process so far, without its children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # The process has ended.
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children_cpu() -> float:
    """Processor seconds of this process's finished children and theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def session_memory(session: int) -> int:
    """Resident bytes of all processes of a session."""
    pages = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The fields behind the name, which stands in parentheses and may hold anything; see proc(5).
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # The process has ended.
        if int(fields[3]) == session:
            pages += int(fields[21])
    return pages * PAGE


if __name__ == "__main__":
    main()
