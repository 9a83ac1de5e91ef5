"""Mappings by identity."""

import gc

import pytest

from hvd_compress.identity import Serials, WeakIdDictionary


class Thing:
    """Equal to all others, and without a hash, as variables are."""

    def __eq__(self, other):
        return True

    __hash__ = None


def test_keys_are_told_apart_by_identity():
    one, two = Thing(), Thing()
    d = WeakIdDictionary()
    d[one], d[two] = 1, 2
    assert (d[one], d[two], len(d)) == (1, 2, 2)
    assert one in d and Thing() not in d
    assert [key is thing for key, thing in zip(d, (one, two), strict=True)] == [True, True]
    d[one] = 3
    assert d.pop(one) == 3 and one not in d and len(d) == 1
    with pytest.raises(KeyError):
        del d[one]


def test_entries_go_with_their_keys():
    d, thing = WeakIdDictionary(), Thing()
    d[thing] = "value"
    del thing
    gc.collect()
    assert len(d) == 0 and list(d) == []


def test_an_object_at_the_address_of_another_is_another():
    d = WeakIdDictionary()
    for number in range(100):
        thing = Thing()  # usually where the one before was
        assert d.get(thing) is None
        d[thing] = number


def test_the_mapping_itself_is_not_kept_alive():
    d, thing = WeakIdDictionary(), Thing()
    d[thing] = 1
    del d
    gc.collect()
    del thing  # its callback must do without the mapping


def test_serial_numbers_are_never_reused():
    serials, one = Serials(), Thing()
    assert [serials.of(one), serials.of(one)] == [0, 0]
    seen = {serials.of(Thing()) for _ in range(50)}
    assert len(seen) == 50 and 0 not in seen
