"""What attention over depth costs, which sources its reads see, and what it says to options that do not fit."""

import json
from dataclasses import replace

import pytest
import torch

from torchtitan_ext.depth.attention import FusedAttention
from torchtitan_ext.depth.attention_over_depth import AttentionOverDepth
from torchtitan_ext.depth.attention_over_depth_named import NAMED
from torchtitan_ext.depth.build import decoder_config
from torchtitan_ext.depth.depth_plan import Place
from torchtitan_ext.depth.variant import Variant
from torchtitan_ext.errors import UserError
from torchtitan_ext.resolve import load_resolved
from torchtitan_ext.sizes import SIZES, shape_of

every_variant = pytest.mark.parametrize("variant", NAMED.values(), ids=NAMED)


def shape(layers: int = 12, width: int = 64):
    return shape_of("debug", 256, layers=layers, width=width)


def config_of(variant: Variant, size: str):
    return decoder_config(shape_of(size, 50304), variant, seq_len=64, inner_attention=FusedAttention.Config())


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@every_variant
def test_parameters_of_every_size_are_counted_exactly(variant: AttentionOverDepth) -> None:
    with torch.device("meta"):
        for size in SIZES:
            named = shape_of(size, 50304)
            variant.check(named)
            ends = [end for layer in range(named.layers) for end in variant.connections(named, layer)]
            assert count(variant.stream(named).build()) == variant.parameters(named), size
            assert sum(count(end.build()) for end in ends) == 0, size


@every_variant
def test_the_rest_of_the_model_is_the_standard_model(variant: AttentionOverDepth) -> None:
    with torch.device("meta"):
        model, standard = config_of(variant, "debug").build(), config_of(Variant(), "debug").build()
    ours = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    learned = {f"stream.{name}": size for name, size in variant.learned(shape_of("debug", 50304)).items()}
    assert ours == {**{name: tuple(parameter.shape) for name, parameter in standard.named_parameters()}, **learned}


def test_flops_are_the_operations_of_every_read() -> None:
    """Per source of a read K multiply-adds for the logit, K for the mean square, D for the sum; 2 FLOPs, 3 passes."""
    four = shape(layers=4)
    multiply_adds = 64 + 64 + 64
    # After 1, 2, 3 and 4 layers: embedding + unfinished, the same, embedding + block, those + unfinished.
    assert NAMED["control_block"].sources_per_read(four) == [1, 2, 2, 2, 3]
    assert NAMED["control_block"].flops_per_token(four, 8) == 3 * 2 * (2 + 2 + 2 + 3) * multiply_adds
    # A map of 64 x 64 after each of the five reads.
    mapped = 3 * 2 * ((2 + 2 + 2 + 3) * multiply_adds + 5 * 64 * 64)
    assert NAMED["block_value_proj"].flops_per_token(four, 8) == mapped
    # Rank 16: a projection of 64 to 16 for each of four reads, and 16 inner products more per source.
    dependent = 3 * 2 * ((2 + 2 + 2 + 3) * (multiply_adds + 16 * 64) + 4 * 64 * 16)
    assert NAMED["block_input_dep_query"].flops_per_token(four, 8) == dependent
    # Keys of 16 coordinates; four layers in eight blocks are four blocks of two outputs, read nine times.
    assert NAMED["attnres_low_rank"].sources_per_read(four) == [1, 2, 2, 3, 3, 4, 4, 5, 5]
    narrow = 3 * 2 * (2 + 2 + 3 + 3 + 4 + 4 + 5 + 5) * (16 + 16 + 64)
    assert NAMED["attnres_low_rank"].flops_per_token(four, 8) == narrow


@every_variant
def test_the_model_reports_the_standard_model_s_flops_and_its_own(variant: AttentionOverDepth) -> None:
    debug = shape_of("debug", 50304)
    with torch.device("meta"):
        config, standard = config_of(variant, "debug"), config_of(Variant(), "debug")
        parameters, flops = config.get_nparams_and_flops(config.build(), 64)
        without, base = standard.get_nparams_and_flops(standard.build(), 64)
    assert parameters - without == variant.parameters(debug)
    assert flops - base == variant.flops_per_token(debug, 64)


