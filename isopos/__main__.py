"""`python -m isopos` is the command `isopos`."""

from isopos.cli import main

if __name__ == "__main__":
    main()
