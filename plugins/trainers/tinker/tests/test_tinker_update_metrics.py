from __future__ import annotations

import numpy as np
import pytest
from tinker_atropos.errors import TrainerError
from tinker_atropos_tinker.datums import PolicyDatum, TrainingData
from tinker_atropos_tinker.update_metrics import (
    grad_norm,
    importance_sampling_loss,
    to_probe,
    update_metrics,
)
from tinker_atropos_tinker.update_warnings import ratio_warning


def datum(logprobs: list[float], advantages: list[float], mask: list[bool], *, fresh: bool = True) -> PolicyDatum:
    length = len(mask)
    return PolicyDatum(
        inputs=np.zeros(length, dtype=np.int32),
        targets=np.zeros(length, dtype=np.int64),
        logprobs=np.array(logprobs, dtype=np.float32),
        advantages=np.array(advantages, dtype=np.float32),
        mask=np.array(mask),
        fresh=fresh,
    )


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


ONE = datum([0, -1, -2], [0, 0.5, -1], [False, True, True])


def test_the_loss_is_the_service_s_sum_per_trained_token() -> None:
    metrics = update_metrics(TrainingData((ONE,), []), [floats(-9, -1, -2)], {"loss:sum": 3.0})
    assert metrics["loss"] == 1.5
    assert metrics["train/tokens"] == 2


def test_without_the_service_s_figure_the_loss_follows_its_definition() -> None:
    trained = [floats(-9, -1.5, -1)]
    expected = -(np.exp(-0.5) * 0.5 + np.exp(1.0) * -1)
    assert importance_sampling_loss([ONE], trained) == pytest.approx(expected)
    assert update_metrics(TrainingData((ONE,), []), trained, {})["loss"] == pytest.approx(expected / 2)


def test_kl_mismatch_and_ratio_count_trained_tokens_only() -> None:
    metrics = update_metrics(TrainingData((ONE,), []), [floats(-9, -1.5, -1)], {"loss:sum": 0.0})
    assert metrics["train/kl_sample_train_v1"] == pytest.approx((0.5 - 1) / 2)
    assert metrics["train/kl_sample_train_v2"] == pytest.approx(0.5 * (0.25 + 1) / 2)
    assert metrics["train/logprob_mismatch_mean"] == pytest.approx(0.75)
    assert metrics["train/logprob_mismatch_max"] == pytest.approx(1)
    assert metrics["train/ratio_max"] == pytest.approx(np.e)


def test_a_policy_that_moved_on_is_no_mismatch() -> None:
    stale = datum([-1], [1], [True], fresh=False)
    assert "train/logprob_mismatch_mean" not in update_metrics(TrainingData((stale,), []), [floats(-5)], {})
    both = update_metrics(TrainingData((stale, datum([-1], [0], [True])), []), [floats(-5), floats(-1)], {})
    assert both["train/logprob_mismatch_max"] == 0
    assert both["train/advantage_zero"] == 0.5


def test_a_stale_batch_is_compared_by_probes() -> None:
    stale = TrainingData((datum([-1, -1], [1, 1], [False, True], fresh=False),) * 6, [])
    assert to_probe(stale, 4) == [0, 1, 2, 3]
    assert to_probe(TrainingData((*stale.datums, ONE), []), 4) == []
    metrics = update_metrics(stale, [floats(-9, -5)] * 6, {}, {1: floats(-7, -5.25)})
    assert metrics["train/logprob_mismatch_max"] == 0.25


def test_an_answer_of_another_shape_is_refused() -> None:
    with pytest.raises(TrainerError, match="other lengths"):
        update_metrics(TrainingData((ONE,), []), [floats(-1)], {})


def test_the_gradient_norm_is_taken_where_it_is_reported() -> None:
    assert grad_norm({"unclipped_grad_l2:mean": 2.0, "x:sum": 1.0}) == {"train/grad_norm": 2.0}
    assert grad_norm({}) == {}


def test_a_large_ratio_on_stale_samples_names_the_figures_and_the_ways_on() -> None:
    said = ratio_warning(7, {"train/ratio_max": 331.0, "train/grad_norm": 8298.0}, 5e-4, stale=True)
    assert said is not None
    for part in ("step 7", "331", "8.3e+03", "rollout.max_staleness=0", "tinker.learning_rate (now 0.0005)"):
        assert part in said
    assert ratio_warning(7, {"train/ratio_max": 331.0}, 5e-4, stale=False) is None
    assert ratio_warning(7, {"train/ratio_max": 19.0}, 5e-4, stale=True) is None
