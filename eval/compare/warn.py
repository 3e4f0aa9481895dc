"""What a reader must know before believing a comparison."""

from eval.compare.grouping import LENGTH, Family, Group
from eval.compare.numbers import plural
from eval.compare.results import Reservation
from eval.compare.run import DIVERGED, FAILED, Run
from eval.compare.sweeps import RATE

FEW_SEEDS = 3
_RULE_OUT = (DIVERGED, FAILED)
"""Fates of runs that leave open how high the mean loss of their group is."""
_CALLED = {"optimizer.lr": "learning rate", "training.batch_tokens": "batch", "training.steps": "length"}


def group_notes(group: Group, base: Group | None, pairs: int) -> list[str]:
    """Notes on one row of the main table; ``base`` is None for the baseline itself."""
    notes = list(dict.fromkeys(f"{run.name}: {note}" for run in group.runs for note in run.notes))
    if group.lost:
        notes.append(f"without a final loss: {'; '.join(f'{out.name} ({out.why})' for out in group.lost)}")
    if group.first.control:
        notes.append(f"a control ({group.first.control}), there to test an explanation rather than to win")
    notes += _unlike_seeds(group)
    ours = _devices(group)
    if len(ours) > 1:
        notes.append(f"its runs were trained on {' and '.join(ours)}: its speed, time and memory mix these")
    if base is None:
        return notes
    if pairs == 0:
        notes.append(f"no run shares a seed with {base.label}, so there is no paired difference: give both equal seeds")
    elif pairs < len(group.runs):
        notes.append(
            f"{pairs} of its {len(group.runs)} runs share a seed with {base.label}; only these are in its mean loss"
        )
    elif pairs < len(base.runs):
        notes.append(f"its mean loss is over {plural(pairs, 'seed')}, that of {base.label} over {len(base.runs)}")
    one, other = group.first, base.first
    notes += [f"{key} is {_of(one, key)} here and {_of(other, key)} in {base.label}" for key in unlike(group, base)]
    different = [key for key in sorted({**one.speed, **other.speed}) if one.speed.get(key) != other.speed.get(key)]
    theirs = _devices(base)
    if ours and theirs and ours != theirs:
        notes.append(
            f"it was trained on {' and '.join(ours)}, {base.label} on {' and '.join(theirs)}: speed, time and memory "
            "beside that one's say more of the machines"
        )
    if different:
        said = "; ".join(f"{key} is {one.speed.get(key)} here, {other.speed.get(key)} there" for key in different)
        notes.append(f"step time and memory were measured under other conditions than those of {base.label}: {said}")
    return notes


def _devices(group: Group) -> list[str]:
    return sorted(frozenset().union(*(run.devices for run in group.runs)))


def unlike(group: Group, base: Group) -> list[str]:
    """Keys of the run file in which a group differs from its baseline, other than the model's."""
    one, other = group.first.settings, base.first.settings
    return [
        key
        for key in sorted({**one, **other})
        if not key.startswith(("depth.", "model.")) and one.get(key) != other.get(key)
    ]


def reservations(group: Group, base: Group) -> list[Reservation]:
    """What the verdict on ``group`` must not be read without."""
    found = _unlike_reservations(group, base)
    for one, word, whose in ((group, "better", ""), (base, "worse", " of the baseline")):
        missing = [out for out in one.lost if out.fate not in _RULE_OUT]
        total = len(one.runs) + len(one.lost)
        for fate in _RULE_OUT:
            if count := sum(out.fate == fate for out in one.lost):
                short = f"{count} of {plural(total, 'seed')}{whose} {fate}"
                why = "; ".join(dict.fromkeys(out.why for out in one.lost if out.fate == fate))
                found.append(Reservation(short, f"{short}, which rules out “{word}” ({why})"))
        if missing:
            short = f"{len(missing)} of {plural(total, 'seed')}{whose} {'is' if len(missing) == 1 else 'are'} missing"
            found.append(Reservation(short, f"{short} ({'; '.join(dict.fromkeys(out.why for out in missing))})"))
    own, theirs = ({run.seed for run in one.runs} | {out.seed for out in one.lost} for one in (group, base))
    if None not in own | theirs and theirs - own:
        short = f"no run of {plural(len(theirs - own), 'seed')} that the baseline has"
        found.append(Reservation(short, f"{short} ({', '.join(map(str, sorted(theirs - own, key=str)))})"))
    return found


