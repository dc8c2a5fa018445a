"""What the user may choose about a universal folder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UniversalOptions:
    """Nothing: a universal folder serves every topology, and is written in one way."""
