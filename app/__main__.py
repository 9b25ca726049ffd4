"""Run the command line: `python -m app`."""

from app.cli.main import main

main()
