"""Layouts: how runtimes cut a parameter, as builders of maps.

A layout knows the words of a runtime (partition dim, sub-parameters, flat partitions) and never
files.
"""
