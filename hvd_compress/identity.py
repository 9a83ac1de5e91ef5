"""Mappings by object identity that keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any, TypeVar

Value = TypeVar("Value")


class WeakIdDictionary(MutableMapping[Any, Value]):
    """Map objects to values, by identity; an entry goes with its object.

    For keys that cannot be hashed or compare by value, as TensorFlow's variables do.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], Value]] = {}

    def __getitem__(self, key: Any) -> Value:
        reference, value = self._entries[id(key)]
        if reference() is not key:
            raise KeyError(key)
        return value

    def __setitem__(self, key: Any, value: Value) -> None:
        number, entries = id(key), weakref.ref(self)

        def forget(gone: weakref.ref[Any]) -> None:
            mapping = entries()
            # The number may belong to another object by now.
            if mapping is not None and mapping._entries.get(number, (None,))[0] is gone:
                del mapping._entries[number]

        self._entries[number] = (weakref.ref(key, forget), value)

    def __delitem__(self, key: Any) -> None:
        self[key]
        del self._entries[id(key)]

    def __iter__(self) -> Iterator[Any]:
        keys = [reference() for reference, _ in list(self._entries.values())]
        return iter([key for key in keys if key is not None])

    def __len__(self) -> int:
        return len(self._entries)


class Serials:
    """Number objects in the order in which they are first seen; unlike ``id``, never reused."""

    def __init__(self) -> None:
        self._numbers: WeakIdDictionary[int] = WeakIdDictionary()
        self._next = 0

    def of(self, thing: Any) -> int:
        """Return the object's number."""
        number = self._numbers.get(thing)
        if number is None:
            number = self._numbers[thing] = self._next
            self._next += 1
        return number
