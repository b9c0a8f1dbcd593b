"""Define the settings of a run: which method answers all questions, with which options and budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any

from torino.core.concepts import RawEmbedding
from torino.core.errors import BadParameter
from torino.reducers import Reducer, get, list_reducers, make
from torino.reducers.base import method_name, parse_spec, split_spec

KD_PAIRS = ((3, 3), (2, 2), (1, 1))
"""The paper's settings of (k, δ), from many tokens to few."""
FIXED_BUDGETS = (192, 128, 64)
"""The budgets of the paper's fixed tiers."""
FIXED_PAIR = (2, 2)
"""Default (k, δ) of TORINO at fixed budgets. The paper pairs its three budgets with its three settings."""
LABELS = {
    "full": "All tokens",
    "torino-p": "TORINO-P",
    "torino-m": "TORINO-M",
    "torino-x": "TORINO-X",
    "random": "Random",
    "uniform": "Uniform grid",
    "pool": "Average pool",
    "downsample": "Smaller image",
    "folder": "FOLDER",
    "folder-full": "FOLDER (full)",
    "folder-tower": "FOLDER (full, as released)",
    "prunesid": "PruneSID",
    "prumerge": "PruMerge",
    "prumerge-plus": "PruMerge+",
    "tome": "ToMe",
    "tome-tower": "ToMe (in the tower)",
    "gtp": "GTP",
    "gtp-tower": "GTP (in the tower)",
    "visionzip": "VisionZip",
    "hired": "HiRED",
    "fastervlm": "FasterVLM",
    "divprune": "DivPrune",
    "vispruner": "VisPruner",
    "cdpruner": "CDPruner",
    "hiprune": "HiPrune",
    "scope": "SCOPE",
    "scts": "SCTS (our reading)",
    "scissor": "LLaVA-Scissor",
    "holov": "HoloV",
    "apet": "ApET",
    "restore": "RESTORE",
    "mmtok": "MMTok",
    "frames": "Fewer frames",
    "evs": "EVS",
    "vidcom2": "VidCom2",
    "flashvid": "FlashVID (merging)",
    "fastv": "FastV",
    "pyramiddrop": "PyramidDrop",
    "dart": "DART",
}
KD_METHODS = ("torino-p", "torino-m")
"""The paper's two methods, which have the parameters (k, δ)."""
NO_SAE = "none"
"""The label that stands for raw tokens instead of an SAE."""


