"""Whatever is typed, the answer is a run or one line: never another exception."""

import random
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

import pytest

from torchtitan_ext.errors import UserError
from torchtitan_ext.run_file import Run, describe_schema, load_run

KEYS = [row.key for row in describe_schema() if row.key != "extends" and "<" not in row.key]
ROUNDS = 40


def write(values: dict[str, str]) -> str:
    """Return a run file with one line for each ``section.key``, in the order of the sections."""
    lines: list[str] = []
    section = ""
    for key in sorted(values):
        head, dot, below = key.rpartition(".")
        if dot and head != section:
            lines.append(f"{head}:")
        section = head
        lines.append(f"  {below}: {values[key]}" if dot else f"{key}: {values[key]}")
    return "\n".join(lines) + "\n"


VALID = {
    "model.size": "10M",
    "data.path": "d",
    "training.tokens": "1e6",
    "training.batch_tokens": "2048",
    "optimizer.lr": "3e-4",
    "checkpoint.milestones": "[1, 2]",
    "name": "fuzz",
    "seed": "1",
}


def misspell(rng: random.Random, word: str) -> str:
    at = rng.randrange(len(word))
    letter = rng.choice("abcdefghijklmnopqrstuvwxyz_")
    return rng.choice([word[:at] + word[at + 1 :], word[:at] + letter + word[at:], word[:at] + letter + word[at + 1 :]])


def one_line(error: UserError) -> str:
    line = str(error)
    assert line.splitlines() == [line]
    assert "pydantic" not in line
    return line


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_a_misspelt_key_names_its_line_and_a_real_key(load: Callable[..., Run], seed: int) -> None:
    rng = random.Random(seed)
    key = rng.choice(sorted(VALID))
    section, dot, last = key.rpartition(".")
    wrong = section + dot + misspell(rng, last)
    while wrong in KEYS or wrong == key:
        wrong = section + dot + misspell(rng, last)
    text = write({wrong if name == key else name: value for name, value in VALID.items()})
    number = next(
        n for n, line in enumerate(text.splitlines(), 1) if line.strip().startswith(wrong[len(section + dot) :] + ":")
    )
    with pytest.raises(UserError) as error:
        load(text)
    line = one_line(error.value)
    assert line.startswith(f"x.yaml:{number}: {wrong} is not a key; ")
    siblings = [name.rpartition(".")[2] for name in KEYS if name.rpartition(".")[0] == section]
    if dot and last in get_close_matches(wrong.rpartition(".")[2], siblings, n=1):
        assert f"'{last}'" in line


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_a_value_of_the_wrong_type_names_its_line_and_key(load: Callable[..., Run], seed: int) -> None:
    rng = random.Random(seed)
    key = rng.choice([name for name in KEYS if name not in ("training.steps", "training.tokens_per_parameter")])
    value = rng.choice(["{a: 1}", "[[1], {a: 2}]", "[x, 1]", '"\\u2028"', '"\\ud800"'])
    text = write(VALID | {key: value})
    last = key.rpartition(".")[2]
    number = next(n for n, line in enumerate(text.splitlines(), 1) if line.strip() == f"{last}: {value}")
    with pytest.raises(UserError) as error:
        load(text)
    assert one_line(error.value).startswith(f"x.yaml:{number}: {key}")


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_any_change_of_the_bytes_gives_a_run_or_one_line(load: Callable[..., Run], seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        content = bytearray(write(VALID).encode())
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(content))
            piece = rng.choice(
                [
                    b"\t",
                    b"\0",
                    b"\xff",
                    b"\n",
                    b": ",
                    b"- ",
                    b"[",
                    b"{",
                    b'"',
                    b"'",
                    b"&a ",
                    b"*a",
                    b"!",
                    b"|\n",
                    b"? ",
                    b"%",
                    b"---\n",
                    b"\xe2\x80\xa8",
                    b'"\\x',
                    b"<<: ",
                    b"\xc2\x85",
                    bytes([rng.randrange(256)]),
                ]
            )
            content[at : at + rng.randint(0, 8)] = piece
        try:
            assert isinstance(load(bytes(content)), Run)
        except UserError as error:
            one_line(error)


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_any_command_line_gives_a_run_or_one_line(load: Callable[..., Run], seed: int) -> None:
    rng = random.Random(seed)
    load(write(VALID))
    pieces = [
        "",
        "-1",
        "1e9",
        "[",
        "[1, {}]",
        "'",
        '"\\ud800"',
        "\udcff",
        "a\nb",
        "{name}",
        "null",
        "true",
        "--",
        "-",
        "=",
        "1e999",
    ]
    for _ in range(10):
        tokens = []
        for _ in range(rng.randint(1, 4)):
            key = rng.choice([*KEYS, "depth.a", "depth", "model", "", "extends", "a\nb"])
            tokens += rng.choice(
                [
                    [f"--{key}"],
                    [f"--{key}", rng.choice(pieces)],
                    [f"--{key}={rng.choice(pieces)}"],
                    [rng.choice(pieces)],
                ]
            )
        try:
            assert isinstance(load_run(Path("x.yaml"), tokens), Run)
        except UserError as error:
            one_line(error)
