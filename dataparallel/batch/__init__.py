"""From a batch to the chunks of the replicas, and from their outputs to one batch."""
