"""What users see: the two wrappers, and what surrounds one step of theirs."""
