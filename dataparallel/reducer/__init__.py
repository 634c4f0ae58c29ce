"""Gradients of several replicas and processes, summed in buckets while backward goes on.

Nothing here knows about users: the wrappers in ``dataparallel.parallel`` drive it.
"""
