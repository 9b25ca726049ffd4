"""Where commands say something: results to standard output, complaints to standard error."""

from rich.console import Console

console = Console()
complaints = Console(stderr=True)


def say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
