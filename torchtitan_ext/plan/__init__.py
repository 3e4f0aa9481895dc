"""What a run needs, before it is queued: memory per GPU, the largest micro-batch that fits, tokens/s and hours."""
