"""Source to artifact: drivers, caches, tuning tables, isolation of LLVM, export. In: trees and signatures. Out: artifacts."""
