"""``python -m hetplan`` is the ``hetplan`` command."""

from hetplan.cli import main

if __name__ == "__main__":
    main()
