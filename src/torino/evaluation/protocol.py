"""Settings: which method, with how many tokens, is asked all the questions of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any

from torino.core.concepts import RawEmbedding
from torino.core.errors import BadParameter
from torino.reducers import Reducer, get, list_reducers, make

PAIRS = ((3, 3), (2, 2), (1, 1))
"""The paper's settings of (k, δ), from many tokens to few."""
FIXED = (192, 128, 64)
"""The budgets of the paper's fixed tiers."""
LABELS = {
    "full": "All tokens",
    "torino-p": "TORINO-P",
    "torino-m": "TORINO-M",
    "torino-x": "TORINO-X",
    "random": "Random",
    "folder": "FOLDER",
    "folder-full": "FOLDER (full)",
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
    "scts": "SCTS",
}
PAIRED = ("torino-p", "torino-m")
"""The paper's own two, which (k, δ) describes."""
NO_SAE = "none"
"""The label that stands for tokens themselves in the place of an SAE."""


@dataclass(frozen=True)
class Setting:
    """One method with its hyperparameters.

    Attributes
    ----------
    id : str
        Names it in a run.
    method : str
        Its name in the registry; ``full`` for all tokens.
    label : str
        Its name in tables.
    spec : str
        What :func:`torino.make` reads.
    sae : str or None
        Label of the SAE it reads concepts with; ``none`` for the tokens themselves.
    tier : str
        ``full``; ``3,3`` and the like where TORINO decides the length, or the method gets the mean of it; a budget.
    dynamic : bool
        Whether each image decides its length.
    budget : int or None
    seed : int or None
    reference : bool
        Whether the mean length it leaves is the budget of its tier.
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
    def of(cls, facts: Mapping[str, Any]) -> Setting:
        """Read one back from JSON."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in facts.items() if name in known})

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self)

    def reducer(self, saes: Mapping[str, Any]) -> Reducer | None:
        """Build the reducer; None for all tokens."""
        if self.method == "full":
            return None
        if self.sae is None:
            return make(self.spec)
        return make(self.spec, sae=RawEmbedding() if self.sae == NO_SAE else saes[self.sae])


FULL = Setting("full", "full", LABELS["full"], "", "full")


def takes(method: str, parameter: str) -> bool:
    """Whether a method has this hyperparameter."""
    cls = get(method)
    return is_dataclass(cls) and parameter in {one.name for one in fields(cls)}


def default_methods(*, asking: bool = False) -> list[str]:
    """All methods; those that wait for a question only where something reads it, which most models' towers cannot."""
    found = [name for name in list_reducers() if not get(name).ablation]
    return [name for name in found if asking or not get(name).needs & {"joint", "text"}]


def read_budgets(option: str, text: str) -> list[int]:
    """Budgets between commas, as an option of a command gives them; ``no`` is none.

    Examples
    --------
    >>> read_budgets("--tiers", "192, 64"), read_budgets("--tiers", "no")
    ([192, 64], [])
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words == ["no"]:
        return []
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise BadParameter(f"{option} takes whole numbers of tokens, such as 192,128,64, or 'no', got {word!r}.")
    return [int(word) for word in words]


def dynamic_settings(
    methods: Sequence[str], saes: Sequence[str], pairs: Sequence[tuple[int, int]] = PAIRS
) -> list[Setting]:
    """TORINO at the lengths that images decide; the first of P and M gives its tier the budget.

    With several SAEs each has tiers of its own, because each leaves lengths of its own.
    """
    found: list[Setting] = []
    for label in saes:
        for k, delta in pairs:
            first = True
            for method in PAIRED:
                if method not in methods:
                    continue
                made = Setting(
                    id=_id(f"{method}({k},{delta})", label),
                    method=method,
                    label=LABELS[method],
                    spec=f"{method}(k={k}, delta={delta})",
                    tier=f"{k},{delta}" if len(saes) == 1 else f"{k},{delta} [{label}]",
                    sae=label,
                    dynamic=True,
                    reference=first,
                )
                found.append(made)
                first = False
    return found


def matched_settings(
    methods: Sequence[str],
    budgets: Mapping[str, int],
    references: Mapping[str, Setting],
    saes: Sequence[str],
    seeds: int,
) -> list[Setting]:
    """Every method at the mean length of each dynamic tier; TORINO itself as TORINO_FB, with the tier's (k, δ)."""
    found: list[Setting] = []
    for tier, budget in budgets.items():
        reference = references[tier]
        for method in methods:
            hyper = reference.spec.partition("(")[2].removesuffix(")") if method in PAIRED else ""
            found += _budgeted(method, budget, tier, saes, seeds, hyper=hyper, only=reference.sae)
    return found


def fixed_settings(
    methods: Sequence[str], budgets: Sequence[int], saes: Sequence[str], seeds: int, pair: tuple[int, int] = (2, 2)
) -> list[Setting]:
    """Every method at fixed budgets."""
    return [
        setting
        for budget in budgets
        for method in methods
        for setting in _budgeted(
            method,
            budget,
            str(budget),
            saes,
            seeds,
            hyper="k={}, delta={}".format(*pair) if method in PAIRED else "",
        )
    ]


def own_settings(specs: Sequence[str], saes: Sequence[str]) -> list[Setting]:
    """Methods that the user wrote out with their hyperparameters, such as ``prumerge(budget=None)``."""
    found: list[Setting] = []
    for spec in specs:
        method = spec.partition("(")[0].strip()
        for label in saes if takes(method, "sae") else [None]:
            made = make(spec, **({} if label is None else {"sae": RawEmbedding()}))
            budget = getattr(made, "budget", None)
            found.append(
                Setting(
                    id=_id(made.spec, label if len(saes) > 1 else None),
                    method=method,
                    label=made.spec,  # there may be several of one method
                    spec=made.spec,
                    tier="own" if budget is None else str(budget),
                    sae=label,
                    dynamic=budget is None,
                    budget=budget,
                    seed=getattr(made, "seed", None),
                )
            )
    return found


def _budgeted(
    method: str, budget: int, tier: str, saes: Sequence[str], seeds: int, *, hyper: str = "", only: str | None = None
) -> list[Setting]:
    if not takes(method, "budget"):
        raise BadParameter(f"{method} takes no budget, so it has no place in a tier of {budget} tokens. Leave it out.")
    labels: Sequence[str | None] = [None]
    if takes(method, "sae"):
        labels = [only] if only is not None else list(saes)
    drawn = takes(method, "seed") and method == "random"
    base = Setting(
        id="",
        method=method,
        label=LABELS.get(method, method) + ("_FB" if hyper and "," in tier else ""),
        spec="",
        tier=tier,
        budget=budget,
    )
    cls = get(method)
    plain = {one.name: one.default for one in fields(cls)} if is_dataclass(cls) else {}
    told = [f"{name}={plain[name]!r}" for name in cls.always_shown if f"{name}=" not in hyper]
    found: list[Setting] = []
    for label in labels:
        for seed in range(seeds) if drawn else [None]:
            given = [hyper] if hyper else []
            given += [f"budget={budget}", *told] + ([f"seed={seed}"] if seed is not None else [])
            spec = f"{method}({', '.join(given)})"
            name = _id(f"{method}@{tier}" + (f"#{seed}" if seed is not None else ""), label if len(saes) > 1 else None)
            found.append(replace(base, id=name, spec=spec, sae=label, seed=seed))
    return found


def _id(name: str, sae: str | None) -> str:
    return name if sae is None else f"{name}[{sae}]"
