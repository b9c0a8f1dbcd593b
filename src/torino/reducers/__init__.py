"""Reducers: one method, one file, one class. This is the registry that finds them by name."""

from __future__ import annotations

from torino.reducers.base import Reducer, describe, get, make, names, register
from torino.reducers.torino import TorinoMerge, TorinoPrune

__all__ = ["Reducer", "TorinoMerge", "TorinoPrune", "describe", "get", "make", "names", "register"]
