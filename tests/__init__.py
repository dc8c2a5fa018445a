"""Tests of reshard."""
