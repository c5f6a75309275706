"""`python -m oxrl` is the `oxrl` command."""

from oxrl.cli import main

if __name__ == "__main__":
    main()
