"""The shapes of the models by name, and how many parameters and FLOPs a shape has.

The architecture is torchtitan's Llama 3: grouped-query attention, RMSNorm before each sublayer and before the head,
SwiGLU with three matrices, no biases, rotary positions, head dimension ``width / heads``. With another block it
is GPT-2's.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from torchtitan_ext.errors import UserError, nearest


def _nearest_divisor(n: int, near: int) -> int:
    """Return the divisor of ``n`` that is closest to ``near``."""
    return min((d for d in range(1, n + 1) if n % d == 0), key=lambda d: abs(d - near))


@dataclass(frozen=True)
class Size:
    """A named size: the numbers of a decoder that do not depend on the vocabulary."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn_width: int


@dataclass(frozen=True)
class Shape(Size):
    """A size with its vocabulary: enough to build a standard model.

    Attributes:
        tied: the head shares the embedding's matrix.
        block: one of ``BLOCKS``.
        positions: learned embeddings of positions, which blocks other than ``llama`` have; else 0.
    """

    vocab_size: int
    tied: bool = True
    block: str = "llama"
    positions: int = 0

    @property
    def is_llama(self) -> bool:
        return self.block == "llama"

    @property
    def biases(self) -> bool:
        """Whether norms and projections have biases."""
        return self.block == "gpt2"

    @property
    def head_dim(self) -> int:
        """Query, key and value dimension of one attention head: ``width / heads``."""
        return self.width // self.heads

    def described(self) -> dict[str, Any]:
        """All fields by name, as run folders have them: those of the block are left out for ``llama``, as before there
        was a choice."""
        return {name: value for name, value in asdict(self).items() if not (self.is_llama and name in _OF_THE_BLOCK)}

    def validate(self, where: str) -> None:
        """Raise `UserError`, starting with ``where``, for the first number that no decoder can have."""
        if self.block not in BLOCKS:
            raise UserError(f"{where}: block {self.block!r} is unknown; {nearest(self.block, BLOCKS)}")
        for name, value in asdict(self).items():
            if name not in ("tied", "block", "positions") and value < 1:
                raise UserError(f"{where}: {name} = {value}, but it must be 1 or more")
        if self.width % 2:
            raise UserError(f"{where}: width = {self.width} is odd; rotary positions need an even head dimension")
        if self.width % (2 * self.heads):
            odd = f"gives the odd head dimension {self.head_dim}"
            problem = "does not divide it" if self.width % self.heads else odd
            best = _nearest_divisor(self.width // 2, self.heads)
            raise UserError(
                f"{where}: width = {self.width} and heads = {self.heads}, which {problem}; "
                f"try heads = {best} (head dimension {self.width // best})"
            )
        if self.heads % self.kv_heads:
            best = _nearest_divisor(self.heads, self.kv_heads)
            raise UserError(
                f"{where}: heads = {self.heads} and kv_heads = {self.kv_heads}, which does not divide it; "
                f"try kv_heads = {best}"
            )

    def parameters(self) -> int:
        """All parameters; a tied embedding counts once."""
        embeddings = (1 if self.tied else 2) * self.vocab_size + self.positions
        return self.layers * self.layer_parameters() + self._norm_parameters() + embeddings * self.width

    def _norm_parameters(self) -> int:
        return self.width * (1 + self.biases)

    def layer_parameters(self) -> int:
        """The parameters of one layer."""
        attention = 2 * self.width * self.width + 2 * self.width * self.kv_heads * self.head_dim
        feed_forward = (3 if self.is_llama else 2) * self.width * self.ffn_width
        return attention + feed_forward + 2 * self._norm_parameters() + self._layer_biases()

    def _layer_biases(self) -> int:
        """The biases of one layer's projections."""
        return self.biases * (3 * self.width + 2 * self.kv_heads * self.head_dim + self.ffn_width)

    def undecayed_parameters(self) -> int:
        """The parameters of norms, of biases, and of the embeddings, one of which is the head's matrix too where they
        are tied."""
        embeddings = (self.vocab_size + self.positions) * self.width
        return (2 * self.layers + 1) * self._norm_parameters() + self.layers * self._layer_biases() + embeddings

    def matmul_parameters(self) -> int:
        """The parameters without the embedding look-ups; a tied embedding stays in, for it is the head's matrix."""
        return self.parameters() - (self.positions + (0 if self.tied else self.vocab_size)) * self.width

    def flops_per_token(self, seq_len: int) -> int:
        """Training FLOPs per token at sequences of ``seq_len`` tokens, forward and backward.

        torchtitan 0.3.0's convention (``get_dense_model_nparams_and_flops`` in ``torchtitan/models/utils.py``): 6 per
        parameter in a matrix product, 12 per width and position for the attention scores and values; the causal
        mask saves nothing, recomputation costs nothing.
        """
        return 6 * self.matmul_parameters() + 12 * self.layers * self.width * seq_len

    def layer_flops_per_token(self, seq_len: int) -> int:
        """Those of applying one layer once."""
        return 6 * self.layer_parameters() + 12 * self.width * seq_len


_OF_THE_BLOCK = ("block", "positions")
BLOCKS = ("llama", "gpt2", "nanogpt")
"""The layers of a standard model. ``llama``: RMSNorm, SwiGLU, rotary positions, no biases. ``gpt2`` (Radford et al.
2019; github.com/openai/gpt-2): LayerNorm, GELU by its tanh approximation, learned positions, biases. ``nanogpt``
(github.com/karpathy/nanoGPT with ``bias=False``, its ``train.py``'s default): the same with the exact GELU and without
biases."""

# Each comment gives the total parameters with 50,304 tokens (GPT-2's vocabulary, padded) and tied embeddings, then
# where the shape comes from: a Hugging Face name stands for that model's config.json. Deep and thin below 500M, as
# MobileLLM found best for small models (arXiv:2402.14905).
SIZES: dict[str, Size] = {
    # For tests: every mechanism of the large ones (two query heads per key/value head), seconds on a CPU.
    "debug": Size(layers=4, width=64, heads=4, kv_heads=2, ffn_width=192),
    # 1.19M without embeddings. nanoGPT's character model at width 128: 6 layers, one key/value head per query head.
    # Four heads, so that widths 112 and 136 also give even head dimensions (28, 34). 344 = 8/3 x 128 to a multiple of
    # 8: SwiGLU with the parameters of nanoGPT's two-matrix feed-forward.
    "1.2M": Size(layers=6, width=128, heads=4, kv_heads=4, ffn_width=344),
    # 9.3M, 9.8M and 10.4M with 4,096, 6,144 and 8,192 tokens; for CPUs. SmolLM2's head dimension 64 and nearly its
    # feed-forward ratio (8/3), with enough layers for there to be depth to study.
    "10M": Size(layers=12, width=256, heads=4, kv_heads=2, ffn_width=640),
    # 99.8M. The layer of SmolLM2-135M, which is also MobileLLM-125M's; 20 of its 30 layers.
    "100M": Size(layers=20, width=576, heads=9, kv_heads=3, ffn_width=1536),
    # 203.8M. SmolLM2's head dimension and 3:1 groups, between its 135M (width 576) and 360M (width 960); the
    # feed-forward is 3 x width, as in Qwen3-0.6B.
    "200M": Size(layers=24, width=768, heads=12, kv_heads=4, ffn_width=2304),
    # 351.1M. SmolLM2-360M, which is also MobileLLM-350M's shape, with its feed-forward cut from 2560 to meet the name.
    "350M": Size(layers=32, width=960, heads=15, kv_heads=5, ffn_width=2432),
    # 506.7M. Layers and width are those of a published study of depth attention at 500M, so the feed-forward has to be
    # narrow (1.75 x width). Qwen2.5-1.5B's attention at this width (12 heads of 128, 2 groups) leaves it the most.
    "500M": Size(layers=24, width=1536, heads=12, kv_heads=2, ffn_width=2688),
    # 760.0M. Layers, width and attention of Qwen2.5-1.5B with a feed-forward of 8/3 x width, as in Llama and SmolLM2.
    "750M": Size(layers=28, width=1536, heads=12, kv_heads=2, ffn_width=4096),
    # 1005M. Width and attention of Llama-3.2-1B with TinyLlama-1.1B's feed-forward (2.75 x width) and 20 layers, not
    # 16: Llama-3.2-1B's own 4 x width would leave room for 15.
    "1B": Size(layers=20, width=2048, heads=32, kv_heads=8, ffn_width=5632),
    # 1512M. Qwen3-1.7B; it is 1.7B with its own vocabulary of 151,936 tokens.
    "1.5B": Size(layers=28, width=2048, heads=16, kv_heads=8, ffn_width=6144),
    # 502.3M, 0.9% from 500M, with twice the layers and nearly the same feed-forward ratio (1.78). 1080 is not a
    # multiple of 64. Nine heads of 120 (a multiple of 8, as flash attention needs) lose least: FlexAttention pads the
    # head dimension to a power of two, so 120 costs 7% more attention work and 72 (15 heads) would cost 78%.
    "500M-deep": Size(layers=48, width=1080, heads=9, kv_heads=3, ffn_width=1920),
}


def shape_of(
    size: str,
    vocab_size: int,
    *,
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    ffn_width: int | None = None,
    tied: bool = True,
    block: str = "llama",
    seq_len: int = 0,
    where: str = "model",
) -> Shape:
    """Return the shape of a named size for a vocabulary, with any of its numbers replaced.

    Blocks other than ``llama`` have a learned position for each of ``seq_len`` tokens, and two matrices in the
    feed-forward in place of three: without a new ``ffn_width`` they get 3/2 of the size's, for as many parameters.

    A new ``width`` without a new ``ffn_width`` keeps the size's feed-forward ratio, to a multiple of 8. Nothing else
    follows: head counts stay as they are.

    Raises:
        UserError: no size has this name, or the numbers do not fit together; the message starts with ``where``.
    """
    if size not in SIZES:
        raise UserError(f"{where}: no size is called {size!r}; {nearest(size, SIZES)}")
    named = SIZES[size]
    if ffn_width is None and (width is not None or block != "llama"):
        ratio = named.ffn_width / named.width * (1 if block == "llama" else 1.5)
        ffn_width = max(8, 8 * round(ratio * (width or named.width) / 8))
    given = {"layers": layers, "width": width, "heads": heads, "kv_heads": kv_heads, "ffn_width": ffn_width}
    chosen = replace(named, **{name: value for name, value in given.items() if value is not None})
    positions = 0 if block == "llama" else seq_len
    shape = Shape(**asdict(chosen), vocab_size=vocab_size, tied=tied, block=block, positions=positions)
    shape.validate(where)
    return shape


def padded_vocab(n: int) -> int:
    """Return the next multiple of 64 (50,257 becomes 50,304).

    A head whose columns fill the matrix units' tiles is faster: nanoGPT's ``model.py`` pads GPT-2's vocabulary so.
    """
    if n < 1:
        raise UserError(f"a vocabulary has 1 token or more, not {n}")
    return -(-n // 64) * 64
