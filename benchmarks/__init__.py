"""Benchmarks: figures measured side by side with other tools in one run."""
