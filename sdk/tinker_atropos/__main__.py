"""`python -m tinker_atropos` is the command line."""

from tinker_atropos.cli import main

if __name__ == "__main__":
    main()
