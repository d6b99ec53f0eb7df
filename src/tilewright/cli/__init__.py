"""The command `tilewright`. `main.py` lists the commands, `commands/` has one file for each; the rest is what they share."""
