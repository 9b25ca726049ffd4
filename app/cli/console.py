"""The consoles of the commands: results go to standard output, errors to standard error."""

from rich.console import Console

console = Console()
error_console = Console(stderr=True)


def say(text: str) -> None:
    """Print a line as it is, without markup or colours."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
