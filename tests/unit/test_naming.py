"""Which names of parameters mean the same."""

import pytest

from hvd_compress.naming import counterparts

SAME = {
    "equal": (["a/kernel", "b/kernel"], ["b/kernel", "a/kernel", "b/bias"], ["a/kernel", "b/kernel"]),
    "a Sequential that was loaded": (["sequential_8/a/kernel"], ["a/kernel", "a/bias"], ["a/kernel"]),
    "a Sequential that is going to be": (["a/kernel"], ["sequential/a/kernel"], ["sequential/a/kernel"]),
    "other numbers": (["dense/kernel", "dense_1/kernel"], ["dense_9/kernel", "dense_10/kernel"], None),
    "overlapping numbers": (["dense_1/kernel", "dense_2/kernel"], ["dense_2/kernel", "dense_3/kernel"], None),
    "both": (["sequential_2/dense_4/kernel"], ["dense/kernel"], None),
    "lost names that told two apart": (["s_5/d/kernel", "s_6/d/kernel"], ["d/kernel", "d/kernel#2"], None),
    "nothing": ([], ["a"], []),
}
OTHER = {
    "another name": (["a/kernel"], ["b/kernel"]),
    "one more": (["dense/kernel", "dense_1/kernel"], ["dense_3/kernel"]),
    "another order": (["a_1/kernel", "b_1/kernel"], ["b_2/kernel", "a_2/kernel"]),
    "another variable": (["dense/kernel"], ["dense_1/gamma"]),
}


@pytest.mark.parametrize("case", SAME)
def test_the_same(case):
    names, others, expected = SAME[case]
    assert counterparts(names, others) == dict(zip(names, others if expected is None else expected, strict=True))


@pytest.mark.parametrize("case", OTHER)
def test_other_models(case):
    assert counterparts(*OTHER[case]) is None
