"""``dataparallel doctor``: what this machine offers, and what to do about what is missing."""
