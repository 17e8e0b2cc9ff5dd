"""What a recipe needs before it runs: the memory of each process, and the time with more rollout workers."""
