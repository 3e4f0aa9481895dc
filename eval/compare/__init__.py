"""Comparing finished runs: what a variant gains over its baseline, at what price, and whether to believe it.

::

    sources.py      arguments → the run folders, studies and TensorBoard folders that they name, read one by one
    run_reader.py   one run → Run (run.py): its curves and costs, from metrics.jsonl (records.py) or event_files.py, and
                    its marks in downstream tasks, from what ``depth eval`` wrote (marks.py)
    grouping.py     runs → groups (equal but for the seed) → families (a baseline and what may be compared with it)
                    sweeps.py: of a sweep over the learning rate, the best
    compare.py      families → results.py: every number of the report, by statistics.py, curves.py, bands.py, tasks.py;
                    warn.py: what a reader must know with them
    judged.py       families → verdicts: judging.py, by blocks.py (arms and seeds) and dunnett.py (many to one)
    eval.scaling    families → laws over sizes, a field of the results
    provenance.py   run folders and families → where the runs come from
    sections/       results → blocks of a page (page.py), the first screen first; drawn by forest.py and pictures.py,
                    both by drawing.py; written by page_html, page_markdown and page_tables
    command.py      ``depth compare``; --tensorboard writes the results as TensorBoard runs too
                    (eval.tensorboard_curves)

A further section is a function from ``Results`` to blocks, called in ``sections.report``; what it computes from the
runs is a field of ``Results``.
"""
