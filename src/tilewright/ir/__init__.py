"""The kernel IR: nodes, op table, text form, verifier, rewriting, emulator."""
