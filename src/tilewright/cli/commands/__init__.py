"""The commands of `tilewright`, one file each."""