@dataclass(frozen=True)
class Setting:
    """One method with its hyperparameters.

    Attributes
    ----------
    id : str
        Its name in a run.
    method : str
        Its name in the registry; ``full`` for all tokens.
    label : str
        Its name in tables.
    spec : str
        In the syntax of :func:`torino.make`.
    tier : str
        ``full``; a pair such as ``3,3`` for the lengths of dynamic TORINO and methods with the mean of these lengths;
        a budget; ``own`` for specs without a budget.
    sae : str or None
        Label of its SAE; ``none`` for raw tokens; None if the method uses no SAE.
    dynamic : bool
        Whether the number of tokens depends on the image.
    budget : int or None
    seed : int or None
    reference : bool
        Whether its mean number of tokens is the budget of its tier.
    """

    id: str
    method: str
    label: str
    spec: str
    tier: str
    sae: str | None = None
    dynamic: bool = False
    budget: int | None = None
    seed: int | None = None
    reference: bool = False

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Setting:
        """Create a setting from the values of :meth:`to_dict`, already checked; unknown ones are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def to_dict(self) -> dict[str, Any]:
        """Return all values, ready for JSON."""
        return asdict(self)

    def reducer(self, saes: Mapping[str, Any]) -> Reducer | None:
        """Build the reducer; None for all tokens."""
        if self.method == "full":
            return None
        if self.sae is None:
            return make(self.spec)
        return make(self.spec, sae=RawEmbedding() if self.sae == NO_SAE else saes[self.sae])


FULL = Setting("full", "full", LABELS["full"], "", "full")


def has_parameter(method: str, parameter: str) -> bool:
    """Return whether a method has this hyperparameter."""
    cls = get(method)
    return is_dataclass(cls) and parameter in {field.name for field in fields(cls)}


def default_methods(*, text_query: bool = False) -> list[str]:
    """Return all methods for images except ablations; those that need the question only with ``text_query``."""
    methods = [name for name in list_reducers() if not (get(name).ablation or get(name).for_videos)]
    return [name for name in methods if text_query or not get(name).needs & {"joint", "text"}]


def split_specs(specs: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split specs into those that run at the budget of each tier and those that run as written.

    A spec runs at each tier's budget, like a plain name, unless it gives a budget itself or the method has none, and
    unless it joins two methods by ``+``. TORINO-P and TORINO-M without a budget do both, as their plain names do. Write
    ``budget=None`` for a method that should choose its own number of tokens only.

    Examples
    --------
    >>> split_specs(['divprune(space="projected")', "tome(budget=64)", "torino-m(k=4, delta=2)"])
    (['divprune(space="projected")', 'torino-m(k=4, delta=2)'], ['tome(budget=64)', 'torino-m(k=4, delta=2)'])
    """
    budgeted: list[str] = []
    as_written: list[str] = []
    for spec in specs:
        if len(split_spec(spec)) > 1:  # two methods have a budget each
            as_written.append(spec)
            continue
        method, options = parse_spec(spec)
        open_budget = "budget" not in options and has_parameter(method, "budget")
        if open_budget:
            budgeted.append(spec)
        if not open_budget or method in KD_METHODS:
            as_written.append(spec)
    return budgeted, as_written


def dynamic_settings(
    methods: Sequence[str], saes: Sequence[str], pairs: Sequence[tuple[int, int]] = KD_PAIRS
) -> list[Setting]:
    """Return TORINO with image-dependent lengths; the first of P and M is the reference of its tier.

    With several SAEs each has its own tiers, because each gives different lengths.
    """
    settings: list[Setting] = []
    for label in saes:
        for k, delta in pairs:
            present = [method for method in KD_METHODS if method in methods]
            settings += [
                Setting(
                    id=_make_id(f"{method}({k},{delta})", label),
                    method=method,
                    label=LABELS[method],
                    spec=f"{method}(k={k}, delta={delta})",
                    tier=f"{k},{delta}" if len(saes) == 1 else f"{k},{delta} [{label}]",
                    sae=label,
                    dynamic=True,
                    reference=method == present[0],
                )
                for method in present
            ]
    return settings


def matched_settings(
    methods: Sequence[str],
    budgets: Mapping[str, int],
    references: Mapping[str, Setting],
    saes: Sequence[str],
    seeds: int,
) -> list[Setting]:
    """Return every method at the mean length of each dynamic tier; TORINO with the tier's (k, δ) as TORINO_FB.

    Parameters
    ----------
    methods : sequence of str
        Names, or specs without a budget.
    budgets : mapping of tier to int
    references : mapping of tier to Setting
        The setting whose mean length is the budget of the tier.
    saes : sequence of str
        Labels of the SAEs.
    seeds : int
        Number of runs of methods that draw at random.
    """
    settings: list[Setting] = []
    for tier, budget in budgets.items():
        reference = references[tier]
        _, values = parse_spec(reference.spec)
        pair = (int(values["k"]), int(values["delta"]))
        for method in methods:
            settings += _budget_settings(method, budget, tier, saes, seeds, pair, sae=reference.sae)
    return settings


