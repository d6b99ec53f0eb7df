"""`python -m tilewright` is the command `tilewright`."""

from tilewright.cli.main import main

main()
