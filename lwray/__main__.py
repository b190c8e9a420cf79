"""`python -m lwray` is the same program as `lwray`."""

from lwray.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