def test_sources_of_reads_in_order() -> None:
    def seen(variant: AttentionOverDepth, read: int) -> list[tuple[Place, int, float, int, int]]:
        sources = variant.plan(shape(layers=24)).sources(read)
        return [(s.place, s.index, s.scale, s.block, s.position) for s in sources]

    finished, partial, recent = Place.FINISHED, Place.PARTIAL, Place.RECENT
    third = 1 / 3
    assert seen(NAMED["control_block"], 0) == [(finished, 0, 1.0, 0, 0)]
    blocks = [(finished, 0, 1.0, 0, 0), (finished, 1, third, 1, 3), (finished, 2, third, 2, 6)]
    assert seen(NAMED["control_block"], 6) == blocks
    assert seen(NAMED["control_block"], 8) == [*blocks, (partial, 0, 0.5, 3, 8)]
    window = [(recent, 0, 1.0, 2, 5), (recent, 1, 1.0, 2, 6), (recent, 2, 1.0, 3, 7), (recent, 3, 1.0, 3, 8)]
    assert seen(NAMED["block_hybrid_memory"], 8) == [*blocks, (partial, 0, 0.5, 3, 8), *window]
    assert seen(NAMED["delta_attnres"], 0) == []
    # Blocks of six layers, twelve outputs: at 26 two are finished; the two outputs since are in the running sum alone.
    # The read at 24, at the end of the second, does not see it yet.
    for read, blocks in ((26, 2), (25, 2), (24, 1), (12, 0)):
        expected = [(finished, i, 1.0, i, 12 * i) for i in range(blocks + 1)]
        assert seen(NAMED["delta_attnres"], read) == expected
    assert seen(NAMED["delta_attnres_paper"], 24) == [(finished, i, 1.0, i, 12 * i) for i in range(3)]
    # The four newest of 0..8, and of the older ones 0 and 4.
    assert [index for _, index, *_ in seen(NAMED["block_sparse_depth"], 24)] == [0, 4, 5, 6, 7, 8]
    assert [index for _, index, *_ in seen(NAMED["block_sparse_depth"], 12)] == [0, 1, 2, 3, 4]


