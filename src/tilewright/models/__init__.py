"""Models: their files (`formats/`), their tokenizers (`tokenizers/`), and what runs them."""
