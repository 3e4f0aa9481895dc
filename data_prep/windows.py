"""Which tokens make which sample: windows of a split, in a seeded order that differs from epoch to epoch.

A *window* is ``seq_len + 1`` consecutive tokens: the inputs and, shifted by one, the targets. *Samples* are numbered
from 0 for ever; a sample is a window, and each epoch visits every window once.
"""

from collections.abc import Iterable

import numpy as np

from data_prep.dataset import TokenSplit
from torchtitan_ext.errors import UserError

ROUNDS = 8
MASK64 = (1 << 64) - 1


class WindowOrder:
    """The window of each sample: a fresh pseudo-random permutation of the windows in each epoch.

    A Feistel network is a bijection on numbers of a fixed length in bits, whatever its round function is (Luby and
    Rackoff 1988); walking along a cycle until it is back among ``n_windows`` numbers restricts it to those (Black and
    Rogaway 2002, "Ciphers with arbitrary finite domains", section 4). So any sample is found in constant time and
    memory, from ``seed`` and the sample's number alone.

    Args:
        n_windows: how many windows there are, at least 1.
        seed: of the order; any integer.
    """

    def __init__(self, n_windows: int, seed: int) -> None:
        self.n_windows = n_windows
        self.seed = seed
        bits = (n_windows - 1).bit_length()
        self._low_bits = bits // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (bits - self._low_bits)) - 1
        self._epoch = -1
        self._keys: list[int] = []

    def window(self, sample: int) -> int:
        """Return the window [0, n_windows) of ``sample``, counted from 0."""
        epoch, index = divmod(sample, self.n_windows)
        if epoch != self._epoch:
            self._epoch, self._keys = epoch, _round_keys(self.seed, epoch)
        index = self._permute(index)
        while index >= self.n_windows:
            index = self._permute(index)
        return index

    def _permute(self, index: int) -> int:
        low, high = index & self._low_mask, index >> self._low_bits
        for number, key in enumerate(self._keys):
            if number % 2:
                low ^= _mix(high ^ key) & self._low_mask
            else:
                high ^= _mix(low ^ key) & self._high_mask
        return high << self._low_bits | low


def _round_keys(seed: int, epoch: int) -> list[int]:
    state = _mix(_mix(seed & MASK64) ^ epoch)
    return [_mix(state + number & MASK64) for number in range(ROUNDS)]


def _mix(number: int) -> int:
    """Scramble 64 bits: one step of SplitMix64 (Steele, Lea and Flood 2014, figure 18)."""
    number = number + 0x9E3779B97F4A7C15 & MASK64
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    number = (number ^ number >> 27) * 0x94D049BB133111EB & MASK64
    return number ^ number >> 31


class Windows:
    """The windows of a split: window ``i`` is tokens ``[i*seq_len, i*seq_len + seq_len + 1)``.

    Neighbours share one token, the last target of one and the first input of the next: every token is predicted once.

    Args:
        split: the tokens.
        seq_len: inputs in a window.
        batch: the fewest windows that make sense, the global batch in sequences for training.

    Raises:
        UserError: the split has fewer windows than ``batch``.
    """

    def __init__(self, split: TokenSplit, seq_len: int, batch: int = 1) -> None:
        self.split = split
        self.seq_len = seq_len
        self.n_windows = max(0, (split.n_tokens - 1) // seq_len)
        if self.n_windows < batch:
            raise UserError(
                f"{split.path}: the {split.name} split has {split.n_tokens} tokens, {self.n_windows} windows of "
                f"{seq_len}, and a batch needs {batch}; prepare more text, or lower the sequence length or the batch"
            )

    def __getitem__(self, index: int) -> np.ndarray:
        """Return window ``index`` [seq_len + 1], uint16 or uint32."""
        start = index * self.seq_len
        return self.split.read(start, start + self.seq_len + 1)

    def batch(self, indices: Iterable[int]) -> np.ndarray:
        """Return windows stacked [len(indices), seq_len + 1], int64."""
        return np.stack([self[index] for index in indices]).astype(np.int64)


def document_positions(tokens: np.ndarray, eot_id: int) -> np.ndarray:
    """Return each token's position in its document [..., T] int32, counted from the start of the window or document.

    Args:
        tokens: [..., T].
        eot_id: the end-of-text token: the last of its document, so that the next position is 0.
    """
    index = np.arange(tokens.shape[-1], dtype=np.int32)
    begins = np.zeros(tokens.shape, dtype=np.int32)
    begins[..., 1:] = np.where(tokens[..., :-1] == eot_id, index[1:], 0)
    return index - np.maximum.accumulate(begins, axis=-1)


def samples_of(step: int, pass_index: int, rank: int, ranks: int, micro_batch: int, global_batch: int) -> range:
    """Return the samples of one micro-batch.

    Step k takes samples ``[k*G, (k+1)*G)`` of the global batch G; accumulation pass j on data rank r of R with
    micro-batch m takes ``k*G + j*R*m + r*m`` and the m - 1 behind it. So every division of G into ranks and passes
    trains on the same samples.

    Raises:
        UserError: the global batch is not a whole number of passes.
    """
    if global_batch % (ranks * micro_batch):
        raise UserError(
            f"a global batch of {global_batch} sequences is not a multiple of {ranks} data ranks times a micro-batch "
            f"of {micro_batch} ({ranks * micro_batch}); change one of them"
        )
    first = step * global_batch + (pass_index * ranks + rank) * micro_batch
    return range(first, first + micro_batch)


def heldout_windows(n_windows: int, limit: int) -> list[int]:
    """Return at most ``limit`` windows spread evenly over all of them: the same ones whatever a run's seed."""
    count = min(n_windows, limit)
    return [number * n_windows // count for number in range(count)]
