"""ZynML. In: text. Out: `tree.syntax` of its functions and compute blocks. `zyn.lark` is the grammar; `format.py` prints programs anew."""
