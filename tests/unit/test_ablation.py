"""The ablation's settings are valid, and the best cell of a sweep is the one that is quoted."""

from aspire_sglang.config import AspireConfig
from bench.ablation import _best, variants


def test_every_variant_is_a_configuration():
    found = variants([4, 8])
    assert sum(map(len, found.values())) == 1 + 5 * 2 + 6 + 1 + 3 + 4
    for several in found.values():
        for settings in several:
            AspireConfig.model_validate(settings)


def test_the_best_cell_is_quoted():
    results = [
        {"name": "a", "settings": {"gamma": g}, "tokens_per_s": rates, "accepted_share": [1.0]}
        for g, rates in ((4, [10.0, 12.0, 30.0]), (8, [13.0, 14.0, 15.0]), (12, [1.0, 2.0, 3.0]))
    ]
    best = _best(results)
    assert best["a"]["settings"] == {"gamma": 8}
    assert best["a"]["median"] == 14.0
