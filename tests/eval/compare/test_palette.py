"""Whether the colours of pictures can be told apart, by readers with and without full colour vision.

Simulated by the matrices of Machado, Oliveira and Fernandes 2009 (severity 1.0) on linear sRGB; distances are CIEDE2000
(Sharma, Wu and Dalal 2005), whose own test data check the formula here.
"""

from itertools import combinations

import numpy as np
import pytest

from eval.compare.palette import DARK, LIGHT, style

VISION = {
    "full": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
SERIES = [key for key in LIGHT if key == "base" or key.startswith("c")]
PAGES = {"light": (LIGHT, "#ffffff"), "dark": (DARK, "#14171b")}


def linear(colour: str) -> np.ndarray:
    encoded = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> tuple[float, float, float]:
    x, y, z = (TO_XYZ @ rgb) / TO_XYZ.sum(1)
    fx, fy, fz = (np.cbrt(t) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def ciede2000(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    (l1, a1, b1), (l2, a2, b2) = one, other
    chroma = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    stretch = 1 + 0.5 * (1 - np.sqrt(chroma**7 / (chroma**7 + 25.0**7)))
    c1, c2 = np.hypot(a1 * stretch, b1), np.hypot(a2 * stretch, b2)
    h1, h2 = (np.degrees(np.arctan2(b, a * stretch)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    hue_step = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn) / 2)
    lightness, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    hue = (h1 + turn / 2) % 360 if c1 * c2 else h1 + h2
    t = 1 - 0.17 * np.cos(np.radians(hue - 30)) + 0.24 * np.cos(np.radians(2 * hue))
    t += 0.32 * np.cos(np.radians(3 * hue + 6)) - 0.20 * np.cos(np.radians(4 * hue - 63))
    s_l = 1 + 0.015 * (lightness - 50) ** 2 / np.sqrt(20 + (lightness - 50) ** 2)
    s_c, s_h = 1 + 0.045 * chroma, 1 + 0.015 * chroma * t
    r_c = 2 * np.sqrt(chroma**7 / (chroma**7 + 25.0**7))
    r_t = -r_c * np.sin(2 * np.radians(30 * np.exp(-(((hue - 275) / 25) ** 2))))
    dl, dc, dh = (l2 - l1) / s_l, (c2 - c1) / s_c, hue_step / s_h
    return float(np.sqrt(dl**2 + dc**2 + dh**2 + r_t * dc * dh))


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, 2.5, 0.0), (73.0, 25.0, -18.0), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((22.7233, 20.0904, -46.6940), (23.0331, 14.9730, -42.5619), 2.0373),
    ],
)
def test_the_distance_is_that_of_its_published_data(
    one: tuple[float, float, float], other: tuple[float, float, float], distance: float
) -> None:
    assert ciede2000(one, other) == pytest.approx(distance, abs=1e-4)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("page", PAGES)
def test_any_two_colours_differ(page: str, vision: str) -> None:
    colours, _ = PAGES[page]
    seen = {key: lab(np.clip(VISION[vision] @ linear(colours[key]), 0, 1)) for key in SERIES}
    distances = {pair: ciede2000(seen[pair[0]], seen[pair[1]]) for pair in combinations(SERIES, 2)}
    nearest = min(distances, key=distances.__getitem__)
    assert distances[nearest] >= 15, (nearest, distances[nearest])


@pytest.mark.parametrize("page", PAGES)
def test_every_colour_stands_out_from_its_page(page: str) -> None:
    """3:1, as WCAG 2.1 (1.4.11) asks of graphics."""
    colours, background = PAGES[page]
    behind = float(TO_XYZ[1] @ linear(background))
    for key in SERIES:
        own = float(TO_XYZ[1] @ linear(colours[key]))
        assert (max(own, behind) + 0.05) / (min(own, behind) + 0.05) >= 3, key


def test_groups_differ_by_marker_too() -> None:
    styles = [style(0, baseline=True), *(style(number, baseline=False) for number in range(7))]
    assert len({one["marker"] for one in styles}) == len(styles)
    more = [style(number, baseline=False) for number in range(21)]
    assert len({(one["color"], one["marker"], one["linestyle"]) for one in more}) == 21
    assert len({(one["color"], one["marker"]) for one in more}) == 21
