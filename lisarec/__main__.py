"""Run the command line: `python -m lisarec`."""

from app.cli.main import main

if __name__ == "__main__":
    main()
