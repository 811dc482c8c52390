"""`python -m birkhoff` is the command `birkhoff`."""

from birkhoff.cli.main import main

if __name__ == "__main__":
    main()
