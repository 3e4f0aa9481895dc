"""The named variants of attention over depth, each with its intervention and the figures its source reports.

``SEED`` is attnres-results.md, "AttnRes: Attention Over the Residual Stream", 2026-03-20: 24 layers of width 1536,
about 500M parameters, FineWeb-Edu, evaluation loss at step 6000 against 2.716 of the standard model, tokens/s against
459k and memory against 49 GB. Its document leaves granularity and source kind open: reads per layer and differences
as sources (choice).
"""

from dataclasses import replace

from .attention_over_depth import AttentionOverDepth

SEED = "attnres-results.md (2026-03-20), 500M"
PAPER = "Kimi Team, arXiv 2603.15031"

_CONTROL_BLOCK = AttentionOverDepth(
    summary="each layer reads the means of finished blocks of 3 layers, the unfinished block and the embedding",
    source=f"{SEED}: -0.022 evaluation loss over 2 seeds, 0.54 of the tokens/s, 1.83 times the memory",
    block_size=3,
)
_HYBRID_MEMORY = replace(
    _CONTROL_BLOCK,
    summary="control_block, with the 4 most recent layer outputs as sources of their own",
    source=f"{SEED}: -0.034 evaluation loss (2.682 to 2.697 over 4 seeds), 0.43 of the tokens/s, 2.45 times the memory",
    window=4,
)
_ATTNRES_BLOCK = AttentionOverDepth(
    summary="each sublayer reads the sums of about 8 finished blocks, the unfinished block and the embedding",
    source=f"{PAPER}, Block AttnRes: the loss of a baseline given 1.25 times the compute; less than 4% slower under "
    "pipeline parallelism; torchtitan issue 3029 (175M): 0.70 of the tokens/s",
    granularity="sublayer",
    block_size=0,
    blocks=8,
    block_summary="sum",
)

NAMED: dict[str, AttentionOverDepth] = {
    "full_attnres": AttentionOverDepth(
        summary="each layer reads every earlier layer's output and the embedding",
        source=f"{SEED}: +0.499 evaluation loss, 0.36 of the tokens/s",
    ),
    "control_block": _CONTROL_BLOCK,
    "block_input_dep_query": replace(
        _CONTROL_BLOCK,
        summary="control_block, with a term of rank 16 in the query that depends on the current input",
        source=f"{SEED}: +0.001 evaluation loss, 0.47 of the tokens/s, 1.99 times the memory",
        query_rank=16,
    ),
    "block_hybrid_memory": _HYBRID_MEMORY,
    "block_alibi_depth": replace(
        _CONTROL_BLOCK,
        summary="control_block, with a bias on the logits that falls linearly with distance in depth",
        source=f"{SEED}: -0.012 evaluation loss, 0.54 of the tokens/s, 1.83 times the memory",
        position="linear",
    ),
    "block_gqa_depth": replace(
        _CONTROL_BLOCK,
        summary="control_block, with one query for each group of 4 layers",
        source=f"{SEED}: -0.025 evaluation loss, 0.54 of the tokens/s, 1.83 times the memory",
        query_share="group",
    ),
    "block_mqa_depth": replace(
        _CONTROL_BLOCK,
        summary="control_block, with one query for all layers and a key gain for each block",
        source=f"{SEED}: proposed there, not built",
        query_share="all",
        key_gain="block",
    ),
    "block_rope_depth": replace(
        _CONTROL_BLOCK,
        summary="control_block, with rotary position embedding over depth",
        source=f"{SEED}: crashed at step 80",
        position="rotary",
    ),
    "block_sparse_depth": replace(
        _CONTROL_BLOCK,
        summary="control_block, reading only the 4 nearest blocks and every 4th older one",
        source=f"{SEED}: +0.100 evaluation loss when stopped at step 5000, 0.54 of the tokens/s",
        sparse=True,
    ),
    "block_value_proj": replace(
        _CONTROL_BLOCK,
        summary="control_block, with a learned map on the values",
        source=f"{SEED}: +0.352 evaluation loss, 0.53 of the tokens/s",
        value_map=True,
    ),
    "deep_control_block": replace(
        _CONTROL_BLOCK,
        summary="control_block, for the size 500M-deep: 48 layers of width 1080",
        source=f"{SEED}: evaluation loss 2.946 at step 2500; 2.998 standard at the same depth, 2.974 at 24 layers",
    ),
    "deep_hybrid_memory": replace(
        _HYBRID_MEMORY,
        summary="block_hybrid_memory, for the size 500M-deep: 48 layers of width 1080",
        source=f"{SEED}: no figure, at step 1200 when reported",
    ),
    "attnres_block": _ATTNRES_BLOCK,
    "attnres_full": AttentionOverDepth(
        summary="each sublayer reads every earlier sublayer's output and the embedding",
        source=f"{PAPER}, Full AttnRes: the block form keeps most of its gain",
        granularity="sublayer",
        block_summary="sum",
    ),
    "delta_attnres": replace(
        _ATTNRES_BLOCK,
        summary="the residual stream stays; each sublayer adds a read of the embedding and the finished blocks' sums",
        source="Luo, Cai, Hu, arXiv 2605.18855, Delta Block (their code's delta_block): perplexity 37.1, 31.2, "
        "29.2 against 38.7, 32.0, 29.7 at 220M, 533M, 1044M",
        routing="add",
    ),
    "attnres_low_rank": replace(
        _ATTNRES_BLOCK,
        summary="attnres_block, with keys from the last quarter of each source's coordinates",
        source="output-tail keys of github.com/jon123boss/LR-AttnRes (2026-06), no figures; D/4 (choice)",
        key_fraction=0.25,
    ),
}
