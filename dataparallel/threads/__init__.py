"""Running replicas: worker threads, what they take along from the caller, and the timeline."""
