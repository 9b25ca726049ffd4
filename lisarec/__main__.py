"""Run the command line: `python -m lisarec`."""

from app.cli.main import main

main()
