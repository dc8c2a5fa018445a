"""Layouts against what runtimes really do."""
