"""What code generators that write text of a C-like language share."""
