"""Critical functions at run time: the decorators, their latency, rings between threads."""
