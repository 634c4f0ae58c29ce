"""``dataparallel bench``: how fast this package is, always beside a peer in the same run."""
