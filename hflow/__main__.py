"""`python -m hflow`."""

from hflow.cli import main

main()
