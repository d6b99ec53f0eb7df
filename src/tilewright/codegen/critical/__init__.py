"""Critical functions as machine code: the function itself, its CPython entry, its timing loop and its C interface."""
