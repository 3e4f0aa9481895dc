"""Pictures of numbers by depth for TensorBoard."""

from matplotlib.figure import Figure


def map_picture(name: str, rows: list[list[float]]) -> Figure:
    """A map of weights, one row per read of more than one source, which are from the left: the embedding, the finished
    blocks that it sees, the unfinished block, the most recent outputs. The rest of a row is left white."""
    width = max(len(row) for row in rows)
    figure = Figure(figsize=(6, 5), dpi=90, layout="constrained")
    axes = figure.subplots()
    padded = [row + [float("nan")] * (width - len(row)) for row in rows]
    image = axes.imshow(padded, aspect="auto", interpolation="nearest", vmin=0.0, vmax=1.0, cmap="viridis")
    axes.set_xlabel("source of the read (0 is the embedding)")
    axes.set_ylabel("read of several sources, in order of depth")
    axes.set_title(name.replace("_", " "))
    figure.colorbar(image, label="mean weight over tokens")
    return figure


def series_picture(name: str, values: list[float]) -> Figure:
    """One number per layer, or per layer or read that has one, as a line over depth."""
    figure = Figure(figsize=(6, 3), dpi=90, layout="constrained")
    axes = figure.subplots()
    axes.plot(range(len(values)), values, marker="o", markersize=3)
    axes.set_xlabel("layer or read, in order of depth")
    axes.set_title(name.replace("_", " "))
    axes.grid(alpha=0.3)
    return figure
