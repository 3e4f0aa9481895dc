"""``depth bench``: what a variant costs in time and memory beside ``standard``, measured in one sitting."""

VARIANTS = ("control_block", "block_hybrid_memory")
"""Compared where neither run files nor the command line name any."""

SIZE = "10M"
VOCABULARY = 50_304
"""Size and vocabulary where there is no run file: GPT-2's vocabulary, padded."""
