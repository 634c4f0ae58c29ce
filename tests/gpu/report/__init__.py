"""``make gpu``: runs everything that GPUs alone can show, and writes one page and a JSON about it.

``plan.py`` is the table of all parts. ``run.py`` runs one part in a process of its own, and
``page.py`` writes what became of them. Python's own library is enough for these three. The other
files are the parts themselves; ``subject.py`` starts them.
"""
