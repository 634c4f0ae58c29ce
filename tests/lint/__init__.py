"""Checks of the source files that no linter brings along: ``python -m tests.lint FOLDER ...``."""
