"""Token reduction methods, one file per method, and the registry that finds them by name."""

from __future__ import annotations

from torino.reducers.base import PositionMode, Reducer, describe, get, list_reducers, make, register
from torino.reducers.cdpruner import CDPruner
from torino.reducers.divprune import DivPrune
from torino.reducers.folder import Folder
from torino.reducers.folder_full import FolderFull
from torino.reducers.gtp import GTP
from torino.reducers.gtp_tower import GTPTower
from torino.reducers.hiprune import HiPrune
from torino.reducers.hired import FasterVLM, HiRED
from torino.reducers.in_tower import InTowerReducer, TowerReducer, TowerState, as_in_tower
from torino.reducers.keep_share import KeepShare
from torino.reducers.prumerge import PruMerge
from torino.reducers.prumerge_plus import PruMergePlus
from torino.reducers.prunesid import PruneSID
from torino.reducers.random import Random
from torino.reducers.scope import Scope
from torino.reducers.scts import SCTS
from torino.reducers.tome import ToMe
from torino.reducers.tome_tower import ToMeTower
from torino.reducers.torino import TorinoMerge, TorinoPrune
from torino.reducers.torino_x import TorinoX
from torino.reducers.visionzip import VisionZip
from torino.reducers.vispruner import VisPruner

__all__ = [
    "GTP",
    "SCTS",
    "CDPruner",
    "DivPrune",
    "FasterVLM",
    "Folder",
    "FolderFull",
    "GTPTower",
    "HiPrune",
    "HiRED",
    "InTowerReducer",
    "KeepShare",
    "PositionMode",
    "PruMerge",
    "PruMergePlus",
    "PruneSID",
    "Random",
    "Reducer",
    "Scope",
    "ToMe",
    "ToMeTower",
    "TorinoMerge",
    "TorinoPrune",
    "TorinoX",
    "TowerReducer",
    "TowerState",
    "VisPruner",
    "VisionZip",
    "as_in_tower",
    "describe",
    "get",
    "list_reducers",
    "make",
    "register",
]
