"""`python -m isopos` is the command `isopos`."""

try:
    from isopos.cli import main
except KeyboardInterrupt:  # Ctrl-C in the first moment
    raise SystemExit(130) from None

if __name__ == "__main__":
    main()
