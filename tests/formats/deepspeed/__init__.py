"""Tests of the reader of native DeepSpeed checkpoints, on files made here and on real ones."""
