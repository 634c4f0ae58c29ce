"""A pool of devices: a module or a function is called with items on whichever device is free."""

from dataparallel.pool.pool import Pool as Pool
