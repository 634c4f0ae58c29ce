"""The nodes of autograd's graph that join the replicas, and the cut between their graphs."""
