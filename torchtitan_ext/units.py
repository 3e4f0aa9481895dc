"""Numbers as people read them, in few characters."""


def duration(seconds: float) -> str:
    """A duration for people: ``42s``, ``3m12s``, ``5h07m``, ``2d04h``."""
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{secs:02}s" if minutes else f"{secs}s"


def count(number: float) -> str:
    """A count in three digits: ``999``, ``12.3k``, ``1.2M``."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * factor:
            return f"{float(f'{number / factor:.3g}'):g}{unit}"
    return f"{number:.0f}"
