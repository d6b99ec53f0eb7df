"""The kinds of devices that come with the package; `tilewright/__init__.py` registers them. One folder or module for each."""
