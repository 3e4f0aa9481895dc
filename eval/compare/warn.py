"""What a reader must know before believing a comparison."""

from eval.compare.grouping import Family, Group

FEW_SEEDS = 3


def group_notes(group: Group, base: Group | None, pairs: int) -> list[str]:
    """Notes on one row of the main table; ``base`` is None for the baseline itself."""
    notes = list(dict.fromkeys(f"{run.name}: {note}" for run in group.runs for note in run.notes))
    if group.diverged:
        notes.append(f"{_runs(len(group.diverged))} diverged and count in no mean: {', '.join(group.diverged)}")
    if group.first.control:
        notes.append(f"a control ({group.first.control}), there to test an explanation rather than to win")
    notes += _unlike_seeds(group)
    if base is None:
        return notes
    if pairs == 0:
        notes.append(f"no run shares a seed with {base.label}, so there is no paired difference: give both equal seeds")
    elif pairs < len(group.runs):
        notes.append(
            f"{pairs} of its {len(group.runs)} runs share a seed with {base.label}; only these make differences"
        )
    one, other = group.first, base.first
    notes += [
        f"{key} is {one.settings.get(key)} here and {other.settings.get(key)} in {base.label}"
        for key in sorted({**one.settings, **other.settings})
        if not key.startswith(("depth.", "model.")) and one.settings.get(key) != other.settings.get(key)
    ]
    different = [key for key in sorted({**one.speed, **other.speed}) if one.speed.get(key) != other.speed.get(key)]
    if different:
        said = "; ".join(f"{key} is {one.speed.get(key)} here, {other.speed.get(key)} there" for key in different)
        notes.append(f"step time and memory were measured under other conditions than those of {base.label}: {said}")
    return notes


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
        found.append("Two seeds give an interval, but a very wide one: it rests on a single degree of freedom.")
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
    return found


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
