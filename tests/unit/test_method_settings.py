"""Settings that compressors refuse, and what is kept of schedules and over changes of the number of ranks."""

import numpy as np
import pytest

import hvd_compress as h
from hvd_compress.checkpoint import FORMAT, VERSION, redistribute

BOOK = np.ones((4, 2), np.float32)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: h.QSGD(2.0), r"QSGD.bits must be a whole number from 2 to 8, got 2.0"),
        (lambda: h.QSGD(True), r"QSGD.bits must be a whole number from 2 to 8, got True"),
        (lambda: h.QSGD(norm="l1"), r"QSGD.norm must be one of 'max', 'l2', got 'l1'"),
        (lambda: h.Int8(0), r"Int8.bucket must be a whole number, 1 or more, got 0"),
        (lambda: h.TernGrad(0.0), r"TernGrad.clip must be a positive number or None, got 0.0"),
        (lambda: h.Signum(1.0), r"Signum.beta must be a number in \[0, 1\), got 1.0"),
        (lambda: h.PowerSGD(0), r"PowerSGD.rank must be a whole number, 1 or more, got 0"),
        (lambda: h.RandomK(0.1, order="up"), r"RandomK.order must be one of 'random', 'rolling', got 'up'"),
        (lambda: h.DGC(0.1, momentum=1.0), r"MomentumCorrection.momentum must be a number in \[0, 1\), got 1.0"),
        (lambda: h.DGC(0.1, feedback=h.ErrorFeedback()), r"DGC has a feedback of its own"),
        (
            lambda: h.TopK(0.1, values=h.Signum()),
            r"TopK.values must be a quantiser such as Int8\(\), or None, got Signum",
        ),
        (lambda: h.TopK(0.1, values=h.FP16()), r"TopK.values must be a quantiser"),
        (lambda: h.TopK(0.1, values=h.Threshold(0.1)), r"TopK.values must be a quantiser"),
        (lambda: h.TopK(0.1, values=h.SVD()), r"TopK.values must be a quantiser"),
        (lambda: h.TopK(0.1, values=h.SignSGD()), r"TopK.values must be a quantiser"),
        (lambda: h.TopK(0.1, values=h.Policy()), r"TopK.values must be a quantiser"),
        (lambda: h.TopK(0.1, values=h.TopK(h.warm_up(0.1, 4))), r"TopK.values must be a quantiser"),
        (lambda: h.TopK(0.1, values=h.TopK(lambda n: 0.1)), r"TopK.values must be a quantiser"),
        (lambda: h.VectorQuantizer(2, 4, codebook=BOOK), r"codebook must be 4 rows of 2 numbers, each of unit length"),
        (lambda: h.VectorQuantizer(16, 8, unbiased=True), r"codewords must be enough to span 16 dimensions"),
        (lambda: h.VectorQuantizer(unbiased=True, values=h.EFSign()), r"values must be an unbiased quantiser"),
        (lambda: h.Switch({1: h.TopK(0.1)}), r"Switch expected \{first step: compressor\} with one for step 0"),
        (lambda: h.warm_up(0.5, 10), r"warm_up expected 0 < ratio < start"),
    ],
)
def test_a_wrong_setting_is_refused(make, message):
    with pytest.raises(h.ConfigError, match=message):
        make()


def test_a_schedule_that_is_a_function_keeps_one_compressor_at_a_time():
    compressor = h.TopK(lambda number: 1 / (2 + number))
    for number in range(50):
        assert compressor.at(number).ratio == 1 / (2 + number)
        assert compressor.at(number) is compressor.at(number)
    assert len(compressor.derived("at last", dict)) == 1


@pytest.mark.parametrize("averages", [[], ["estimates"]])
@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (3, 3), (3, 5)])
def test_the_sum_of_estimates_stays_their_sum_on_other_ranks(old, new, averages):
    """Or their average, where Horovod has averaged what was sent."""
    estimates = np.random.default_rng(0).standard_normal((old, 6))
    states = [
        {
            "format": FORMAT,
            "version": VERSION,
            "rank": rank,
            "size": old,
            "parameters": {
                "optimizer0/w": {
                    "residual": None,
                    "steps": 3,
                    "memory": {"estimate": estimates[rank]},
                    "common": {"estimates": estimates.mean(axis=0) if averages else estimates.sum(axis=0)},
                    "averages": averages,
                }
            },
        }
        for rank in range(old)
    ]
    shared = [redistribute(states, rank, new)["optimizer0/w"] for rank in range(new)]
    total = sum(entry.get("memory", {}).get("estimate", 0) for entry in shared)
    for entry in shared:
        np.testing.assert_allclose(entry["common"]["estimates"], total / new if averages else total)
        assert entry.get("averages", []) == averages
    np.testing.assert_allclose(total / new, estimates.mean(axis=0))
