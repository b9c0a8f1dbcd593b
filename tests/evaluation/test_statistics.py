"""Intervals and comparisons: against formulas, against slow plain versions, and over many simulated runs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from torino.core.errors import BadParameter
from torino.evaluation import (
    ImageRef,
    Sample,
    Score,
    ScoreStats,
    Task,
    relative_difference,
    relative_interval,
    relative_score,
    relative_seed_interval,
    score_difference,
    score_interval,
    seed_interval,
)
from torino.evaluation.statistics import holm


def percent(sums: np.ndarray) -> np.ndarray:
    return 100 * sums[..., 0] / sums[..., 1]


def accuracy(right: np.ndarray) -> ScoreStats:
    return ScoreStats(
        tuple(map(str, range(len(right)))), np.stack([right, np.ones(len(right))], axis=1).astype(float), percent
    )


def f1(sums: np.ndarray) -> np.ndarray:
    return 100 * 2 * sums[..., 0] / np.maximum(2 * sums[..., 0] + sums[..., 1] + sums[..., 2], 1)


def answers(seed: int, count: int, share: float) -> np.ndarray:
    return (np.random.default_rng(seed).random(count) < share).astype(float)


# --- one score -----------------------------------------------------------------------------------------------------


def test_interval_of_an_accuracy_agrees_with_the_binomial() -> None:
    right = np.repeat([1.0, 0.0], [700, 300])
    result = score_interval(accuracy(right), draws=40_000)
    assert result.value == pytest.approx(70)
    spread = 100 * math.sqrt(0.7 * 0.3 / 1000)
    assert result.low == pytest.approx(70 - 1.96 * spread, abs=0.12)
    assert result.high == pytest.approx(70 + 1.96 * spread, abs=0.12)
    narrow = score_interval(accuracy(right), draws=40_000, level=0.5)
    assert narrow.high - narrow.low == pytest.approx(2 * 0.6745 * spread, abs=0.15)


def test_multinomial_bootstrap_agrees_with_the_plain_bootstrap() -> None:
    """The multinomial over kinds of groups has the distribution of the plain bootstrap over groups."""
    rng = np.random.default_rng(3)
    sums = np.eye(4)[rng.choice(4, size=80, p=[0.4, 0.15, 0.2, 0.25])]
    fast = score_interval(ScoreStats(tuple(map(str, range(80))), sums, f1), draws=20_000)
    slow = np.array([f1(sums[rng.integers(80, size=80)].sum(axis=0)) for _ in range(20_000)])
    low, high = np.quantile(slow, [0.025, 0.975])
    assert fast.low == pytest.approx(low, abs=0.5)
    assert fast.high == pytest.approx(high, abs=0.5)


def test_many_distinct_groups_in_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    grades = np.random.default_rng(0).random(300)  # every group is of a kind of its own
    whole = score_interval(accuracy(grades), draws=4000)
    monkeypatch.setattr("torino.evaluation.statistics._MAX_NUMBERS", 1000)  # three draws at a time
    parts = score_interval(accuracy(grades), draws=4000)
    # the same numbers from the generator, however they are cut; only the sums may be rounded otherwise
    assert (parts.low, parts.high) == pytest.approx((whole.low, whole.high), rel=1e-9)
    spread = 100 * grades.std() / math.sqrt(300)
    assert whole.high - whole.low == pytest.approx(2 * 1.96 * spread, rel=0.05)


def test_interval_has_nominal_coverage() -> None:
    held = 0
    for run in range(300):
        result = score_interval(accuracy(answers(run, 150, 0.6)), draws=800, seed=run)
        held += result.low <= 60 <= result.high
    assert 0.91 <= held / 300 <= 0.98


def test_groups_are_resampled_as_units() -> None:
    """Answers that come in equal pairs are worth half as many: the interval is √2 as wide as for single ones."""
    right = answers(1, 400, 0.5)
    units = tuple(map(str, range(400)))
    single = score_interval(
        ScoreStats(tuple(map(str, range(800))), np.stack([np.repeat(right, 2), np.ones(800)], axis=1), percent)
    )
    paired = score_interval(ScoreStats(units, 2 * np.stack([right, np.ones(400)], axis=1), percent))
    assert paired.value == single.value
    assert (paired.high - paired.low) / (single.high - single.low) == pytest.approx(math.sqrt(2), rel=0.06)
    labels = [str(n // 2) for n in range(800)]
    by_image = ScoreStats(
        tuple(map(str, range(800))), np.stack([np.repeat(right, 2), np.ones(800)], axis=1), percent
    ).merge(labels)
    assert score_interval(by_image) == paired


def test_the_same_seed_gives_the_same_interval() -> None:
    tally = accuracy(answers(0, 100, 0.5))
    assert score_interval(tally, seed=4) == score_interval(tally, seed=4)
    assert score_interval(tally, seed=4, draws=99) != score_interval(tally, seed=5, draws=99)


def test_interval_of_a_perfect_score_is_a_point() -> None:
    assert score_interval(accuracy(np.ones(10))).low == score_interval(accuracy(np.ones(10))).high == 100


def test_bad_parameters() -> None:
    with pytest.raises(BadParameter, match="level must be"):
        score_interval(accuracy(np.ones(3)), level=95)
    with pytest.raises(BadParameter, match="draws must be"):
        score_interval(accuracy(np.ones(3)), draws=0)


# --- two methods ---------------------------------------------------------------------------------------------------


def test_p_value_agrees_with_the_sign_test() -> None:
    """Where answers are right or wrong, exchanging them is a coin for each question on which the two disagree."""
    first = np.repeat([1.0, 1.0, 0.0, 0.0], [50, 18, 7, 25])
    second = np.repeat([1.0, 0.0, 1.0, 0.0], [50, 18, 7, 25])
    result = score_difference(accuracy(first), accuracy(second), draws=60_000)
    assert result.value == pytest.approx(11)
    assert result.p == pytest.approx(stats.binomtest(18, 25).pvalue, abs=0.004)
    # the interval of a paired score_difference, from its own formula
    apart = first - second
    spread = 100 * apart.std() / math.sqrt(100)
    assert result.low == pytest.approx(11 - 1.96 * spread, abs=0.8)
    assert result.high == pytest.approx(11 + 1.96 * spread, abs=0.8)


def test_pairing_is_more_powerful_than_separate_intervals() -> None:
    second = answers(2, 1000, 0.6)
    first = second.copy()
    first[np.flatnonzero(second == 0)[:20]] = 1  # better on 20 questions, worse on none
    result = score_difference(accuracy(first), accuracy(second))
    assert result.low > 0
    assert result.p < 0.001
    assert score_interval(accuracy(first)).low < score_interval(accuracy(second)).high


def test_equal_methods_and_swapped_methods() -> None:
    tally = accuracy(answers(0, 50, 0.5))
    same = score_difference(tally, tally)
    assert (same.value, same.low, same.high, same.p) == (0, 0, 0, 1)
    other = accuracy(answers(1, 50, 0.7))
    item, two = score_difference(tally, other), score_difference(other, tally)
    assert item.value == -two.value
    assert item.p == pytest.approx(two.p, abs=0.02)
    assert "p = " in str(item)


def test_p_value_has_nominal_false_positive_rate() -> None:
    """Two methods that are alike, 400 times: p below 0.05 in about 5 of 100 runs. Also for F1, which is no mean."""
    low = 0
    for run in range(400):
        rng = np.random.default_rng(run)
        truth = rng.random(120) < 0.5
        tallies = []
        for _ in range(2):
            predictions = np.where(rng.random(120) < 0.8, truth, ~truth)
            sums = np.stack([truth & predictions, ~truth & predictions, truth & ~predictions], axis=1).astype(float)
            tallies.append(ScoreStats(tuple(map(str, range(120))), sums, f1))
        low += score_difference(*tallies, draws=400, seed=run).p < 0.05
    assert 0.02 <= low / 400 <= 0.085


def test_scores_of_different_questions_raise() -> None:
    with pytest.raises(BadParameter, match=r"different questions \(10 and 12 groups\)"):
        score_difference(accuracy(np.ones(10)), accuracy(np.ones(12)))


# --- seeds ---------------------------------------------------------------------------------------------------------


def test_seeds() -> None:
    runs = [accuracy(answers(seed, 200, share)) for seed, share in enumerate((0.4, 0.5, 0.6, 0.7))]
    values = [run.value for run in runs]
    result = seed_interval(runs)
    assert result.value == pytest.approx(np.mean(values))
    assert result.sd == pytest.approx(np.std(values, ddof=1))
    assert result.values == tuple(values)
    same = seed_interval(runs[:1] * 4)
    assert same.sd == 0
    assert same.high - same.low < result.high - result.low  # seeds that differ make it less sure
    alone = seed_interval(runs[:1])
    assert math.isnan(alone.sd)
    assert alone.value == runs[0].value
    with pytest.raises(BadParameter, match="at least one seed"):
        seed_interval([])


def test_interval_covers_questions_and_seeds() -> None:
    """Variances add: that of the mean over seeds, and that of the questions."""
    rng = np.random.default_rng(0)
    shares = rng.normal(0.5, 0.05, size=20)
    runs = [
        accuracy((np.random.default_rng(100 + n).random(300) < share).astype(float)) for n, share in enumerate(shares)
    ]
    result = seed_interval(runs, draws=40_000)
    table = np.stack([run.sums[:, 0] for run in runs])
    between = np.var([run.value for run in runs]) / 20
    within = 1e4 * np.var(table.mean(axis=0)) / 300
    spread = (result.high - result.low) / (2 * 1.96)
    # the noise of single answers is in both terms and once more in the draws of both
    noise = 1e4 * np.var(table - table.mean(axis=0) - table.mean(axis=1, keepdims=True)) / (20 * 300)
    assert spread == pytest.approx(math.sqrt(between + within + noise), rel=0.05)


# --- relative scores -----------------------------------------------------------------------------------------------


def three(shift: int = 0) -> dict[str, ScoreStats]:
    shares = {"GQA": 0.62, "MME": 0.8, "POPE": 0.5}
    return {name: accuracy(answers(shift + 10 * n, 400, share)) for n, (name, share) in enumerate(shares.items())}


def test_relative_score_and_its_interval() -> None:
    full, method = three(), three(1)
    result = relative_interval(method, full)
    plain = relative_score(
        {name: item.value for name, item in method.items()}, {name: item.value for name, item in full.items()}
    )
    assert result.value == pytest.approx(plain.value)
    assert result.low < result.value < result.high
    same = relative_interval(full, full)
    assert same.low == pytest.approx(100)
    assert same.high == pytest.approx(100)  # the same questions are drawn for both, so nothing is left to chance
    turned = dict(reversed(method.items()))
    assert relative_interval(turned, full) == result  # the order of the benchmarks does not matter


def test_interval_of_a_ratio_agrees_with_its_formula() -> None:
    full = accuracy(answers(5, 2000, 0.7))
    method = accuracy(np.where(answers(6, 2000, 0.9) > 0, full.sums[:, 0], 0.0))
    result = relative_interval({"GQA": method}, {"GQA": full}, draws=20_000)
    x, y = method.sums[:, 0], full.sums[:, 0]
    ratio = x.mean() / y.mean()
    spread = 100 * np.std(x - ratio * y) / y.mean() / math.sqrt(2000)  # the delta method
    assert result.high - result.low == pytest.approx(2 * 1.96 * spread, rel=0.04)


def test_difference_of_relative_scores() -> None:
    full, worse = three(), three(1)
    better = {name: accuracy(np.maximum(item.sums[:, 0], answers(77, 400, 0.15))) for name, item in worse.items()}
    result = relative_difference(better, worse, full)
    assert result.value == pytest.approx(relative_interval(better, full).value - relative_interval(worse, full).value)
    assert result.low > 0
    assert result.p < 0.001
    alike = relative_difference(three(1), three(2), full)
    assert alike.p > 0.05
    assert alike.low < 0 < alike.high


def test_relative_seed_interval() -> None:
    full = three()
    runs = [three(seed) for seed in (1, 2, 3)]
    result = relative_seed_interval(runs, full)
    values = [relative_interval(run, full).value for run in runs]
    assert result.values == pytest.approx(tuple(values))
    assert result.value == pytest.approx(np.mean(values))
    assert result.sd == pytest.approx(np.std(values, ddof=1))
    assert "over 3 seeds" in str(result)
    with pytest.raises(BadParameter):
        relative_seed_interval([], full)


def test_benchmarks_without_a_score_are_left_out() -> None:
    full, method = three(), three(1)
    none = ScoreStats(full["MME"].units, np.full((400, 2), np.nan), percent)
    without = {name: item for name, item in method.items() if name != "MME"}
    assert relative_interval(method | {"MME": none}, full) == relative_interval(without, full)
    with pytest.raises(BadParameter, match="No benchmark"):
        relative_interval({"MME": none}, full)
    with pytest.raises(BadParameter, match="baseline of GQA is 0"):
        relative_interval(method, full | {"GQA": accuracy(np.zeros(400))})


# --- real scores ---------------------------------------------------------------------------------------------------


def mme_score(share: float, seed: int) -> Score:
    rng = np.random.default_rng(seed)
    samples = [
        Sample(
            f"{name}{n}{a}",
            "?",
            (a,),
            (ImageRef(Path("x"), f"{name}{n}"),),
            group=f"{name}|{n}",
            meta={"category": name},
        )
        for name in ("existence", "OCR")
        for n in range(40)
        for a in ("Yes", "No")
    ]
    task = Task("MME", "mme", tuple(samples), Path("x"), "0")
    other = {"Yes": "No", "No": "Yes"}
    predictions = [item.answers[0] if rng.random() < share else other[item.answers[0]] for item in samples]
    return task.score(
        [{"index": item.index, "prediction": text} for item, text in zip(samples, predictions, strict=True)]
    )


def test_mme_score_resamples_images() -> None:
    """For acc + acc+ of MME the interval is that of the plain bootstrap over images."""
    score = mme_score(0.8, 0)
    assert len(score.stats.units) == 80
    result = score_interval(score, draws=20_000)
    assert result.value == score.value
    rng = np.random.default_rng(9)
    slow = [float(score.stats.formula(score.stats.sums[rng.integers(80, size=80)].sum(axis=0))) for _ in range(5000)]
    assert (result.low, result.high) == pytest.approx(tuple(np.quantile(slow, [0.025, 0.975])), abs=4)
    better = score_difference(mme_score(0.95, 1), mme_score(0.6, 2))
    assert better.p < 0.001
    assert better.low > 0


def test_nine_full_size_benchmarks_are_fast() -> None:
    """Ten thousand draws over some 35,000 questions; a draw of each question by itself would be 350 million numbers."""
    sizes = (12578, 1164, 1164, 1187, 9000, 2017, 5000, 4319, 218)
    full = {str(n): accuracy(answers(n, size, 0.6)) for n, size in enumerate(sizes)}
    method = {str(n): accuracy(answers(50 + n, size, 0.58)) for n, size in enumerate(sizes)}
    result = relative_interval(method, full, draws=10_000)
    assert result.low < result.value < result.high


def test_p_values_are_corrected_for_their_number() -> None:
    assert holm([]) == []
    assert holm([0.2]) == [0.2]
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # Holm (1979), by hand
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    rng = np.random.default_rng(0)
    for _ in range(50):
        p = rng.random(7).round(2).tolist()  # with ties
        corrected = holm(p)
        assert all(a <= b for a, b in zip(p, corrected, strict=True))
        assert all(np.diff(np.array(corrected)[np.argsort(p)]) >= 0)  # their order stays