def fixed_settings(
    methods: Sequence[str],
    budgets: Sequence[int],
    saes: Sequence[str],
    seeds: int,
    pairs: Sequence[tuple[int, int]] = (FIXED_PAIR,),
) -> list[Setting]:
    """Return every method at fixed budgets.

    Parameters
    ----------
    methods : sequence of str
        Names, or specs without a budget.
    budgets : sequence of int
    saes : sequence of str
        Labels of the SAEs.
    seeds : int
        Number of runs of methods that draw at random.
    pairs : sequence of (int, int)
        The pair (k, δ) of TORINO: one for all budgets, or one for each budget, as in the paper.
    """
    if budgets and len(pairs) not in (1, len(budgets)):
        raise BadParameter(
            f"There are {len(pairs)} pairs (k, delta) for {len(budgets)} fixed budgets. Give one pair for all budgets, "
            "or one for each."
        )
    return [
        setting
        for number, budget in enumerate(budgets)
        for method in methods
        for setting in _budget_settings(method, budget, str(budget), saes, seeds, pairs[number % len(pairs)])
    ]


def own_settings(specs: Sequence[str], saes: Sequence[str]) -> list[Setting]:
    """Return methods exactly as their specs are written, such as ``prumerge(budget=None)``."""
    settings: list[Setting] = []
    for spec in specs:
        method = method_name(spec)
        for label in saes if has_parameter(method, "sae") else [None]:
            reducer = make(spec, **({} if label is None else {"sae": RawEmbedding()}))
            budget = getattr(reducer, "budget", None)
            settings.append(
                Setting(
                    id=_make_id(reducer.spec, label if len(saes) > 1 else None),
                    method=method,
                    label=reducer.spec,  # a run can have several specs of one method
                    spec=reducer.spec,
                    tier="own" if budget is None else str(budget),
                    sae=label,
                    dynamic=budget is None,
                    budget=budget,
                    seed=getattr(reducer, "seed", None),
                )
            )
    return settings


def _budget_settings(
    spec: str,
    budget: int,
    tier: str,
    saes: Sequence[str],
    seeds: int,
    pair: tuple[int, int],
    *,
    sae: str | None = None,
) -> list[Setting]:
    """Return a method at one budget: for each SAE, or only ``sae``, and for each seed if it draws at random."""
    method, options = parse_spec(spec)
    if not has_parameter(method, "budget"):
        raise BadParameter(f"{method} has no budget, so it cannot run with {budget} tokens. Leave it out.")
    if "budget" in options:
        raise BadParameter(f"{spec} already has a budget, so it cannot run with {budget} tokens. Leave its budget out.")
    shown = ", ".join(f"{name}={value!r}" for name, value in options.items())
    name = f"{method}({shown})" if shown else method
    values: dict[str, Any] = {}
    if method in KD_METHODS and not options.keys() & {"k", "delta"}:
        values |= {"k": pair[0], "delta": pair[1]}
    values |= {**options, "budget": budget}
    cls = get(method)
    defaults = {field.name: field.default for field in fields(cls)} if is_dataclass(cls) else {}
    values |= {name: defaults[name] for name in cls.always_shown if name not in values}
    matched = "_FB" if method in KD_METHODS and "," in tier else ""
    base = Setting(
        id="",
        method=method,
        label=LABELS.get(method, method) + matched + (f"({shown})" if shown else ""),
        spec="",
        tier=tier,
        budget=budget,
    )
    labels: Sequence[str | None] = [None]
    if has_parameter(method, "sae"):
        labels = [sae] if sae is not None else list(saes)
    random = method == "random" and "seed" not in options
    settings: list[Setting] = []
    for label in labels:
        for seed in range(seeds) if random else [options.get("seed")]:
            given = values | ({"seed": seed} if random else {})
            written = f"{method}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
            if options:  # check them now, before a model is loaded
                make(written, **({} if label is None else {"sae": RawEmbedding()}))
            number = f"#{seed}" if random else ""
            key = _make_id(f"{name}@{tier}{number}", label if len(saes) > 1 else None)
            settings.append(replace(base, id=key, spec=written, sae=label, seed=seed))
    return settings


def _make_id(name: str, sae: str | None) -> str:
    return name if sae is None else f"{name}[{sae}]"
