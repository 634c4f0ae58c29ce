"""What stands above the wrappers and is imported when it is first asked for."""
