"""Write a trained model as a folder for transformers.

It holds safetensors, config.json and the tokeniser. A model with the standard
residual connection loads as LlamaForCausalLM, anywhere. One with a variant
comes with its modelling file and loads with trust_remote_code=True where
torchtitan-ext is installed. `depth import` is the way back.

example: depth export runs/m_gate_10m --out exports/m_gate_10m
"""

import argparse
from pathlib import Path

from torchtitan_ext.run_folder import RunFolder

DTYPES = {"float32": 4, "bfloat16": 2}
"""Name in torch → bytes per number."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("--out", metavar="FOLDER", help="a new folder (default: RUN/export/step-N)")
    parser.add_argument("--step", type=int, help="checkpoint to take (default: the newest)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default: %(default)s)")
    parser.add_argument("--data", metavar="FOLDER", help="the run's data set, where it has moved: for its tokeniser")


def run(args: argparse.Namespace) -> int:
    # Everything that can be wrong is found before a weight is read.
    from eval.export.llama import is_standard
    from eval.export.tokenizer_files import read_tokenizer
    from eval.export.whole_folder import check_free
    from eval.export.write import write_export
    from torchtitan_ext.titan.restore import describe, find_checkpoint

    folder = RunFolder(args.run)
    description = describe(folder)
    step, _ = find_checkpoint(folder, args.step)
    out = Path(args.out) if args.out is not None else folder.path / "export" / f"step-{step}"
    check_free(out, description.facts["parameters"] * DTYPES[args.dtype], "--out")
    data = Path(args.data if args.data is not None else description.run.data.path)
    tokenizer = read_tokenizer(data, description.facts["identity"]["data"]["fingerprint"])
    write_export(folder, step, out, args.dtype, tokenizer)
    facts, standard = description.facts, is_standard(description.shape, description.architecture)
    print(f"{out}: {facts['name']}, step {step}, {facts['size']} {facts['variant']}, {args.dtype}")
    trust = "" if standard else ", trust_remote_code=True"
    print(f'load it with AutoModelForCausalLM.from_pretrained("{out}"{trust})')
    return 0