def test_layers_of_a_block_or_a_group_share_a_query_and_the_final_norm_has_its_own() -> None:
    """The first read has one source and no query: of the first block of three, two layers choose."""
    for name in ("control_block", "block_hybrid_memory", "block_input_dep_query", "block_sparse_depth"):
        rows = [read.query_row for read in NAMED[name].plan(shape(layers=8)).reads()]
        assert rows == [None, 0, 0, 1, 1, 1, 2, 2, 3]
    rows = [read.query_row for read in replace(NAMED["control_block"], query_share="read").plan(shape(4)).reads()]
    assert rows == [None, 0, 1, 2, 3]
    sublayers = replace(NAMED["attnres_block"], query_share="block", blocks=2)
    assert [read.query_row for read in sublayers.plan(shape(layers=4)).reads()] == [None, 0, 0, 0, 1, 1, 1, 1, 2]
    rows = [read.query_row for read in NAMED["block_gqa_depth"].plan(shape(layers=10)).reads()]
    assert rows == [None, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3]
    sublayers = replace(NAMED["attnres_block"], query_share="group", query_group=2)
    rows = [read.query_row for read in sublayers.plan(shape(layers=3)).reads()]
    assert rows == [None, 0, 0, 0, 1, 1, 2]
    rows = [read.query_row for read in NAMED["block_mqa_depth"].plan(shape(layers=4)).reads()]
    assert rows == [None, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("size", "blocks"), [("debug", 4), ("1.2M", 6), ("100M", 7), ("500M", 8), ("750M", 7), ("500M-deep", 8)]
)
def test_about_eight_blocks_of_whole_layers(size: str, blocks: int) -> None:
    named = shape_of(size, 256)
    plan = NAMED["attnres_block"].plan(named)
    assert plan.block_size % 2 == 0
    assert -(-2 * named.layers // plan.block_size) == blocks


@every_variant
def test_initial_values(variant: AttentionOverDepth) -> None:
    model = config_of(variant, "debug").build()
    model.init_states()
    stream = model.stream
    assert stream.queries.any() == (variant.query_std > 0)
    assert (stream.gains == 1).all()
    if variant.query_rank:
        assert not stream.query_up.any()
        assert stream.query_down.any()
    if variant.value_map:
        assert torch.equal(stream.value_map, torch.eye(64))


@every_variant
def test_the_configuration_can_be_written_down(variant: AttentionOverDepth) -> None:
    assert (
        json.loads(json.dumps(config_of(variant, "debug").to_dict()))["stream"]["variant"]["summary"] == variant.summary
    )
    assert len({variant.summary for variant in NAMED.values()}) == len(NAMED)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"granularity": "sublayers"}, "depth.granularity = 'sublayers' is unknown; did you mean 'sublayer'?"),
        ({"position": "alibi"}, "depth.position = 'alibi' is unknown; choose from: none, linear, rotary"),
        ({"block_summary": "max"}, "choose from: mean, sum, alternating"),
        ({"block_summary": "alternating"}, "is made from the running sum, which is there with depth.routing: add"),
        ({"late_blocks": True}, "depth.late_blocks = True has no effect without depth.routing: add; set that"),
        ({"query_std": -0.1}, "depth.query_std = -0.1 is a standard deviation; choose 0 or more"),
        ({"query_scale": "sqrt"}, "depth.query_scale = 'sqrt' is unknown"),
        ({"source_kind": "deltas"}, "did you mean 'delta'?"),
        ({"query_share": "groups"}, "did you mean 'group'?"),
        ({"key_gain": "none"}, "choose from: read, block"),
        ({"routing": "additive"}, "choose from: replace, add"),
        ({"block_size": 13}, "depth.block_size = 13, but the model has 12 outputs, one per layer; choose 0 to 12"),
        ({"block_size": 25, "granularity": "sublayer"}, "has 24 outputs, two per layer; choose 0 to 24"),
        ({"block_size": -1}, "one of them says how outputs are grouped"),
        ({"block_size": 3, "blocks": 8}, "one of them says how outputs are grouped; set the other to 0"),
        ({"block_size": 0}, "one of them says how outputs are grouped"),
        ({"block_size": 0, "blocks": 4, "routing": "add", "window": -2}, "depth.window = -2"),
        ({"block_size": 3, "window": 13}, "depth.window = 13, but the model has 12 outputs"),
        ({"block_size": 1, "window": 2}, "where every output is a source already"),
        (
            {"query_share": "group", "query_group": 13},
            "depth.query_group = 13, but the model has 12 layers; choose 2 to 12",
        ),
        ({"query_share": "group", "query_group": 1}, "choose 2 to 12"),
        ({"query_rank": 65}, "depth.query_rank = 65, but the model's width is 64; choose 0 to 64"),
        ({"sparse": True, "nearest": 0}, "depth.nearest = 0, but the newest block is always read; choose 1 or more"),
        ({"sparse": True, "every": 0}, "depth.every = 0"),
        ({"nearest": 2}, "depth.nearest = 2 has no effect without depth.sparse: true; set that, or leave out"),
        ({"slope": 0.5}, "depth.slope = 0.5 has no effect without depth.position: linear"),
        ({"query_group": 2}, "depth.query_group = 2 has no effect without depth.query_share: group"),
        ({"position": "linear", "slope": 0.0}, "choose a slope above 0"),
        ({"key_rank": 65}, "depth.key_rank = 65, but the model's width is 64"),
        ({"key_rank": 8, "key_fraction": 0.5}, "both say how wide keys are"),
        ({"key_fraction": 0.0}, "depth.key_fraction = 0.0 is no fraction of the width"),
        ({"key_fraction": 0.01}, "leaves no coordinate of width 64"),
        ({"key_rank": 7, "position": "rotary"}, "turns pairs of coordinates, but keys have 7; make it even"),
        (
            {"block_size": 12, "routing": "add"},
            "no block is finished before the last read; make depth.block_size smaller",
        ),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused_in_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as error:
        AttentionOverDepth(**options).check(shape())
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("control_block", {"backend": "tritn"}, r"did you mean 'triton'\?"),
        (
            "control_block",
            {"backend": "fast-attnres"},
            r"block_summary = 'mean' asks for; choose from: auto, torch, triton",
        ),
        ("attnres_block", {"backend": "flash-attn-res"}, r"power of two, which model.width = 96"),
        ("block_input_dep_query", {"backend": "triton"}, r"depth.query_rank = 16 asks for; choose from: auto, torch$"),
        ("block_rope_depth", {"backend": "flash-linear-attention", "block_summary": "sum"}, r"position = 'rotary'"),
    ],
)
def test_a_backend_that_cannot_do_the_reads_is_refused(name, options, message) -> None:
    with pytest.raises(UserError, match=message):
        NAMED[name].with_options(options, lambda key: key).check(shape(width=96))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_backend_of_gpus_is_refused_where_a_run_starts_without_one() -> None:
    planned = NAMED["control_block"].with_options({"backend": "triton"}, lambda key: key)
    planned.check(shape())  # planning a run for another machine is allowed
    with pytest.raises(UserError, match="'triton' needs a CUDA GPU, and none is visible; 'auto'"):
        planned.check_machine("auto")
    NAMED["control_block"].check_machine("auto")


def test_a_backend_of_half_precision_is_refused_for_a_run_in_fp32() -> None:
    half = NAMED["attnres_block"].with_options({"backend": "fast-attnres"}, lambda key: key)
    half.check_precision("bf16")
    with pytest.raises(UserError, match=r"'fast-attnres' has no reads in fp32.*auto, torch, triton, flash-linear-att"):
        half.check_precision("fp32")


def test_the_backend_is_no_part_of_a_run_s_identity(dataset, tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {{size: debug, variant: control_block}}\ndata: {{path: {dataset}, seq_len: 64}}\n"
        "training: {steps: 4, batch_tokens: 1024}\n"
    )
    plain = load_resolved(str(file), []).identity()
    assert load_resolved(str(file), ["--depth.backend", "triton"]).identity() == plain
    assert load_resolved(str(file), ["--depth.block_size", "2"]).identity() != plain
