"""Scaling laws over a ladder of sizes, and what they say of a variant.

::

    ladder.py    families (eval.compare.grouping) → ladders: the final losses of one variant at all its sizes
    fit.py       losses → the constants of a law
    scale.py     ladders → results.py: laws, their intervals by bootstrap, compute-equivalent gains

``eval.compare`` calls ``scale`` and shows the results (``sections/scaling.py``).
"""
