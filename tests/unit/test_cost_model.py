"""Cost model: prediction, fit, correction while running, and the file."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aspire_sglang.speculation.cost_correction import OnlineCostModel
from aspire_sglang.speculation.cost_file import (
    CostKey,
    CostKeyMismatch,
    load_cost_model,
    save_cost_model,
)
from aspire_sglang.speculation.cost_model import CostModel, StepShape

TRUTH = CostModel(fixed=4e-3, per_token=2e-5, per_kv=5e-8, per_pair=2e-9)
BUCKETS = (8, 16, 32, 64, 128)


def random_shape(rng: random.Random, rows: int = 16) -> StepShape:
    """A mixed forward: about one row in five verifies over a long context."""
    shape = StepShape()
    for _ in range(rows):
        if rng.random() < 0.8:
            shape = shape.row(1, 512)
        else:
            shape = shape.row(rng.randint(1, 9), rng.randint(1_000, 20_000))
    return shape


def measured(model: CostModel, shape: StepShape, rng: random.Random, noise: float) -> float:
    return model.predict(shape) * math.exp(rng.gauss(0.0, noise))


def scaled(model: CostModel, *factors: float) -> CostModel:
    return model.with_coefficients(
        [c * f for c, f in zip(model.coefficients, factors, strict=True)]
    )


def ratios(model: CostModel, truth: CostModel) -> list[float]:
    return [a / b for a, b in zip(model.coefficients, truth.coefficients, strict=True)]


class TestPrediction:
    def test_rows_add_up(self) -> None:
        shape = StepShape().row(1, 100).row(4, 1000)
        assert shape == StepShape(tokens=5, kv_tokens=1100, score_pairs=4100)

    @pytest.mark.parametrize(("query_len", "kv_len"), [(0, 5), (1, -1)])
    def test_impossible_rows_are_refused(self, query_len: int, kv_len: int) -> None:
        with pytest.raises(ValueError, match="a row needs"):
            StepShape().row(query_len, kv_len)

    def test_formula(self) -> None:
        model = CostModel(fixed=1.0, per_token=0.1, per_kv=0.01, per_pair=0.001)
        assert model.predict(StepShape(5, 1100, 4100)) == pytest.approx(1 + 0.5 + 11 + 4.1)

    @pytest.mark.parametrize(
        ("tokens", "padded"), [(1, 8), (8, 8), (9, 16), (128, 128), (129, 129)]
    )
    def test_tokens_are_padded_to_the_next_bucket(self, tokens: int, padded: int) -> None:
        model = CostModel(0.0, 1.0, 0.0, buckets=BUCKETS)
        assert model.predict(StepShape(tokens)) == padded

    @pytest.mark.parametrize("buckets", [(), BUCKETS])
    def test_vectors_equal_scalars(self, buckets: tuple[int, ...]) -> None:
        model = replace(TRUTH, buckets=buckets)
        rng = random.Random(1)
        shapes = [random_shape(rng, rows) for rows in (1, 3, 8, 40, 120)]
        many = model.predict_many(
            np.array([float(s.tokens) for s in shapes]),
            np.array([float(s.kv_tokens) for s in shapes]),
            np.array([float(s.score_pairs) for s in shapes]),
        )
        assert many.tolist() == pytest.approx([model.predict(s) for s in shapes], rel=1e-12)

    @pytest.mark.parametrize("bad", [-1e-9, math.nan, math.inf])
    def test_bad_coefficients_are_refused(self, bad: float) -> None:
        with pytest.raises(ValueError, match="finite and >= 0"):
            CostModel(1.0, bad, 0.0)

    def test_a_free_step_is_refused(self) -> None:
        with pytest.raises(ValueError, match="must be positive"):
            CostModel(0.0, 0.0, 0.0)

    @pytest.mark.parametrize("buckets", [(0, 4), (4, 4), (8, 4)])
    def test_bad_buckets_are_refused(self, buckets: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="ascend strictly"):
            CostModel(1.0, 0.0, 0.0, buckets=buckets)


class TestFit:
    @pytest.mark.parametrize("buckets", [(), BUCKETS])
    def test_recovers_known_coefficients_from_noisy_steps(self, buckets: tuple[int, ...]) -> None:
        truth = replace(TRUTH, buckets=buckets)
        rng = random.Random(3)
        shapes = [random_shape(rng, rng.choice([1, 2, 4, 8, 16, 32])) for _ in range(400)]
        model = CostModel.fit([(s, measured(truth, s, rng, 0.03)) for s in shapes], buckets)
        assert ratios(model, truth) == pytest.approx([1.0] * 4, abs=0.15)
        assert model.buckets == buckets
        assert model.quality is not None
        assert 0.01 < model.quality.median < 0.03
        assert model.quality.median < model.quality.worst < 0.2
        assert model.quality.samples == 400

    def test_ignoring_the_staircase_fits_worse(self) -> None:
        truth = CostModel(1e-3, 1e-4, 1e-9, buckets=BUCKETS)
        shapes = [StepShape(n, 500 * n, 500 * n) for n in range(1, 129)]
        samples = [(s, truth.predict(s)) for s in shapes]
        padded, raw = CostModel.fit(samples, BUCKETS), CostModel.fit(samples)
        assert padded.quality is not None
        assert raw.quality is not None
        assert padded.quality.worst < 1e-6
        assert raw.quality.worst > 0.1

    def test_disturbed_measurements_do_not_bend_the_fit(self) -> None:
        rng = random.Random(5)
        shapes = [random_shape(rng) for _ in range(100)]
        samples = [
            (s, measured(TRUTH, s, rng, 0.02) * (5.0 if index % 10 == 0 else 1.0))
            for index, s in enumerate(shapes)
        ]
        model = CostModel.fit(samples)
        errors = [abs(model.predict(s) / TRUTH.predict(s) - 1.0) for s in shapes]
        assert max(errors) < 0.05

    def test_coefficients_never_become_negative(self) -> None:
        # Less time with more KV: plain least squares would answer with a negative price.
        samples = [(StepShape(n, 1000 * n, 1000 * n), 1.0 / n) for n in range(1, 9)]
        assert all(c >= 0.0 for c in CostModel.fit(samples).coefficients)

    def test_too_few_shapes_are_refused(self) -> None:
        shapes = [StepShape(n, 100, 100) for n in (1, 2, 3)]
        with pytest.raises(ValueError, match="at least 4 distinct step shapes, got 3 in 30"):
            CostModel.fit([(s, 1.0) for s in shapes] * 10)
        with pytest.raises(ValueError, match="got 0"):
            CostModel.fit([])

    def test_shapes_in_one_bucket_are_one_shape(self) -> None:
        samples = [(StepShape(n, 100, 100), 1.0) for n in range(1, 9)]
        with pytest.raises(ValueError, match="got 1 in 8"):
            CostModel.fit(samples, BUCKETS)

    @pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
    def test_impossible_times_are_refused(self, seconds: float) -> None:
        samples = [(StepShape(n, n * n, n**3), 1.0) for n in range(1, 9)]
        with pytest.raises(ValueError, match="positive and finite"):
            CostModel.fit([*samples, (StepShape(9, 9, 9), seconds)])


class TestCorrection:
    def run(
        self,
        online: OnlineCostModel,
        truth: CostModel,
        steps: int,
        *,
        only: StepShape | None = None,
        outlier_every: int = 0,
    ) -> float:
        """Feed ``steps`` measured steps; returns the mean relative error of fresh predictions."""
        rng = random.Random(11)
        for step in range(steps):
            shape = only or random_shape(rng)
            seconds = measured(truth, shape, rng, 0.03)
            if outlier_every and step % outlier_every == 0:
                seconds *= 4.0
            online.correct(shape, seconds)
        fresh = [only or random_shape(rng) for _ in range(50)]
        return sum(abs(online.model.predict(s) / truth.predict(s) - 1.0) for s in fresh) / 50

    @pytest.mark.parametrize("factor", [0.5, 2.0, 10.0])
    def test_follows_a_faster_or_slower_machine(self, factor: float) -> None:
        assert self.run(OnlineCostModel(TRUTH), scaled(TRUTH, *[factor] * 4), 300) < 0.03

    def test_returns_when_the_disturbance_ends(self) -> None:
        online = OnlineCostModel(TRUTH)
        self.run(online, scaled(TRUTH, 2, 2, 2, 2), 300)
        assert self.run(online, TRUTH, 400) < 0.03

    def test_one_shape_moves_all_terms_together(self) -> None:
        online = OnlineCostModel(TRUTH)
        shape = random_shape(random.Random(2))
        self.run(online, scaled(TRUTH, 2, 2, 2, 2), 400, only=shape)
        assert ratios(online.model, TRUTH) == pytest.approx([2.0] * 4, rel=0.1)

    def test_tells_a_dearer_kv_token_from_a_dearer_step(self) -> None:
        dearer_kv, dearer_step = OnlineCostModel(TRUTH), OnlineCostModel(TRUTH)
        self.run(dearer_kv, scaled(TRUTH, 1, 1, 3, 1), 600)
        self.run(dearer_step, scaled(TRUTH, 3, 1, 1, 1), 600)
        fixed, _, per_kv, _ = ratios(dearer_kv.model, TRUTH)
        assert fixed == pytest.approx(1.0, abs=0.2)
        assert per_kv == pytest.approx(3.0, abs=0.4)
        fixed, _, per_kv, _ = ratios(dearer_step.model, TRUTH)
        assert fixed == pytest.approx(3.0, abs=0.3)
        assert per_kv == pytest.approx(1.0, abs=0.4)

    def test_a_term_that_was_free_can_get_a_price(self) -> None:
        base = CostModel(4e-3, 2e-5, 0.0)
        truth = CostModel(4e-3, 2e-5, 2e-7)
        blind = CostModel(12e-3, 2e-5, 0.0)
        rng = random.Random(4)
        shapes = [random_shape(rng) for _ in range(50)]
        without = sum(abs(blind.predict(s) / truth.predict(s) - 1.0) for s in shapes) / 50
        assert self.run(OnlineCostModel(base), truth, 800) < min(0.05, without / 3)

    def test_one_outlier_hardly_moves_the_model(self) -> None:
        online = OnlineCostModel(TRUTH)
        shape = random_shape(random.Random(2))
        online.correct(shape, 4.0 * TRUTH.predict(shape))
        assert online.model.predict(shape) == pytest.approx(TRUTH.predict(shape), rel=0.02)
        self.run(online, TRUTH, 100)
        before = online.model.predict(shape)
        online.correct(shape, 4.0 * before)
        assert online.model.predict(shape) == pytest.approx(before, rel=0.03)

    def test_regular_outliers_are_limited(self) -> None:
        assert self.run(OnlineCostModel(TRUTH), TRUTH, 500, outlier_every=10) < 0.05

    def test_negative_prices_never_appear(self) -> None:
        online = OnlineCostModel(TRUTH)
        rng = random.Random(9)
        for _ in range(300):
            shape = random_shape(rng)
            online.correct(shape, 1.0 / shape.kv_tokens)
            assert all(math.isfinite(c) and c >= 0.0 for c in online.model.coefficients)

    def test_equal_measurements_give_equal_models_and_keep_the_base(self) -> None:
        base = replace(TRUTH, buckets=BUCKETS)
        first, second = OnlineCostModel(base), OnlineCostModel(base)
        assert first.model is base
        self.run(first, scaled(base, 2, 1, 1, 1), 100)
        self.run(second, scaled(base, 2, 1, 1, 1), 100)
        assert first.model == second.model
        assert first.model.buckets == BUCKETS
        assert base.coefficients == TRUTH.coefficients

    @pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
    def test_impossible_times_are_refused(self, seconds: float) -> None:
        with pytest.raises(ValueError, match="positive and finite"):
            OnlineCostModel(TRUTH).correct(StepShape(1, 1, 1), seconds)

    def test_a_shape_without_cost_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no cost"):
            OnlineCostModel(CostModel(0.0, 0.0, 1.0)).correct(StepShape(1, 0, 0), 1.0)

    @pytest.mark.parametrize(
        "options", [{"memory": 1.0}, {"coupling": 0.0}, {"outlier_ratio": 1.0}]
    )
    def test_bad_options_are_refused(self, options: dict[str, float]) -> None:
        with pytest.raises(ValueError, match=next(iter(options))):
            OnlineCostModel(TRUTH, **options)


KEY = CostKey(
    device="GPU A",
    model="org/model",
    tp_size=1,
    dtype="bfloat16",
    page_size=16,
    budget="max(32 pages, 7%)",
    buckets=BUCKETS,
    attention_implementation="torch",
    sglang_version="0.5.17",
    extra={"threads": "2"},
)


class TestFile:
    @pytest.fixture
    def fitted(self) -> CostModel:
        rng = random.Random(3)
        shapes = [random_shape(rng) for _ in range(50)]
        return CostModel.fit([(s, measured(TRUTH, s, rng, 0.03)) for s in shapes], BUCKETS)

    def test_round_trip_is_exact(self, tmp_path: Path, fitted: CostModel) -> None:
        path = tmp_path / "new" / "cost.json"
        save_cost_model(path, KEY, fitted)
        assert load_cost_model(path, KEY) == fitted
        assert [p.name for p in path.parent.iterdir()] == ["cost.json"]

    def test_mismatch_names_every_differing_field(self, tmp_path: Path, fitted: CostModel) -> None:
        path = tmp_path / "cost.json"
        save_cost_model(path, KEY, fitted)
        wanted = replace(KEY, device="GPU B", tp_size=2, extra={"threads": "4", "clock": "low"})
        with pytest.raises(CostKeyMismatch) as caught:
            load_cost_model(path, wanted)
        assert caught.value.differences == {
            "device": ("GPU A", "GPU B"),
            "tp_size": (1, 2),
            "extra.threads": ("2", "4"),
            "extra.clock": (None, "low"),
        }
        for text in ("device: stored 'GPU A', wanted 'GPU B'", "tp_size: stored 1, wanted 2"):
            assert text in str(caught.value)
        assert "dtype" not in str(caught.value)

    def test_other_buckets_are_a_mismatch(self, tmp_path: Path, fitted: CostModel) -> None:
        path = tmp_path / "cost.json"
        save_cost_model(path, KEY, fitted)
        with pytest.raises(CostKeyMismatch, match="buckets"):
            load_cost_model(path, replace(KEY, buckets=(8, 16)))

    def test_a_key_with_other_buckets_than_the_model_is_not_saved(
        self, tmp_path: Path, fitted: CostModel
    ) -> None:
        with pytest.raises(ValueError, match="buckets"):
            save_cost_model(tmp_path / "cost.json", replace(KEY, buckets=()), fitted)

    def test_a_missing_file_is_told_apart(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            load_cost_model(tmp_path / "none.json", KEY)

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", '{"format": 1}'])
    def test_corrupt_text_is_refused(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "cost.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"cost\.json is not a readable cost model"):
            load_cost_model(path, KEY)

    @pytest.mark.parametrize(
        ("place", "value"),
        [
            (("format",), 2),
            (("seconds", "fixed"), -1.0),
            (("seconds", "fixed"), math.nan),
            (("seconds", "fixed"), "fast"),
            (("seconds", "per_moon"), 1.0),
            (("seconds",), None),
            (("key",), None),
            (("quality",), {"median": 0.1}),
        ],
    )
    def test_corrupt_values_are_refused(
        self, tmp_path: Path, fitted: CostModel, place: tuple[str, ...], value: object
    ) -> None:
        path = tmp_path / "cost.json"
        save_cost_model(path, KEY, fitted)
        content = json.loads(path.read_text())
        target = content
        for name in place[:-1]:
            target = target[name]
        target[place[-1]] = value
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match="not a readable cost model") as caught:
            load_cost_model(path, KEY)
        assert not isinstance(caught.value, CostKeyMismatch)


def test_a_noisy_spell_without_drafts_does_not_make_drafting_unthinkable():
    """Plain steps alone, on a machine that others slow down: the relative prices must survive."""
    rng = np.random.default_rng(5)
    base = CostModel(fixed=0.02, per_token=1e-3, per_kv=2e-6, per_pair=4e-7)
    online = OnlineCostModel(base)
    plain = StepShape()
    for _ in range(8):
        plain = plain.row(1, 3000)
    for _ in range(300):
        online.correct(plain, base.predict(plain) * float(rng.lognormal(1.5, 0.7)))
    draft = StepShape()
    for _ in range(8):
        draft = draft.row(1, 560)
    before = base.predict(draft) / base.predict(plain)
    after = online.model.predict(draft) / online.model.predict(plain)
    assert after < 2 * before
    for _ in range(300):
        online.correct(plain, base.predict(plain))
    after = online.model.predict(draft) / online.model.predict(plain)
    assert after == pytest.approx(before, rel=0.35)
