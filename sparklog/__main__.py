"""`python -m sparklog`: the command line."""

from sparklog.cli import main

main()
