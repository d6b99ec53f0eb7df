"""LLVM text shared by all targets, and LLVM itself: text in, assembly or object code out."""
