"""The writer of native DeepSpeed checkpoints, without DeepSpeed."""
