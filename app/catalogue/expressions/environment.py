"""Parses and checks expressions against the declared names and their types, and explains errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import accumulate
from typing import Literal, TypeAlias

from cel_expr_python import cel

from app.catalogue.expressions import syntax_tree
from app.catalogue.expressions.syntax_tree import Node
from app.schemas.fields import MAX_EXPRESSION_CHARS
from storage.records import PropertyType

ValueType: TypeAlias = PropertyType | Literal["numbers"]
"""Types of properties and of parameters, which may also be a list of numbers."""

MAX_DEPTH = 32  # the limit of Google's parser
MAX_NAMED = 60  # characters of an unknown name that an error quotes
MAX_LISTED_CHARS = 600  # of the names that an error lists
KNOWN = "known"  # the function that returns whether a property has a value

_CEL_TYPES: Mapping[ValueType, cel.Type] = {
    "text": cel.Type.STRING,
    "number": cel.Type.DOUBLE,
    "boolean": cel.Type.BOOL,
    "time": cel.Type.TIMESTAMP,
    "set": cel.Type.List(cel.Type.STRING),
    "numbers": cel.Type.List(cel.Type.DOUBLE),
}
_KNOWN = cel.FunctionDecl(
    KNOWN,
    [
        cel.Overload(id=f"known_{name}", return_type=cel.Type.BOOL, parameters=[type_])
        for name, type_ in _CEL_TYPES.items()
    ],
)
DECIMAL_POINT = "write numbers with a decimal point, such as 50.0"
_WRITE_KNOWN = f"to test whether a property has a value, write {KNOWN}(item.price)"
_OUR_WORDS = {
    "double": "number",
    "int": "whole number",
    "string": "text",
    "bool": "boolean",
    "google.protobuf.Timestamp": "time",
    "google.protobuf.Duration": "duration",
    "list(string)": "set",
    "null_type": "null",
}
_WRITTEN: Mapping[str, str] = {
    "and": "&&",
    "&": "&&",
    "or": "||",
    "|": "||",
    "not": "!",
    "=": "==",
    "===": "==",
    "<>": "!=",
    "=>": ">=",
    "=<": "<=",
}
"""Operators of other languages, and their equivalents in CEL."""

_SYMBOL = re.compile(r"[A-Za-z]+|[&|=<>]+")
_DECIMAL_COMMA = re.compile(r"\d,\d")
_HAS = re.compile(r"\bhas\s*\(")
_FAULT = re.compile(r"ERROR: <input>:(\d+):(\d+): (.*)")
_MISSING = re.compile(r"(?:missing|expecting) '(.)'")
_UNDECLARED = re.compile(r"undeclared reference to '([^']*)'")
_NO_OVERLOAD = re.compile(r"found no matching overload for '([^']*)' applied to '\((.*)\)'")


class InvalidExpression(ValueError):
    """An expression that cannot be used.

    position  the index of the character, from 0, at which something else was expected
    reason    what is wrong there, and what to write instead
    """

    def __init__(self, position: int, reason: str) -> None:
        self.position = position
        self.reason = reason
        super().__init__(f"at character {position + 1}: {reason}")


class Environment:
    """The names that expressions may use; thread-safe.

    types  types by name, such as ``item.price``
    """

    def __init__(self, types: Mapping[str, ValueType]) -> None:
        self.types = dict(types)
        variables = {name: _CEL_TYPES[type_] for name, type_ in types.items()}
        self._compiler = cel.NewEnv(variables={**variables, "now": cel.Type.TIMESTAMP}, functions=[_KNOWN])

    def compile(self, text: str, result: Literal["boolean", "number"]) -> Node:
        """Return the syntax tree of an expression with this result type; raise InvalidExpression."""
        if len(text) > MAX_EXPRESSION_CHARS:
            reason = f"an expression may have at most {MAX_EXPRESSION_CHARS:,} characters"
            raise InvalidExpression(MAX_EXPRESSION_CHARS, reason)
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise InvalidExpression(exc.start, "this is an unpaired surrogate, half of a character") from None
        try:
            compiled = self._compiler.compile(text)
        except RuntimeError as exc:
            raise self._explain(text, str(exc)) from None
        node = syntax_tree.read(text, compiled.serialize())
        if unsupported := syntax_tree.find_unsupported(node):
            is_has = unsupported.what == syntax_tree.HAS
            reason = _WRITE_KNOWN if is_has else f"{unsupported.what} cannot be used here"
            raise InvalidExpression(unsupported.position, reason)
        if (found := compiled.return_type()) != _CEL_TYPES[result]:
            returned = _our_word(found.name())
            raise InvalidExpression(0, f"the expression must return a {result}, but returns a {returned}")
        return node

    def _explain(self, text: str, message: str) -> InvalidExpression:
        if has := _HAS.search(text):
            return InvalidExpression(has.start(), _WRITE_KNOWN)
        if "recursion" in message:
            return InvalidExpression(0, f"an expression may be nested at most {MAX_DEPTH} levels deep")
        if (fault := _FAULT.search(message)) is None:
            return InvalidExpression(0, message.split(" [")[0])
        line, column, reason = int(fault[1]), int(fault[2]), fault[3]
        position = sum(len(one) + 1 for one in text.split("\n")[: line - 1]) + column - 1
        if reason.startswith("Syntax error"):
            return _misspelt(text, position) or InvalidExpression(position, _misplaced(text, position, reason))
        if undeclared := _UNDECLARED.match(reason):
            return InvalidExpression(position, self._unknown(undeclared[1]))
        if mismatch := _NO_OVERLOAD.match(reason):
            return InvalidExpression(position, _mismatch(*mismatch.groups()))
        return InvalidExpression(position, reason)

    def _unknown(self, name: str) -> str:
        name, known = name[:MAX_NAMED], sorted(self.types)
        if name.endswith(".item_id"):
            return f"there is no {name}; to name items, use exclude, candidates, pin or current_item"
        alike = [one for one in known if one.startswith(name.partition(".")[0] + ".")]  # such as item.price
        by_last = {one.rpartition(".")[2]: one for one in (*known, *alike)}
        close = get_close_matches(name.rpartition(".")[2], by_last, 1)
        meant = f"did you mean {by_last[close[0]]}? There" if close else "there"
        hint = "; to add it, import items that have it" if name.startswith(("item.", "current.")) else ""
        return f"there is no {name}; {meant} are {_listed(alike or known)}{hint}"


def _listed(names: Sequence[str]) -> str:
    ends = accumulate(len(name) + len(", ") for name in names)
    shown = [name for name, end in zip(names, ends, strict=True) if end <= MAX_LISTED_CHARS]
    others = f" and {len(names) - len(shown):,} others" if len(shown) < len(names) else ""
    return ", ".join(shown) + others


def _misspelt(text: str, position: int) -> InvalidExpression | None:
    """Return the error for a decimal comma, or an operator of another language at or before that position, or None."""
    if _DECIMAL_COMMA.fullmatch(text[position - 1 : position + 2]):
        return InvalidExpression(position, DECIMAL_POINT)
    before = text[:position].rstrip()
    for found in _SYMBOL.finditer(text):
        if found.start() <= position <= found.end() or found.end() == len(before):
            written = found[0].lower()
            if written in _WRITTEN:
                return InvalidExpression(found.start(), f"use {_WRITTEN[written]} for {found[0]}")
    return None


def _misplaced(text: str, position: int, reason: str) -> str:
    if position < len(text.rstrip()):
        return reason.removeprefix("Syntax error: ")
    missing = _MISSING.search(reason)
    return "the expression ends too early" + (f": {missing[1]} is missing" if missing else "")


def _mismatch(function: str, types: str) -> str:
    found = [_our_word(name) for name in re.split(r", (?![^(]*\))", types)]
    reason = f"{function.strip('_@').replace('_', ' ')} does not take {' and '.join(found)}"
    if "duration" in found:
        return f"{reason}; to convert a duration d to a number, write double(d.getHours())"
    if "whole number" in found:
        return f"{reason}; {DECIMAL_POINT}"
    return reason


def _our_word(name: str) -> str:
    return _OUR_WORDS.get(name) or _OUR_WORDS.get(name.lower(), name.lower())
