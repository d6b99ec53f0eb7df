"""The front end of critical functions: state objects in native memory, and a reader that makes thread-stage code of a Python function."""
