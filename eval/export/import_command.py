"""Begin a run with the weights of a Llama model instead of random ones.

FOLDER holds config.json and model.safetensors (or an index and its parts), as
transformers writes them. The run file says what is trained and on what data;
its shape must be the model's, and its data prepared with the model's tokeniser.
The run folder gets a checkpoint of step 0, and `depth train` goes on from it.
With a variant, what it adds begins as in any run. Any key of the run file can
be set after it, and then again for `depth train`.

example: depth import exports/standard_10m train_configs/more_10m.yaml
         depth train train_configs/more_10m.yaml
"""

import argparse
from pathlib import Path

from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import RunFolder

TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="FOLDER", help="folder with config.json and model.safetensors")
    parser.add_argument("run_file", metavar="RUN_FILE", help="the run that begins with it")


def run(args: argparse.Namespace) -> int:
    # Everything but the tensors themselves is checked before one is read.
    from eval.export.llama import check_config
    from eval.export.read import CONFIG, check_tokenizer, read_config, weight_files
    from eval.export.step_zero import write_step_zero
    from eval.export.whole_folder import check_free
    from torchtitan_ext.resolve import load_resolved

    model = Path(args.model)
    config, files = read_config(model), weight_files(model)
    resolved = load_resolved(args.run_file, args.overrides)
    folder = RunFolder(resolved.run.folder)
    if folder.exists:
        raise UserError(f"{folder.path} holds a run that has begun; choose another name or folder in the run file")
    check_free(folder.path, resolved.parameters * 4, "the run file's folder")
    check_config(config, resolved.shape, resolved.dataset.vocab_size, model / CONFIG)
    checked = check_tokenizer(model, resolved.dataset.path, resolved.dataset.tokenizer())
    resolved.dataset.verify_checksums()
    write_step_zero(resolved, files, config["vocab_size"])
    print(f"{folder.path}: step 0 holds the weights of {model}")
    if not checked:
        print(
            f"not checked: {model} has no tokenizer.json; whether {resolved.dataset.path} was prepared with the "
            "model's tokeniser is for you to know"
        )
    again = " ".join([args.run_file, *args.overrides])
    print(f"train on with: depth train {again}")
    return 0
