"""The tokeniser of a run, as the files that ``transformers`` reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from data_prep.files import sha256
from data_prep.manifest import MANIFEST, TOKENIZER, read_manifest
from torchtitan_ext.errors import UserError


@dataclass(frozen=True)
class RunTokenizer:
    """A data set's tokeniser: ``json`` is its ``tokenizer.json``, ``vocab_size`` without the model's padding."""

    json: bytes
    eot_id: int
    vocab_size: int

    def config(self, seq_len: int) -> dict[str, Any]:
        """``tokenizer_config.json``. The end-of-text token begins a text too, as it did in training."""
        eot = Tokenizer.from_buffer(self.json).id_to_token(self.eot_id)
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": eot,
            "eos_token": eot,
            "pad_token": eot,
            "model_max_length": seq_len,
            # Up to version 4 a fast tokeniser also gives token_type_ids by default, which a Llama refuses.
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
        }

    def ids(self) -> dict[str, int]:
        """The special tokens of ``config.json``. It names none to fill up with, for that one would not be trained."""
        return {"bos_token_id": self.eot_id, "eos_token_id": self.eot_id}


def read_tokenizer(folder: Path, fingerprint: str) -> RunTokenizer:
    """The tokeniser of the data set in ``folder``, of which only ``manifest.json`` and ``tokenizer.json`` are read.

    Raises:
        UserError: one of them is missing or damaged, or the data set is not the one with ``fingerprint``.
    """
    for name in (MANIFEST, TOKENIZER):
        if not (folder / name).is_file():
            raise UserError(
                f"{folder / name} is missing, and the run's tokeniser is in its data set; say where that is now with "
                "--data"
            )
    manifest = read_manifest(folder / MANIFEST)
    if manifest.fingerprint != fingerprint:
        raise UserError(f"{folder} is not the data set that the run was trained on; give that one with --data")
    if sha256(folder / TOKENIZER) != manifest.tokenizer.sha256:
        raise UserError(f"{folder / TOKENIZER} is not the file that was written (its SHA-256 differs); restore it")
    return RunTokenizer((folder / TOKENIZER).read_bytes(), manifest.eot_id, manifest.vocab_size)
