"""What older versions of the project wrote into run folders, and what it means today.

Format 1 of ``facts.json`` comes from the first version, which differs from this one in two ways that matter for its run
folders:

- Some variants computed something else by default. Each form is an option of today's variant, so a folder of format 1
  is read as one that names these options. Its model is then the one that was trained. A run that goes on there without
  the same options in its run file is refused, as any other model would be.
- Where the processes did not divide the rows of a tied embedding, one of its two copies was never updated
  (``titan/parallelize.py`` says why). Checkpoints of such runs hold weights that the model did not train with.

In formats 1 and 2 of early versions a layer has one module, ``link``, for what it learns about depth; today each of its
two sublayers has a connection.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torchtitan_ext.errors import UserError

_READ_QUERIES = (
    *("control_block", "block_input_dep_query", "block_hybrid_memory", "block_alibi_depth", "block_rope_depth"),
    *("block_sparse_depth", "block_value_proj", "deep_control_block", "deep_hybrid_memory"),
)
_DEPTH_READS = (
    "full_attnres",
    "block_gqa_depth",
    "block_mqa_depth",
    "attnres_block",
    "attnres_full",
    "attnres_low_rank",
)
_GATED = ("m_gate_kv", "m_gate_kv_detached", "m_gate_query", "m_gate_output")
_MEANT: dict[str, dict[str, Any]] = {
    **{name: {"query_scale": "inverse_sqrt"} for name in _DEPTH_READS},
    **{name: {"query_scale": "inverse_sqrt", "query_share": "read"} for name in _READ_QUERIES},
    **{name: {"gate_bias": True, "zero_start": True} for name in _GATED},
    "m_gate_multiply": {"gate_bias": True},
    "delta_attnres": {
        "query_scale": "inverse_sqrt",
        "blocks": 8,
        "block_summary": "sum",
        "late_blocks": False,
        "query_std": 0.0,
    },
    "moda": {"norm": "pre", "rotated_keys": True},
    "residual_scalars": {"normalize": False},
    "value_residual": {"form": "learned_share"},
}
"""Options of today that say what a variant computed by default in format 1."""


RETIRED_KEYS = {"optimizer.decay_depth_parameters": False}
"""Keys that a recorded run file may have, with the value that says nothing today: parameter groups took their place."""


_MOVED = (
    # A gate with weights is W_gm; one without is a scalar, of which the optimizer has settings such as weight_decay.
    (re.compile(r"\.link\.gate\.(?=(weight|bias)(\.|$))"), ".feed_forward_connection.gate."),
    (re.compile(r"\.link\.feed_forward_kv\."), ".feed_forward_connection.key_value."),
    (re.compile(r"\.link\."), ".attention_connection."),
)
"""Where the parameters of a layer's ``link`` are today; the first that matches counts."""


def todays_name(stored: str) -> str:
    """The name that a parameter, or what an optimizer remembers of one, has today."""
    for pattern, today in _MOVED:
        if pattern.search(stored):
            return pattern.sub(today, stored)
    return stored


def upgraded(facts: dict[str, Any]) -> dict[str, Any]:
    """The content of a ``facts.json`` of format 1 or 2, in the terms of format 2."""
    if facts["format"] != 1:
        return facts
    model = dict(facts["identity"]["model"])
    if model.pop("depth.post_norm", False):
        model["depth.norm"] = "reordered"
    meant = {f"depth.{option}": value for option, value in _MEANT.get(model["variant"], {}).items()}
    return {**facts, "identity": {**facts["identity"], "model": {**meant, **model}}}


def check_trained_right(path: str, facts: Mapping[str, Any], metrics: Iterable[Mapping[str, Any]], groups: int) -> None:
    """Raise ``UserError`` when a run of format 1 trained a tied embedding wrongly.

    ``path`` names the run folder; ``metrics`` are its logged records; ``groups`` is how many groups of processes held a
    whole copy of the model each. How many processes trained follows from the two speeds of a record.
    """
    model = facts["identity"]["model"]
    if facts["format"] != 1 or not model["tied"]:
        return
    for record in metrics:
        alone, together = record.get("throughput(tps)"), record.get("throughput/global_tokens_per_s")
        if alone and together:
            ranks = round(together / alone)
            shards = ranks // groups if ranks % groups == 0 else ranks
            if model["vocab_size"] % shards:
                raise UserError(
                    f"{path} was trained on {ranks} processes by an older version, which updated only one of two "
                    f"copies of the tied embedding there, for its {model['vocab_size']} rows cannot be split evenly "
                    "over them; its checkpoints cannot be used: train the run again in another folder"
                )
