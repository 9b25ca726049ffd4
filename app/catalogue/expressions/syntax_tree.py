"""The syntax tree of a checked expression, read from the output of CEL's compiler.

The messages and field numbers are those of ``cel/expr/syntax.proto`` and ``cel/expr/checked.proto`` in the CEL
specification (https://github.com/google/cel-spec), as far as they are needed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.any_pb2 import Any as Any_
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

PACKAGE = "lisarec.cel"

HAS = "the macro has"
NUMBERS = 2, 4  # INT64 and DOUBLE of cel.expr.Type.PrimitiveType

# by message: fields as "name: type = number", "repeated" before the type; a map is a repeated message of key and value
MESSAGES: Mapping[str, Sequence[str]] = {
    "CheckedExpr": (
        "Reference_ reference_map* = 2",
        "Type_ type_map* = 3",
        "Expr expr = 4",
        "SourceInfo source_info = 5",
    ),
    "Type_": ("int64 key = 1", "Type value = 2"),
    "Type": ("Any dyn = 1", "int32 primitive = 3", "ListType list_type = 6"),
    "Any": (),
    "ListType": ("Type elem_type = 1",),
    "Reference_": ("int64 key = 1", "Reference value = 2"),
    "Reference": ("string name = 1", "string overload_id* = 3"),
    "SourceInfo": ("Position_ positions* = 4",),
    "Position_": ("int64 key = 1", "int32 value = 2"),
    "Expr": (
        "int64 id = 2",
        "Constant const_expr = 3",
        "Ident ident_expr = 4",
        "Select select_expr = 5",
        "Call call_expr = 6",
        "List list_expr = 7",
        "Struct struct_expr = 8",
        "Comprehension comprehension_expr = 9",
    ),
    "Constant": (
        "int64 null_value = 1",
        "bool bool_value = 2",
        "int64 int64_value = 3",
        "uint64 uint64_value = 4",
        "double double_value = 5",
        "string string_value = 6",
        "bytes bytes_value = 7",
    ),
    "Ident": ("string name = 1",),
    "Select": ("Expr operand = 1", "string field = 2", "bool test_only = 3"),
    "Call": ("Expr target = 1", "string function = 2", "Expr args* = 3"),
    "List": ("Expr elements* = 1",),
    "Struct": (),
    "Comprehension": ("string iter_var = 1", "Expr iter_range = 2", "Expr accu_init = 4", "Expr loop_step = 6"),
}
SCALARS = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "double": FieldDescriptorProto.TYPE_DOUBLE,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "string": FieldDescriptorProto.TYPE_STRING,
    "uint64": FieldDescriptorProto.TYPE_UINT64,
}


@dataclass(frozen=True, slots=True)
class Node:
    """A part of an expression.

    position  the index of the character, from 0, that an error refers to
    """

    position: int


@dataclass(frozen=True, slots=True)
class Constant(Node):
    """A literal; `value` is None for null."""

    value: bool | int | float | str | bytes | None


@dataclass(frozen=True, slots=True)
class Name(Node):
    """A variable by its full name, such as ``item.price``, or the variable of a macro."""

    name: str


@dataclass(frozen=True, slots=True)
class Call(Node):
    """A function or an operator by its name, such as ``_&&_``; a method's receiver is the first argument.

    A method of both durations and times is named after the type of its receiver, such as ``duration_to_hours``.
    """

    function: str
    args: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Elements(Node):
    """A list literal."""

    elements: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Quantifier(Node):
    """The macros ``exists`` and ``all``: whether the predicate holds for any element of the list, or for all."""

    elements: Node
    variable: str
    predicate: Node
    needs_all: bool


@dataclass(frozen=True, slots=True)
class Unsupported(Node):
    """An unsupported part of an expression; `what` names it."""

    what: str


def names(node: Node) -> frozenset[str]:
    """Return all names in a tree, including the variables of macros."""
    match node:
        case Name(_, name):
            return frozenset({name})
        case Call(_, _, parts) | Elements(_, parts):
            return frozenset().union(*map(names, parts))
        case Quantifier():
            return names(node.elements) | names(node.predicate)
    return frozenset()


def find_unsupported(node: Node) -> Unsupported | None:
    """Return an unsupported part of a tree, if any."""
    match node:
        case Unsupported():
            return node
        case Call(_, _, parts) | Elements(_, parts):
            return next(filter(None, map(find_unsupported, parts)), None)
        case Quantifier():
            return find_unsupported(node.elements) or find_unsupported(node.predicate)
    return None


def read(text: str, checked: bytes) -> Node:
    """Return the tree of an expression from a serialised ``google.protobuf.Any`` of its ``cel.expr.CheckedExpr``."""
    message = _message_class("CheckedExpr").FromString(Any_.FromString(checked).value)
    names = {one.key: one.value.name for one in message.reference_map if one.value.name}
    overloads = {one.key: one.value.overload_id[0] for one in message.reference_map if one.value.overload_id}
    positions = {one.key: one.value for one in message.source_info.positions}
    mixed = frozenset(one.key for one in message.type_map if one.value.list_type.elem_type.HasField("dyn"))
    numbers = frozenset(one.key for one in message.type_map if one.value.primitive in NUMBERS)
    return _Reader(text, names, overloads, positions, mixed, numbers).node(message.expr)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Converts messages to nodes, with the reference and position of each expression id.

    mixed    the ids of the lists whose elements have no common type
    numbers  the ids of whole and other numbers
    """

    text: str
    names: Mapping[int, str]
    overloads: Mapping[int, str]
    positions: Mapping[int, int]
    mixed: frozenset[int]
    numbers: frozenset[int]

    def node(self, expr: Any) -> Node:
        position = self.positions.get(expr.id, 0)
        if expr.HasField("const_expr"):
            return Constant(position, _value_of(expr.const_expr))
        if expr.id in self.names and (expr.HasField("ident_expr") or expr.HasField("select_expr")):
            if self.text[position : position + 1] == "(":  # the checker makes has(item.price) this name
                return Unsupported(position, HAS)
            return Name(position, self.names[expr.id])
        if expr.HasField("ident_expr"):
            return Name(position, expr.ident_expr.name)
        if expr.HasField("call_expr"):
            return self._call(expr.call_expr, position, self.overloads.get(expr.id, ""))
        if expr.HasField("list_expr"):
            return self._list(expr, position)
        if expr.HasField("comprehension_expr"):
            return self._quantifier(expr.comprehension_expr, position)
        return Unsupported(position, "a field of a value" if expr.HasField("select_expr") else "a map or a message")

    def _list(self, expr: Any, position: int) -> Node:
        """Return a list; whole numbers among others become such."""
        parts = expr.list_expr.elements
        elements = tuple(map(self.node, parts))
        if expr.id not in self.mixed:
            return Elements(position, elements)
        if not self.numbers.issuperset(part.id for part in parts):
            return Unsupported(position, "a list of values of different types")
        return Elements(position, tuple(_as_float(one) if isinstance(one, Constant) else one for one in elements))

    def _call(self, call: Any, position: int, overload: str) -> Call:
        args = [call.target, *call.args] if call.HasField("target") else list(call.args)
        function = overload if overload.startswith("duration_to_") else call.function
        return Call(position, function, tuple(map(self.node, args)))

    def _quantifier(self, loop: Any, position: int) -> Node:
        """Return the quantifier of an expanded loop: that of ``exists`` starts with false and uses ``||``."""
        begin, step = _value_of(loop.accu_init.const_expr), loop.loop_step.call_expr
        if (begin, step.function) not in ((False, "_||_"), (True, "_&&_")):
            return Unsupported(position, "a macro other than exists and all")
        return Quantifier(position, self.node(loop.iter_range), loop.iter_var, self.node(step.args[1]), bool(begin))


def _as_float(number: Constant) -> Constant:
    return Constant(number.position, float(number.value))  # type: ignore[arg-type]


def _value_of(constant: Any) -> bool | int | float | str | bytes | None:
    for field, value in constant.ListFields():
        return None if field.name == "null_value" else value
    return None


@cache
def _message_class(name: str) -> Any:
    pool = descriptor_pool.DescriptorPool()
    messages = [_descriptor(message, fields) for message, fields in MESSAGES.items()]
    pool.Add(FileDescriptorProto(name="cel.proto", package=PACKAGE, syntax="proto2", message_type=messages))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))


def _descriptor(message: str, fields: Sequence[str]) -> DescriptorProto:
    return DescriptorProto(name=message, field=map(_field, fields))


def _field(text: str) -> FieldDescriptorProto:
    type_name, name, _, number = text.split()
    is_repeated = name.endswith("*")
    field = FieldDescriptorProto(
        name=name.rstrip("*"),
        number=int(number),
        label=FieldDescriptorProto.LABEL_REPEATED if is_repeated else FieldDescriptorProto.LABEL_OPTIONAL,
    )
    if type_name in SCALARS:
        field.type = SCALARS[type_name]
    else:
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{PACKAGE}.{type_name}"
    return field
