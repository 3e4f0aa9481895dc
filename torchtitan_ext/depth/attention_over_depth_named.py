"""The named variants of attention over depth, each with its intervention and the figures its source reports.

``SEED`` is attnres-results.md, "AttnRes: Attention Over the Residual Stream", 2026-03-20: 24 layers of width 1536,
about 500M parameters, FineWeb-Edu, evaluation loss at step 6000 against 2.716 of the standard model, tokens/s against
459k and memory against 49 GB. Its document leaves granularity and source kind open: reads per layer and differences
as sources (choice). It speaks of "the block query", to which ``block_input_dep_query`` gives "per-layer query
specialization within each block", and concludes that "a learned per-block query is sufficient": the layers of a block
share one query, and in ``block_input_dep_query`` each has a low-rank part of its own. Its remark that groups of 4
layers need 4 times fewer queries fits a query per layer instead, which is ``depth.query_share: read``.

``delta_attnres`` is what its authors' code computes, mode ``delta_block`` of modeling_qwen3_attnres.py with the number
of blocks of its train_scratch.py. With x the residual stream, x_k what it is after k blocks of ceil(layers / 4) layers,
and s_0 = x_0 the embedding::

    s_k = x_k − s_(k−1)       h = x + Σ_k softmax_k(⟨q, RMSNorm(s_k) ⊙ γ⟩) s_k       x ← x + f(norm(h))

so with d_k the sum of what block k adds, s is x_0, d_1, x_0 + d_2, d_1 + d_3, x_0 + d_2 + d_4 and so on. The attention
that follows block k does not see s_k yet, its feed-forward does; the model's first attention reads x alone, and so does
the final norm. Queries start with standard deviation 0.02, γ at one; the key norm has eps 1e-6. The paper has the
differences d_k themselves and queries that start at zero, which is ``delta_attnres_paper``. The code has queries and
gains for the model's first two sublayers too, which have nothing to choose from, and takes the softmax in the run's
precision; here they are left out, and the softmax is in fp32.
"""

from dataclasses import replace

from torchtitan_ext.recipe import INIT_STD

from .attention_over_depth import AttentionOverDepth

SEED = "attnres-results.md (2026-03-20), 500M"
PAPER = "Kimi Team, arXiv 2603.15031"

_CONTROL_BLOCK = AttentionOverDepth(
    summary="each layer reads the means of finished blocks of 3 layers, the unfinished block and the embedding",
    source=f"{SEED}: -0.022 evaluation loss over 2 seeds, 0.54 of the tokens/s, 1.83 times the memory",
    block_size=3,
    query_share="block",
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
_DELTA = "Luo, Cai, Hu, arXiv 2605.18855"
_DELTA_ATTNRES = AttentionOverDepth(
    summary="the residual stream x stays; each sublayer adds a read of s_k = x - s_(k-1), made as blocks end",
    source=f"{_DELTA}, Delta Block, mode delta_block of github.com/wdlctc/delta-attention-residuals-code @fc11c3e570: "
    "perplexity 37.1, 31.2, 29.2 against 38.7, 32.0, 29.7 at 220M, 533M, 1044M",
    granularity="sublayer",
    block_size=0,
    blocks=4,
    block_summary="alternating",
    routing="add",
    late_blocks=True,
    query_std=INIT_STD,
    # One AdamW for all parameters, as in the code's train_scratch.py.
    rates=(("queries.weight_decay_factor", 1.0), ("gains.weight_decay_factor", 1.0)),
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
    "delta_attnres": _DELTA_ATTNRES,
    "delta_attnres_paper": replace(
        _DELTA_ATTNRES,
        summary="delta_attnres, reading the embedding and the sum of each finished block as soon as it is finished",
        source=f"{_DELTA}, Delta Block as the text describes it; no figures of its own",
        block_summary="sum",
        late_blocks=False,
        query_std=0.0,
    ),
    "attnres_low_rank": replace(
        _ATTNRES_BLOCK,
        summary="attnres_block, with keys from the last quarter of each source's coordinates",
        source="output-tail keys of github.com/jon123boss/LR-AttnRes (2026-06), with its factor K^-1/2 on the query; "
        "no figures; D/4 (choice)",
        key_fraction=0.25,
        query_scale="inverse_sqrt",
        rates=(("queries.lr", 0.008),),  # AdamW's in the code's optimizer.py, beside Muon at 0.03 for matrices
    ),
}
