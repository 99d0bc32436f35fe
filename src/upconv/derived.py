"""Descriptions that are never changed: values that follow from their fields, found once, and others made from them.

Planning a layer looks at thousands of tilings, each a frozen dataclass whose numbers follow from few fields. What the
standard library has for this takes most of that time (docs/experiments.md): `functools.cached_property` takes a lock at
each first use before Python 3.12, and `dataclasses.replace` calls ``__init__``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import cache
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")
D = TypeVar("D")


class derived(Generic[T]):
    """A property of an immutable object, found at its first use and kept in the object's ``__dict__``.

    As `functools.cached_property`, without its lock: threads that meet find the same value twice, so nothing that has
    effects may be one. ``super().x`` is to be returned as it is: it is kept under the same name.
    """

    def __init__(self, find: Callable[[Any], T], needs: Iterable[str] = (), ignores: Iterable[str] = ()) -> None:
        self.find = find
        self.needs, self.ignores = frozenset(needs), frozenset(ignores)
        self.__doc__ = find.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, of: None, owner: type) -> derived[T]: ...
    @overload
    def __get__(self, of: object, owner: type) -> T: ...
    def __get__(self, of: object | None, owner: type) -> derived[T] | T:
        if of is None:
            return self
        found = of.__dict__[self.name] = self.find(of)
        return found


def derived_from(*names: str) -> Callable[[Callable[[Any], T]], derived[T]]:
    """`derived`, from these fields of a dataclass alone: where `varied` changes none of them, its result has the value.

    Of a property that subclasses define anew the last definition counts; nor may what one reads be defined anew so that
    it needs more fields. `tests/test_derived.py` compares what is kept with what is found anew.
    """
    return lambda find: derived(find, needs=names)


def derived_without(*names: str) -> Callable[[Callable[[Any], T]], derived[T]]:
    """As `derived_from`, from all fields but these; the dataclass need not have them."""
    return lambda find: derived(find, ignores=names)


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@cache
def _derived(kind: Any) -> dict[str, derived[Any]]:
    every = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
    return {name: value for name, value in every.items() if isinstance(value, derived)}


@cache
def needs(kind: Any) -> dict[str, frozenset[str]]:
    """Of a dataclass the properties that `varied` may keep, with the fields that each is derived from.

    Raises:
        TypeError: one says that it is derived from what is no field.
    """
    names, marked = frozenset(_fields(kind)), _derived(kind)
    for name, value in marked.items():
        if unknown := sorted(value.needs - names):
            raise TypeError(f"{kind.__name__}.{name} is derived from {unknown[0]!r}, which is no field")
    found = {name: value.needs or names - value.ignores for name, value in marked.items()}
    return {name: of for name, of in found.items() if of != names}


@cache
def _lost(kind: Any, changed: frozenset[str]) -> frozenset[str]:
    """Of a dataclass its properties that may change where these fields do."""
    if unknown := sorted(changed.difference(_fields(kind))):
        raise TypeError(f"{kind.__name__} has no field {unknown[0]!r}")
    lasting = (name for name, of_fields in needs(kind).items() if of_fields.isdisjoint(changed))
    return frozenset(_derived(kind)).difference(lasting)


def varied(of: D, **changes: Any) -> D:
    """`dataclasses.replace` of a frozen dataclass that has no ``__post_init__`` and no fields without ``init``.

    Raises:
        TypeError: there is no field of that name.
    """
    kind: Any = type(of)
    made = object.__new__(kind)
    values = made.__dict__
    values.update(of.__dict__)
    for name in values.keys() & _lost(kind, frozenset(changes)):
        del values[name]
    values.update(changes)
    return made


@cache
def _following(kind: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Of a dataclass the properties that follow from these fields alone."""
    return tuple(name for name, of_fields in needs(kind).items() if of_fields.issubset(names))


def settled(of: D, *names: str) -> D:
    """The same object, of which all properties that follow from these fields alone are found: what is `varied` from it
    has them.
    """
    kind: Any = type(of)
    for name in _following(kind, names):
        getattr(of, name)
    return of
