"""``make gpu``: runs what only a GPU can show, and writes one page about it.

What is imported here is Python's own library alone: without torch, or with one that crashes, there
is still a page that says so. Everything else runs in processes of its own, each with a limit.
"""
