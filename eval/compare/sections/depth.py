"""What the runs noted about themselves by depth (``logging.depth_every``)."""

from eval.compare.page import Block, Heading, Picture, Pictures, Text, name
from eval.compare.pictures import depth_map_picture, depth_series_picture
from eval.compare.results import FamilyResult

EXPLAINED = {
    "attention_output_rms": "Root mean square of what each layer's attention puts out.",
    "feed_forward_output_rms": "Root mean square of what each layer's feed-forward puts out.",
    "gradient_norm": "Norm of each layer's gradient, after clipping.",
}


def depth_blocks(family: FamilyResult, key: str) -> list[Block]:
    pictures = []
    for number, series in enumerate(sorted({series for group in family.groups for series in group.depth_series})):
        groups = [group for group in family.groups if series in group.depth_series]
        caption = EXPLAINED.get(series, f"{series.replace('_', ' ').capitalize()}, by layer or read.")
        pictures.append(Picture(f"{key}-depth-{number}", depth_series_picture(groups, family, series), caption))
    number = 0
    for group in family.groups:
        for title, rows in sorted(group.depth_maps.items()):
            caption = (
                f"{name(group.label)}, {title.replace('_', ' ')}: how much each read (row) takes from each source "
                "(column), mean over tokens."
            )
            pictures.append(Picture(f"{key}-map-{number}", depth_map_picture(rows), caption))
            number += 1
    if not pictures:
        return []
    explained = (
        "Numbers by depth from the last look inside one run of each row (its first seed), over fixed held-out windows. "
        "They describe; they say nothing about quality."
    )
    return [Heading("Inside the models", 3), Text(explained), Pictures(pictures)]
