"""The page of the command line, made from the commands' own help."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from app.cli.main import cli
from website.markdown import code, sentences, table, with_code

INTRODUCTION = """# Command line

Every command of `lisarec`, with its arguments and options.
This page is made from the commands' own help by `python -m website`; `lisarec COMMAND --help` prints the same.

`python -m app` is the same as `lisarec`.
Options that are missing come from [the settings](settings.md) in the environment, where a command uses them.
Every failure prints one line that says what to do; [Errors](errors.md#the-command-line) has the exit statuses.
"""
BRACKETS = re.compile(r" *\[([^\[\]]*)\]$")
KINDS = {
    "int": "integer",
    "int range": "integer",
    "float": "number",
    "float range": "number",
    "str": "text",
    "path": "path",
}


def page() -> str:
    """Return the page."""
    commands = [*_commands(typer.main.get_command(cli), "lisarec")]
    index = table(
        ["command", "purpose"],
        [[f"[`{name}`](#{name.replace(' ', '-')})", with_code(_summary(command))] for name, command in commands],
    )
    return "\n".join([INTRODUCTION, index, "", "\n".join(_section(name, command) for name, command in commands)])


def _commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield every command with its full name, those of groups in place of the groups."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


def _summary(command: Any) -> str:
    return sentences(_paragraphs(command)[0]).split("\n")[0]


def _paragraphs(command: Any) -> list[str]:
    return [part for part in re.split(r"\n\s*\n", command.help or "") if part.strip()]


def _section(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    parameters = [one for one in command.get_params(context) if "--help" not in one.opts]
    records = [one.get_help_record(context) for one in parameters]
    required = [record[0] for one, record in zip(parameters, records, strict=True) if _is_required_option(one)]
    usage = " ".join(map(_plain, [name, *required, *command.collect_usage_pieces(context)]))
    parts = [
        f"## {name}",
        *(with_code(sentences(text)) for text in _paragraphs(command)),
        f"```text\n{usage}\n```",
        *([table(["argument or option", "value", "default", "meaning"], map(_row, records))] if records else []),
    ]
    return "\n\n".join(parts) + "\n"


def _is_required_option(parameter: Any) -> bool:
    return bool(parameter.required and parameter.param_type_name == "option")


def _plain(record: str) -> str:
    """Return a part of a usage line with the words of people."""
    return re.sub(r"<(list\[)?str\]?>", "TEXT", record).replace("{", "").replace("}", "")


def _row(record: tuple[str, str]) -> list[str]:
    """Return name, value, default and meaning of an option or argument, from its line in a command's help."""
    names, text = record
    name, _, value = (names, "", "") if " / " in names else names.partition(" ")  # a switch with its opposite
    bracket = BRACKETS.search(text)
    facts = bracket[1].split("; ") if bracket else []
    default, variable = _fact(facts, "default: "), _fact(facts, "env var: ")
    bounds = [fact for fact in facts if ": " not in fact and fact != "required"]
    meaning = with_code(BRACKETS.sub("", text))
    if variable:
        meaning = f"{meaning} Variable: {code(variable)}."
    if "required" in facts:
        meaning = f"{meaning} **Required.**"
    return [code(name), _value(value, bounds), code(default), meaning]


def _fact(facts: list[str], label: str) -> str:
    return next((fact.removeprefix(label) for fact in facts if fact.startswith(label)), "")


def _value(value: str, bounds: list[str]) -> str:
    inner = re.fullmatch(r"<(?:list\[)?(.*?)\]?>", value)
    if inner is None:
        return code(value)
    kind = KINDS.get(inner[1])
    if kind is None:
        return " or ".join(map(code, inner[1].split("|")))
    return ", ".join([kind, *(bound.replace("x>=", "at least ").replace("<=x<=", " to ") for bound in bounds)])