def rules_out(group: Group) -> bool:
    """Whether runs that diverged or failed leave open how high the mean loss of ``group`` is."""
    return any(out.fate in _RULE_OUT for out in group.lost)


def _unlike_reservations(group: Group, base: Group) -> list[Reservation]:
    keys = unlike(group, base)
    found = []
    if group.sweep or base.sweep:
        keys = [key for key in keys if key != RATE]
        found.append(Reservation("best of a sweep", _at_best(group, base)))
    if "training.steps" in keys:
        keys = [key for key in keys if key == "training.steps" or key not in LENGTH]
    for key in keys:
        what = _CALLED.get(key, key)
        mine, theirs = _of(group.first, key), _of(base.first, key)
        found.append(Reservation(f"other {what}", f"{what} {mine}, the baseline's {theirs}"))
    return found


def _at_best(group: Group, base: Group) -> str:
    own, theirs = group.sweep, base.sweep
    mine, other = _of(group.first, RATE), _of(base.first, RATE)
    if own and theirs and len(own.rates) == len(theirs.rates):
        return (
            f"each at the best of {len(own.rates)} learning rates ({mine}, the baseline {other}), chosen on these seeds"
        )
    counts = [
        f"the best of {len(sweep.rates)} learning rates" if sweep else "its only learning rate"
        for sweep in (own, theirs)
    ]
    return f"at {counts[0]} ({mine}), the baseline at {counts[1]} ({other}), chosen on these seeds"


def _of(run: Run, key: str) -> str:
    value = run.settings.get(key)
    return "not set" if value is None else str(value)


def _unlike_seeds(group: Group) -> list[str]:
    """Settings in which runs of one row were measured under unlike conditions."""
    found = []
    for key in sorted({key for run in group.runs for key in run.speed}):
        by_value: dict[str, list[str]] = {}
        for run in group.runs:
            by_value.setdefault(str(run.speed.get(key)), []).append(run.name)
        if len(by_value) > 1:
            found.append(f"{key} is " + ", ".join(f"{value} in {' and '.join(n)}" for value, n in by_value.items()))
    said = "its seeds were measured under unlike conditions, so step time and memory are means over these"
    return [f"{said}: {'; '.join(found)}"] if found else []


def warnings(family: Family) -> list[str]:
    """Warnings for the whole family."""
    found = []
    if family.baseline is None:
        labels = ", ".join(repr(group.label) for group in family.all)
        found.append(f"There is no baseline, so there are no differences. Choose one with --baseline: {labels}.")
    fewest = min((len(group.runs) for group in family.all), default=0)
    if fewest == 1:
        found.append(
            "Some rows are a single run. The difference between two single runs can be as large as that between two "
            "runs that differ in their seed alone: no interval, no test, no verdict."
        )
    elif fewest < FEW_SEEDS:
        found.append(
            "Some rows have two seeds. They are judged only together with other variants; a paired test of two seeds "
            "rests on a single degree of freedom and gives no verdict."
        )
    if family.measure == "training":
        found.append(
            "No run measured a held-out loss. What is compared is the training loss, as its mean over the last "
            "twentieth of the logged lines: noisier, and lower than a held-out loss where data repeat."
        )
    if all(group.first.data is None for group in family.all):
        found.append(
            "These runs are known from TensorBoard event files alone, which do not say what data, vocabulary or "
            "held-out set a loss belongs to, nor whether a run was finished. That the losses may be compared is "
            "your word."
        )
    if any(group.first.seed is None for group in family.all):
        found.append("The seed of some runs is not known (a folder name that ends in seed0, seed1, … says it).")
    return found + _sweep_warnings(family)


def _sweep_warnings(family: Family) -> list[str]:
    swept = [group for group in family.all if group.sweep]
    found = []
    for group in swept:
        if group.sweep and group.sweep.edge:
            beyond = "lower" if group.sweep.edge == "lowest" else "higher"
            tried = ", ".join(f"{rate.rate:g}" for rate in group.sweep.rates)
            found.append(
                f"The best learning rate of {group.label!r}, {group.sweep.best:g}, is the {group.sweep.edge} of those "
                f"tried ({tried}): a {beyond} one may be better."
            )
    if swept:
        found.append(
            "Learning rates were chosen by the losses that are then compared, on the same seeds. A best of several is "
            "lower by luck too: where arms tried unlike numbers of rates, the one with more of them is favoured."
        )
    return found
