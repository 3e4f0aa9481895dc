"""Names in a study that must exist, and must not exist twice."""

from collections.abc import Mapping
from dataclasses import fields as options_of
from typing import Any

from torchtitan_ext.depth.registry import VARIANTS
from torchtitan_ext.depth.variant import Variant
from torchtitan_ext.errors import UserError, nearest
from torchtitan_ext.run_file.layers import is_key, printed, unknown_key
from torchtitan_ext.run_file.schema import BUDGETS
from torchtitan_ext.sizes import SIZES
from torchtitan_ext.study.schema import Study
from torchtitan_ext.study.yaml_lines import Location

DECIDED = {
    "name": "name",
    "folder": "folder",
    "extends": "base",
    "seed": "seeds",
    "data.seed": "seeds",
    "model.size": "sizes",
    "model.variant": "variants",
    "logging.baseline": "baseline",
    "training.stop_behind": "stop",
    "training.stop_behind_at": "stop",
}
"""Run keys that a study decides itself, and its key for them."""


def check_names(study: Study) -> None:
    """Raise ``UserError`` for a variant, size, label or run key that does not exist or is there twice."""
    base = study.base_file
    if not base.is_file():
        files = sorted(file.name for file in base.parent.glob("*.y*ml"))
        hint = nearest(base.name, files) if files else "there is no .yaml file in that folder"
        raise UserError(f"{study.origin('base')}: base is {str(base)!r}, which is not a file; {hint}")
    _check_entries(study)
    _check_run_keys(study, study.set, ("set",))
    for number, size in enumerate(study.sizes or []):
        _check_size(study, size.size, ("sizes", number, "size"))
        _check_run_keys(study, size.set, ("sizes", number, "set"))
        if size.size in [other.size for other in (study.sizes or [])[:number]]:
            raise UserError(f"{study.origin('sizes', number)}: size {size.size!r} is in sizes twice; keep one")
    labels = [entry.label for entry in study.variants]
    if study.baseline not in labels:
        raise UserError(
            f"{study.origin('baseline')}: baseline {study.baseline!r} is not the label of an entry of variants; "
            f"{nearest(study.baseline, labels)}"
        )
    if study.entry(study.baseline).size is not None:
        raise UserError(
            f"{study.origin('baseline')}: baseline {study.baseline!r} has a size of its own; the baseline has the "
            "study's sizes"
        )
    _check_controls(study, labels)
    for number, exclusion in enumerate(study.exclude):
        known = [*labels, *(control_label(control.of, control.kind) for control, _ in study.all_controls())]
        if exclusion.variant is not None and exclusion.variant not in known:
            place = study.origin("exclude", number, "variant")
            raise UserError(
                f"{place}: exclude: {exclusion.variant!r} is not the label of an entry; "
                f"{nearest(exclusion.variant, known)}"
            )


def check_widths(study: Study, sizes: list[str]) -> None:
    """Raise ``UserError`` where a wider baseline has one width for several of ``sizes``, none for one, or one for a
    size that the study does not have."""
    for control, location in study.all_controls():
        place = study.origin(*location, "width")
        if isinstance(control.width, int) and len(sizes) > 1:
            raise UserError(
                f"{place}: width {control.width} cannot fit all of {', '.join(sizes)}; give a width for each as "
                f"{{{sizes[0]}: {control.width}, ...}}, or leave width out to have each feed-forward widened"
            )
        if isinstance(control.width, dict):
            for size in control.width:
                if size not in sizes:
                    raise UserError(
                        f"{place}: width is given for {size!r}, no size of this study; {nearest(size, sizes)}"
                    )
            missing = [size for size in sizes if size not in control.width]
            if missing:
                raise UserError(f"{place}: width has none for {missing[0]}; add {{{missing[0]}: WIDTH}} to it")


def control_label(of: str, kind: str) -> str:
    """The label of a control of the entry ``of``."""
    return f"{of}_{kind}"


def detached_form(variant: str) -> tuple[str, Mapping[str, Any]] | None:
    """The variant and options that compute the same as ``variant`` without its gradient across layers, if any do."""
    if f"{variant}_detached" in VARIANTS:
        return f"{variant}_detached", {}
    return (variant, {"detach": True}) if _can_detach(VARIANTS[variant]) else None


def _can_detach(variant: Variant) -> bool:
    options = {option.name: getattr(variant, option.name) for option in options_of(variant)}
    return options.get("detach") is False


def _check_entries(study: Study) -> None:
    seen: dict[str, str] = {}
    for number, entry in enumerate(study.variants):
        place = study.origin("variants", number)
        if entry.variant not in VARIANTS:
            raise UserError(f"{place}: variant {entry.variant!r} is unknown; {nearest(entry.variant, VARIANTS)}")
        if entry.label in seen:
            raise UserError(f"{place}: two entries are called {entry.label!r}; give one a `name:` of its own")
        seen[entry.label] = place
        _check_run_keys(study, entry.set, ("variants", number, "set"))
        for key in entry.set:
            reason = "the budget says how long its runs are" if key in BUDGETS else ""
            if key.startswith(("data.", "heldout.")):
                reason = "runs that are compared see the same text; put it under the study's `set:`"
            if reason:
                own_place = study.origin("variants", number, "set", key)
                raise UserError(f"{own_place}: set: {key} cannot be an entry's own; {reason}")
        if entry.size is None:
            continue
        _check_size(study, entry.size, ("variants", number, "size"))
        if study.sizes is not None and len(study.sizes) > 1:
            raise UserError(
                f"{place}: {entry.label!r} has its own size, but the study has {len(study.sizes)}; it is not clear "
                "with which of them it is compared"
            )


def _check_size(study: Study, size: str, location: Location) -> None:
    if size not in SIZES:
        raise UserError(f"{study.origin(*location)}: size {size!r} is unknown; {nearest(size, SIZES)}")


def _check_run_keys(study: Study, keys: Mapping[str, Any], location: Location) -> None:
    for key, value in keys.items():
        place = study.origin(*location, key)
        if isinstance(value, dict):
            raise UserError(f"{place}: set: {printed(key)} is a mapping; write whole keys, such as training.steps")
        if key in DECIDED:
            raise UserError(f"{place}: set: {key} is decided by the study; use {DECIDED[key]!r}")
        if key.startswith("depth."):
            raise UserError(
                f"{place}: set: {printed(key)} is an option of a variant; put it under `depth:` in its entry"
            )
        if not is_key(key) or key == "depth":
            raise UserError(f"{place}: set: {unknown_key(key)}")
        if key == "optimizer.lr" and study.learning_rates is not None:
            raise UserError(f"{place}: set: optimizer.lr is decided by the study; use 'learning_rates'")


def _check_controls(study: Study, labels: list[str]) -> None:
    known = [label for label in labels if label != study.baseline]
    taken = set(labels)
    for control, location in study.all_controls():
        place = study.origin(*location)
        if control.of not in known:
            reason = "is the baseline itself" if control.of == study.baseline else "is not the label of an entry"
            raise UserError(f"{place}: {control.kind}: {control.of!r} {reason}; {nearest(control.of, known)}")
        label = control_label(control.of, control.kind)
        if label in taken:
            raise UserError(f"{place}: two entries are called {label!r}; drop one")
        taken.add(label)
        if control.kind == "detached" and detached_form(study.entry(control.of).variant) is None:
            can = [name for name in VARIANTS if detached_form(name) is not None]
            raise UserError(
                f"{place}: detached: {control.of} has no gradient across layers that could be cut; these have: "
                f"{', '.join(can)}"
            )
