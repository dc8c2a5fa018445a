"""Tests of the safetensors format."""
