"""The ``dataparallel`` command: what there is on this machine, and how fast it trains."""
