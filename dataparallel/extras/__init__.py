"""The features above the wrappers, which are imported when they are first asked for."""
