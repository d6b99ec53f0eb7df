"""Models: their files (`formats/`), their tokenizers (`tokenizers/`), their networks (`architectures/`), and what runs them."""

from tilewright.models.entry import architectures, load, register

__all__ = ["architectures", "load", "register"]
