"""Token reduction methods, one file per method, and the registry that finds them by name."""

from __future__ import annotations

from torino.reducers.apet import ApET
from torino.reducers.base import AttentionMode, PositionMode, Reducer, describe, get, list_reducers, make, register
from torino.reducers.cdpruner import CDPruner
from torino.reducers.composed import Composed, split_reducer
from torino.reducers.dart import DART
from torino.reducers.divprune import DivPrune
from torino.reducers.downsample import Downsample
from torino.reducers.evs import EVS
from torino.reducers.fastv import FastV
from torino.reducers.flashvid import FlashVid
from torino.reducers.folder import Folder
from torino.reducers.folder_full import FolderFull
from torino.reducers.folder_tower import FolderTower
from torino.reducers.frame_sampling import FrameSampling
from torino.reducers.gtp import GTP
from torino.reducers.gtp_tower import GTPTower
from torino.reducers.hiprune import HiPrune
from torino.reducers.hired import FasterVLM, HiRED
from torino.reducers.holov import HoloV
from torino.reducers.in_language_model import InLanguageModelReducer, LanguageModelReducer, as_in_language_model
from torino.reducers.in_tower import InTowerReducer, TowerReducer, TowerState, as_in_tower
from torino.reducers.keep_share import KeepShare
from torino.reducers.mmtok import MMTok
from torino.reducers.pool import Pool
from torino.reducers.prumerge import PruMerge
from torino.reducers.prumerge_plus import PruMergePlus
from torino.reducers.prunesid import PruneSID
from torino.reducers.pyramiddrop import PyramidDrop
from torino.reducers.random import Random
from torino.reducers.restore import Restore
from torino.reducers.scissor import Scissor
from torino.reducers.scope import Scope
from torino.reducers.scts import SCTS
from torino.reducers.tome import ToMe
from torino.reducers.tome_tower import ToMeTower
from torino.reducers.torino import TorinoMerge, TorinoPrune
from torino.reducers.torino_x import TorinoX
from torino.reducers.uniform import Uniform
from torino.reducers.vidcom2 import VidCom2
from torino.reducers.visionzip import VisionZip
from torino.reducers.vispruner import VisPruner

__all__ = [
    "DART",
    "EVS",
    "GTP",
    "SCTS",
    "ApET",
    "AttentionMode",
    "CDPruner",
    "Composed",
    "DivPrune",
    "Downsample",
    "FastV",
    "FasterVLM",
    "FlashVid",
    "Folder",
    "FolderFull",
    "FolderTower",
    "FrameSampling",
    "GTPTower",
    "HiPrune",
    "HiRED",
    "HoloV",
    "InLanguageModelReducer",
    "InTowerReducer",
    "KeepShare",
    "LanguageModelReducer",
    "MMTok",
    "Pool",
    "PositionMode",
    "PruMerge",
    "PruMergePlus",
    "PruneSID",
    "PyramidDrop",
    "Random",
    "Reducer",
    "Restore",
    "Scissor",
    "Scope",
    "ToMe",
    "ToMeTower",
    "TorinoMerge",
    "TorinoPrune",
    "TorinoX",
    "TowerReducer",
    "TowerState",
    "Uniform",
    "VidCom2",
    "VisPruner",
    "VisionZip",
    "as_in_language_model",
    "as_in_tower",
    "describe",
    "get",
    "list_reducers",
    "make",
    "register",
    "split_reducer",
]
